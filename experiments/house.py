"""Print the source tree with the lines of each package, and its size before and after the rebuilding.

python experiments/house.py
"""

from __future__ import annotations

import ast
from pathlib import Path

import pwfn
from pwfn.config import Config, Section

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src" / "pwfn"
UPPER = ("lab", "report", "runtime")  # not part of the library proper
BEFORE = {  # measured at commit 03ebbd5
    "lines in src": 26_464,
    "lines of the library, without lab, report, runtime": 21_912,
    "files": 167,
    "files on the ground floor": 53,
    "settings": 72,
    "public names": 33,
    "lines in tests": 29_010,
    "lines of the README": 264,
}


def lines(path: Path) -> int:
    """Lines of all Python files of a folder, or of one file."""
    files = path.rglob("*.py") if path.is_dir() else [path]
    return sum(len(file.read_text(encoding="utf-8").splitlines()) for file in files)


def purpose(path: Path) -> str:
    """The first line of a module's docstring."""
    tree = ast.parse((path / "__init__.py" if path.is_dir() else path).read_text(encoding="utf-8"))
    return (ast.get_docstring(tree) or "").partition("\n")[0]


def now() -> dict[str, int]:
    """The same figures as BEFORE, of the source as it is."""
    upper = sum(lines(SOURCE / name) for name in UPPER)
    sections = [value for value in vars(Config()).values() if isinstance(value, Section)]
    found = [
        lines(SOURCE),
        lines(SOURCE) - upper,
        len(list(SOURCE.rglob("*.py"))),
        len(list(SOURCE.glob("*.py"))),
        sum(len(vars(section)) for section in sections),
        len(pwfn.__all__),
        lines(ROOT / "tests"),
        len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()),
    ]
    return dict(zip(BEFORE, found, strict=True))


def main() -> None:
    """The command."""
    rooms = sorted(
        path for path in SOURCE.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()
    )
    print("src/pwfn/")
    for path in sorted(rooms, key=lambda path: path.is_dir()):
        print(f"  {path.name + '/' * path.is_dir():<13} {lines(path):>6,} lines   {purpose(path)}")
    print(f"\n{'':<52} {'03ebbd5':>8} {'now':>8}")
    for name, figure in now().items():
        print(f"{name:<52} {BEFORE[name]:>8,} {figure:>8,}")


if __name__ == "__main__":
    main()
