"""The processes of a run: one, or several that train together and must agree.

Launchers (torchrun, accelerate launch) set environment variables with the number of processes.
Accelerate's process state reads them, connects the processes and gives each its device.

Gradients are averaged after backward, not by DistributedDataParallel, which would send the mask and the
centres of the fixed weights at every step, because they are buffers.
"""

from __future__ import annotations

import atexit
import hashlib
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor
from torch import distributed as dist

from pwfn.errors import ConfigError, PeerError, PwfnError, cause

T = TypeVar("T")
_SMALL = 2**20  # elements: gradients below this size are sent together


class Distributed:
    """A run in one process; :class:`Processes` has the same interface for several.

    >>> Distributed(torch.device("cpu")).gather("mine")
    ['mine']
    """

    rank: int = 0
    world: int = 1

    def __init__(self, device: torch.device) -> None:
        self.device = device

    @property
    def leads(self) -> bool:
        """Whether this is the first process, which writes and prints for all."""
        return self.rank == 0

    def average_(self, tensors: Sequence[Tensor]) -> None:
        """Each tensor becomes its mean over the processes."""

    def average_gradients_(self, parameters: Sequence[Tensor]) -> None:
        """Each gradient becomes its mean over the processes; one that no process has stays None."""

    def copy_first_(self, tensors: Sequence[Tensor]) -> None:
        """Each tensor becomes a copy of the first process's."""

    def total(self, tensor: Tensor) -> Tensor:
        """The sum of a tensor over the processes."""
        return tensor

    def largest(self, numbers: Sequence[int]) -> list[int]:
        """The maximum of each number over the processes, without waiting for a device."""
        return list(numbers)

    def gather(self, value: Any) -> list[Any]:
        """The value of every process, on every process."""
        return [value]

    def first(self, work: Callable[[], T]) -> T:
        """Do work in the first process only and return its result in all; an error is raised in all."""
        return work()

    def check_alike(self, what: str, tensors: Sequence[Tensor]) -> None:
        """Raise an error unless the tensors are bit-identical in all processes."""


