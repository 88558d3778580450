"""The command line: parse, call, print."""

from __future__ import annotations

import json
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

Preset = Annotated[str, typer.Option(help="Settings to start from: recommended or paper.")]


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"pwfn {__version__}")
        raise typer.Exit


@app.callback()
def top(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Options that stand before any command."""


@app.command()
def demo(
    preset: Preset = "recommended",
    seed: Annotated[int, typer.Option(help="Seed of all random states.", min=0)] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object at the end only.")] = False,
) -> None:
    """Train a small network on bundled digits and fix its weights in ten rounds (no download)."""
    from pwfn import demo as job

    result = job.run(job.settings(preset, seed), say=(lambda line: None) if as_json else typer.echo)
    if as_json:
        typer.echo(json.dumps(job.facts(result)))


@app.command()
def config(
    file: Annotated[
        str | None, typer.Argument(help="A TOML file to check; its settings are printed whole.")
    ] = None,
    preset: Preset = "recommended",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of TOML.")] = False,
) -> None:
    """Print a preset as commented TOML, or check a file and print it whole."""
    settings = Config.load(file) if file else Config.preset(preset)
    typer.echo(json.dumps(settings.to_dict()) if as_json else settings.to_toml(), nl=as_json)


def main() -> None:
    """Run the command; a user's mistake ends in one sentence and exit status 2."""
    try:
        app(prog_name="pwfn")
    except PwfnError as error:
        typer.echo(f"pwfn: {error}", err=True)
        raise SystemExit(2) from None
