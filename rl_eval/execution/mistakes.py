"""Mistakes of a call that make every attempt of every episode fail, so that its result is an error.

An exception that the environment itself raises is never such a mistake, because it may depend on the episode.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from rl_eval.errors import EnvError, EpisodeError, PolicyError
from rl_eval.execution.session import kind_of
from rl_eval.results.result import EvalResult

_CONTRACT: Final = EnvError.__name__
"""Type of a fault for a value that breaks Gymnasium's contract."""
_LONGEST: Final = 200
"""Maximum length of the text of a space."""


def mistake_in(result: EvalResult, spaces: Callable[[], tuple[Any, Any]]) -> EpisodeError | None:
    """Return an error if every attempt failed alike before its first step was complete; otherwise None.

    The error has the result as its attribute ``result``.

    Args:
        result: Result of the evaluation.
        spaces: Returns observation space and action space. It is called only if there is an error.
    """
    faults = [fault for fault in result.faults if fault.charged]
    if not faults or result.table.completed.any():
        return None
    first = faults[0]
    of_policy, of_contract = first.cause == "policy", first.cause == "env" and first.error_type == _CONTRACT
    # A step whose return value is invalid has no successor, but it was counted.
    steps = max(fault.step for fault in faults) - (first.phase == "step" and of_contract)
    if len({kind_of(fault) for fault in faults}) > 1 or steps > 0 or not (of_policy or of_contract):
        return None
    is_ours = first.error_type in (_CONTRACT, PolicyError.__name__)
    text = first.message if is_ours else f"{first.error_type}: {first.message}"
    problem = f"all {len(faults)} attempts failed in {first.phase}: {text}"
    error: EpisodeError = EnvError(problem, key="environment", fix=f"Correct {first.phase}() of the environment.")
    if of_policy:
        observations, actions = (" ".join(str(space).split())[:_LONGEST] for space in spaces())
        fix = f"Pass a policy that takes a batch of observations of {observations}, and returns actions of {actions}."
        error = PolicyError(problem, key="policy", fix=fix)
    error.result = result
    return error