class Processes(Distributed):
    """One of several processes, each with its own device and its own share of the data."""

    def __init__(self, device: torch.device, rank: int, world: int) -> None:
        super().__init__(device)
        self.rank, self.world = rank, world
        # Small messages are sent from the CPU with gloo: they do not wait for the device, and a process that
        # has died is noticed at the next step.
        self._control: dist.ProcessGroup | None = None
        if dist.get_backend() != "gloo":
            self._control = dist.new_group(backend="gloo")

    def average_(self, tensors: Sequence[Tensor]) -> None:
        """The sum over the processes, divided by their number."""
        for tensor in tensors:
            with self._connected():
                dist.all_reduce(tensor)
            tensor.div_(self.world)

    def average_gradients_(self, parameters: Sequence[Tensor]) -> None:
        """Large gradients one by one, small ones together; a gradient missing in a process counts as zero."""
        used = self.largest([int(parameter.grad is not None) for parameter in parameters])
        gradients = []
        for parameter, is_used in zip(parameters, used, strict=True):
            if is_used:
                parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                gradients.append(parameter.grad)
        small = [gradient for gradient in gradients if gradient.numel() < _SMALL]
        self.average_([gradient for gradient in gradients if gradient.numel() >= _SMALL])
        if small:
            packed = torch.cat([gradient.reshape(-1).float() for gradient in small])
            self.average_([packed])
            pieces = packed.split([gradient.numel() for gradient in small])
            for gradient, piece in zip(small, pieces, strict=True):
                gradient.copy_(piece.view_as(gradient))

    def copy_first_(self, tensors: Sequence[Tensor]) -> None:
        """Broadcast from the first process."""
        for tensor in tensors:
            with self._connected():
                dist.broadcast(tensor, 0)

    def total(self, tensor: Tensor) -> Tensor:
        """The sum, the same on every process."""
        whole = tensor.clone()
        with self._connected():
            dist.all_reduce(whole)
        return whole

    def largest(self, numbers: Sequence[int]) -> list[int]:
        """Computed on the CPU."""
        # One more than asked: a process that has died is noticed also where there is nothing to ask.
        asked = torch.tensor([0, *numbers])
        with self._connected():
            dist.all_reduce(asked, dist.ReduceOp.MAX, group=self._control)
        return [int(number) for number in asked[1:]]

    def gather(self, value: Any) -> list[Any]:
        """In order of rank."""
        found: list[Any] = [None] * self.world
        with self._connected():
            dist.all_gather_object(found, value, group=self._control)
        return found

    def first(self, work: Callable[[], T]) -> T:
        """The others wait; if the first fails, they fail with its message."""
        answer: list[Any] = [None, None]
        failure: PwfnError | None = None
        if self.leads:
            try:
                answer[0] = work()
            except PwfnError as raised:
                failure, answer[1] = raised, (str(raised), raised.exit_status)
        with self._connected():
            dist.broadcast_object_list(answer, 0, group=self._control)
        if failure is not None:
            raise failure
        if answer[1] is not None:
            error = PeerError(f"the first process has stopped: {answer[1][0]}")
            error.exit_status = answer[1][1]
            raise error
        done: T = answer[0]
        return done

    def check_alike(self, what: str, tensors: Sequence[Tensor]) -> None:
        """Compare SHA-256 digests; a mismatch is an error that lists them."""
        digest = hashlib.sha256()
        for tensor in tensors:
            digest.update(tensor.detach().cpu().reshape(-1).contiguous().view(torch.uint8).numpy().data)
        mine = digest.hexdigest()[:16]
        every = self.gather(mine)
        if len(set(every)) > 1:
            listed = ", ".join(f"process {rank} {found}" for rank, found in enumerate(every))
            raise PeerError(
                f"{what} differ between the processes ({listed}): use the same kind "
                "of device and the same versions everywhere, then resume with --resume"
            )

    @contextmanager
    def _connected(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:  # the errors of gloo and NCCL are subclasses
            raise PeerError(
                f"process {self.rank} of {self.world} has lost the others ({cause(error)[:120]}): one of "
                "them has ended, see its message; then resume with --resume"
            ) from error


def launched() -> int:
    """The number of processes of this launch: more than one under torchrun and the like."""
    try:
        return int(os.environ.get("WORLD_SIZE", "1"))
    except ValueError:
        return 1


def usable_device(device: torch.device | str) -> torch.device:
    """A device by name; an error if it cannot be used."""
    try:
        chosen = torch.device(device)
        torch.zeros(1, device=chosen).item()
    except (RuntimeError, AssertionError, TypeError) as error:
        why = "torch does not know it, or cannot reach it"
        if str(device) == "meta":
            why = "it has no numbers: load the model's weights first"
        elif str(device).startswith("cuda"):
            count = torch.cuda.device_count()
            why = f"there are {count} CUDA devices, the first of them cuda:0"
            why = why if count else "there is no CUDA device, or torch was built without CUDA"
        raise ConfigError(
            f"device {str(device)!r} cannot be used ({why}): allowed is one that this torch can "
            'reach, such as "cpu" or "cuda:0"'
        ) from error
    return chosen


def distributed_for(device: torch.device | str | None, *, alone: bool = False) -> Distributed:
    """The processes of this launch, on a device by name; None: CUDA if there is a device, else the CPU.

    With several processes only the kind of device (``cpu``, ``cuda``) matters: each process uses the
    device with its local rank. ``alone``: one process in any case.
    """
    wanted = device if device is not None else "cuda" if torch.cuda.is_available() else "cpu"
    if alone or launched() == 1:
        return Distributed(usable_device(wanted))
    # The device is not tried here: every process would take memory of the first one.
    cpu = str(wanted) == "cpu"
    if not cpu and not torch.cuda.is_available():
        usable_device(wanted)
    try:
        from accelerate import PartialState
    except ImportError as error:
        raise PwfnError(
            "a run with several processes needs accelerate: pip install 'pwfn[accelerate]'"
        ) from error
    try:
        state = PartialState(cpu=cpu)
    except (RuntimeError, ValueError) as error:
        raise PeerError(f"the processes of this run cannot connect: {cause(error)}") from error
    if state.num_processes == 1:
        return Distributed(usable_device(wanted))
    if (state.device.type == "cpu") != cpu:
        raise PeerError(
            f"the processes are already connected on {state.device.type}, but the run is to use {wanted}: "
            "use one kind of device"
        )
    atexit.register(_leave)
    return Processes(usable_device(state.device), state.process_index, state.num_processes)


def _leave() -> None:
    """Disconnect: threads that still listen when the interpreter ends would abort it."""
    if dist.is_initialized():
        dist.destroy_process_group()


def end_process(status: int) -> NoReturn:
    """End a command with a status; one of several processes ends at once, without cleaning up.

    While torch's threads are torn down after the peers have gone, they sometimes abort the process, and
    its status is lost.
    """
    if launched() > 1:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    raise SystemExit(status)
