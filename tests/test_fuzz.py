"""Mutated files: each loads the identical content or is refused in one sentence, fast and in little memory.

``python tests/test_fuzz.py 10000`` runs that many mutants and prints the outcomes. With a second number, the
process may hold that many megabytes; it loads random files, mutants, and files that claim all they may.

*Strict* mutants are damaged or forged without encoding anything again: a flipped bit, a cut, an inserted run,
swapped sections, another length, count or shape in the header (with a corrected checksum). They must not load
as anything but the original. *Resealed* mutants have one part changed, and every size and checksum made to
fit. If the change is consistent, that is another valid file: it may load as something else, which must be
usable and can be saved again.

Time is that of the process, so that a busy machine does not matter. Memory is the peak that tracemalloc sees
(Python, numpy and the output of zstandard), compared with the peak for the valid file. Torch and constriction
allocate elsewhere: for them the growth of the peak of the process over all mutants is bounded.
"""

from __future__ import annotations

import copy
import json
import math
import os
import resource
import subprocess
import sys
import time
import tracemalloc
from collections import Counter
from collections.abc import Callable
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from malformed import PREFIX, SECTIONS, Parts, case, closed, leb128, with_header
from oracles.fileformat import WIDTHS
from oracles.fileformat import leb128 as leb128_numbers

from pwfn import Compressed, PwfnError
from pwfn.file.format import dumps, loads

BASES = (
    "centre", "weight", "none", "channels_weight", "layers", "float64", "one_flat_layer", "own_sigmas",
    "contexts", "weight@1", "layers@1", "one_flat_layer@1",
)  # fmt: skip
MOST_SECONDS = 1.0
MOST_MEMORY = 10
MOST_GROWTH = 64 * 2**20  # bytes that the process may grow by, over all mutants

Random = np.random.Generator
Mutate = Callable[[bytes, Random], bytes]


