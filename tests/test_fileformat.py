"""The .pwfn file: exact round trips, agreement with a reader of the specification, and every refusal."""

from __future__ import annotations

import ast
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
from malformed import CASES, Mixed, Parts, case, mixed, with_header
from malformed_faults import SPOILT
from oracles import fileformat as oracle
from torch import Tensor, nn

import pwfn
from pwfn import Compressed, FileError, Layout, LayoutError
from pwfn.file.coder import Table
from pwfn.file.compressed import Division
from pwfn.file.format import Posterior, Reader, dumps, load, save


def bits(tensor: Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    """Bit for bit, NaN and the sign of zero included."""
    return list(a) == list(b) and all(
        a[k].dtype == b[k].dtype and a[k].shape == b[k].shape and bits(a[k]) == bits(b[k]) for k in a
    )


@pytest.fixture(params=CASES)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "net.pwfn"


def test_round_trip_is_exact(name: str, path: Path) -> None:
    compressed, data = case(name)
    assert compressed.save(path, posterior=CASES[name][1]) == len(data)
    assert path.read_bytes() == data  # equal input gives equal bytes
    found = load(path)
    assert found.layout == compressed.layout  # every field of every entry, and what was left out
    assert found.divisions == compressed.divisions
    assert found.record == compressed.record
    assert torch.equal(found.indices, compressed.indices)
    assert found.indices.dtype == compressed.indices.dtype
    assert [bits(book) for book in found.codebooks] == [bits(book) for book in compressed.codebooks]
    assert same(found.untouched, compressed.untouched)
    assert same(found.dense_state_dict(), compressed.dense_state_dict())
    for entry in compressed.layout.entries:  # channels last where they were
        strides = [c.dense_state_dict()[entry.name].stride() for c in (found, compressed)]
        assert strides[0] == strides[1], entry.name
    if CASES[name][1] == "none":
        assert found.sigma is None
    if CASES[name][1] == "weight":
        assert found.weight_sigma is not None
        assert compressed.weight_sigma is not None
        assert bits(found.weight_sigma) == bits(compressed.weight_sigma)


def test_saving_again_gives_the_same_bytes(name: str, path: Path) -> None:
    path.write_bytes(case(name)[1])
    assert dumps(load(path), Posterior(CASES[name][1])) == case(name)[1]


def test_a_reader_written_from_the_specification_agrees(name: str, path: Path) -> None:
    path.write_bytes(case(name)[1])
    ours, theirs = load(path), oracle.read(path)
    dense = ours.layout.views(ours.values())
    whole = np.concatenate([part.reshape(-1) for part in theirs.values])
    assert whole.tobytes() == bits(ours.values())
    assert np.concatenate([part.reshape(-1) for part in theirs.indices]).tolist() == ours.indices.tolist()
    for tensor, values in zip(theirs.header["tensors"], theirs.values, strict=True):
        for alias in (tensor["name"], *tensor.get("aliases", [])):
            assert torch.equal(dense[alias], torch.from_numpy(np.array(values)).to(dense[alias].dtype)), alias
            assert str(dense[alias].dtype) == f"torch.{tensor['dtype']}"
    assert theirs.untouched == {key: bits(tensor) for key, tensor in ours.untouched.items()}
    assert [list(ours.untouched[n].shape) for n, _, _ in theirs.header["untouched"]] == [
        shape for _, shape, _ in theirs.header["untouched"]
    ]
    assert (theirs.sigma is None) == (ours.sigma is None)
    if ours.sigma is not None and theirs.sigma is not None:
        assert theirs.sigma.tobytes() == bits(ours.sigma)


def test_sigma_of_a_centre_is_the_root_mean_square(path: Path) -> None:
    layout = Layout.of(nn.Linear(4, 1, bias=False))
    values = torch.tensor([0.5, -1.0, 0.5, 0.5])
    sigma = torch.tensor([1.0, 0.25, 2.0, 2.0])
    Compressed.of(layout, values, sigma, {}).save(path)
    found = load(path)
    assert found.centre_sigma is not None
    assert found.centre_sigma[0].tolist() == [0.25, np.float32(math.sqrt(3.0))]  # (1 + 4 + 4) / 3
    assert found.sigma is not None
    assert found.sigma.tolist() == [np.float32(math.sqrt(3.0)), 0.25] + [np.float32(math.sqrt(3.0))] * 2


def test_sizes_add_up_to_the_file(name: str, path: Path) -> None:
    compressed, data = case(name)
    path.write_bytes(data)
    reader = Reader(path)
    assert sum(reader.sizes) == len(data) == reader.file_bytes
    assert sum(stream.size for stream in reader.header.streams) == reader.sizes.indices
    assert compressed.layout.size <= 2**20 + 64 * len(data)
    assert (reader.sizes.padding > 0) == (name == "padded")
    assert (reader.sizes.posterior > 0) == (CASES[name][1] != "none")


def test_streams_and_tables_are_not_above_pooled_entropy_and_one_table(name: str, path: Path) -> None:
    compressed, data = case(name)
    path.write_bytes(data)
    counts = np.bincount(compressed.indices.numpy())
    shares = counts[counts > 0] / counts.sum()
    pooled = -compressed.layout.size * float((shares * np.log2(shares)).sum()) / 8
    parts = Parts.of(data)
    one_table = len(Table.of_counts(counts).to_bytes())
    # A stream is whole words and ends with the coder's state: 8 bytes for each.
    allowed = pooled * 1.0001 + one_table + 8 * len(parts.streams)
    assert sum(map(len, parts.streams)) + len(parts.contents["tables"]) <= allowed


def test_one_tensor_alone(name: str, path: Path) -> None:
    """With the streams of all other tensors destroyed; load() then fails."""
    compressed, data = case(name)
    path.write_bytes(data)
    reader = Reader(path)
    dense = compressed.dense_state_dict()
    start = len(data) - sum(reader.sizes[4:])
    for position, entry in enumerate(compressed.layout.entries):
        parts = Parts.of(data)
        ruined = b"".join(
            stream if i == position else bytes(byte ^ 0x5A for byte in stream)
            for i, stream in enumerate(parts.streams)
        )
        path.write_bytes(data[: start - len(ruined)] + ruined + data[start:])
        alone = Reader(path)
        for alias in (entry.name, *entry.aliases):
            assert same({"": alone.tensor(alias)}, {"": dense[alias]})
        assert torch.equal(alone.indices(entry.name).reshape(-1), compressed.indices[entry.span])
        assert alone.indices(entry.name).shape == entry.shape
        others = [s for i, s in enumerate(parts.streams) if i != position and s]
        if others:
            with pytest.raises(FileError, match="checksum"):
                load(path)


def test_a_tensor_that_is_not_there(path: Path) -> None:
    path.write_bytes(case("centre")[1])
    with pytest.raises(LayoutError, match="'nothing'"):
        Reader(path).tensor("nothing")


def test_apply_to_another_architecture_lists_names_and_shapes(path: Path) -> None:
    path.write_bytes(case("centre")[1])
    found = load(path)
    target = Mixed()
    found.apply_to(target)
    assert bits(target.conv.weight.detach()) == bits(found.dense_state_dict()["conv.weight"])
    other = Mixed()
    other.conv = nn.Conv2d(3, 5, 3)
    del other.shift
    other.extra = nn.Linear(2, 3, bias=False)
    with pytest.raises(LayoutError) as caught:
        found.apply_to(other)
    for part in (
        "conv.weight is 5×3×3×3 in the model, 4×3×3×3 here",
        "conv.bias is 5 in the model, 4 here",
        "shift is absent in the model, 2 here",
        "extra.weight is 3×2 in the model, absent here",
    ):
        assert part in str(caught.value)


def test_lazily_conjugated_and_turned_tensors_are_stored_as_they_look(path: Path) -> None:
    layout = Layout.of(nn.Linear(2, 1, bias=False))
    plain = torch.tensor([[1 + 2j, 3 - 4j]])
    kept = {"conjugate": plain.conj(), "turned": plain.t(), "negative": plain.conj().imag}
    Compressed.of(layout, torch.ones(2), None, kept).save(path, posterior="none")
    found = load(path).untouched
    assert found["conjugate"].tolist() == [[1 - 2j, 3 + 4j]]
    assert found["turned"].tolist() == [[1 + 2j], [3 - 4j]]
    assert found["negative"].tolist() == [[-2.0, 4.0]]


def test_no_pickle_anywhere() -> None:
    """No module that reads files imports pickle or calls torch.load."""
    for module in ("codec", "fileheader", "fileformat", "sigmacodec", "storage", "compressed"):
        tree = ast.parse((Path(pwfn.__file__).parent / f"{module}.py").read_text())
        for node in ast.walk(tree):
            names = (
                [alias.name for alias in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
            )
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            for name in names:
                assert not re.match(r"(pickle|marshal|shelve|dill|cloudpickle|importlib)\b", name), module
            if isinstance(node, ast.Attribute | ast.Name):
                called = node.attr if isinstance(node, ast.Attribute) else node.id
                assert called not in ("eval", "exec", "__import__"), module
                assert ast.unparse(node) not in ("torch.load", "np.load", "torch.save"), module


# Files of every version stay readable

GOLDEN = sorted(path.stem for path in make.HERE.glob("*.pwfn"))


@pytest.mark.parametrize("stem", GOLDEN)
def test_golden_files(stem: str, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They load as what was once written down, and saving that gives the same bytes.

    A newer zstd or constriction may well compress to other bytes; that would be seen here first.
    """
    golden = make.HERE / f"{stem}.pwfn"
    expected = json.loads((make.HERE / f"{stem}.json").read_text())
    found = load(golden)
    assert make.content(found) == expected
    for name, facts in expected["dense"].items():
        tensor = torch.tensor(facts["values"], dtype=getattr(torch, facts["dtype"].removeprefix("torch.")))
        assert bits(tensor) == bits(found.dense_state_dict()[name]), name
    monkeypatch.setattr("pwfn.file.format.WRITER", Reader(golden).header.writer)
    found.save(path, posterior=Reader(golden).header.posterior)
    assert path.read_bytes() == golden.read_bytes()


def test_golden_files_are_there_and_are_not_made_again() -> None:
    assert {"v1_centre", "v1_channels_weight"} <= set(GOLDEN)
    files = sorted(make.HERE.glob("*.*"))
    before = {file: (file.read_bytes(), file.stat().st_mtime_ns) for file in files}
    make.main()
    assert {file: (file.read_bytes(), file.stat().st_mtime_ns) for file in files} == before
    assert sorted(make.HERE.glob("*.*")) == files


@pytest.mark.parametrize("stem", GOLDEN)
def test_golden_files_hold_the_networks_they_were_made_of(stem: str) -> None:
    compressed, posterior = make.networks()[stem]
    found = load(make.HERE / f"{stem}.pwfn")
    assert same(found.dense_state_dict(), compressed.dense_state_dict())
    assert found.layout == compressed.layout
    if posterior == "weight":
        assert found.weight_sigma is not None
        assert bits(found.weight_sigma) == bits(compressed.weight_sigma)


# What cannot be saved


@pytest.mark.parametrize(
    ("change", "posterior", "message"),
    [
        ({}, "always", "posterior is 'always': allowed is one of none, centre, weight"),
        ({"weight_sigma": None}, "centre", "no posterior to save"),
        ({"weight_sigma": None, "centre_sigma": (torch.ones(2),)}, "weight", "per centre only"),
        ({"codebooks": (torch.tensor([1.0, 0.0]),)}, "none", "ascending"),
        ({"codebooks": (torch.tensor([1.0, 1.0]),)}, "none", "ascending"),
        ({"codebooks": (torch.tensor([1.0, math.nan]),)}, "none", "not finite"),
        ({"codebooks": (torch.tensor([1.0, math.inf]),)}, "none", "not finite"),
        ({"codebooks": (torch.tensor([0.0, 1.0]).double(),)}, "none", "not of type torch.float32"),
        ({"indices": torch.tensor([0, 1, 2])}, "none", "'weight': an index is beyond its codebook"),
        ({"indices": torch.tensor([0, 1, -1])}, "none", "'weight': an index is beyond its codebook"),
        ({"indices": torch.tensor([0, 1])}, "none", "2 indices for 3 weights"),
        ({"weight_sigma": torch.tensor([0.1, -0.1, 0.1])}, "weight", "negative or not finite"),
        ({"weight_sigma": torch.tensor([0.1, math.nan, 0.1])}, "centre", "negative or not finite"),
        ({"weight_sigma": torch.ones(3).double()}, "weight", "sigma is of type torch.float64"),
        ({"untouched": {"weight": torch.ones(3)}}, "none", "'weight' twice"),
        ({"untouched": {"a": torch.ones(3).to_sparse()}}, "none", "make it dense"),
        ({"untouched": {"a": torch.ones(3, dtype=torch.float8_e4m3fn)}}, "none", "float8_e4m3fn cannot be"),
        ({"untouched": {"a\nb": torch.ones(3)}}, "none", "without control characters"),
        ({"record": {"loss": math.nan}}, "none", "cannot be written as JSON"),
        ({"record": {"model": object()}}, "none", "cannot be written as JSON"),
        ({"record": {"half": "\ud800"}}, "none", "cannot be written as JSON"),
        ({"record": {"long": "x" * 2**24}}, "none", "shorten the record"),
    ],
)  # fmt: skip
def test_what_cannot_be_saved(change: dict[str, Any], posterior: str, message: str, path: Path) -> None:
    layout = Layout.of(nn.Linear(3, 1, bias=False))
    good = Compressed.of(layout, torch.tensor([0.0, 1.0, 0.0]), torch.ones(3), {})
    path.write_text("old")
    with pytest.raises(FileError, match=message) as caught:
        save(replace(good, **change), path, posterior=posterior)
    assert "\n" not in str(caught.value)
    assert path.read_text() == "old"
    assert [p.name for p in path.parent.iterdir()] == ["net.pwfn"]


# What cannot be loaded: a sound file is spoilt in one place, its sizes and checksums are made to fit


def refused(data: bytes, path: Path, message: str) -> None:
    """One sentence that names the file and the fault."""
    path.write_bytes(data)
    with pytest.raises(FileError) as caught:
        load(path)
    text = str(caught.value)
    assert text.startswith(f"{path}: ")
    assert re.search(message, text), text
    assert "\n" not in text
    assert len(text) < 400 + len(str(path))


def test_sealing_alone_changes_nothing(name: str, path: Path) -> None:
    compressed, data = case(name)
    path.write_bytes(Parts.of(data).sealed())
    assert same(load(path).dense_state_dict(), compressed.dense_state_dict())


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda d: b"", "not a .pwfn file"),
        (lambda d: d[:23], "not a .pwfn file"),
        (lambda d: b"PK\x03\x04" + d[4:], "not a .pwfn file"),
        (lambda d: d[:8] + b"\x02\x00" + d[10:], "version 2 .* newer pwfn"),
        (lambda d: d[:8] + b"\x00\x00" + d[10:], "version 0"),
        (lambda d: d[:10] + b"\x01\x00" + d[12:], "flags 0x0001"),
        (lambda d: d[:12] + struct.pack("<I", 2**24 + 1) + d[16:], r"16,777,217 bytes: 2\^24 are allowed"),
        (lambda d: d[:16] + struct.pack("<I", 2**32 - 1) + d[20:], r"4,294,967,295 bytes: 2\^24 are allowed"),
        (lambda d: d[:12] + struct.pack("<I", len(d)) + d[16:], "it is truncated"),
        (lambda d: d[:24], "it is truncated"),
        (lambda d: d[:20] + bytes(4) + d[24:], "header: it is damaged: its checksum"),
        (lambda d: d[:30] + bytes([d[30] ^ 1]) + d[31:], "header: it is damaged: its checksum"),
        (lambda d: d[:16] + struct.pack("<I", 5) + d[20:], "header: the block does not hold the 5 bytes"),
        (lambda d: d[:-1], "it is truncated"),
        (lambda d: d + b"\x00", "longer than it should be"),
        (lambda d: with_header(b"", 0) + d, "header: the block is of unknown kind none"),
        (lambda d: with_header(b"\x07abc", 3), "header: the block is of unknown kind 07"),
        (lambda d: with_header(b"\x00abc", 3), "header is not JSON"),
        (lambda d: with_header(b"\x00abc", 4), "header: the block holds 3 bytes, 4 are expected"),
    ],
)  # fmt: skip
def test_bad_beginnings_and_ends(spoil: Callable[[bytes], bytes], message: str, path: Path) -> None:
    refused(spoil(case("centre")[1]), path, message)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"", "unknown kind none"),
        (b"[]", "header of the header is not an object|header is not an object"),
        (b"{", "not JSON"),
        (b"\xff\xfe", "not JSON"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"a":' * 100_000, "nested too deeply"),
        (b'{"record": NaN}', "NaN is not a finite number"),
        (b'{"record": -Infinity}', "-Infinity is not a finite number"),
        (b'{"record": 1e999}', "1e999 is not a finite number"),
        (b'{"record": 1, "record": 2}', "a key twice"),
        (b"1" * 5000, "not JSON"),
        (b'{"record": {"a": "\\ud800"}}', "surrogates not allowed"),
        (b"{} {}", "not JSON"),
    ],
)
def test_headers_that_are_not_json(text: bytes, message: str, path: Path) -> None:
    refused(Parts.of(case("centre")[1]).sealed(text), path, message)


def test_header_bomb(path: Path) -> None:
    """Some hundred bytes that claim 16 MiB are refused before they are unpacked."""
    bomb = b"\x01" + zstandard.ZstdCompressor(level=19).compress(b" " * 2**24)
    refused(with_header(bomb, 2**24), path, "out of proportion")


REQUIRED = {
    "header": ("writer", "tensors", "left_out", "codebooks", "posterior", "untouched", "record", "sections"),
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
    "tensors.dtype": (1, None, "float31", "torch.float32", "int32", "bool", "complex64"),
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
    found = header[where] if where != "header" else header
    return found[0] if isinstance(found, list) else found


@pytest.mark.parametrize(("where", "key"), [(w, k) for w, keys in REQUIRED.items() for k in keys])
def test_missing_fields(where: str, key: str, path: Path) -> None:
    parts = Parts.of(case("centre")[1])
    parts.late.append(lambda header: at(header, where).pop(key) and None)
    part = {"header": "header", "codebooks": "codebooks"}.get(where, rf"{where}\[0\]")
    refused(parts.sealed(), path, f"{part} of the header has no {key!r}")


@pytest.mark.parametrize(("field", "value"), [(f, v) for f, values in ILL_TYPED.items() for v in values])
def test_ill_typed_fields(field: str, value: Any, path: Path) -> None:
    where, _, key = field.rpartition(".")
    parts = Parts.of(case("centre")[1])
    parts.late.append(lambda header: at(header, where or "header").__setitem__(key, value))
    refused(parts.sealed(), path, "")


def test_the_fault_names_its_field(path: Path) -> None:
    parts = Parts.of(case("centre")[1])
    parts.header["tensors"][3]["groups"] = 1.5
    refused(
        parts.sealed(), path, r"tensors\[3\].groups of the header is 1.5: a whole number from 0 to 2\^48 is"
    )
    parts.header["tensors"][3]["groups"] = [[]]
    refused(parts.sealed(), path, r"tensors\[3\].groups of the header is a list: a whole number")


@pytest.mark.parametrize("fault", SPOILT)
def test_spoilt_files(fault: str, path: Path) -> None:
    base, spoil, message = SPOILT[fault]
    parts = Parts.of(case(base)[1])
    spoil(parts)
    refused(parts.sealed(), path, message)


@pytest.mark.parametrize("section", ["codebooks", "tables", "posterior", "untouched"])
@pytest.mark.parametrize("kind", ["no frame", "unknown", "cut", "longer", "unsized"])
def test_blocks_that_do_not_unpack(section: str, kind: str, path: Path) -> None:
    parts = Parts.of(case("weight")[1])
    frame = zstd(parts.contents[section])
    parts.blocks[section] = {
        "no frame": b"\x01nothing",
        "unknown": b"\x03" + frame,
        "cut": b"\x01" + frame[:-3],
        "longer": b"\x01" + frame + b"\x00",
        "unsized": b"\x01" + unsized(parts.contents[section]),
    }[kind]
    refused(parts.sealed(), path, f"section '{section}': the block")


def zstd(raw: bytes) -> bytes:
    return zstandard.ZstdCompressor(level=3).compress(raw)


def unsized(raw: bytes) -> bytes:
    """A frame that does not state its content size."""
    return zstandard.ZstdCompressor(level=3, write_content_size=False).compress(raw)


def test_fields_that_are_not_known_are_ignored(path: Path) -> None:
    compressed, data = case("centre")
    parts = Parts.of(data)
    parts.header["later"] = {"a": 1}
    parts.header["tensors"][0]["later"] = 1
    path.write_bytes(parts.sealed())
    assert same(load(path).dense_state_dict(), compressed.dense_state_dict())


def test_what_is_no_file(tmp_path: Path) -> None:
    for place, message in ((tmp_path / "none.pwfn", "No such file"), (tmp_path, "Is a directory")):
        with pytest.raises(FileError, match=message) as caught:
            load(place)
        assert str(caught.value).startswith(f"{place}: ")


def test_headers_stay_within_their_limit_when_they_compress_well(path: Path) -> None:
    """Two megabytes of one letter are stored as they are: a reader would not unpack so much of so little."""
    compressed = replace(mixed(), record={"note": "a" * 2**21})
    save(compressed, path)
    assert load(path).record == compressed.record
    assert path.stat().st_size > 2**21


def test_divisions_of_codebooks_used_twice(path: Path) -> None:
    """A codebook may serve several parts, in any order, and one may serve none."""
    layout = Layout.of(nn.Sequential(nn.Linear(2, 4, bias=False), nn.Linear(4, 2, bias=False)))
    books = (torch.tensor([-1.0, 1.0]), torch.tensor([0.0, 0.5, 2.0]), torch.tensor([9.0]))
    divisions = (Division((1, 0), 0), Division((0, 1, 1, 0), 1))
    indices = torch.tensor([2, 1, 0, 2, 0, 1, 1, 0, 1, 2, 0, 1, 0, 1, 2, 0], dtype=torch.uint8)
    compressed = Compressed(layout, books, divisions, indices, {})
    compressed.save(path, posterior="none")
    assert load(path).values().tolist() == [2, 0.5, 0, 2, -1, 1, 1, -1, 1, 2, 0, 1, -1, 0.5, 2, -1]
    assert oracle.read(path).values[1].tolist() == [[1, 2, 0, 1], [-1, 0.5, 2, -1]]
