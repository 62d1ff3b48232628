"""Whether an episode is a function of its seed and the actions: what all of rl_eval rests on."""

from __future__ import annotations

import pickle
import random
import sys
from collections.abc import Callable, Iterator
from typing import Any, Final, final

import gymnasium as gym
import numpy as np

from rl_eval.cli.checks.contract import check_contract
from rl_eval.cli.checks.episodes import MAX_SECONDS, MAX_STEPS, Moment, Player, first_difference
from rl_eval.cli.checks.finding import Finding, note, ok, problem, raised, warning
from rl_eval.episode import EpisodeSpec
from rl_eval.errors import EvalError
from rl_eval.plan import EpisodePlan
from rl_eval.runners.environment import construct_env
from rl_eval.runners.spaces import ActionReader, ObservationBatch
from rl_eval.settings import EvalSettings

__all__ = ["check_environment"]

# As a runner does: sys.exit() in a simulator is its fault, Ctrl-C is not.
_CAUGHT: Final = (Exception, SystemExit)

_FORMER: Final = 3
"""Episodes that an environment plays between the first and its repetition."""

_ENDLESS_STEPS: Final = 1_000
"""Steps without an end that make an environment endless, rather than slow."""


def check_environment(settings: EvalSettings) -> Iterator[Finding]:
    """Build the environment a few times and play whole episodes in it."""
    try:
        env = construct_env(settings.environment, 0, 0, settings.runners.num_runners)
        ObservationBatch(env.observation_space, 1)
        ActionReader(env.action_space, settings.policy.actions)
    except EvalError as error:
        yield problem(str(error))
        return
    except _CAUGHT as error:
        yield raised("the constructor", error)
        return
    yield ok(f"constructs; observations {_short(env.observation_space)}, actions {_short(env.action_space)}")
    contract = list(check_contract(env))
    yield from contract
    _close(env)
    if any(finding.level == "problem" for finding in contract):
        yield note("no episodes were played, since no evaluation could")
        return
    yield from _Examination(settings).findings()


