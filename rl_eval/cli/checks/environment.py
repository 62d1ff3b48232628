"""Checks of an environment: an episode has to be a function of its seed and the actions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final, final

import gymnasium as gym
import numpy as np
import numpy.typing as npt

from rl_eval.cli.checks.contract import check_contract
from rl_eval.cli.checks.episodes import MAX_SECONDS, Player, Trace, first_difference, for_player
from rl_eval.cli.checks.finding import Finding, note, ok, problem, raised, warning
from rl_eval.config.settings import EvalSettings
from rl_eval.errors import EnvError
from rl_eval.records.episode import Lease, RunReport, Truncation, without_place
from rl_eval.runners.environment import time_limit
from rl_eval.runners.multi_agent.construction import build_team
from rl_eval.runners.policy_memory import remembered
from rl_eval.scheduling.plan import EpisodePlan

__all__ = ["check_environment"]

_FORMER: Final = 3
"""Episodes that an environment plays between the first and its repetition."""
_ENDLESS_STEPS: Final = 1_000
"""Steps without an end that make an environment endless, rather than slow."""


def check_environment(settings: EvalSettings) -> Iterator[Finding]:
    """Build the environment a few times and play whole episodes in it; only build one of several agents."""
    if settings.runners.runner_class.several_agents:
        yield _check_agents(settings)
        return
    try:
        player = Player(for_player(settings))
    except Exception as error:
        yield raised("the constructor", error)
        return
    observations, actions = map(_short, player.spaces)
    yield ok(f"constructs; observations {observations}, actions {actions}")
    contract = list(check_contract(player.lane.env))
    yield from contract
    player.stop()
    if any(finding.level == "problem" for finding in contract):
        yield note("no episodes were played, since no evaluation could")
        return
    yield from _Examination(settings).findings()


def _check_agents(settings: EvalSettings) -> Finding:
    """Build an environment of several agents; episodes of it need the policies, which are checked after it."""
    try:
        team = build_team(settings, 0, 0)
        team.close()
    except Exception as error:
        return raised("the constructor", error)
    return ok(f"constructs; agents {', '.join(map(str, team.agents))}")


@final
class _Examination:
    """Compares episodes of several environments of the same kind."""

    def __init__(self, settings: EvalSettings) -> None:
        self._settings = settings
        self._players: list[Player] = []
        plan = EpisodePlan(1 + _FORMER, settings.evaluation.seed)
        self._leases = [Lease(index, plan[index].seed, 1, 0) for index in range(len(plan))]
        self._faults: list[str] = []
        self._touched: dict[str, list[str]] = {}

    def findings(self) -> Iterator[Finding]:
        """Examine."""
        try:
            self._first = self._new_player()
            reference = self._reference()
            if reference is None:
                yield problem(
                    f"every attempt of an episode failed; the last: {self._faults[-1]}",
                    "repair the environment: an evaluation would record this episode as failed",
                )
                return
            if self._faults:
                yield warning(
                    f"attempts that failed before one did not: {len(self._faults)}; the last: {self._faults[-1]}",
                    "repair it, or let retries hide it: the result says how often it happened",
                )
            yield from self._compare(reference)
            yield from self._judge([player.run() for player in self._players])
        except EnvError as error:
            yield problem(f"an episode failed: {error}", "repair the environment")
        except Exception as error:
            yield raised("an episode", error, "repair the environment")
        finally:
            for player in self._players:
                player.stop()

    def _reference(self) -> Trace | None:
        """Play the episode that others are compared with, in as many attempts as an evaluation has."""
        for attempt in range(1, self._settings.fault_tolerance.max_attempts_per_episode + 1):
            self._leases = [lease._replace(attempt=attempt) for lease in self._leases]
            try:
                return self._play_watching_globals()
            except EnvError as error:
                self._faults.append(str(error))
                self._first = self._new_player()
        return None

    def _play_watching_globals(self) -> Trace:
        before = remembered(None)
        episode = self._first.play(self._leases[0])
        next(episode)
        between = remembered(None)
        list(episode)
        after = remembered(None)
        self._touched = {"reset": before.changes(between, "generators"), "step": between.changes(after, "generators")}
        return self._first.trace

    def _compare(self, reference: Trace) -> Iterator[Finding]:
        """Compare the episode with itself: in a new environment, in a used one, and beside another one."""
        if difference := first_difference(reference, self._new_player().played(self._leases[0])):
            yield problem(
                f"equal seeds and actions give different episodes, first in {difference}",
                "begin reset() with super().reset(seed=seed), and draw every random number from self.np_random, which "
                "that seeds; until then no two evaluations agree, and what follows from it is not checked",
            )
            return
        yield ok(f"equal seeds and actions give equal episodes ({len(reference) - 1:,} steps compared)")
        yield self._check_reuse(reference)
        yield self._check_neighbours(reference)

    def _judge(self, reports: list[RunReport]) -> Iterator[Finding]:
        """Say what all that was played showed beside."""
        rows = np.concatenate([report.rows for report in reports])
        longest = max([*rows["length"], *(live.step for report in reports for live in report.progress)])
        yield self._check_end(rows, longest)
        yield from _check_contents(reports)
        yield from self._check_info_keys()
        yield from self._check_globals()
        steps, seconds = (sum(getattr(report, name) for report in reports) for name in ("env_steps", "step_seconds"))
        yield note(f"a step takes about {1e6 * seconds / max(1, steps):,.0f} µs (rough: {steps:,} steps)")
        yield note(
            f"seen: {len(self._leases)} episodes, up to step {longest:,}, with made-up actions; what comes later, or "
            "only with the policy's actions, was not seen"
        )

    def _check_reuse(self, reference: Trace) -> Finding:
        """Play episodes one after the other in one environment, and each in a new one."""
        first, *others = self._leases
        played = [*((other, self._new_player().played(other)) for other in others), (first, reference)]
        found = (first_difference(alone, self._first.played(lease)) for lease, alone in played)
        difference = next(filter(None, found), "")
        if not difference:
            return ok(f"an environment that has run episodes is like a new one ({len(played)} compared)")
        text = f"an environment remembers its former episodes: a new one differs in {difference}"
        if self._settings.environment.env_reuse == "episode":
            return note(f"{text}; environment.env_reuse: episode takes care of it")
        return problem(text, "put everything back in reset(), or set environment.env_reuse: episode")

    def _check_neighbours(self, reference: Trace) -> Finding:
        """Replay the episode while another environment takes turns with it."""
        player, others = self._new_player(), self._new_player().play(self._leases[1])
        for _ in player.play(self._leases[0]):
            next(others, None)
        difference = first_difference(reference, player.trace)
        if not difference:
            return ok("environments in one process do not disturb each other")
        text = f"environments in one process disturb each other: stepped in turn, they differ in {difference}"
        fix = "keep random generators and state in the instance, or set runners.num_envs_per_runner: 1"
        return problem(text, fix) if self._settings.runners.lanes > 1 else warning(text, fix)

    def _check_end(self, rows: npt.NDArray[np.void], longest: int) -> Finding:
        """Say what ended the episodes, or would."""
        ours, theirs = self._settings.evaluation.max_episode_steps, time_limit(self._first.lane.env)
        limits = {"evaluation.max_episode_steps": ours, "the environment's own limit": theirs}
        if given := [(limit, whose) for whose, limit in limits.items() if limit is not None]:
            limit, whose = min(given)
            return ok(f"episodes end after {limit:,} steps at the latest ({whose})")
        if len(lengths := rows["length"][rows["truncated_by"] != Truncation.MAX_EPISODE_STEPS]):
            return ok(f"episodes end by themselves, here after {lengths.min():,} to {lengths.max():,} steps")
        timeout = self._settings.fault_tolerance.episode_timeout_s
        stop = f"only fault_tolerance.episode_timeout_s={timeout:g} stops it" if timeout else "nothing stops it"
        return (problem if longest >= _ENDLESS_STEPS else warning)(
            f"no episode ended in {longest:,} steps or {MAX_SECONDS:g} s: if none ever does, {stop}",
            "set evaluation.max_episode_steps",
        )

    def _check_info_keys(self) -> Iterator[Finding]:
        seen = set().union(*(player.info_keys for player in self._players))
        if missed := [key for key in self._settings.evaluation.info_keys if key not in seen]:
            had = ", ".join(sorted(map(str, seen))) or "nothing"
            yield warning(
                f"no step had {', '.join(map(repr, missed))} of evaluation.info_keys in its info, which had {had}",
                "correct the name, unless such steps are rare",
            )

    def _check_globals(self) -> Iterator[Finding]:
        for phase, names in self._touched.items():
            if names:
                text = f"{phase}() changes {' and '.join(names)}, which other code shares"
                yield warning(text, "draw from self.np_random instead")
        if not any(self._touched.values()):
            yield ok("global random state is left alone")

    def _new_player(self) -> Player:
        self._players.append(Player(for_player(self._settings)))
        return self._players[-1]


def _check_contents(reports: list[RunReport]) -> Iterator[Finding]:
    """Say what runners note about what the environment returns."""
    notes = {without_place(text): text for report in reversed(reports) for text in report.notes}
    yield from (warning(text, "correct observation_space, or what the environment returns") for text in notes.values())
    if not notes:
        yield ok("observations are inside their space")


def _short(space: gym.Space[Any]) -> str:
    """Name a space without listing its bounds."""
    if isinstance(space, gym.spaces.Dict):
        return "{" + ", ".join(f"{name}: {_short(part)}" for name, part in space.spaces.items()) + "}"
    if isinstance(space, gym.spaces.Tuple):
        return "(" + ", ".join(map(_short, space.spaces)) + ")"
    if isinstance(space, gym.spaces.Discrete):
        return str(space)
    return f"{type(space).__name__}{space.shape} of {space.dtype}"
