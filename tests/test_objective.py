"""The loss of a batch: by labels, by a teacher, and what a loss must be."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributions import Categorical, kl_divergence
from torch.nn import functional as F

from pwfn.bayes.batches import Batch
from pwfn.bayes.objective import Objective, divergence, relative_square
from pwfn.errors import DataError

CPU = torch.device("cpu")


def test_targets_are_asked_for_unless_the_original_teaches() -> None:
    net, x = nn.Linear(2, 3), torch.randn(4, 2)
    batch = Batch.of(x, CPU)
    with pytest.raises(
        DataError, match=r"step 1 has no target: give \(input, target\) batches, or .*distill=True"
    ):
        Objective(F.cross_entropy)(net, batch, "round 1 of 2, step 1")
    teacher = nn.Linear(2, 3)
    loss = Objective(divergence, teacher)(net, batch, "here")
    torch.testing.assert_close(loss, divergence(net(x), teacher(x)))
    loss.backward()
    assert teacher.weight.grad is None
    assert net.weight.grad is not None


def test_one_output_has_no_cross_entropy() -> None:
    """That of one class is 0, whatever the output: nothing would be learned, and every answer right."""
    for target in (torch.zeros(4).long(), torch.ones(4, 1)):
        for loss in (F.cross_entropy, nn.CrossEntropyLoss()):
            with pytest.raises(DataError, match="one output, and the cross entropy of one class is always 0"):
                Objective(loss).compared(torch.randn(4, 1), target, "here")
    logit, target = torch.randn(4, 1), torch.ones(4, 1)
    loss_fn = F.binary_cross_entropy_with_logits
    torch.testing.assert_close(Objective(loss_fn).compared(logit, target, "here"), loss_fn(logit, target))


@pytest.mark.parametrize("shape", [(5, 3), (1, 2), (4, 3, 2, 5)])
def test_divergence_is_the_kullback_leibler_divergence_from_the_reference(shape: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(0)
    output, reference = 3 * torch.randn(2, *shape, generator=generator)
    p, q = (Categorical(logits=x.movedim(1, -1).double()) for x in (reference, output))
    expected = kl_divergence(p, q).mean()
    assert divergence(output, reference).item() == pytest.approx(expected.item(), rel=1e-5)
    assert divergence(reference, output).item() != pytest.approx(expected.item(), rel=1e-3)


@given(st.lists(st.floats(-20, 20), min_size=2, max_size=6), st.floats(-5, 5))
@settings(deadline=None, max_examples=50)
def test_divergence_is_zero_for_equal_distributions_and_never_negative(
    logits: list[float], shift: float
) -> None:
    x = torch.tensor([logits])
    assert divergence(x, x).item() == 0
    assert abs(divergence(x + shift, x).item()) < 1e-5  # softmax does not see a shift
    assert divergence(x.flip(1) * 2, x).item() > -1e-6


def test_more_outputs_in_training_mode_cannot_be_compared() -> None:
    with pytest.raises(ValueError, match="more in training mode"):
        relative_square((torch.ones(2), torch.ones(2)), torch.ones(2))
