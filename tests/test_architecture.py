"""The shape of the house: imports point one way, and importing pwfn stays light."""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Iterator
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from pathlib import Path

import pytest

import pwfn

ROOT = Path(pwfn.__file__).parent

ORDER: tuple[tuple[str, ...], ...] = (
    ("version", "errors"),
    ("config", "layout"),
    ("fixing", "runtime"),
    ("file",),
    ("zoo",),
    ("bayes",),
    ("evaluate",),
    ("progress",),
    ("result",),
    ("compress",),
    ("",),  # the package itself
    ("export",),
    ("run",),
    ("lab",),
    ("report",),
    ("cli",),
    ("__main__",),
)
"""A package may import those in the rows above its own, and no others."""

RANK = {name: rank for rank, names in enumerate(ORDER) for name in names}

FILES = sorted(ROOT.rglob("*.py"))


def room(path: Path) -> str:
    """The top-level module or sub-package that a file belongs to; '' for the package itself."""
    first = path.relative_to(ROOT).parts[0].removesuffix(".py")
    return "" if first == "__init__" else first


def imports(path: Path) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Every import of a file, at any depth of indentation: the module and the names taken from it."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((alias.name, ()) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name}: imports are absolute"
            yield node.module or "", tuple(alias.name for alias in node.names)


def rooms_imported(path: Path) -> Iterator[str]:
    for module, names in imports(path):
        if module == "pwfn":
            yield from (name if name in RANK else "" for name in names)
        elif module.startswith("pwfn."):
            yield module.split(".")[1]


def test_every_package_has_its_place_in_the_order() -> None:
    assert {room(path) for path in FILES} == set(RANK)


def test_the_ground_floor_is_small_and_no_file_is_long() -> None:
    assert len(list(ROOT.glob("*.py"))) <= 8
    long = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in FILES}
    assert {name: lines for name, lines in long.items() if lines > 425} == {}
    for folder in {path.parent for path in FILES}:
        assert len(list(folder.glob("*.py"))) <= 14, folder.name


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_point_up_the_order_only(path: Path) -> None:
    """Also those inside of functions, which could hide a cycle."""
    own = room(path)
    for other in rooms_imported(path):
        if other != own:
            assert RANK[other] < RANK[own], f"{own or 'pwfn'} imports {other or 'pwfn'}"


def test_modules_of_a_package_do_not_import_each_other_in_a_circle() -> None:
    graph = {module_name(path): modules_imported(path) for path in FILES}
    done: set[str] = set()

    def visit(name: str, above: tuple[str, ...]) -> None:
        assert name not in above, " -> ".join((*above[above.index(name) :], name))
        if name not in done:
            for other in graph.get(name, ()):
                visit(other, (*above, name))
            done.add(name)

    for name in graph:
        visit(name, ())


def modules_imported(path: Path) -> set[str]:
    known = {module_name(each) for each in FILES}
    found = set()
    for module, names in imports(path):
        parts = {f"{module}.{name}" for name in names} & known
        found |= parts or ({module} & known)
    return found


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def test_the_library_stands_without_the_lab_and_the_report() -> None:
    upper = {"lab", "report", "cli", "__main__"}
    users = {room(path) for path in FILES for other in rooms_imported(path) if other in {"lab", "report"}}
    assert users <= upper


def test_the_reader_of_imports_sees_all_of_them(tmp_path: Path) -> None:
    file = tmp_path / "sample.py"
    file.write_text(
        "import pwfn.cli\nfrom pwfn import cli, __version__\n"
        "def f():\n    from pwfn.bayes.train import fit\n    import timm.models\n"
    )
    assert list(rooms_imported(file)) == ["cli", "cli", "", "bayes"]
    assert [module for module, _ in imports(file)] == ["pwfn.cli", "pwfn", "pwfn.bayes.train", "timm.models"]


def test_no_room_for_odds_and_ends() -> None:
    assert not {path.stem for path in FILES} & {"utils", "helpers", "common", "base", "manager", "misc"}


@pytest.mark.parametrize("package", ["timm", "torchvision"])
def test_only_the_zoo_knows_other_peoples_networks(package: str) -> None:
    users = {room(path) for path in FILES for module, _ in imports(path) if module.split(".")[0] == package}
    assert users <= {"zoo"}


