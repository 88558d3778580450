"""The command line: help, settings, files, the demo, and mistakes in one sentence."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from conftest import Call

import pwfn
from pwfn import Config, GaussianNetwork, cli
from pwfn.errors import FileError
from pwfn.evaluate.inspect import inspect as inspect_file
from pwfn.run import demo
from pwfn.zoo.models import digits_resnet

WEIGHTS = 9 * (1 * 16 + 2 * 16 * 16 + 16 * 32 + 32 * 32 + 32 * 64 + 64 * 64) + 64 * 10 + 10
"""Seven 3×3 convolutions without biases, and the linear layer with its bias."""

SCRIPT = [str(Path(sys.executable).with_name("pwfn"))]
MODULE = [sys.executable, "-m", "pwfn"]
COMMANDS: dict[str, Any] = typer.main.get_command(cli.app).commands  # type: ignore[attr-defined]
RUN = ("compress", "--model", "digits_resnet", "--data", "digits", "--weights", "random", "--device", "cpu")


def shell(command: list[str], *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "COLUMNS": "100", "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [*command, *arguments], capture_output=True, text=True, timeout=300, env=environment
    )


def sentence(found: tuple[int, str, str]) -> str:
    """What a command that failed says: one line, without the name of the program before it."""
    status, out, err = found
    assert (status, out, err.count("\n")) == (2, "", 1), found
    assert err.startswith("pwfn: ")
    return err.removeprefix("pwfn: ").rstrip("\n")


# Help


def test_the_script_and_the_module_are_the_same_command(call: Call) -> None:
    expected = (0, f"pwfn {pwfn.__version__}\n", "")
    assert call("--version") == expected
    for command in (SCRIPT, MODULE):
        done = shell(command, "--version")
        assert (done.returncode, done.stdout, done.stderr) == expected


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help_for_all_options_and_an_example_that_parses(
    name: str, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    status, out, err = call(name, "--help")
    assert (status, err) == (0, "")
    for parameter in COMMANDS[name].params:
        assert parameter.help, parameter.name
        assert parameter.param_type_name == "argument" or parameter.opts[0] in out
    example = re.search(rf"Example: pwfn ({name} .*?)(, then .*|> .*)?$", out, re.MULTILINE)
    assert example is not None
    COMMANDS[name].make_context(name, shlex.split(example[1].strip())[1:])  # an error if it does not parse


# Settings


@pytest.mark.parametrize("arguments", [(), ("--preset", "paper"), ("--method", "lsq+")])
def test_settings_are_printed_on_two_screens_and_read_back(arguments: tuple[str, ...], call: Call) -> None:
    names = dict(zip(arguments[::2], arguments[1::2], strict=True))
    chosen = Config.preset(names.get("--preset", "recommended"), names.get("--method", "pwfn"))
    status, out, err = call("config", *arguments)
    assert (status, err) == (0, "")
    assert Config.from_toml(out) == chosen
    assert len(out.splitlines()) <= 100
    assert json.loads(call("config", *arguments, "--json")[1]) == chosen.to_dict()


def test_a_file_is_checked_and_printed_in_full(call: Call, tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text('preset = "paper"\nseed = 5\n[fixing]\ngrid_exponent = 8\n')
    status, out, err = call("config", str(path))
    assert (status, err) == (0, "")
    assert out == Config.preset("paper").override({"seed": 5, "fixing.grid_exponent": 8}).to_toml()
    for text, named in (
        ("[fixing\n", "TOML"),
        ("[fixing]\nrul = 7\n", "did you mean 'rule'"),
        ("seed = -1\n", "seed is -1"),
        ('preset = "papers"\n', "did you mean 'paper'"),
        ('method = "lsqq"\n', "did you mean 'lsq'"),
    ):
        path.write_text(text)
        said = sentence(call("config", str(path)))
        assert said.startswith(f"{path}: ")
        assert named in said


OWN_METHOD = """
from pwfn import GaussianNetwork
class Coarse(GaussianNetwork):
    defaults = {"fixing.grid_exponent": 2, "schedule.fractions": [0.5, 1.0]}
