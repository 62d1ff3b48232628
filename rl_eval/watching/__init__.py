"""Evaluating the checkpoints of a training run as they appear: ``rl-eval watch``.

``checkpoints`` finds and copies them, ``journal`` holds the result of each, ``curve`` writes table and picture,
``best`` keeps the best one, and ``watcher`` is the loop. See ``docs/watch.md``.
"""

from rl_eval.watching.watcher import Watcher, WatchOptions

__all__ = ["WatchOptions", "Watcher"]
