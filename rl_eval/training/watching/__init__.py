"""Evaluation of the checkpoints of a training run as they appear: ``rl-eval watch``.

``checkpoints`` finds and copies checkpoints, ``journal`` records the outcome of each checkpoint, ``curve`` makes the
contents of the files for users, and ``watcher`` is the loop.
"""

from rl_eval.training.watching.watcher import Watcher, WatchOptions

__all__ = ["WatchOptions", "Watcher"]
