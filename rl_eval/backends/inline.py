"""Runners in this process, one call at a time: the reference, and the debugger's friend."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, final

import cloudpickle

from rl_eval.backends import Call, Reply, pickled
from rl_eval.backends.requests import Request, Run, RunnerRequest, Start, answer
from rl_eval.config.settings import EvalSettings
from rl_eval.errors import RunnerLost
from rl_eval.runners import Runner, runner_class
from rl_eval.runners.one_thread import one_thread

__all__ = ["InlineBackend"]


@final
class InlineBackend:
    """Runs calls in the thread that waits for them.

    The policy is copied through pickle, as it is on its way to an actor: the caller's object keeps its mode,
    its weights and its random state. Calls compute with one thread of torch.

    Args:
        settings: Frozen configuration.
        policy: Live policy; None for the configured one.
        own_thread: Whether calls are made in a thread of the group, and not in the caller's.
    """

    def __init__(self, settings: EvalSettings, policy: Any, own_thread: bool) -> None:
        self._settings = settings
        self._own_thread = own_thread
        self._policy = pickled(policy, "the policy")
        self._runners: dict[int, Runner] = {}
        self._calls: deque[Call] = deque()

    def spawn(self, runner: int, index: int) -> None:
        """See :class:`Backend`."""
        self._calls.append(Call(runner, Start(index), 0))

    def call(self, runner: int, request: RunnerRequest, tag: int = 0) -> None:
        """See :class:`Backend`."""
        if isinstance(request, Run) and request.abort:
            self._calls = deque(_given_back(call) if call.runner == runner else call for call in self._calls)
        self._calls.append(Call(runner, request, tag))

    def publish(self, value: Any) -> tuple[Any, Any]:
        """See :class:`Backend`."""
        return value, value

    def wait(self, timeout_s: float) -> list[Reply]:
        """See :class:`Backend`."""
        if not self._calls:
            return []
        call = self._calls.popleft()
        try:
            # The calling loop computes with one thread already, if torch was loaded when it began.
            with one_thread(kept=self._own_thread):
                return [Reply(call, self._answer(call.runner, call.request))]
        except Exception as error:
            return [Reply(call, error=error)]

    @property
    def busy(self) -> bool:
        """See :class:`Backend`."""
        return bool(self._calls)

    def kill(self, runner: int) -> None:
        """See :class:`Backend`."""
        self._calls = deque(call for call in self._calls if call.runner != runner)
        if killed := self._runners.pop(runner, None):
            killed.stop()

    def terminate(self, runner: int, why: RunnerLost) -> None:
        """See :class:`Backend`."""
        self.kill(runner)

    def shortage(self) -> str:
        """See :class:`Backend`."""
        return "the environment or the policy takes that long to build in this process"

    def capacity(self) -> int | None:
        """See :class:`Backend`."""
        return None

    def starting(self, runners: Sequence[int]) -> str:
        """See :class:`Backend`."""
        return "building environment and policy"

    def stop(self) -> None:
        """Do nothing: environments are closed where they were stepped, in :meth:`leave`."""

    def leave(self) -> None:
        """See :class:`Backend`."""
        for runner in list(self._runners):
            self.kill(runner)
        self._calls.clear()

    def _answer(self, runner: int, request: Request) -> Any:
        match request:
            case Start(index):
                cls = runner_class(self._settings.runners.runner)
                self._runners[runner] = cls(self._settings, index, cloudpickle.loads(self._policy))
                return None
            case _:
                return answer(self._runners[runner], request)


def _given_back(call: Call) -> Call:
    """Return a call that waits behind an abort: its episodes are handed back, and none is played for nothing."""
    run = call.request
    if not isinstance(run, Run):
        return call
    reclaim = (*run.reclaim, *(lease.index for lease in run.leases))
    return replace(call, request=replace(run, budget_s=0.0, reclaim=reclaim, abort=True))
