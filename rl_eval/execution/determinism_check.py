"""Determinism check of an evaluation: some of its episodes run again, and are compared bitwise with their first run.

If an environment leaks state into the next episode, or a policy uses its own random generator, the result depends on
the number of runners and environments. The sample is chosen before any episode runs. By default, it comes from the
second half of the plan, where most environments have already run other episodes. Its episodes run again in new
environments, and one of them in a used one. Up to six episodes are traced in their first run. The traces show the first
difference. If the observations are equal and the actions differ, the policy is the cause; otherwise, the environment is
the cause. Then the first of these episodes runs again in three neighbourhoods, which show a setting that would help.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final, Literal, NamedTuple, final

import numpy as np
import numpy.typing as npt
from typing_extensions import override

from rl_eval.backends.requests import Apply, Run
from rl_eval.errors import PolicyUnavailable
from rl_eval.execution.jobs import Job
from rl_eval.execution.outcome import Aspect, EvalOutcome
from rl_eval.execution.runner_pool import Member, RunnerPool
from rl_eval.execution.session import CALLS_IN_FLIGHT, Phase
from rl_eval.records.determinism import UNFINISHED, Determinism, FirstDifference, Remedy, first_difference, traced_runs
from rl_eval.records.episode import EpisodeTable, Lease, RunReport, different_columns, outcomes_of
from rl_eval.records.guarantee import guarantee_of
from rl_eval.runners import Layout
from rl_eval.runners.again import Neighbourhoods, in_neighbourhoods
from rl_eval.scheduling.plan import EpisodePlan
from rl_eval.supervision.flight_recorder import CrashReport

Share = float | Literal["auto"]

_MAX_TRIES: Final = 3
"""Maximum number of tries of an episode. If the last try fails, the failure is a finding."""
_PATIENCE: Final = 20.0
"""Time limit of the check, as a multiple of the first run of the same episodes."""
_LEAST_PATIENCE_S: Final = 60.0
_LONGEST_WAIT_S: Final = 10.0
"""Time limit for waiting while no runner is ready."""
_TRACED: Final = 6
"""Maximum number of traced episodes. It exceeds the number of compared episodes, because some may fail or take too
long."""

_EPISODES: Final = 4
"""Number of episodes that ``auto`` runs again."""
_FREE_SECONDS: Final = 2.0
_FREE_SHARE: Final = 0.02
"""Time limit of ``auto``, as a fraction of the duration of the run. If it is shorter than the fixed limit of
``_FREE_SECONDS``, the fixed limit applies."""


class Origin(NamedTuple):
    """First run of an episode."""

    row: npt.NDArray[np.void]
    """Array of :data:`rl_eval.records.episode.ROW`, shape (1,)."""
    outcome: npt.NDArray[np.void]
    """Compared columns, from :func:`rl_eval.records.episode.outcomes_of`, shape (1,)."""
    position: int
    """Position of the runner in the group; -1 for a runner of an earlier process."""
    trace: npt.NDArray[np.void] | None
    """Trace of the episode, an array of :data:`rl_eval.records.determinism.TRACE`; None if it was not traced."""


class Choice(NamedTuple):
    """Episodes to run again."""

    origins: Mapping[int, Origin] = {}
    """First runs, by index."""
    used: Collection[int] = ()
    """Indices of the episodes that run again in used environments, first of all, before environments are closed. The
    history of a used environment is not the same as in the first run, so a state that it keeps causes a difference."""
    remark: str = ""
    """Reason why no episode runs again, or why the episodes run in used environments; otherwise empty."""
    seconds: float = 0.0
    """Expected duration of the check, in seconds: the durations of the first runs, and of building the environments."""
    steps: int = 0
    """Number of steps of a block that run again; 0 to run whole episodes again."""


@final
class DeterminismSample(Aspect):
    """Sample of an evaluation's episodes. It is chosen in advance, and runs again at the end."""

    def __init__(self, outcome: EvalOutcome) -> None:
        super().__init__(outcome)
        self._candidates: list[int] = []
        self._traced: list[int] = []
        """Indices of the episodes that runners trace."""
        self._former = np.zeros(0, bool)
        """Mask of the episodes that an earlier process finished."""
        self._construct_seconds = math.inf
        self._traces: dict[int, npt.NDArray[np.void]] = {}
        """Traces of recorded candidates, by index."""
        self.generators: dict[str, None] = {}
        """Changes of global random generators by environments, as keys, as runners reported them."""

    def begin(self, pool: RunnerPool) -> None:
        """Choose the candidates: episodes that may run again."""
        evaluation, self._former = self.outcome.settings.evaluation, self.outcome.store.table.filled
        self._candidates = candidates(len(self._former), evaluation.determinism_check, evaluation.seed)
        size = self.outcome.layout.block_size
        self._traced = [one - one % size for one in self._candidates[:1]] if size else self._candidates[:_TRACED]

    def granted(self, leases: tuple[Lease, ...]) -> tuple[Lease, ...]:
        """Mark the leases of the first few candidates, so that runners trace these episodes."""
        return tuple([lease.with_how(traced=True) if lease.spec.index in self._traced else lease for lease in leases])

    def counted(self, report: RunReport, indices: set[int]) -> None:
        """Store the traces of candidates, and the shortest construction time of an environment."""
        runs = traced_runs(report)
        self._construct_seconds = min(self._construct_seconds, runs.construct_seconds)
        self._traces |= {index: runs.traces[index] for index in indices & runs.traces.keys()}
        self.generators |= dict.fromkeys(report.generators)

    def follow_up(self) -> Job:
        """Return the job that runs the sample again."""
        return DeterminismCheck(self.outcome, self)

    def finish(self) -> None:
        """Add notes on global random generators, and on episodes that do not depend on their seeds."""
        store, settings = self.outcome.store, self.outcome.settings
        if self.generators:
            store.note(_on_generators(self.generators, self.outcome.layout))
        if settings.evaluation.conditions is None and _all_equal(store.counted, self._traces):
            store.note(_on_equal_episodes(int(store.counted.completed.sum()), len(self._traces)))

    def describe(self, fields: dict[str, Any]) -> None:
        """Add the finding."""
        fields["determinism"] = self.outcome.store.determinism

    def choose(self, run_seconds: float, runners: int) -> Choice:
        """Choose the episodes to run again.

        Args:
            run_seconds: Duration of the run, in seconds.
            runners: Number of ready runners, at least 1.
        """
        settings, store = self.outcome.settings, self.outcome.store
        blocks = self.outcome.layout.block_size
        size = blocks or 1
        if (ended := store.ended_by) is not None:
            evaluation, within = settings.evaluation, [one for one in self._candidates if one < ended.after]
            self._candidates = within or candidates(ended.after, evaluation.determinism_check, evaluation.seed)
        table = store.counted
        firsts = dict.fromkeys(index - index % size for index in self._candidates)
        completed = [first for first in firsts if table.completed[first : first + size].all()]
        if self.outcome.suspect:
            return Choice(remark=self.outcome.suspect)
        if not completed:
            off = "switched off by evaluation.determinism_check=0"
            return Choice(remark="no episode completed" if self._candidates else off)
        rows = table.rows
        if any(key.endswith("num_envs") for key in store.numerics) and not blocks:
            return Choice(remark=f"the guarantee is {guarantee_of(store.numerics)}")
        alone = store.numerics.get("reference") == "row" or blocks
        sharing = 1 if alone else min(self.outcome.layout.lanes, math.ceil(len(rows) / runners))
        reset, step, policy = (rows[f"{name}_seconds"].astype(np.float64) for name in ("reset", "step", "inference"))
        # A re-run episode does not share its forward passes with others, except those of its block.
        seconds = reset + step + sharing * policy
        seconds[::size] = np.add.reduceat(seconds, np.arange(0, len(seconds), size))
        build = self._construct_seconds if math.isfinite(self._construct_seconds) else 0.0
        chosen, remark = completed, ""
        if settings.environment.instances == "one":
            build, remark = 0.0, "in used environments, because environment.instances is one"
        if settings.evaluation.determinism_check == "auto":
            budget = max(_FREE_SECONDS, _FREE_SHARE * run_seconds)
            too_long = f"in used environments, because a new environment takes {build:.1f} s"
            for cost, why in ((build, remark), (0.0, too_long)) if blocks else ():
                if steps := self._first_steps(completed[0], float(seconds[completed[0]]), cost, budget, why):
                    return steps
            chosen = _fitting(completed, seconds + build, budget, runners)
            if not chosen and build and settings.environment.env_reuse == "lane":
                chosen, remark = _fitting(completed, seconds, budget, runners), too_long
            if not chosen:
                unit = f"block of {size} episodes" if blocks else "episode"
                remark = (
                    f"running one {unit} again would take {min(seconds[completed]) + build:.1f} s, longer than the "
                    f"limit of {budget:.1f} s; evaluation.determinism_check=0.01 runs 1 % of the episodes again"
                )
        again = (index for first in chosen for index in range(first, min(first + size, len(rows))))
        origins = {index: self._origin(index) for index in again}
        # Each environment may have run a single episode, so a new one alone would not show a state that it keeps.
        both = len(chosen) > 1 and settings.environment.env_reuse == "lane" and not blocks
        used = frozenset(origins if remark else chosen[-1:] if both else ())
        return Choice(origins, used, remark, float((seconds + build)[chosen].sum()))

    def _first_steps(self, first: int, seconds: float, build: float, budget: float, remark: str) -> Choice | None:
        """Choose the first steps of a block; None if the block was not traced, or not even one step fits.

        Args:
            first: Index of the block's first episode.
            seconds: Duration of the block.
            build: Duration of the construction of the simulator, in seconds.
            budget: Time limit, in seconds.
            remark: Reason why the steps run again in a used simulator; empty to build another one.
        """
        layout, lengths = self.outcome.layout, self.outcome.store.table.rows["length"]
        per_step = seconds * layout.lanes / max(1, lengths[first : first + layout.block_size].sum())
        origin = self._origin(first)
        if origin.trace is None or (steps := min(len(origin.trace) - 1, int((budget - build) / per_step))) < 1:
            return None
        origins = {first: origin._replace(trace=origin.trace[: steps + 1])}
        return Choice(origins, frozenset(origins if remark else ()), remark, steps * per_step + build, steps)

    def _origin(self, index: int) -> Origin:
        table, here = self.outcome.store.table, slice(index, index + 1)
        position = -1 if self._former[index] else int(table.rows["runner"][index])
        return Origin(table.rows[here], table.outcomes(here), position, self._traces.get(index))


