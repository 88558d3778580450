"""Loss and accuracy of a model over a loader, against values computed by hand."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import pwfn
from pwfn.bayes.batches import Source
from pwfn.bayes.objective import Objective, divergence
from pwfn.config import Config, Precision
from pwfn.errors import DataError
from pwfn.evaluate.score import Scores, accuracy, mean_scores

CPU = torch.device("cpu")


def source(loader: Iterable[Any], name: str = "train_loader") -> Source:
    return Source(name, loader, CPU)


def test_accuracy_by_hand() -> None:
    output = torch.tensor([[0.1, 0.7, 0.2], [0.9, 0.0, 0.1], [0.2, 0.3, 0.5], [0.4, 0.3, 0.3]])
    assert accuracy(output, torch.tensor([1, 0, 0, 2])).item() == 0.5
    assert accuracy(output, torch.tensor([1, 0, -100, -100])).item() == 1.0  # as cross entropy ignores them
    assert accuracy(output, torch.eye(3)[torch.tensor([1, 0, 0, 2])]).item() == 0.5  # as probabilities
    pixels = output.t().reshape(1, 3, 2, 2)
    assert accuracy(pixels, torch.tensor([[[1, 0], [2, 2]]])).item() == 0.75
    with pytest.raises(ValueError, match="predictions for"):
        accuracy(output, torch.zeros(4, 1, dtype=torch.int64))  # would be compared four by four


class Modes(nn.Module):
    """Notes the mode it runs in, and has a part whose mode differs."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Identity().eval()
        self.seen: list[tuple[bool, bool]] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append((self.training, self.frozen.training))
        return x


def test_evaluation_weights_batches_by_their_size() -> None:
    """Three batches of 3, 3 and 1 with mean losses 1, 2 and 9: 18 / 7, not 4."""
    losses, marks = {3.0: 1.0, 4.0: 2.0, 5.0: 9.0}, {3.0: 0.5, 4.0: 0.5, 5.0: 1.0}
    data = [(torch.full((n, 1), key), torch.zeros(n)) for n, key in ((3, 3.0), (3, 4.0), (1, 5.0))]
    scores = mean_scores(
        nn.Identity(),
        source(data),
        Objective(lambda output, target: torch.tensor(losses[float(output[0])])),
        lambda output, target: torch.tensor(marks[float(output[0])]),
    )
    assert scores.loss == pytest.approx((3 * 1 + 3 * 2 + 1 * 9) / 7, rel=1e-15)
    assert scores.metric == pytest.approx((3 * 0.5 + 3 * 0.5 + 1) / 7, rel=1e-15)
    assert scores.examples == 7


def test_evaluation_does_not_depend_on_how_the_data_are_cut() -> None:
    torch.manual_seed(0)
    model, x, y = nn.Linear(4, 3).double(), torch.randn(23, 4).double(), torch.randint(0, 3, (23,))
    objective = Objective(F.cross_entropy)
    whole = mean_scores(model, source([(x, y)]), objective, accuracy)
    for size in (1, 4, 7, 22):
        cut = list(zip(x.split(size), y.split(size), strict=True))
        scores = mean_scores(model, source(cut), objective, accuracy)
        assert scores.loss == pytest.approx(whole.loss, rel=1e-12)
        assert scores.metric == pytest.approx(float((model(x).argmax(1) == y).double().mean()), rel=1e-12)
        assert scores.examples == 23


def test_evaluation_runs_in_evaluation_mode_without_gradient_and_puts_every_mode_back() -> None:
    model = Modes()
    data = [(torch.zeros(2, 1, requires_grad=True), torch.zeros(2))]

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        assert not torch.is_grad_enabled()
        return output.sum()

    mean_scores(model, source(data), Objective(loss_fn), None)
    assert model.seen == [(False, False)]
    assert model.training
    assert not model.frozen.training

    def failing(output: Tensor, target: Tensor) -> Tensor:
        raise ValueError("no")

    with pytest.raises(DataError, match="val_loader, batch 1: the loss cannot take"):
        mean_scores(model, source(data, "val_loader"), Objective(failing), None)
    assert model.training
    assert not model.frozen.training


def test_without_labels_a_network_is_scored_by_its_agreement_with_the_teacher() -> None:
    teacher = nn.Linear(2, 3)
    objective = Objective(divergence, teacher)
    x, y = torch.randn(4, 2), torch.tensor([0, 1, 2, 0])
    assert mean_scores(teacher, source([x]), objective, accuracy) == Scores(0.0, 1.0, 4, agreement=True)
    other = nn.Linear(2, 3)
    found = mean_scores(other, source([x[:1], x[1:]]), objective, accuracy)
    assert found.metric == float((other(x).argmax(1) == teacher(x).argmax(1)).double().mean())
    assert found.loss == pytest.approx(divergence(other(x), teacher(x)).item())
    assert found == pwfn.evaluate(other, [x[:1], x[1:]], original=teacher)
    # A metric of one's own is for labels; where some are labelled, those count.
    assert mean_scores(other, source([x]), objective, lambda o, t: 0.5).metric is None
    mixed = mean_scores(teacher, source([x, (x, teacher(x).argmax(1)), x]), objective, accuracy)
    assert mixed == Scores(0.0, 1.0, 12)
    assert mean_scores(teacher, source([(x, y)]), objective, None).metric is None


