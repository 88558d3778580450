"""The settings, section by section: what each is, what is allowed, and where it starts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from pwfn.config.checks import Choice, Fractions, Number, Numbers, Section, Selectors, Switch, setting

PAPER_FRACTIONS: tuple[float, ...] = (0.2, 0.4, 0.6, 0.7, 0.8, 0.9, 0.95, 0.975, 0.99, 1.0)
"""Fraction of all weights that is fixed after each of the ten rounds."""


class MethodName(StrEnum):
    """Which system puts the weights on few values."""

    PWFN = "pwfn"  # probabilistic weight fixing: one codebook, a posterior
    WFN = "wfn"  # weight fixing by relative distance: one codebook
    LSQ = "lsq"  # a uniform quantiser with a learned step for each layer
    LSQ_PLUS = "lsq+"  # the same with better starts, and an offset for activations
    APOT = "apot"  # levels that are sums of powers of two, a learned clip point for each layer
    QVIT = "q-vit"  # quantisers by head and channel, rectified queries and keys; transformers only
    KMEANS = "kmeans"  # Deep Compression's shared weights
    BASELINE = "baseline"  # the network as it is


class Rule(StrEnum):
    """Which weights are fixed at the chosen centre (D is the distance to it in sigmas)."""

    MEAN = "mean"  # the longest prefix, by D, whose mean D is at most delta: the paper's text
    EACH = "each"  # every weight with D at most delta: the authors' released program
    NEAREST = "nearest"  # like mean, among the weights whose nearest candidate is the centre


class SigmaInit(StrEnum):
    """Where sigma starts."""

    POWERS = "powers"  # by relative distance to the powers of two on either side: the prior
    CONSTANT = "constant"  # one value for all: the paper's "no prior"
    NETWORK = "network"  # one value for all, by the root mean square of all weights
    TOLERANCE = "tolerance"  # one value for all: the noise at which the loss has risen by so much
    RELATIVE = "relative"  # in proportion to |mu|: WFN's view of what a weight may move
    CURVATURE = "curvature"  # scale / h, with h the diagonal Fisher: where alpha and the loss balance
    CURVATURE_ROOT = "curvature_root"  # scale / sqrt(h): every weight's noise costs the loss the same


class FixedSigma(StrEnum):
    """Which sigma a weight has once it is fixed."""

    STD = "std"  # population standard deviation of the means that moved together
    KEEP = "keep"  # the sigma it had


class Optimizer(StrEnum):
    """What makes the steps."""

    SGD = "sgd"
    ADAMW = "adamw"  # momentum is its first beta, 0.999 the second


class Precision(StrEnum):
    """Number type of the forward and backward pass (weights and updates stay float32)."""

    FP32 = "fp32"
    BF16 = "bf16"
    FP16 = "fp16"  # with a loss scale that adapts itself


class Decay(StrEnum):
    """How the learning rate falls over the life of an optimiser: a round, or the run where it keeps one."""

    NONE = "none"
    COSINE = "cosine"  # half a cosine, to zero


class Rest(StrEnum):
    """Numbers that are enough for the tensors beside the compressed weights, which keep their own type."""

    FLOAT32 = "float32"  # as they are
    FLOAT16 = "float16"  # 11 significant bits, up to 65,504
    BFLOAT16 = "bfloat16"  # 8 significant bits, as large as float32


class Codebooks(StrEnum):
    """What has a codebook of its own."""

    METHOD = "method"  # as the method's paper has it
    NETWORK = "network"
    LAYER = "layer"
    CHANNEL = "channel"  # every output channel of a weight
    HEAD = "head"  # every attention head of q, k and v, and every output channel of other weights


@dataclass(frozen=True)
class LayoutConfig(Section):
    """Which parameters are compressed, beyond the weights and biases of conv and linear layers."""

    _name = "layout"
    include: Sequence[str | type] = setting((), Selectors(), "compress these as well")
    exclude: Sequence[str | type] = setting((), Selectors(), "leave these out (wins over include)")


@dataclass(frozen=True)
class PosteriorConfig(Section):
    """The Gaussian weights: where sigma starts, and what keeps it from collapsing."""

    _name = "posterior"
    init: SigmaInit = setting(SigmaInit.TOLERANCE, Choice(SigmaInit), "where sigma starts")
    scaled: bool = setting(
        False,
        Switch(),
        "whatever the init, sigma is scaled, all weights alike, until its noise raises the loss by tolerance",
    )
    constant_sigma: float = setting(
        1e-3, Number(0, above_low=True), 'the starting sigma for init = "constant"'
    )
    network_sigma: float = setting(
        0.33,
        Number(0, above_low=True),
        'the starting sigma for init = "network", as a share of the root mean square of all weights',
    )
    tolerance: float = setting(
        0.1,
        Number(0, above_low=True),
        'for init = "tolerance", or scaled: how much its noise may raise the loss (nats, for cross entropy)',
    )
    tolerance_batches: int = setting(
        8, Number(1, whole=True), "batches on which that is tried, before training"
    )
    relative_sigma: float = setting(
        0.05, Number(0, above_low=True), 'the starting sigma for init = "relative", as a share of |mu|'
    )
    curvature_batches: int = setting(
        32, Number(1, whole=True), "batches that the curvature h is gathered from, before training"
    )
    curvature_sigma: float = setting(
        0.01,
        Number(0, above_low=True),
        'the starting sigma, for init = "curvature" and "curvature_root", of a weight of median curvature',
    )
    curvature_scale: float | None = setting(
        None,
        Number(0, above_low=True, optional=True),
        'in place of that: sigma = scale / h for "curvature", scale / sqrt(h) for "curvature_root"',
    )
    alpha: float = setting(2**-11, Number(0), "strength of the regulariser")
    cap: float = setting(0.05, Number(0, above_low=True), "S: sigma above it is not rewarded")
    learn_sigma: bool = setting(
        False, Switch(), "off: a free weight keeps the sigma it starts with, and there is no regulariser"
    )
    noise_on_fixed: bool = setting(True, Switch(), "fixed weights are sampled in training too")

    @property
    def by_tolerance(self) -> bool:
        """Whether sigma's size is what the network tolerates, found out before training."""
        return self.scaled or self.init is SigmaInit.TOLERANCE

    @property
    def strength(self) -> float:
        """Of the regulariser in force: alpha, or nothing where sigma does not learn."""
        return self.alpha if self.learn_sigma else 0.0

    def sigma_rate(self, lr: float, sigma_lr: float | None) -> float:
        """The learning rate of sigma: its own, else that of all; zero where it does not learn.

        >>> PosteriorConfig().sigma_rate(0.1, 1.0), PosteriorConfig(learn_sigma=True).sigma_rate(0.1, None)
        (0.0, 0.1)
        """
        if not self.learn_sigma:
            return 0.0
        return lr if sigma_lr is None else sigma_lr


