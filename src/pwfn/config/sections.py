"""The settings, one section per stage: default, allowed values and meaning of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from pwfn.config.checks import Choice, Epochs, Fractions, Number, Section, Selectors, Switch, setting

PAPER_FRACTIONS: tuple[float, ...] = (0.2, 0.4, 0.6, 0.7, 0.8, 0.9, 0.95, 0.975, 0.99, 1.0)
"""Fraction of all weights that is fixed after each of the ten rounds."""

WARMUP_EPOCHS = 0.05
"""Training before the first of several fixings, where ``schedule.epochs_per_round`` is one number."""


class Rule(StrEnum):
    """Which weights are fixed at the chosen centre (D is the distance to it in sigmas)."""

    MEAN = "mean"  # the longest prefix, by D, whose mean D is at most delta: the paper's text
    EACH = "each"  # every weight with D at most delta: the authors' released program
    NEAREST = "nearest"  # like mean, among the weights whose nearest candidate is the centre


class SigmaInit(StrEnum):
    """How the initial sigma is chosen."""

    POWERS = "powers"  # by relative distance to the two powers of two around |mu|: the paper's prior
    CONSTANT = "constant"  # 1e-3 for every weight: the paper's "no prior"
    RMS = "rms"  # one value: a fraction of the root mean square of all weights
    TOLERANCE = "tolerance"  # one value: the noise that raises the loss by a set amount


class OptimizerName(StrEnum):
    """The optimiser of the training phases."""

    SGD = "sgd"  # momentum 0.9
    ADAMW = "adamw"  # betas 0.9 and 0.999


class Precision(StrEnum):
    """Number type of the forward and backward pass (weights and updates stay float32)."""

    FP32 = "fp32"
    BF16 = "bf16"
    FP16 = "fp16"  # with an adaptive loss scale


class SchedulerName(StrEnum):
    """How the learning rate changes during a phase."""

    NONE = "none"
    COSINE = "cosine"  # falls to zero along half a cosine


class UncompressedDtype(StrEnum):
    """Precision of the tensors that are not compressed."""

    FLOAT32 = "float32"  # unchanged
    TF32 = "tf32"  # 11 significant bits, range of float32
    FLOAT16 = "float16"  # 11 significant bits, up to 65,504
    BFLOAT16 = "bfloat16"  # 8 significant bits, range of float32


@dataclass(frozen=True)
class LayoutConfig(Section):
    """Which parameters are compressed, beyond the weights and biases of conv and linear layers."""

    _name = "layout"
    include: Sequence[str | type] = setting((), Selectors(), "compress these parameters as well")
    exclude: Sequence[str | type] = setting((), Selectors(), "do not compress these (wins over include)")


@dataclass(frozen=True)
class PosteriorConfig(Section):
    """The Gaussian weights."""

    _name = "posterior"
    init: SigmaInit = setting(SigmaInit.TOLERANCE, Choice(SigmaInit), "how the initial sigma is chosen")
    rms_fraction: float = setting(
        0.33,
        Number(0, above_low=True),
        'initial sigma for init = "rms", as a fraction of the root mean square of all weights',
    )
    tolerance: float = setting(
        0.1,
        Number(0, above_low=True),
        'for init = "tolerance": cost of noise in nats; for other losses, in standard deviations of outputs',
    )
    alpha: float = setting(2**-11, Number(0), "strength of the regulariser, where sigma is trained")
    cap: float = setting(0.05, Number(0, above_low=True), "S: the regulariser ignores sigma above it")
    noise_on_fixed: bool = setting(True, Switch(), "draw noise for fixed weights in training too")


@dataclass(frozen=True)
class FixingConfig(Section):
    """One fixing round."""

    _name = "fixing"
    rule: Rule = setting(Rule.EACH, Choice(Rule), "which weights are fixed at a centre")
    grid_exponent: int | None = setting(
        None,
        Number(0, 30, whole=True, optional=True),
        'b: the smallest candidate is 2^-b; "off": between one and two sigmas of the median free weight',
    )
    sweep: float | None = setting(
        16.0,
        Number(0, above_low=True, optional=True),
        "sigmas: once delta would pass it, each remaining weight goes to its own nearest candidate",
    )


@dataclass(frozen=True)
class TrainingConfig(Section):
    """The training phase before each fixing. The optimiser starts afresh in each."""

    _name = "training"
    optimizer: OptimizerName = setting(OptimizerName.SGD, Choice(OptimizerName), "the optimiser")
    learning_rate: float = setting(1e-3, Number(0), "for mu and the uncompressed parameters")
    sigma_learning_rate: float | None = setting(
        None, Number(0, optional=True), 'for sigma; "off": sigma is not trained and not regularised'
    )
    weight_decay: float = setting(1e-4, Number(0), "on mu and the uncompressed parameters, never on sigma")
    scheduler: SchedulerName = setting(
        SchedulerName.NONE, Choice(SchedulerName), "how the learning rate changes during a phase"
    )
    clip_norm: float | None = setting(
        1.0,
        Number(0, above_low=True, optional=True),
        "largest norm of the task's gradient, before the regulariser's gradient is added",
    )
    precision: Precision = setting(
        Precision.FP32, Choice(Precision), "number type of the forward and backward pass"
    )
    cuda_graph: bool = setting(
        True, Switch(), "on CUDA, record a step once and replay it, where the model allows that"
    )
    accumulate: int = setting(1, Number(1, whole=True), "batches per step, each with its own noise")
    distill: bool = setting(
        False,
        Switch(),
        "train by the divergence from the original network's softmax output; scores use the labels",
    )
    steps_per_epoch: int | None = setting(
        None, Number(1, whole=True, optional=True), 'batches per epoch; "off": the length of the loader'
    )


@dataclass(frozen=True)
class ScheduleConfig(Section):
    """Rounds: how much is fixed, and how long is trained before each fixing."""

    _name = "schedule"
    fractions: Sequence[float] = setting(
        PAPER_FRACTIONS, Fractions(), "fraction of the weights that is fixed after each round"
    )
    epochs_per_round: float | Sequence[float] = setting(
        3.0,
        Epochs(),
        f"epochs before each fixing: one number ({WARMUP_EPOCHS} before the first of several), or one each",
    )


@dataclass(frozen=True)
class FinishConfig(Section):
    """After the last round, with every compressed weight fixed."""

    _name = "finish"
    reestimate_epochs: float | None = setting(
        1.0,
        Number(0, optional=True),
        'epochs of data for new BatchNorm statistics, noise off; 0: those of training; "off": never change',
    )
    polish_epochs: float = setting(1.0, Number(0), "epochs of training of the uncompressed parameters alone")
    fold_batchnorm: bool = setting(
        True, Switch(), "reduce BatchNorm to one scale and one shift: for inference only"
    )
    uncompressed_dtype: UncompressedDtype = setting(
        UncompressedDtype.TF32, Choice(UncompressedDtype), "round the uncompressed tensors to this type"
    )

    @property
    def keeps_statistics(self) -> bool:
        """Whether BatchNorm keeps the statistics of the model given, in training too."""
        return self.reestimate_epochs is None

    @property
    def takes_steps(self) -> bool:
        """Whether training data are read after the last fixing."""
        return bool(self.polish_epochs or self.reestimate_epochs)

    @property
    def shrinks(self) -> bool:
        """Whether the uncompressed tensors are made smaller after everything else."""
        return self.fold_batchnorm or self.uncompressed_dtype is not UncompressedDtype.FLOAT32


@dataclass(frozen=True)
class TargetConfig(Section):
    """What the result must reach. With a target, every round's state is kept and the best one is chosen."""

    _name = "target"
    max_drop: float | None = setting(
        None, Number(0, 100, optional=True), "points of accuracy (of 100) that may be lost"
    )
    bits: float | None = setting(
        None, Number(0, above_low=True, optional=True), "largest entropy per weight, in bits"
    )
    bytes: int | None = setting(None, Number(1, whole=True, optional=True), "largest file, in bytes")

    @property
    def wanted(self) -> bool:
        """Whether there is a target."""
        return any(limit is not None for limit in (self.max_drop, self.bits, self.bytes))