def _on_generators(changes: Collection[str], layout: Layout) -> str:
    """Return a note on the changes of global random generators by environments."""
    if layout.lanes == 1 or layout.facts.unit == "process":
        effect = "with several environments in one process (runners.num_envs_per_runner), episodes would be different"
    else:
        effect = "environments of one process affect each other"
    return f"{', '.join(changes)}: {effect}. Draw random numbers from self.np_random"


def _all_equal(table: EpisodeTable, traces: Mapping[int, npt.NDArray[np.void]]) -> bool:
    """Whether all completed episodes have equal outcomes, and at least two of them were traced, with equal traces."""
    if len({trace.tobytes() for trace in traces.values()}) != 1 or len(traces) == 1:
        return False
    outcomes = table.outcomes(table.completed)
    for name in ("index", "seed"):
        outcomes[name] = 0
    return outcomes.tobytes() == outcomes[:1].tobytes() * len(outcomes)


def _on_equal_episodes(num_seeds: int, num_traced: int) -> str:
    """Return a note on episodes that do not depend on their seeds."""
    return (
        f"{num_seeds} seeds gave 1 distinct episode ({num_traced} were compared step by step): the seed has no effect "
        "on this environment and this policy. If it should have one, reset() must use it; for a table of starts, use "
        "evaluation.conditions"
    )


