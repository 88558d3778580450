"""Two ImageNet networks from a thousand unlabelled images: the preset quick, and others from the same start.

    python experiments/few_images.py --data DIR --weights DIR [--rows NAME,NAME] [--networks NAME,NAME]

Appends one JSON line per network and row to ``--out``. ``python experiments/results.py docs`` makes the table
of docs/imagenet.md from them. The repository has no ImageNet images and no weights of these networks:

- ``--data`` has ``unlabelled*.npz`` and ``val*.npz``, with JPEG images of 224 × 224 pixels (``data``: their
  bytes, one after the other; ``ends``: where each ends; ``labels``), or the folders ``unlabelled`` and
  ``val/CLASS`` with images of any size.
- ``--weights`` has ``mobilenet_v2.safetensors`` (torchvision's names) and
  ``tf_efficientnet_lite0.safetensors`` (timm's); their metadata has ``normalize_mean`` and ``normalize_std``.

Every row starts from the same weights. ``quick`` uses the first 1,024 of the unlabelled images, and all
2,000 where a step is given. Methods that train use all of them, for ten epochs, and learn from the original
network's outputs. The labelled images are scored once, with the decoded file, and choose nothing. All files
have BatchNorm folded and the rest of the network in float16. The rows of NNCodec need the files of
nncodec_files.py.
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

import nncodec_files
import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

import pwfn
import pwfn.lab  # registers the other methods
from pwfn import Config
from pwfn.bayes.conditioned import ConditionedOptions
from pwfn.bayes.objective import divergence
from pwfn.bayes.sigma import root_mean_square
from pwfn.evaluate.entropy import Pool
from pwfn.file.compressed import Compressed
from pwfn.file.fold_batchnorm import shrink_uncompressed
from pwfn.fixing.condition import dyadic
from pwfn.lab.compare.runner import git_commit
from pwfn.lab.compare.table import markdown
from pwfn.layout import Layout, untouched
from pwfn.zoo import models

STEPS = (0.205, 0.295, 0.3, 0.4, 0.5, 0.6, 0.7)
"""Distance between values, as a fraction of the root mean square of all weights."""

EPOCHS = 10
SIZE, SHORT_SIDE = 224, 256
HEADS = (
    "network",
    "method",
    "images",
    "top-1",
    "lost",
    "agreement",
    "KL",
    "bits",
    "values",
    "bytes",
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
    for step in STEPS:
        made[f"nearest-{step}"] = f"rounding to the nearest, step {step}", step
    others: dict[str, tuple[str, str, dict[str, Any]]] = {
        "kmeans": ("k-means, 16 values per layer", "kmeans", {"options.bits": 4}),
        "kmeans-network": (
            "k-means, 64 values for the network",
            "kmeans",
            {"options.bits": 6, "options.codebooks": "network"},
        ),
        "lsq": ("LSQ, 4 bit", "lsq", {"options.bits": 4}),
    }
    for name, (label, method, options) in others.items():
        epochs = {"schedule.epochs_per_round": (float(EPOCHS),)}
        config = Config.preset("recommended", method).override({**same, **epochs, **options})
        made[name] = f"{label}, {EPOCHS} epochs", config
    # Nine rounds of one epoch, and one of polish.
    ours = Config.preset("recommended").override({**same, "schedule.epochs_per_round": 1.0})
    made["recommended"] = f"`recommended`, {EPOCHS} epochs", ours
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
    """A compressed network, decoded, and how it was made."""

    model: nn.Module
    values: Tensor
    file_bytes: int
    settings: dict[str, Any]
    images: int
    epochs: float


class Case:
    """A network with its weights, and the images as it takes them."""

    def __init__(self, name: str, weights: Path, images: Tensor, val: Tensor, labels: Tensor) -> None:
        self.name, self.weights, self.device = name, weights, images.device
        self.model = models.create(name)
        notes = models.load_weights(self.model, weights / f"{name}.safetensors")
        self.model.to(self.device).eval()
        config = models.data_config(name, self.model, notes)
        self.plain, self.train = (Loader(images, None, config, 64, train) for train in (False, True))
        small = self.device.type == "cpu"  # small batches in this order are three times as fast there
        val = val.contiguous(memory_format=torch.channels_last) if small else val
        self.val, self.labels = Loader(val, None, config, 8 if small else 250, False), labels
        self.outputs = self.through(self.model)
        self.start = _top1(self.outputs, self.labels)

    @torch.no_grad()
    def through(self, model: nn.Module) -> Tensor:
        """The class scores of the labelled images."""
        return torch.cat([model(batch) for batch in self.val])

    def run(self, config: Config) -> Made:
        """By a method of the library or the lab."""
        quick = config.method == "conditioned"
        data = self.plain if quick else self.train
        if not quick and self.device.type == "cuda":
            config = config.override({"training.precision": "bf16"})
        result = pwfn.compress(self.model, data, config=config, distill=not quick)
        images = (
            min(len(data.images), ConditionedOptions(**config.options).images) if quick else len(data.images)
        )
        return self.made(result.compressed, config.to_dict(), images, result.epochs)

    def made(self, compressed: Compressed, settings: dict[str, Any], images: int, epochs: float) -> Made:
        """From the bytes of the file."""
        content = compressed.dumps()
        loaded = pwfn.loads(content)
        model = loaded.apply_to(copy.deepcopy(self.model))
        return Made(model, loaded.values(), len(content), settings, images, epochs)

    def coded(self, path: Path) -> Made:
        """From a file of nncodec_files.py."""
        if not path.exists():
            raise SystemExit(f"{path} does not exist: python experiments/nncodec_files.py makes it")
        with np.load(path) as file:
            state = {name: torch.from_numpy(file[name]) for name in file.files}
        size, model = int(state.pop("file_bytes")), copy.deepcopy(self.model)
        model.load_state_dict({**model.state_dict(), **state})
        return Made(model, Layout.of(model).gather(model).cpu(), size, {"file": path.name}, 0, 0.0)

    def facts(self, row: str, label: str, what: What, seed: int) -> dict[str, Any]:
        """One line: the row's figures, from the decoded file."""
        started = time.perf_counter()
        if isinstance(what, Config):
            made = self.run(what.override({"seed": seed}))
        elif what is None:
            made = self.coded(self.weights / f"{self.name}_{row}.npz")
        else:
            made = self.made(nearest(self.model, what), {"step": what}, 0, 0.0)
        seconds = None if what is None else time.perf_counter() - started
        outputs, pool = self.through(made.model.eval()), Pool.of(made.values)
        return {
            "network": self.name,
            "row": row,
            "label": label,
            "seed": seed,
            "settings": made.settings,
            "images": made.images,
            "epochs": made.epochs,
            "scored": len(outputs),
            "top1_start": self.start,
            "top1": _top1(outputs, self.labels),
            "agreement": _top1(outputs, self.outputs.argmax(1)),
            "kl": float(divergence(outputs, self.outputs)),
            "entropy_bits": pool.entropy_bits,
            "unique": pool.unique,
            "file_bytes": made.file_bytes,
            "fp32_bytes": sum(4 * tensor.numel() for tensor in self.model.state_dict().values()),
            "seconds": seconds,
        }


