"""The page: plain values of every run, put into ``page.html.j2``."""

from __future__ import annotations

import base64
import hashlib
import math
import shlex
from collections.abc import Mapping, Sequence
from importlib import resources
from typing import Any

import torch

from pwfn.config.changes import Settings, toml
from pwfn.errors import FileError, PwfnError, cause
from pwfn.evaluate.inspect import PARTS
from pwfn.evaluate.targets import pareto
from pwfn.export.command import input_sizes
from pwfn.lab.costs import MOST_TERMS, CostSheet, Storage, cost_sheet
from pwfn.report import formats
from pwfn.report.figures import figures, sigma, style
from pwfn.report.figures.accuracy import reliability
from pwfn.report.reading import MODEL, UNCERTAINTY, Round, RunData, measure, names
from pwfn.run.console import duration
from pwfn.run.options import RunOptions
from pwfn.run.resolve import network_of
from pwfn.version import __version__
from pwfn.zoo import models

FORMATS = {
    "fp32": "fp32",
    "fp16": "fp16",
    "int8": "int8, one scale per tensor",
    Storage.INDICES: "indices of fixed width",
    Storage.CODED: "indices, entropy-coded",
}

PLACEHOLDERS = {"DATA": "the data", "WEIGHTS": "the weights that the run started from"}
"""Stand in a command for names that a run's record does not have."""


def page(runs: Sequence[RunData], model: str | None = None, input_shape: str | None = None) -> str:
    """The page of one run, or of several side by side; the same runs give the same bytes.

    ``model`` is the network of runs whose file cannot be made from the name in it, ``input_shape`` the shape
    of one input if the network does not tell, such as ``3,224,224``.
    """
    shape = None if input_shape is None else input_sizes(input_shape)
    views = [
        {**view(run, name, number), "costs": _costs(run, model, shape)}
        for number, (run, name) in enumerate(zip(runs, names(runs), strict=True), 1)
    ]
    drawn, measured = figures(runs), measure(runs).capitalize()
    sections = {
        "accuracy": f"{measured} against size" if len(runs) == 1 else "Side by side",
        "load": "Load the file",
        "making": "How it was made",
        "figures": "Figures",
        "layers": "Layers",
        "bytes": "Where the bytes are",
        "states": "States on the way",
        "costs": "Cost of an inference",
        "uncertainty": "Uncertainty",
    }
    if len(runs) == 1 and not any(figure.key == "accuracy" for figure in drawn):
        del sections["accuracy"]
    for key in ("states", "uncertainty"):
        if not any(each[key] for each in views):
            del sections[key]
    style_sheet, script = _asset("page.css"), _asset("page.js")
    # The browser enforces it: no request, and no script but this one.
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return _render(
        title=runs[0].model if len(runs) == 1 else f"{len(runs)} runs",
        runs=views,
        measure=measured,
        changed=sorted({each.name for v in views for each in v["settings"].changed}),
        sections=sections,
        figures=drawn,
        style_sheet=style_sheet,
        script=script,
        policy=f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; "
        "img-src data:; base-uri 'none'; form-action 'none'",
        version=__version__,
    )


