"""What a table is made of: networks, rows and seeds, read from TOML and checked before anything runs."""

from __future__ import annotations

import dataclasses
import json
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol, TypeVar

from pwfn.config import Config, MethodName, SigmaInit
from pwfn.config.checks import Number, hint
from pwfn.errors import ConfigError
from pwfn.lab import baselines as methods
from pwfn.lab.compare import paper

PAPER_NAMES: dict[MethodName, str] = {
    MethodName.BASELINE: "Baseline",
    MethodName.LSQ: "LSQ",
    MethodName.APOT: "APoT",
    MethodName.WFN: "WFN",
    MethodName.LSQ_PLUS: "LSQ+",
    MethodName.QVIT: "Q-ViT",
    MethodName.KMEANS: "k-means",
    MethodName.PWFN: "PWFN",
}
"""What the paper's table calls each method; k-means it has not."""
NO_PRIOR = "PWFN (no prior)"

_WITH_BITS = {MethodName.LSQ, MethodName.LSQ_PLUS, MethodName.APOT, MethodName.QVIT, MethodName.KMEANS}


@dataclass(frozen=True)
class Text:
    """A check for text that is not empty."""

    optional: bool = False

    def allowed(self) -> str:
        """What is allowed, for messages."""
        return "text in quotes"

    def __call__(self, value: Any) -> str | None:
        """The value as it is kept; ValueError where it is not allowed."""
        if value is None and self.optional:
            return None
        if not isinstance(value, str) or not value.strip():
            raise ValueError
        return value


@dataclass(frozen=True)
class Several:
    """A check for a list without repetition, of at least one; each passes another check."""

    each: Number | Text
    what: str  # "whole numbers", for messages
    optional: bool = False

    def allowed(self) -> str:
        """What is allowed, for messages."""
        return f"a list of {self.what}, at least one and none twice"

    def __call__(self, value: Any) -> tuple[Any, ...] | None:
        """The value as it is kept; ValueError where it is not allowed."""
        if value is None and self.optional:
            return None
        if isinstance(value, str) or not isinstance(value, Iterable):
            raise ValueError
        items = tuple(self.each(item) for item in value)
        if not items or len(set(items)) != len(items):
            raise ValueError
        return items


@dataclass(frozen=True)
class Changes:
    """A check for settings: ``"section.name" = value``, or a table for each section."""

    def allowed(self) -> str:
        """What is allowed, for messages."""
        return 'a table of settings, as in "quantiser.bits" = 4'

    def __call__(self, value: Any) -> dict[str, Any]:
        """The value as it is kept, by ``section.name``; ValueError where it is not allowed."""
        if not isinstance(value, Mapping):
            raise ValueError
        flat: dict[str, Any] = {}
        for key, item in value.items():
            flat |= {f"{key}.{name}": own for name, own in item.items()} if _is_table(item) else {key: item}
        return flat


class _Check(Protocol):
    def allowed(self) -> str: ...

    def __call__(self, value: Any) -> Any: ...


def _given(check: _Check, **default: Any) -> Any:
    return field(metadata={"check": check}, **default)


_SEED = Number(0, 2**63 - 1, whole=True)


class _Described:
    """Checks every value that was given when the thing is made."""

    def __post_init__(self) -> None:
        for item in _declared(type(self)):
            check: _Check = item.metadata["check"]
            value = getattr(self, item.name)
            try:
                object.__setattr__(self, item.name, check(value))
            except (ValueError, TypeError, OverflowError):
                raise ConfigError(f"{item.name} is {value!r}: allowed is {check.allowed()}") from None


def _declared(kind: type) -> list[dataclasses.Field[Any]]:
    """What a description may name."""
    return [item for item in dataclasses.fields(kind) if "check" in item.metadata]


@dataclass(frozen=True)
class Network(_Described):
    """A network of the table: one block ``[[model]]``."""

    name: str = _given(Text())
    weights: str = _given(Text(), default="pretrained")  # that, "random", or a file
    paper: str | None = _given(Text(optional=True), default=None)  # whose figures stand beside
    settings: Mapping[str, Any] = _given(Changes(), default_factory=dict)


