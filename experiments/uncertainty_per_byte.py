"""Accuracy and uncertainty against bytes: originals, files, draws, Laplace, and ensembles of files.

python experiments/uncertainty_per_byte.py --model cifar_resnet20 --weights trained/resnet20_*.safetensors \
    --data npz:data/cifar10.npz --ood npz:data/fashion.npz npz:data/mnist.npz \
    --folder tables/per_byte/resnet20 --preset small --target-bytes 46000

`--weights` are independent trainings. The first is compressed with every seed, the others with the first
seed, into FOLDER/training0_seed0/model.pwfn and so on; the first also by the paper's method, into
FOLDER/paper_seed0/model.pwfn. Files that exist are used as they are, files without a predictive sigma get
one (fitted.pwfn beside them). With `--no-compress` nothing is compressed: what is in FOLDER is scored.
The rows of several files have one of each training or, with a single training, one of each seed.

Every network predicts every data set once. One line per row is appended to
experiments/results/uncertainty_per_byte.jsonl; `python experiments/results.py docs` makes the table of
docs/uncertainty.md. The rows of Laplace need `pip install laplace-torch`, and are left out without it.
"""

from __future__ import annotations

import argparse
import importlib
import math
import statistics
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import kept
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from pwfn import Compressed, load
from pwfn.evaluate import calibration
from pwfn.evaluate.ensemble import Predictions, ensemble, missing_probability, point
from pwfn.lab.compare.table import markdown
from pwfn.lab.uncertainty.assess import split_in_half
from pwfn.lab.uncertainty.ood import open_ood
from pwfn.run.folder import run
from pwfn.run.options import RunOptions, settings
from pwfn.run.scores import OpenFile, fit_file, open_file, original_of
from pwfn.zoo.data import open_source
from pwfn.zoo.models import ready_torchvision

RESULTS = kept.RESULTS / "uncertainty_per_byte.jsonl"
SHIFTS = {
    "gaussian": (0.04, 0.06, 0.08, 0.09, 0.10),
    "contrast": (0.75, 0.5, 0.4, 0.3, 0.15),
    "rotate": (10, 20, 30, 40, 50),
}
"""Five strengths of each kind of shift, from weak to strong."""

HEADS = ("predicts", "bytes", "top-1, %", "NLL", "ECE", "Brier", "AURC", "AUROC", "NLL, shifted")
_TEST, _BATCH = "test", 1000

Logs = dict[str, Tensor]
"""Log-probabilities of one predictor, by data set."""


@dataclass(frozen=True)
class Sets:
    """Every data set, in memory: the test images, foreign ones, and shifted ones by strength and kind."""

    batches: dict[str, list[Any]]
    targets: Tensor  # of all test images
    scored: Tensor  # those test images that are scored; the others fit temperatures
    foreign: tuple[str, ...]
    shifted: tuple[tuple[str, ...], ...]

    @classmethod
    def opened(cls, file: OpenFile, ood: Sequence[str], limit: int | None) -> Sets:
        """The test data of a file, foreign data by name, and shifts of the scored test images.

        ``limit`` is the number of images of each foreign and each shifted set.
        """
        test = list(file.data.test)
        targets = torch.cat([y for _, y in test]).cpu()
        scored = split_in_half(len(targets))[1]
        batches: dict[str, list[Any]] = {_TEST: test}
        shifted = [[f"shift:{kind}:{s[level]:g}" for kind, s in SHIFTS.items()] for level in range(5)]
        for spec in [*ood, *(spec for level in shifted for spec in level)]:
            found = open_ood(spec, file.data, file.images).loader
            images = torch.cat([raw[0] if isinstance(raw, (tuple, list)) else raw for raw in found])
            if spec.startswith("shift:"):
                images = images[scored.to(images.device)]
            batches[spec] = list(images[:limit].split(_BATCH))
        return cls(batches, targets, scored, tuple(ood), tuple(map(tuple, shifted)))

    def predicted(self, predict: Callable[[Iterable[Any], str], Predictions]) -> Logs:
        """What one predictor says about every data set."""
        return {name: predict(own, name).log_probabilities for name, own in self.batches.items()}


def mean_of(members: Sequence[Logs]) -> Logs:
    """The mean prediction of several predictors: ``log(1/n sum_i p_i)``.

    >>> half = torch.tensor([[0.5, 0.5]]).log()
    >>> mean_of([{"a": half}, {"a": torch.tensor([[0.25, 0.75]]).log()}])["a"].exp()
    tensor([[0.3750, 0.6250]])
    """
    stacks = {name: torch.stack([own[name] for own in members]) for name in members[0]}
    return {name: stack.logsumexp(0) - math.log(len(members)) for name, stack in stacks.items()}


