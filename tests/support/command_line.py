"""The command line, run in this process: exit code and what was printed."""

import json
from dataclasses import dataclass
from typing import Any

import pytest

from flows import cli


@dataclass(frozen=True)
class Outcome:
    """How a command ended."""

    code: int
    out: str
    err: str

    @property
    def data(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.out)
        return found


def shardline(capsys: pytest.CaptureFixture[str], *words: object) -> Outcome:
    """Run one command. Nothing it prints may look like a traceback."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        cli.main([str(word) for word in words])
    captured = capsys.readouterr()
    assert "Traceback" not in captured.err + captured.out
    code = ended.value.code
    return Outcome(code if isinstance(code, int) else 1, captured.out, captured.err)
