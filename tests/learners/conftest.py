"""Test setup for the learners: their helper modules, and those of the integrations, can be imported."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "integrations"))


@pytest.fixture(autouse=True)
def full_precision() -> None:
    """Restore the precision that rl_games changes for its whole process."""
    if "torch" in sys.modules:
        sys.modules["torch"].set_float32_matmul_precision("highest")
