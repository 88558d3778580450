"""The command line: two names for one command, mistakes in one sentence, and the demo's facts."""

from __future__ import annotations

import ast
import inspect
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import pwfn
from pwfn import Config, GaussianNetwork, cli
from pwfn.errors import FileError, PwfnError
from pwfn.evaluate.inspect import inspect as inspect_file
from pwfn.run import demo
from pwfn.zoo import data
from pwfn.zoo.models import digits_resnet

WEIGHTS = 9 * (1 * 16 + 2 * 16 * 16 + 16 * 32 + 32 * 32 + 32 * 64 + 64 * 64) + 64 * 10 + 10
"""Seven 3×3 convolutions without biases, and the linear layer with its bias."""

SCRIPT = [str(Path(sys.executable).with_name("pwfn"))]
MODULE = [sys.executable, "-m", "pwfn"]


def run(command: list[str], *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "COLUMNS": "100", "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [*command, *arguments], capture_output=True, text=True, timeout=300, env=environment
    )


@pytest.mark.parametrize("argument", ["--version", "--help"])
def test_the_script_and_the_module_are_the_same_command(argument: str) -> None:
    script, module = run(SCRIPT, argument), run(MODULE, argument)
    assert script.returncode == module.returncode == 0
    assert script.stdout == module.stdout != ""
    assert script.stderr == module.stderr == ""
    if argument == "--version":
        assert script.stdout == f"pwfn {pwfn.__version__}\n"
    else:
        assert "Usage: pwfn " in script.stdout
        assert "demo" in script.stdout
        assert "config" in script.stdout


def test_a_mistake_in_a_file_is_one_sentence_without_a_traceback(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text("[clustering]\nrule = 'closest'\n")
    for command in (SCRIPT, MODULE):
        done = run(command, "config", str(path))
        assert done.returncode == 2
        assert done.stdout == ""
        assert done.stderr == (
            f'pwfn: {path}: clustering.rule is \'closest\': allowed is one of "mean", "each", "nearest"\n'
        )


@pytest.mark.parametrize("preset", ["paper", "recommended"])
def test_a_preset_is_printed_as_toml_that_reads_back(call: Any, preset: str) -> None:
    status, out, err = call("config", "--preset", preset)
    assert (status, err) == (0, "")
    assert out == Config.preset(preset).to_toml()
    assert Config.from_toml(out) == Config.preset(preset)


def test_no_preset_means_recommended(call: Any) -> None:
    assert call("config")[1] == Config.preset("recommended").to_toml()


def test_settings_as_json(call: Any) -> None:
    status, out, _ = call("config", "--preset", "paper", "--json")
    assert status == 0
    assert out.count("\n") == 1
    assert json.loads(out) == Config.preset("paper").to_dict()
    assert Config().override(json.loads(out)) == Config.preset("paper")


def test_a_file_is_checked_and_printed_whole(call: Any, tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text('preset = "paper"\nseed = 5\n[clustering]\nb = 8\n')
    status, out, err = call("config", str(path))
    assert (status, err) == (0, "")
    expected = Config.preset("paper").override({"seed": 5, "clustering.b": 8})
    assert out == expected.to_toml()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[clustering\n", "not valid TOML"),
        ("[clustering]\nbb = 7\n", "setting 'clustering.bb' is unknown"),
        ("seed = -1\n", "seed is -1: allowed is"),
        ('preset = "papers"\n', "did you mean 'paper'?"),
    ],
)
def test_a_bad_file_ends_in_one_sentence_and_status_2(
    call: Any, tmp_path: Path, text: str, words: str
) -> None:
    path = tmp_path / "run.toml"
    path.write_text(text)
    status, out, err = call("config", str(path))
    assert (status, out) == (2, "")
    assert err.startswith(f"pwfn: {path}: ")
    assert words in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("config", "missing.toml"), "pwfn: missing.toml: cannot read the settings"),
        (("config", "--preset", "papr"), "pwfn: preset 'papr' is unknown: did you mean 'paper'?"),
        (("demo", "--preset", "papr"), "pwfn: preset 'papr' is unknown: did you mean 'paper'?"),
        (("demo", "--seed", str(2**63)), f"pwfn: seed is {2**63}: allowed is a whole number"),
    ],
)
def test_a_mistake_in_the_arguments_ends_in_one_sentence_and_status_2(
    call: Any, arguments: tuple[str, ...], words: str
) -> None:
    status, out, err = call(*arguments)
    assert (status, out) == (2, "")
    assert err.startswith(words)
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    "arguments", [("compres",), ("demo", "--seed", "-1"), ("demo", "--seed", "x"), ("--nonsense",)]
)
def test_arguments_that_do_not_parse_end_in_status_2(call: Any, arguments: tuple[str, ...]) -> None:
    status, out, err = call(*arguments)
    assert (status, out) == (2, "")
    assert "Traceback" not in err
    assert "Usage: pwfn" in err