@final
class _Examination:
    """Compares episodes of several environments of the same kind.

    Args:
        settings: What to examine.
    """

    def __init__(self, settings: EvalSettings) -> None:
        self._settings = settings
        self._max_steps = min(settings.evaluation.max_episode_steps or MAX_STEPS, MAX_STEPS)
        self._players: list[Player] = []
        plan = EpisodePlan(1 + _FORMER, settings.evaluation.seed)
        self._episode, *self._others = (plan[index] for index in range(len(plan)))
        self._attempt = 1
        self._faults: list[str] = []
        self._touched: dict[str, list[str]] = {}

    def findings(self) -> Iterator[Finding]:
        """Examine."""
        try:
            self._first = self._new_player()
            reference = self._reference()
            if reference is None:
                yield problem(
                    f"every attempt of an episode raised; the last: {self._faults[-1]}",
                    "repair the environment: an evaluation would record this episode as failed",
                )
                return
            if self._faults:
                yield warning(
                    f"attempts that raised before one did not: {len(self._faults)}; the last: {self._faults[-1]}",
                    "repair it, or let retries hide it: the result says how often it happened",
                )
            yield from self._compare(reference)
            yield from self._judge()
        except _CAUGHT as error:
            yield raised("an episode", error, "repair the environment")
        finally:
            for player in self._players:
                _close(player.env)

    def _reference(self) -> list[Moment] | None:
        """Play the episode that others are compared with, in as many attempts as an evaluation has."""
        for attempt in range(1, self._settings.fault_tolerance.max_attempts_per_episode + 1):
            self._attempt = attempt
            try:
                return self._play_watching_globals()
            except _CAUGHT as error:
                self._faults.append(f"{type(error).__name__}: {error}")
                self._first = self._new_player()
        return None

    def _play_watching_globals(self) -> list[Moment]:
        before = _global_state()
        episode = self._first.play(self._episode, self._attempt)
        moments = [next(episode)]
        between = _global_state()
        moments += list(episode)
        self._touched = {"reset": _changed(before, between), "step": _changed(between, _global_state())}
        return moments

    def _compare(self, reference: list[Moment]) -> Iterator[Finding]:
        """Compare the episode with itself: in a new environment, in a used one, and beside another one."""
        if difference := first_difference(reference, self._play(self._new_player(), self._episode)):
            yield problem(
                f"equal seeds and actions give different episodes, first in {difference}",
                "draw every random number from self.np_random, which reset(seed=...) seeds; until then no two "
                "evaluations agree, and what follows from it is not checked",
            )
            return
        yield ok(f"equal seeds and actions give equal episodes ({len(reference) - 1:,} steps compared)")
        yield self._check_reuse(reference)
        yield self._check_neighbours(reference)

    def _judge(self) -> Iterator[Finding]:
        """Say what all that was played showed beside."""
        yield self._check_end()
        yield self._check_observations()
        yield from self._check_info_keys()
        yield self._check_globals()
        steps = sum(player.steps for player in self._players)
        seconds = sum(player.step_seconds for player in self._players)
        yield note(f"a step takes about {1e6 * seconds / max(1, steps):,.0f} µs (rough: {steps:,} steps)")
        yield note(
            f"seen: {1 + len(self._others)} episodes, up to step {self._longest:,}, with made-up actions; what comes "
            "later, or only with the policy's actions, was not seen"
        )

    def _check_reuse(self, reference: list[Moment]) -> Finding:
        """Play episodes one after the other in one environment, and each in a new one."""
        fresh = [(other, self._play(self._new_player(), other)) for other in self._others]
        played = [*fresh, (self._episode, reference)]
        found = (first_difference(alone, self._play(self._first, episode)) for episode, alone in played)
        difference = next(filter(None, found), "")
        if not difference:
            return ok(f"an environment that has run episodes is like a new one ({len(played)} compared)")
        text = f"an environment remembers its former episodes: a new one differs in {difference}"
        if self._settings.environment.env_reuse == "episode":
            return note(f"{text}; environment.env_reuse: episode takes care of it")
        return problem(text, "put everything back in reset(), or set environment.env_reuse: episode")

    def _check_neighbours(self, reference: list[Moment]) -> Finding:
        """Replay the episode while another environment takes turns with it."""
        moments = []
        others = self._new_player().play(self._others[0], self._attempt)
        for moment in self._new_player().play(self._episode, self._attempt):
            moments.append(moment)
            next(others, None)
        difference = first_difference(reference, moments)
        if not difference:
            return ok("environments in one process do not disturb each other")
        text = f"environments in one process disturb each other: stepped in turn, they differ in {difference}"
        fix = "keep random generators and state in the instance, or set runners.num_envs_per_runner: 1"
        return problem(text, fix) if self._settings.runners.lanes > 1 else warning(text, fix)

    def _check_end(self) -> Finding:
        """Say what ended the episodes, or would."""
        ours = self._settings.evaluation.max_episode_steps
        if ours is not None:
            return ok(f"episodes end after {ours:,} steps at the latest (evaluation.max_episode_steps)")
        theirs = _time_limit(self._first.env)
        if theirs is not None:
            return ok(f"episodes end after {theirs:,} steps at the latest (the environment's own limit)")
        if lengths := sorted(length for player in self._players for length in player.lengths):
            return ok(f"episodes end by themselves, here after {lengths[0]:,} to {lengths[-1]:,} steps")
        finding: Callable[[str, str], Finding] = problem if self._longest >= _ENDLESS_STEPS else warning
        timeout = self._settings.fault_tolerance.episode_timeout_s
        stop = f"only fault_tolerance.episode_timeout_s={timeout:g} stops it" if timeout else "nothing stops it"
        return finding(
            f"no episode ended in {self._longest:,} steps or {MAX_SECONDS:g} s: if none ever does, {stop}",
            "set evaluation.max_episode_steps",
        )

    def _check_observations(self) -> Finding:
        misfit = next((player.misfit for player in self._players if player.misfit), "")
        return (
            warning(misfit, "correct observation_space, or the observation")
            if misfit
            else ok("observations are inside their space")
        )

    def _check_info_keys(self) -> Iterator[Finding]:
        seen = {key for player in self._players for key in player.info_keys}
        if missed := [key for key in self._settings.evaluation.info_keys if key not in seen]:
            had = ", ".join(sorted(map(str, seen))) or "nothing"
            yield warning(
                f"no step had {', '.join(map(repr, missed))} of evaluation.info_keys in its info, which had {had}",
                "correct the name, unless such steps are rare",
            )

    def _check_globals(self) -> Finding:
        phases = [f"{phase}()" for phase, names in self._touched.items() if names]
        names = sorted({name for names in self._touched.values() for name in names})
        if not names:
            return ok("global random state is left alone")
        verb = "change" if len(phases) > 1 else "changes"
        return warning(
            f"{' and '.join(phases)} {verb} the global state of {' and '.join(names)}, which other code shares",
            "draw from self.np_random instead",
        )

    @property
    def _longest(self) -> int:
        """Steps of the longest episode that was played."""
        return max(player.longest for player in self._players)

    def _play(self, player: Player, episode: EpisodeSpec) -> list[Moment]:
        return list(player.play(episode, self._attempt))

    def _new_player(self) -> Player:
        env = construct_env(self._settings.environment, 0, 0, self._settings.runners.num_runners)
        self._players.append(Player(env, self._max_steps))
        return self._players[-1]


def _close(env: gym.Env[Any, Any]) -> None:
    try:
        env.close()
    except _CAUGHT:
        # A broken close() costs an evaluation nothing; runners ignore it too.
        return


def _time_limit(env: Any) -> int | None:
    """Return the limit of a ``TimeLimit`` among the wrappers, or that of the environment's registration."""
    registered: int | None = getattr(getattr(env, "spec", None), "max_episode_steps", None)
    while isinstance(env, gym.Wrapper):
        if isinstance(env, gym.wrappers.TimeLimit):
            return int(env._max_episode_steps)
        env = env.env
    return registered


def _global_state() -> dict[str, bytes]:
    states: dict[str, Any] = {"random": random.getstate(), "numpy.random": np.random.get_state()}  # noqa: NPY002
    if torch := sys.modules.get("torch"):
        states["torch"] = torch.get_rng_state().numpy().tobytes()
    return {name: pickle.dumps(state) for name, state in states.items()}


def _changed(before: dict[str, bytes], after: dict[str, bytes]) -> list[str]:
    return [name for name in before if before[name] != after[name]]


def _short(space: gym.Space[Any]) -> str:
    """Name a space without listing its bounds."""
    if isinstance(space, gym.spaces.Dict):
        return "{" + ", ".join(f"{name}: {_short(part)}" for name, part in space.spaces.items()) + "}"
    if isinstance(space, gym.spaces.Tuple):
        return "(" + ", ".join(map(_short, space.spaces)) + ")"
    if isinstance(space, gym.spaces.Discrete):
        return str(space)
    return f"{type(space).__name__}{space.shape} of {space.dtype}"