def _render(**values: Any) -> str:
    try:
        from jinja2 import Environment, StrictUndefined
        from markupsafe import Markup
    except ImportError as error:
        raise PwfnError("the report needs jinja2: pip install 'pwfn[report]'") from error

    def printable(value: Any) -> Any:
        return formats.clean(value) if type(value) is str else value  # Markup stays as it is

    environment = Environment(
        autoescape=True, finalize=printable, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {
        "shown": formats.shown,
        "size": formats.size,
        "duration": lambda seconds: duration(seconds) if isinstance(seconds, int | float) else "–",
        "setting": toml,
        "svg": lambda figure: Markup(style.svg(figure)),
    }
    return environment.from_string(_asset("page.html.j2")).render(**values).strip() + "\n"


def _asset(name: str) -> str:
    return resources.files("pwfn.report").joinpath(name).read_text(encoding="utf-8")


def view(run: RunData, name: str, number: int) -> dict[str, Any]:
    """What the template needs of a run; ``number`` tells the ids of its figures apart."""
    file, settings = run.file, Settings.of(run.settings)
    command, command_note = compress_command(run, settings)
    parts = [(PARTS[part], size) for part, size in file.parts.items() if size]
    return {
        "name": name,
        "run": run,
        "file": file,
        "settings": settings,
        "verdict": verdict(run),
        "load_code": load_code(run),
        "command": command,
        "command_note": command_note,
        "sigma_note": sigma.constant(run.history),
        "parts": sorted(parts, key=lambda part: -part[1]),
        "formats": [(FORMATS.get(key, key), n) for key, n in file.rivals().items()],
        "states": _states(run),
        "uncertainty": _uncertainty(run, number),
    }


def compress_command(run: RunData, settings: Settings) -> tuple[str, str]:
    """The command that repeats a run, and a sentence on what its record does not name.

    Loaders of the user (``python:``) may have a batch size of their own: the option is then left out unless
    it was given.
    """
    asked = run.asked
    data, weights = str(asked.get("data") or "DATA"), str(asked.get("weights") or "WEIGHTS")
    options: dict[str, Any] = {"model": run.model, "data": data, "weights": weights}
    options["out"] = run.folder.name or "run"
    if not (data.startswith("python:") and run.batch_size == RunOptions.batch_size):
        options["batch_size"] = run.batch_size
    options |= {
        key: asked.get(key)
        for key in ("eval_data", "test_batch_size", "classes", "holdout", "limit", "posterior")
    }
    words = [
        word for key, value in options.items() if value for word in (f"--{key.replace('_', '-')}", str(value))
    ]
    start, processes = "pwfn compress", run.record["identity"].get("processes", 1)
    if processes != 1:
        start = f"torchrun --nproc-per-node {shlex.quote(str(processes))} -m {start}"
    lines = [start]  # one option per line
    for word in (*words, *settings.arguments()):
        if word.startswith("--"):
            lines.append(f"  {shlex.quote(word)}")
        else:
            lines[-1] += f" {shlex.quote(word)}"
    missing = [f"{name} for {what}" for name, what in PLACEHOLDERS.items() if name in (data, weights)]
    note = f"The record does not name everything: put in {' and '.join(missing)}." if missing else ""
    return " \\\n".join(lines), note


def load_code(run: RunData) -> str:
    """Three lines of Python that load the network from its file."""
    classes = models.recorded_classes(run.compressed.record)
    outputs = f", classes={classes}" if classes is not None else ""
    path = f"{run.name}/{MODEL}"
    return (
        "import pwfn\nfrom pwfn.zoo import models\n"
        f"model = pwfn.load({path!r}).apply_to(models.create({run.model!r}{outputs})).eval()"
    )


def verdict(run: RunData) -> str:
    """What came of a run, in one sentence; of a ruined network, only that."""
    if run.ruined:
        return f"{run.ruined}."
    ratio, file = run.times_smaller, run.file
    smaller = f"{ratio:.1f} times smaller than in fp32" if ratio > 1 else "No smaller than in fp32"
    values = f"{file.weights:,} weights share {file.unique:,} value{'s' if file.unique != 1 else ''}"
    return f"{smaller}, {change(run)}: {values}."


def change(run: RunData) -> str:
    """What became of the accuracy, in points, or how far the network agrees with the original."""
    if run.measure == "agreement" and run.after is not None:
        return f"agreement {run.after:.2%} with the original network"
    if run.points_lost is None:
        return "accuracy not measured" if run.after is None else "accuracy before not measured"
    points = f"{abs(run.points_lost):.2f}"
    if points == "0.00":
        return "accuracy unchanged"
    return f"{points} points of accuracy {'lost' if run.points_lost > 0 else 'gained'}"


def _states(run: RunData) -> list[tuple[Round, bool]]:
    """The network after each round, or at each step that was tried, and whether no other state beats it."""
    points = [(0.0 if math.isnan(s.accuracy) else s.accuracy, s.file_bytes) for s in run.states]
    return list(zip(run.states, pareto(points), strict=True))


def _costs(run: RunData, model: str | None, shape: tuple[int, ...] | None) -> dict[str, Any]:
    """The cost sheet of a network that can be made from its name; else why there is none.

    A file cannot make the report run code, so a network of the user's own must be named by the user. That it
    cannot be made is then an error.
    """
    record = run.compressed.record
    asked = model if str(record.get("model") or "python:").startswith("python:") else None
    try:
        name = asked or models.recorded(record)
        network = network_of(run.compressed, name)
        shape = shape or models.input_shape(name, network)
        if shape is None:
            raise PwfnError(
                f"the input of {name!r} is not known: give its shape with --input-shape 3,224,224"
            )
        sheet = cost_sheet(run.compressed, network, torch.zeros(1, *shape), file=run.folder / MODEL)
    except PwfnError as error:
        if asked:
            raise
        return {"trouble": str(error)}
    return {
        "trouble": "",
        "products": [(kind, n) for kind, n in _products(sheet).items() if n],
        "storages": FORMATS,
        "sheet": sheet,
    }


def _products(sheet: CostSheet) -> dict[str, int]:
    kinds = {"left out: times 0": sheet.skipped_macs, "a shift": sheet.shift_macs}
    for order in range(2, MOST_TERMS + 1):
        plural = "s" if order > 2 else ""
        kinds[f"{order} shifts, {order - 1} addition{plural}"] = sheet.macs_by_order.get(order, 0)
    kinds["still a multiplication"] = sheet.multiplied_macs
    kinds["without a compressed weight"] = sheet.uncompressed_macs
    return kinds


MEASURES = {
    "nll": ("NLL", ".4f", "Negative log-likelihood in nats; lower is better"),
    "brier": ("Brier", ".4f", "Brier score; lower is better"),
    "calibration_error": ("Calibration", ".4f", "Expected calibration error; lower is better"),
    "risk_coverage_area": ("AURC", ".5f", "Area under the risk–coverage curve; lower is better"),
    "temperature": ("T", ".3f", "Temperature, fitted on other examples; – for none"),
}


def _uncertainty(run: RunData, number: int) -> dict[str, Any] | None:
    """What ``pwfn evaluate`` found, checked: a table, one per other data set, comparisons and a figure."""
    found = run.uncertainty
    if found is None:
        return None
    try:
        rows = found["rows"]
        used = {key: measure for key, measure in MEASURES.items() if any(key in row for row in rows)}
        draws = f"{found['samples']} draws from the posterior" if found.get("samples") else ""
        bins: Mapping[str, Any] = found.get("reliability", {})
        return {
            "preamble": "; ".join(filter(None, (draws, str(found.get("split", ""))))),
            "measures": list(used.values()),
            "rows": [
                (str(row["name"]), _number(row["accuracy"]), [_number(row.get(key)) for key in used])
                for row in rows
            ],
            "detection": _detection(rows),
            "comparisons": [
                (str(c["rival"]), _number(c["difference"]), _number(c["standard_error"]), str(c["verdict"]))
                for c in found.get("comparisons", [])
            ],
            "reliability": reliability(bins, f"reliability-{number}"),
            "notes": [str(note) for note in found.get("notes", [])],
        }
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise FileError(
            f"{run.folder / UNCERTAINTY}: is not what pwfn evaluate writes ({cause(error)}): write "
            "it again, or remove it"
        ) from error


def _detection(rows: Sequence[Mapping[str, Any]]) -> list[tuple[str, list[str], list[Any]]]:
    """For each other data set: its name, the scores of uncertainty, and by row their AUROC and FPR95."""

    def of(row: Mapping[str, Any], measure: str) -> Mapping[str, Any]:
        return row.get(measure, {}).get(place, {})

    made = []
    for place in dict.fromkeys(place for row in rows for place in row.get("auroc", {})):
        scores = list(dict.fromkeys(score for row in rows for score in of(row, "auroc")))
        cells = [
            (str(row["name"]), *([_number(of(row, m).get(s)) for s in scores] for m in ("auroc", "fpr95")))
            for row in rows
        ]
        made.append((str(place), [str(score).replace("_", " ") for score in scores], cells))
    return made


def _number(value: Any) -> float | None:
    return None if value is None else float(value)
