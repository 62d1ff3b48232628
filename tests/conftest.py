"""Settings that must hold before torch or Ray are imported by any test."""

import os

from rl_eval.numerics import reproducible_environment

# The in-process backend is compared with runners, which start with these variables.
os.environ.update(reproducible_environment())
os.environ["RAY_AUTH_MODE"] = "disabled"
os.environ["RAY_ENABLE_UV_RUN_RUNTIME_ENV"] = "0"
