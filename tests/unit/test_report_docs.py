"""What docs/report.md shows runs: its commands and its Python, one after the other."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from tests.unit.cli_world import call

PAGE = Path(__file__).parents[2] / "docs" / "report.md"


def test_the_examples_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And what Python writes is what the command wrote."""
    monkeypatch.chdir(tmp_path)
    [shell] = re.findall(r"^```sh\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    for line in shell.splitlines():
        outcome = call(*shlex.split(line)[1:])
        assert outcome.exit_code == 0, outcome.output
    [block] = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    exec(block, {})
    assert Path("again.html").read_bytes() == Path("random.html").read_bytes()
