"""Measurement of a batched simulator: whether episodes are equal with several numbers of slots and in other slots.

``rl-eval doctor`` and the contract suite of simulators use this measurement.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Final

from rl_eval.adapters import RANDOM
from rl_eval.config.settings import EvalSettings, PolicySection, with_values
from rl_eval.errors import EnvError
from rl_eval.records.determinism import FirstDifference, first_difference, traced_runs
from rl_eval.records.episode import EpisodeRecord, EpisodeSpec, Lease, RunReport, different_columns, outcomes_of
from rl_eval.records.guarantee import Guarantee, guarantee_of
from rl_eval.runners import class_of, layout_of
from rl_eval.runners.again import run_again
from rl_eval.scheduling.plan import EpisodePlan

EPISODES: Final = 8
WIDTHS: Final = (1, 4, 7)
"""Numbers of slots. They are below the number of episodes, so that slots are restarted while other slots run."""
_MAX_STEPS: Final = 1_000
_SLOT: Final = "slot"
"""Name of the artifact of :class:`_Slot`."""


@dataclass(frozen=True, slots=True)
class Measured:
    """Comparison of the same episodes with different numbers of slots and in different slots."""

    promised: Guarantee
    """Guarantee that the simulator declares."""
    distinct_starts: int
    """Number of different first observations."""
    episode: str = ""
    """First difference between two runs of the episodes; empty if all episodes are equal."""
    start: str = ""
    """Description of a first observation that differs between two runs; empty if all first observations are equal."""

    @property
    def guarantee(self) -> Guarantee:
        """Strongest guarantee that agrees with the comparison."""
        return "layout" if self.start else "conditions" if self.episode else "exact"

    @property
    def broken(self) -> str:
        """Difference that contradicts the declared guarantee; empty if there is none."""
        return self.start if self.promised == "conditions" else self.episode


def widths_of(settings: EvalSettings) -> list[int]:
    """Return the numbers of slots to compare: :data:`WIDTHS` and the configured number."""
    return sorted({*WIDTHS, layout_of(settings).lanes})


def measure(settings: EvalSettings) -> Measured:
    """Compare the same episodes with several numbers of slots, and in different slots. Actions are random.

    The episodes run once with each number of slots of :func:`widths_of`, and once in reverse order.

    Raises:
        ConfigError: The simulator is rejected.
        EnvError: An attempt failed.
    """
    plan = EpisodePlan(EPISODES, settings.evaluation.seed, conditions=settings.evaluation.conditions)
    leases = [Lease(plan[index], 1).with_how(traced=True) for index in range(EPISODES)]
    firsts: dict[int, RunReport] = {}
    episode = start = ""
    for width, order in [*((width, leases) for width in widths_of(settings)), (WIDTHS[-1], leases[::-1])]:
        for lease, again in zip([*order, order[0]], _played(settings, width, order), strict=True):
            index, first = lease.index, firsts.setdefault(lease.index, again)
            places = f"slot {_slot(again, index)} of {width} and slot 0 of {WIDTHS[0]}"
            where = f"(seed {lease.seed}) differs between {places}"
            if found := _difference(first, again, index, settings.evaluation.info_keys):
                episode = episode or f"{found} {where}"
            if not start and _start(first, index) != _start(again, index):
                start = f"the first observation of episode {index} {where}"
    starts = {_start(report, index) for index, report in firsts.items()}
    return Measured(guarantee_of(firsts[0].numerics), len(starts), episode, start)


def block_difference(settings: EvalSettings) -> FirstDifference | None:
    """Run a block twice in one simulator, and return the first difference in its first steps; None if all are equal.

    Raises:
        ConfigError: The simulator is rejected.
        EnvError: An attempt failed.
    """
    layout = layout_of(settings)
    plan = EpisodePlan(layout.block_size, settings.evaluation.seed)
    lease = Lease(plan[0], 1).with_how(block=tuple(plan[index] for index in range(len(plan))), traced=True)
    first, again = _played(settings, layout.lanes, [lease])
    return first_difference(0, *(traced_runs(report).traces[0] for report in (first, again)))


def _played(settings: EvalSettings, width: int, leases: Sequence[Lease]) -> list[RunReport]:
    """Run the episodes of some leases in a new simulator with ``width`` slots, and return their reports.

    At the end, the first episode runs again, in a slot that may have been stepped past the end of its episode.

    Raises:
        ConfigError: The simulator is rejected.
        EnvError: An attempt failed.
    """
    steps = min(settings.evaluation.max_episode_steps or _MAX_STEPS, _MAX_STEPS)
    policy = PolicySection(policy=RANDOM, actions="none", deterministic=False)
    made_up = with_values(
        settings.model_copy(update={"policy": policy}),
        runners={"num_envs_per_runner": width, "num_runners": 0},
        evaluation={"max_episode_steps": steps, "observers": ()},
    )
    with ExitStack() as stack:
        runner: Any = class_of(made_up)(made_up, 0)
        stack.callback(runner.stop)
        slots = itertools.count()
        runner.observe({_SLOT: lambda _: _Slot(next(slots))})
        runner.run((), 0.0)  # The first call probes the policy.
        reports = [*run_again(runner, leases, len(leases)), *run_again(runner, leases[:1])]
    for fault in (fault for report in reports for fault in report.faults):
        raise EnvError(f"{fault.error_type}: {fault.message}", episode=fault.index)
    return reports


@dataclass(frozen=True, slots=True)
class _Slot:
    """Observer whose artifact is the number of its slot."""

    number: int

    def on_episode_start(self, spec: EpisodeSpec, attempt: int, observation: Any) -> None:
        """Do nothing; see :class:`EpisodeObserver`."""

    def on_step(self, *step: Any) -> None:
        """Do nothing; see :class:`EpisodeObserver`."""

    def on_episode_end(self, record: EpisodeRecord) -> int:
        """Return the number of the slot."""
        return self.number


def _slot(report: RunReport, index: int) -> int:
    """Return the number of the slot in which an episode ran."""
    return int(dict(report.artifacts)[_SLOT][index])


def _start(report: RunReport, index: int) -> int:
    """Return the digest of the first observation of an episode."""
    return int(traced_runs(report).traces[index]["observation"][0])


def _difference(one: RunReport, other: RunReport, index: int, keys: tuple[str, ...]) -> FirstDifference | str | None:
    """Return the first difference between two runs of an episode, in trace or outcome; None if both are equal."""
    if (found := first_difference(index, *(traced_runs(report).traces[index] for report in (one, other)))) is not None:
        return found
    columns = different_columns(*(outcomes_of(report.rows, report.infos, keys) for report in (one, other)))
    return f"{columns[0]} of episode {index}" if columns else None
