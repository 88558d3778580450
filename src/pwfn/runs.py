"""A compression run in a folder: started with one call, watched in its log, gone on with after a crash.

run/config.toml          the settings, whole
run/log.jsonl            a line for the start, for every round and for the end
run/checkpoint-*.pt      the newest two
run/model.pwfn           the result
run/result.json          its figures, measured on that file
"""

from __future__ import annotations

import hashlib
import json
import signal
import time
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from pwfn import data, models
from pwfn.batches import Source
from pwfn.checkpoint import Store
from pwfn.compressed import Compressed
from pwfn.config import Config, Precision
from pwfn.data import Data, DataOptions
from pwfn.errors import ConfigError, FileError, PwfnError
from pwfn.fileformat import load
from pwfn.inspection import inspect
from pwfn.models import DataConfig
from pwfn.pipeline import Progress, Round, compress, usable_device
from pwfn.randomness import seeded
from pwfn.storage import replacing
from pwfn.training import Objective, Scores, accuracy, evaluate, finite

Say = Callable[[str], None]
HEADER = "round   fixed     loss  accuracy  entropy  unique  powers of two  median sigma"


class StoppedError(PwfnError):
    """The run was asked to stop, by Ctrl-C or by the system, and has left a checkpoint."""

    def __init__(self, folder: Path, number: int) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name}; go on with --out {folder} --resume")
        self.exit_status = 128 + number  # as a shell would have it


@dataclass(frozen=True)
class RunOptions:
    """What a run is made of, beside its settings."""

    model: str  # one of our own, timm's, or python:FILE:FUNCTION; "" for the one that a file names
    data: str  # a source: npz:PATH, imagefolder:DIR, …
    out: Path
    weights: str = "pretrained"  # that (timm's own), a file, or "random"
    device: str | None = None  # CUDA where there is one, unless given
    batch_size: int = 128
    workers: int = 4
    holdout: int = 0  # test on so many training images, held out, instead of the test images
    limit: int | None = None  # train on so many images only
    resume: bool = False
    checkpoint_minutes: float = 10.0


def settings(preset: str | None, file: Path | None, changes: Sequence[str], seed: int | None) -> Config:
    """The settings of a preset or a file, with ``section.name=value`` changes on top.

    >>> settings("paper", None, ["clustering.rule=each", "clustering.b=8"], None).clustering.b
    8
    """
    if preset and file:
        raise ConfigError("give --config or --preset, not both: a file names its own preset")
    config = Config.load(file) if file else Config.preset(preset or "recommended")
    config = config.override(dict(_change(text) for text in changes))
    return config if seed is None else config.override({"seed": seed})


def _change(text: str) -> tuple[str, Any]:
    """One ``section.name=value``, the value as TOML has it; what is not TOML is text."""
    name, equals, value = text.partition("=")
    if not equals:
        raise ConfigError(f"{text!r} is not of the form section.name=value")
    try:
        return name.strip(), tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return name.strip(), value.strip()


def run(options: RunOptions, config: Config, say: Say = print) -> dict[str, Any]:
    """Compress a network by name on data by name, and return the figures of the file it ends in."""
    folder, device = options.out, _device(options.device)
    _prepare(folder, options.resume)
    model, preparation, weights_digest = _model(options)
    source = _data(options, preparation, config.seed, device)
    _check_classes(model.to(device), source, device)
    identity = {
        "model": {"name": options.model, "weights": weights_digest},
        "data": {"content": source.fingerprint, "batch_size": options.batch_size},
        "settings": config.to_dict(),
    }
    store = Store(folder, identity)
    store.clear_leftovers()
    progress = store.newest() if options.resume else None
    log = _Log(folder / "log.jsonl", progress.batches if progress else -1)
    _write_text(folder / "config.toml", config.to_toml())
    say(_beginning(options, source, progress))
    log.add({"event": "start", "batches": progress.batches if progress else 0, "identity": identity})

    def on_round(now: Progress) -> None:
        store.save(now)
        log.add({"event": "round", "batches": now.batches, **round_facts(now.rounds[-1])})
        say(round_line(now.rounds[-1]))

    say(HEADER)
    with _Keeper(store, options.checkpoint_minutes) as keep:
        result = compress(
            model, source.train, source.test, config, on_round=on_round, resume=progress, keep=keep
        )
    path = folder / "model.pwfn"
    record = {"model": options.model, "data": source.fingerprint, "preparation": asdict(preparation)}
    result.save(path, record=record)
    facts = {
        "before": result.before.to_dict() if result.before else None,
        **score_file(path, source, device, model=options.model),
    }
    _write_text(folder / "result.json", json.dumps(facts, indent=1) + "\n")
    log.add({"event": "end", **facts})
    return facts