def stored(state: Mapping[str, Tensor], kind: str, weights: Collection[str]) -> tuple[dict[str, Tensor], int]:
    """The tensors as they are read back, and the bytes of what is kept: no header, compressed by nothing.

    ``fp16`` keeps every number in two bytes. ``int8`` keeps a tensor of ``weights`` as ``round(w / s)``, one
    byte each, with one float32 ``s = max abs(w) / 127`` per output channel, and all others as float32.

    >>> back, size = stored({"w": torch.tensor([[1.27, -0.5], [0.0, 0.0]])}, "int8", ["w"])
    >>> back["w"], size
    (tensor([[ 1.2700, -0.5000],
            [ 0.0000,  0.0000]]), 12)
    """
    back, size = dict(state), 0
    for name, tensor in state.items():
        if not tensor.is_floating_point():  # counters of BatchNorm: not needed to predict
            continue
        if kind == "int8" and name in weights:
            largest = tensor.abs().amax(tuple(range(1, tensor.dim())), keepdim=True)
            scale = torch.where(largest > 0, largest / 127, 1.0)
            back[name] = (tensor / scale).round() * scale
            size += tensor.numel() + 4 * scale.numel()
        elif kind == "fp16":
            back[name] = tensor.half().to(tensor.dtype)
            size += 2 * tensor.numel()
        else:
            size += 4 * tensor.numel()
    return back, size


