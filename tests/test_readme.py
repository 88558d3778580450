"""The README: short, up to date, its links lead somewhere, and what it tells people to run works.

Here commands run as they are written, on a few random images. ``make check-readme``, which is ``python
tests/test_readme.py``, runs them for real in a fresh clone; that downloads CIFAR-10.
"""

from __future__ import annotations

import os
import pkgutil
import re
import shlex
import subprocess
import sys
import time
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional as F

import pwfn
from pwfn.config import Section
from pwfn.zoo import fetch, models

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = (
    *("README.md", "CHANGELOG.md", "CONTRIBUTING.md"),
    *("docs/method.md", "docs/running.md", "docs/faq.md", "docs/performance.md"),
)
MANNERED = re.compile(
    r"\b(a sigma a|a bit a|a line a|goes? on with|whose own|need not|in place of|as it were|by itself|"
    r"so that nothing could|borne|tells? of|so many)\b",
    re.IGNORECASE,
)


def blocks(language: str, text: str = README) -> list[str]:
    """The fenced blocks of one language.

    >>> blocks("sh", "a\\n```sh\\nmake demo\\n```\\n")
    ['make demo\\n']
    """
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def commands(text: str = README) -> list[str]:
    """The commands of all shell blocks, one line each, without comments."""
    lines = "".join(blocks("sh", text)).replace("\\\n", " ").splitlines()
    return [shlex.join(words) for words in (shlex.split(line, comments=True) for line in lines) if words]


def test_it_is_one_page_with_one_table_that_fits_the_screen() -> None:
    assert len(README.splitlines()) <= 150
    rows = [line for line in README.splitlines() if line.startswith("|")]
    assert 0 < max(row.count("|") - 1 for row in rows) <= 8
    assert len(rows) - 2 <= 10
    assert len(re.findall(r"^!\[", README, re.MULTILINE)) == 2  # the idea, and accuracy against bytes


def test_its_table_is_that_of_the_result_files() -> None:
    import readme_table
    import results

    assert results.with_block(README, "table", readme_table.table()) == README
    assert README.count("\n".join(readme_table.table())) == 1


def test_its_picture_is_small_and_is_drawn_by_the_command(tmp_path: Path) -> None:
    import idea

    idea.draw(tmp_path / "idea.svg")
    drawn, kept = ((folder / "idea.svg").read_text() for folder in (tmp_path, ROOT / "docs"))
    assert len(kept) < 100_000
    words = [re.findall(r"<text[^>]*>([^<]*)", picture) for picture in (drawn, kept)]
    assert words[0] == words[1]  # lines and fonts depend on matplotlib's version


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    path = ROOT / page
    for link in re.findall(r"\]\(([^)\s]+)\)", path.read_text(encoding="utf-8")):
        target, _, anchor = link.partition("#")
        if not target.startswith(("http:", "https:")):
            file = path.parent / target if target else path
            assert file.exists(), link
            assert not anchor or anchor in anchors(file), link


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    heads = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


@pytest.mark.parametrize("page", PAGES)
def test_sentences_are_plain(page: str) -> None:
    lines = (ROOT / page).read_text(encoding="utf-8").splitlines()
    assert [line for line in lines if MANNERED.search(line)] == []