@dataclass(frozen=True)
class ClusteringConfig(Section):
    """One fixing round."""

    _name = "clustering"
    rule: Rule = setting(Rule.EACH, Choice(Rule), "which weights are fixed at a centre")
    b: int | None = setting(
        None,
        Number(0, 30, whole=True, optional=True),
        'smallest power of two is 2^-b; "off": as large as is within two sigmas, by the median free weight',
    )
    multiple: int = setting(
        1,
        Number(1, 31, whole=True),
        "candidates are so many times a sum of powers of two; 3: a step halfway between those of two b",
    )
    most_values: int | None = setting(
        None,
        Number(2, whole=True, optional=True),
        'most values in the codebook: where the last fixing leaves more, rare ones go to others; "off": any',
    )
    delta: float = setting(1.0, Number(0, above_low=True), "first threshold, in sigmas")
    omega_max: int = setting(4, Number(1, 6, whole=True), "most powers of two in a centre")
    rate: float = setting(
        0.0,
        Number(0),
        "sigmas that a weight goes out of its way to save a bit: it votes for the candidate of the least "
        "D + rate * bits, bits = -log2 of the share of fixed weights there",
    )
    zero_fix: bool = setting(False, Switch(), "weights below the smallest candidate are at distance 0 from 0")
    zero_first: float = setting(
        0.0,
        Number(0),
        "sigmas: the first round begins with all weights that near to 0 going there, however many they are",
    )
    sweep: float | None = setting(
        16.0,
        Number(0, above_low=True, optional=True),
        "once delta would pass it, the rest go each to their own nearest candidate",
    )
    distance_floor: float = setting(2**-30, Number(0, above_low=True), "smallest sigma used in a distance")
    fixed_sigma: FixedSigma = setting(FixedSigma.STD, Choice(FixedSigma), "the sigma of a fixed weight")


