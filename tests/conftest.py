"""Settings that must hold before torch or Ray are imported by any test, and what every test starts from."""

import os
import tempfile

import pytest

from rl_eval.numerics import reproducible_environment

# The in-process backend is compared with runners, which start with these variables.
os.environ.update(reproducible_environment())
os.environ["RAY_AUTH_MODE"] = "disabled"
os.environ["RAY_ENABLE_UV_RUN_RUNTIME_ENV"] = "0"
# Nothing of the user who runs the tests is touched; child processes inherit it.
_STATE = tempfile.TemporaryDirectory(prefix="rl_eval-state-")
os.environ["XDG_STATE_HOME"] = _STATE.name


@pytest.fixture(autouse=True)
def _same_initial_weights() -> None:
    """Modules that a test makes are the same in every run, as pytest-randomly sees to for other generators."""
    import torch

    torch.manual_seed(0)