"""


def test_a_method_of_ones_own_works_by_name_and_in_a_file(call: Call, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN_METHOD)
    method = f"python:{tmp_path / 'own.py'}:Coarse"
    settings = tmp_path / "own.toml"
    settings.write_text(f'method = "{method}"\n')
    quick = ("--set", "training.steps_per_epoch=1", "--json")
    found = []
    for number, given in enumerate((("--method", method), ("--config", str(settings)))):
        status, out, err = call(*RUN, *given, *quick, "--out", str(tmp_path / str(number)))
        assert (status, err) == (0, "")
        found.append(json.loads(out))
        values = pwfn.load(tmp_path / str(number) / "model.pwfn").codebook
        assert values.abs()[values != 0].min() >= 2**-2
    assert found[0]["unique"] == found[1]["unique"]
    assert [done["fraction"] for done in found[0]["rounds"]] == [0.5, 1.0]
    wrong = (f"python:{tmp_path / 'own.py'}:Fine", f"python:{tmp_path / 'none.py'}:Coarse")
    for name in wrong:
        assert name.split(":")[1] in sentence(call(*RUN, "--method", name, "--out", str(tmp_path / "no")))
    assert not (tmp_path / "no").exists()


# Runs


def test_compress_and_evaluate_tell_the_same_of_one_file(call: Call, tmp_path: Path) -> None:
    settings = ("--set", "schedule.fractions=[0.5, 1.0]", "--set", "training.steps_per_epoch=1")
    status, out, err = call(*RUN, "--out", str(tmp_path), "--seed", "3", *settings, "--json")
    assert (status, err) == (0, "")
    facts, record = json.loads(out), json.loads((tmp_path / "record.json").read_text())
    assert facts == {name: record[name] for name in facts}
    chosen = Config.load(tmp_path / "config.toml")
    assert (chosen.seed, chosen.schedule.fractions) == (3, (0.5, 1.0))
    file = str(tmp_path / "model.pwfn")
    status, out, err = call("evaluate", file, "--data", "digits", "--device", "cpu", "--json")
    assert (status, err) == (0, "")
    assert json.loads(out)["after"] == facts["after"]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("--preset", "papr"), "did you mean 'paper'"),
        (("--set", "fixing.rul=each"), "did you mean 'rule'"),
        (("--set", "fixing.rule"), "section.name=value"),
        (("--preset", "paper", "--config", "x.toml"), "not both"),
        (("--method", "lsq", "--config", "x.toml"), "not both"),
        (("--config", "missing.toml"), "missing.toml"),
        (("--method", "lsqq"), "did you mean 'lsq'"),
        (("--method", "lsq", "--set", "options.bit=3"), "did you mean 'bits'"),
    ],
)
def test_mistakes_in_the_settings_of_a_run(
    call: Call, arguments: tuple[str, ...], named: str, tmp_path: Path
) -> None:
    assert named in sentence(call(*RUN, "--out", str(tmp_path / "run"), *arguments))
    assert not (tmp_path / "run").exists()


# Files


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The demo's network, untrained and fixed at once: with and without its model's name; and no .pwfn."""
    folder = tmp_path_factory.mktemp("saved")
    torch.manual_seed(0)
    net = GaussianNetwork(digits_resnet())
    net.fix(1.0)
    paths = {name: folder / f"{name}.pwfn" for name in ("named", "unnamed", "text", "trap")}
    net.finish().save(paths["named"], record={"model": "digits_resnet"})
    net.finish().save(paths["trap"], record={"model": "python:trap.py:make"})
    net.finish().save(paths["unnamed"])
    paths["text"].write_text("not a network\n" * 100)
    return paths