def flipped(data: bytes, rng: Random) -> bytes:
    out = bytearray(data)
    for place in rng.integers(0, 8 * len(data), rng.integers(1, 9)).tolist():
        out[place // 8] ^= 1 << place % 8
    return bytes(out)


def flipped_early(data: bytes, rng: Random) -> bytes:
    """In the prefix and the header, where most decisions are made."""
    stop = 24 + PREFIX.unpack(data[:24])[3]
    return flipped(data[:stop], rng) + data[stop:]


def run_of(data: bytes, rng: Random) -> tuple[int, int]:
    start = int(rng.integers(0, len(data)))
    return start, min(len(data), start + int(rng.integers(1, 200)))


def overwritten(data: bytes, rng: Random) -> bytes:
    start, stop = run_of(data, rng)
    run = rng.bytes(stop - start) if rng.random() < 0.5 else bytes([rng.choice([0, 255])]) * (stop - start)
    return data[:start] + run + data[stop:]


def truncated(data: bytes, rng: Random) -> bytes:
    return data[: rng.integers(0, len(data))]


def inserted(data: bytes, rng: Random) -> bytes:
    start, stop = run_of(data, rng)
    run = rng.bytes(stop - start) if rng.random() < 0.5 else data[start:stop]
    return data[:start] + run + data[start:]


def removed(data: bytes, rng: Random) -> bytes:
    start, stop = run_of(data, rng)
    return data[:start] + data[stop:]


def spliced(data: bytes, rng: Random) -> bytes:
    """The beginning of this file and the end of another, or another's sections behind this header."""
    other = case(str(rng.choice([base for base in BASES if case(base)[1] != data])))[1]
    if rng.random() < 0.5:
        cut = int(rng.integers(24, len(data)))  # before that, the prefix and so the file would be the other's
        return data[:cut] + other[min(cut, len(other)) :]
    stop, start = (24 + PREFIX.unpack(file[:24])[3] for file in (data, other))
    return data[:stop] + other[start:]


def swapped(data: bytes, rng: Random) -> bytes:
    """Two sections change places; sometimes their sizes and checksums go with them."""
    stop, header = header_of(data)
    edges = np.cumsum([stop, *(row[1] for row in header["sections"])]).tolist()
    blocks = [data[a:b] for a, b in pairwise(edges)]
    i, j = rng.choice([k for k, block in enumerate(blocks) if block], 2, replace=False).tolist()
    blocks[i], blocks[j] = blocks[j], blocks[i]
    if rng.random() < 0.5:
        return data[:stop] + b"".join(blocks)
    rows = header["sections"]
    rows[i][1:], rows[j][1:] = rows[j][1:], rows[i][1:]
    return with_json(header, data) + b"".join(blocks)


def forged_prefix(data: bytes, rng: Random) -> bytes:
    """A size in the prefix."""
    fields = list(PREFIX.unpack(data[:24]))
    fields[int(rng.integers(1, 6))] = other_number(0, rng) % 2**16
    if rng.random() < 0.5:
        fields[int(rng.integers(3, 6))] = other_number(0, rng) % 2**32
    return PREFIX.pack(*fields) + data[24:]


def forged_length(data: bytes, rng: Random) -> bytes:
    """A size or checksum in the header."""
    stop, header = header_of(data)
    if rng.random() < 0.6:
        row = header["sections"][int(rng.integers(0, len(SECTIONS)))]
        column = int(rng.integers(1, 4))
        row[column] = other_number(row[column], rng)
    else:
        tensor = rng.choice(header["tensors"])
        key = str(rng.choice(["bytes", "crc32"]))
        tensor[key] = other_number(tensor[key], rng)
    return with_json(header, data) + data[stop:]


def forged_count(data: bytes, rng: Random) -> bytes:
    """A count, shape or choice in the header that changes how many numbers there are."""
    stop, header = header_of(data)
    kind = rng.integers(0, 7)
    tensor = rng.choice(header["tensors"])
    stored = header["untouched"]
    row = stored[int(rng.integers(0, len(stored)))] if stored else None
    if kind == 0:
        tensor["shape"] = other_shape(tensor["shape"], rng)
    elif kind == 1 and row:
        row[1] = other_shape(row[1], rng)
    elif kind == 2 and row:
        row[1] = row[1] if math.prod(row[1]) else [1]
        row[2] = str(rng.choice([name for name, width in WIDTHS.items() if width != WIDTHS[row[2]]]))
    elif kind == 3:
        sizes = header["codebooks"]["sizes"]
        place = int(rng.integers(0, len(sizes)))
        sizes[place] = other_number(sizes[place], rng)
    elif kind == 4:
        if rng.random() < 0.5:
            header["tensors"].remove(tensor)
        else:
            header["tensors"].append({**copy.deepcopy(tensor), "name": "another", "aliases": []})
    elif kind == 5:
        key = str(rng.choice(["own_table", "contexts", "continues"] if data[8] > 1 else ["own_table"]))
        tensor[key] = not tensor.get(key, False)
    else:
        others = [p for p in ("none", "centre", "weight") if p != header["posterior"]]
        header["posterior"] = str(rng.choice(others))
    return with_json(header, data) + data[stop:]


STRICT: tuple[Mutate, ...] = (
    flipped, flipped_early, overwritten, truncated, inserted, removed, spliced, swapped,
    forged_prefix, forged_length, forged_count,
)  # fmt: skip


def resealed(data: bytes, rng: Random) -> bytes:
    """One part changed, all sizes and checksums made good."""
    parts = Parts.of(data)
    part = str(rng.choice(["header", "indices", *SECTIONS[:2], *SECTIONS[3:]]))
    change = (flipped, overwritten, truncated, inserted, removed)[int(rng.integers(0, 5))]
    if part == "header":
        return parts.sealed(change(json.dumps(header_of(parts.sealed())[1]).encode(), rng))
    if part == "indices":
        place = int(rng.integers(0, len(parts.streams)))
        parts.streams[place] = change(parts.streams[place] or b"\x01\x02\x03\x04", rng)
    elif rng.random() < 0.3:
        parts.blocks[part] = change(closed(parts.contents[part]) or b"\x00", rng)
    else:
        parts.contents[part] = change(parts.contents[part] or b"\x00", rng)
    return parts.sealed()


def odd_field(data: bytes, rng: Random) -> bytes:
    """One value anywhere in the header is gone or another, of any type."""
    parts = Parts.of(data)

    def change(header: dict[str, Any]) -> None:
        if rng.random() < 0.3:
            key = str(
                rng.choice(
                    ["channels_last", "own_table", "contexts", "continues", "axis", "groups", "codebooks"]
                )
            )
            rng.choice(header["tensors"])[key] = ODD[int(rng.integers(0, 6))]
            return
        at: Any = header
        while True:
            keys = list(at) if isinstance(at, dict) else list(range(len(at)))
            key = keys[int(rng.integers(0, len(keys)))]
            if not isinstance(at[key], dict | list) or not at[key] or rng.random() < 0.1:
                break
            at = at[key]
        if rng.random() < 0.1:
            del at[key]
        elif type(at[key]) is int and rng.random() < 0.5:
            at[key] = other_number(at[key], rng)
        else:
            at[key] = copy.deepcopy(ODD[int(rng.integers(0, len(ODD)))])

    parts.late.append(change)
    return parts.sealed()


def odd_number(data: bytes, rng: Random) -> bytes:
    """One number of the frequency tables, or of the posterior's, is another."""
    parts = Parts.of(data)
    name, start, stop = "tables", 0, len(parts.contents["tables"])
    posterior = parts.contents["posterior"]
    if parts.header["posterior"] == "weight" and posterior[0] == 1 and rng.random() < 0.5:
        name, start, stop = "posterior", 9, 9 + int.from_bytes(posterior[5:9], "little")
    content = parts.contents[name]
    numbers = leb128_numbers(content[start:stop])
    for _ in range(int(rng.integers(1, 4))):
        place = int(rng.integers(0, len(numbers)))
        numbers[place] = other_number(numbers[place], rng)
    table = leb128(*numbers)
    head = content[: start - 4] + len(table).to_bytes(4, "little") if start else b""
    parts.contents[name] = head + table + content[stop:]
    return parts.sealed()


ODD: tuple[Any, ...] = (
    None, True, False, 0, 1, 2, -1, 2**48, 2**63, 2**64, 10**30, 0.5, 1e300, "", "a", "\x1b[2J", "\ud800",
    "a\nb", "float64", "bool", [], [[]], [0], [1, 1], [0, 2**48, 2**48], [2**48], [0, 0], {}, {"parts": []},
)  # fmt: skip

RESEALED: tuple[Mutate, ...] = (resealed, odd_field, odd_number)


def header_of(data: bytes) -> tuple[int, dict[str, Any]]:
    """Where the header ends, and what it says."""
    stop = 24 + PREFIX.unpack(data[:24])[3]
    header = copy.deepcopy(Parts.of(data).header)
    return stop, header


def with_json(header: dict[str, Any], data: bytes) -> bytes:
    """Another header for a file, whose version it keeps."""
    text = json.dumps(header).encode()
    return with_header(closed(text), len(text), data[8])


def other_number(number: int, rng: Random) -> int:
    """Near it, or at the edges of the allowed range; never the same."""
    near = [number + 1, max(number - 1, 0), number + 4, 2 * number, 0, 1, number // 2]
    far = [2**k for k in (8, 16, 20, 24, 31, 32, 40, 47, 48, 49, 63, 64, 70)]
    choices = [n for n in (near if rng.random() < 0.6 else [*far, *(n - 1 for n in far)]) if n != number]
    return choices[int(rng.integers(0, len(choices)))]


def other_shape(shape: list[int], rng: Random) -> list[int]:
    """A shape with another number of elements."""
    while True:
        found = list(shape) or [1]
        for _ in range(int(rng.integers(1, 3))):
            place = int(rng.integers(0, len(found)))
            found[place] = other_number(found[place], rng)
        if rng.random() < 0.2:
            found += [other_number(1, rng)]
        if math.prod(found) != math.prod(shape):
            return found


@cache
def mould(base: str) -> tuple[bytes, bytes, int]:
    """A valid file, the same saved again from what was loaded, and the memory that loading it takes."""
    data = case(base)[1]
    loads(data)  # once before: what is imported and cached the first time does not count
    found, _, memory = measured(data)
    assert isinstance(found, Compressed)
    return data, resaved(found), memory


def resaved(found: Compressed) -> bytes:
    return dumps(found, "weight" if found.weight_sigma is not None else None)


def measured(data: bytes) -> tuple[Compressed | PwfnError, float, int]:
    """What loading gives, its seconds, and the most bytes it held at once."""
    found: Compressed | PwfnError
    if not tracemalloc.is_tracing():
        tracemalloc.start()
    tracemalloc.reset_peak()
    before = tracemalloc.get_traced_memory()[0]
    start = time.process_time()
    try:
        found = loads(data)
    except PwfnError as error:
        found = error
    seconds = time.process_time() - start
    return found, seconds, tracemalloc.get_traced_memory()[1] - before


def tried(seed: int) -> str:
    """The outcome of one mutant; anything that is not allowed is raised."""
    rng = np.random.default_rng(seed)
    base = BASES[seed % len(BASES)]
    data, good, good_memory = mould(base)
    strict = rng.random() < 0.75
    mutations = STRICT if strict else RESEALED
    mutate = mutations[int(rng.integers(0, len(mutations)))]
    mutant = mutate(data, rng)
    what = f"seed {seed}: {base} {mutate.__name__}"
    try:
        found, seconds, memory = measured(mutant)
    except BaseException as error:  # a panic of an extension is no Exception
        raise AssertionError(f"{what}: {type(error).__name__}: {error}") from error
    assert seconds <= MOST_SECONDS, f"{what}: {seconds:.2f} s"
    assert memory <= MOST_MEMORY * good_memory, (
        f"{what}: {memory:,} bytes, {good_memory:,} for the valid file"
    )
    if isinstance(found, PwfnError):
        text = str(found)
        assert text.isprintable(), f"{what}: {text!r}"
        assert len(text) <= 400, f"{what}: {text}"
        return f"{mutate.__name__}: refused"
    if mutant == data or resaved(found) == good:
        return f"{mutate.__name__}: identical"
    assert not strict, f"{what}: loads as something else"
    state = found.dense_state_dict()
    assert all(state[entry.name].shape == entry.shape for entry in found.layout.entries), what
    return f"{mutate.__name__}: another valid file"


def peak() -> int:
    """Bytes that the process has held at most, torch's and constriction's included."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def outcomes(seeds: range) -> Counter[str]:
    for base in BASES:
        mould(base)
    before = peak()
    found = Counter(map(tried, seeds))
    tracemalloc.stop()
    assert peak() - before <= MOST_GROWTH
    return found


def test_mutants() -> None:
    ends = Counter(outcome.partition(": ")[2] for outcome in outcomes(range(500)).elements())
    assert ends["refused"] >= 400


def test_every_mutation_changes_files() -> None:
    """A mutation that does nothing would test nothing."""
    for mutate in (*STRICT, *RESEALED):
        for base in BASES:
            data = case(base)[1]
            changed = sum(mutate(data, np.random.default_rng(seed)) != data for seed in range(8))
            assert changed >= 7, (mutate.__name__, base)


# A process with little memory


def random_file(rng: Random) -> bytes:
    """Noise; behind the magic number, behind a sound prefix, or behind a sound header, in turn."""
    noise = rng.bytes(int(rng.integers(0, 2000)))
    data = case(str(rng.choice(BASES)))[1]
    block = closed(noise)
    heads = (b"", data[:8], with_header(block, len(noise)), data[: header_of(data)[0]])
    return heads[int(rng.integers(0, len(heads)))] + noise


def greedy_headers() -> list[bytes]:
    """Headers of 2^24 bytes of JSON, each of whose values takes many times its text once it is parsed."""
    # Text that zstd cannot shrink by much: a header may be 64 times as large as its block.
    noise = np.random.default_rng(0).bytes(270_000).hex()
    files = []
    for unit in ("{}", "[]", '{"a":0}', "0.1", '"\\u0100\\u0101"', "12345678901"):
        values = ",".join([unit] * ((2**24 - len(noise) - 40) // (len(unit) + 1)))
        text = f'{{"noise":"{noise}","record":[{values}]}}'.encode()
        files.append(with_header(closed(text), len(text)))
    return files


def greedy_shape(name: str) -> bytes:
    """A sound file of 4 · 10^8 weights of one value, which the rules on sizes allow."""
    parts = Parts.of(case(name)[1])
    weights = 400_000_000
    parts.header["tensors"][0]["shape"] = [20_000, weights // 20_000]
    one = parts.header["tensors"][0].get("contexts", False)
    parts.contents["tables"] = leb128(weights, 1, 0, 0) if one else leb128(1, 0, weights)
    parts.contents["padding"] = bytes(weights // 64)
    return parts.sealed()


def loaded_in(megabytes: int, seeds: range) -> Counter[str]:
    """Load files of all kinds in this process, which may hold so much; anything but our errors is raised.

    The limit is that on data (RLIMIT_DATA): all private memory that can be written, whoever allocates it.
    One on address space (RLIMIT_AS) also counts the libraries of torch, which are mapped from disk: 400 MB
    in a CPU build and gigabytes in others, before anything is loaded.
    """
    files = [
        (seed, data) for seed in seeds for data in (mutant_of(seed), random_file(np.random.default_rng(seed)))
    ]
    files += [(-1, data) for data in (*greedy_headers(), greedy_shape("padded"), greedy_shape("padded@1"))]
    resource.setrlimit(resource.RLIMIT_DATA, (megabytes * 2**20, megabytes * 2**20))
    found: Counter[str] = Counter()
    for seed, data in files:
        try:
            loads(data)
            found["loaded"] += 1
        except PwfnError as error:
            found["no memory" if "memory" in str(error) else "refused"] += 1
        except BaseException as error:
            raise AssertionError(f"seed {seed}: {type(error).__name__}: {error}") from error
    return found


def mutant_of(seed: int) -> bytes:
    rng = np.random.default_rng(seed)
    mutations = (*STRICT, *RESEALED)
    return mutations[seed % len(mutations)](case(str(rng.choice(BASES)))[1], rng)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere this limit does not count what is mapped")
def test_512_megabytes_are_enough_to_refuse_anything() -> None:
    command = [sys.executable, __file__, "300", "512"]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    ends = {words: int(number.replace(",", "")) for number, words in (
        line.split(maxsplit=1) for line in done.stdout.splitlines()
    )}  # fmt: skip
    assert ends["refused"] >= 400
    assert ends["no memory"] >= 3  # the limit is felt: without it, all of them would be read


if __name__ == "__main__":
    count = range(int(sys.argv[1]))
    ended = outcomes(count) if len(sys.argv) < 3 else loaded_in(int(sys.argv[2]), count)
    for outcome, number in sorted(ended.items()):
        print(f"{number:7,}  {outcome}")
