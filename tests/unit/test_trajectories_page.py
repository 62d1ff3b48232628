"""What docs/trajectories.md shows runs, and says the truth."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "trajectories.md"


def test_the_examples_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its Python blocks run one after the other, but for the import line of the integration."""
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    ours = [block for block in blocks if "integrations" not in block]
    assert len(ours) == len(blocks) - 1 == 4
    exec("\n".join(ours), {})
