"""Two ImageNet networks from a thousand unlabelled images: the preset quick, and others from the same start.

    python experiments/few_images.py --data DIR --weights DIR [--rows NAME,NAME] [--networks NAME,NAME]
    python experiments/few_images.py --data DIR --weights DIR --rows NAME,NAME --save FILES     on a GPU, say
    python experiments/few_images.py --data DIR --weights DIR --rows NAME,NAME --saved FILES    and elsewhere

Appends one JSON line per network and row to ``--out``. ``python experiments/results.py docs`` makes the table
of docs/imagenet.md from them. The repository has no ImageNet images and no weights of these networks:

- ``--data`` has ``unlabelled*.npz`` and ``val*.npz``, with files of images of 224 × 224 pixels (``data``:
  their bytes, one after the other; ``ends``: where each ends; ``labels``), or the folders ``unlabelled`` and
  ``val/CLASS`` with images of any size. Each is read where it is needed.
- ``--weights`` has ``mobilenet_v2.safetensors`` (torchvision's names) and
  ``tf_efficientnet_lite0.safetensors`` (timm's); their metadata has ``normalize_mean`` and ``normalize_std``.

Every row starts from the same weights. ``quick`` uses the first 1,024 of the unlabelled images, and all
2,000 where a step is given. Methods that train use the first 1,024 too, for ten epochs, and learn from the
original network's outputs; those whose names end in ``-kept`` with BatchNorm in evaluation mode throughout,
since statistics of so few images cost accuracy. The labelled images are scored once, with the decoded file,
and choose nothing. All files have BatchNorm folded and the rest of the network rounded alike. The rows of
NNCodec need the files of nncodec_files.py.

With ``--save`` the compressed networks are written and not scored, so that no labelled images are needed;
``--saved`` scores them.
"""

from __future__ import annotations

import argparse
import copy
import io
import json
import math
import platform
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import kept
import nncodec_files
import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

import pwfn
import pwfn.lab  # registers the other methods
from pwfn import Config
from pwfn.bayes.grid.conditioned import ConditionedOptions
from pwfn.bayes.objective import divergence
from pwfn.bayes.sigma import root_mean_square
from pwfn.evaluate.entropy import Pool
from pwfn.file.compressed import Compressed
from pwfn.file.fold_batchnorm import shrink_uncompressed
from pwfn.fixing.step import dyadic
from pwfn.lab.compare.runner import git_commit
from pwfn.lab.compare.table import markdown
from pwfn.layout import Layout, untouched
from pwfn.zoo import models

STEPS = (0.205, 0.295, 0.3, 0.4, 0.5, 0.6, 0.7)
"""Distance between values, as a fraction of the root mean square of all weights."""

FINE_STEPS = (0.1, 0.125, 0.15, 0.2)
"""For rounding alone: about those that ``quick`` finds."""

IMAGES, EPOCHS = 1024, 10
"""Of methods that train."""

SIZE, SHORT_SIDE = 224, 256
HEADS = (
    *("network", "method", "images", "top-1", "lost", "agreement", "KL", "bits", "values", "bytes"),
    "seconds",
)


What = Config | float | None
"""How a row is made: settings, the step to round to, or a file."""


def rows() -> dict[str, tuple[str, What]]:
    """By name: what the table calls it, and how it is made.

    >>> rows()["nearest-0.5"]
    ('rounding to the nearest, step 0.5', 0.5)
    """
    quick = Config.preset("quick")
    same = {"finish.fold_batchnorm": True, "finish.uncompressed_dtype": quick.finish.uncompressed_dtype}
    made: dict[str, tuple[str, What]] = {"quick": ("`quick`", quick)}
    for step in STEPS:
        finer = {"options.step": step, "options.images": 2000}
        made[f"quick-{step}"] = f"`quick`, step {step}", quick.override(finer)
    for step in FINE_STEPS + STEPS:
        made[f"nearest-{step}"] = f"rounding to the nearest, step {step}", step
    others: dict[str, tuple[str, str, dict[str, Any]]] = {
        "kmeans": ("k-means, 16 values per layer", "kmeans", {"options.bits": 4}),
        "kmeans-network": (
            "k-means, 64 values for the network",
            "kmeans",
            {"options.bits": 6, "options.codebooks": "network"},
        ),
        "lsq": ("LSQ, 4 bit", "lsq", {"options.bits": 4}),
        # Its own rate is for the whole of ImageNet.
        "lsq-slow": (
            "LSQ, 4 bit, learning rate 0.001",
            "lsq",
            {"options.bits": 4, "training.learning_rate": 1e-3},
        ),
    }
    # Assigned once and not trained: no images.
    label, method, options = others["kmeans"]
    alone = {"schedule.epochs_per_round": (0.0,), "finish.reestimate_epochs": None}
    made["kmeans-0"] = label, Config.preset("recommended", method).override({**same, **alone, **options})
    trained: dict[str, tuple[str, Config]] = {}
    for name, (label, method, options) in others.items():
        epochs = {"schedule.epochs_per_round": (float(EPOCHS),)}
        trained[name] = label, Config.preset("recommended", method).override({**same, **epochs, **options})
    # Nine rounds of one epoch, and one of polish.
    ours = Config.preset("recommended").override({**same, "schedule.epochs_per_round": 1.0})
    trained["recommended"] = "`recommended`", ours
    for name, (label, config) in trained.items():
        made[name] = f"{label}, {EPOCHS} epochs", config
        kept = config.override({"finish.reestimate_epochs": None})
        made[f"{name}-kept"] = f"{label}, {EPOCHS} epochs, statistics kept", kept
    for parameter in nncodec_files.PARAMETERS:
        made[f"nncodec-{parameter}"] = f"NNCodec, qp -{parameter}", None
    return made


