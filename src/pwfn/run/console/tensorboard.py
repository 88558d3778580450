"""A run as curves."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from pwfn.errors import FileError, PwfnError
from pwfn.progress import Round, StepEvent
from pwfn.run.console.view import View

_SHARE = 1e-4  # of a run between two points: a run of days would write millions otherwise


class TensorBoard(View):
    """Curves for TensorBoard, over the optimiser steps of the whole run.

    ``first_step`` is how many steps the run had done where it goes on: what an earlier process wrote
    after them is hidden, so that no curve folds back.
    """

    def __init__(self, folder: str | Path, first_step: int = 0) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise PwfnError(
                "TensorBoard's curves need tensorboard: pip install 'pwfn[tensorboard]'"
            ) from error
        try:
            self._writer: Any = SummaryWriter(str(folder), purge_step=first_step + 1)
        except OSError as error:
            raise FileError(f"{folder}: cannot be written: {error.strerror or error}") from error
        self._before = 0  # steps in the stretches before this one
        self._losses: list[float] = []  # since the last point
        self._point = -1.0  # share of the run at the last point

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._writer.close()

    def begin(self, title: str, rounds: int, earlier: Sequence[Round] = ()) -> None:
        """Count the steps of the rounds done before."""
        self._before = sum(done.steps for done in earlier)

    def pulse(self, now: StepEvent) -> None:
        """Add the loss, the mean since the last point, and the learning rate."""
        self._losses.append(now.loss)
        if now.done - self._point < _SHARE and now.step < now.steps:
            return
        figures = {"train/loss": statistics.fmean(self._losses), "train/learning_rate": now.learning_rate}
        self._add(self._before + now.step, figures)
        self._losses, self._point = [], now.done

    def round(self, done: Round) -> None:
        """Add the figures of the round."""
        self._before += done.steps
        low, middle, high = done.sigma_quartiles or (None, None, None)
        self._add(
            self._before,
            {
                "round/fixed": done.fix.fraction,
                "round/accuracy": done.scores.metric if done.scores else None,
                "round/validation_loss": done.scores.loss if done.scores else None,
                "round/entropy_bits": done.fixed.entropy_bits,
                "round/unique": done.fixed.unique,
                "round/power_of_two_share": done.fixed.power_of_two_share,
                "round/zero_share": done.fixed.zero_share,
                "sigma/lower_quartile": low,
                "sigma/median": middle,
                "sigma/upper_quartile": high,
            },
        )
        self._writer.flush()  # a run that is killed has its rounds on disk

    def _add(self, step: int, figures: Mapping[str, float | None]) -> None:
        for name, value in figures.items():
            if value is not None:
                self._writer.add_scalar(name, value, step)
