"""The numbered examples: short programs, each run as a script in an empty folder."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("[0-9]*.py"))
PRINTED = {
    "01_evaluate": "\n43.38 Interval(",
    "02_compare": "\nTrue\n",
    "03_environment": "__main__:Sign, ",
    "04_policy": "__main__:Sticky",
    "05_runner": "the same episodes: True",
    "06_logger": "\n300 ",
}
"""Part of the output of each example."""


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_is_short_and_runs(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert len(path.read_text().splitlines()) < 30
    runpy.run_path(str(path), run_name="__main__")
    assert PRINTED[path.stem] in capsys.readouterr().out


def test_the_examples_begin_with_the_plain_cases() -> None:
    assert [path.stem for path in EXAMPLES] == list(PRINTED)
