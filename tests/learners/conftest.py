"""Test setup for the learners: their helper modules, and those of the integrations, can be imported."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "integrations"))