class Loader:
    """Batches of images that are on the device already; for training shuffled, and half of them mirrored."""

    def __init__(
        self, images: Tensor, labels: Tensor | None, config: models.DataConfig, batch_size: int, train: bool
    ) -> None:
        self.images, self.labels, self.batch_size, self.train = images, labels, batch_size, train
        # (x / 255 - mean) / std, for pixels from 0 to 255
        mean, std = (images.new_tensor(n, dtype=torch.float32) for n in (config.mean, config.std))
        self._scale, self._shift = (1 / (255 * std))[:, None, None], (mean / std)[:, None, None]

    def __len__(self) -> int:
        return math.ceil(len(self.images) / self.batch_size)

    def __iter__(self) -> Iterator[Any]:
        count = len(self.images)
        order = torch.randperm(count) if self.train else torch.arange(count)
        for part in order.to(self.images.device).split(self.batch_size):
            batch = self.images[part] * self._scale - self._shift
            if self.train:
                mirrored = torch.rand(len(part), 1, 1, 1) < 0.5
                batch = torch.where(mirrored.to(batch.device), batch.flip(-1), batch)
            yield batch if self.labels is None else (batch, self.labels[part])


def read(folder: Path, kind: str, limit: int | None) -> tuple[Tensor, Tensor]:
    """The images of a kind as bytes, N × 3 × 224 × 224, and their classes (-1: unknown)."""
    found: list[tuple[Path | io.BytesIO, int]] = []
    for path in sorted(folder.glob(f"{kind}*.npz")):
        with np.load(path) as pack:
            data, ends, labels = pack["data"].tobytes(), pack["ends"].tolist(), pack["labels"].tolist()
        starts = [0, *ends[:-1]]
        found += [(io.BytesIO(data[a:b]), n) for a, b, n in zip(starts, ends, labels, strict=True)]
    if not found:
        files = sorted(path for path in (folder / kind).rglob("*") if path.is_file())
        classes = sorted({path.parent for path in files})
        found = [(path, classes.index(path.parent) if len(classes) > 1 else -1) for path in files]
    if not found:
        raise SystemExit(f"{folder} has neither {kind}*.npz nor images in {kind}: see --help")
    found = found[:limit]
    with ThreadPoolExecutor() as workers:
        pixels = np.stack(list(workers.map(_pixels, (file for file, _ in found))))
    return torch.from_numpy(pixels).permute(0, 3, 1, 2).contiguous(), torch.tensor([n for _, n in found])


def _pixels(file: Path | io.BytesIO) -> Any:
    """The centre of an image, as both networks were tested."""
    with Image.open(file) as opened:
        image = opened.convert("RGB")
    if image.size != (SIZE, SIZE):
        scale = SHORT_SIDE / min(image.size)
        image = image.resize((int(scale * image.width), int(scale * image.height)), Image.Resampling.BILINEAR)
        left, top = round((image.width - SIZE) / 2), round((image.height - SIZE) / 2)
        image = image.crop((left, top, left + SIZE, top + SIZE))
    return np.asarray(image)


def nearest(model: nn.Module, fraction: float) -> Compressed:
    """Every weight at the nearest multiple of a fraction of the root mean square; no data is needed.

    >>> nearest(nn.Linear(8, 8), 0.5).layout.size
    72
    """
    layout, rest = Layout.of(model), copy.deepcopy(model)
    weights = layout.gather(model)
    step = dyadic(fraction * root_mean_square(weights))
    shrink_uncompressed(rest, Config.preset("quick").finish)
    values = torch.round(weights / step) * step
    return Compressed.of(layout, values, None, untouched(rest, layout))


