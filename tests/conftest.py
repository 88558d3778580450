"""What several test files share."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest

import pwfn.lab  # noqa: F401 - the baselines are known by name in every test
from pwfn import cli

Call = Callable[..., tuple[int, str, str]]


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Call:
    """The command in this process, which is quicker: its status, and what it prints and complains of."""

    def called(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["pwfn", *arguments])
        with pytest.raises(SystemExit) as caught:
            cli.main()
        out, err = capsys.readouterr()
        return int(caught.value.code or 0), out, err

    return called
