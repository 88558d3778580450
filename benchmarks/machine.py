"""What benchmarks share: the names of what they run on, and waiting for it."""

from __future__ import annotations

import platform
import sys
from pathlib import Path

import torch

from pwfn import __version__


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