@dataclass(frozen=True)
class QuantiserConfig(Section):
    """The quantisers of LSQ, LSQ+, APoT and Q-ViT, and the size of k-means' codebooks."""

    _name = "quantiser"
    bits: int = setting(4, Number(2, 8, whole=True), "of a weight; k-means has 2^bits centroids")
    activation_bits: int | None = setting(
        None,
        Number(2, 8, whole=True, optional=True),
        'of the inputs of layers; "off": they are not quantised',
    )
    include_ends: bool = setting(
        False, Switch(), "the first and the last layer have as few bits as the others, not 8"
    )
    codebooks: Codebooks = setting(
        Codebooks.METHOD, Choice(Codebooks), "what has a codebook of its own, where the method has a choice"
    )


@dataclass(frozen=True)
class WfnConfig(Section):
    """Weight fixing by relative distance (WFN)."""

    _name = "wfn"
    delta: float = setting(
        0.015,
        Number(0, 0.5, above_low=True),
        "mean relative distance that a cluster may move, and the grid's own",
    )
    omega_max: int = setting(20, Number(0, 30, whole=True), "order at which delta doubles instead")
    ratio: float = setting(0.4, Number(0), "the pull to the centres, as a share of the task's loss")
    temperature: float = setting(0.05, Number(0, above_low=True), "of the softmin over the centres")
    nearest: int = setting(16, Number(1, whole=True), "centres that a weight is pulled to, the nearest")


@dataclass(frozen=True)
class TrainingConfig(Section):
    """The optimiser, its state afresh in every round."""

    _name = "training"
    optimizer: Optimizer = setting(Optimizer.SGD, Choice(Optimizer), "what makes the steps")
    learning_rate: float = setting(1e-3, Number(0), "for mu and the uncompressed parameters")
    sigma_learning_rate: float | None = setting(
        None, Number(0, optional=True), 'for sigma; "off": the same as learning_rate'
    )
    momentum: float = setting(0.9, Number(0, 1), "of SGD; the first beta of AdamW")
    weight_decay: float = setting(1e-4, Number(0), "on mu and the uncompressed; never on sigma")
    decay: Decay = setting(Decay.NONE, Choice(Decay), "how the learning rate falls")
    clip_norm: float | None = setting(
        1.0,
        Number(0, above_low=True, optional=True),
        "largest norm of the task's gradient, before the regulariser's part is added",
    )
    precision: Precision = setting(
        Precision.FP32, Choice(Precision), "number type of the forward and backward pass"
    )
    channels_last: bool = setting(
        False, Switch(), "images in the order that convolutions in bf16 and fp16 are fastest with"
    )
    fused: bool = setting(
        True,
        Switch(),
        "draw and step in one pass over the vectors, where one process does it alone; LSQ at once",
    )
    cuda_graph: bool = setting(
        False, Switch(), "on CUDA, record forward and backward once and replay it: Python code runs no more"
    )
    accumulate: int = setting(
        1, Number(1, whole=True), "batches averaged into one step, each with its own noise"
    )
    distill: bool = setting(
        False,
        Switch(),
        "train by the divergence from the original network's softmax output; scores are by the labels",
    )
    distill_share: float = setting(
        1.0, Number(0, 1), "share of that divergence in the loss, the labels' loss has the rest"
    )
    average: float = setting(
        0.0,
        Number(0, 0.99999),
        "decay a step of the moving average of what is trained, which each fixing goes by; 0: none",
    )
    blend: float = setting(
        0.0,
        Number(0, 1),
        "share of the batches that are blended with themselves in another order, t x + (1 - t) x', and their "
        "labels alike (mixup)",
    )
    cutmix: float = setting(
        0.0,
        Number(0, 1),
        "share of the batches whose images get a rectangle from another one, and so much of its label",
    )
    cutout: int = setting(
        0, Number(0, 4096, whole=True), "side of a square that is blanked in every image, in pixels"
    )
    label_smoothing: float = setting(
        0.0, Number(0, 1), "share of a label that is spread over all classes evenly; scores are without"
    )
    steps_per_epoch: int | None = setting(
        None,
        Number(1, whole=True, optional=True),
        'batches in an epoch; "off": the length of the loader',
    )


