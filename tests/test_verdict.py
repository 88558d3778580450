"""Guards: labels without an output, a start near chance, few steps, a ruined result; sound runs pass."""

from __future__ import annotations

import json
import logging
import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import digits_run
from conftest import Call
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, Subset

from pwfn import Config, DataError, compress
from pwfn import evaluate as score
from pwfn.bayes.distributed import Distributed
from pwfn.bayes.method import METHODS, Method
from pwfn.bayes.network import WeightNetwork
from pwfn.bayes.objective import divergence
from pwfn.config import METHOD_DEFAULTS
from pwfn.evaluate.score import AnswerCounter, Answers, Scores
from pwfn.evaluate.verdict import FEW_STEPS, doubts, left_out, ruin
from pwfn.file.compressed import Compressed
from pwfn.fixing.record import FixRecord
from pwfn.layout import held, untouched
from pwfn.progress import Progress
from pwfn.result import Result
from pwfn.run.checkpoint import from_plain, to_plain
from pwfn.run.folder import run

README = Path(__file__).parents[1] / "README.md"
CPU = Distributed(torch.device("cpu"))
ENOUGH = [20, 391, 391]


def scored(metric: float | None, examples: int = 10_000, loss: float = 0.3, **answers: Any) -> Scores:
    """Scores of a sound classifier of ten balanced classes, except for what is given."""
    usual: dict[str, Any] = {"outputs": 10, "top_share": 0.11, "confidence": 0.9, "labels": 10}
    return Scores(loss, metric, examples, Answers(**{**usual, **answers}))


# What is ruined


@pytest.mark.parametrize(
    ("before", "after", "bad"),
    [
        (scored(0.922), scored(0.389), True),
        (scored(0.92), scored(0.8199), True),
        (scored(0.92), scored(0.8201), False),
        (scored(0.92), scored(0.95), False),
        (scored(0.92, 40), scored(0.75, 40), False),  # seven images
        (scored(0.92, 40), scored(0.60, 40), True),
        (None, scored(0.1), False),  # nothing to compare it with
        (scored(0.92), None, False),
        (scored(0.92), scored(0.92, loss=math.nan), True),
        (scored(None), scored(None, loss=math.inf), True),
        (scored(None), scored(None, top_share=0.95), True),
        (scored(None), scored(None, top_share=0.85), False),
        (scored(0.95, top_share=0.9), scored(0.9, top_share=1.0), True),  # nine of ten are of one class
        (scored(0.95, top_share=0.9), scored(0.94, top_share=0.95), False),
        (scored(0.9, 12, top_share=0.5), scored(0.9, 12, top_share=1.0), False),
        (scored(None), scored(None, confidence=0.12), True),
        (scored(None, confidence=0.2), scored(None, confidence=0.12), False),  # it was never sure
        (scored(0.92), scored(0.92, confidence=0.12), False),  # right, if not sure
        (scored(92.2), scored(91.9), False),  # in percent
        (scored(92.2), scored(71.9), True),
    ],
)
def test_a_result_is_ruined_by_what_it_lost(before: Scores | None, after: Scores | None, bad: bool) -> None:
    found = ruin(before, after)
    assert bool(found) == bad
    assert all(sentence.startswith("RUINED: ") and "\n" not in sentence for sentence in found)


def test_an_error_that_falls_with_the_loss_is_no_loss_of_accuracy() -> None:
    def own(loss: float, metric: float) -> Scores:
        return Scores(loss, metric, 1000)  # of a metric of the user: not counted by class

    assert ruin(own(0.5, 0.6), own(0.2, 0.3)) == ()
    assert ruin(own(0.2, 0.9), own(0.5, 0.3)) != ()


def test_low_agreement_with_the_original_is_ruin_without_labels() -> None:
    def agreeing(share: float) -> Scores:
        return Scores(1.2, share, 1000, agreement=True)

    (sentence,) = ruin(agreeing(1.0), agreeing(0.7))
    assert "70" in sentence
    assert "accuracy" not in sentence
    assert ruin(agreeing(1.0), agreeing(0.85)) == ()


