"""Of each run: how it was made, the table of its layers, its file byte by byte, its states."""

from __future__ import annotations

from typing import Any

from pwfn.evaluate.targets import pareto
from pwfn.report.facts import RunFacts
from pwfn.report.markup import Child, Markup, element, joined
from pwfn.report.repeating import DATA, WEIGHTS
from pwfn.report.tables import Cell, Column, bar, count, decimal, dotted, percent, table
from pwfn.report.top import duration, setting_row

_PARTS = {
    "index": "indices, one a weight",
    "table": "frequency tables",
    "codebook": "codebooks",
    "posterior": "sigmas",
    "untouched": "tensors in full precision",
    "header": "header and record",
    "padding": "padding",
}
_RIVALS = {"fp32": "fp32", "fp16": "fp16", "int8": "int8, a scale a tensor", "zstd19": "fp32 in zstd -19"}


def making(run: RunFacts) -> Markup:
    """Method, preset and what differs from it, where it ran, and the command."""
    record, settings = run.run.record, run.settings
    rows: list[tuple[str, Child]] = [
        ("Network", run.model),
        ("Method", f"{settings.method}, preset {settings.preset}, seed {settings.seed}"),
        ("What differs", _differing(run)),
    ]
    if run.run.record["identity"]["data"].get("content"):
        rows.append(("Data, fingerprint", element("code", str(record["identity"]["data"]["content"]))))
    spent = f"{record['epochs']:g} epochs in {duration(record.get('seconds'))}" if "epochs" in record else "–"
    rows += [("Training", spent), ("Machine", _machine(record.get("machine", {})))]
    if "choice" in record:
        rows.append(("Kept", str(record["choice"].get("why", ""))))
    facts = element("dl", [joined(element("dt", k), element("dd", v)) for k, v in rows], class_="facts")
    return joined(facts, _command(run))


def _differing(run: RunFacts) -> Child:
    if run.settings.trouble is not None:
        return f"unknown, as the settings are of another version: {run.settings.trouble}"
    if not run.settings.changed:
        return "nothing: the settings are the preset’s"
    return element("ul", [setting_row(each) for each in run.settings.changed], class_="changes")


def _machine(machine: dict[str, Any]) -> str:
    versions = ", ".join(f"{name} {number}" for name, number in machine.get("versions", {}).items())
    several = f", {machine['processes']} processes" if machine.get("processes", 1) != 1 else ""
    return f"{machine.get('device', 'not recorded')}{several}; {versions}".rstrip("; ")


def _command(run: RunFacts) -> Markup:
    put_in = {DATA: "the data", WEIGHTS: "the weights it began from"}
    note: Child = ""
    if run.command.missing:
        named = " and ".join(put_in[word] for word in run.command.missing)
        stand = " and ".join(run.command.missing) + (" stands" if len(run.command.missing) == 1 else " stand")
        note = element("p", f"{stand} for {named}, which its record does not name.", class_="note")
    label = element("p", "To repeat it:", class_="label")
    return joined(label, element("pre", element("code", run.command.text), tabindex=0), note)


def layers(run: RunFacts) -> Markup:
    """The sortable table of compressed tensors, and below it those that were left out, and why."""
    columns = [
        Column("#", "Place in the network"),
        Column("Name", is_number=False),
        Column("Shape", is_number=False),
        Column("Weights"),
        Column("Bits", "Entropy a weight"),
        Column("Unique", "Number of values"),
        Column("Zero", "Share of the weights that are zero"),
        Column("Bytes", "On disk: its indices, and a frequency table where it has its own"),
    ]
    rows = [
        [
            count(place),
            dotted(each.name),
            Cell(_shape(each.shape), each.weights),
            count(each.weights),
            decimal(each.entropy_bits),
            count(each.unique),
            percent(run.summary.layers[each.name].zero_share),
            count(each.index_bytes + each.table_bytes),
        ]
        for place, each in enumerate(run.file.tensors, 1)
    ]
    caption = f"{len(rows)} compressed tensors of {run.name}"
    return joined(table(caption, columns, rows, sortable=True, head_column=1), _left_out(run))


def _left_out(run: RunFacts) -> Markup:
    left = run.run.compressed.layout.left_out
    if not left:
        return Markup("")
    columns = [Column("Name", is_number=False), Column("Shape", is_number=False)]
    columns.append(Column("Why", is_number=False))
    rows = [[dotted(e.name), Cell(_shape(e.shape)), Cell(e.reason)] for e in left]
    summary = element("summary", f"{len(left)} parameters are left in full precision")
    return element("details", summary, table(f"Parameters of {run.name} left as they are", columns, rows))


def _shape(shape: tuple[int, ...]) -> str:
    return "×".join(str(n) for n in shape) or "scalar"


def file_bytes(run: RunFacts) -> Markup:
    """Where the bytes of the file are, and what the same network takes otherwise."""
    file = run.file
    columns = [Column("Part", is_number=False), Column("Bytes"), Column("Share"), Column("", is_number=False)]
    sizes = {words: getattr(file, f"{part}_bytes") for part, words in _PARTS.items()}
    ordered = sorted(sizes.items(), key=lambda item: -item[1])
    rows = [
        [Cell(words), count(n), percent(n / file.file_bytes), bar(n / file.file_bytes)]
        for words, n in ordered
        if n
    ]
    rows.append([Cell("the whole file"), count(file.file_bytes), percent(1.0), Cell("")])
    inside = table(f"Where the {file.file_bytes:,} bytes of {run.name} are", columns, rows, class_="bars")
    return element("div", inside, _rivals(run), class_="pair")


def _rivals(run: RunFacts) -> Markup:
    file, rivals = run.file, run.file.rivals()
    largest = max(file.file_bytes, *rivals.values())
    columns = [Column("Stored as", is_number=False), Column("Bytes"), Column("Times the file")]
    columns.append(Column("", is_number=False))
    rows = [
        [Cell(_RIVALS[name]), count(n), Cell(f"{100 * n // file.file_bytes / 100:.2f}", n), bar(n / largest)]
        for name, n in rivals.items()
    ]
    rows.append([Cell("this file"), count(file.file_bytes), Cell("1.00", 1), bar(file.file_bytes / largest)])
    return table("The same network, stored otherwise", columns, rows, class_="bars")


def states(run: RunFacts) -> Markup:
    """The network as it would be after each round, where the run kept that."""
    found = run.run.record.get("states") or []
    if not found:
        return Markup("")
    best = pareto([(state["metric"] or 0.0, state["file_bytes"]) for state in found])
    columns = [Column(head) for head in ("Round", "Fixed", "Accuracy", "Bits", "Unique", "Bytes")]
    columns.append(Column("Best for its size", "No other state has more accuracy in fewer bytes"))
    rows = [
        [
            count(state["round"]),
            percent(state["fraction"]),
            percent(state["metric"], 2),
            decimal(state["entropy_bits"], 3),
            count(state["unique"]),
            count(state["file_bytes"]),
            Cell("yes" if is_best else "no", float(is_best)),
        ]
        for state, is_best in zip(found, best, strict=True)
    ]
    return table(f"{run.name} as it would be, had it ended after a round", columns, rows, sortable=True)