@dataclass(frozen=True)
class ScheduleConfig(Section):
    """Rounds: how much is fixed, and how long is trained before each."""

    _name = "schedule"
    fractions: Sequence[float] = setting(
        PAPER_FRACTIONS, Fractions(), "fraction of the weights fixed after each round"
    )
    warmup_epochs: float = setting(0.05, Number(0), "trained before the first round's fixing")
    epochs_per_round: float = setting(3.0, Number(0), "trained before each other fixing")
    epochs_of_rounds: Sequence[float] | None = setting(
        None,
        Numbers(),
        "trained before each fixing, a number for each fraction, in place of the two above",
    )
    epochs: float = setting(27.0, Number(0), "trained in all, by methods that do not fix in rounds")
    reestimate_in_rounds: bool = setting(
        False,
        Switch(),
        "gather BatchNorm statistics at the point estimate before each round is scored, over "
        "finish.reestimate_epochs; training itself does not see them",
    )


@dataclass(frozen=True)
class FinishConfig(Section):
    """After the last round, with every compressed weight in place."""

    _name = "finish"
    reestimate_batchnorm: bool = setting(True, Switch(), "gather BatchNorm statistics again, with noise off")
    reestimate_epochs: float = setting(1.0, Number(0, above_low=True), "data used for that")
    polish_epochs: float = setting(1.0, Number(0), "train the uncompressed parameters alone")
    polish_learning_rate: float = setting(1e-3, Number(0), "for that")
    fold_batchnorm: bool = setting(
        False,
        Switch(),
        "BatchNorm keeps a scale and a shift alone: right in evaluation, not for training on",
    )
    rest: Rest = setting(
        Rest.FLOAT32,
        Choice(Rest),
        "what is not compressed is rounded to numbers of this type, for a smaller file",
    )

    @property
    def lightens(self) -> bool:
        """Whether anything is done to what lies beside the compressed weights, after all else."""
        return self.fold_batchnorm or self.rest is not Rest.FLOAT32


@dataclass(frozen=True)
class TargetConfig(Section):
    """What the result must reach; with a target, the best state on the way that meets it is kept."""

    _name = "target"
    max_drop: float | None = setting(
        None, Number(0, 100, optional=True), "points of accuracy (of 100) that may be lost"
    )
    bits: float | None = setting(
        None, Number(0, above_low=True, optional=True), "most entropy a weight may have, in bits"
    )
    keep_states: bool = setting(
        False, Switch(), "score and keep the whole network as it would be after every round, target or not"
    )

    @property
    def wanted(self) -> bool:
        """Whether there is any target."""
        return self.max_drop is not None or self.bits is not None
