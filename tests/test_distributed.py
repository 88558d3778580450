"""Several processes: they train together, come to the same weights, and end together.

The processes are started as torchrun starts them, by environment variables, each running this file.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import digits_run
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

import pwfn.lab  # noqa: F401 - the baselines by name
from pwfn import Config, PeerError, compress, load
from pwfn.bayes.batches import Source
from pwfn.bayes.distributed import Distributed, Processes, distributed_for, end_process, launched
from pwfn.bayes.gaussian import GaussianNetwork
from pwfn.bayes.objective import Objective
from pwfn.bayes.sigma import probe
from pwfn.errors import ConfigError, PwfnError
from pwfn.file.format import dumps
from pwfn.progress import Round
from pwfn.run.console import View
from pwfn.run.folder import run
from pwfn.run.options import RunOptions
from pwfn.zoo.data import TensorLoader

CPU = torch.device("cpu")
# Sigma is trained and fixed weights are drawn too, so that every part of the state matters.
CONFIG = Config().override(
    {
        "posterior.init": "powers",
        "fixing.grid_exponent": 7,
        "schedule.fractions": [0.5, 0.9, 1.0],
        "schedule.epochs_per_round": 0.5,
        "training.learning_rate": 0.01,
        "training.sigma_learning_rate": 1e-3,
        "finish.polish_epochs": 0.3,
        "finish.reestimate_epochs": 0.2,
    }
)
# Noise too small to change a weight, so that two halves of a batch can be compared with the whole.
QUIET = CONFIG.override(
    {
        "posterior.init": "rms",
        "posterior.rms_fraction": 1e-11,
        "posterior.alpha": 0.0,
        "training.sigma_learning_rate": 0.0,
        "schedule.epochs_per_round": [3.0, 0.0, 0.0],
        "training.clip_norm": "off",  # its norm has the noise of each process in it
    }
)


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


def start(job: str, *arguments: str, world: int = 2) -> list[subprocess.Popen[str]]:
    port = str(free_port())
    started = []
    for rank in range(world):
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
        environment = {
            **os.environ,
            **{name: str(value) for name, value in place.items()},
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
            "OMP_NUM_THREADS": "1",
        }
        started.append(
            subprocess.Popen(
                [sys.executable, __file__, job, *arguments],
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    return started


def ended(processes: list[subprocess.Popen[str]]) -> list[tuple[int, str, str]]:
    found = []
    for process in processes:
        out, err = process.communicate(timeout=120)
        found.append((process.returncode, out, err))
    return found


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole") / "run"
    found = ended(start("run", str(folder)))
    assert [status for status, _, _ in found] == [0, 0], found
    assert found[1][1] == ""  # only the first prints
    return folder


@pytest.fixture(scope="module")
def both(whole: Path) -> list[dict[str, Any]]:
    """What every job below returned, in each of two processes."""
    found = ended(start("jobs", str(whole)))
    for status, _, err in found:
        assert status == 0, err
    return [json.loads(out.splitlines()[-1]) for _, out, _ in found]


def test_one_process_is_the_same_interface() -> None:
    alone = Distributed(CPU)
    parameter = nn.Parameter(torch.ones(2))
    parameter.grad = torch.full((2,), 3.0)
    alone.average_([torch.ones(1)])
    alone.average_gradients_([parameter])
    alone.copy_first_([torch.ones(1)])
    alone.check_alike("anything", [torch.ones(1)])
    assert parameter.grad.tolist() == [3, 3]
    assert alone.total(torch.tensor(2.0)).item() == 2
    assert (alone.largest([1, 0]), alone.gather("x"), alone.first(lambda: 5)) == ([1, 0], ["x"], 5)
    assert alone.leads


def test_how_many_processes_there_are_comes_from_the_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert launched() == 1
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert launched() == 4
    monkeypatch.setenv("WORLD_SIZE", "many")
    assert launched() == 1
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert distributed_for("cpu", alone=True).world == 1


def test_several_processes_need_accelerate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setitem(sys.modules, "accelerate", None)
    with pytest.raises(PwfnError, match=r"pip install 'pwfn\[accelerate\]'"):
        distributed_for("cpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
@pytest.mark.parametrize("world", ["1", "2"])
def test_cuda_asked_for_and_absent(world: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", world)
    with pytest.raises(ConfigError, match="device 'cuda' cannot be used"):
        distributed_for("cuda")


def test_the_operations_of_two_processes(both: list[dict[str, Any]]) -> None:
    first, second = (dict(found["operations"]) for found in both)
    assert first.pop("failed") == "no space left"
    assert second.pop("failed").endswith("no space left")
    assert first == second
    assert first["average"] == [1.5, 1.5]  # of 1 and 2
    assert first["total"] == 3
    assert first["copied"] == 1
    assert first["largest"] == [7, 9]
    assert first["gathered"] == ["rank 0", "rank 1"]
    assert first["first"] == "from 0"
    assert first["gradients"] == [[1.5], [1.0], None]  # both have it, one has it, none has it
    assert first["large"] == 1.5
    assert "process 0 " in first["unlike"]
    assert "process 1 " in first["unlike"]


def test_gradients_are_averaged_while_backward_runs(both: list[dict[str, Any]]) -> None:
    """Three layers: one in both processes, one in the second alone, one that backward goes through twice."""
    for found in both:
        mean = found["mean"]
        assert mean["gradient"] == [1.5, 1.0, 6.0]  # (1 + 2) / 2, (0 + 2) / 2, 2 * (2 + 4) / 2
        assert mean["again"] == mean["gradient"]
    # Where backward comes to the first layer, those behind it are under way.
    assert [found["mean"]["begun"] for found in both] == [[1, 1], [2, 2]]


def test_two_processes_share_a_batch_as_one_would_see_it(both: list[dict[str, Any]]) -> None:
    """Without noise and BatchNorm, two halves of a batch make the step that the whole one makes."""
    alone = torch.tensor(trained(Distributed(CPU), 16))
    for found in both:
        torch.testing.assert_close(torch.tensor(found["halves"]), alone, rtol=0, atol=2e-6)


def test_two_processes_end_alike_whatever_the_method(both: list[dict[str, Any]]) -> None:
    first, second = (found["methods"] for found in both)
    assert first == second
    assert len(first) == 6
    for name, (_, untouched) in first.items():
        learned = [key for key in untouched if key.startswith("pwfn_activations")]
        assert bool(learned) == (not name.endswith("None"))


def test_the_tolerated_sigma_is_by_the_mean_loss_of_the_processes(both: list[dict[str, Any]]) -> None:
    """The largest that raises the loss by at most 0.1: 2 % more raises it by more."""
    net, task, losses = GaussianNetwork(linear(), CONFIG), Objective(F.cross_entropy), []
    first, second = (found["tolerance"] for found in both)
    assert first == second
    for sigma in (2.0**-30, first[0], 1.02 * first[0]):
        with torch.no_grad():
            net.free_sigma.fill_(sigma)
        shares = []
        for rank in range(2):
            seat = Distributed(CPU)
            seat.rank = rank  # its noise, and its figures to itself
            shares.append(probe(net, Source("data", data(rank, 2, 8), CPU), task, seat).loss())
        assert shares[0] != shares[1]
        losses.append(sum(shares) / 2)
    assert losses[1] <= losses[0] + 0.1 < losses[2]


def test_each_process_draws_its_own_noise(both: list[dict[str, Any]]) -> None:
    first, second = (found["noise"] for found in both)
    assert first["noise"] != second["noise"]
    assert first["weights"] == second["weights"]


@pytest.mark.parametrize("world", [1, 2, 4])
def test_sharded_vectors_end_as_those_of_one_process(world: int) -> None:
    """The same data and noise in every process: mean gradients, clusters and file are those of one."""
    alone = trained_in_rounds(nn.Module.train)
    for status, out, err in ended(start("sharded", world=world)):
        assert status == 0, err
        assert json.loads(out) == alone


def test_the_mistake_of_the_first_process_is_told_by_all(both: list[dict[str, Any]]) -> None:
    assert all("already holds a run" in found["mistake"] for found in both)


def test_a_run_of_two_processes_leaves_one_folder(whole: Path) -> None:
    record = json.loads((whole / "record.json").read_text())
    assert record["identity"]["processes"] == record["machine"]["processes"] == 2
    assert record["after"]["examples"] == 450  # each once, over both
    assert record["weights"] == load(whole / "model.pwfn").layout.size
    assert [done["fraction"] for done in record["rounds"]] == [0.5, 0.9, 1.0]
    with pytest.raises(PwfnError, match="processes is 2, not 1"):
        run(options(whole, resume=True), CONFIG)


def test_a_signal_to_one_process_stops_both_at_the_same_step(whole: Path, tmp_path: Path) -> None:
    processes = start("run", str(tmp_path))
    wait_for(tmp_path / "checkpoints" / "checkpoint-000001.pt", processes)
    processes[1].send_signal(signal.SIGTERM)
    found = ended(processes)
    assert [status for status, _, _ in found] == [128 + signal.SIGTERM] * 2, found
    assert_resumes(tmp_path, whole)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_process_that_dies_ends_the_other_with_a_sentence(rank: int, whole: Path, tmp_path: Path) -> None:
    processes = start("run", str(tmp_path))
    wait_for(tmp_path / "checkpoints" / "checkpoint-000003.pt", processes)
    processes[rank].kill()
    began = time.monotonic()
    status, _, err = ended(processes)[1 - rank]
    assert time.monotonic() - began < 60
    assert status == 2
    assert f"process {1 - rank} of 2 has lost the others" in err
    assert "Traceback" not in err
    assert not (tmp_path / "model.pwfn").exists()
    assert_resumes(tmp_path, whole)


def assert_resumes(folder: Path, whole: Path) -> None:
    found = ended(start("run", str(folder)))
    assert [status for status, _, _ in found] == [0, 0], found
    assert "resuming after round" in found[0][1]
    assert (folder / "model.pwfn").read_bytes() == (whole / "model.pwfn").read_bytes()


def wait_for(path: Path, processes: list[subprocess.Popen[str]]) -> None:
    limit = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < limit
        assert all(process.poll() is None for process in processes), ended(processes)
        time.sleep(0.005)


# What the processes do.


def options(folder: Path, **changes: Any) -> RunOptions:
    return digits_run(folder, batch_size=32, **changes)


def data(rank: int = 0, world: int = 1, batch_size: int = 16) -> TensorLoader:
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(64, 1, 4, 4, generator=generator)
    targets = torch.randint(0, 3, (64,), generator=generator)
    return TensorLoader(images, targets, batch_size, shuffle=True, rank=rank, world=world)


def trained(distributed: Distributed, batch_size: int, config: Config = QUIET) -> list[float]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 3))
    last: list[float] = []

    def keep(progress: Any, ends: bool) -> None:
        if ends and not last:  # before any fixing, which would hide small differences or make them large
            last[:] = progress().network["free_mu"].tolist()

    compress(
        model,
        data(distributed.rank, distributed.world, batch_size),
        None,
        config,
        keep=keep,
        distributed=distributed,
    )
    return last


def job_operations(distributed: Processes) -> Any:
    mine = float(distributed.rank + 1)
    average = torch.full((2,), mine)
    distributed.average_([average])
    copied = torch.tensor(mine)
    distributed.copy_first_([copied])
    both, one, none, large = (nn.Parameter(torch.zeros(n)) for n in (1, 1, 1, 2**20))
    both.grad = torch.full((1,), mine)
    one.grad = torch.full((1,), 2.0) if distributed.rank == 1 else None
    large.grad = torch.full((2**20,), mine)
    distributed.average_gradients_([both, one, none, large])

    def work() -> str:
        assert distributed.rank == 0
        return "from 0"

    def fail() -> None:
        raise ConfigError("no space left")

    return {
        "average": average.tolist(),
        "total": distributed.total(torch.tensor(mine)).item(),
        "copied": copied.item(),
        "largest": distributed.largest([7 - distributed.rank, 8 + distributed.rank]),
        "gathered": distributed.gather(f"rank {distributed.rank}"),
        "first": distributed.first(work),
        "gradients": [None if p.grad is None else p.grad.tolist() for p in (both, one, none)],
        "large": large.grad[-1].item(),
        "failed": sentence(lambda: distributed.first(fail), PwfnError),
        "unlike": sentence(
            lambda: distributed.check_alike("the clusters", [average + distributed.rank]), PeerError
        ),
    }


def job_mean(distributed: Processes) -> Any:
    mine, begun, found = float(distributed.rank + 1), [], []
    leaves = [nn.Parameter(torch.ones(1)) for _ in range(3)]
    module: Any = sys.modules["pwfn.bayes.distributed"]
    module._SMALL = 1  # a bucket for each
    mean = module.MeanGradient(leaves, distributed)
    for _ in range(2):
        mean.expect(last=True)
        first, second, last = leaves
        x = mine * first
        x.register_hook(lambda gradient: begun.append(len(mean._begun)))
        whole = x + 2 * second if distributed.rank == 1 else x
        (whole + 2 * mine * last).sum().backward()  # the last leaf comes first
        (2 * mine * last).sum().backward()
        found.append(mean.take().tolist())
    return {"gradient": found[0], "again": found[1], "begun": begun}


def sentence(work: Any, kind: type[PwfnError]) -> str:
    with pytest.raises(kind) as caught:
        work()
    return str(caught.value)


def trained_in_rounds(prepared: Callable[[nn.Module], nn.Module]) -> dict[str, Any]:
    """A loop of one's own, over a network whose vectors do not divide evenly among four processes."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3)).train()
    # A sigma well above its floor, to which only a vector that is not sharded returns.
    changes = {"posterior.init": "rms", "fixing.rule": "each", "training.sigma_learning_rate": 0.01}
    net = GaussianNetwork(model, Config.preset("paper").override(changes))
    assert net.layout.size == 75
    net = prepared(net)
    for fraction in (0.3, 0.8, 1.0):
        optimizer = torch.optim.SGD(net.parameter_groups(lr=0.05, weight_decay=1e-3), momentum=0.9)
        for _ in range(4):
            optimizer.zero_grad()
            loss = F.cross_entropy(net(torch.randn(16, 5)), torch.randint(3, (16,)))
            (loss + net.penalty()).backward()
            optimizer.step()
        net.fix(fraction)
    made = net.finish()
    found = {name: tensor.tolist() for name, tensor in made.untouched.items()}
    steps = [step.centre for record in net.records for step in record.steps]
    return {**found, "steps": steps, "file": hashlib.sha256(dumps(made)).hexdigest()}


