"""The processes of a run: one, or several that train together and must agree.

Launchers (torchrun, accelerate launch) set environment variables with the number of processes.
Accelerate's process state reads them, connects the processes and gives each its device.

Gradients are not averaged by DistributedDataParallel, which would send the mask and the centres of the
fixed weights at every step, because they are buffers. Flat optimisers average those of the compressed weights
in buckets, while backward computes the others (:class:`MeanGradient`). All others are averaged after it.
"""

from __future__ import annotations

import atexit
import hashlib
import itertools
import os
import sys
import weakref
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

    def begin_average_(self, tensor: Tensor) -> Callable[[], None]:
        """Begin to average a tensor over the processes; the function returned waits for the mean."""
        return lambda: None

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
            self.begin_average_(tensor)()

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

    def begin_average_(self, tensor: Tensor) -> Callable[[], None]:
        """An asynchronous sum; all processes must begin theirs in the same order."""
        with self._connected():
            work = dist.all_reduce(tensor, async_op=True)

        def end() -> None:
            with self._connected():
                work.wait()
            tensor.div_(self.world)

        return end

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
        if not numbers:
            return []
        asked = torch.tensor(numbers)
        with self._connected():
            dist.all_reduce(asked, dist.ReduceOp.MAX, group=self._control)
        return [int(number) for number in asked]

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


class MeanGradient:
    """The mean gradient of the draws of a step, over batches and processes.

    ``leaves`` are the pieces of one vector. Each hands over its gradient as soon as backward has it. In the
    last batch, neighbouring leaves are averaged over the processes while backward computes the rest.

    >>> leaf = torch.nn.Parameter(torch.ones(2))
    >>> mean = MeanGradient([leaf], Distributed(torch.device("cpu")))
    >>> for last in (False, True):
    ...     mean.expect(last)
    ...     (0.5 * leaf.sum()).backward()       # half of the mean of two batches
    >>> mean.take().tolist()
    [1.0, 1.0]
    """

    def __init__(self, leaves: Sequence[Tensor], distributed: Distributed) -> None:
        self._leaves, self._distributed = list(leaves), distributed
        self._places, self._buckets = _spans(self._leaves), _buckets(self._leaves)
        self._bucket_of = {leaf: i for i, bucket in enumerate(self._buckets) for leaf in bucket}
        self.forget()
        me = weakref.ref(self)  # a leaf must not keep all this in memory
        for number, leaf in enumerate(self._leaves):
            leaf.register_post_accumulate_grad_hook(lambda _, number=number: _arrived(me(), number))

    def forget(self) -> None:
        """Begin a step: nothing has arrived."""
        self._sum: Tensor | None = None
        self._last = self._is_late = False
        self._missing = [set(bucket) for bucket in self._buckets]
        self._begun: list[Callable[[], None]] = []

    def expect(self, last: bool) -> None:
        """Before a batch; ``last``: after it the gradients are complete."""
        self._last = last and self._distributed.world > 1

    def arrived(self, number: int) -> None:
        """Add the gradient of a leaf, and begin to average what is complete."""
        leaf, bucket = self._leaves[number], self._bucket_of[number]
        if len(self._begun) > bucket:  # a part of the model that backward went through once more
            self._is_late = True  # its gradient stays with the leaf
            return
        span = self._places[number]
        self._whole()[span] += leaf.grad.reshape(-1)  # type: ignore[union-attr]  # it has just arrived
        leaf.grad = None
        if self._last:
            self._missing[bucket].discard(number)
            # In order: all processes must begin the same ones.
            while len(self._begun) < len(self._buckets) and not self._missing[len(self._begun)]:
                self._begin()

    def take(self) -> Tensor:
        """The mean gradient as one vector, in float32 at least; leaves without a gradient count as zero."""
        whole, distributed = self._whole(), self._distributed
        if distributed.world > 1:
            while len(self._begun) < len(self._buckets):
                self._begin()
            for end in self._begun:
                end()
            if distributed.largest([int(self._is_late)])[0]:
                late = torch.zeros_like(whole)
                for leaf, span in zip(self._leaves, self._places, strict=True):
                    if leaf.grad is not None:
                        late[span] = leaf.grad.reshape(-1)
                        leaf.grad = None
                distributed.average_([late])
                whole += late
        self.forget()
        return whole

    def _whole(self) -> Tensor:
        if self._sum is None:
            first = self._leaves[0]
            dtype = torch.promote_types(first.dtype, torch.float32)
            self._sum = torch.zeros(self._places[-1].stop, dtype=dtype, device=first.device)
        return self._sum

    def _begin(self) -> None:
        bucket = self._buckets[len(self._begun)]
        part = self._whole()[self._places[bucket[-1]].start : self._places[bucket[0]].stop]
        self._begun.append(self._distributed.begin_average_(part))


def _arrived(mean: MeanGradient | None, number: int) -> None:
    if mean is not None:
        mean.arrived(number)


def _spans(leaves: Sequence[Tensor]) -> list[slice]:
    """Where each leaf is in the vector."""
    ends = list(itertools.accumulate((leaf.numel() for leaf in leaves), initial=0))
    return [slice(*pair) for pair in itertools.pairwise(ends)]


def _buckets(leaves: Sequence[Tensor]) -> list[list[int]]:
    """Neighbouring leaves, at least ``_SMALL`` elements together, from the last leaf to the first."""
    buckets: list[list[int]] = [[]]
    for number in reversed(range(len(leaves))):
        if sum(leaves[each].numel() for each in buckets[-1]) >= _SMALL:
            buckets.append([])
        buckets[-1].append(number)
    return buckets


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
