"""What a recording that fails leaves behind, on a stand-in for CUDA; tests/gpu has the rest."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from pwfn.bayes.batches import Batch
from pwfn.bayes.execution import RecordedStep
from pwfn.bayes.randomness import seeded


@dataclass(eq=False)
class Stream:
    device: str = "cpu"


@dataclass
class Device:
    """As torch can be: what a failed recording began is not ended, neither stream nor generator."""

    stream: Stream = field(default_factory=Stream)
    capturing: bool = False

    def graph(self, _: Any, capture_error_mode: str = "") -> Recording:
        return Recording(self)

    def set_stream(self, stream: Stream) -> None:
        self.stream = stream


class Recording:
    def __init__(self, device: Device) -> None:
        self.device, self.before = device, device.stream

    def __enter__(self) -> None:
        self.device.stream, self.device.capturing = Stream(), True

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            raise RuntimeError("operation failed due to a previous error during capture")
        self.device.stream, self.device.capturing = self.before, False


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    device = Device()
    monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: device.stream)
    monkeypatch.setattr(torch.cuda, "set_stream", device.set_stream)
    monkeypatch.setattr(torch.cuda, "graph", device.graph)
    return device


def batch() -> Batch:
    return Batch.of((torch.zeros(2, 3), torch.zeros(2)), torch.device("cpu"))


def test_a_recording_that_fails_is_said_once_and_leaves_stream_and_generator_as_they_were(
    device: Device, caplog: pytest.LogCaptureFixture
) -> None:
    before, done = device.stream, []

    def work(given: Batch, where: str) -> None:
        if device.capturing:
            raise RuntimeError("operation not permitted when stream is capturing")
        done.append(where)

    step = RecordedStep(work, lambda: None)
    for number in range(6):
        step(batch(), f"step {number}")
    assert done == [f"step {number}" for number in range(6)]  # each step was taken once
    assert device.stream is before
    assert not device.capturing
    assert step.failed
    (said,) = caplog.messages
    assert said.startswith("step 3: steps are not recorded as a CUDA graph")
    assert "not permitted when stream is capturing" in said


@pytest.mark.parametrize(
    "draw",
    [lambda: torch.rand(()), random.random, lambda: np.random.random()],
    ids=["torch", "python", "numpy"],
)
def test_a_model_that_draws_on_the_host_is_not_recorded_and_draws_the_same_numbers(
    device: Device, caplog: pytest.LogCaptureFixture, draw: Callable[[], Any]
) -> None:
    def drawn(wrap: bool) -> list[float]:
        found = []

        def work(given: Batch, where: str) -> None:
            value = float(draw())
            if not device.capturing:
                found.append(value)

        step = RecordedStep(work, lambda: None) if wrap else work
        with seeded(3, torch.device("cpu")):
            for _ in range(6):
                step(batch(), "round 1")
        return found

    assert drawn(True) == drawn(False)
    assert "draws random numbers on the host" in caplog.messages[0]


def test_numbers_that_a_batch_gives_to_the_model_are_not_replayed_with_old_values(device: Device) -> None:
    done: list[int] = []
    step = RecordedStep(lambda given, where: done.append(given.args[1]), lambda: None)
    for number in range(8):
        step(Batch((torch.zeros(2), number), {}, None), "round 1")
    assert done == list(range(8))


def test_objects_of_unknown_kind_are_never_replayed(device: Device, caplog: pytest.LogCaptureFixture) -> None:
    done: list[object] = []
    step = RecordedStep(lambda given, where: done.append(given.args[1]), lambda: None)
    for _ in range(150):
        step(Batch((torch.zeros(2), {1}), {}, None), "round 1")
    assert len(done) == 150
    assert [message for message in caplog.messages if "has a shape of its own" in message] == caplog.messages
    assert len(caplog.messages) == 1


def test_a_model_that_counts_its_calls_is_not_recorded_and_counts_right(
    device: Device, caplog: pytest.LogCaptureFixture
) -> None:
    model = nn.Linear(1, 1)
    model.calls = 0

    def work(given: Batch, where: str) -> None:
        model.calls += 1

    step = RecordedStep(work, lambda: None, [model])
    for _ in range(7):
        step(batch(), "round 1")
    assert model.calls == 7
    assert "the model changes calls in every step" in caplog.messages[0]
