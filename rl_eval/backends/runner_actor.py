"""The thin shell around a runner in its own process.

This module is what an actor's process imports first, so it imports neither torch nor the runner: they come
with :meth:`RunnerActor.start`.
"""

from __future__ import annotations

from typing import Any

__all__ = ["RunnerActor"]


class RunnerActor:
    """Holds one runner and passes calls on.

    Args:
        payload: Pickled ``(settings, policy)``.
        runner_index: Position of the runner in its group.
    """

    def __init__(self, payload: bytes, runner_index: int) -> None:
        self._payload = payload
        self._runner_index = runner_index
        self._runner: Any = None

    def start(self) -> None:
        """Unpickle the user's code and build the runner."""
        import cloudpickle

        settings, policy = cloudpickle.loads(self._payload)
        self._payload = b""

        from rl_eval.runners import runner_class

        self._runner = runner_class(settings.runners.runner)(settings, self._runner_index, policy)

    def call(self, method: str, *args: Any) -> Any:
        """Call a method of the runner."""
        return getattr(self._runner, method)(*args)
