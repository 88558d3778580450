"""What several test files share."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest
from torch import Tensor, nn

from pwfn import cli

Call = Callable[..., tuple[int, str, str]]


def no_fisher(parameter: nn.Parameter, count: int) -> Tensor:
    """For methods that do not ask for the curvature of the loss as they begin."""
    raise AssertionError("nobody should ask")


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
