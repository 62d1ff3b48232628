"""Runners in this process, one call at a time: the reference backend, which is also useful with a debugger."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, final

from typing_extensions import override

from rl_eval.backends import Backend, Call, Reply
from rl_eval.backends.pickling import in_this_process
from rl_eval.backends.requests import Request, Run, RunnerRequest, Start, answer
from rl_eval.config.settings import EvalSettings
from rl_eval.errors import EvalError, RunnerLost, summary_of
from rl_eval.runners import Runner, class_of
from rl_eval.supervision.caller import current_folder, end_fork, one_thread, survivable, working_in
from rl_eval.supervision.flight_recorder import remove_abandoned
from rl_eval.weights import WeightsSnapshot


@final
class InlineBackend(Backend):
    """Backend that runs calls in the thread that waits for them.

    A runner gets a copy of the policy, if it can be copied. So the caller's object keeps its mode, its weights and its
    random state. Calls compute with one torch thread.

    Args:
        settings: Frozen configuration.
        policy: Policy object; None for the configured policy.
        threaded: Whether calls run in a thread other than the caller's. If not, runners have a separate working
            directory, so an environment cannot change the caller's working directory. If so, runners and caller share
            the working directory, as all threads of a process do.
    """

    def __init__(self, settings: EvalSettings, policy: Any, *, threaded: bool) -> None:
        remove_abandoned()
        self.payload = self.pack(settings, policy)
        self.on_death = lambda _: None  # There is no cluster.
        self._runners: dict[int, Runner] = {}
        self._calls: deque[Call] = deque()
        self._threaded = threaded
        self._folder: str | None = None
        """Working directory to which an environment changed; None if no environment changed it."""

    @override
    def pack(self, settings: EvalSettings, policy: Any) -> tuple[EvalSettings, Callable[[Any], Any]]:
        return settings, in_this_process(policy)

    @override
    def spawn(self, runner: int, index: int, weights: Any) -> None:
        self._calls.append(Call(runner, Start(index, weights), 0))

    @override
    def call(self, runner: int, request: RunnerRequest, tag: int = 0) -> None:
        if isinstance(request, Run) and request.abort:
            self._calls = deque(_given_back(call) if call.runner == runner else call for call in self._calls)
        self._calls.append(Call(runner, request, tag))

    @override
    def publish(self, weights: WeightsSnapshot) -> tuple[Any, WeightsSnapshot]:
        return weights, weights

    @override
    def wait(self, timeout_s: float) -> list[Reply]:
        if not self._calls:
            return []
        call = self._calls.popleft()
        try:
            if isinstance(call.request, Start):
                self._end(call.runner)
            # The calling loop already computes with one thread, unless torch was loaded after the loop had started.
            with self._in_their_folder(), one_thread(kept=self._threaded):
                return [Reply(call, self._answer(call.runner, call.request))]
        except survivable() as error:
            return [Reply(call, error=error if isinstance(error, Exception) else EvalError(summary_of(error)))]
        finally:
            end_fork()

    @property
    @override
    def busy(self) -> bool:
        return bool(self._calls)

    @override
    def kill(self, runner: int) -> None:
        self._calls = deque(call for call in self._calls if call.runner != runner)
        self._end(runner)

    @override
    def terminate(self, runner: int, why: RunnerLost) -> None:
        self.kill(runner)

    @override
    def shortage(self) -> str:
        return "the environment or the policy takes that long to build in this process"

    @override
    def capacity(self) -> int | None:
        return None

    @override
    def starting(self, runners: Sequence[int]) -> str:
        return "building environment and policy"

    def stop(self) -> None:
        """Do nothing, because :meth:`leave` closes the environments in the thread that stepped them."""

    @override
    def leave(self) -> None:
        for runner in list(self._runners):
            self.kill(runner)
        self._calls.clear()

    def _end(self, runner: int) -> None:
        """Stop a runner, if there is one. The next runner begins in the caller's working directory."""
        if ended := self._runners.pop(runner, None):
            with self._in_their_folder():
                ended.stop()
            self._folder = None

    @contextmanager
    def _in_their_folder(self) -> Iterator[None]:
        """Change to the runners' working directory, and back to the caller's at the end."""
        if self._threaded:
            yield
            return
        with working_in(self._folder):
            begun = current_folder()
            try:
                yield
            finally:
                if (ended := current_folder()) != begun:
                    self._folder = ended

    def _answer(self, runner: int, request: Request) -> Any:
        match request:
            case Start(index, weights):
                settings, policy_with = self.payload
                self._runners[runner] = class_of(settings)(settings, index, policy_with(weights))
                return None
            case _:
                return answer(self._runners[runner], request)


def _given_back(call: Call) -> Call:
    """Return a queued call, changed because of an abort: a ``Run`` runs nothing and gives its episodes back."""
    run = call.request
    if not isinstance(run, Run):
        return call
    reclaim = (*run.reclaim, *(lease.index for lease in run.leases))
    return replace(call, request=replace(run, budget_s=0.0, reclaim=reclaim, abort=True))