def test_evaluation_tells_what_is_wrong_with_the_data() -> None:
    model, objective = nn.Linear(2, 3), Objective(F.cross_entropy)
    good = (torch.randn(4, 2), torch.tensor([0, 1, 2, 0]))
    with pytest.raises(DataError, match="val_loader gave no batch: it is empty, or can be read only once"):
        mean_scores(model, source([], "val_loader"), objective, accuracy)
    with pytest.raises(
        DataError, match=r"val_loader, batch 2: the model cannot take inputs \(4, 5\) float32"
    ):
        mean_scores(model, source([good, (torch.randn(4, 5), good[1])], "val_loader"), objective, accuracy)
    with pytest.raises(DataError, match="val_loader, batch 1 has no target"):
        mean_scores(model, source([good[0]], "val_loader"), objective, accuracy)
    for metric in (lambda o, t: o == t, lambda o, t: o, lambda o, t: None, lambda o: 0.0):
        with pytest.raises(DataError, match="val_loader, batch 1: the metric cannot take"):
            mean_scores(model, source([good], "val_loader"), objective, metric)
    assert mean_scores(model, source([good]), objective, lambda o, t: 0.25).metric == 0.25  # a plain number


def test_scores_in_float32_are_of_float32_in_full_and_the_users_choice_comes_back() -> None:
    """TF32 gives a few images in ten thousand another class, and a file other figures on a GPU."""
    flags: list[str] = []
    cudnn, cuda = torch.backends.cudnn, torch.backends.cuda

    class Watched(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            flags.extend((cudnn.conv.fp32_precision, cuda.matmul.fp32_precision))
            return super().forward(x)

    source = Source("data", [(torch.zeros(2, 4), torch.zeros(2, dtype=torch.int64))], torch.device("cpu"))
    before = cudnn.conv.fp32_precision, cuda.matmul.fp32_precision
    for precision in (Precision.FP32, Precision.BF16):
        mean_scores(Watched(4, 3), source, Objective(F.cross_entropy), None, precision)
    assert flags == ["ieee", "ieee", *before]
    assert (cudnn.conv.fp32_precision, cuda.matmul.fp32_precision) == before


def test_the_public_function_takes_a_plain_model_and_loader() -> None:
    torch.manual_seed(0)
    model, x, y = nn.Linear(4, 3), torch.randn(12, 4), torch.randint(0, 3, (12,))
    found = pwfn.evaluate(model, list(zip(x.split(5), y.split(5), strict=True)))
    assert found.metric == pytest.approx(float((model(x).argmax(1) == y).double().mean()))
    assert found.loss == pytest.approx(F.cross_entropy(model(x), y).item(), rel=1e-6)
    error = pwfn.evaluate(model, [(x, torch.zeros(12, 3))], F.mse_loss)
    assert error.metric is None
    assert error.loss == pytest.approx(model(x).square().mean().item(), rel=1e-6)


def test_labels_that_the_loss_leaves_out_do_not_count() -> None:
    """Segmentation marks pixels of no class with 255, say; a batch may have nothing else."""
    torch.manual_seed(0)
    model, x, y = (
        nn.Conv2d(2, 3, 1).double(),
        torch.randn(7, 2, 4, 4).double(),
        torch.randint(0, 3, (7, 4, 4)),
    )
    for ignored in (-100, 255, 0):
        loss_fn, labels = nn.CrossEntropyLoss(ignore_index=ignored), y.clone()
        labels[:2], labels[2, 1:], labels[5, 3] = ignored, ignored, ignored
        valid = labels != ignored
        right = (model(x).argmax(1) == labels)[valid].double().mean()
        for size in (1, 2, 7):
            found = pwfn.evaluate(model, list(zip(x.split(size), labels.split(size), strict=True)), loss_fn)
            assert found.metric == pytest.approx(float(right), rel=1e-12)
            assert found.loss == pytest.approx(loss_fn(model(x), labels).item(), rel=1e-12)
            assert found.examples == 7
    with pytest.raises(DataError, match="every label"):
        pwfn.evaluate(model, [(x, torch.full_like(y, -100))])


def test_a_run_with_labels_left_out_is_scored_and_gets_a_posterior() -> None:
    torch.manual_seed(0)
    images = torch.randn(64, 2, 4, 4)
    labels = (images[:, 0] > 0).long()
    labels[:, 0] = 255
    model = nn.Sequential(nn.Conv2d(2, 8, 1), nn.ReLU(), nn.Conv2d(8, 2, 1))
    data = list(zip(images.split(8), labels.split(8), strict=True))
    config = Config.preset("small").override({"schedule.epochs_per_round": 1.0})
    result = pwfn.compress(model, data, data, config, nn.CrossEntropyLoss(ignore_index=255))
    assert result.after is not None
    predicted = result.model()(images).argmax(1)
    assert result.after.metric == pytest.approx(float((predicted == labels)[labels != 255].double().mean()))
    assert result.compressed.sigma_codes is not None
    assert not any("posterior" in sentence for sentence in result.warnings)


def test_a_tensor_is_cut_into_batches_and_a_file_is_no_model() -> None:
    torch.manual_seed(0)
    model, images = (
        nn.Sequential(nn.Conv2d(1, 3, 3), nn.Flatten(-3), nn.Linear(12, 2)),
        torch.randn(70, 1, 4, 4),
    )
    assert pwfn.evaluate(model, images, original=model).metric == 1.0
    with pytest.raises(DataError, match=r"apply_to\(model\)"):
        pwfn.evaluate("model.pwfn", images)  # type: ignore[arg-type]