def _top1(outputs: Tensor, labels: Tensor) -> float:
    return float((outputs.argmax(1) == labels).double().mean())


def table(path: Path) -> list[str]:
    """The table of docs/imagenet.md: the last line of each network and row, in the order of this program."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    found = {(facts["network"], facts["row"]): facts for facts in map(json.loads, lines)}
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
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit", type=int, help="at most so many images of each kind: to try the program")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--commit", help="of the code, if it is not in a git checkout")
    options = parser.parse_args()
    wanted = options.rows.split(",")
    if unknown := [name for name in wanted if name not in known]:
        parser.error(f"row {unknown[0]!r} is unknown: allowed is {', '.join(known)}")
    device = torch.device(options.device)
    (images, _), (val, labels) = (read(options.data, kind, options.limit) for kind in ("unlabelled", "val"))
    images, val, labels = (tensor.to(device) for tensor in (images, val, labels))
    threads = f"{torch.get_num_threads()} CPU threads"
    shared = {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else threads,
        "versions": {"torch": torch.__version__, "python": platform.python_version()},
        "commit": options.commit or git_commit(Path(__file__)) or "unknown",
    }
    for network in options.networks.split(","):
        case = Case(network, options.weights, images, val, labels)
        for row in wanted:
            line = json.dumps({**case.facts(row, *known[row], options.seed), **shared})
            print(line, flush=True)
            if options.out is not None:
                options.out.parent.mkdir(parents=True, exist_ok=True)
                with options.out.open("a", encoding="utf-8") as file:
                    file.write(line + "\n")


if __name__ == "__main__":
    main()
