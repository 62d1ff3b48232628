"""Test setup for the learners: their helper modules can be imported."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
