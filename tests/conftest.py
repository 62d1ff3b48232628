"""Settings that must hold before torch or Ray are imported by any test, and what every test starts from."""

import os

import pytest

from rl_eval.numerics import reproducible_environment

# The in-process backend is compared with runners, which start with these variables.
os.environ.update(reproducible_environment())
os.environ["RAY_AUTH_MODE"] = "disabled"
os.environ["RAY_ENABLE_UV_RUN_RUNTIME_ENV"] = "0"


@pytest.fixture(autouse=True)
def _same_initial_weights() -> None:
    """Modules that a test makes are the same in every run, as pytest-randomly sees to for other generators."""
    import torch

    torch.manual_seed(0)
