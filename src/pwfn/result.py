"""What a run returns: the compressed network and its figures."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import nn

from pwfn.config import Config
from pwfn.evaluate.entropy import Summary
from pwfn.evaluate.inspect import fp32_bytes
from pwfn.evaluate.score import Scores
from pwfn.evaluate.targets import Choice, State, meets
from pwfn.evaluate.verdict import ruin
from pwfn.file.compressed import Compressed
from pwfn.file.format import dumps
from pwfn.progress import Round


@dataclass(frozen=True)
class Result:
    """What :func:`compress` returns."""

    compressed: Compressed
    summary: Summary
    rounds: tuple[Round, ...]
    before: Scores | None  # the original network on the validation data
    fixed: Scores | None  # just after the last fixing
    after: Scores | None  # at the end, measured on the decoded weights
    config: Config
    epochs: float  # of training, polish included: the steps that were taken
    seconds: float  # of work, in all processes that resumed it
    _original: nn.Module = field(repr=False)
    states: tuple[State, ...] = ()  # after each round, where there was a target
    choice: Choice | None = None  # of one of them
    saved_bytes: int | None = None  # of the file of a run in a folder
    warnings: tuple[str, ...] = ()  # what looks wrong, in one sentence each; empty for a healthy run

    def save(
        self, path: str | Path, *, posterior: str | None = None, record: Mapping[str, Any] | None = None
    ) -> int:
        """Write a .pwfn file and return its size in bytes; see :meth:`pwfn.Compressed.save`."""
        return self.compressed.save(path, posterior=posterior, record=record)

    def model(self) -> nn.Module:
        """A new copy of the original model with the compressed weights, in evaluation mode."""
        return self.compressed.apply_to(copy.deepcopy(self._original)).eval()

    @cached_property
    def file_bytes(self) -> int:
        """Size of the .pwfn file."""
        return len(dumps(self.compressed)) if self.saved_bytes is None else self.saved_bytes

    @property
    def rate_bytes(self) -> float | None:
        """Bytes of the file as training counted them at its end; None where it was not for the bytes."""
        return self.rounds[-1].rate_bytes

    @property
    def target_met(self) -> bool | None:
        """Whether the figures at the end are within the target; None if there is none."""
        target, bits = self.config.target, self.summary.whole.entropy_bits
        # The size is measured only where it matters: it takes as long as writing the file.
        size = 0 if target.bytes is None else self.file_bytes
        return meets(target, self.before, self.after, bits, size) if target.wanted else None

    @property
    def ruined(self) -> str:
        """Why the result is useless, in one sentence; empty if it is not."""
        return " ".join(ruin(self.before, self.after, self.summary.whole))

    def to_dict(self) -> dict[str, Any]:
        """All figures as plain values: the content of ``record.json`` and of ``pwfn compress --json``."""
        return {
            "before": self.before.to_dict() if self.before else None,
            "after": self.after.to_dict() if self.after else None,
            **asdict(self.summary.whole),
            "file_bytes": self.file_bytes,
            "fp32_bytes": fp32_bytes(self.compressed),
            "rate_bytes": self.rate_bytes,
            "epochs": self.epochs,
            "seconds": self.seconds,
            "warnings": list(self.warnings),
            "ruined": self.ruined,
            **({"choice": asdict(self.choice), "target_met": self.target_met} if self.choice else {}),
            "rounds": [done.to_dict() for done in self.rounds],
            "states": [state.to_dict() for state in self.states],
        }

    def verdict(self) -> str:
        """The outcome in one sentence."""
        target = "" if self.target_met is None else f"the target was {'met' if self.target_met else 'missed'}"
        if self.ruined or target:
            return "; ".join(filter(None, (self.ruined, target)))
        if self.before is None or self.after is None:
            return "accuracy was not measured: there was no validation data"
        if self.before.metric is None or self.after.metric is None:
            return f"the loss went from {self.before.loss:.4g} to {self.after.loss:.4g}"
        if self.after.agreement:
            return f"it predicts what the original network does for {self.after.metric:.2%} of the examples"
        drop = 100 * (self.before.metric - self.after.metric)
        return f"{drop:.2f} points of accuracy were lost" if drop > 0 else "no accuracy was lost"

    def facts(self) -> dict[str, str]:
        """What :func:`print` shows, line by line."""
        whole, original = self.summary.whole, fp32_bytes(self.compressed)
        # The size of a ruined network is no achievement: what became of it comes first.
        lines = {"verdict": self.verdict()} if self.ruined else {}
        if self.before is not None and self.after is not None:
            if not self.after.agreement:  # the original agrees with itself
                lines["before"] = str(self.before)
            lines["after"] = str(self.after)
        ratio = original / self.file_bytes
        size = f"{ratio:.1f} times smaller than" if ratio > 1 else "no smaller than"
        lines["file"] = f"{self.file_bytes:,} bytes, {size} fp32 ({original:,})"
        if self.ruined:
            lines["file"] = f"{self.file_bytes:,} bytes (fp32: {original:,})"
        if self.rate_bytes is not None:
            more = self.rate_bytes / self.file_bytes - 1
            words = f"{abs(more):.1%} {'more' if more > 0 else 'less'} than in the file"
            lines["rate"] = f"{self.rate_bytes:,.0f} bytes in training, {words}"
        lines["weights"] = f"{whole.weights:,} in {len(self.compressed.layout.entries)} tensors"
        lines["values"] = f"{whole.unique}, with {whole.entropy_bits:.2f} bits of entropy per weight"
        lines["powers of two"] = f"{whole.power_of_two_share:.1%} (zeros, {whole.zero_share:.1%}, included)"
        lines["posterior"] = self.compressed.posterior_sentence
        lines["training"] = f"{self.epochs:.4g} epochs, {len(self.rounds)} rounds, {self.seconds:.0f} s"
        if self.choice is not None:
            lines["kept"] = self.choice.why
        lines["verdict"] = self.verdict()
        for number, sentence in enumerate(self.warnings, 1):
            lines["WARNING" if number == 1 else f"WARNING {number}"] = sentence
        return lines

    def __str__(self) -> str:
        return "\n".join(f"{name:<14}{value}" for name, value in self.facts().items())

    def __repr__(self) -> str:
        whole = self.summary.whole
        return f"Result({whole.weights:,} weights, {whole.unique} values, {whole.entropy_bits:.2f} bits)"

    def _repr_html_(self) -> str:
        rows = "".join(f"<tr><th>{name}</th><td>{value}</td></tr>" for name, value in self.facts().items())
        return f"<table>{rows}</table>"
