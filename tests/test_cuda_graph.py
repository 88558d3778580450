"""What a recording that fails leaves behind, on a stand-in for CUDA; tests/gpu has the rest."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import pytest
import torch
from torch import Tensor

from pwfn import ConfigError
from pwfn.bayes.batches import Batch
from pwfn.bayes.cuda_graph import GraphedStep


@dataclass(eq=False)
class Stream:
    device: str = "cpu"


@dataclass
class Device:
    """As torch can be: what a failed recording began is not ended, neither stream nor generator."""

    stream: Stream = field(default_factory=Stream)
    capturing: bool = False

    def graph(self, _: Any) -> Recording:
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


def test_a_recording_that_fails_leaves_the_stream_and_the_generator_as_they_were(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device = Device()
    before = device.stream
    monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: device.stream)
    monkeypatch.setattr(torch.cuda, "set_stream", device.set_stream)
    monkeypatch.setattr(torch.cuda, "graph", device.graph)

    def work(batch: Batch, where: str) -> Tensor:
        if device.capturing:
            raise RuntimeError("operation not permitted when stream is capturing")
        return torch.zeros(())

    step = GraphedStep([], work)
    batch = Batch.of((torch.zeros(2, 3), torch.zeros(2)), torch.device("cpu"))
    for _ in range(3):
        step(batch, "round 1")
    with pytest.raises(ConfigError, match=r"round 1: the step cannot be captured .*cuda_graph = false"):
        step(batch, "round 1")
    assert device.stream is before
    assert not device.capturing