def test_the_published_results_are_sound() -> None:
    rows = re.findall(r"^\| .+?\| (\d+\.\d+) \| (\d+\.\d+)", README.read_text(encoding="utf-8"), re.MULTILINE)
    assert len(rows) >= 8
    for before, after in rows:
        was, now = (scored(float(text) / 100) for text in (before, after))
        assert doubts(was, ENOUGH) == ruin(was, now) == ()


# The start


@pytest.mark.parametrize(
    ("before", "bad"),
    [
        (scored(0.102), True),
        (scored(0.12), False),
        (scored(0.92, 40), False),
        (scored(0.1, 20), False),  # two of twenty: nothing can be said
        (scored(0.55, 40, outputs=2, labels=2), False),
        (scored(0.51, outputs=2, labels=2), True),
        (scored(0.002, 500, outputs=1000), True),
        (scored(0.7, 500, outputs=1000), False),  # ten of its classes, and it knows them
        (scored(0.1, labels=0), False),
        (scored(None), False),
        (scored(0.9, loss=math.nan), True),
        (Scores(0.3, 0.01, 1000), False),  # a metric of the user
        (Scores(0.3, 92.2, 1000), True),  # in percent
        (None, False),
    ],
)
def test_an_original_near_chance_is_doubted(before: Scores | None, bad: bool) -> None:
    assert bool(doubts(before, ENOUGH)) == bad


def test_missing_classes_are_named_where_the_network_is_near_chance() -> None:
    assert "10 classes for 1,000 outputs" in doubts(scored(0.002, 500, outputs=1000), ENOUGH)[0]
    assert "classes" not in doubts(scored(0.1), ENOUGH)[0]


@pytest.mark.parametrize(
    ("steps", "bad"),
    [([0, 0, 0], False), ([1, 8, 8, 7], True), ([FEW_STEPS - 1], True), ([1, FEW_STEPS - 1], False)],
)
def test_few_steps_are_told_unless_there_is_no_training(steps: list[int], bad: bool) -> None:
    assert bool(doubts(None, steps)) == bad


# Counting


@pytest.mark.parametrize(
    ("layer", "changes", "said"),
    [
        (nn.LSTM(8, 8), {}, True),
        (nn.LSTM(8, 8), {"layout.include": ["type:LSTM"]}, False),
        (nn.LSTM(8, 8), {"layout.exclude": ["type:LSTM"]}, False),  # as asked
        (nn.LSTM(2, 2), {}, False),  # 48 of 120
    ],
)
def test_a_network_of_which_most_is_not_compressed_is_told(
    layer: nn.Module, changes: dict[str, Any], said: bool
) -> None:
    net = WeightNetwork(nn.Sequential(nn.Linear(8, 8), layer), Config().override(changes))
    assert bool(left_out(net)) == said


