"""What a file holds: every figure against one worked out here, and nothing rounded in our favour."""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from pwfn import Compressed, Config, Layout
from pwfn.evaluate.inspect import FileFacts, inspect, lines
from pwfn.layout import untouched


class Small(nn.Module):
    """Two similar layers, one different, tied embeddings, and buffers of several types."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(100, 60, bias=False)
        self.second = nn.Linear(60, 100, bias=False)
        self.third = nn.Linear(100, 40)
        self.embedding = nn.Embedding(30, 7)
        self.head = nn.Embedding(30, 7)
        self.head.weight = self.embedding.weight
        self.register_buffer("steps", torch.tensor(5))
        self.register_buffer("wide", torch.linspace(0, 1, 11, dtype=torch.float64))
        self.register_buffer("narrow", torch.linspace(0, 1, 13, dtype=torch.float16))


SIZES = {"first.weight": 6000, "second.weight": 6000, "third.weight": 4000, "third.bias": 40}
WEIGHTS = 16_040

# Values with counts that leave no doubt: the first two tensors alike, the third of its own kind.
ALIKE = [0.0] * 3000 + [0.5] * 1500 + [-0.25] * 750 + [0.375] * 750
UNLIKE = [-1.0] * 2000 + [2.0] * 2000
BIAS = [0.0] * 40


@pytest.fixture(scope="module")
def compressed() -> Compressed:
    generator = torch.Generator().manual_seed(0)
    model = Small()
    torch.nn.init.normal_(model.embedding.weight, generator=generator)
    layout = Layout.of(model)
    assert {entry.name: entry.size for entry in layout.entries} == SIZES
    parts = [torch.tensor(part) for part in (ALIKE, ALIKE, UNLIKE, BIAS)]
    values = torch.cat([part[torch.randperm(len(part), generator=generator)] for part in parts])
    sigma = torch.full((WEIGHTS,), 0.125)
    return Compressed.of(layout, values, sigma, untouched(model, layout), record={"model": "small"})


@pytest.fixture(scope="module")
def path(compressed: Compressed, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("inspection") / "small.pwfn"
    compressed.save(path)
    return path


@pytest.fixture(scope="module")
def facts(path: Path) -> FileFacts:
    return inspect(path)


def entropy(values: list[float]) -> float:
    return sum(n / len(values) * math.log2(len(values) / n) for n in Counter(values).values())


def test_counts_and_entropy(facts: FileFacts, path: Path) -> None:
    assert (facts.path, facts.model, facts.posterior) == (str(path), "small", "centre")
    assert facts.writer.startswith("pwfn ")
    assert (facts.weights, facts.unique) == (WEIGHTS, 6)
    assert facts.entropy_bits == pytest.approx(entropy(ALIKE + ALIKE + UNLIKE + BIAS), rel=1e-12)
    assert facts.power_of_two_share == pytest.approx((WEIGHTS - 1500) / WEIGHTS, rel=1e-12)  # all but 0.375


def test_the_parts_are_the_file(facts: FileFacts, path: Path) -> None:
    assert facts.file_bytes == path.stat().st_size
    parts = ("header", "codebook", "table", "index", "posterior", "untouched", "padding")
    assert tuple(facts.parts) == parts
    assert sum(facts.parts.values()) == facts.file_bytes
    assert facts.parts["index"] == sum(tensor.index_bytes for tensor in facts.tensors)
    assert facts.bits_per_weight == 8 * (facts.parts["index"] + facts.parts["table"]) / WEIGHTS
    # six values and six sigmas of four bytes, behind a byte each for how they are packed
    assert facts.parts["codebook"] <= 1 + 6 * 4
    assert 0 < facts.parts["posterior"] <= 1 + 6 * 4
    assert facts.parts["padding"] == 0
    # zstd may save, and never costs more than that byte: both names of the embedding are stored
    assert 0 < facts.parts["untouched"] <= 1 + 2 * 840 + 8 + 88 + 26


def test_each_tensor_and_the_shared_table(facts: FileFacts) -> None:
    assert {tensor.name: tensor.weights for tensor in facts.tensors} == SIZES
    assert [tensor.shape for tensor in facts.tensors] == [(60, 100), (100, 60), (40, 100), (40,)]
    assert [tensor.unique for tensor in facts.tensors] == [4, 4, 2, 1]
    assert [tensor.entropy_bits for tensor in facts.tensors] == pytest.approx([1.75, 1.75, 1.0, 0.0])
    for tensor in facts.tensors:
        assert tensor.bits_per_weight == 8 * (tensor.index_bytes + tensor.table_bytes) / tensor.weights
        # a thousandth for tables that fit almost, and the coder's last state of 64 bits
        ideal = tensor.entropy_bits * tensor.weights / 8
        assert ideal <= tensor.index_bytes <= 1.001 * ideal + 8
    # The similar tensors share a table. Of each table: one byte for the number of symbols, then for each a
    # gap of one byte and a count of two.
    first, second, third, _ = facts.tensors
    assert first.table_bytes == second.table_bytes == 0
    assert third.table_bytes == 1 + 2 * (1 + 2)
    assert facts.shared_table_bytes == 1 + 4 * (1 + 2)
    stored = facts.shared_table_bytes + sum(tensor.table_bytes for tensor in facts.tensors)
    assert 0 < facts.parts["table"] <= stored + 1


def test_rivals(facts: FileFacts, compressed: Compressed, path: Path) -> None:
    # Tied tensors once; double precision counts as fp32, and half stays half.
    others = 4 * 210 + 8 + 4 * 11 + 2 * 13
    assert facts.untouched_raw_bytes == 4 * 210 + 8 + 8 * 11 + 2 * 13
    assert facts.fp32_bytes == 4 * WEIGHTS + others
    assert facts.fp16_bytes == 2 * (WEIGHTS + 210 + 11 + 13) + 8
    assert facts.int8_bytes == WEIGHTS + 4 * 4 + others
    state = compressed.dense_state_dict()
    order = (*SIZES, "embedding.weight", "steps", "wide", "narrow")
    narrow = {**state, "wide": state["wide"].float()}
    assert set(state) - set(order) == {"head.weight"}
    dense = b"".join(narrow[name].numpy().tobytes() for name in order)
    assert len(dense) == facts.fp32_bytes
    assert facts.zstd19_bytes is not None
    assert abs(facts.zstd19_bytes - len(zstandard.ZstdCompressor(level=19).compress(dense))) <= 64
    assert list(facts.rivals()) == ["fp32", "fp16", "int8", "zstd19"]
    quick = inspect(path, zstd=False)
    assert quick == replace(facts, zstd19_bytes=None)
    assert "zstd19" not in quick.rivals()


def test_json(facts: FileFacts) -> None:
    found = json.loads(json.dumps(facts.to_dict()))
    for name, size in facts.rivals().items():
        assert found.pop(f"ratio_{name}") == size / facts.file_bytes
        assert found[f"{name}_bytes"] == size
    for part, size in facts.parts.items():
        assert found.pop(f"{part}_bytes") == size
    tensors = found.pop("tensors")
    assert found == {name: getattr(facts, name) for name in found}
    assert [tensor["name"] for tensor in tensors] == list(SIZES)


def test_several_codebooks_and_other_posteriors(compressed: Compressed, tmp_path: Path) -> None:
    path = tmp_path / "net.pwfn"
    values, rest = compressed.values(), compressed.untouched
    divided = Compressed.of(compressed.layout, values, None, rest, divide=lambda entry: (0, 2))
    divided.save(path)
    facts = inspect(path, zstd=False)
    assert (facts.posterior, facts.parts["posterior"], facts.model, facts.unique) == ("none", 0, None, 6)
    assert facts.entropy_bits == pytest.approx(entropy(ALIKE + ALIKE + UNLIKE + BIAS), rel=1e-12)
    compressed.save(path, posterior="weight")
    facts = inspect(path, zstd=False)
    assert facts.posterior == "weight"
    assert facts.parts["posterior"] > 0


# As text


def row(text: list[str], label: str) -> list[str]:
    """What follows a label that begins exactly one line."""
    (line,) = (line for line in text if line.startswith(label))
    return line.removeprefix(label).split()


def test_nothing_is_rounded_in_our_favour(facts: FileFacts) -> None:
    sizes = {"file_bytes": 1000, "fp16_bytes": 15_999, "int8_bytes": 2_900, "zstd19_bytes": 1_009}
    shares = {"entropy_bits": 1.00001, "bits_per_weight": 1.5, "power_of_two_share": 0.99999}
    text = lines(replace(facts, **sizes, **shares))
    assert row(text, "fp16") == ["15,999", "15.99"]
    assert row(text, "int8") == ["2,900", "2.90"]  # exact figures stay exact
    assert row(text, "fp32 with zstd -19") == ["1,009", "1.00"]
    assert row(text, "bits per weight")[1:] == ["1.5000", "on", "disk,", "1.0001", "entropy"]
    assert row(text, "zero or a power of two:")[0] == "99.9%"


def test_every_part_and_every_tensor_has_its_line(facts: FileFacts, path: Path) -> None:
    text = lines(facts)
    assert text[0].startswith(f"{path}: {facts.file_bytes:,} bytes for 16,040 weights of 6 values")
    shown = {
        "header": "header",
        "codebook": "codebooks",
        "table": "frequency tables",
        "index": "coded weights",
    }
    shown |= {"posterior": "sigmas", "untouched": "other tensors", "padding": "padding", "file": "whole file"}
    for part, label in shown.items():
        assert row(text, label)[0] == f"{facts.file_bytes if part == 'file' else facts.parts[part]:,}"
    for tensor in facts.tensors:
        weights, unique, bits, on_disk, size = row(text, tensor.name)
        assert weights == f"{tensor.weights:,}"
        assert int(unique) == tensor.unique
        assert float(bits) == tensor.entropy_bits
        assert tensor.bits_per_weight <= float(on_disk) < tensor.bits_per_weight + 1.0001e-4
        assert size == f"{tensor.index_bytes + tensor.table_bytes:,}"


def test_what_the_record_says_of_the_run_is_shown(facts: FileFacts, compressed: Compressed) -> None:
    chosen = Config.preset("paper").override({"fixing.sweep": 7.5, "seed": 3}).to_dict()
    scores = {"before": {"metric": 0.875, "examples": 40}, "after": {"metric": 0.75, "examples": 40}}
    text = lines(replace(facts, record={**scores, "data": "5a17", "settings": chosen}))
    assert row(text, "content, SHA-256:") == [compressed.content_sha256()] == [facts.content_sha256]
    assert row(text, "accuracy:")[:4] == ["87.50%", "before,", "75.00%", "after"]
    assert row(text, "data:")[-1] == "5a17"
    assert {"paper", "fixing.sweep=7.5", "3"} <= {word.strip(",") for word in row(text, "settings:")}
    unlabelled = {"before": {"metric": 1.0}, "after": {"metric": 0.75, "examples": 40, "of": "agreement"}}
    text = lines(replace(facts, record=unlabelled))
    assert not any(line.startswith("accuracy") or "100.00%" in line for line in text)
    assert "75.00%" in row(text, "agreement")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
SCORES = st.dictionaries(st.sampled_from(["metric", "examples", "of", "loss"]), JSON)
SETTINGS = st.dictionaries(st.sampled_from(["method", "seed", "fixing", "training", "options", "x"]), JSON)


@given(st.fixed_dictionaries({}, optional={
    "before": SCORES | JSON, "after": SCORES | JSON, "data": JSON, "settings": SETTINGS | JSON,
}))  # fmt: skip
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=200, deadline=None)
def test_a_record_may_hold_anything(facts: FileFacts, record: dict[str, Any]) -> None:
    assert all(line.isprintable() for line in lines(replace(facts, record=record)))


def test_names_cannot_control_the_terminal(facts: FileFacts) -> None:
    text = "\n".join(lines(replace(facts, model="\x1b[2Jnet\rname\n")))
    assert "\x1b" not in text
    assert "\r" not in text
    assert "[2Jnet" in text
