"""Results that are kept as JSON lines: reading them, adding to them, and where they were measured."""

from __future__ import annotations

import json
import platform
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from pwfn.lab.compare.runner import git_commit

Facts = dict[str, Any]
RESULTS = Path(__file__).resolve().parent / "results"


def read(path: Path) -> list[Facts]:
    """Every line; none where there is no file."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return [json.loads(line) for line in lines]


def add(path: Path, facts: Facts) -> None:
    """One line more."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(facts) + "\n")


def here(commit: str | None) -> Facts:
    """The machine and the code, for a line; ``commit`` is needed where the code is not in a git checkout."""
    return {
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine(),
        "threads": torch.get_num_threads(),
        "versions": {"torch": torch.__version__, "python": platform.python_version()},
        "commit": commit or git_commit(Path(__file__)),
    }


def measured_on(lines: Iterable[Facts], *, threads: bool = False) -> str:
    """Every machine and commit of some lines, once.

    >>> line = {"device": "a CPU", "threads": 2, "versions": {"torch": "2.9"}, "commit": "0123456789abcdef"}
    >>> measured_on([line, line], threads=True)
    'a CPU, 2 threads, torch 2.9, commit 0123456789'
    """
    machines, commits = set(), set()
    for facts in lines:
        used = f", {facts['threads']} threads" if threads else ""
        version = facts.get("versions", facts)["torch"]  # earlier lines name torch alone
        machines.add(f"{facts['device']}{used}, torch {version}")
        commits.add(str(facts["commit"])[:10])
    return f"{'; '.join(sorted(machines))}, commit {', '.join(sorted(commits))}"
