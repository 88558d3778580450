"""Models whose output is an object with ``logits``, as those of transformers: no wrapper is needed."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import pwfn
from pwfn import GaussianNetwork
from pwfn.bayes.objective import Objective, accuracy, divergence
from pwfn.config import Config
from pwfn.evaluate.ensemble import ensemble, point
from pwfn.export.onnx import to_onnx
from pwfn.zoo.models import ready_torchvision

SHORT = Config().override({"schedule.fractions": [0.5, 1.0], "schedule.epochs_per_round": 1.0})


class ModelOutput(OrderedDict[str, Any]):
    """As that of transformers: a mapping whose items are attributes too."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


class Plain(nn.Module):
    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(seed)
            self.hidden, self.norm, self.head = nn.Linear(20, 24), nn.BatchNorm1d(24), nn.Linear(24, 5)

    def forward(self, pixel_values: Tensor) -> Any:
        return self.head(self.norm(self.hidden(pixel_values)).relu())


class Hugging(Plain):
    """The same network with an output of Hugging Face's kind, and its own ``config``."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__(seed)
        self.config = {"hidden_size": 24}

    def forward(self, pixel_values: Tensor, labels: Tensor | None = None) -> Any:
        logits = super().forward(pixel_values)
        loss = {} if labels is None else {"loss": F.cross_entropy(logits, labels)}
        return ModelOutput(**loss, logits=logits, hidden_states=(logits,))


class Dictionary(Plain):
    def forward(self, pixel_values: Tensor) -> Any:
        return {"logits": super().forward(pixel_values)}


X = torch.randn(48, 20, generator=torch.Generator().manual_seed(0))
Y = torch.randint(0, 5, (48,), generator=torch.Generator().manual_seed(1))
BATCHES = [(x, y) for x, y in zip(X.split(16), Y.split(16), strict=True)]
MAPPINGS = [{"pixel_values": x, "labels": y} for x, y in BATCHES]


@pytest.mark.parametrize("kind", [Hugging, Dictionary])
@pytest.mark.parametrize("distill", [False, True])
def test_compression_is_that_of_the_plain_model(kind: type[Plain], distill: bool) -> None:
    wanted = pwfn.compress(Plain(), BATCHES, BATCHES, SHORT, distill=distill)
    found = pwfn.compress(kind(), MAPPINGS, MAPPINGS, SHORT, distill=distill)
    assert torch.equal(found.compressed.values(), wanted.compressed.values())
    assert found.after == wanted.after


def test_without_labels_it_is_compared_with_the_original() -> None:
    inputs = [{"pixel_values": x} for x in X.split(16)]
    found = pwfn.compress(Hugging(), inputs, inputs, SHORT, distill=True)
    assert found.after is not None
    assert found.after.agreement
    assert found.after == pwfn.evaluate(found.model(), inputs, original=Hugging())


def test_scores_ensembles_and_predictions_are_those_of_the_plain_model() -> None:
    assert pwfn.evaluate(Hugging(), MAPPINGS) == pwfn.evaluate(Plain(), BATCHES)
    own = pwfn.evaluate(Hugging(), MAPPINGS, metric=lambda out, y: (out.argmax(1) == y).double().mean())
    assert own.metric == pwfn.evaluate(Plain(), BATCHES).metric
    assert torch.equal(point(Hugging(), BATCHES).log_probabilities, point(Plain(), BATCHES).log_probabilities)
    net = GaussianNetwork(Plain())
    net.fix(1.0)
    small = net.finish()
    drawn = [ensemble(small, model, BATCHES, samples=3) for model in (Hugging(), Plain())]
    assert torch.equal(drawn[0].log_probabilities, drawn[1].log_probabilities)


def test_a_loss_of_ones_own_may_use_the_whole_output() -> None:
    def whole(output: Any, target: Tensor) -> Tensor:
        return F.cross_entropy(output.logits, target) + 0 * output.hidden_states[0].sum()

    assert pwfn.evaluate(Hugging(), MAPPINGS, whole).loss == pwfn.evaluate(Plain(), BATCHES).loss


def test_sequences_have_their_classes_last() -> None:
    """As cross entropy, KL and accuracy over all tokens of all examples."""
    outputs = torch.randn(4, 7, 3)
    reference = torch.randn(4, 7, 3)
    target = reference.argmax(-1)
    flat = outputs.flatten(0, 1)
    output, other = ModelOutput(logits=outputs), ModelOutput(logits=reference)
    loss = Objective(F.cross_entropy).compared(output, target, "here")
    assert loss.item() == pytest.approx(F.cross_entropy(flat, target.flatten()).item(), rel=1e-6)
    kl = Objective(divergence).compared(output, other, "here")
    assert kl.item() == pytest.approx(divergence(flat, reference.flatten(0, 1)).item(), rel=1e-6)
    equal = Objective(accuracy).compared(output, other, "here")
    assert equal.item() == (outputs.argmax(-1) == target).double().mean().item()


def test_export_to_onnx(tmp_path: Path) -> None:
    net = GaussianNetwork(Hugging())
    net.fix(1.0)
    done = to_onnx(net.finish(), Hugging(), X[:2], tmp_path / "small.onnx")
    assert done.palettes == 1  # the hidden layer; the head is too small to gain


def test_the_config_of_a_network_is_that_of_its_model() -> None:
    net = GaussianNetwork(Hugging(), SHORT)
    assert net.config == {"hidden_size": 24}
    assert net.settings is SHORT
    assert not hasattr(GaussianNetwork(Plain()), "config")


def test_a_state_dict_holds_tensors_only_and_brings_back_the_records() -> None:
    net = GaussianNetwork(Hugging())
    net.fix(0.5)
    state = net.state_dict()
    assert all(isinstance(value, Tensor) for value in state.values())
    other = GaussianNetwork(Hugging(1))
    other.load_state_dict(state)
    assert other.records == net.records


@pytest.mark.parametrize("checkpointing", [False, True])
def test_trainer_of_transformers(checkpointing: bool, tmp_path: Path) -> None:
    """Trains, evaluates and saves a Gaussian network as any model; fixed weights do not move."""
    ready_torchvision()  # which transformers imports
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 11, "hidden_size": 8, "intermediate_size": 16, "max_position_embeddings": 8}
    config = transformers.BertConfig(**sizes, num_hidden_layers=1, num_attention_heads=2, num_labels=3)
    net = GaussianNetwork(transformers.BertForSequenceClassification(config))
    net.fix(0.5)
    fixed, before = net.fixed.clone(), net.mu.detach().clone()
    data = [{"input_ids": torch.randint(0, 11, (6,)), "labels": n % 3} for n in range(16)]
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path),
        max_steps=3,
        gradient_checkpointing=checkpointing,
        save_steps=3,
        per_device_train_batch_size=4,
        remove_unused_columns=False,
        label_names=["labels"],
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    optimizer = torch.optim.AdamW(net.parameter_groups(lr=1e-2, weight_decay=1e-2))
    trainer = transformers.Trainer(
        model=net, args=arguments, train_dataset=data, eval_dataset=data, optimizers=(optimizer, None)
    )
    trainer.train()
    assert net.config is net.model.config
    assert torch.equal(net.mu[fixed], before[fixed])
    assert not torch.equal(net.mu[~fixed], before[~fixed])
    assert trainer.evaluate()["eval_loss"] > 0
    assert list(tmp_path.rglob("model.safetensors"))
    net.fix(1.0)
    assert net.finish().layout.size == net.layout.size
