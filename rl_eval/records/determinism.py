"""Determinism check: traces of episodes that run twice, their first difference, and the finding."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, NamedTuple, final

import numpy as np
import numpy.typing as npt
import tree
import xxhash
from pydantic import Field

from rl_eval.errors import EvalError, listed

if TYPE_CHECKING:
    from rl_eval.records.episode import RunReport

DETERMINISM: Final = "determinism"
"""Key of the determinism check in :attr:`rl_eval.records.episode.RunReport.extra`."""
Cause = Literal["environment", "policy", ""]
Remedy = Literal["", "episode", "process", "conditions"]

_Count = Annotated[int, Field(ge=0, lt=2**31)]


class FirstDifference(NamedTuple):
    """Place where an episode first differed from its record."""

    episode: int
    """Index of the episode."""
    step: int
    """Number of the step, from 1. 0 is the reset. -1 means that the step is unknown: only the values of the record,
    such as the return, show the difference."""
    what: str
    """Name of the value that differs, such as ``reward``."""
    cause: Cause
    """``policy`` if the same observations led to another action, otherwise ``environment``; empty if unknown."""

    def __str__(self) -> str:
        if self.step < 0:
            return f"the {self.what} of episode {self.episode}"
        where = f"step {self.step}" if self.step else "the reset"
        return f"the {self.what} of {where} of episode {self.episode}"


@dataclass(frozen=True, slots=True)
class Determinism:
    """Outcome of the determinism check of one evaluation."""

    checked: _Count = 0
    """Number of episodes that completed a second time."""
    elsewhere: _Count = 0
    """Number of episodes that ran in another process the second time."""
    mismatched: tuple[int, ...] = ()
    """Indices of the episodes with a different outcome or trace in the second run."""
    failed: tuple[int, ...] = ()
    """Indices of the episodes that completed once, but not again."""
    failure: str = ""
    """Reason why the first of the failed episodes did not complete again."""
    first: FirstDifference | None = None
    """Place of the first difference in the mismatched episode with the lowest index."""
    remedy: Remedy = ""
    """Setting in which the first mismatched episode was repeatable, in different neighbourhoods: ``episode`` for
    ``environment.env_reuse``, ``process`` for one environment per process. ``conditions`` if new environments give the
    same episode for different seeds. Empty if there is no such setting."""
    remark: str = ""
    """Limit of the check, or the reason why nothing was checked."""
    steps: _Count = 0
    """Number of steps of a block that were compared, if no whole episodes ran again. Then :attr:`mismatched` contains
    the first episode of a block that differs."""

    @property
    def passed(self) -> bool | None:
        """Whether all second runs completed with the recorded outcome and trace; None if no episode was checked."""
        if self.mismatched or self.failed:
            return False
        return True if self.checked or self.steps else None

    def rate_below(self, confidence: float = 0.95) -> float:
        """Return the one-sided upper limit of the rate of mismatches (Clopper & Pearson 1934).

        The limit is 1 if nothing was checked. For 0 mismatches in k episodes, it is ``1 - (1 - confidence) ** (1 /
        k)``.
        """
        if len(self.mismatched) >= self.checked:
            return 1.0
        from scipy.special import betaincinv

        return float(betaincinv(len(self.mismatched) + 1, self.checked - len(self.mismatched), confidence))

    def to_dict(self) -> dict[str, Any]:
        """Return all fields, ``passed`` and ``rate_below`` as plain JSON values."""
        first = None if self.first is None else self.first._asdict()
        return asdict(self) | {"first": first, "passed": self.passed, "rate_below": self.rate_below()}

    def __str__(self) -> str:
        if self.passed is None:
            return f"not checked: {self.remark}" if self.remark else "not checked"
        if self.passed:
            where = "in another process" if self.elsewhere else ""
            where = f"{self.elsewhere} {where}" if where and self.checked else where
            told = "; ".join(filter(None, (where, self.remark)))
            what = f"{self.checked} of {self.checked} re-run episodes" if self.checked else f"first {self.steps} steps"
            return f"{what} identical" + (f" ({told})" if told else "")
        return f"FAILED: {'; '.join(self._findings())}"

    def _findings(self) -> list[str]:
        total = self.checked + len(self.failed)
        findings = []
        if self.mismatched:
            place = f", first in {self.first}" if self.first else ""
            cause = f" (cause: {self.first.cause})" if self.first and self.first.cause else ""
            which = f"{len(self.mismatched)} of {total} re-run episodes differ ({listed(self.mismatched, _LISTED)})"
            if not self.checked:
                which = f"the first {self.steps} steps of the block of episode {self.mismatched[0]} differ"
            findings.append(f"{which}{place}{cause}")
        if self.failed:
            findings.append(
                f"{len(self.failed)} of {total} did not complete again, first episode {self.failed[0]}: {self.failure}"
            )
        return findings

    @property
    def advice(self) -> str:
        """Advice if a second run differed from its record; empty if there is no advice.

        The check recommends only a setting in which it ran the first of these episodes again.
        """
        if not self.mismatched:
            return ""
        if self.first is not None and self.first.cause == "policy":
            return f"the policy chose another action for the same observation. {POLICY_REMEDIES}"
        return _REMEDIES[self.remedy].format(episode=self.mismatched[0])


_LISTED: Final = 6
"""Maximum number of mismatched episodes that a finding lists."""
_DOCTOR: Final = "rl-eval doctor searches for the reason"
POLICY_REMEDIES: Final = (
    "If the policy samples, pass the model itself, or a function that returns the most likely action. Call eval() on "
    "modules in training mode, or implement rl_eval.Policy: draw random numbers from the noise argument of act(), and "
    "declare state with initial_state()"
)
"""Advice for a policy that does not repeat its results."""
_REMEDIES: Final[Mapping[Remedy, str]] = {
    "": _DOCTOR,
    "episode": (
        "an environment that ran another episode before gives other values. With a new environment for each episode "
        "(environment.env_reuse=episode), episode {episode} was identical alone and beside another episode. If the "
        "environment updates statistics, freeze them instead"
    ),
    "process": (
        "environments of one process affect each other. With one environment per process (runners.runner=subprocess, "
        "or runners.num_envs_per_runner=1), episode {episode} was identical in a new and in a used environment"
    ),
    "conditions": (
        "in new environments, episodes of different seeds were identical. For a table of starts, set "
        "evaluation.conditions"
    ),
}

UNFINISHED: Final = Determinism(remark="the evaluation was not finished")

TRACE: Final = np.dtype(
    [("action", "<u8"), ("reward", "<f8"), ("terminated", "?"), ("truncated", "?"), ("observation", "<u8")]
)
"""One step of an episode. The columns are in the order in which a step produces their values. Row 0 is the reset."""

_LONGEST: Final = 100_000
"""Maximum number of rows of a trace; later steps are not traced."""


@final
class Trace:
    """Trace of one attempt, or of all slots of a block: rows of :data:`TRACE`, in the order of the steps.

    Args:
        longest: Maximum number of rows; later steps are not traced.
    """

    def __init__(self, longest: int = _LONGEST) -> None:
        self._longest = longest
        self._rows: list[tuple[int, float, float, float, int]] = []

    def begin(self, content: bytes | None) -> None:
        """Start the trace with the first observation.

        Args:
            content: Content of the observation; None if the observation is invalid.
        """
        self._rows = []
        self.add(0, 0.0, False, False, content)

    @property
    def full(self) -> bool:
        """Whether the trace has its maximum length, so that later steps are not traced."""
        return len(self._rows) >= self._longest

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, action: int, reward: Any, terminated: Any, truncated: Any, content: bytes | None) -> None:
        """Add a step.

        Args:
            action: Digest of the action, by :func:`action_digest`.
            reward: Reward, as the environment returned it.
            terminated: Flag, as the environment returned it.
            truncated: Flag, as the environment returned it.
            content: Content of the observation; None if the observation is invalid.
        """
        observed = 0 if content is None else xxhash.xxh3_64_intdigest(content)
        self._rows.append((action, _number(reward), _number(terminated), _number(truncated), observed))

    @property
    def rows(self) -> npt.NDArray[np.void]:
        """Array of :data:`TRACE`, shape (steps + 1,)."""
        return np.array(self._rows, TRACE)


@final
class TraceRecorder:
    """Wrapper of an environment's ``reset`` and ``step`` that records a trace.

    Args:
        reset: ``reset`` of the environment.
        step: ``step`` of the environment.
        content: Function that returns the content of an observation: the values that the policy receives, as bytes.
    """

    def __init__(self, reset: Callable[..., Any], step: Callable[[Any], Any], content: Callable[[Any], bytes]) -> None:
        self._reset = reset
        self._step = step
        self._content = content
        self._trace = Trace()

    def reset(self, **kwargs: Any) -> Any:
        """Reset the environment, and start a new trace."""
        result = self._reset(**kwargs)
        self._trace = Trace()
        if type(result) is tuple and result:
            self._trace.begin(self._observed(result[0]))
        return result

    def step(self, action: Any) -> Any:
        """Step the environment, and add a row to the trace."""
        chosen = 0 if self._trace.full else action_digest(action)  # ``step`` may change the action.
        result = self._step(action)
        # The runner reports a result that breaks the contract.
        if not self._trace.full and type(result) is tuple and len(result) == 5:
            observation, reward, terminated, truncated, _ = result
            self._trace.add(chosen, reward, terminated, truncated, self._observed(observation))
        return result

    def _observed(self, observation: Any) -> bytes | None:
        try:
            return self._content(observation)
        except EvalError:
            return None  # The runner reports the invalid observation.

    @property
    def trace(self) -> npt.NDArray[np.void]:
        """Array of :data:`TRACE`, shape (steps + 1,)."""
        return self._trace.rows


@dataclass
class TracedRuns:
    """Data of the determinism check in one report of a runner. The runner collects them until :meth:`take`."""

    traces: dict[int, npt.NDArray[np.void]] = field(default_factory=dict)
    """Traces of completed episodes whose leases requested a trace, by index: arrays of :data:`TRACE`. The trace of a
    block has the index of its first episode, and a row for each step of all slots, also if the block ended early."""
    construct_seconds: float = math.inf
    """Shortest construction time of an environment so far, in seconds."""

    def constructed(self, seconds: float) -> None:
        """Record the build time of an environment, in seconds."""
        self.construct_seconds = min(self.construct_seconds, seconds)

    def take(self) -> TracedRuns:
        """Return the data of a report, and start the next one."""
        taken, self.traces = replace(self), {}
        return taken


def traced_runs(report: RunReport) -> TracedRuns:
    """Return the data of the determinism check in a report. A runner may report none."""
    return report.extra.get(DETERMINISM, TracedRuns())  # type: ignore[no-any-return]


def first_difference(episode: int, one: npt.NDArray[np.void], other: npt.NDArray[np.void]) -> FirstDifference | None:
    """Return the first place where two traces of an episode differ; None if the traces are bitwise equal."""
    common, names = min(len(one), len(other)), TRACE.names or ()
    different = np.stack([_bits(one[name][:common]) != _bits(other[name][:common]) for name in names])
    if different.any():
        step = int(np.argmax(different.any(axis=0)))
        what = names[int(np.argmax(different[:, step]))]
        return FirstDifference(episode, step, what, "policy" if what == "action" else "environment")
    return None if len(one) == len(other) else FirstDifference(episode, common, "length", "environment")


def _bits(column: npt.NDArray[Any]) -> npt.NDArray[Any]:
    return np.ascontiguousarray(column).view("u8") if column.dtype.itemsize == 8 else column


def _number(value: Any) -> float:
    """Convert a value to a float; NaN if it is not numeric."""
    if type(value) is float or type(value) is bool:
        return value
    try:
        return float(np.asarray(value, np.float64).reshape(-1)[0])
    except (TypeError, ValueError, IndexError, RuntimeError):
        return float("nan")


def action_digest(value: Any) -> int:
    """Return the digest of an action."""
    digest = xxhash.xxh3_64()
    for leaf in tree.flatten(value):
        array = np.asarray(leaf)
        digest.update(repr(leaf).encode() if array.dtype.kind == "O" else array.tobytes())
    return digest.intdigest()