class Made(NamedTuple):
    """A compressed network, and how it was made."""

    content: bytes
    """Of the file."""

    facts: dict[str, Any]


class Decoded(NamedTuple):
    """A compressed network as it is used."""

    model: nn.Module
    values: Tensor
    file_bytes: int


class Case:
    """A network with its weights, and the unlabelled images as it takes them."""

    def __init__(self, name: str, weights: Path, images: Tensor) -> None:
        self.name, self.device = name, images.device
        self.model = models.create(name)
        notes = models.load_weights(self.model, weights / f"{name}.safetensors")
        self.model.to(self.device).eval()
        self.config = models.data_config(name, self.model, notes)
        self.plain = Loader(images, None, self.config, 64, False)
        self.train = Loader(images[:IMAGES], None, self.config, 64, True)

    def make(self, what: Config | float, seed: int) -> Made:
        """By a method of the library or the lab, or by rounding."""
        started = time.perf_counter()
        facts: dict[str, Any] = {"settings": {"step": what}, "images": 0, "epochs": 0.0}
        if isinstance(what, Config):
            config, quick = what.override({"seed": seed}), what.method == "conditioned"
            data = self.plain if quick else self.train
            result = pwfn.compress(self.model, data, config=config, distill=not quick)
            compressed, images = result.compressed, len(data.images)
            if quick:
                images = min(images, ConditionedOptions(**config.options).images)
            elif not result.epochs:
                images = 0
            facts = {"settings": config.to_dict(), "images": images, "epochs": result.epochs}
        else:
            compressed = nearest(self.model, what)
        content = compressed.dumps()
        return Made(content, {**facts, "seconds": time.perf_counter() - started})

    def decoded(self, content: bytes) -> Decoded:
        """From the bytes of a file."""
        loaded = pwfn.loads(content)
        return Decoded(loaded.apply_to(copy.deepcopy(self.model)), loaded.values(), len(content))

    def coded(self, path: Path) -> Decoded:
        """From a file of nncodec_files.py."""
        if not path.exists():
            raise SystemExit(f"{path} does not exist: python experiments/nncodec_files.py makes it")
        with np.load(path) as file:
            state = {name: torch.from_numpy(file[name]) for name in file.files}
        size, model = int(state.pop("file_bytes")), copy.deepcopy(self.model)
        model.load_state_dict({**model.state_dict(), **state})
        return Decoded(model, Layout.of(model).gather(model).cpu(), size)


class Scorer:
    """The labelled images, and what the original network says about them."""

    def __init__(self, case: Case, val: Tensor, labels: Tensor) -> None:
        small = case.device.type == "cpu"  # small batches in this order are three times as fast there
        val = val.contiguous(memory_format=torch.channels_last) if small else val
        self.val, self.labels = Loader(val, None, case.config, 8 if small else 250, False), labels
        self.outputs = self.through(case.model)
        self.start = _top1(self.outputs, self.labels)
        self.fp32_bytes = sum(4 * tensor.numel() for tensor in case.model.state_dict().values())

    @torch.no_grad()
    def through(self, model: nn.Module) -> Tensor:
        """The class scores of the labelled images."""
        return torch.cat([model(batch) for batch in self.val])

    def scores(self, decoded: Decoded) -> dict[str, Any]:
        """The figures of one row."""
        outputs, pool = self.through(decoded.model.eval()), Pool.of(decoded.values)
        return {
            "scored": len(outputs),
            "top1_start": self.start,
            "top1": _top1(outputs, self.labels),
            "agreement": _top1(outputs, self.outputs.argmax(1)),
            "kl": float(divergence(outputs, self.outputs)),
            "entropy_bits": pool.entropy_bits,
            "unique": pool.unique,
            "file_bytes": decoded.file_bytes,
            "fp32_bytes": self.fp32_bytes,
        }


def _top1(outputs: Tensor, labels: Tensor) -> float:
    return float((outputs.argmax(1) == labels).double().mean())


def table(path: Path) -> list[str]:
    """The table of docs/imagenet.md: the last line of each network and row, in the order of this program."""
    found = {(facts["network"], facts["row"]): facts for facts in kept.read(path)}
    order = [*((network, row) for network in nncodec_files.NETWORKS for row in rows()), *found]
    every = [found[key] for key in dict.fromkeys(order) if key in found]
    if not every:
        return ["Not measured yet: run `python experiments/few_images.py` with a GPU."]
    cells: list[list[str]] = []
    for facts in every:
        network = f"`{facts['network']}`"
        if not cells or cells[-1][0] != network:
            start = f"{100 * facts['top1_start']:.2f}"
            size = f"{facts['fp32_bytes']:,}"
            cells.append([network, "original, float32", "–", start, "0", "100.00", "0", "–", "–", size, "–"])
        cells.append([network, *_cells(facts)])
    sources = {
        f"{facts['device']}, torch {facts['versions']['torch']}, commit {facts['commit'][:10]}"
        for facts in every
    }
    scored = ", ".join(f"{count:,}" for count in sorted({facts["scored"] for facts in every}))
    seeds = ", ".join(map(str, sorted({facts["seed"] for facts in every})))
    below = f"Scored on {scored} images; seed {seeds}. Measured on: {'; '.join(sorted(sources))}."
    return [*markdown(HEADS, cells, (0, 1)), "", below]