def factor_bytes(factors: Iterable[Tensor]) -> int:
    """Bytes of a posterior precision in float32: of symmetric matrices one triangle, of vectors all.

    One number more is the precision of the prior.

    >>> factor_bytes([torch.eye(3), torch.ones(5)])
    48
    """
    numbers = (len(f) * (len(f) + 1) // 2 if f.dim() == 2 else f.numel() for f in factors)
    return 4 * (sum(numbers) + 1)


class _Predicting(nn.Module):
    """A function from inputs to probabilities, as a network whose outputs are their logarithms."""

    def __init__(self, predict: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.predict = predict

    def forward(self, x: Tensor) -> Tensor:
        """``log p``."""
        return self.predict(x).clamp_min(torch.finfo(torch.float32).tiny).log()


def laplace(network: nn.Module, train: Iterable[Any], sets: Sets) -> Iterator[tuple[str, Logs, int]]:
    """Last-layer Laplace with both small structures: name, predictions, bytes beside the network's.

    The prior's precision maximises the marginal likelihood; predictions by the probit approximation.
    """
    ready_torchvision()
    try:
        make = importlib.import_module("laplace").Laplace
    except ImportError:
        print("laplace-torch is not installed: its rows are left out", flush=True)
        return
    images, targets = (torch.cat(parts) for parts in zip(*train, strict=True))
    loader = DataLoader(TensorDataset(images, targets), batch_size=500)
    for structure in ("kron", "diag"):
        own = make(
            network.eval(), "classification", subset_of_weights="last_layer", hessian_structure=structure
        )
        own.fit(loader)
        own.optimize_prior_precision(method="marglik")
        factors = [f for block in own.H_facs.kfacs for f in block] if structure == "kron" else [own.H]
        model = _Predicting(own)
        logs = sets.predicted(lambda data, name, model=model: point(model, data, images.device, name=name))  # type: ignore[misc]  # a default, so that each has its own
        yield f"last-layer Laplace, {structure}", logs, factor_bytes(factors)


def scores(log_p: Tensor, targets: Tensor) -> dict[str, float]:
    """The measures of labelled examples."""
    p = log_p.exp()
    risks = calibration.risk_coverage(missing_probability(log_p), calibration.wrong(p, targets))
    return {
        "accuracy": calibration.accuracy(p, targets),
        "nll": calibration.negative_log_likelihood(log_p, targets),
        "ece": calibration.calibration_error(calibration.reliability(p, targets)),
        "brier": calibration.brier_score(p, targets),
        "aurc": float(risks.mean()),
    }


def measured(logs: Logs, sets: Sets, temperature: float = 1.0) -> dict[str, Any]:
    """All measures of one predictor after a temperature; those under shifts are means over their kinds."""
    logs = {name: calibration.tempered(own, temperature) for name, own in logs.items()}
    own, targets = logs[_TEST][sets.scored], sets.targets[sets.scored]
    inside = missing_probability(own)
    shifted = []
    for level in sets.shifted:
        each = [scores(logs[spec], targets[: len(logs[spec])]) for spec in level]
        shifted.append({name: statistics.fmean(one[name] for one in each) for name in each[0]})
    return {
        **scores(own, targets),
        "accuracy_all": calibration.accuracy(logs[_TEST].exp(), sets.targets),
        "auroc": {spec: calibration.auroc(inside, missing_probability(logs[spec])) for spec in sets.foreign},
        "shifted": shifted,
    }


def row(name: str, which: str, size: int, logs: Logs, sets: Sets) -> dict[str, Any]:
    """One line: the measures as they are, and after a temperature that the other half of the test fits."""
    held = torch.ones(len(sets.targets), dtype=torch.bool)
    held[sets.scored] = False
    temperature = calibration.fit_temperature(logs[_TEST][held], sets.targets[held])
    tempered = {"temperature": temperature, **measured(logs, sets, temperature)}
    lengths = {"test": len(sets.targets), "scored": len(sets.scored)}
    lengths |= {"foreign": len(logs[sets.foreign[0]]), "shifted": len(logs[sets.shifted[0][0]])}
    return {
        "row": name,
        "which": which,
        "bytes": size,
        "images": lengths,
        "plain": measured(logs, sets),
        "tempered": tempered,
    }


def together(name: str, members: Sequence[tuple[Logs, int]], sets: Sets) -> dict[str, Any]:
    """One line for the mean prediction of several predictors, with all their bytes."""
    return row(name, "", sum(size for _, size in members), mean_of([logs for logs, _ in members]), sets)


def rows(options: argparse.Namespace, files: Mapping[str, Path]) -> Iterator[dict[str, Any]]:
    """Every row, in the order of the table."""
    how = RunOptions(options.model, options.data, options.folder, "", device=options.device)
    first = open_file(next(iter(files.values())), how, options.seed)
    network = first.network
    sets = Sets.opened(first, options.ood, options.limit)

    def drawn(compressed: Compressed, samples: int) -> Logs:
        return sets.predicted(
            lambda data, name: ensemble([compressed], network, data, samples, options.seed, name=name)
        )

    weights = [entry.name for entry in first.compressed.layout.entries if len(entry.shape) > 1]
    originals: list[tuple[Logs, int]] = []
    for number, path in enumerate(options.weights):
        state = original_of(first.compressed, options.model, path).state_dict()
        for kind in ("fp32", "fp16", "int8") if number == 0 else ("fp32",):
            back, size = stored(state, kind, weights)
            network.load_state_dict(back)
            logs = sets.predicted(lambda data, name: point(network, data, name=name))
            if number == 0:
                yield row(f"original, {kind}", "training0", size, logs, sets)
            if kind == "fp32":
                originals.append((logs, size))
    if len(originals) > 1:
        yield together(f"{len(originals)} originals, fp32", originals, sets)

    train = open_source(options.data, replace(first.images, augment=False, testing=False)).train
    alone = len(options.weights) == 1
    members: dict[str, list[tuple[Logs, int]]] = {"point estimates": [], "draws": []}
    for name, path in files.items():
        paper, compressed = name.startswith("paper"), load(path)
        if compressed.posterior != "tensor" and not paper:
            fitted = path.with_name("fitted.pwfn")
            if not fitted.exists():
                fit_file(path, fitted, how, seed=options.seed)
            compressed = load(fitted)
        centres, size = drawn(compressed, 0), len(compressed.dumps(posterior="none"))
        draws, size_drawn = drawn(compressed, options.samples), len(compressed.dumps())
        if name.startswith("training0") or paper:
            of = "paper, " if paper else ""
            yield row(f"{of}point estimate", name, size, centres, sets)
            yield row(f"{of}{options.samples} draws", name, size_drawn, draws, sets)
        if name.startswith("training0"):
            for label, logs, more in laplace(compressed.apply_to(network), train, sets):
                yield row(label, name, size + more, logs, sets)
        if not paper and (alone or name.endswith(f"seed{options.seeds[0]}")):
            members["point estimates"].append((centres, size))
            members["draws"].append((draws, size_drawn))
    of_one = " of one training" if alone else ""
    for count in range(2, len(members["draws"]) + 1):
        for label, own in members.items():
            yield together(f"{count} files{of_one}, {label}", own[:count], sets)


def compressed_files(options: argparse.Namespace) -> dict[str, Path]:
    """The files by name; those that are missing are made, unless ``--no-compress``."""
    wanted = [(0, seed) for seed in options.seeds]
    wanted += [(number, options.seeds[0]) for number in range(1, len(options.weights))]
    jobs = [(f"training{number}_seed{seed}", number, seed, options.preset) for number, seed in wanted]
    jobs.append((f"paper_seed{options.seeds[0]}", 0, options.seeds[0], "paper"))
    files = {}
    for name, number, seed, preset in jobs:
        path = options.folder / name / "model.pwfn"
        if not path.exists() and not options.no_compress:
            paper = preset == "paper"
            config = settings(preset, None, options.changes, seed)
            config = config.override(
                {"fixing.rule": "each"} if paper else {"target.bytes": options.target_bytes}
            )
            chosen = RunOptions(options.model, options.data, path.parent, options.weights[number])
            # One sigma per centre: one per weight is several times the rest of the file.
            sigma = "centre" if paper else None
            run(replace(chosen, device=options.device, resume=True, posterior=sigma), config)
        if path.exists():
            files[name] = path
    if not files:
        raise SystemExit(f"{options.folder}: there is no training0_seed{options.seeds[0]}/model.pwfn")
    return files


def table(path: Path = RESULTS) -> list[str]:
    """The tables of docs/uncertainty.md, one per network; of lines with the same name the last counts."""
    found: dict[str, dict[str, dict[str, dict[str, Any]]]] = {}
    for own in kept.read(path):
        found.setdefault(own["network"], {}).setdefault(own["row"], {})[own["which"]] = own
    lines: list[str] = []
    for network, by_row in found.items():
        body = [cells(name, list(own.values())) for name, own in by_row.items()]
        lines += [f"### {network}", "", *markdown(HEADS, body), "", *_notes(by_row), ""]
    return lines[:-1] or ["Not measured yet."]


def cells(name: str, own: Sequence[dict[str, Any]]) -> tuple[str, ...]:
    """One row of the table: means over seeds; before → after a temperature."""

    def mean(read: Callable[[dict[str, Any]], float], digits: int = 3) -> str:
        return f"{statistics.fmean(map(read, own)):.{digits}f}"

    def both(read: Callable[[dict[str, Any]], float]) -> str:
        return f"{mean(lambda one: read(one['plain']))} → {mean(lambda one: read(one['tempered']))}"

    tops = [100 * one["plain"]["accuracy_all"] for one in own]
    spread = f" ± {statistics.stdev(tops):.2f}" if len(tops) > 1 else ""
    foreign = own[0]["plain"]["auroc"]
    aurocs = [mean(lambda one, spec=spec: one["plain"]["auroc"][spec]) for spec in foreign]  # type: ignore[misc]  # a default
    return (
        *(name, f"{statistics.fmean(one['bytes'] for one in own):,.0f}"),
        f"{statistics.fmean(tops):.2f}{spread}",
        *(both(lambda one: one["nll"]), both(lambda one: one["ece"])),
        *(mean(lambda one: one["plain"]["brier"]), mean(lambda one: one["plain"]["aurc"], 4)),
        " / ".join(aurocs),
        both(lambda one: statistics.fmean(level["nll"] for level in one["shifted"])),
    )


def _notes(by_row: Mapping[str, Mapping[str, dict[str, Any]]]) -> list[str]:
    every = [one for own in by_row.values() for one in own.values()]
    first, seeds = every[0], max(len(own) for own in by_row.values())
    names = " and ".join(Path(spec.partition(":")[2] or spec).stem for spec in first["plain"]["auroc"])
    images = first["images"]
    return [
        f"Before → after a temperature. Top-1 of {images['test']:,} test images, the rest of "
        f"{images['scored']:,}; the others fit the temperature. AUROC: against {names}, "
        f"{images['foreign']:,} images each. Shifted: mean over five strengths of {', '.join(SHIFTS)}, "
        f"{images['shifted']:,} images each. {f'Up to {seeds} seeds' if seeds > 1 else 'One seed'}; "
        "± is the standard deviation over seeds. "
        f"Measured on: {kept.measured_on(every)}."
    ]


def main() -> None:
    """Compress what is missing, and score."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--weights", nargs="+", required=True, help="independent trainings")
    parser.add_argument("--data", required=True)
    parser.add_argument("--ood", nargs="+", default=["noise"], help="foreign data")
    parser.add_argument("--folder", type=Path, required=True, help="of the files")
    parser.add_argument("--preset", default="small")
    parser.add_argument("--target-bytes", type=int, default=None)
    parser.add_argument("--set", dest="changes", action="append", default=[], help="section.name=value")
    parser.add_argument("--no-compress", action="store_true", help="only score the files that are there")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--samples", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0, help="of the draws")
    parser.add_argument("--limit", type=int, default=None, help="images per foreign and shifted data set")
    parser.add_argument("--device", default=None)
    parser.add_argument("--commit", default=None, help="of the code, if it is not in a git checkout")
    options = parser.parse_args()
    facts = {
        "network": options.model,
        "samples": options.samples,
        "seed": options.seed,
        **kept.here(options.commit),
    }
    for own in rows(options, compressed_files(options)):
        plain = own["plain"]
        print(own["row"], own["which"], own["bytes"], plain["accuracy_all"], plain["nll"], flush=True)
        kept.add(RESULTS, {**own, **facts})


if __name__ == "__main__":
    main()
