"""What looks wrong with a run, in plain sentences: before the work, and after it.

A healthy run gets none. A limit on small samples keeps chance from raising an alarm.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence

from torch import nn

from pwfn.bayes.batchnorm import tracked
from pwfn.bayes.distributed import Distributed
from pwfn.bayes.network import WeightNetwork
from pwfn.evaluate.entropy import Pool
from pwfn.evaluate.score import Scores

LOGGER = logging.getLogger("pwfn")

FEW_STEPS = 50
"""BatchNorm statistics forget a fraction 0.9 per step: 0.5 % of the old ones are left after 50 steps."""

_FELL, _AGREED = 0.10, 0.80  # accuracy lost, and agreement kept, beyond which a network counts as ruined
_LEAST_LOST = 9  # examples: three standard errors if every change was for the worse
_LEAST_EXAMPLES, _MOST_ERROR = 30, 0.05  # from which accuracy can be told from chance


def doubts(before: Scores | None, steps: Sequence[int]) -> tuple[str, ...]:
    """What looks wrong before any training: the original network's scores, and the steps of each phase.

    >>> doubts(Scores(0.3, 0.92, 10_000), [20, 391, 391])
    ()
    """
    found = []
    if 0 < (count := sum(steps)) < FEW_STEPS:
        found.append(f"only {count} training steps in all: give more data, more epochs or smaller batches")
    if before is not None and (wrong := _bad_start(before)) is not None:
        found.append(wrong)
    return tuple(found)


def kept_statistics(net: WeightNetwork, model: nn.Module) -> tuple[str, ...]:
    """Whether BatchNorm layers are taken as frozen only because of the modes that the model was given in."""
    by_mode = [name for name in net.frozen if name in tracked(model)]
    if net.settings.finish.keeps_statistics or not by_mode:
        return ()
    more = f" and {len(by_mode) - 1} more" if len(by_mode) > 1 else ""
    return (
        f"BatchNorm {by_mode[0]!r}{more} is in evaluation mode, while the module around it or another "
        "BatchNorm layer is in training mode: its statistics are kept; if not meant so, call model.eval()",
    )


def left_out(net: WeightNetwork) -> tuple[str, ...]:
    """What is not compressed, if that is most of the network and nobody asked for it.

    >>> left_out(WeightNetwork(nn.Sequential(nn.Linear(8, 8), nn.LSTM(8, 2))))[0][:60]
    "57% of the parameters are not compressed: for example '1.wei"
    """
    others = net.layout.left_out
    size = sum(math.prod(item.shape) for item in others)
    if size <= net.layout.size or net.settings.layout.exclude:
        return ()
    largest = max(others, key=lambda item: math.prod(item.shape))
    share = size / (size + net.layout.size)
    return (
        f"{share:.0%} of the parameters are not compressed: for example {largest.name!r} ({largest.reason}); "
        "name them in layout.include",
    )


def other_threads(before: int, now: int) -> tuple[str, ...]:
    """What a run that resumes must know if torch has another number of threads; 0: not known.

    Sums, and gradients of convolutions, are added up by threads: another number rounds differently.

    >>> other_threads(2, 2)
    ()
    """
    if before == now or not (before and now):
        return ()
    return (
        f"the run had {before} threads and resumes with {now}: it may end in other bytes than without the "
        f"stop; for the same ones resume with OMP_NUM_THREADS={before}",
    )


def ruin(before: Scores | None, after: Scores | None, weights: Pool | None = None) -> tuple[str, ...]:
    """Why the result is useless, in one sentence; empty if it is not, or if nothing was measured.

    >>> ruin(Scores(0.3, 0.922, 10_000), Scores(2.1, 0.389, 10_000))
    ('RUINED: accuracy fell from 92.20% to 38.90%',)
    """
    why = None
    if after is not None:
        why = None if math.isfinite(after.loss) else f"the loss is {after.loss}"
        why = why or _disagreement(after)
        if why is None and before is not None:
            why = _fall(before, after) or _one_answer(before, after)
    if why is None and weights is not None and weights.zero_share == 1:
        why = "every weight is zero"
    return () if why is None else (f"RUINED: {why}",)


def warn(sentences: tuple[str, ...], distributed: Distributed) -> tuple[str, ...]:
    """Log sentences in the first process, and return them."""
    for sentence in sentences if distributed.leads else ():
        LOGGER.warning(sentence)
    return sentences


def _bad_start(before: Scores) -> str | None:
    if not math.isfinite(before.loss):
        return f"the original network's loss is {before.loss}: wrong weights, or NaN in the data?"
    if before.metric is not None and before.metric > 1:
        return f"the metric is {before.metric:.4g}, shown as {before.metric:.2%}: return a share from 0 to 1"
    if before.answers is None or before.metric is None or before.answers.labels == 0:
        return None
    outputs, classes = before.answers.outputs, before.answers.labels
    chance = 1 / outputs
    error = math.sqrt(chance * (1 - chance) / before.examples)
    if before.examples < _LEAST_EXAMPLES or error > _MOST_ERROR or before.metric > chance + 2 * error:
        return None
    # A sample of few examples has few classes in any case.
    fewer = f"; {classes:,} classes for {outputs:,} outputs" if 2 * classes <= outputs else ""
    return (
        f"the original network is right on {before.metric:.2%} of {before.examples:,} examples "
        f"(chance {chance:.2%}{fewer}): wrong weights, preprocessing or labels?"
    )


def _disagreement(after: Scores) -> str | None:
    if not after.agreement or after.metric is None:
        return None
    if after.metric >= _AGREED or (1 - after.metric) * after.examples < _LEAST_LOST:
        return None
    return f"only {after.metric:.2%} of the predictions are those of the original network"


def _fall(before: Scores, after: Scores) -> str | None:
    if before.metric is None or after.metric is None or after.agreement:
        return None
    unit = 100 if before.metric > 1 else 1  # a metric in percent, which a warning names at the start
    lost = (before.metric - after.metric) / unit
    if not lost > _FELL or lost * after.examples < _LEAST_LOST:
        return None
    # A metric of the user may be an error, where less is better: the loss then falls with it.
    if after.answers is None and after.loss <= before.loss:
        return None
    return f"accuracy fell from {before.metric / unit:.2%} to {after.metric / unit:.2%}"


def _one_answer(before: Scores, after: Scores) -> str | None:
    """Whether all answers have become one class, or all classes equally likely."""
    if before.answers is None or after.answers is None:
        return None
    was, now = before.answers, after.answers
    others = 1 - was.top_share  # small where the data themselves are mostly of one class
    if others * before.examples >= 2 * _LEAST_LOST and 10 * (1 - now.top_share) <= others:
        return f"{now.top_share:.2%} of the predictions are one class (before: {was.top_share:.2%})"
    # Some networks are trained to low confidences, and a right answer may have one: accuracy decides.
    chance = 1 / now.outputs
    flat, sure = chance + 0.05 * (1 - chance), chance + 0.25 * (1 - chance)
    if after.metric is None and now.confidence < flat and was.confidence > sure:
        return f"its mean confidence is {now.confidence:.2%} (before: {was.confidence:.2%})"
    return None
