# ruff: noqa: INP001 - a script, and no part of a package.
"""What ``ray submit`` runs on the head node: rl-eval, in the project that the cluster's ``file_mounts`` put there.

ray submit configs/cluster/loopback.yaml configs/cluster/on_head.py -- run configs/cartpole.yaml --output runs/a
"""

import os
import sys
from pathlib import Path

PROJECT = Path.home() / "rl_eval_project"

os.chdir(PROJECT)
# The project's modules, and rl_eval itself if it is a checkout of it; Ray hands the current folder on to its workers.
sys.path[0] = str(PROJECT)
os.environ.setdefault("RAY_ADDRESS", "auto")

from rl_eval.__main__ import main  # noqa: E402 - found in the project.

main()
