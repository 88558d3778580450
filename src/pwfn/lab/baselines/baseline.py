"""The network itself: what all others are compared with, by the same measure and in the same file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor, nn

from pwfn.bayes.method import Method, register
from pwfn.config import Config
from pwfn.file.compressed import Compressed
from pwfn.fixing.record import FixRecord
from pwfn.layout import untouched

PLAIN_STEPS: dict[str, Any] = {"training.learning_rate": 1e-3, "training.scheduler": "none"}
"""The steps of PWFN and WFN, which methods of other steps override."""

NO_FINISH: dict[str, Any] = {"finish.reestimate_epochs": 0.0, "finish.polish_epochs": 0.0}


@register("baseline")
class Baseline(Method):
    """Every weight keeps its own value; with epochs in the schedule the network is fine-tuned.

    Nearly every weight differs from all others, so the codebook is as long as the network, and its file
    is larger than the plain weights: codebooks pay where values repeat.

    >>> net = Baseline(nn.Linear(4, 2), Config.preset("recommended", "baseline"))
    >>> net.finish().codebook.numel()
    10
    """

    defaults: ClassVar[Mapping[str, Any]] = {
        **PLAIN_STEPS,
        **NO_FINISH,
        "schedule.fractions": (1.0,),
        "schedule.epochs_per_round": (0.0,),
    }

    def __init__(self, model: nn.Module, config: Config) -> None:
        super().__init__(model, config)
        self.weight = nn.Parameter(self.layout.gather(model))

    def weights(self) -> dict[str, Tensor]:
        """The weights themselves."""
        return self.layout.views(self.weight)

    def fix(self, fraction: float) -> FixRecord:
        """Nothing."""
        return FixRecord(fraction, self.layout.size)

    def finish(self) -> Compressed:
        """Every weight's own value."""
        return Compressed.of(self.layout, self.weight.detach(), None, untouched(self.model, self.layout))