def candidates(num_episodes: int, share: Share, seed: int) -> list[int]:
    """Choose the episodes to run again, before any episode has run.

    Args:
        num_episodes: Number of episodes of the plan.
        share: Fraction of the plan; at least one episode is chosen. ``auto`` chooses up to six episodes from the second
            half of the plan, or from the last five episodes of a short plan. At most four of these run again.
        seed: Root seed of the plan.

    Returns: Indices of the episodes, in random order; empty for a fraction of 0.
    """
    if not share:
        return []
    first, count = 0, 0
    if share == "auto":
        first = max(0, min(num_episodes - _EPISODES - 1, num_episodes // 2))
        count = min(_TRACED, num_episodes - first)
    else:
        count = max(1, math.ceil(share * num_episodes))
    chosen = np.random.default_rng(seed).choice(num_episodes - first, count, replace=False)
    return [first + int(index) for index in chosen]


def _fitting(indices: Sequence[int], seconds: npt.NDArray[np.float64], budget: float, runners: int) -> list[int]:
    """Return up to four episodes, in order, that the runners can run within a time budget."""
    fitting: list[int] = []
    for index in indices:
        together = float(seconds[[*fitting, index]].sum()) / runners
        if len(fitting) < _EPISODES and max(float(seconds[index]), together) <= budget:
            fitting.append(index)
    return fitting


@final
class Reruns:
    """Distributes episodes that run again to runners, and compares the reports with the first runs.

    Args:
        plan: Plan of the evaluation.
        choice: Episodes to run again.
        runners: Value of ``runners.num_runners``.
        block_size: Number of episodes in a block, which run again together; 0 without blocks.
        info_keys: Names of the info scalars of a row.
    """

    def __init__(
        self, plan: EpisodePlan, choice: Choice, runners: int, block_size: int = 0, info_keys: Sequence[str] = ()
    ) -> None:
        self._plan, self._choice, self._info_keys = plan, choice, info_keys
        self._runners, self._block_size = runners, block_size
        self._cut = ""
        self.origins = choice.origins
        """First runs, by index."""
        order = sorted(self.origins, key=lambda index: (index not in choice.used, index))
        self._waiting = dict.fromkeys(map(self._first_of, order))
        self._held: dict[int, set[int]] = {}
        """Indices of the episodes that a runner holds, by the number of the runner."""
        self._tries: Counter[int] = Counter()
        self._again: dict[int, Origin] = {}
        self._failed: dict[int, str] = {}
        self._unbuilt = ""
        """Error of the construction of an environment; empty if all environments could be built."""

    def _first_of(self, index: int) -> int:
        """Return the index of the first episode of an episode's block; without blocks, the index of the episode."""
        return index - index % (self._block_size or 1)

    @property
    def done(self) -> bool:
        """Whether no episode is left to run."""
        return not self._waiting and not any(self._held.values())

    def holds(self, runner: int) -> bool:
        """Whether episodes of this check are assigned to a runner."""
        return bool(self._held.get(runner))

    def take(self, runner: int, position: int, lanes: int, positions: Collection[int]) -> tuple[Lease, ...]:
        """Assign one episode to each free slot of a runner, or one block; return the leases.

        Args:
            runner: Number of the runner.
            position: Position of the runner in the group.
            lanes: Number of lanes of the runner.
            positions: Positions of all ready runners. If there are several, a runner gets only episodes that another
                position ran first.
        """
        others = set(positions) - {position}
        held = self._held.setdefault(runner, set())
        fit = [index for index in self._waiting if self.origins[index].position != position or not others]
        taken = fit[: max(0, (1 if self._block_size else lanes) - len(held))]
        for index in taken:
            del self._waiting[index]
            held.add(index)
            self._tries[index] += 1
        return tuple(self.lease(index, runner) for index in taken)

    def lease(self, index: int, runner: int) -> Lease:
        """Return a lease to run an episode or a block again."""
        fresh, traced = index not in self._choice.used, self.origins[index].trace is not None
        block = tuple(self._plan[at] for at in range(len(self._plan))[index : index + self._block_size])
        # With the attempt number of the record: earlier attempts failed, and are not part of the recorded episode.
        lease = Lease(self._plan[index], int(self.origins[index].row["attempts"][0]), runner)
        return lease.with_how(fresh=fresh, traced=traced, again=True, block=block, steps=self._choice.steps)

    def reported(self, runner: int, position: int, report: RunReport) -> None:
        """Compare the finished episodes of a runner with their first runs."""
        held = self._held.get(runner, set())
        indices = report.rows["index"].tolist()
        for place, index in enumerate(() if self._choice.steps else indices):
            if self._first_of(index) in held:
                self._again[index] = self.origin(report, position, place)
        if self._choice.steps:
            found = traced_runs(report).traces
            indices = [index for index in found if index in held]
            traces = {index: self.origins[index]._replace(trace=found[index]) for index in indices}
            self._again |= {index: one._replace(position=position) for index, one in traces.items()}
        held.difference_update(map(self._first_of, indices))
        for fault in report.faults:
            if fault.index in held:
                held.remove(fault.index)
                why = f"{fault.error_type}: {fault.message}"
                if fault.phase == "construct":
                    self._cannot_build(why)
                else:
                    self._put_back(fault.index, why)

    def origin(self, report: RunReport, position: int, place: int = 0) -> Origin:
        """Return the run of an episode in a report, whose row has this place."""
        row, infos = report.rows[place : place + 1], report.infos[place : place + 1]
        trace = traced_runs(report).traces.get(int(row["index"][0]))
        return Origin(row, outcomes_of(row, infos, self._info_keys), position, trace)

    def lost(self, runner: int, phase: str = "") -> None:
        """Queue the episodes of a lost runner again, up to the maximum number of tries.

        Args:
            runner: Number of the runner.
            phase: Call in which the runner was lost; empty if it is unknown.
        """
        held = self._held.pop(runner, set())
        if held and phase == "construct":
            self._cannot_build("the process of the runner ended")
        for index in sorted(held) if phase != "construct" else ():
            self._put_back(index, "the runner of the episode was lost")

    def _put_back(self, index: int, why: str) -> None:
        """Queue an episode again, up to the maximum number of tries."""
        if self._tries[index] < _MAX_TRIES:
            self._waiting[index] = None
        else:
            self._failed[index] = why

    def _cannot_build(self, why: str) -> None:
        """End the check without the episodes that wait, because a second environment cannot be built.

        The environment may allow only one instance, so this is not a finding.
        """
        self._unbuilt = self._unbuilt or why
        self._waiting = {}

    def stop(self, why: str) -> None:
        """End the check without the unfinished episodes."""
        if not self.done:
            self._cut = why
            self._waiting, self._held = {}, {}

    # ------------------------------------------------------------------ the finding

    @property
    def lacks_new(self) -> bool:
        """Whether new environments cannot be built, or take too long."""
        return bool(self._choice.remark or self._unbuilt)

    def again(self, index: int) -> Origin | None:
        """Return the second run of an episode; None if it did not complete in a new environment."""
        return None if index in self._choice.used else self._again.get(index)

    @property
    def result(self) -> Determinism:
        """Finding of the check so far."""
        mismatched = [index for index, again in sorted(self._again.items()) if not _equal(self.origins[index], again)]
        failed = sorted(self._failed)
        # If no new environment can be built, an equal run in a used one is no evidence.
        shown = {*self._again} - ({*self._choice.used} - {*mismatched} if self._unbuilt else set())
        elsewhere = sum(self._again[index].position != self.origins[index].position for index in shown)
        return Determinism(
            checked=0 if self._choice.steps else len(shown),
            elsewhere=elsewhere,
            steps=self._choice.steps if shown else 0,
            mismatched=tuple(mismatched),
            failed=tuple(failed),
            failure=self._failed[failed[0]] if failed else "",
            first=self._difference(mismatched[0]) if mismatched else None,
            remark=self._remark(len(shown), elsewhere),
        )

    def _remark(self, checked: int, elsewhere: int) -> str:
        if not self.origins:
            return self._choice.remark
        if self._unbuilt:
            done = f"{checked} of {len(self.origins)} ran again; " if checked else ""
            return f"{done}a second environment cannot be built: {self._unbuilt}"
        if self._cut and len(self._again) + len(self._failed) < len(self.origins):
            return f"{len(self._again)} of {len(self.origins)} had run again when the check ended early: {self._cut}"
        alone = "no second runner was ready for the check" if self._runners > 1 else "in the same process"
        return "; ".join(filter(None, ("" if elsewhere else alone, self._choice.remark)))

    def _difference(self, index: int) -> FirstDifference:
        one, other = self.origins[index], self._again[index]
        traced = one.trace is not None and other.trace is not None
        if traced and (found := first_difference(index, one.trace, other.trace)):  # type: ignore[arg-type]
            return found
        names = different_columns(one.outcome, other.outcome)
        return FirstDifference(index, -1, names[0] if names else "trace", "environment" if traced else "")


def _equal(one: Origin, other: Origin) -> bool:
    """Whether two runs of an episode have equal outcomes, and equal traces if both runs were traced."""
    if different_columns(one.outcome, other.outcome):
        return False
    return one.trace is None or other.trace is None or one.trace.tobytes() == other.trace.tobytes()


@final
class DeterminismCheck(Phase):
    """Job that runs a sample of the episodes again and compares them.

    A second run that does not complete is a finding, too.
    """

    counts = False

    def __init__(self, outcome: EvalOutcome, sample: DeterminismSample) -> None:
        super().__init__(outcome)
        self._sample = sample
        self._reruns = Reruns(outcome.plan, Choice(remark=UNFINISHED.remark), outcome.settings.runners.num_runners)
        self._seeking: bool | None = None
        """Whether a runner runs an episode in different neighbourhoods; None before that."""
        self._remedy: Remedy = ""
        self._patience_s = self._ends = math.inf
        self._earlier_loss: BaseException | None = None
        """Reason of the last loss of a runner before the check."""

    def _begin(self, now: float) -> None:
        outcome, settings = self._outcome, self._outcome.settings
        run_seconds = now - outcome.started if outcome.started else 0.0
        choice = self._sample.choose(run_seconds, max(1, len(self.pool.ready())))
        size, keys = outcome.layout.block_size, outcome.store.table.info_keys
        self._reruns = Reruns(outcome.plan, choice, settings.runners.num_runners, size, keys)
        self._patience_s = max(_LEAST_PATIENCE_S, _PATIENCE * choice.seconds)
        self._ends = now + self._patience_s
        self._earlier_loss = self.pool.last_loss
        if choice.origins:
            outcome.activity = "checking determinism"
        self._pump_all(now)

    @override
    def joined(self, member: Member, now: float) -> None:
        if self._outcome.state == "running":
            self._outcome.joined(self.pool, now)
            self._pump_all(now)

    def _lost(self, member: Member, crash_report: CrashReport | None, now: float) -> bool:
        if self._seeking:
            self._seeking = False
        moment = crash_report and crash_report.moment
        self._reruns.lost(member.number, moment.phase if moment else "")
        self._pump_all(now)
        return False

    def replied(self, member: Member, value: Any, now: float) -> None:
        """Handle a report, or an episode in different neighbourhoods.

        See :meth:`EvalOutcome.check_report` for errors.
        """
        if isinstance(value, Neighbourhoods):
            self._seeking, self._remedy = False, self._remedy_of(value)
        elif self._outcome.state == "running":
            self._outcome.check_report(member, value)
            self._reruns.reported(member.number, member.position, value)
            self._pump_all(now)
            if self._reruns.done and self._seeking is None:
                self._seek_remedy(member, now)

    def _seek_remedy(self, member: Member, now: float) -> None:
        """Run the first mismatched episode in different neighbourhoods, if the environment is the cause."""
        found, settings = self._reruns.result, self._outcome.settings
        others = [index for index in self._reruns.origins if index not in found.mismatched[:1]]
        environment = found.first is not None and found.first.cause != "policy"
        if not environment or not others or self._outcome.layout.facts.steps_all_slots or self._reruns.lacks_new:
            return
        other = max(others, key=lambda index: int(self._reruns.origins[index].row["length"][0]))
        lease, beside = (self._reruns.lease(index, member.number) for index in (found.mismatched[0], other))
        renewing = settings.environment.env_reuse == "episode"
        self._seeking = True
        function = partial(in_neighbourhoods, lease=lease, other=beside, renewing=renewing)
        self.pool.call(member, Apply(function), tag=self.tag, now=now)

    def _remedy_of(self, runs: Neighbourhoods) -> Remedy:
        """Return the setting in which an episode was repeatable; see :attr:`Determinism.remedy`."""
        settings = self._outcome.settings
        reports = runs.new, runs.used, runs.beside, runs.other
        if any(report.faults for report in reports):
            return ""
        new, used, beside, other = (self._reruns.origin(report, -1) for report in reports)
        again = self._reruns.again(int(new.row["index"][0])) or new
        layout = self._outcome.layout
        several, own_process = layout.lanes > 1, layout.facts.unit == "process"
        draws = bool(self._sample.generators) or runs.drew
        apart = several and _equal(new, beside) and _equal(new, again) and not draws
        if several and not own_process and not apart and _equal(new, used):
            return "process"
        if settings.environment.env_reuse == "episode" or _equal(new, used):
            return ""
        if new.trace is not None and other.trace is not None and new.trace.tobytes() == other.trace.tobytes():
            return "" if settings.evaluation.conditions is not None else "conditions"
        return "episode" if apart else ""

    def _watch(self, now: float) -> None:
        if not self.pool.ever_ready:  # A run that lacks only its check begins with the start of its runners.
            self._ends = now + self._patience_s
        elif now - self.pool.last_ready > _LONGEST_WAIT_S:
            self._stop(f"no runner was ready for {_LONGEST_WAIT_S:.0f} s", now)
        if isinstance(why := self.pool.last_loss, PolicyUnavailable) and why is not self._earlier_loss:
            self._stop(f"the policy became unavailable: {why}", now)
        if now > self._ends:
            self._stop("the second run took many times as long as the first run", now)

    def _stop(self, why: str, now: float) -> None:
        self._abandon(now)
        self._reruns.stop(why)
        self._seeking = False

    def _abandon(self, now: float) -> None:
        for runner in filter(self._reruns.holds, list(self.pool.members)):
            self._abort(runner, now)

    @property
    def _complete(self) -> bool:
        return self._reruns.done and not self._seeking

    def _ended(self, reason: str) -> None:
        self._reruns.stop(reason)
        self._outcome.store.determinism = replace(self._reruns.result, remedy=self._remedy)

    def _pump_all(self, now: float) -> None:
        """Keep two calls in flight on each runner with episodes. New episodes are sent with the next call."""
        members, lanes = self.pool.ready(), self._outcome.layout.lanes
        positions = [member.position for member in members]
        for member in members:
            runner = member.number
            leases: tuple[Lease, ...] = ()
            if member.in_flight(self.tag) < CALLS_IN_FLIGHT:
                leases = self._reruns.take(runner, member.position, lanes, positions)
            while member.in_flight(self.tag) < CALLS_IN_FLIGHT and self._reruns.holds(runner):
                self.pool.call(member, Run(leases, self.pool.slice_s), tag=self.tag, now=now)
                leases = ()
