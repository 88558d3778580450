"""The head of the page: what was compressed and what came of it; several runs side by side."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from pwfn.report.facts import RunFacts
from pwfn.report.markup import Child, Markup, element, joined
from pwfn.report.repeating import Setting
from pwfn.report.tables import Cell, Column, count, decimal, percent, table


def heading(runs: Sequence[RunFacts]) -> Markup:
    """The title and a sentence."""
    if len(runs) == 1:
        title, sentence = runs[0].model, _sentence(runs[0])
    else:
        title = f"{len(runs)} runs side by side"
        names = sorted({run.model for run in runs})
        sentence = f"Of {_listed(names)}, each measured on its own file, read back from disk."
    kicker = element("p", "pwfn report", class_="kicker")
    return joined(kicker, element("h1", title), element("p", sentence, class_="lead"))


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else ", ".join(names[:-1]) + " and " + names[-1]


def _sentence(run: RunFacts) -> str:
    file = run.file
    values = f"{file.unique:,} value" + ("s" if file.unique != 1 else "")
    return (
        f"{file.weights:,} weights now take {values}; the file has {size(file.file_bytes)} in place of "
        f"{size(file.fp32_bytes)}, {smaller(run)}."
    )


def size(number: int) -> str:
    """Bytes for people, in powers of a thousand.

    >>> size(999), size(45425), size(44_700_000)
    ('999 bytes', '45.4 kB', '44.7 MB')
    """
    for unit, scale in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if number >= scale:
            return f"{number / scale:.1f} {unit}"
    return f"{number} bytes"


def smaller(run: RunFacts) -> str:
    """How much smaller a run's file is than the network in fp32."""
    return f"{run.times_smaller:.1f} times smaller"


def change(run: RunFacts) -> str:
    """What became of the accuracy, in points."""
    if run.lost is None:
        return "not measured before and after"
    points = f"{abs(run.lost):.2f}"
    if points == "0.00":
        return "no change"
    return f"{points} points {'lost' if run.lost > 0 else 'gained'}"


def tiles(run: RunFacts) -> Markup:
    """The four figures that matter, in large."""
    file = run.file
    on = f", on {run.examples:,} images" if run.examples else ""
    shown: list[tuple[str, Child, str]] = [
        ("Accuracy", _from_to(_percent(run.before), _percent(run.after)), change(run) + on),
        ("Size", _from_to(size(file.fp32_bytes), size(file.file_bytes)), _size_note(run)),
        (
            "Bits a weight",
            _from_to("32", f"{file.entropy_bits:.2f}"),
            f"of entropy; {file.bits_per_weight:.2f} on disk",
        ),
        (
            "Unique values",
            _from_to(None, f"{file.unique:,}"),
            f"{file.power_of_two_share:.1%} of the weights are zero or a power of two",
        ),
    ]
    return element(
        "dl",
        [
            element("div", element("dt", name), element("dd", figure), element("dd", note, class_="note"))
            for name, figure, note in shown
        ],
        class_="tiles",
    )


def _size_note(run: RunFacts) -> str:
    return f"{run.file.fp32_bytes:,} bytes in fp32, {run.file.file_bytes:,} on disk: {smaller(run)}"


def _percent(share: float | None) -> str | None:
    return f"{share:.2%}" if share is not None else None


def _from_to(before: str | None, after: str | None) -> Markup:
    now = element("strong", after or "–")
    if before is None:
        return now
    # An arrow for the eye, words for the ear.
    arrow = element("span", " → ", aria_hidden="true") + element("span", " before, now ", class_="unseen")
    return joined(element("span", before, class_="was"), Markup(arrow), now)


def side_by_side(runs: Sequence[RunFacts]) -> Markup:
    """A column a run; below the figures every setting in which any run differs from its preset."""
    rows: list[list[Cell]] = []

    def add(name: str, cell: Callable[[RunFacts], Cell]) -> None:
        rows.append([Cell(name), *(cell(run) for run in runs)])

    add("Network", lambda run: Cell(run.model))
    add("Method, preset", lambda run: Cell(f"{run.settings.method}, {run.settings.preset}"))
    add("Accuracy before", lambda run: percent(run.before, 2))
    add("Accuracy after", lambda run: percent(run.after, 2))
    add("Change", lambda run: Cell(change(run)))
    add("Bytes in fp32", lambda run: count(run.file.fp32_bytes))
    add("Bytes on disk", lambda run: count(run.file.file_bytes))
    add("Times smaller", lambda run: decimal(run.times_smaller, 1))
    add("Entropy, bits a weight", lambda run: decimal(run.file.entropy_bits, 3))
    add("On disk, bits a weight", lambda run: decimal(run.file.bits_per_weight, 3))
    add("Unique values", lambda run: count(run.file.unique))
    add("Zero or a power of two", lambda run: percent(run.file.power_of_two_share))
    add("Epochs", lambda run: decimal(run.run.record.get("epochs"), 2))
    add("Training", lambda run: Cell(duration(run.run.record.get("seconds"))))
    add("Seed", lambda run: Cell(str(run.settings.seed)))
    for name in sorted({each.name for run in runs for each in run.settings.changed}):
        rows.append([Cell(element("code", name)), *(Cell(value_of(run, name)) for run in runs)])
    columns = [Column("", is_number=False), *(Column(run.name) for run in runs)]
    return table("The runs side by side", columns, rows, class_="sides", captioned=False)


def value_of(run: RunFacts, name: str) -> str:
    """A setting of a run as text, wherever it comes from."""
    section, _, key = name.partition(".")
    found = run.run.record["identity"]["settings"].get(section)
    value = found.get(key) if isinstance(found, dict) else found
    return "–" if value is None else _plain(value)


def setting_row(each: Setting) -> Markup:
    """A setting that was changed, and what it is in the preset."""
    return element(
        "li",
        element("code", f"{each.name} = {_plain(each.value)}"),
        element("span", f" in place of {_plain(each.usual)}", class_="quiet"),
    )


def _plain(value: Any) -> str:
    """
    >>> _plain(True), _plain(0.00048828125), _plain([0.5, 1.0])
    ('true', '0.00048828125', '0.5, 1.0')
    """
    if isinstance(value, list):
        return ", ".join(_plain(each) for each in value) or "none"
    return value if isinstance(value, str) else json.dumps(value)


def duration(seconds: float | None) -> str:
    """
    >>> duration(8.02), duration(600), duration(7300), duration(None)
    ('8 s', '10 min', '2 h 1 min', '–')
    """
    if seconds is None:
        return "–"
    if seconds < 120:
        return f"{seconds:.0f} s"
    minutes = int(seconds // 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"