@pytest.mark.parametrize("shape", [(7, 3), (5, 4, 2, 3)])
def test_answers_are_counted_as_by_hand(shape: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(0)
    counter, outputs, targets = AnswerCounter(), [], []
    for _ in range(3):
        outputs.append(torch.randn(shape, generator=generator))
        targets.append(torch.randint(0, shape[1] - 1, (shape[0], *shape[2:]), generator=generator))
        targets[-1].view(-1)[0] = -100  # ignored
        counter.add(outputs[-1], targets[-1])
    predicted = torch.cat(outputs).argmax(1)
    assert counter.result(CPU) == pytest.approx(
        Answers(
            shape[1],
            int(predicted.flatten().bincount().max()) / predicted.numel(),
            float(torch.cat(outputs).softmax(1).amax(1).mean()),
            len(set(torch.cat(targets).flatten().tolist()) - {-100}),
        )
    )


def test_answers_of_several_processes_are_those_of_one() -> None:
    class Pair(Distributed):
        def gather(self, value: Any) -> list[Any]:
            return [value, others]

    x, y = torch.randn(9, 4), torch.randint(0, 4, (9,))
    whole, own, other = AnswerCounter(), AnswerCounter(), AnswerCounter()
    whole.add(x, y)
    own.add(x[:5], y[:5])
    other.add(x[5:], y[5:])
    others: Tensor | None = other._totals
    assert own.result(Pair(CPU.device)) == pytest.approx(whole.result(CPU))
    others = None
    assert own.result(Pair(CPU.device)) is None


@pytest.mark.parametrize(
    "outputs", [[torch.randn(4)], [torch.randn(4, 1)], [torch.randn(2, 3), torch.randn(2, 4)]]
)
def test_what_is_no_classifier_is_not_counted(outputs: list[Tensor]) -> None:
    counter = AnswerCounter()
    for output in outputs:
        counter.add(output, None)
    assert counter.result(CPU) is None


def test_only_classes_are_counted() -> None:
    data = [(torch.randn(4, 3), torch.randn(4, 3))]
    assert score(nn.Identity(), data, F.mse_loss).answers is None
    assert score(nn.Identity(), data, F.cross_entropy).answers is not None  # class probabilities


# Labels


def batches(labels: Tensor, count: int = 2) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [(torch.randn(len(labels), 5, generator=generator), labels) for _ in range(count)]


FINE, WRONG = torch.tensor([0, 1, 2, -100]), torch.tensor([0, 1, 3, 2])
NEVER: Callable[..., None] = lambda *_: pytest.fail("a step was made")  # noqa: E731


@pytest.mark.parametrize(("train", "val"), [(WRONG, None), (FINE, WRONG)])
def test_a_label_without_an_output_ends_the_run_before_it_begins(train: Tensor, val: Tensor | None) -> None:
    with pytest.raises(DataError, match=r"label 3 .* 3 outputs"):
        compress(
            nn.Linear(5, 3),
            batches(train),
            None if val is None else batches(val),
            on_step=NEVER,
            on_round=NEVER,
        )


class Pictures(Dataset[tuple[Tensor, int]]):
    classes = ("cat", "dog", "fish", "owl")

    def __len__(self) -> int:
        return 16

    def __getitem__(self, at: int) -> tuple[Tensor, int]:
        return torch.zeros(5), 0  # sorted: the first batches have one class


def test_more_classes_than_outputs_are_known_from_the_data_set() -> None:
    loader = DataLoader(Subset(Pictures(), range(8)), batch_size=2)
    with pytest.raises(DataError, match=r"4 classes .* 3 outputs"):
        score(nn.Linear(5, 3), loader)
    assert score(nn.Linear(5, 4), loader).examples == 8


def test_labels_that_the_loss_leaves_out_or_does_not_use_are_no_mistake() -> None:
    model = nn.Linear(5, 3)
    assert score(model, batches(FINE)).examples == 8
    other = torch.tensor([0, 1, 255, 2])
    assert score(model, batches(other), nn.CrossEntropyLoss(ignore_index=255)).examples == 8
    assert score(model, batches(WRONG), lambda output, target: output.mean()).examples == 8
    assert compress(model, batches(WRONG), batches(WRONG), distill=True).after is not None
    assert compress(model, batches(WRONG), batches(WRONG), distill=divergence).after is not None


# Whole runs


class Zeroed(Method):
    """Ruins every network: all of its weights become zero."""

    def __init__(self, model: nn.Module, config: Config) -> None:
        super().__init__(model, config)
        self.zeros = nn.Parameter(torch.zeros(self.layout.size))

    def weights(self) -> dict[str, Tensor]:
        return self.layout.views(self.zeros)

    def fix(self, fraction: float) -> FixRecord:
        return FixRecord(fraction, self.layout.size)

    def finish(self) -> Compressed:
        values = held(self.layout, self.zeros.detach())
        return Compressed.of(self.layout, values, None, untouched(self.model, self.layout))


@pytest.fixture
def ruinous(monkeypatch: pytest.MonkeyPatch) -> Config:
    monkeypatch.setitem(METHODS, "zeroed", Zeroed)
    untrained = {"schedule.fractions": [1.0], "schedule.epochs_per_round": [0.0]}
    finish = {"finish.polish_epochs": 0.0, "finish.reestimate_epochs": 0.0}
    monkeypatch.setitem(METHOD_DEFAULTS, "zeroed", {**untrained, **finish})
    return Config.preset("recommended", "zeroed")


def separable() -> tuple[nn.Module, list[tuple[Tensor, Tensor]]]:
    """A network that is always right: the class is the largest of four numbers."""
    model = nn.Linear(4, 4, bias=False)
    with torch.no_grad():
        model.weight.copy_(4 * torch.eye(4))
    x = torch.randn(200, 4, generator=torch.Generator().manual_seed(0))
    return model, [(part, part.argmax(1)) for part in x.split(50)]


def test_a_ruined_network_is_called_so_before_its_size(
    ruinous: Config, caplog: pytest.LogCaptureFixture
) -> None:
    model, data = separable()
    result = compress(model, data, data, ruinous)
    assert result.warnings == (result.ruined,)
    assert caplog.messages == [result.ruined]
    assert "accuracy fell from 100.00%" in result.ruined
    shown = str(result)
    assert "RUINED" in shown.splitlines()[0]
    assert "times smaller" not in shown
    assert result.to_dict()["warnings"] == [result.ruined]
    limited = compress(model, data, data, ruinous.override({"target.bits": 8.0}))
    assert limited.target_met  # the bits are few: the network is ruined all the same
    assert "RUINED" in limited.verdict()


def test_without_labels_one_answer_for_everything_is_ruin(ruinous: Config) -> None:
    model, data = separable()
    inputs = [x for x, _ in data]
    assert compress(model, inputs, inputs, ruinous, distill=True).ruined


def test_a_sound_run_is_silent(caplog: pytest.LogCaptureFixture) -> None:
    model, data = separable()
    result = compress(model, data * 5, data)
    assert result.after is not None
    assert result.after.metric == pytest.approx(1, abs=0.05)
    assert (result.warnings, result.ruined, caplog.messages) == ((), "", [])
    assert "WARNING" not in str(result)


def test_doubts_come_before_the_first_step_and_stay_to_the_end(caplog: pytest.LogCaptureFixture) -> None:
    model, data = separable()
    mixed_up = [(x, y.roll(1)) for x, y in data]
    seen: list[int] = []
    kept: list[Progress] = []

    def on_round(progress: Progress) -> None:
        seen.append(len(caplog.messages))
        kept.append(progress)

    config = Config().override({"schedule.fractions": [0.5, 1.0], "schedule.epochs_per_round": 0.25})
    result = compress(model, data, mixed_up, config, on_round=on_round)
    assert set(seen) == {2}
    assert len(result.warnings) == 2
    assert all(sentence in str(result) for sentence in result.warnings)
    again = from_plain(to_plain(kept[0]))  # as a checkpoint keeps it
    assert (again.warnings, again.before.answers) == (kept[0].warnings, kept[0].before.answers)  # type: ignore[union-attr]
    resumed: Result = compress(model, data, mixed_up, config, resume=again)
    assert resumed.warnings == result.warnings


def test_a_run_in_a_folder_shows_and_records_them(call: Call, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    names = ("--model", "digits_resnet", "--data", "digits", "--weights", "random", "--device", "cpu")
    short = ("--set", "schedule.epochs_per_round=0.1", "--set", "finish.polish_epochs=0")
    status, out, err = call("compress", *names, *short, "--out", str(folder))
    assert (status, err) == (0, "")
    told = json.loads((folder / "record.json").read_text())["warnings"]
    assert len(told) == 2
    before, _, after = out.partition("  1 ")  # the row of the first round
    for sentence in told:
        assert sentence.split(":")[0] in " ".join(before.split())
        assert sentence in after
    assert logging.getLogger("pwfn").handlers == []


def test_the_report_has_them_at_its_top(tmp_path: Path) -> None:
    from pwfn.report.page import page
    from pwfn.report.reading import read_run

    folder = tmp_path / "run"
    changes = {"schedule.fractions": [1.0], "schedule.epochs_per_round": [0.0], "finish.polish_epochs": 0.0}
    run(digits_run(folder), Config().override({**changes, "finish.reestimate_epochs": 0.0}))
    data = read_run(folder)
    assert "wrong weights" in page([data]).partition("<nav")[0]
    said = "RUINED: accuracy fell from 92.20% to 38.90%"
    record = {**data.record, "ruined": said, "warnings": [said, "only <3 steps"]}
    for runs in ([replace(data, record=record)], [replace(data, record=record), data]):
        top = page(runs).partition("<nav")[0]
        assert top.count(said) == 1
        assert "only &lt;3 steps" in top
    assert "times smaller" not in page([replace(data, record=record)]).partition("<nav")[0]
