"""A run's progress on disk: written whole, checked when it is read, two of them kept.

A checkpoint file is ``PWFNCKP4``, the SHA-256 of what follows, and a torch archive of plain values
and tensors that is read with ``weights_only``: nothing in it is ever run.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch

from pwfn.evaluate.score import Scores
from pwfn.bayes.train import Fitting
from pwfn.errors import FileError
from pwfn.evaluate.entropy import Pool
from pwfn.evaluate.targets import Choice, State
from pwfn.evaluate.trace import Trace
from pwfn.file.storage import make_folder, replacing
from pwfn.fixing.record import FixRecord, FixStep, Move
from pwfn.progress import Progress, Round

_MAGIC = b"PWFNCKP4"
_KEPT = 2


@dataclass(frozen=True)
class Store:
    """The checkpoints of one run: ``checkpoint-000001.pt``, … in a folder of their own."""

    folder: Path
    identity: Mapping[str, Any]  # what a run must have in common with the one it goes on from

    def save(self, progress: Progress) -> Path:
        """Write the next checkpoint, and remove all but the newest two."""
        make_folder(self.folder)
        known = self.paths()
        number = int(known[-1].stem.rpartition("-")[2]) + 1 if known else 1
        path = self.folder / f"checkpoint-{number:06d}.pt"
        buffer = io.BytesIO()
        torch.save({"identity": dict(self.identity), "progress": to_plain(progress)}, buffer)
        content = buffer.getbuffer()  # not copied: it may be gigabytes
        with replacing(path) as temporary, temporary.open("wb") as file:
            file.writelines((_MAGIC, hashlib.sha256(content).digest(), content))
        for old in known[: 1 - _KEPT]:
            old.unlink(missing_ok=True)
        return path

    def newest(self) -> Progress | None:
        """The newest sound checkpoint; None if there is none.

        One that is torn or damaged is passed over for the one before it. A sound one of another
        run is an error that says in what the two differ.
        """
        for path in reversed(self.paths()):
            found = _read(path)
            if found is not None:
                self._check_identity(path, found["identity"])
                return from_plain(found["progress"])
        return None

    def paths(self) -> list[Path]:
        """The files, oldest first."""
        return sorted(self.folder.glob("checkpoint-[0-9]*.pt"))

    def _check_identity(self, path: Path, theirs: Mapping[str, Any]) -> None:
        differing = list(_differences(theirs, self.identity))
        if differing:
            raise FileError(
                f"{path}: is of another run, whose {'; '.join(differing[:5])}: start in another folder, or "
                "with the settings of that run"
            )


def _read(path: Path) -> dict[str, Any] | None:
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise FileError(f"{path}: cannot be read: {error.strerror}") from error
    head = len(_MAGIC) + hashlib.sha256().digest_size
    content = raw[head:]
    if raw[: len(_MAGIC)] != _MAGIC or hashlib.sha256(content).digest() != raw[len(_MAGIC) : head]:
        return None
    found: dict[str, Any] = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    return found


def _differences(theirs: Any, ours: Any, where: str = "") -> Iterator[str]:
    """What differs between two nested mappings, as sentences' ends."""
    if isinstance(theirs, Mapping) and isinstance(ours, Mapping):
        for key in sorted(theirs.keys() | ours.keys()):
            yield from _differences(theirs.get(key), ours.get(key), f"{where}.{key}" if where else str(key))
    elif theirs != ours:
        yield f"{where} is {theirs!r}, not {ours!r}"


def to_plain(progress: Progress) -> dict[str, Any]:
    """Plain values and tensors only."""
    fitting = progress.fitting
    return {
        "rounds": [_plain_round(done) for done in progress.rounds],
        "states": [_plain_state(state) for state in progress.states],
        "choice": asdict(progress.choice) if progress.choice else None,
        "before": asdict(progress.before) if progress.before else None,
        "state": progress.state,
        "finished": progress.finished,
        "batches": progress.batches,
        "random": progress.random,
        "fitting": [getattr(fitting, field.name) for field in fields(Fitting)] if fitting else None,
        "seconds": progress.seconds,
        "optimizer": progress.optimizer,
        "start": progress.start.to_plain() if progress.start else None,
    }


def from_plain(plain: Mapping[str, Any]) -> Progress:
    """What ``to_plain`` was given."""
    return Progress(
        rounds=[_round(done) for done in plain["rounds"]],
        states=[_state(state) for state in plain["states"]],
        choice=Choice(**plain["choice"]) if plain["choice"] else None,
        before=Scores(**plain["before"]) if plain["before"] else None,
        state=plain["state"],
        finished=plain["finished"],
        batches=plain["batches"],
        random=plain["random"],
        fitting=Fitting(*plain["fitting"]) if plain["fitting"] else None,
        seconds=plain["seconds"],
        optimizer=plain["optimizer"],
        start=Trace.of_plain(plain["start"]) if plain["start"] else None,
    )


def _plain_round(done: Round) -> dict[str, Any]:
    # asdict leaves named tuples as they are, and those are classes of ours.
    fix = {
        "fraction": done.fix.fraction,
        "fixed": done.fix.fixed,
        "steps": [tuple(step) for step in done.fix.steps],
        "moves": [tuple(move) for move in done.fix.moves],
    }
    observed = [seen.to_plain() for seen in done.observed]
    return {**asdict(replace(done, observed=())), "fix": fix, "observed": observed}


def _round(plain: Mapping[str, Any]) -> Round:
    fix = plain["fix"]
    record = FixRecord(
        fix["fraction"],
        fix["fixed"],
        tuple(FixStep(*step) for step in fix["steps"]),
        tuple(Move(*move) for move in fix["moves"]),
    )
    scores = Scores(**plain["scores"]) if plain["scores"] else None
    quartiles = tuple(plain["sigma_quartiles"]) if plain["sigma_quartiles"] else None
    changed = {"fix": record, "fixed": Pool(**plain["fixed"]), "scores": scores, "sigma_quartiles": quartiles}
    observed = tuple(Trace.of_plain(seen) for seen in plain["observed"])
    return Round(**{**plain, **changed, "observed": observed})


def _plain_state(state: State) -> dict[str, Any]:
    # As a tensor: a weights-only load takes no bytes.
    content = torch.frombuffer(bytearray(state.content), dtype=torch.uint8)
    return {**asdict(state), "content": content}


def _state(plain: Mapping[str, Any]) -> State:
    scores = Scores(**plain["scores"]) if plain["scores"] else None
    return State(**{**plain, "scores": scores, "content": plain["content"].numpy().tobytes()})
