"""The commands that repeat a run and load its file."""

from __future__ import annotations

import shlex
from typing import Any

from pwfn.config.changes import Settings
from pwfn.report.reading import MODEL, RunData
from pwfn.run.options import RunOptions
from pwfn.zoo.models import recorded_classes

PLACEHOLDERS = {"DATA": "the data", "WEIGHTS": "the weights that the run started from"}
"""Stand in a command for names that a run's record does not have."""


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
    classes = recorded_classes(run.compressed.record)
    outputs = f", classes={classes}" if classes is not None else ""
    path = f"{run.name}/{MODEL}"
    return (
        "import pwfn\nfrom pwfn.zoo import models\n"
        f"model = pwfn.load({path!r}).apply_to(models.create({run.model!r}{outputs})).eval()"
    )
