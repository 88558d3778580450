"""What benchmarks share: the names of what they run on, waiting for it, and lines of results."""

from __future__ import annotations

import json
import platform
import sys
from pathlib import Path
from typing import Any

import torch

from pwfn import __version__
from pwfn.lab.compare.runner import git_commit


def processor() -> str:
    """Name of the processor, as far as the system tells."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.partition(": ")[2] for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def device_name(device: torch.device) -> str:
    """The GPU's name, or the processor's and its threads."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{processor()}, {torch.get_num_threads()} threads"


def versions() -> dict[str, str]:
    """Of everything that is timed."""
    found = {"python": platform.python_version(), "torch": torch.__version__, "pwfn": __version__}
    if "triton" in sys.modules:
        found["triton"] = sys.modules["triton"].__version__
    return found


def wait(device: torch.device) -> None:
    """Wait for the device: calls return before their work is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def here(device: torch.device, commit: str | None) -> dict[str, Any]:
    """The machine and the code, for a line of results."""
    threads = f"{torch.get_num_threads()} CPU threads"
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else threads,
        "versions": {"torch": torch.__version__, "python": platform.python_version()},
        "commit": commit or git_commit(Path(__file__)) or "unknown",
    }


def show(facts: dict[str, Any], out: Path | None) -> None:
    """Print a line of results, and append it to a file if one is named."""
    line = json.dumps(facts)
    print(line, flush=True)
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        with out.open("a", encoding="utf-8") as file:
            file.write(line + "\n")
