"""Environment with faults of chosen kinds, in chosen episodes, attempts, phases and steps."""

from __future__ import annotations

import copy
import ctypes
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

import gymnasium as gym
import numpy as np
import tree

from rl_eval.errors import nearest
from rl_eval.protocols import EnvContext
from rl_eval.testing.environments import DictObservation, wrapped_env

StrikePhase = Literal["construct", "reset", "step", "close"]

EXIT_STATUS: Final = 13
"""Exit status of ``exit`` and ``os_exit``."""

_BLOCK_BYTES: Final = 2**24


class InjectedFault(RuntimeError):
    """Exception that an environment of this package raises on purpose."""


class Strike(NamedTuple):
    """One fault that is due."""

    where: str
    """Phase, episode, attempt and step, for the message."""
    seconds: float
    """Duration of a hang."""
    limit_mib: int
    """Memory limit of a balloon."""


# ------------------------------------------------------------------ what happens to the process


def _raise(strike: Strike) -> None:
    raise InjectedFault(f"injected fault in {strike.where}")


def _loop(strike: Strike) -> None:
    end = time.perf_counter() + strike.seconds
    while time.perf_counter() < end:
        pass


def _gil_sleep(strike: Strike) -> None:
    # PyDLL, unlike CDLL, keeps the GIL while the C function runs, which a signal ends early.
    end = time.perf_counter() + strike.seconds
    while (left := end - time.perf_counter()) > 0:
        ctypes.PyDLL(None).usleep(ctypes.c_uint(int(left * 1e6) + 1))


def _balloon(strike: Strike) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    ceiling = pages * resource.getpagesize() + strike.limit_mib * 2**20
    # The limit protects the machine.
    limits = [ceiling, *(limit for limit in (soft, hard) if limit != resource.RLIM_INFINITY)]
    resource.setrlimit(resource.RLIMIT_AS, (min(limits), hard))
    blocks: list[bytes] = []
    try:
        while True:
            blocks.append(b"\1" * _BLOCK_BYTES)
    finally:
        blocks.clear()
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


STRIKES: Final[Mapping[str, Callable[[Strike], object]]] = {
    "none": lambda _: None,
    "raise": _raise,
    "exit": lambda _: sys.exit(EXIT_STATUS),
    "os_exit": lambda _: os._exit(EXIT_STATUS),
    "segfault": lambda _: ctypes.string_at(0),
    "abort": lambda _: os.abort(),
    "sigkill": lambda _: os.kill(os.getpid(), signal.SIGKILL),
    "sigstop": lambda _: os.kill(os.getpid(), signal.SIGSTOP),
    "loop": _loop,
    "sleep": lambda strike: time.sleep(strike.seconds),
    "gil_sleep": _gil_sleep,
    "balloon": _balloon,
}
"""Kinds of faults of the process."""


# ------------------------------------------------------------------ what the environment returns


