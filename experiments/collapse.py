"""What becomes of the sigmas under several alpha: figures and a table, of the runs of two plans.

    python experiments/collapse.py keep    of the runs in tables/NAME, keep what was seen of sigma
    python experiments/collapse.py         draw docs/NAME.png from what is kept

What is kept is experiments/results/NAME/sigmas.jsonl, a line a run: how many of the free weights have a sigma
in each eighth of an octave, at the start and before every fixing. The tables beside the figures are made of
it by `python experiments/table.py`.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pwfn.errors import FileError, PwfnError
from pwfn.evaluate.trace import Moment, Trace
from pwfn.file.storage import replacing
from pwfn.lab import compare
from pwfn.report.figures import sigma, style
from pwfn.report.reading import History, quantile, read_run, read_trace

NAMES = ("alpha_resnet20", "collapse_resnet20")
ROOT = Path(__file__).resolve().parent.parent
POSTERIOR, TRAINING = ("alpha", "cap", "learn_sigma"), ("learning_rate", "sigma_learning_rate")


@dataclass(frozen=True)
class Seen:
    """What a figure needs of a run."""

    label: str
    settings: Mapping[str, Any]
    observed: tuple[Trace, ...]

    @property
    def rate(self) -> float:
        """The learning rate of sigma."""
        training = self.settings["training"]
        own = training["sigma_learning_rate"]
        return float(own if isinstance(own, float) else training["learning_rate"])


def kept(name: str, root: Path = ROOT) -> Path:
    """Where what was seen in a plan's runs is kept."""
    return root / "experiments" / "results" / name / "sigmas.jsonl"


def keep(name: str, tables: Path, root: Path = ROOT) -> Path:
    """Write what was seen in the runs of a plan's table."""
    lines = []
    for run in compare.load(root / "experiments" / "ablations" / f"{name}.toml").runs():
        found = read_run(tables / name / run.place)
        settings = {
            section: {key: found.settings[section][key] for key in keys}
            for section, keys in (("posterior", POSTERIOR), ("training", TRAINING))
        }
        looks = [
            Trace(look.moment, look.round, look.fraction, look.sigma).to_plain()
            for look in read_trace(found.folder)
            if look.sigma is not None and look.moment is not Moment.AFTER
        ]
        lines.append(json.dumps({"label": run.row.label, "settings": settings, "observed": looks}))
    with replacing(kept(name, root)) as temporary:
        temporary.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return kept(name, root)


def seen(name: str, root: Path = ROOT) -> list[Seen]:
    """What was kept, in the plan's order."""
    path = kept(name, root)
    if not path.is_file():
        raise FileError(f"{path}: is not there: python experiments/collapse.py keep writes it")
    found = []
    for line in path.read_text(encoding="utf-8").splitlines():
        plain = json.loads(line)
        found.append(Seen(plain["label"], plain["settings"], tuple(map(Trace.of_plain, plain["observed"]))))
    return found


def table(name: str, root: Path = ROOT) -> str:
    """The median sigma of the free weights, a line a run, at the start and before every fixing."""
    runs = seen(name, root)
    rounds = sorted({look.round for run in runs for look in run.observed})
    head = [
        "median sigma of the free weights",
        *(f"fixing {number}" if number else "start" for number in rounds),
    ]
    rows = [head, ["---"] * len(head)]
    for run in runs:
        medians = {look.round: f"{quantile(look.sigma, 0.5):.2g}" for look in run.observed if look.sigma}
        rows.append([run.label, *(medians.get(number, "–") for number in rounds)])
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def draw(name: str, root: Path = ROOT) -> Path:
    """The figure as a picture."""
    runs = seen(name, root)
    several = len({run.rate for run in runs}) > 1
    panels = []
    for run in runs:
        posterior = run.settings["posterior"]
        cap = posterior["cap"] if posterior["learn_sigma"] else None
        title = run.label.partition(",")[0] + (f", rate {run.rate:g}" if several else "")
        panels.append(sigma.Panel(title, History.of(run.observed), cap))
    figure = sigma.by_round(panels)
    if figure is None:
        raise FileError(f"{kept(name, root)}: holds nothing that was seen before a fixing: keep it again")
    path = root / "docs" / f"{name}.png"
    style.png(figure, path)
    return path


def main() -> int:
    """The command; its status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("command", nargs="?", choices=("draw", "keep"), default="draw")
    parser.add_argument("--tables", type=Path, default=Path("tables"), help="where the runs are")
    parser.add_argument("--names", nargs="+", choices=NAMES, default=NAMES, help="both, unless given")
    options = parser.parse_args()
    try:
        for name in options.names:
            print(keep(name, options.tables) if options.command == "keep" else draw(name))
    except PwfnError as error:
        print(f"collapse: {error}", file=sys.stderr)
        return error.exit_status
    return 0


if __name__ == "__main__":
    sys.exit(main())
