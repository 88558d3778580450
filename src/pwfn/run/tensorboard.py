"""Curves of a run for TensorBoard."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pwfn.errors import FileError, PwfnError
from pwfn.progress import Round, StepEvent
from pwfn.run.console import View

_SHARE = 1e-4  # of a run between two points: a run of days would write millions otherwise


class TensorBoard(View):
    """Loss and learning rate, and the figures of every round, over the optimiser steps of the run.

    ``first_step`` is the number of steps done before this process resumed the run. What an earlier process
    wrote after them is hidden, so that no curve goes back in time.
    """

    def __init__(self, folder: str | Path, first_step: int = 0) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise PwfnError("--tensorboard needs tensorboard: pip install 'pwfn[tensorboard]'") from error
        try:
            self._writer: Any = SummaryWriter(str(folder), purge_step=first_step + 1)
        except OSError as error:
            raise FileError(f"{folder}: cannot be written: {error.strerror or error}") from error
        self._before = 0  # steps in earlier phases
        self._losses: list[float] = []  # since the last point
        self._point = -1.0  # fraction of the run at the last point

    def __exit__(self, *_: object) -> None:
        self._writer.close()

    def begin(self, title: str, done: Sequence[Round] = (), *, metric: str = "accuracy") -> None:
        """Count the steps of the rounds done before."""
        self._before = sum(earlier.steps for earlier in done)

    def step(self, now: StepEvent) -> None:
        """Add the mean loss since the last point, the learning rate and the rate."""
        self._losses.append(now.loss)
        if now.done - self._point < _SHARE and now.step < now.steps:
            return
        figures = {"train/loss": statistics.fmean(self._losses), "train/learning_rate": now.learning_rate}
        figures |= {"train/rate_bytes": now.rate_bytes} if now.rate_bytes is not None else {}
        self._add(self._before + now.step, figures)
        self._losses, self._point = [], now.done

    def round(self, done: Round) -> None:
        """Add the figures of the round."""
        self._before += done.steps
        figures = {f"round/{name}": value for name, value in done.to_dict().items()}
        quartiles = figures.pop("round/sigma_quartiles") or ()
        names = ("sigma/lower_quartile", "sigma/median", "sigma/upper_quartile")
        self._add(self._before, figures | dict(zip(names, quartiles, strict=False)))
        self._writer.flush()  # a run that is killed has its rounds on disk

    def _add(self, step: int, figures: Mapping[str, float | None]) -> None:
        for name, value in figures.items():
            if value is not None:
                self._writer.add_scalar(name, value, step)