@pytest.mark.parametrize("page", [page for page in PAGES if page != "CHANGELOG.md"])  # it has old names too
def test_names_of_modules_and_settings_exist(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    for name in set(re.findall(r"\bpwfn(?:\.[A-Za-z_]\w*)+", text)):
        pkgutil.resolve_name(name)
    sections = {key: value for key, value in vars(pwfn.Config()).items() if isinstance(value, Section)}
    for section, name in re.findall(rf"(?<![\w.'/])({'|'.join(sections)})\.(\w+)\b(?!\.)", text):
        assert name == "py" or name in vars(sections[section]), f"{section}.{name}"


@pytest.mark.parametrize("page", PAGES)
def test_files_that_are_named_exist(page: str) -> None:
    """Relative to the repository, the package or the tests."""
    text = (ROOT / page).read_text(encoding="utf-8")
    for name in re.findall(r"`(?:python )?([\w./]*\w\.py)\b[^`]*`", text):
        places = (ROOT, ROOT / "src" / "pwfn", ROOT / "tests", ROOT / "src" / "pwfn" / "lab" / "baselines")
        assert any((place / name).exists() for place in places), name


def test_every_command_is_of_a_kind_that_is_run() -> None:
    kinds = {command.split()[0] for command in commands()}
    assert kinds == {"make", "pwfn"}


@pytest.mark.parametrize("command", [c for c in commands() if c.startswith("make ")])
def test_make_knows_its_targets(command: str) -> None:
    done = subprocess.run([*shlex.split(command), "-n"], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def images_that_it_knows() -> dict[str, np.ndarray]:
    """Random images with the labels that the ResNet-20 in the repository gives them."""
    images = np.random.default_rng(0).integers(0, 256, (16, 32, 32, 3), dtype=np.uint8)
    network = models.create("cifar_resnet20").train()  # BatchNorm by the batch, as in training
    network.load_state_dict(load_file(ROOT / "weights" / "resnet20_cifar10.safetensors"))
    inputs = torch.from_numpy(images).permute(0, 3, 1, 2) / 127.5 - 1
    labels = network(inputs).argmax(1).numpy()
    return {"x_train": images, "y_train": labels, "x_test": images, "y_test": labels}


def test_pwfn_commands_run_as_written(call: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In their order, in a folder that looks like the repository, on 16 images instead of CIFAR-10."""

    def fetched(out: Path, source: Path | None = None) -> dict[str, list[int]]:
        out.parent.mkdir(parents=True)
        np.savez(out, **images_that_it_knows())
        return {"x_train": [16, 32, 32, 3], "x_test": [16, 32, 32, 3]}

    monkeypatch.setattr(fetch, "fetch_cifar10", fetched)
    monkeypatch.chdir(tmp_path)
    for name in ("weights", "experiments"):
        (tmp_path / name).symlink_to(ROOT / name)
    for command in commands():
        program, *words = shlex.split(command)
        if program == "pwfn":
            starts_nothing = ["--table-only"] if words[0] == "compare" else []
            status, _, complaint = call(*words, *starts_nothing)
            assert (status, complaint) == (int(bool(starts_nothing)), ""), command
    made = {"run/model.pwfn", "run/record.json", "run/model.onnx", "report.html"}
    assert {name for name in made if (tmp_path / name).exists()} == made


@pytest.mark.parametrize("page", ["README.md", "docs/running.md"])
def test_python_runs_as_written(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With a small network instead of timm's, and two batches of random images."""

    def create_model(name: str, pretrained: bool = False) -> nn.Module:
        layers = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 5)
        return nn.Sequential(*layers)

    monkeypatch.setitem(sys.modules, "timm", types.SimpleNamespace(create_model=create_model))
    monkeypatch.chdir(tmp_path)
    images = [torch.randn(4, 3, 8, 8) for _ in range(2)]
    loader = [(batch, torch.arange(4)) for batch in images]
    given: dict[str, Any] = {"images": images, "train_loader": loader, "val_loader": loader}
    given |= {"pwfn": pwfn, "torch": torch, "model": create_model("any"), "loss_fn": F.cross_entropy}
    for block in blocks("python", (ROOT / page).read_text(encoding="utf-8")):
        exec(compile(block, page, "exec"), given)
    assert len(capsys.readouterr().out.splitlines()) <= 10
    (file,) = tmp_path.glob("*.pwfn")
    model = pwfn.load(file).apply_to(create_model("any")).eval()
    assert page != "README.md" or torch.equal(model(images[0]), given["model"](images[0]))


def check() -> int:
    """Run every command for real; the number of those that failed."""
    failed = 0
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    for command in commands():
        table_only = command.startswith(
            "pwfn compare "
        )  # its runs take hours, and without them the status is 1
        print(f"$ {command}{' --table-only' if table_only else ''}", flush=True)
        words = [*shlex.split(command), *(["--table-only"] if table_only else [])]
        started = time.perf_counter()
        status = subprocess.run(words, cwd=ROOT, env={**os.environ, "PATH": path}).returncode
        good = status == int(table_only)
        print(f"{'ok' if good else f'FAILED with status {status}'}, {time.perf_counter() - started:.0f} s\n")
        failed += not good
    return failed


if __name__ == "__main__":
    sys.exit(check())