def test_other_errors_are_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(path: str) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(Config, "load", fail)
    monkeypatch.setattr(sys, "argv", ["pwfn", "config", "some.toml"])
    with pytest.raises(ZeroDivisionError):
        cli.main()


def test_commands_are_thin() -> None:
    """Under ten lines each, signature and docstring aside."""
    tree = ast.parse(inspect.getsource(cli))
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    names = {function.name for function in functions}
    assert {"top", "demo", "config", "inspect", "export", "main"} <= names
    for function in functions:
        body = function.body[1:] if ast.get_docstring(function) else function.body
        lines = (body[-1].end_lineno or 0) - body[0].lineno + 1 if body else 0
        assert lines < 10, function.name


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ((), ["demo", "config", "inspect", "export", "--debug", "--version"]),
        (("demo",), ["--preset", "--seed", "--out", "--json", "model.pwfn"]),
        (("config",), ["--preset", "--json", "TOML"]),
        (("inspect",), ["--zstd", "--no-zstd", "--json", "A .pwfn file"]),
        (
            ("export",),
            ["--to", "onnx|safetensors|torch", "--out", "--dtype", "--model", "--input-shape", "--json"],
        ),
    ],
    ids=lambda value: "-".join(value) or "top" if isinstance(value, tuple) else "",
)
def test_help_names_every_option(call: Any, command: tuple[str, ...], words: list[str]) -> None:
    status, out, err = call(*command, "--help")
    assert (status, err) == (0, "")
    assert [word for word in words if word not in out] == []
    assert "Usage: " + " ".join(("pwfn", *command)) in out


