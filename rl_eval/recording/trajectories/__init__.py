"""Trajectories: what an episode was made of, step by step, as arrays, tensordicts and data sets.

Recorded by an observer where the episode runs. Imported by ``execution/``, which samples them, and the command line.
"""

from __future__ import annotations

from rl_eval.recording.trajectories.batch import Fragment, as_arrays, as_tensordict
from rl_eval.recording.trajectories.recorder import TrajectoryRecorder
from rl_eval.recording.trajectories.trajectory import Trajectory

__all__ = ["Fragment", "Trajectory", "TrajectoryRecorder", "as_arrays", "as_tensordict"]