@dataclass(frozen=True)
class Row(_Described):
    """A row of the table, for some or all of its networks: one block ``[[row]]``."""

    method: str = _given(Text())
    label: str | None = _given(Text(optional=True), default=None)
    preset: str | None = _given(Text(optional=True), default=None)
    models: tuple[str, ...] | None = _given(Several(Text(), "networks' names", True), default=None)
    seeds: tuple[int, ...] | None = _given(Several(_SEED, "whole numbers", True), default=None)
    paper: str | None = _given(Text(optional=True), default=None)  # "off": no line of the paper's
    settings: Mapping[str, Any] = _given(Changes(), default_factory=dict)


@dataclass(frozen=True)
class Plan(_Described):
    """A table: every row is run for its networks and seeds."""

    data: str = _given(Text())
    seeds: tuple[int, ...] = _given(Several(_SEED, "whole numbers"), default=(0,))
    jobs: int = _given(Number(1, whole=True), default=1)  # runs at a time
    samples: int = _given(Number(0, whole=True), default=20)  # draws of an ensemble
    batch_size: int = _given(Number(1, whole=True), default=128)
    holdout: int = _given(Number(0, whole=True), default=0)  # training images, scored in place of test images
    settings: Mapping[str, Any] = _given(Changes(), default_factory=dict)
    models: tuple[Network, ...] = ()
    rows: tuple[Row, ...] = ()

    def runs(self) -> list[Run]:
        """Every run of the table: network by network, row by row, seed by seed."""
        return [
            Run(self, network, row, seed)
            for network in self.models
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
        """What is set: for all runs, then for the network, then for the row."""
        return {**self.plan.settings, **self.network.settings, **self.row.settings}

    @property
    def config(self) -> Config:
        """All its settings."""
        config = Config.preset(self.row.preset or "recommended", self.row.method)
        return config.override({**self.changes, "seed": self.seed})

    @property
    def epochs(self) -> float:
        """Of training, which is what takes its time."""
        config = self.config
        return (
            sum(stretch.epochs for stretch in methods.of(config).plan(config)) + config.finish.polish_epochs
        )

    @property
    def label(self) -> str:
        """The row's name in the table: the method's and, where it has such a setting, its bits."""
        if self.row.label is not None:
            return self.row.label
        config = self.config
        bits = f", {config.quantiser.bits} bit" if config.method in _WITH_BITS else ""
        return _paper_name(config) + bits

    @property
    def paper_line(self) -> paper.PaperLine | None:
        """The paper's figures that stand beside it, where there are any."""
        if self.network.paper is None or self.row.paper == "off":
            return None
        return paper.line(self.network.paper, self.row.paper or _paper_name(self.config))

    @property
    def name(self) -> str:
        """``network_row_seedN``, as files are named."""
        return f"{_slug(self.network.name)}_{_slug(self.label)}_seed{self.seed}"

    @property
    def place(self) -> Path:
        """Its folder, below that of the table."""
        return Path(_slug(self.network.name), _slug(self.label), f"seed{self.seed}")

    def __str__(self) -> str:
        return f"{self.network.name}, {self.label}, seed {self.seed}"

    def arguments(self, out: Path, device: str | None) -> list[str]:
        """The arguments of ``pwfn`` that do it, or go on with it."""
        words = ["compress", "--model", self.network.name, "--weights", self.network.weights]
        words += ["--data", self.plan.data, "--out", str(out / self.place), "--method", self.row.method]
        words += ["--seed", str(self.seed), "--batch-size", str(self.plan.batch_size), "--resume", "--json"]
        words += ["--preset", self.row.preset] if self.row.preset else []
        words += ["--device", device] if device else []
        words += ["--holdout", str(self.plan.holdout)] if self.plan.holdout else []
        for name, value in self.changes.items():
            # Of the values that settings have, JSON is written as TOML is.
            words += ["--set", f"{name}={json.dumps(value, ensure_ascii=False)}"]
        return words


def load(path: str | Path) -> Plan:
    """Read a table's description; a mistake in it is named with its place, before anything runs."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:  # ValueError: not UTF-8, or not a path at all
        raise ConfigError(f"{path}: cannot read the table's description: {error}") from None
    try:
        return read(text)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def read(text: str) -> Plan:
    """A table's description from TOML.

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
    given = {name: tables.pop(name, []) for name in ("model", "row")}
    plan = _made(Plan, tables, tuple(given))
    blocks = {name: _blocks(name, value) for name, value in given.items()}
    networks = [_placed(f"model {i}", Network, block) for i, block in enumerate(blocks["model"], 1)]
    rows = [_placed(f"row {i}", Row, block) for i, block in enumerate(blocks["row"], 1)]
    plan = replace(plan, models=tuple(networks), rows=tuple(rows))
    _check(plan)
    return plan


def _blocks(name: str, value: Any) -> list[Mapping[str, Any]]:
    if not isinstance(value, list) or not all(_is_table(item) for item in value):
        raise ConfigError(f"{name} is {value!r}: allowed are blocks that begin with [[{name}]]")
    if not value:
        raise ConfigError(f"there is no {name}: add a block that begins with [[{name}]]")
    return value


_Kind = TypeVar("_Kind", Plan, Network, Row)


def _made(kind: type[_Kind], table: Mapping[str, Any], others: tuple[str, ...] = ()) -> _Kind:
    """A section from its table: only what it declares, and all that it must have."""
    declared = _declared(kind)
    names: list[str] = [item.name for item in declared]
    for key in table:
        if key not in names:
            raise ConfigError(f"{key!r} is unknown{hint(key, (*names, *others))}")
    for item in declared:
        needed = item.default is dataclasses.MISSING and item.default_factory is dataclasses.MISSING
        if needed and item.name not in table:
            raise ConfigError(f"{item.name} is missing: say {item.name} = …")
    return kind(**table)


def _placed(where: str, kind: type[_Kind], table: Mapping[str, Any]) -> _Kind:
    try:
        return _made(kind, table)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None


def _check(plan: Plan) -> None:
    """What needs more than one value to be seen."""
    names = [network.name for network in plan.models]
    for number, network in enumerate(plan.models, 1):
        _within(f"model {number}", _check_network, network, names[: number - 1])
    for number, row in enumerate(plan.rows, 1):
        _within(f"row {number}", _check_row, plan, row, names)
    seen: dict[Path, Run] = {}
    for run in plan.runs():
        other = seen.setdefault(run.place, run)
        if other is not run:
            raise ConfigError(f"{run} is there twice: give one of the two rows a label of its own")


def _within(where: str, check: Any, *arguments: Any) -> None:
    try:
        check(*arguments)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None


def _check_network(network: Network, earlier: list[str]) -> None:
    if _slug(network.name) in map(_slug, earlier):
        raise ConfigError(f"{network.name!r} is there already: name each network once")
    if network.paper is not None:
        paper.check_network(network.paper)


def _check_row(plan: Plan, row: Row, names: list[str]) -> None:
    if row.method not in list(MethodName):
        raise ConfigError(f"method {row.method!r} is unknown{hint(row.method, list(MethodName))}")
    for name in row.models or ():
        if name not in names:
            raise ConfigError(f"models has {name!r}, no network of this table{hint(name, names)}")
    if row.paper is not None and row.paper != "off":
        paper.check_method(row.paper)
    if row.label is not None and not _slug(row.label):
        raise ConfigError(f"label is {row.label!r}: allowed is text with a letter or digit, to name files by")
    for run in plan.runs():
        if run.row is not row:
            continue
        for name in run.changes:
            if "." not in name:
                place = ": it is a row's own, and stands before [row.settings]" if hasattr(row, name) else ""
                raise ConfigError(f"setting {name!r} is not of the form section.name{place}")
        _ = run.config  # checks every setting


def _paper_name(config: Config) -> str:
    is_uninformed = config.method is MethodName.PWFN and config.posterior.init is SigmaInit.CONSTANT
    return NO_PRIOR if is_uninformed else PAPER_NAMES[config.method]


def _is_table(value: Any) -> bool:
    return isinstance(value, Mapping)


def _slug(text: str) -> str:
    """Letters, digits and underscores, for names of files.

    >>> _slug("LSQ+, 4 bit"), _slug("PWFN (no prior)")
    ('lsq_plus_4_bit', 'pwfn_no_prior')
    """
    return re.sub(r"[^a-z0-9]+", "_", text.lower().replace("+", " plus ")).strip("_")