def test_importing_pwfn_imports_no_heavy_or_optional_package() -> None:
    heavy = [
        "timm",
        "torchvision",
        "sklearn",
        "typer",
        "rich",
        "transformers",
        "tomli_w",
        "matplotlib",
        "accelerate",
    ]
    program = f"import pwfn, sys; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.stderr == ""
    assert done.stdout.strip() == "[]"


PLAIN = """
import sys

class Without:
    def __init__(self, finder, absent):
        self.finder, self.absent = finder, absent

    def find_spec(self, name, path=None, target=None):
        return None if name.partition(".")[0] in self.absent else self.finder.find_spec(name, path, target)

sys.meta_path[:] = [Without(finder, set(sys.argv[2:])) for finder in sys.meta_path]
from pathlib import Path
from pwfn import Config, load
from pwfn.run import demo

demo.EPOCHS = 1
folder = Path(sys.argv[1])
demo.demo(Config.preset("quick"), folder, say=lambda line: None)
print(load(folder / "model.pwfn"))
"""


def test_a_plain_install_runs_the_demo(tmp_path: Path) -> None:
    """With nothing but what the declared dependencies bring along."""
    declared = tomllib.loads((ROOT.parent.parent / "pyproject.toml").read_text())["project"]["dependencies"]
    there = with_their_own(declared)
    assert not there & {"scikit-learn", "scipy", "matplotlib", "timm"}
    blocked = [
        module
        for module, owners in packages_distributions().items()
        if not there & {plain_name(owner) for owner in owners} and module != "pwfn"
    ]
    assert {"scipy", "hypothesis"} <= set(blocked)
    command = [sys.executable, "-c", PLAIN, str(tmp_path / "run"), *blocked]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.stdout.startswith("Compressed("), done.stderr


def with_their_own(needed: Iterable[str]) -> set[str]:
    """Packages that an install of these brings along, as far as they are installed here."""
    found: set[str] = set()
    waiting = list(needed)
    while waiting:
        name = plain_name(re.split(r"[^\w.-]", waiting.pop(), maxsplit=1)[0])
        if name not in found:
            found.add(name)
            with suppress(PackageNotFoundError):
                waiting += [each for each in requires(name) or () if "extra ==" not in each]
    return found


def plain_name(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_every_public_name_exists_once_and_in_order() -> None:
    assert len(set(pwfn.__all__)) == len(pwfn.__all__)
    for name in pwfn.__all__:
        assert hasattr(pwfn, name), name
    fixed = {
        "fix_round",
        "candidates",
        "initial_sigma",
        "GaussianNetwork",
        "compress",
        "Config",
        "PwfnError",
        "load",
    }
    assert fixed <= set(pwfn.__all__)


def test_every_public_class_function_and_method_has_a_docstring_of_its_own() -> None:
    checked = 0
    for name in pwfn.__all__:
        thing = getattr(pwfn, name)
        if not (inspect.isclass(thing) or inspect.isfunction(thing)):
            continue
        documented = {name: thing}
        if inspect.isclass(thing):
            members = {
                f"{name}.{key}": value for key, value in vars(thing).items() if not key.startswith("_")
            }
            documented |= {key: value for key, value in members.items() if callable(value) or _wraps(value)}
        for key, value in documented.items():
            text = inspect.cleandoc(value.__doc__ or "")
            # dataclass and NamedTuple write "Name(fields)" where there is no docstring.
            assert text, key
            assert not text.startswith(f"{name}("), key
            checked += 1
    assert checked > len(pwfn.__all__)


def _wraps(value: object) -> bool:
    return isinstance(value, (property, classmethod, staticmethod))


def test_every_module_says_what_it_is_for() -> None:
    for info in pkgutil.walk_packages([str(ROOT)], "pwfn."):
        if info.name != "pwfn.__main__":  # which runs the command
            assert importlib.import_module(info.name).__doc__, info.name


def test_every_error_is_a_pwfn_error() -> None:
    raised = [
        value for value in vars(pwfn).values() if inspect.isclass(value) and issubclass(value, Exception)
    ]
    assert len(raised) >= 6
    assert all(issubclass(error, pwfn.PwfnError) for error in raised)