def score_file(
    path: Path,
    source: Data,
    device: torch.device,
    *,
    model: str = "",
    samples: int = 0,
    seed: int = 0,
) -> dict[str, Any]:
    """Accuracy of a file's network on the test data, beside its size; with ``samples``, of its ensemble."""
    compressed = load(path)
    network = compressed.apply_to(create_for(compressed, model)).to(device).eval()
    scores = _scores(network, source, device)
    sizes = inspect(path, zstd=False)
    kept = ("weights", "unique", "entropy_bits", "power_of_two_share", "file_bytes", "fp32_bytes")
    facts = {"after": scores.to_dict(), **{name: getattr(sizes, name) for name in kept}}
    if samples:
        facts["ensemble"] = _ensemble(compressed, network, source, device, samples, seed)
    return facts


def evaluate_file(path: Path, options: RunOptions, *, samples: int = 0, seed: int = 0) -> dict[str, Any]:
    """What a file's network gets right on data by name; the model is the file's own unless named."""
    compressed = load(path)
    network = create_for(compressed, options.model)
    device = _device(options.device)
    source = _data(options, _preparation(compressed, options.model, network), seed, device)
    _check_classes(compressed.apply_to(network).to(device), source, device)
    return score_file(path, source, device, model=options.model, samples=samples, seed=seed)


def create_for(compressed: Compressed, name: str) -> nn.Module:
    """An untrained network of a file's architecture: the one named or, for no name, that the file names."""
    return models.create(name or models.recorded(compressed.record))


def round_facts(done: Round) -> dict[str, Any]:
    """The figures of a round as plain values."""
    return {
        "round": done.number,
        "fraction": done.fix.fraction,
        "steps": done.steps,
        "loss": finite(done.loss),
        "metric": finite(done.scores.metric) if done.scores else None,
        "validation_loss": finite(done.scores.loss) if done.scores else None,
        "entropy_bits": done.fixed.entropy_bits,
        "unique": done.fixed.unique,
        "power_of_two_share": done.fixed.power_of_two_share,
        "zero_share": done.fixed.zero_share,
        "sigma_quartiles": list(done.sigma_quartiles),
        "centres": len(done.fix.steps),
        "seconds": done.seconds,
    }


def round_line(done: Round) -> str:
    """The figures of a round in one line, under the heads of a run's table."""
    loss = f"{done.loss:.4f}" if done.loss is not None else "-"
    score = f"{done.scores.metric:.2%}" if done.scores and done.scores.metric is not None else "-"
    return (
        f"{done.number:>5}  {done.fix.fraction:>6.1%}  {loss:>7}  {score:>8}  "
        f"{done.fixed.entropy_bits:>7.3f}  {done.fixed.unique:>6}  "
        f"{done.fixed.power_of_two_share:>13.1%}  {done.sigma_quartiles[1]:>12.5f}"
    )


def summary_line(facts: Mapping[str, Any]) -> str:
    """The end of a run in one line."""
    before, after = facts.get("before"), facts["after"]
    was = f"{before['metric']:.2%} before, " if before and before["metric"] is not None else ""
    now = f"{after['metric']:.2%}" if after["metric"] is not None else f"loss {after['loss']}"
    drawn = f" ({facts['ensemble']:.2%} as an ensemble)" if "ensemble" in facts else ""
    return (
        f"{was}{now} after{drawn}; {facts['weights']:,} weights of {facts['unique']} values, "
        f"{facts['entropy_bits']:.3f} bits each; {facts['file_bytes']:,} bytes, fp32 {facts['fp32_bytes']:,}"
    )


class _Keeper:
    """Decides after each step whether to write a checkpoint, and stops the run when a signal came."""

    def __init__(self, store: Store, minutes: float) -> None:
        self._store, self._seconds = store, 60 * minutes
        self._written = time.monotonic()
        self._signal = 0

    def __enter__(self) -> _Keeper:
        try:
            self._before = {s: signal.signal(s, self._note) for s in (signal.SIGINT, signal.SIGTERM)}
        except ValueError:  # not in the main thread, which alone may handle signals
            self._before = {}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def __call__(self, progress: Callable[[], Progress]) -> None:
        if not self._signal and time.monotonic() - self._written < self._seconds:
            return
        self._store.save(progress())
        self._written = time.monotonic()
        if self._signal:
            raise StoppedError(self._store.folder, self._signal)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._signal = number


