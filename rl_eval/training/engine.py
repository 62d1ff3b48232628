"""Places where the requests of an evaluator are evaluated: a group of its own here, or a service."""

from __future__ import annotations

from contextlib import suppress
from typing import Any, Literal, Protocol, final, get_args

from rl_eval.config.builder import EvalConfig, settings_of
from rl_eval.config.settings import EvalSettings, make_settings
from rl_eval.errors import ConfigError, nearest
from rl_eval.execution.group import EvalRunnerGroup
from rl_eval.execution.handle import EvalHandle
from rl_eval.execution.jobs import FollowUp
from rl_eval.weights import HeldWeights

__all__ = ["Backend", "Engine", "GroupEngine", "with_backend"]

Backend = Literal["inline", "thread", "ray"]


class Engine(Protocol):
    """Queue of evaluations that run in the order in which they were submitted."""

    def submit(
        self, *, weights: Any, version: int | None, step: int, follow_up: FollowUp | None, held: HeldWeights
    ) -> EvalHandle:
        """Start an evaluation, or queue it.

        Args:
            weights: What to evaluate; None for what was evaluated last.
            version: Number of the weights; at a service the least that they may get.
            step: Training step.
            follow_up: What follows.
            held: Gets the weights.
        """

    def acknowledge(self, handle: EvalHandle) -> None:
        """Note that a result was delivered."""

    def stop(self) -> None:
        """End it; bounded."""


@final
class GroupEngine:
    """Runners of one evaluator alone."""

    def __init__(self, settings: EvalSettings, policy: Any, backend: Backend) -> None:
        self._group = EvalRunnerGroup(settings, policy, threaded=backend != "inline")
        if backend == "thread":
            # A factory may draw from the global generators, which are set back behind it: not while training draws.
            with suppress(Exception):  # The first evaluation raises it.
                self._group.apply_to_one(lambda _: None)

    def submit(
        self, *, weights: Any, version: int | None, step: int, follow_up: FollowUp | None, held: HeldWeights
    ) -> EvalHandle:
        """See :class:`Engine`."""
        handle = self._group.submit(weights=weights, version=version, follow_up=follow_up, held=held)
        handle.step = step
        return handle

    def acknowledge(self, handle: EvalHandle) -> None:
        """See :class:`Engine`."""

    def stop(self) -> None:
        """See :class:`Engine`."""
        self._group.stop()


def with_backend(config: EvalConfig | EvalSettings, backend: Backend | None) -> tuple[EvalSettings, Backend]:
    """Bring the backend and the number of runners together."""
    if backend is not None and backend not in get_args(Backend):
        raise ConfigError(f"backend is {backend!r}: {nearest(str(backend), get_args(Backend))}")
    if isinstance(config, EvalConfig):
        values = config.to_dict()
    else:
        values = {name: dict(section) for name, section in settings_of(config)}
    runners = values.setdefault("runners", {})
    if backend == "ray" and runners.get("num_runners", 0) == 0:
        runners["num_runners"] = 1
    settings = make_settings(values)
    count = settings.runners.num_runners
    if count and backend in ("inline", "thread"):
        raise ConfigError(
            f"backend is {backend!r}, but runners.num_runners is {count}: use backend='ray', or runners.num_runners=0"
        )
    return settings, backend or ("ray" if count else "thread")