def job_halves(distributed: Processes) -> Any:
    return trained(distributed, 8)


def job_methods(distributed: Processes) -> Any:
    """A few methods; activations too, whose starting values would differ by what each process sees."""
    found = {}
    names = (("lsq", None), ("lsq", 4), ("lsq+", 4), ("wfn", None), ("kmeans", None), ("conditioned", None))
    for name, bits in names:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 8), nn.Linear(8, 3))
        changes: dict[str, Any] = {"schedule.fractions": [1.0], "schedule.epochs_per_round": [2.0]}
        if name == "conditioned":
            changes["schedule.epochs_per_round"] = [0.0]
        if bits is not None:
            changes["options.activation_bits"] = bits
        config = Config.preset("recommended", name).override(changes)
        loader = data(distributed.rank, distributed.world, 8)
        result = compress(model, loader, None, config, distributed=distributed)
        untouched = {key: value.tolist() for key, value in result.compressed.untouched.items()}
        found[f"{name} {bits}"] = [result.compressed.values().tolist(), untouched]
    return found


def linear() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 3))


def job_tolerance(distributed: Processes) -> Any:
    """The initial sigma, which is not trained."""
    found: list[float] = []

    def keep(progress: Any, ends: bool) -> None:
        now = progress()  # taken by all processes together
        found[:] = found or [float(now.network["free_sigma"])]

    config = CONFIG.override({"posterior.init": "tolerance", "training.sigma_learning_rate": "off"})
    loader = data(distributed.rank, distributed.world, 8)
    compress(linear(), loader, None, config, keep=keep, distributed=distributed)
    return found


