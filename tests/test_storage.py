"""Files are written completely or not at all: the old file survives every failure, and nothing is left."""

from __future__ import annotations

import errno
import os
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from malformed import case
from safetensors import SafetensorError

from pwfn import FileError
from pwfn.file.format import load
from pwfn.file.storage import replacing

OLD = b"what was there before"


def fails(target: Path, message: str) -> None:
    """Saving fails in one sentence; the old file and its folder are unchanged."""
    before = target.read_bytes() if target.is_file() else None
    beside = sorted(os.listdir(target.parent)) if target.parent.is_dir() else []
    with pytest.raises(FileError, match=message) as caught:
        case("centre")[0].save(target)
    assert str(caught.value).startswith(f"{target}: ")
    assert "\n" not in str(caught.value)
    assert (target.read_bytes() if target.is_file() else None) == before
    assert (sorted(os.listdir(target.parent)) if target.parent.is_dir() else []) == beside


@pytest.fixture
def target(tmp_path: Path) -> Path:
    path = tmp_path / "net.pwfn"
    path.write_bytes(OLD)
    return path


@pytest.mark.parametrize("old", [True, False])
@pytest.mark.parametrize(
    ("function", "code", "message"),
    [
        ("write", errno.ENOSPC, "cannot be written: No space left on device"),
        ("write", errno.EDQUOT, "cannot be written: Disk quota exceeded"),
        ("fsync", errno.EIO, "cannot be written: Input/output error"),
        ("replace", errno.EACCES, "cannot be written: Permission denied"),
        ("mkstemp", errno.EROFS, "cannot be written: Read-only file system"),
    ],
)
def test_errors_of_the_system(
    function: str, code: int, message: str, old: bool, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any, **kwargs: Any) -> Any:
        raise OSError(code, os.strerror(code))

    def half(self: Path, data: bytes) -> int:
        with self.open("wb") as file:
            file.write(data[: len(data) // 2])
        return int(fail())

    if not old:
        target.unlink()
    place: tuple[Any, str, Callable[..., Any]] = {
        "write": (Path, "write_bytes", half),
        "fsync": (os, "fsync", fail),
        "replace": (Path, "replace", fail),
        "mkstemp": (tempfile, "mkstemp", fail),
    }[function]
    monkeypatch.setattr(*place)
    fails(target, message + ("; the old file is unchanged" if old else "$"))


LIMITED = """
import resource, signal, sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from malformed import case
from pwfn import FileError
network = case("very_many_values")[0]
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
try:
    network.save(sys.argv[1])
except FileError as error:
    print(error)
"""


def test_a_disk_that_is_truly_full(target: Path) -> None:
    """The system itself refuses the write after 4 KiB."""
    command = [sys.executable, "-c", LIMITED, str(target), str(Path(__file__).parent)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == (f"{target}: cannot be written: File too large; the old file is unchanged\n")
    assert target.read_bytes() == OLD
    assert os.listdir(target.parent) == ["net.pwfn"]


def test_read_only_file(target: Path) -> None:
    """Renaming would not need its permission, so it is asked for; this holds for root too."""
    target.chmod(0o444)
    fails(target, "is read-only: make it writable")


@pytest.fixture
def as_nobody() -> Iterator[Path]:
    """A folder that an ordinary user reaches, and the process as such a user for whom modes count."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        (Path(folder) / "in").mkdir()
        (Path(folder) / "in" / "net.pwfn").write_bytes(OLD)
        case("centre")
        user = os.geteuid()
        if user == 0:
            os.seteuid(65534)
        try:
            yield Path(folder) / "in"
        finally:
            os.seteuid(user)
            (Path(folder) / "in").chmod(0o755)


def test_read_only_folder(as_nobody: Path) -> None:
    if os.geteuid() == as_nobody.stat().st_uid:
        as_nobody.chmod(0o555)
    kept = "the old file is unchanged"
    fails(as_nobody / "net.pwfn", f"cannot be written: Permission denied; {kept}")
    fails(as_nobody / "new.pwfn", "cannot be written: Permission denied$")


def test_targets_that_cannot_be_written(tmp_path: Path, target: Path) -> None:
    fails(tmp_path / "none" / "net.pwfn", "cannot be written: No such file or directory$")
    assert not (tmp_path / "none").exists()
    fails(target / "net.pwfn", "cannot be written: Not a directory")
    (tmp_path / "folder").mkdir()
    fails(tmp_path / "folder", "is a folder: name a file in it")


def test_target_is_a_device_or_pipe(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path(os.devnull)):
        mode = path.stat().st_mode
        with pytest.raises(FileError, match="is not a regular file"), replacing(path):
            pass
        assert path.stat().st_mode == mode
    assert os.listdir(tmp_path) == ["pipe"]


def test_a_link_stays_a_link(tmp_path: Path, target: Path) -> None:
    link = tmp_path / "link.pwfn"
    link.symlink_to(target)
    case("centre")[0].save(link)
    assert link.is_symlink()
    assert target.read_bytes() == case("centre")[1]
    load(link)


def test_modes(tmp_path: Path, target: Path) -> None:
    """A new file has the mode any new file has; an old one keeps its own."""
    plain = tmp_path / "plain"
    plain.write_bytes(b"")
    case("centre")[0].save(tmp_path / "new.pwfn")
    assert stat.S_IMODE((tmp_path / "new.pwfn").stat().st_mode) == stat.S_IMODE(plain.stat().st_mode)
    target.chmod(0o600)
    case("centre")[0].save(target)
    assert stat.S_IMODE(target.stat().st_mode) == 0o600


def test_long_names(tmp_path: Path) -> None:
    path = tmp_path / ("ü" * 120 + ".pwfn")
    assert case("centre")[0].save(path) == len(path.read_bytes())
    assert os.listdir(tmp_path) == [path.name]


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_other_errors_pass_through_and_leave_nothing(error: type[BaseException], target: Path) -> None:
    def interrupted() -> None:
        with replacing(target) as temporary:
            temporary.write_bytes(b"half")
            raise error

    with pytest.raises(error):
        interrupted()
    assert target.read_bytes() == OLD
    assert os.listdir(target.parent) == ["net.pwfn"]


def test_an_error_of_safetensors_is_one_of_writing(tmp_path: Path) -> None:
    target = tmp_path / "weights.safetensors"
    with (
        pytest.raises(FileError, match=r"weights.safetensors: cannot be written: I/O error"),
        replacing(target),
    ):
        raise SafetensorError("I/O error: No space left on device (os error 28)")
    assert not list(tmp_path.iterdir())
