"""Evaluating the checkpoints of a training run as they appear: ``rl-eval watch``.

``checkpoints`` says what a checkpoint is and when it is whole, ``journal`` what has become of each, ``curve`` how that
is shown, and ``watcher`` what is done next. See ``docs/watch.md``.
"""

from rl_eval.watching.watcher import Watcher, WatchOptions

__all__ = ["WatchOptions", "Watcher"]
