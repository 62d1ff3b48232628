"""What docs/report.md shows runs: its commands and its Python, one after the other."""

from __future__ import annotations

from pathlib import Path

from tests.unit.pages_world import Reader, pages


def test_the_examples_run(reader: Reader) -> None:
    """And what Python writes is what the command wrote."""
    [page] = pages("tests/unit/test_report_docs.py")
    reader.follow(page)
    assert Path("again.html").read_bytes() == Path("random.html").read_bytes()
