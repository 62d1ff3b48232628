"""Whether an episode is a function of its seed and the actions: what all of rl_eval rests on."""

from __future__ import annotations

import pickle
import random
import sys
from collections.abc import Iterator
from typing import Any, Final, final

import gymnasium as gym
import numpy as np

from rl_eval.cli.checks.episodes import Moment, Player, first_difference, sample_actions
from rl_eval.cli.checks.finding import Finding, note, ok, problem, raised, warning
from rl_eval.errors import EvalError
from rl_eval.plan import EpisodePlan
from rl_eval.runners.environment import construct_env
from rl_eval.runners.spaces import ActionReader, ObservationBatch
from rl_eval.settings import EvalSettings

__all__ = ["check_environment"]

# As a runner does: sys.exit() in a simulator is its fault, Ctrl-C is not.
_CAUGHT: Final = (Exception, SystemExit)


def check_environment(settings: EvalSettings) -> Iterator[Finding]:
    """Build the environment a few times and play short episodes in it."""
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
    yield _check_limit(settings, env)
    yield from _Examination(settings, env).findings()


@final
class _Examination:
    """Compares episodes of several environments of the same kind.

    Args:
        settings: What to examine.
        env: The first environment.
    """

    def __init__(self, settings: EvalSettings, env: gym.Env[Any, Any]) -> None:
        self._settings = settings
        self._actions = sample_actions(env.action_space)
        self._first = Player(env, self._actions)
        self._players = [self._first]
        plan = EpisodePlan(2, settings.evaluation.seed)
        self._episode, self._other = plan[0], plan[1]
        self._attempt = 1
        self._faults: list[str] = []
        self._touched: dict[str, list[str]] = {}

    def findings(self) -> Iterator[Finding]:
        """Examine."""
        try:
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
        except _CAUGHT as error:
            yield raised("an episode", error, "repair the environment")
        finally:
            self._close()

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
        ObservationBatch(self._first.env.observation_space, 1).write(0, moments[0].observation)
        moments += list(episode)
        self._touched = {"reset": _changed(before, between), "step": _changed(between, _global_state())}
        return moments

    def _compare(self, reference: list[Moment]) -> Iterator[Finding]:
        steps = len(reference) - 1
        if difference := first_difference(reference, self._play(self._new_player())):
            yield problem(
                f"equal seeds and actions give different episodes, first in {difference}",
                "draw every random number from self.np_random, which reset(seed=...) seeds; until then no two "
                "evaluations agree, and what follows from it is not checked",
            )
        else:
            yield ok(f"equal seeds and actions give equal episodes ({steps} steps compared)")
            yield self._check_reuse(reference)
            yield self._check_neighbours(reference)
        yield self._check_globals()
        yield self._time()

    def _check_reuse(self, reference: list[Moment]) -> Finding:
        """Replay the episode in an environment that has run another one in between."""
        list(self._first.play(self._other, self._attempt))
        difference = first_difference(reference, self._play(self._first))
        if not difference:
            return ok("an environment that has run episodes is like a new one")
        text = f"an environment remembers its former episodes: a new one differs in {difference}"
        if self._settings.environment.env_reuse == "episode":
            return note(f"{text}; environment.env_reuse: episode takes care of it")
        return problem(text, "put everything back in reset(), or set environment.env_reuse: episode")

    def _check_neighbours(self, reference: list[Moment]) -> Finding:
        """Replay the episode while another environment takes turns with it."""
        moments = []
        others = self._new_player().play(self._other, self._attempt)
        for moment in self._new_player().play(self._episode, self._attempt):
            moments.append(moment)
            next(others, None)
        difference = first_difference(reference, moments)
        if not difference:
            return ok("environments in one process do not disturb each other")
        text = f"environments in one process disturb each other: stepped in turn, they differ in {difference}"
        fix = "keep random generators and state in the instance, or set runners.num_envs_per_runner: 1"
        return problem(text, fix) if self._settings.runners.lanes > 1 else warning(text, fix)

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

    def _time(self) -> Finding:
        steps = sum(player.steps for player in self._players)
        seconds = sum(player.step_seconds for player in self._players)
        return note(f"a step takes about {1e6 * seconds / max(1, steps):,.0f} µs (rough: {steps} steps)")

    def _play(self, player: Player) -> list[Moment]:
        return list(player.play(self._episode, self._attempt))

    def _new_player(self) -> Player:
        env = construct_env(self._settings.environment, 0, 0, self._settings.runners.num_runners)
        self._players.append(Player(env, self._actions))
        return self._players[-1]

    def _close(self) -> None:
        for player in self._players:
            try:
                player.env.close()
            except _CAUGHT:  # noqa: PERF203
                # A broken close() costs an evaluation nothing; runners ignore it too.
                continue


def _check_limit(settings: EvalSettings, env: gym.Env[Any, Any]) -> Finding:
    """Look for whatever ends an episode that would go on for ever."""
    ours = settings.evaluation.max_episode_steps
    if ours is not None:
        return ok(f"episodes end after {ours:,} steps at the latest (evaluation.max_episode_steps)")
    spec = getattr(env, "spec", None)
    theirs = _time_limit(env) or getattr(spec, "max_episode_steps", None)
    if theirs is not None:
        return ok(f"episodes end after {theirs:,} steps at the latest (the environment's own limit)")
    timeout = settings.fault_tolerance.episode_timeout_s
    stop = f"only fault_tolerance.episode_timeout_s={timeout:g} stops it, as a fault" if timeout else "nothing stops it"
    return warning(f"no limit of steps is known: if an episode never ends, {stop}", "set evaluation.max_episode_steps")


def _time_limit(env: Any) -> int | None:
    """Return the limit of a ``TimeLimit`` among the wrappers."""
    while isinstance(env, gym.Wrapper):
        if isinstance(env, gym.wrappers.TimeLimit):
            return int(env._max_episode_steps)
        env = env.env
    return None


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