def test_inspect(call: Call, saved: dict[str, Path]) -> None:
    path = saved["named"]
    status, out, err = call("inspect", str(path))
    assert (status, err) == (0, "")
    assert out.startswith(f"{path}: {path.stat().st_size:,} bytes")
    assert json.loads(call("inspect", str(path), "--json")[1]) == json.loads(
        json.dumps(inspect_file(path).to_dict())
    )
    assert json.loads(call("inspect", str(path), "--no-zstd", "--json")[1])["zstd19_bytes"] is None


def test_verify_pins_the_content_and_finds_any_changed_byte(
    call: Call, saved: dict[str, Path], tmp_path: Path
) -> None:
    path = saved["named"]
    wanted = pwfn.load(path).content_sha256()
    status, out, err = call("verify", str(path))
    assert (status, err) == (0, "")
    assert wanted in out
    # The record is not part of the content.
    assert call("verify", str(saved["unnamed"]), "--sha256", wanted.upper())[0] == 0
    status, out, _ = call("verify", str(path), "--sha256", "0" * 64, "--json")
    assert (status, json.loads(out)["matches"]) == (1, False)
    data, damaged = path.read_bytes(), tmp_path / "damaged.pwfn"
    for place in range(0, len(data), max(len(data) // 40, 1)):
        damaged.write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
        status, out, err = call("verify", str(damaged))
        assert (status, out) == (2, ""), place
        assert err.startswith(f"pwfn: {damaged}: ")


@pytest.mark.parametrize(
    "too_much", [lambda _: torch.empty(2**50), lambda _: bytes(2**62)], ids=["torch", "python"]
)
def test_too_little_memory_is_one_sentence(
    too_much: Any, call: Call, saved: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In any command: a small file may hold many weights."""
    monkeypatch.setattr(pwfn.Compressed, "content_sha256", too_much)
    status, out, err = call("verify", str(saved["named"]))
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert "memory" in err


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_export_to_torch(call: Call, saved: dict[str, Path], dtype: str, tmp_path: Path) -> None:
    """Powers of two are exact in either type."""
    target = tmp_path / "net.pt"
    arguments = ("export", str(saved["named"]), "--to", "torch", "--out", str(target), "--dtype", dtype)
    status, out, err = call(*arguments)
    assert (status, err) == (0, "")
    assert out.startswith(f"{target}: {target.stat().st_size:,} bytes")
    state = torch.load(target, weights_only=True)
    wanted = pwfn.load(saved["named"]).dense_state_dict()
    assert state.keys() == wanted.keys()
    assert all(torch.equal(state[name].to(tensor.dtype), tensor) for name, tensor in wanted.items())
    assert json.loads(call(*arguments, "--json")[1])["weights_exact"] is True


@pytest.mark.parametrize(
    ("file", "named"), [("named", ()), ("unnamed", ("--model", "digits_resnet", "--input-shape", "1,12,12"))]
)
def test_export_to_onnx(
    call: Call, saved: dict[str, Path], file: str, named: tuple[str, ...], tmp_path: Path
) -> None:
    target = tmp_path / "net.onnx"
    status, out, err = call(
        "export", str(saved[file]), "--to", "onnx", "--out", str(target), *named, "--json"
    )
    assert (status, err) == (0, "")
    facts = json.loads(out)
    assert facts["file_bytes"] == target.stat().st_size < 0.3 * 4 * WEIGHTS
    assert facts["palettes"] == 7  # the first convolution has 144 weights, too few to gain
    assert facts["largest_error"] <= 1e-5 * max(1.0, facts["largest_output"])


def test_export_to_pt2(call: Call, saved: dict[str, Path], tmp_path: Path) -> None:
    target = tmp_path / "net.pt2"
    status, out, err = call("export", str(saved["named"]), "--to", "pt2", "--out", str(target))
    assert (status, err) == (0, "")
    assert out.startswith(f"{target}: {target.stat().st_size:,} bytes, weights in fp32; outputs differ")
    batch = torch.randn(3, 1, 8, 8)
    wanted = pwfn.load(saved["named"]).apply_to(digits_resnet()).eval()(batch)
    torch.testing.assert_close(torch.export.load(target).module()(batch), wanted)


# Mistakes

MISTAKES: list[tuple[tuple[str, ...], str]] = [
    (("inspect", "{missing}"), "{missing}"),
    (("inspect", "{text}"), "{text}"),
    (("inspect", "{folder}"), "{folder}"),
    (("export", "{missing}", "--to", "torch"), "{missing}"),
    (("export", "{text}", "--to", "onnx"), "{text}"),
    (("export", "{named}", "--to", "torch", "--dtype", "int4"), "'int4'"),
    (("export", "{named}", "--to", "onnx", "--model", "resnt"), "'resnt'"),
    (("export", "{named}", "--to", "onnx", "--model", "cifar_resnet20"), "conv1"),
    (("export", "{named}", "--to", "onnx", "--model", "python:x.py:f"), "x.py"),
    (("export", "{named}", "--to", "onnx", "--input-shape", "1x8x8"), "'1x8x8'"),
    (("export", "{named}", "--to", "onnx", "--input-shape", "2,8,8"), "SmallResNet"),
    (("export", "{named}", "--to", "onnx", "--dtype", "bf16"), "'bf16'"),
    (("export", "{named}", "--to", "pt2", "--dtype", "bf16"), "'bf16'"),
    (("export", "{named}", "--to", "torch", "--model", "resnet18"), "--model"),
    (("export", "{unnamed}", "--to", "onnx"), "--model"),
    (("export", "{named}", "--to", "torch", "--out", "{missing}/net.pt"), "{missing}/net.pt"),
    (("export", "{named}", "--to", "torch", "--out", "{folder}"), "{folder}"),
    (("evaluate", "{trap}", "--data", "digits"), "trap.py:make"),  # a file cannot choose code to run
    (("config", "missing.toml"), "missing.toml"),
    (("config", "run.toml", "--preset", "paper"), "not both"),
    (("demo", "--preset", "papr"), "did you mean 'paper'"),
    (("demo", "--seed", str(2**63)), "seed"),
    (("demo", "--out", "{text}"), "{text}"),
    (("demo", "--out", "{text}/demo"), "{text}/demo"),
    (("demo", "--out", ""), "an argument is empty"),  # it would be the current folder
]


@pytest.mark.parametrize(("arguments", "named"), MISTAKES, ids=lambda value: " ".join(value)[:60] or "none")
def test_a_mistake_ends_in_one_sentence_that_names_it(
    call: Call, saved: dict[str, Path], tmp_path: Path, arguments: tuple[str, ...], named: str
) -> None:
    names = {name: str(path) for name, path in saved.items()}
    names |= {"missing": str(tmp_path / "missing"), "folder": str(tmp_path)}
    before = {path: path.read_bytes() for path in saved.values()}
    assert named.format(**names) in sentence(call(*(argument.format(**names) for argument in arguments)))
    assert list(tmp_path.iterdir()) == []
    assert {path: path.read_bytes() for path in saved["named"].parent.iterdir()} == before


@pytest.mark.parametrize(
    "arguments", [("compres",), ("demo", "--seed", "-1"), ("demo", "--seed", "x"), ("--nonsense",)]
)
def test_arguments_that_do_not_parse_end_in_status_2(call: Call, arguments: tuple[str, ...]) -> None:
    status, out, err = call(*arguments)
    assert (status, out) == (2, "")
    assert "Traceback" not in err
    assert "Usage: pwfn" in err


def test_debug_shows_where_an_error_was_raised(call: Call, saved: dict[str, Path]) -> None:
    arguments = ("inspect", str(saved["text"]))
    said = sentence(call(*arguments))
    status, out, err = call("--debug", *arguments)
    assert (status, out) == (2, "")
    assert err.startswith("Traceback (most recent call last):\n")
    assert err.endswith(f"pwfn.errors.FileError: {said}\n")
    assert sentence(call(*arguments)) == said  # one call does not change the next


def test_errors_of_others_are_not_hidden_and_names_cannot_control_the_terminal(
    call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(error: Exception) -> Any:
        raise error

    monkeypatch.setattr(Config, "load", lambda _: fail(FileError("tensor \x1b[2J\r\nname is damaged")))
    assert call("config", "run.toml")[2] == "pwfn: tensor �[2J��name is damaged\n"
    monkeypatch.setattr(Config, "load", lambda _: fail(ZeroDivisionError()))
    monkeypatch.setattr(sys, "argv", ["pwfn", "config", "run.toml"])
    with pytest.raises(ZeroDivisionError):
        cli.main()


# The demo


@pytest.fixture(scope="module")
def demo_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("demo") / "made" / "here"
    done = shell(MODULE, "demo", "--out", str(folder))
    assert (done.returncode, done.stderr) == (0, "")
    (folder.parent / "printed").write_text(done.stdout)
    return folder


def test_the_demo_keeps_its_accuracy_in_a_tenth_of_the_bytes(demo_folder: Path) -> None:
    facts = json.loads((demo_folder / "record.json").read_text())
    assert facts["weights"] == WEIGHTS == 74_522
    assert facts["before"]["examples"] == facts["after"]["examples"] == 450
    assert facts["before"]["metric"] >= 0.95
    assert facts["after"]["metric"] >= 0.95
    assert [done["fraction"] for done in facts["rounds"]] == list(pwfn.PAPER_FRACTIONS)
    assert facts["file_bytes"] < facts["fp32_bytes"] / 10
    assert facts["warnings"] == []
    printed = (demo_folder.parent / "printed").read_text()
    assert f"{facts['file_bytes']:,} bytes" in printed
    heads = next(line for line in printed.splitlines() if line.split()[:1] == ["round"])
    assert "accuracy" not in heads  # BatchNorm does not fit until the end


def test_the_demo_leaves_a_run_like_any_other(demo_folder: Path, call: Call, tmp_path: Path) -> None:
    facts = json.loads((demo_folder / "record.json").read_text())
    file = str(demo_folder / "model.pwfn")
    assert json.loads(call("inspect", file, "--no-zstd", "--json")[1])["file_bytes"] == facts["file_bytes"]
    compare = ("--weights", str(demo_folder / "weights.safetensors"), "--samples", "2")
    status, out, _ = call("evaluate", file, "--data", "digits", "--device", "cpu", *compare, "--json")
    assert status == 0
    assert json.loads(out)["after"] == facts["after"]
    assert call("export", file, "--to", "torch", "--out", str(tmp_path / "net.pt"))[0] == 0
    resumed = (
        *("compress", "--model", "digits_resnet", "--data", "digits", "--batch-size", "32", "--resume"),
        *("--weights", str(demo_folder / "weights.safetensors"), "--out", str(demo_folder)),
    )
    before = Path(file).read_bytes()
    assert call(*resumed, "--device", "cpu")[0] == 0
    assert Path(file).read_bytes() == before


def test_there_is_a_report_of_the_demo(demo_folder: Path, call: Call, tmp_path: Path) -> None:
    assert call("report", str(demo_folder), "--out", str(tmp_path / "report.html"))[0] == 0
    assert "digits_resnet" in (tmp_path / "report.html").read_text()


def test_a_demo_without_a_folder_leaves_nothing_and_depends_on_the_seed_only(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "EPOCHS", 1)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    threads, found = torch.get_num_threads(), []
    for seed, disturbance in ((0, 1), (0, 2), (1, 1)):
        torch.manual_seed(disturbance)
        before = torch.get_rng_state()
        status, out, err = call("demo", "--preset", "quick", "--seed", str(seed), "--json")
        assert (status, err) == (0, "")
        found.append(json.loads(out)["after"])
        assert torch.equal(torch.get_rng_state(), before)
    assert found[0] == found[1] != found[2]
    assert list(tmp_path.iterdir()) == []
    assert torch.get_num_threads() == threads