# Files


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The demo's network, untrained and fixed at once: with and without its model's name; and no .pwfn."""
    folder = tmp_path_factory.mktemp("saved")
    torch.manual_seed(0)
    net = GaussianNetwork(digits_resnet())
    net.fix(1.0)
    paths = {name: folder / f"{name}.pwfn" for name in ("named", "unnamed", "text")}
    net.finish().save(paths["named"], record={"model": "digits_resnet"})
    net.finish().save(paths["unnamed"])
    paths["text"].write_text("not a network\n" * 100)
    return paths


def test_inspect(saved: dict[str, Path]) -> None:
    path = saved["named"]
    facts = inspect_file(path)
    plain, as_json = run(MODULE, "inspect", str(path)), run(MODULE, "inspect", "--json", str(path))
    assert (plain.returncode, plain.stderr) == (as_json.returncode, as_json.stderr) == (0, "")
    assert plain.stdout.startswith(f"{path}: {path.stat().st_size:,} bytes for 74,522 weights of ")
    assert "model: digits_resnet" in plain.stdout
    assert as_json.stdout.count("\n") == 1
    assert json.loads(as_json.stdout) == json.loads(json.dumps(facts.to_dict()))


def test_inspect_without_zstd(call: Any, saved: dict[str, Path]) -> None:
    status, out, _ = call("inspect", str(saved["named"]), "--no-zstd", "--json")
    assert status == 0
    assert json.loads(out)["zstd19_bytes"] is None
    assert "zstd" not in call("inspect", str(saved["named"]), "--no-zstd")[1]


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_export_to_torch(call: Any, saved: dict[str, Path], dtype: str, tmp_path: Path) -> None:
    target = tmp_path / "net.pt"
    arguments = ("export", str(saved["named"]), "--to", "torch", "--out", str(target), "--dtype", dtype)
    status, out, err = call(*arguments)
    assert (status, err) == (0, "")
    # Weights of the paper's candidates are exact in either; BatchNorm has only ones and zeros here.
    told = f"in {dtype} the compressed weights are exact, the other tensors exact"
    assert out == f"{target}: {target.stat().st_size:,} bytes; {told}\n"
    state = torch.load(target, weights_only=True)
    wanted = pwfn.load(saved["named"]).dense_state_dict()
    assert state.keys() == wanted.keys()
    assert all(torch.equal(state[name].to(tensor.dtype), tensor) for name, tensor in wanted.items())
    facts = json.loads(call(*arguments, "--json")[1])
    assert (facts["path"], facts["dtype"], facts["weights_exact"]) == (str(target), dtype, True)


def test_export_to_onnx_from_a_shell(saved: dict[str, Path], tmp_path: Path) -> None:
    target = tmp_path / "net.onnx"
    done = run(MODULE, "export", str(saved["named"]), "--to", "onnx", "--out", str(target), "--json")
    assert (done.returncode, done.stderr) == (0, "")
    facts = json.loads(done.stdout)
    assert facts["path"] == str(target)
    assert facts["file_bytes"] == target.stat().st_size < 0.3 * 4 * WEIGHTS
    assert facts["palettes"] == 7  # the first convolution has 144 weights, too few to gain
    assert facts["largest_error"] <= 1e-5 * max(1.0, facts["largest_output"])


def test_export_to_onnx_by_name_and_shape(call: Any, saved: dict[str, Path], tmp_path: Path) -> None:
    target = tmp_path / "net.onnx"
    named = ("--model", "digits_resnet", "--input-shape", "1,12,12")
    status, out, err = call("export", str(saved["unnamed"]), "--to", "onnx", "--out", str(target), *named)
    assert (status, err) == (0, "")
    assert out.startswith(f"{target}: {target.stat().st_size:,} bytes, 7 tensors as palette and indices; ")
    assert out.count("\n") == 1


MISTAKES: list[tuple[tuple[str, ...], str]] = [
    (("inspect", "{missing}"), "{missing}: No such file or directory"),
    (("inspect", "{text}"), "{text}: this is not a .pwfn file"),
    (("inspect", "{folder}"), "{folder}: Is a directory"),
    (("export", "{missing}", "--to", "torch"), "{missing}: No such file or directory"),
    (("export", "{text}", "--to", "onnx"), "{text}: this is not a .pwfn file"),
    (("export", "{named}", "--to", "torch", "--dtype", "int4"), "dtype is 'int4': allowed is one of fp32,"),
    (("export", "{named}", "--to", "onnx", "--model", "resnt"), "model 'resnt' is not known to pwfn or timm"),
    (("export", "{named}", "--to", "onnx", "--model", "cifar_resnet20"), "the model does not match: conv1."),
    (("export", "{named}", "--to", "onnx", "--model", "python:x.py:f"), "model 'python:x.py:f': there is no"),
    (("export", "{named}", "--to", "onnx", "--input-shape", "1x8x8"), "input shape '1x8x8' is not a list"),
    (
        ("export", "{named}", "--to", "onnx", "--input-shape", "2,8,8"),
        "SmallResNet cannot run on an input of",
    ),
    (("export", "{named}", "--to", "onnx", "--dtype", "bf16"), "dtype 'bf16' is for safetensors and torch"),
    (("export", "{named}", "--to", "torch", "--model", "resnet18"), "--model and --input-shape are for onnx"),
    (("export", "{unnamed}", "--to", "onnx"), "the file does not say which model it is of: name it with"),
    (
        ("export", "{named}", "--to", "torch", "--out", "{missing}/net.pt"),
        "{missing}/net.pt: cannot be writt",
    ),
    (("export", "{named}", "--to", "torch", "--out", "{folder}"), "{folder}: is a folder: name a file in it"),
    (("config", "run.toml", "--preset", "paper"), "give a file or --preset and --method, not both"),
    (("demo", "--out", "{text}"), "{text}: cannot be made a folder: File exists"),
    (("demo", "--out", "{text}/demo"), "{text}/demo: cannot be made a folder: Not a directory"),
]


@pytest.mark.parametrize(("arguments", "words"), MISTAKES, ids=lambda value: " ".join(value)[:60] or "none")
def test_a_mistake_with_a_file_ends_in_one_sentence_and_status_2(
    call: Any, saved: dict[str, Path], tmp_path: Path, arguments: tuple[str, ...], words: str
) -> None:
    names = {name: str(path) for name, path in saved.items()}
    names |= {"missing": str(tmp_path / "missing"), "folder": str(tmp_path)}
    before = {path: path.read_bytes() for path in saved.values()}
    status, out, err = call(*(argument.format(**names) for argument in arguments))
    assert (status, out) == (2, "")
    assert err.startswith("pwfn: " + words.format(**names))
    assert err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []
    assert {path: path.read_bytes() for path in saved["named"].parent.iterdir()} == before


def test_debug_shows_where_an_error_was_raised(call: Any, saved: dict[str, Path]) -> None:
    arguments = ("inspect", str(saved["text"]))
    sentence = f"{saved['text']}: this is not a .pwfn file"
    assert call(*arguments) == (2, "", f"pwfn: {sentence}\n")
    status, out, err = call("--debug", *arguments)
    assert (status, out) == (2, "")
    assert err.startswith("Traceback (most recent call last):\n")
    assert "fileformat.py" in err
    assert err.endswith(f"pwfn.errors.FileError: {sentence}\n")
    assert call(*arguments) == (2, "", f"pwfn: {sentence}\n")  # one call does not change the next
    assert call("--debug", "config")[0] == 0


def test_names_in_an_error_cannot_steer_the_terminal(call: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(path: str) -> None:
        raise FileError("tensor \x1b[2J\r\nname is damaged")

    monkeypatch.setattr(Config, "load", fail)
    assert call("config", "run.toml")[2] == "pwfn: tensor �[2J��name is damaged\n"


# The demo


def test_the_demo_fixes_all_weights_in_ten_rounds_and_keeps_its_accuracy(tmp_path: Path) -> None:
    done = run(MODULE, "demo", "--json", "--out", str(tmp_path / "made" / "here"))
    assert done.returncode == 0
    assert done.stderr == ""
    assert done.stdout.count("\n") == 1
    facts = json.loads(done.stdout)
    assert facts["weights"] == WEIGHTS == 74_522
    assert facts["before"]["examples"] == facts["after"]["examples"] == 450
    assert facts["before"]["metric"] >= 0.95
    assert facts["after"]["metric"] >= 0.95
    rounds = facts["rounds"]
    assert [one["fraction"] for one in rounds] == list(pwfn.PAPER_FRACTIONS)
    assert [one["fixed"] for one in rounds] == [
        math.ceil(round(WEIGHTS * fraction, 6)) for fraction in pwfn.PAPER_FRACTIONS
    ]
    assert rounds[-1]["fixed"] == facts["weights"]
    assert all(one["weights"] == one["fixed"] for one in rounds)
    assert all(math.isfinite(one["loss"]) and 0 <= one["metric"] <= 1 for one in rounds)
    assert {name: rounds[-1][name] for name in ("unique", "entropy_bits", "power_of_two_share")} == {
        name: facts[name] for name in ("unique", "entropy_bits", "power_of_two_share")
    }
    assert 2 <= facts["unique"] <= 128
    assert 0 < facts["entropy_bits"] <= math.log2(facts["unique"])
    assert sum(one["seconds"] for one in rounds) < 120
    path = tmp_path / "made" / "here" / "model.pwfn"
    assert facts["file"] == json.loads(json.dumps(inspect_file(path, zstd=False).to_dict()))
    assert facts["file"]["file_bytes"] == path.stat().st_size
    assert facts["file"]["unique"] == facts["unique"]
    assert facts["file"]["model"] == "digits_resnet"
    assert facts["file"]["file_bytes"] < facts["file"]["int8_bytes"] / 2


@pytest.fixture
def small_demo(monkeypatch: pytest.MonkeyPatch) -> None:
    """The demo on a tenth of its data with a single epoch: what it prints, not what it reaches."""
    train, test = data.digits()
    small = data.Split(
        data.TensorLoader(train.images[:128], train.targets[:128], 32, shuffle=True),
        data.TensorLoader(test.images[:50], test.targets[:50], 50),
    )
    monkeypatch.setattr(data, "digits", lambda: small)
    monkeypatch.setattr(demo, "_PRETRAINING_EPOCHS", 1)


@pytest.mark.usefixtures("small_demo")
def test_the_demo_prints_a_line_a_round_and_what_became_of_the_weights() -> None:
    lines: list[str] = []
    config = demo.settings("recommended", 0).override({"schedule.epochs_per_round": 0.25})
    result = demo.run(config, say=lines.append)
    assert result.before is not None
    assert result.after is not None
    assert result.before.metric is not None
    assert result.after.metric is not None
    assert len(lines) == 2 + 10 + 2
    assert "128 images of digits" in lines[0]
    assert lines[1].split()[:2] == ["round", "done"]
    assert {len(line) for line in lines[1:12]} == {len(lines[1])}  # columns stand under one another
    for line, done in zip(lines[2:12], result.rounds, strict=True):
        number, fixed, loss, accuracy, bits, unique, powers, sigma = line.split()
        assert float(sigma) > 0
        assert int(number) == done.number
        assert float(fixed.rstrip("%")) == pytest.approx(100 * done.fix.fraction)
        assert done.loss is not None
        assert done.scores is not None
        assert done.scores.metric is not None
        assert loss == f"{done.loss:.4f}"
        assert accuracy == f"{done.scores.metric:.2%}"
        assert bits == f"{done.fixed.entropy_bits:.3f}"
        assert int(unique) == done.fixed.unique
        assert powers == f"{done.fixed.power_of_two_share:.1%}"
    assert f"{result.before.metric:.2%} before, {result.after.metric:.2%} after" in lines[12]
    whole = result.summary.whole
    assert f"{WEIGHTS:,} weights now take {whole.unique} values, {whole.entropy_bits:.3f} bits" in lines[13]
    facts = demo.facts(result)
    assert json.loads(json.dumps(facts)) == facts
    assert facts["before"]["metric"] == result.before.metric


@pytest.mark.usefixtures("small_demo")
def test_the_demo_ends_with_the_files_true_size_beside_its_rivals(call: Any, tmp_path: Path) -> None:
    status, out, err = call("demo", "--out", str(tmp_path))
    assert (status, err) == (0, "")
    path = tmp_path / "model.pwfn"
    assert list(tmp_path.iterdir()) == [path]
    model = pwfn.load(path).apply_to(digits_resnet()).eval()
    images, targets = next(iter(data.digits().test))
    with torch.no_grad():
        right = int((model(images).argmax(1) == targets).sum())
    # Each BatchNorm has four numbers a channel and a counter; tensors are 7 convolutions, weight and bias.
    norms = 16 + 2 * (16 + 32 + 64)
    fp32 = 4 * WEIGHTS + 4 * 4 * norms + 7 * 8
    fp16 = 2 * WEIGHTS + 2 * 4 * norms + 7 * 8
    int8 = WEIGHTS + 9 * 4 + 4 * 4 * norms + 7 * 8
    assert out.splitlines()[-2:] == [
        f"{path}: {path.stat().st_size:,} bytes; loaded from it, {right} of 50 images right",
        f"the same network in fp32: {fp32:,} bytes; in fp16: {fp16:,}; in int8: {int8:,}",
    ]


@pytest.mark.usefixtures("small_demo")
def test_the_demos_network_depends_on_the_seed_alone() -> None:
    train, _ = data.digits()
    states = []
    for seed, disturbance in ((0, 1), (0, 2), (1, 1)):
        torch.manual_seed(disturbance)
        before = torch.get_rng_state()
        model = demo.pretrained(train, seed)
        assert torch.equal(torch.get_rng_state(), before)
        assert not model.training
        states.append(torch.cat([p.detach().reshape(-1) for p in model.parameters()]))
    assert torch.equal(states[0], states[1])
    assert not torch.equal(states[0], states[2])


def test_the_demos_settings_are_a_preset_with_a_faster_sigma() -> None:
    for preset in ("paper", "recommended"):
        expected = Config.preset(preset).override({"seed": 3, "training.sigma_learning_rate": 0.01})
        assert demo.settings(preset, 3) == expected
    with pytest.raises(PwfnError):
        demo.settings("nothing", 0)


def test_compress_and_evaluate_tell_the_same_of_one_file(call: Any, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    settings = ["schedule.epochs_per_round=0.1", "finish.polish_epochs=0.1", "clustering.rule=nearest"]
    status, out, err = call(
        *("compress", "--model", "digits_resnet", "--data", "digits", "--weights", "random"),
        *("--out", str(folder), "--seed", "3", "--batch-size", "128", "--device", "cpu", "--json"),
        *(word for setting in settings for word in ("--set", setting)),
    )
    assert (status, err) == (0, "")
    facts = json.loads(out)
    record = json.loads((folder / "record.json").read_text())
    assert facts == {name: record[name] for name in facts}
    chosen = Config.load(folder / "config.toml")
    assert (chosen.seed, chosen.clustering.rule, chosen.schedule.epochs_per_round) == (3, "nearest", 0.1)
    status, out, err = call(
        "evaluate", str(folder / "model.pwfn"), "--data", "digits", "--device", "cpu", "--json"
    )
    assert (status, err) == (0, "")
    assert json.loads(out)["after"] == facts["after"]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--preset", "papr"], "preset 'papr' is unknown: did you mean 'paper'?"),
        (["--set", "clustering.rul=each"], "setting 'clustering.rul' is unknown: did you mean 'rule'?"),
        (["--set", "clustering.rule"], "'clustering.rule' is not of the form section.name=value"),
        (["--set", "clustering.b=x"], "clustering.b is 'x': allowed is a whole number"),
        (["--preset", "paper", "--config", "x.toml"], "give --config or --preset, not both"),
        (["--config", "missing.toml"], "missing.toml: cannot read the settings"),
    ],
)
def test_mistakes_in_the_settings_of_a_run(
    call: Any, arguments: list[str], sentence: str, tmp_path: Path
) -> None:
    status, out, err = call(
        *("compress", "--model", "digits_resnet", "--data", "digits", "--weights", "random"),
        *("--out", str(tmp_path / "run"), *arguments),
    )
    assert (status, out) == (2, "")
    assert err.startswith(f"pwfn: {sentence}")
    assert err.count("\n") == 1
    assert not (tmp_path / "run").exists()


def test_a_file_may_not_choose_the_code_that_scores_it(call: Any, tmp_path: Path) -> None:
    net = GaussianNetwork(digits_resnet())
    net.fix(1.0)
    path = tmp_path / "model.pwfn"
    net.finish().save(path, record={"model": "python:trap.py:make"})
    status, _, err = call("evaluate", str(path), "--data", "digits")
    assert status == 2
    assert "the file wants to run trap.py:make" in err
