"""The .pwfn file: exact round trips, agreement with a reader of the specification, and every refusal."""

from __future__ import annotations

import ast
import io
import json
import math
import re
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zstandard
from golden import make
from malformed import CASES, Parts, case, mixed, version_of, with_header
from malformed_faults import FAULTS
from oracles import fileformat as oracle
from torch import Tensor, nn

import pwfn
from pwfn import Compressed, FileError, Layout
from pwfn.file import writer
from pwfn.file.content import Division
from pwfn.file.format import Reader, dumps, load, loads


def bits(tensor: Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    """Bit for bit, NaN and the sign of zero included."""
    return list(a) == list(b) and all(
        a[k].dtype == b[k].dtype and a[k].shape == b[k].shape and bits(a[k]) == bits(b[k]) for k in a
    )


def small(**changes: Any) -> Compressed:
    layout = Layout.of(nn.Linear(3, 1, bias=False))
    whole = Compressed.of(layout, torch.tensor([0.0, 1.0, 0.0]), torch.ones(3), {})
    return replace(whole, **changes)


@pytest.fixture(params=CASES)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_round_trip_is_exact(name: str) -> None:
    compressed, data = case(name)
    found = loads(data)
    assert found.layout == compressed.layout  # every field of every entry, and what was left out
    assert found.divisions == compressed.divisions
    assert found.record == compressed.record
    assert torch.equal(found.indices, compressed.indices)
    assert found.indices.dtype == compressed.indices.dtype
    assert [bits(book) for book in found.codebooks] == [bits(book) for book in compressed.codebooks]
    assert same(found.untouched, compressed.untouched)
    dense, wanted = found.dense_state_dict(), compressed.dense_state_dict()
    assert same(dense, wanted)
    for entry in found.layout.entries:  # channels last where they were
        assert dense[entry.name].stride() == wanted[entry.name].stride()
    posterior = CASES[name][1]
    assert (found.sigma is None) == (posterior == "none")
    if posterior == "weight":
        assert bits(found.weight_sigma) == bits(compressed.weight_sigma)
    assert dumps(found, posterior, version_of(name)) == data  # equal input gives equal bytes


def test_paths_file_objects_and_bytes_are_the_same(tmp_path: Path) -> None:
    compressed, data = case("centre")
    path, file = tmp_path / "net.pwfn", io.BytesIO()
    assert [compressed.save(path), compressed.save(str(path)), compressed.save(file)] == [len(data)] * 3
    assert compressed.dumps() == dumps(compressed) == path.read_bytes() == file.getvalue() == data
    with path.open("rb") as opened:
        files = (path, str(path), opened, io.BytesIO(data), data, bytearray(data), memoryview(data))
        for found in (*map(load, files), loads(data)):
            assert same(found.dense_state_dict(), compressed.dense_state_dict())
    assert same(loads(memoryview(data)).untouched, compressed.untouched)
    assert pwfn.load is load
    assert pwfn.loads is loads


class Slow(io.RawIOBase):
    """A stream that gives a few bytes at a time, as a socket may, or fails on the way."""

    def __init__(self, data: bytes, fails_at: int | None = None) -> None:
        self.data, self.at, self.fails_at = data, 0, fails_at

    def readable(self) -> bool:
        return True

    def readinto(self, into: Any) -> int:
        if self.fails_at is not None and self.at >= self.fails_at:
            raise OSError(5, "Input/output error")
        part = self.data[self.at : self.at + min(len(into), 7)]
        into[: len(part)] = part
        self.at += len(part)
        return len(part)


def test_a_stream_is_read_to_its_end_and_its_failure_is_a_sentence() -> None:
    compressed, data = case("centre")
    assert same(load(Slow(data)).dense_state_dict(), compressed.dense_state_dict())
    for place in (0, 10, 24, 200):
        with pytest.raises(FileError, match="Input/output error"):
            load(Slow(data, fails_at=place))
    with pytest.raises(FileError, match="binary mode"):
        load(io.StringIO("text"))  # type: ignore[arg-type]
    closed = io.BytesIO(data)
    closed.close()
    for source in (closed, None, 5, "a\0b"):
        with pytest.raises(FileError):
            load(source)  # type: ignore[arg-type]


def test_the_hash_of_the_content_is_that_of_the_specification(name: str) -> None:
    data = case(name)[1]
    assert loads(data).content_sha256() == oracle.content_sha256(oracle.read(data))


def test_the_hash_of_the_content_is_that_of_the_network_and_not_of_its_record() -> None:
    data = case("centre")[1]
    whole = loads(data)
    wanted = whole.content_sha256()
    assert replace(whole, record={"note": "another"}).content_sha256() == wanted
    # The same network in other codings: a codebook per layer, and sigma per weight.
    divided = Compressed.of(
        whole.layout, whole.values(), whole.sigma, whole.untouched, divide=lambda entry: (0, 1)
    )
    assert loads(divided.dumps(posterior="weight")).content_sha256() == wanted
    values, sigma = whole.values(), whole.sigma
    assert sigma is not None
    tensor = next(iter(whole.untouched))
    others = [
        Compressed.of(whole.layout, values.roll(1), sigma, whole.untouched),
        Compressed.of(whole.layout, values, sigma * 2, whole.untouched),
        Compressed.of(whole.layout, values, None, whole.untouched),
        replace(whole, untouched={**whole.untouched, tensor: whole.untouched[tensor] + 1}),
        replace(whole, untouched={**whole.untouched, "one more": torch.zeros(1)}),
        replace(whole, record={"activations": {"bits": 4}}),
    ]
    assert len({wanted, *(other.content_sha256() for other in others)}) == 1 + len(others)


def test_save_adds_to_the_record() -> None:
    file = io.BytesIO()
    replace(small(), record={"a": 1, "b": 2}).save(file, record={"b": 3, "c": 4})
    assert loads(file.getvalue()).record == {"a": 1, "b": 3, "c": 4}


def test_a_reader_written_from_the_specification_agrees(name: str) -> None:
    data = case(name)[1]
    ours, theirs = loads(data), oracle.read(data)
    dense = ours.layout.views(ours.values())
    assert np.concatenate([part.reshape(-1) for part in theirs.values]).tobytes() == bits(ours.values())
    assert np.concatenate([part.reshape(-1) for part in theirs.indices]).tolist() == ours.indices.tolist()
    for tensor, values in zip(theirs.header["tensors"], theirs.values, strict=True):
        for alias in (tensor["name"], *tensor.get("aliases", [])):
            assert torch.equal(dense[alias], torch.from_numpy(np.array(values)).to(dense[alias].dtype)), alias
            assert str(dense[alias].dtype) == f"torch.{tensor['dtype']}"
    assert theirs.untouched == {key: bits(tensor) for key, tensor in ours.untouched.items()}
    shapes = [shape for _, shape, _ in theirs.header["untouched"]]
    assert [list(tensor.shape) for tensor in ours.untouched.values()] == shapes
    assert (theirs.sigma is None) == (ours.sigma is None)
    if ours.sigma is not None and theirs.sigma is not None:
        assert theirs.sigma.tobytes() == bits(ours.sigma)


def test_sigma_of_a_centre_is_the_root_mean_square() -> None:
    layout = Layout.of(nn.Linear(4, 1, bias=False))
    values = torch.tensor([0.5, -1.0, 0.5, 0.5])
    found = loads(dumps(Compressed.of(layout, values, torch.tensor([1.0, 0.25, 2.0, 2.0]), {})))
    root = np.float32(math.sqrt(3.0))  # (1 + 4 + 4) / 3
    assert found.centre_sigma is not None
    assert found.centre_sigma[0].tolist() == [0.25, root]
    assert found.sigma is not None
    assert found.sigma.tolist() == [root, 0.25, root, root]


def test_sizes_add_up_and_are_near_the_entropy(name: str) -> None:
    """Streams and tables are not above the pooled entropy and one table."""
    compressed, data = case(name)
    sizes = Reader(io.BytesIO(data)).sizes
    assert sum(sizes) == len(data)
    assert compressed.layout.size <= 2**20 + {1: 64, 2: 1024}[version_of(name)] * len(data)
    assert (sizes.padding > 0) == name.startswith("padded")
    assert (sizes.posterior > 0) == (CASES[name][1] != "none")
    counts = np.bincount(compressed.indices.numpy())
    present = np.flatnonzero(counts)
    shares = counts[present] / counts.sum()
    pooled = -compressed.layout.size * float((shares * np.log2(shares)).sum()) / 8
    parts = Parts.of(data)
    assert sum(map(len, parts.streams)) == sizes.indices
    # LEB128: a byte for every seven bits of the number of symbols, the gaps and the counts.
    numbers = [len(present), *np.diff(present, prepend=-1) - 1, *counts[present]]
    one_table = sum(max(1, -(-int(number).bit_length() // 7)) for number in numbers)
    # A stream is whole words and ends with the state of the coder: 8 bytes each.
    allowed = pooled * 1.0001 + one_table + 8 * len(parts.streams)
    assert sizes.indices + len(parts.contents["tables"]) <= allowed


def test_conjugated_and_transposed_views_are_stored_as_they_look() -> None:
    plain = torch.tensor([[1 + 2j, 3 - 4j]])
    kept = {"conjugate": plain.conj(), "turned": plain.t(), "negative": plain.conj().imag}
    kept["none"] = torch.zeros(1).expand(0, 1)
    found = loads(dumps(small(untouched=kept))).untouched
    assert found["conjugate"].tolist() == [[1 - 2j, 3 + 4j]]
    assert found["turned"].tolist() == [[1 + 2j], [3 - 4j]]
    assert found["negative"].tolist() == [[-2.0, 4.0]]


def test_a_codebook_may_serve_several_parts_in_any_order_or_none() -> None:
    layout = Layout.of(nn.Sequential(nn.Linear(2, 4, bias=False), nn.Linear(4, 2, bias=False)))
    books = (torch.tensor([-1.0, 1.0]), torch.tensor([0.0, 0.5, 2.0]), torch.tensor([9.0]))
    divisions = (Division((1, 0), 0), Division((0, 1, 1, 0), 1))
    indices = torch.tensor([2, 1, 0, 2, 0, 1, 1, 0, 1, 2, 0, 1, 0, 1, 2, 0], dtype=torch.uint8)
    data = dumps(Compressed(layout, books, divisions, indices, {}))
    assert loads(data).values().tolist() == [2, 0.5, 0, 2, -1, 1, 1, -1, 1, 2, 0, 1, -1, 0.5, 2, -1]
    assert oracle.read(data).values[1].tolist() == [[1, 2, 0, 1], [-1, 0.5, 2, -1]]


def test_a_header_that_compresses_well_stays_within_its_limit() -> None:
    """Two megabytes of one letter are stored as they are: a reader would not unpack that much."""
    compressed = replace(mixed(), record={"note": "a" * 2**21})
    data = dumps(compressed)
    assert loads(data).record == compressed.record
    assert len(data) > 2**21


def test_no_module_of_the_package_can_run_what_is_in_a_file() -> None:
    """None imports pickle or the like, or calls torch.load or eval."""
    files = list((Path(pwfn.__file__).parent / "file").glob("*.py"))
    assert len(files) > 5
    for node in (node for file in files for node in ast.walk(ast.parse(file.read_text()))):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        assert not any(re.match(r"(pickle|marshal|shelve|dill|cloudpickle|importlib)\b", n) for n in names)
        if isinstance(node, ast.Attribute | ast.Name):
            called = node.attr if isinstance(node, ast.Attribute) else node.id
            assert called not in ("eval", "exec", "__import__")
            assert ast.unparse(node) not in ("torch.load", "np.load", "torch.save")


# Files of every version stay readable

GOLDEN = sorted(path.stem for path in make.HERE.glob("*.pwfn"))


@pytest.mark.parametrize("stem", GOLDEN)
def test_golden_files(stem: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They load as what was written down, hold the network they were made of, and are written bit for bit.

    A newer zstd or constriction may compress to other bytes; this test would show it.
    """
    data = (make.HERE / f"{stem}.pwfn").read_bytes()
    expected = json.loads((make.HERE / f"{stem}.json").read_text())
    found = loads(data)
    assert make.content(found) == expected
    for name, facts in expected["dense"].items():
        tensor = torch.tensor(facts["values"], dtype=getattr(torch, facts["dtype"].removeprefix("torch.")))
        assert bits(tensor) == bits(found.dense_state_dict()[name]), name
    compressed, posterior = make.networks()[stem]
    assert found.layout == compressed.layout
    assert same(found.dense_state_dict(), compressed.dense_state_dict())
    monkeypatch.setattr(writer, "WRITER", Reader(io.BytesIO(data)).header.writer)
    version = data[8]
    assert dumps(found, posterior, version) == dumps(compressed, posterior, version) == data


def test_hashes_that_people_have_pinned_stay_what_they_are() -> None:
    pinned = {
        "v1_centre": "5c74465f1f1c967aed443281815e49120dc06ae5b72c638f2b0d9cb1de0714f8",
        "v1_channels_weight": "1e6c4cf3e47d61a37cc18fd6d701c0a170167259af169e5f0a4c824f31e88e2a",
        "v2_channels_weight": "1e6c4cf3e47d61a37cc18fd6d701c0a170167259af169e5f0a4c824f31e88e2a",
        "v2_contexts": "27f08c344e3cf499fdf6ab104762a1d72237a46b59c2dcf0904e6821dfd14f34",
    }
    assert {stem: load(make.HERE / f"{stem}.pwfn").content_sha256() for stem in pinned} == pinned


def test_golden_files_are_there_and_are_not_made_again() -> None:
    assert {"v1_centre", "v1_channels_weight", "v2_channels_weight", "v2_contexts"} <= set(GOLDEN)
    assert all(tensor.contexts for tensor in Reader(make.HERE / "v2_contexts.pwfn").header.tensors)
    before = {file: (file.read_bytes(), file.stat().st_mtime_ns) for file in make.HERE.glob("*.*")}
    make.main()
    assert {file: (file.read_bytes(), file.stat().st_mtime_ns) for file in make.HERE.glob("*.*")} == before


# What cannot be saved


@pytest.mark.parametrize(
    ("change", "posterior", "message"),
    [
        ({}, "always", "'always': allowed is one of none, tensor, centre, weight"),
        ({"weight_sigma": None}, "centre", "no sigma of training"),
        ({"weight_sigma": None, "centre_sigma": (torch.ones(2),)}, "weight", "posterior='centre'"),
        ({"codebooks": (torch.tensor([1.0, 0.0]),)}, "none", "ascending"),
        ({"codebooks": (torch.tensor([1.0, 1.0]),)}, "none", "ascending"),
        ({"codebooks": (torch.tensor([1.0, math.nan]),)}, "none", "finite"),
        ({"codebooks": (torch.tensor([1.0, math.inf]),)}, "none", "finite"),
        ({"codebooks": (torch.tensor([0.0, 1.0]).double(),)}, "none", "torch.float32"),
        ({"indices": torch.tensor([0, 1, 2])}, "none", "'weight': an index"),
        ({"indices": torch.tensor([0, 1, -1])}, "none", "'weight': an index"),
        ({"indices": torch.tensor([0, 1])}, "none", "2 indices for 3 weights"),
        ({"weight_sigma": torch.tensor([0.1, -0.1, 0.1])}, "weight", "negative or not finite"),
        ({"weight_sigma": torch.tensor([0.1, math.nan, 0.1])}, "centre", "negative or not finite"),
        ({"weight_sigma": torch.ones(3).double()}, "weight", "torch.float64"),
        ({"untouched": {"weight": torch.ones(3)}}, "none", "'weight' twice"),
        ({"untouched": {"a": torch.ones(3).to_sparse()}}, "none", "make it dense"),
        ({"untouched": {"a": torch.ones(3, dtype=torch.float8_e4m3fn)}}, "none", "float8_e4m3fn"),
        ({"untouched": {"a\nb": torch.ones(3)}}, "none", "control characters"),
        ({"record": {"loss": math.nan}}, "none", "JSON"),
        ({"record": {"model": object()}}, "none", "JSON"),
        ({"record": {"half": "\ud800"}}, "none", "JSON"),
        ({"record": {"long": "x" * 2**24}}, "none", "shorten the record"),
    ],
)  # fmt: skip
def test_what_cannot_be_saved(change: dict[str, Any], posterior: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "net.pwfn"
    path.write_text("old")
    with pytest.raises(FileError, match=message) as caught:
        small(**change).save(path, posterior=posterior)
    assert str(caught.value).startswith(f"{path}: ")
    assert "\n" not in str(caught.value)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


# What cannot be loaded: a valid file is changed in one place, its sizes and checksums are made to fit


def refused(data: bytes, message: str) -> None:
    """One sentence that names the fault."""
    with pytest.raises(FileError) as caught:
        loads(data)
    text = str(caught.value)
    assert re.search(message, text), text
    assert "\n" not in text
    assert len(text) < 400


def test_sealing_alone_changes_nothing(name: str) -> None:
    compressed, data = case(name)
    assert same(loads(Parts.of(data).sealed()).dense_state_dict(), compressed.dense_state_dict())


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda d: b"", "not a .pwfn file"),
        (lambda d: d[:23], "not a .pwfn file"),
        (lambda d: b"PK\x03\x04" + d[4:], "not a .pwfn file"),
        (lambda d: d[:8] + b"\x03\x00" + d[10:], "version 3 .*update pwfn"),
        (lambda d: d[:8] + b"\x00\x00" + d[10:], "version 0"),
        (lambda d: d[:10] + b"\x01\x00" + d[12:], "flags 0x0001"),
        (lambda d: d[:12] + struct.pack("<I", 2**24 + 1) + d[16:], "16,777,217 bytes"),
        (lambda d: d[:16] + struct.pack("<I", 2**32 - 1) + d[20:], "4,294,967,295 bytes"),
        (lambda d: d[:12] + struct.pack("<I", len(d)) + d[16:], "truncated"),
        (lambda d: d[:24], "truncated"),
        (lambda d: d[:20] + bytes(4) + d[24:], "header: .*checksum"),
        (lambda d: d[:30] + bytes([d[30] ^ 1]) + d[31:], "header: .*checksum"),
        (lambda d: d[:16] + struct.pack("<I", 5) + d[20:], "header: .* 5 bytes"),
        (lambda d: d[:-1], "truncated"),
        (lambda d: d + b"\x00", "too long"),
        (lambda d: with_header(b"", 0) + d, "header: .*kind none"),
        (lambda d: with_header(b"\x07abc", 3), "header: .*kind 07"),
        (lambda d: with_header(b"\x00abc", 3), "not JSON"),
        (lambda d: with_header(b"\x00abc", 4), "header: .*3 bytes"),
        (lambda d: with_header(b"\x01" + zstd(b" " * 2**24, 19), 2**24), "header: .*claims"),  # a bomb
    ],
)  # fmt: skip
def test_bad_beginnings_and_ends(spoil: Callable[[bytes], bytes], message: str) -> None:
    refused(spoil(case("centre")[1]), message)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"", "kind none"),
        (b"[]", "an object is needed"),
        (b"{", "not JSON"),
        (b"\xff\xfe", "not JSON"),
        (b"[" * 100_000, "too deeply"),
        (b'{"a":' * 100_000, "too deeply"),
        (b'{"record": NaN}', "NaN"),
        (b'{"record": -Infinity}', "-Infinity"),
        (b'{"record": 1e999}', "1e999"),
        (b'{"record": 1, "record": 2}', "twice"),
        (b"1" * 5000, "not JSON"),
        (b'{"record": {"a": "\\ud800"}}', "surrogates"),
        (b"{} {}", "not JSON"),
    ],
)
def test_headers_that_are_not_json(text: bytes, message: str) -> None:
    refused(Parts.of(case("centre")[1]).sealed(text), message)


REQUIRED = {
    "": ("writer", "tensors", "left_out", "codebooks", "posterior", "untouched", "record", "sections"),
    "tensors": ("name", "shape", "dtype", "type", "kind", "bytes", "crc32"),
    "left_out": ("name", "shape", "dtype", "reason"),
    "codebooks": ("dtype", "sizes"),
}
ILL_TYPED: dict[str, tuple[Any, ...]] = {
    "writer": (1, None, ["a"], "a\nb"),
    "tensors": (1, None, {}, [], [1], "a"),
    "left_out": (1, None, {}, [1]),
    "codebooks": (1, None, []),
    "posterior": (1, None, [], "some"),
    "untouched": (1, None, {}, [1], [["a"]], [["a", [1], "float32", 1]], [[1, [1], "float32"]]),
    "record": (1, None, []),
    "sections": (1, None, {}, [], [1], [["codebooks", 1, 1]]),
    "tensors.name": (1, None, [], "a\x1bb"),
    "tensors.shape": (1, None, [-1], [1.0], [True], ["1"], [2**49], [2**30] * 2, [1] * 17, [0, 2**40, 2**40]),
    "tensors.dtype": (1, None, [], "float31", "torch.float32", "int32", "bool", "complex64"),
    "tensors.layer": (1, None, []),
    "tensors.type": (1, None),
    "tensors.kind": (1, None, "gain"),
    "tensors.aliases": (1, None, "a", [1]),
    "tensors.input_axis": (-1, 9, 1.0, "0", True),
    "tensors.groups": (0, -1, 7, 1.5, None),
    "tensors.attention": (1, [], {}, {"parts": ["q"], "heads": 0, "axis": 0},
                          {"parts": 1, "heads": 1, "axis": 0}, {"parts": ["q"], "heads": 1, "axis": 9},
                          {"parts": ["q"], "heads": 7, "axis": 0}),
    "tensors.channels_last": (1, None, "yes"),
    "tensors.codebooks": (1, None, [], [-1], [1], [0, 0, 0], [2**40]),
    "tensors.axis": (-1, 9, None, 0.0),
    "tensors.own_table": (1, None, 0),
    "tensors.contexts": (1, None, 0),
    "tensors.continues": (1, None, 0, True),
    "tensors.bytes": (-1, 1.0, None, "1", 2**49),
    "tensors.crc32": (-1, 1.0, None, "1"),
    "left_out.name": (1, None),
    "left_out.shape": (1, None, [-1]),
    "left_out.dtype": (1, "int3"),
    "left_out.reason": (1, None),
    "left_out.aliases": (1, [1]),
    "codebooks.dtype": (1, "float16", "bfloat16", "float64"),
    "codebooks.sizes": (1, None, [], [0], [2**24 + 1], [-1], [1.0], [True]),
}  # fmt: skip


def at(header: dict[str, Any], where: str) -> dict[str, Any]:
    """The object that a field belongs to; the first of a list."""
    found = header[where] if where else header
    return found[0] if isinstance(found, list) else found


@pytest.mark.parametrize(("where", "key"), [(w, k) for w, keys in REQUIRED.items() for k in keys])
def test_missing_fields(where: str, key: str) -> None:
    parts = Parts.of(case("centre")[1])
    parts.late.append(lambda header: at(header, where).pop(key) and None)
    refused(parts.sealed(), rf"has no .*{key}$")


@pytest.mark.parametrize(("field", "value"), [(f, v) for f, values in ILL_TYPED.items() for v in values])
def test_ill_typed_fields(field: str, value: Any) -> None:
    where, _, key = field.rpartition(".")
    parts = Parts.of(case("centre")[1])
    parts.late.append(lambda header: at(header, where).__setitem__(key, value))
    refused(parts.sealed(), "")


def test_the_fault_names_its_field_and_the_file(tmp_path: Path) -> None:
    parts = Parts.of(case("centre")[1])
    parts.header["tensors"][3]["groups"] = 1.5
    refused(parts.sealed(), r"tensors\[3\]\.groups is 1\.5: a whole number from 0 to 2\^48 is needed$")
    path = tmp_path / "net.pwfn"
    path.write_bytes(parts.sealed())
    for place, message in (
        (path, "the header"),
        (tmp_path / "none", "No such file"),
        (tmp_path, "is a folder"),
    ):
        with pytest.raises(FileError, match=f"^{re.escape(str(place))}: {message}"):
            load(place)


@pytest.mark.parametrize("section", ["codebooks", "tables", "indices", "posterior", "untouched"])
def test_a_damaged_section_and_its_file_are_named_once(section: str, tmp_path: Path) -> None:
    data = bytearray(case("centre")[1])
    sizes = Reader(data).sizes  # in the order of the file
    data[sum(sizes[: sizes._fields.index(section)])] ^= 1
    path = tmp_path / "net.pwfn"
    path.write_bytes(data)
    with pytest.raises(FileError, match=f"^{re.escape(str(path))}: section '{section}': it is damaged"):
        load(path)


@pytest.mark.parametrize("fault", FAULTS)
def test_spoilt_files(fault: str) -> None:
    base, spoil, message = FAULTS[fault]
    parts = Parts.of(case(base)[1])
    spoil(parts)
    refused(parts.sealed(), message)


@pytest.mark.parametrize("section", ["codebooks", "tables", "posterior", "untouched"])
def test_blocks_that_do_not_unpack(section: str) -> None:
    parts = Parts.of(case("weight@1")[1])
    content = parts.contents[section]
    unsized = zstandard.ZstdCompressor(level=3, write_content_size=False).compress(content)
    bad = (
        b"\x01nothing",
        b"\x03" + zstd(content),
        b"\x01" + zstd(content)[:-3],
        b"\x01" + zstd(content) + b"\0",
    )
    for block in (*bad, b"\x01" + unsized):
        parts.blocks[section] = block
        refused(parts.sealed(), f"section '{section}': the block")


def zstd(raw: bytes, level: int = 3) -> bytes:
    return zstandard.ZstdCompressor(level=level).compress(raw)


def test_fields_that_are_not_known_are_ignored() -> None:
    compressed, data = case("centre")
    parts = Parts.of(data)
    parts.header["later"] = {"a": 1}
    parts.header["tensors"][0]["later"] = 1
    assert same(loads(parts.sealed()).dense_state_dict(), compressed.dense_state_dict())


def test_a_folder_is_told_to_be_one(tmp_path: Path) -> None:
    with pytest.raises(FileError, match=r"is a folder: name a file in it"):
        load(tmp_path)


def test_the_default_device_of_the_caller_does_not_matter(tmp_path: Path) -> None:
    layout = Layout.of(nn.Linear(4, 3))
    small = Compressed.of(layout, torch.arange(15.0) % 4, None, {})
    small.save(tmp_path / "small.pwfn")
    expected = small.apply_to(nn.Linear(4, 3))
    for weights in ("dense", "indices"):
        model = nn.Linear(4, 3)
        with torch.device("meta"):
            loaded = load(tmp_path / "small.pwfn").apply_to(model, weights=weights)
        assert loaded(torch.eye(4)).equal(expected(torch.eye(4)))
