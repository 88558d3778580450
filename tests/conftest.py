"""What several test files share."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
from torch import nn

from pwfn import cli
from pwfn.bayes.method import DataProbe

Call = Callable[..., tuple[int, str, str]]


def look_with(through: Callable[[nn.Module], object]) -> DataProbe:
    """For methods that ask, as they begin, for no more than to put a batch through a module."""

    def unasked(*_: object) -> Any:
        raise AssertionError("nobody should ask")

    return DataProbe(through, loss=unasked)


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