def _cells(facts: dict[str, Any]) -> list[str]:
    return [
        facts["label"],
        f"{facts['images']:,}",
        f"{100 * facts['top1']:.2f}",
        f"{100 * (facts['top1_start'] - facts['top1']):.2f}",
        f"{100 * facts['agreement']:.2f}",
        f"{facts['kl']:.3f}",
        f"{facts['entropy_bits']:.2f}",
        f"{facts['unique']:,}",
        f"{facts['file_bytes']:,}",
        "–" if facts["seconds"] is None else f"{facts['seconds']:.1f}",
    ]


def work(
    case: Case, row: str, options: argparse.Namespace, shared: dict[str, Any]
) -> tuple[dict[str, Any], Decoded | None]:
    """How a row was made, and its network unless that is only saved."""
    label, what = rows()[row]
    facts = {"network": case.name, "row": row, "label": label, "seed": options.seed, **shared}
    stem = f"{case.name}_{row}"
    if what is None:
        path = options.weights / f"{stem}.npz"
        how = {"settings": {"file": path.name}, "images": 0, "epochs": 0.0, "seconds": None}
        return facts | how, case.coded(path)
    if options.saved:
        content = (options.saved / f"{stem}.pwfn").read_bytes()
        return json.loads((options.saved / f"{stem}.json").read_text(encoding="utf-8")), case.decoded(content)
    made = case.make(what, options.seed)
    facts |= made.facts
    if not options.save:
        return facts, case.decoded(made.content)
    options.save.mkdir(parents=True, exist_ok=True)
    (options.save / f"{stem}.pwfn").write_bytes(made.content)
    (options.save / f"{stem}.json").write_text(json.dumps(facts) + "\n", encoding="utf-8")
    return facts, None


def main() -> None:
    """Run the rows that were asked for."""
    known = rows()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder of images")
    parser.add_argument("--weights", type=Path, required=True, help="folder of weights")
    usual = [name for name, (_, what) in known.items() if what is not None]
    parser.add_argument("--rows", default=",".join(usual), help=f"of {', '.join(known)}; default: no files")
    parser.add_argument("--networks", default=",".join(nncodec_files.NETWORKS), help="default: both")
    parser.add_argument("--out", type=Path, help="a file to append the lines to")
    files = parser.add_mutually_exclusive_group()
    files.add_argument("--save", type=Path, help="a folder for the compressed networks, which are not scored")
    files.add_argument("--saved", type=Path, help="the folder of --save: score the networks that are there")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit", type=int, help="at most so many images of each kind: to try the program")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--commit", help="of the code, if it is not in a git checkout")
    options = parser.parse_args()
    wanted = options.rows.split(",")
    if unknown := [name for name in wanted if name not in known]:
        parser.error(f"row {unknown[0]!r} is unknown: allowed is {', '.join(known)}")
    if options.save and any(known[name][1] is None for name in wanted):
        parser.error("--save: NNCodec's rows are files already")
    device = torch.device(options.device)
    images = torch.empty(0, 3, SIZE, SIZE, dtype=torch.uint8)
    if not options.saved and any(isinstance(known[name][1], Config) for name in wanted):
        images, _ = read(options.data, "unlabelled", options.limit)
    images = images.to(device)
    if not options.save:
        val, labels = (tensor.to(device) for tensor in read(options.data, "val", options.limit))
    threads = f"{torch.get_num_threads()} CPU threads"
    shared = {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else threads,
        "versions": {"torch": torch.__version__, "python": platform.python_version()},
        "commit": options.commit or git_commit(Path(__file__)) or "unknown",
    }
    for network in options.networks.split(","):
        case = Case(network, options.weights, images)
        scorer = None if options.save else Scorer(case, val, labels)
        for row in wanted:
            facts, decoded = work(case, row, options, shared)
            if scorer and decoded:
                facts |= scorer.scores(decoded)
            print(json.dumps(facts), flush=True)
            if options.out is not None:
                kept.add(options.out, facts)


if __name__ == "__main__":
    main()