def job_noise(distributed: Processes) -> Any:
    drawn: list[float] = []

    class Watched(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.training and not drawn:
                drawn.append(float(self.weight.detach().double().sum()))
            return super().forward(x)

    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), Watched(16, 3)).train()
    result = compress(
        model, data(distributed.rank, distributed.world, 8), None, CONFIG, distributed=distributed
    )
    return {"noise": drawn, "weights": result.compressed.values().tolist()}


class Printed(View):
    """Prints the title and a word per round."""

    def begin(self, title: str, done: Any = (), *, metric: str = "accuracy") -> None:
        print(title, flush=True)

    def round(self, done: Round) -> None:
        print(done.number, flush=True)


def main() -> None:
    job, *arguments = sys.argv[1:]
    status = 0
    try:
        if job == "sharded":
            mesh = init_device_mesh("cpu", (launched(),))
            print(json.dumps(trained_in_rounds(lambda net: fully_shard(net, mesh=mesh))))
        elif job == "run":
            run(options(Path(arguments[0]), resume=True), CONFIG, Printed())
        else:
            distributed = distributed_for("cpu")
            assert isinstance(distributed, Processes)
            jobs = (job_operations, job_mean, job_halves, job_methods, job_tolerance, job_noise)
            found = {work.__name__.removeprefix("job_"): work(distributed) for work in jobs}
            found["mistake"] = sentence(lambda: run(options(Path(arguments[0])), CONFIG), PwfnError)
            print(json.dumps(found))
    except PwfnError as error:
        print(f"pwfn: {error}", file=sys.stderr)
        status = error.exit_status
    end_process(status)


if __name__ == "__main__":
    main()