class _Log:
    """Lines of JSON; those after the point that a run goes on from are dropped, as they come again."""

    def __init__(self, path: Path, batches: int) -> None:
        self._path = path
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() and batches >= 0 else []
        kept = [line for line in lines if _is_before(line, batches)]
        _write_text(path, "".join(f"{line}\n" for line in kept))

    def add(self, facts: Mapping[str, Any]) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(facts) + "\n")


def _is_before(line: str, batches: int) -> bool:
    try:
        facts = json.loads(line)
    except ValueError:  # torn, as the run was killed
        return False
    return isinstance(facts, dict) and facts.get("batches", batches + 1) <= batches


def _prepare(folder: Path, resume: bool) -> None:
    used = any(folder.glob("checkpoint-*.pt")) or (folder / "model.pwfn").exists()
    if used and not resume:
        raise FileError(f"{folder}: holds a run already: go on with it by --resume, or name another folder")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FileError(f"{folder}: cannot be made a folder: {error.strerror}") from error


def _model(options: RunOptions) -> tuple[nn.Module, DataConfig, str]:
    """The network with its weights, how its images are prepared, and a digest of the weights."""
    notes: dict[str, str] = {}
    if options.weights == "pretrained":
        model = models.create(options.model, pretrained=True)
    else:
        with seeded(0, torch.device("cpu")):  # random weights are for trying out: the same each time
            model = models.create(options.model)
        if options.weights != "random":
            notes = models.load_weights(model, options.weights)
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return model, models.data_config(options.model, model, notes), digest.hexdigest()[:16]


def _preparation(compressed: Compressed, name: str, network: nn.Module) -> DataConfig:
    """As the run that wrote the file prepared its images, or as is usual for the network."""
    usual = models.data_config(name or models.recorded(compressed.record), network)
    kept = compressed.record.get("preparation")
    if not isinstance(kept, dict):
        return usual
    try:
        changed: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in kept.items()}
        return replace(usual, **changed)
    except TypeError:
        raise FileError(f"the file's record has an unknown way to prepare images: {kept!r}") from None


def _data(options: RunOptions, preparation: DataConfig, seed: int, device: torch.device) -> Data:
    return data.open_source(
        options.data,
        DataOptions(
            mean=preparation.mean,
            std=preparation.std,
            image_size=preparation.image_size,
            interpolation=preparation.interpolation,
            crop_pct=preparation.crop_pct,
            batch_size=options.batch_size,
            seed=seed,
            device=device,
            workers=options.workers,
            limit=options.limit,
            holdout=options.holdout,
        ),
    )


@torch.no_grad()
def _check_classes(model: nn.Module, source: Data, device: torch.device) -> None:
    """Labels against what the model gives for one batch, before hours are spent on it."""
    was_training = model.training
    for batch in Source("test data", source.test, device).batches():
        output = batch.through(model.eval(), "test data, batch 1")
        if isinstance(output, torch.Tensor) and output.dim() == 2:
            source.check_labels(output.shape[1])
        break
    model.train(was_training)


def _scores(model: nn.Module, source: Data, device: torch.device) -> Scores:
    tests = Source("test data", source.test, device)
    return evaluate(model, tests, Objective(F.cross_entropy), accuracy, Precision.FP32)


@torch.no_grad()
def _ensemble(
    compressed: Compressed, network: nn.Module, source: Data, device: torch.device, samples: int, seed: int
) -> float:
    """Accuracy of the mean softmax over draws from the posterior that the file keeps."""
    generator = torch.Generator().manual_seed(seed)
    tests = Source("test data", source.test, device)
    total: torch.Tensor | None = None
    for _ in range(samples):
        network.load_state_dict(compressed.sample(generator))
        drawn = torch.cat([batch.through(network, "test data").softmax(1) for batch in tests.batches()])
        total = drawn if total is None else total + drawn
    assert total is not None  # samples is at least 1
    targets = torch.cat([batch.target for batch in tests.batches()])
    return float((total.argmax(1) == targets).double().mean())


def _device(name: str | None) -> torch.device:
    return usable_device(name or ("cuda" if torch.cuda.is_available() else "cpu"))


def _beginning(options: RunOptions, source: Data, progress: Progress | None) -> str:
    where = f"{options.model} on {source.name}, into {options.out}"
    if progress is None:
        return where
    return f"{where}; going on after round {len(progress.rounds)} and {progress.batches:,} batches"


def _write_text(path: Path, text: str) -> None:
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")
