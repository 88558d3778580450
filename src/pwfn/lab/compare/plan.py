"""What a table compares: networks, rows and seeds, read from TOML and checked before anything runs."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, TypeVar

from pwfn.bayes.method import METHODS, check_options, phases
from pwfn.config import Config, SigmaInit, flat, hint
from pwfn.errors import ConfigError
from pwfn.lab.baselines import find
from pwfn.lab.compare import paper

PAPER_NAMES = {
    "baseline": "Baseline",
    "lsq": "LSQ",
    "apot": "APoT",
    "wfn": "WFN",
    "lsq+": "LSQ+",
    "q-vit": "Q-ViT",
    "kmeans": "k-means",
    "pwfn": "PWFN",
}
"""Names of the methods in the paper's table; k-means is not in it."""


@dataclass(frozen=True)
class Network:
    """A network of the table: one block ``[[model]]``."""

    name: str
    weights: str = "pretrained"  # or "random", or a file
    paper: str | None = None  # the paper's network whose figures are shown too
    settings: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Row:
    """A row of the table, for some or all networks: one block ``[[row]]``."""

    method: str
    label: str | None = None
    preset: str | None = None
    models: tuple[str, ...] | None = None
    seeds: tuple[int, ...] | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Plan:
    """A table: every row is run for its networks and seeds."""

    data: str
    seeds: tuple[int, ...] = (0,)
    jobs: int = 1  # runs at a time
    samples: int = 20  # draws of an ensemble
    batch_size: int = 128
    holdout: int = 0  # training images that are held out and scored instead of the test images
    settings: Mapping[str, Any] = field(default_factory=dict)
    networks: tuple[Network, ...] = ()
    rows: tuple[Row, ...] = ()

    def runs(self) -> list[Run]:
        """Every run of the table: network by network, row by row, seed by seed."""
        return [
            Run(self, network, row, seed)
            for network in self.networks
            for row in self.rows
            if row.models is None or network.name in row.models
            for seed in row.seeds or self.seeds
        ]


@dataclass(frozen=True)
class Run:
    """One network compressed by one method with one seed."""

    plan: Plan
    network: Network
    row: Row
    seed: int

    @property
    def changes(self) -> dict[str, Any]:
        """The settings given: those of the table, then of the network, then of the row."""
        return {**self.plan.settings, **self.network.settings, **self.row.settings}

    @property
    def config(self) -> Config:
        """All settings."""
        config = Config.preset(self.row.preset or "recommended", self.row.method)
        return config.override({**self.changes, "seed": self.seed})

    @property
    def epochs(self) -> float:
        """Epochs of training, polish included."""
        config = self.config
        return sum(phase.epochs for phase in phases(config)) + config.finish.polish_epochs

    @property
    def label(self) -> str:
        """The name of the row: as given, or the method and, where it has this option, its bits."""
        if self.row.label is not None:
            return self.row.label
        bits = getattr(check_options(METHODS[self.row.method], self.config), "bits", None)
        return _method_name(self.config) + (f", {bits} bit" if bits is not None else "")

    @property
    def paper_line(self) -> paper.PaperLine | None:
        """The line of the paper's table for its network and method, if there is one."""
        return paper.line(self.network.paper, _method_name(self.config)) if self.network.paper else None

    @property
    def name(self) -> str:
        """``network_row_seedN``, for file names."""
        return f"{slug(self.network.name)}_{slug(self.label)}_seed{self.seed}"

    @property
    def place(self) -> Path:
        """Its folder, relative to that of the table."""
        return Path(slug(self.network.name), slug(self.label), f"seed{self.seed}")

    def __str__(self) -> str:
        return f"{self.network.name}, {self.label}, seed {self.seed}"

    def arguments(self, out: Path, device: str | None) -> list[str]:
        """The arguments of ``pwfn`` that start or resume it."""
        words = ["compress", "--model", self.network.name, "--weights", self.network.weights]
        words += ["--data", self.plan.data, "--out", str(out / self.place), "--method", self.row.method]
        words += ["--seed", str(self.seed), "--batch-size", str(self.plan.batch_size), "--resume", "--json"]
        words += ["--preset", self.row.preset] if self.row.preset else []
        words += ["--device", device] if device else []
        words += ["--holdout", str(self.plan.holdout)] if self.plan.holdout else []
        for name, value in self.changes.items():
            # For the values that settings have, JSON is valid TOML.
            words += ["--set", f"{name}={json.dumps(value, ensure_ascii=False)}"]
        return words


