"""The network in torch, and its outputs, which an exported file must reproduce."""

from __future__ import annotations

import contextlib
import copy
import importlib
import io
import logging
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pwfn.bayes.objective import logits
from pwfn.errors import PwfnError
from pwfn.file.compressed import Compressed
from pwfn.layout.coverage import check_model
from pwfn.version import __version__

TOLERANCE = 1e-5
"""Largest accepted difference from torch, relative to the largest output (at least 1)."""

WRAPPED = "network."
"""Before the names of a network whose output is an object with logits."""


@dataclass(frozen=True)
class Reference:
    """A compressed network in torch, with test batches and its outputs for them."""

    module: nn.Module  # a copy, in evaluation mode, in fp32 and on the CPU
    example: Tensor
    batches: tuple[Tensor, ...]
    wanted: tuple[Tensor, ...]

    @classmethod
    def of(cls, compressed: Compressed, model: nn.Module, example: Tensor, form: str) -> Reference:
        """Of a model of the same architecture, which is not changed; ``form`` is the name of the target."""
        check_packages()
        if "activations" in compressed.record:
            raise PwfnError(
                f"the network computes with quantised or rectified activations, which are not written to "
                f"{form}: export it to safetensors, or run it in torch with apply_to"
            )
        check_model(model)
        if not isinstance(example, Tensor):
            raise PwfnError(
                f"the example is a {type(example).__name__}: give one batch as a tensor, and wrap a model of "
                "several inputs so that it takes one"
            )
        try:
            module = copy.deepcopy(model)
        except Exception as error:  # attributes of the user's model, such as tensors with a gradient's graph
            raise PwfnError(f"{type(model).__name__} cannot be copied: {cause(error)}") from error
        module = compressed.apply_to(module.float()).eval().cpu()
        example = example.detach().cpu()
        if example.ndim == 0 or len(example) == 0:
            raise PwfnError("the example holds no input: give a batch of at least one")
        example = example.float() if example.is_floating_point() else example
        for random in (True, False):
            batches = _test_batches(example, random)
            wanted = tuple(_output(module, batch) for batch in batches)
            if all(bool(output.isfinite().all()) for output in wanted):
                return cls(module, example, batches, wanted)
        raise PwfnError(
            f"{type(module).__name__} gives outputs that are not finite, for random inputs and the example: "
            "in Python, give an example for which they are"
        )

    def differences(
        self, load: Callable[[], Callable[[Tensor], Tensor]], runner: str
    ) -> list[tuple[float, float]]:
        """For each batch the largest difference between another runner and torch, and the largest output."""
        try:
            run = load()
            outputs = [run(batch.clone()) for batch in self.batches]  # a network may change its input
        except Exception as error:  # a runtime may raise anything
            raise PwfnError(
                f"{runner} cannot run the exported network: {cause(error)}: export dense safetensors instead"
            ) from error
        differences = []
        for batch, ours, torchs in zip(self.batches, outputs, self.wanted, strict=True):
            if ours.shape != torchs.shape:
                raise PwfnError(
                    f"for a batch of {len(batch)} the output has shape {tuple(ours.shape)} in {runner} and "
                    f"{tuple(torchs.shape)} in torch: make the model treat batches of any size alike"
                )
            largest = (ours.double() - torchs.double()).abs().max()
            differences.append((float(largest), float(torchs.double().abs().max())))
        return differences


def accepted(error: float, largest: float) -> bool:
    """Whether a difference is small against the largest output."""
    return error <= TOLERANCE * max(1.0, largest)


def check(differences: list[tuple[float, float]], path: Path, runner: str) -> None:
    """Raise if a difference is too large."""
    for error, largest in differences:
        if not accepted(error, largest):
            raise PwfnError(
                f"{path}: not written, because the output of {runner} differs from torch by {error:.2g} "
                f"(largest output {largest:.2g}): report the model, or export dense safetensors instead"
            )


def traceable(module: nn.Module, example: Tensor) -> tuple[nn.Module, Tensor]:
    """What an exporter can trace: a module that returns a tensor, and a batch of two or more."""
    # With one input, the exporter would take the batch for a constant.
    batch = torch.cat((example, example))[:2] if example.shape[0] < 2 else example
    with torch.no_grad():
        return (module if isinstance(module(batch.clone()), Tensor) else _Logits(module)), batch


def provenance(compressed: Compressed) -> dict[str, str]:
    """Where an exported file comes from: the version of pwfn, and content and method of its .pwfn file."""
    return {
        "pwfn_version": __version__,
        "pwfn_content_sha256": compressed.content_sha256(),
        "pwfn_method": str(compressed.record.get("method", "")),
    }


def check_packages() -> None:
    """Raise if a package is missing without which no graph is made."""
    for name in ("onnx", "onnxruntime", "onnxscript"):
        try:
            importlib.import_module(name)
        except ImportError as error:
            raise PwfnError(f"export of a graph needs {name}: pip install 'pwfn[onnx]'") from error


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Discard the warnings, logs and printed graphs of the exporter; our errors say the same in short."""
    level = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    nowhere = io.StringIO()
    try:
        with (
            warnings.catch_warnings(),
            contextlib.redirect_stdout(nowhere),
            contextlib.redirect_stderr(nowhere),
        ):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)


def cause(error: BaseException) -> str:
    """First line of the innermost error, which names the problem."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = str(error).strip().splitlines()
    return lines[0].strip().rstrip(".:") if lines else type(error).__name__


class _Logits(nn.Module):
    """A network that returns its logits alone, where it returns an object that holds them."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network
        self.eval()

    def forward(self, x: Tensor) -> Any:
        """The logits."""
        return logits(self.network(x))


def _test_batches(example: Tensor, random: bool) -> tuple[Tensor, ...]:
    """Batches of three and of one, sizes that the exporter does not see, random if the input is a float.

    The others are inputs of the example: a network with a logarithm may have no answer to random ones.
    """
    if random and example.is_floating_point():
        three = torch.randn((3, *example.shape[1:]), generator=torch.Generator().manual_seed(0))
    else:
        three = example[torch.arange(3) % len(example)]
    return three, three[:1]


def _output(module: nn.Module, batch: Tensor) -> Tensor:
    """The output of torch, which the runtime must reproduce."""
    name = type(module).__name__
    try:
        with torch.no_grad():
            wanted = logits(module(batch.clone()))
    except Exception as error:  # the model is the user's and may raise anything
        shape = "×".join(str(size) for size in batch.shape)
        kind = str(batch.dtype).removeprefix("torch.")
        raise PwfnError(
            f"{name} cannot run on an input of shape {shape} and type {kind}: {cause(error)}: give an "
            "example that it can take, and support batches of any size"
        ) from error
    if not isinstance(wanted, Tensor):
        raise PwfnError(f"{name} returns a {type(wanted).__name__}: wrap it so that it returns one tensor")
    if wanted.numel() == 0:
        raise PwfnError(f"{name} returns an empty tensor: there is nothing to compare")
    return wanted