def _observation_spoiler(spoil: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda result: (spoil(result[0]), *result[1:])


def _with_nan(leaf: Any) -> Any:
    array = np.asarray(leaf)
    return np.full_like(array, np.nan) if array.dtype.kind == "f" else leaf


SPOILS: Final[Mapping[str, Callable[[Any], Any]]] = {
    "nan_observation": _observation_spoiler(lambda seen: tree.map_structure(_with_nan, seen)),
    "bad_shape": _observation_spoiler(lambda seen: tree.map_structure(lambda leaf: np.stack([leaf] * 2), seen)),
    "bad_dtype": _observation_spoiler(lambda seen: tree.map_structure(lambda leaf: np.asarray(leaf).astype(str), seen)),
    "missing_key": _observation_spoiler(lambda seen: dict(list(seen.items())[1:])),
    "nan_reward": lambda result: (result[0], float("nan"), *result[2:]),
    "not_a_tuple": lambda _: None,
}
"""Kinds that change what ``reset`` or ``step`` returns."""


# ------------------------------------------------------------------ which kind can strike where


_EVERYWHERE: Final[tuple[StrikePhase, ...]] = ("step", "reset", "construct", "close")

PHASES: Final[Mapping[str, tuple[StrikePhase, ...]]] = {
    **dict.fromkeys(STRIKES, _EVERYWHERE),
    **dict.fromkeys(SPOILS, ("step", "reset")),
    "nan_reward": ("step",),
    "leak": ("reset", "step"),
    "spawn": ("construct",),
}
"""Phases of each kind, the usual one first. ``leak`` and ``spawn`` need the environment's own state."""


def check_kind(kind: str, phase: str | None, space: gym.Space[Any]) -> StrikePhase:
    """Return the phase that a kind strikes in.

    Args:
        kind: Name of the kind.
        phase: Name of the phase, or None for the kind's usual one.
        space: Observation space that the kind must be able to spoil.

    Raises:
        ValueError: Kind or phase are unknown, or the kind cannot strike there.
    """
    if kind not in PHASES:
        raise ValueError(f"kind is {kind!r}: {nearest(kind, PHASES)}")
    if phase is not None and phase not in _EVERYWHERE:
        raise ValueError(f"phase is {phase!r}: {nearest(phase, _EVERYWHERE)}")
    if phase is not None and phase not in PHASES[kind]:
        raise ValueError(f"kind {kind!r} cannot strike in phase {phase!r}: use {' or '.join(map(repr, PHASES[kind]))}")
    if kind == "missing_key" and not isinstance(space, gym.spaces.Dict):
        raise ValueError(f"kind 'missing_key' needs a Dict observation space, but there is {space}")
    if kind == "nan_observation" and not any(
        np.asarray(leaf).dtype.kind == "f" for leaf in tree.flatten(copy.deepcopy(space).sample())
    ):
        raise ValueError(f"kind 'nan_observation' needs floats in the observation space, but there is {space}")
    return next(known for known in PHASES[kind] if phase in (None, known))


class FaultyEnv(gym.Wrapper[Any, Any, Any, Any]):
    """Wrapper with one kind of fault at one place; otherwise the plain environment.

    ==================  ===========================================================================
    kind                what happens
    ==================  ===========================================================================
    none                nothing, for comparison
    raise               :class:`InjectedFault` is raised
    exit, os_exit       ``sys.exit(13)``, ``os._exit(13)``
    segfault, abort     a real SIGSEGV, SIGABRT
    sigkill, sigstop    the process sends itself the signal
    loop                a Python loop that keeps a core busy for ``seconds``
    sleep, gil_sleep    a sleep of ``seconds``, without and with the GIL held
    balloon             memory is taken until ``limit_mib`` more than now are used: MemoryError, or death
    nan_observation     the floats of the observation are NaN
    bad_shape           every part of the observation is twice as big
    bad_dtype           every part of the observation is text
    missing_key         the first key of a Dict observation is missing
    nan_reward          the reward is NaN
    not_a_tuple         None is returned
    leak                later episodes of the same object have greater rewards: 0.001 per faulty episode
    spawn               each object starts a child process, which its ``close`` ends
    ==================  ===========================================================================

    Faults come in the listed episodes, and in attempts that are drawn with ``attempt_rates`` and ``step_rate``. Whether
    an attempt is drawn, and its step, depend on (episode, attempt) alone, so a retry can succeed anywhere. An evaluator
    that does not announce its episodes gets draws of no fixed seed, as real faults are.

    A hang ends after ``seconds`` at the latest, and the environment then continues normally.

    Args:
        env: Environment to wrap.
        kind: What goes wrong.
        phase: ``construct``, ``reset``, ``step`` or ``close``; by default the kind's usual one.
        episodes: Indices of the faulty episodes; None for all. A constructor does not know its episode and fails
            whatever is listed here; ``close`` fails after a faulty episode was begun, or always if none is listed.
        attempts: Their faulty attempts, from 1; None for all.
        step: In phase ``step``, the step that fails, from 1. A shorter episode is spared.
        attempt_rates: Besides, the share of first, second, ... attempts of every episode that fail; later ones do not.
        within_steps: Such an attempt fails at a step drawn uniformly from this many, if it lives that long.
        step_rate: Besides, the probability that a step fails, in every attempt.
        after: Occasions that each object lets pass before it fails.
        seconds: How long hangs last, and children live.
        folder: Fail only once per listed episode (in ``construct``, and with ``episodes=None``: once) over all
            processes: a file ``KIND-PHASE[-INDEX]`` in this folder remembers it, and holds the id of the process.
            Needed where the fault kills the process, since no attempt is charged then. With ``spawn``, which is
            never limited, the folder gets a file ``spawn-PID`` for each child instead.
        limit_mib: Memory that ``balloon`` may take.
        new_session: Whether children of ``spawn`` lead a session of their own, out of reach of a signal to the
            process group.

    Raises:
        ValueError: Kind or phase are unknown or do not fit each other or the environment.
    """

    def __init__(
        self,
        env: gym.Env[Any, Any],
        kind: str = "raise",
        phase: str | None = None,
        episodes: tuple[int, ...] | list[int] | None = (),
        attempts: tuple[int, ...] | list[int] | None = None,
        step: int = 1,
        attempt_rates: tuple[float, ...] | list[float] = (),
        within_steps: int = 20,
        step_rate: float = 0.0,
        after: int = 0,
        seconds: float = 3600.0,
        folder: str | None = None,
        limit_mib: int = 512,
        new_session: bool = False,
    ) -> None:
        super().__init__(env)
        self._kind = kind
        self._phase = check_kind(kind, phase, env.observation_space)
        self._episodes = None if episodes is None else frozenset(episodes)
        self._attempts = None if attempts is None else frozenset(attempts)
        self._step = step
        self._attempt_rates = tuple(attempt_rates)
        self._within_steps = within_steps
        self._step_rate = step_rate
        self._to_pass = after
        self._seconds = seconds
        self._folder = None if folder is None else Path(folder)
        self._limit_mib = limit_mib
        self._new_session = new_session
        self._child: subprocess.Popen[bytes] | None = None
        self._steps = 0
        self._leaks = 0
        self._shift = 0.0
        self._faulty = episodes is None
        """Whether the attempt is one of the listed ones."""
        self._drawn_step = np.inf
        self._announced = False
        self._label = ""
        self._last_listed: int | None = None
        """Index of the last listed episode that was begun."""
        if self._is_due("construct"):
            self._strike()

    def begin_episode(self, index: int, seed: int, attempt: int) -> None:
        """Decide whether, and at which step, the attempt that follows fails."""
        self._announced = True
        listed = self._episodes is not None and index in self._episodes
        self._faulty = (self._episodes is None or listed) and (self._attempts is None or attempt in self._attempts)
        self._label = f" of episode {index}, attempt {attempt}"
        if listed and self._faulty:
            self._last_listed = index
        self._draw(np.random.default_rng((index, attempt)), attempt)
        if self.env.has_wrapper_attr("begin_episode"):
            self.env.get_wrapper_attr("begin_episode")(index, seed, attempt)

    def reset(self, **kwargs: Any) -> Any:
        """Reset, or fail."""
        if not self._announced:
            self._draw(np.random.default_rng(), attempt=1)
        self._announced = False
        self._steps = 0
        self._shift = 0.001 * self._leaks
        due = self._faulty and self._is_due("reset")
        if due:
            self._strike()
        result = self.env.reset(**kwargs)
        return self._spoiled(result) if due else result

    def step(self, action: Any) -> Any:
        """Step, or fail."""
        self._steps += 1
        fatal = (self._faulty and self._steps == self._step) or self._steps == self._drawn_step
        due = fatal and self._is_due("step")
        if due:
            self._strike()
        result = self.env.step(action)
        if self._shift:
            result = (result[0], float(result[1]) + self._shift, *result[2:])
        return self._spoiled(result) if due else result

    def close(self) -> None:
        """Close the environment and terminate its child process, or fail."""
        try:
            if (self._last_listed is not None or not self._episodes) and self._is_due("close"):
                self._strike()
        finally:
            if self._child is not None:
                self._child.kill()
                self._child.wait()
            super().close()

    def _draw(self, rng: np.random.Generator, attempt: int) -> None:
        rate = self._attempt_rates[attempt - 1] if attempt <= len(self._attempt_rates) else 0.0
        self._drawn_step = float(rng.integers(1, self._within_steps + 1)) if rng.random() < rate else np.inf
        if self._step_rate:
            self._drawn_step = min(self._drawn_step, float(rng.geometric(self._step_rate)))

    def _is_due(self, phase: StrikePhase) -> bool:
        """Whether the fault comes in this phase; if only once, it comes now."""
        if phase != self._phase:
            return False
        if self._to_pass:
            self._to_pass -= 1
            return False
        if self._folder is None or self._kind in ("none", "spawn"):
            return True
        name = f"{self._kind}-{phase}" + ("" if self._last_listed is None else f"-{self._last_listed}")
        try:
            self._leave_file(name)
        except FileExistsError:
            return False
        return True

    def _strike(self) -> None:
        """Do what the kind does to the process or to this object."""
        if self._kind in STRIKES:
            at_step = f", at step {self._steps}" if self._phase == "step" else ""
            STRIKES[self._kind](Strike(f"{self._phase}{self._label}{at_step}", self._seconds, self._limit_mib))
        elif self._kind == "leak":
            self._leaks += 1
        elif self._kind == "spawn":
            self._spawn()

    def _spoiled(self, result: Any) -> Any:
        spoil = SPOILS.get(self._kind)
        return result if spoil is None else spoil(result)

    def _spawn(self) -> None:
        # Without the pipes of this process: their readers must not wait for the child.
        quiet = subprocess.DEVNULL
        self._child = subprocess.Popen(  # noqa: S603
            ["sleep", str(self._seconds)],
            stdin=quiet,
            stdout=quiet,
            stderr=quiet,
            start_new_session=self._new_session,
        )
        if self._folder is not None:
            self._leave_file(f"spawn-{self._child.pid}")

    def _leave_file(self, name: str) -> None:
        assert self._folder is not None
        self._folder.mkdir(parents=True, exist_ok=True)
        with (self._folder / name).open("x") as file:
            file.write(str(os.getpid()))


def faulty(context: EnvContext) -> FaultyEnv:
    """Build a :class:`FaultyEnv` from ``env`` and ``env_kwargs``, and its own arguments."""
    env, kwargs = wrapped_env(context)
    return FaultyEnv(env, **kwargs)


def dict_observation(context: EnvContext) -> FaultyEnv:
    """Build a :class:`DictObservation`, faulty if it is given :class:`FaultyEnv`'s arguments."""
    env, kwargs = wrapped_env(context)
    return FaultyEnv(DictObservation(env), **kwargs)