def load(path: str | Path) -> Plan:
    """Read the description of a table; an error names the file and the place in it."""
    try:
        return read(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot read the table's description: {error}") from None
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def read(text: str) -> Plan:
    """The description of a table from TOML.

    >>> plan = read('data = "digits"\\n[[model]]\\nname = "digits_resnet"\\n[[row]]\\nmethod = "lsq"\\n')
    >>> [str(run) for run in plan.runs()]
    ['digits_resnet, LSQ, 4 bit, seed 0']
    >>> read("sead = 1")
    Traceback (most recent call last):
    ...
    pwfn.errors.ConfigError: 'sead' is unknown: did you mean 'seeds'?
    """
    try:
        tables = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"the description is not valid TOML: {error}") from None
    blocks = {name: tables.pop(name, []) for name in ("model", "row")}
    plan = _section(Plan, tables, "", tuple(blocks))
    for name, value in blocks.items():
        if not isinstance(value, list) or not value or not all(isinstance(block, dict) for block in value):
            raise ConfigError(f"there is no {name}: add a block that begins with [[{name}]]")
    plan = replace(
        plan,
        networks=tuple(
            _section(Network, block, f"model {i}: ") for i, block in enumerate(blocks["model"], 1)
        ),
        rows=tuple(_section(Row, block, f"row {i}: ") for i, block in enumerate(blocks["row"], 1)),
    )
    _check(plan)
    return plan


def slug(text: str) -> str:
    """Letters, digits and underscores, for file names.

    >>> slug("LSQ+, 4 bit"), slug("PWFN (no prior)")
    ('lsq_plus_4_bit', 'pwfn_no_prior')
    """
    return re.sub(r"[^a-z0-9]+", "_", text.lower().replace("+", " plus ")).strip("_")


Check = tuple[Callable[[Any], bool], str]
"""Whether a value is allowed, and what is, in words."""


def _whole(low: int) -> Check:
    return lambda value: type(value) is int and low <= value < 2**63, f"a whole number of at least {low}"


def _list_of(each: Check, what: str) -> Check:
    def allowed(value: Any) -> bool:
        is_list = isinstance(value, list) and bool(value) and all(map(each[0], value))
        return is_list and len(set(value)) == len(value)

    return allowed, f"a list of {what}, at least one and none twice"


_TEXT: Check = (lambda value: isinstance(value, str) and bool(value.strip()), "text in quotes")
_CHECKS: dict[str, Check] = {
    **dict.fromkeys(("data", "name", "weights", "paper", "method", "label", "preset"), _TEXT),
    "seeds": _list_of(_whole(0), "whole numbers"),
    "models": _list_of(_TEXT, "names of networks"),
    "jobs": _whole(1),
    "batch_size": _whole(1),
    "samples": _whole(0),
    "holdout": _whole(0),
    "settings": (lambda value: isinstance(value, dict), 'a table of settings, as in "options.bits" = 4'),
}
_Kind = TypeVar("_Kind", Plan, Network, Row)


def _section(kind: type[_Kind], table: Mapping[str, Any], where: str, others: tuple[str, ...] = ()) -> _Kind:
    """A block of the description, checked key by key."""
    # The first field of each block, and only that, has no default.
    given: list[str] = [item.name for item in fields(kind) if item.name in _CHECKS]
    checked: dict[str, Any] = {}
    for key, value in table.items():
        if key not in given:
            raise ConfigError(f"{where}{key!r} is unknown{hint(key, (*given, *others))}")
        is_allowed, allowed = _CHECKS[key]
        if not is_allowed(value):
            raise ConfigError(f"{where}{key} is {value!r}: allowed is {allowed}")
        checked[key] = tuple(value) if isinstance(value, list) else value
    if "settings" in checked:
        checked["settings"] = flat(checked["settings"])
    if given[0] not in checked:
        raise ConfigError(f"{where}{given[0]} is missing: add {given[0]} = …")
    return kind(**checked)


def _check(plan: Plan) -> None:
    """What can be checked only with the whole description at hand."""
    names = [network.name for network in plan.networks]
    for number, network in enumerate(plan.networks, 1):
        if slug(network.name) in map(slug, names[: number - 1]):
            raise ConfigError(f"model {number}: {network.name!r} is there twice: name each network once")
        if network.paper is not None and network.paper not in (known := paper.tables()["networks"]):
            near = hint(network.paper, known)
            raise ConfigError(
                f"model {number}: paper is {network.paper!r}, no network of the paper's table{near}"
            )
    for number, row in enumerate(plan.rows, 1):
        try:
            _check_row(plan, row, names)
        except ConfigError as error:
            raise ConfigError(f"row {number}: {error}") from None
    seen: set[Path] = set()
    for run in plan.runs():
        if run.place in seen:
            raise ConfigError(f"{run} is there twice: give one of the two rows a label of its own")
        seen.add(run.place)


def _check_row(plan: Plan, row: Row, names: list[str]) -> None:
    find(row.method)
    for name in row.models or ():
        if name not in names:
            raise ConfigError(f"models has {name!r}, no network of this table{hint(name, names)}")
    if row.label is not None and not slug(row.label):
        raise ConfigError(f"label is {row.label!r}: allowed is text with a letter or digit")
    for run in plan.runs():
        if run.row is row:
            for name in run.changes:
                if "." not in name:
                    advice = ": move it before [row.settings]" if hasattr(row, name) else ""
                    raise ConfigError(f"setting {name!r} is not of the form section.name{advice}")
            config = run.config  # checks every setting
            check_options(METHODS[config.method], config)


def _method_name(config: Config) -> str:
    """As the paper calls it; a method of one's own by its class."""
    if config.method == "pwfn" and config.posterior.init is SigmaInit.CONSTANT:
        return "PWFN (no prior)"
    return PAPER_NAMES.get(config.method, config.method.rpartition(":")[2])
