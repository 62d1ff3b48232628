"""Environment with faults of given kinds, in given episodes, attempts, phases and steps."""

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
    """Details of a fault that is injected now."""

    where: str
    """Description of phase, episode, attempt and step, for the message."""
    seconds: float
    """Duration of a hang, in seconds."""
    limit_mib: int
    """Maximum additional memory of ``balloon``, in MiB."""


# ------------------------------------------------------------------ faults of the process


def _raise(strike: Strike) -> None:
    raise InjectedFault(f"injected fault in {strike.where}")


def _loop(strike: Strike) -> None:
    end = time.perf_counter() + strike.seconds
    while time.perf_counter() < end:
        pass


def _gil_sleep(strike: Strike) -> None:
    # PyDLL, unlike CDLL, keeps the GIL while the C function runs. A signal ends the function early.
    end = time.perf_counter() + strike.seconds
    while (left := end - time.perf_counter()) > 0:
        ctypes.PyDLL(None).usleep(ctypes.c_uint(int(left * 1e6) + 1))


def _balloon(strike: Strike) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    ceiling = pages * resource.getpagesize() + strike.limit_mib * 2**20
    # The limit keeps memory free for other processes.
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


# ------------------------------------------------------------------ faults of returned values


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
"""Kinds of faults that change the result of ``reset`` or ``step``."""


# ------------------------------------------------------------------ phases of each kind


_EVERYWHERE: Final[tuple[StrikePhase, ...]] = ("step", "reset", "construct", "close")

PHASES: Final[Mapping[str, tuple[StrikePhase, ...]]] = {
    **dict.fromkeys(STRIKES, _EVERYWHERE),
    **dict.fromkeys(SPOILS, ("step", "reset")),
    "nan_reward": ("step",),
    "leak": ("reset", "step"),
    "spawn": ("construct",),
}
"""Possible phases of each kind, with the default first."""


def check_kind(kind: str, phase: str | None, space: gym.Space[Any]) -> StrikePhase:
    """Check a kind of fault, and return the phase in which it occurs.

    Args:
        kind: Name of the kind.
        phase: Name of the phase, or None for the kind's default.
        space: Observation space of the environment.

    Raises:
        ValueError: The kind or the phase is unknown, or the kind does not work in the phase or with the space.
    """
    if kind not in PHASES:
        raise ValueError(f"unknown kind {kind!r}; {nearest(kind, PHASES)}")
    if phase is not None and phase not in _EVERYWHERE:
        raise ValueError(f"unknown phase {phase!r}; {nearest(phase, _EVERYWHERE)}")
    if phase is not None and phase not in PHASES[kind]:
        raise ValueError(f"kind {kind!r} cannot occur in phase {phase!r}. Use {' or '.join(map(repr, PHASES[kind]))}")
    if kind == "missing_key" and not isinstance(space, gym.spaces.Dict):
        raise ValueError(f"kind 'missing_key' needs a Dict observation space, not {space}")
    if kind == "nan_observation" and not any(
        np.asarray(leaf).dtype.kind == "f" for leaf in tree.flatten(copy.deepcopy(space).sample())
    ):
        raise ValueError(f"kind 'nan_observation' needs floats in the observation space, not {space}")
    return next(known for known in PHASES[kind] if phase in (None, known))


class FaultyEnv(gym.Wrapper[Any, Any, Any, Any]):
    """Wrapper that injects one kind of fault, and otherwise behaves like the wrapped environment.

    ==================  ===========================================================================
    kind                effect
    ==================  ===========================================================================
    none                no fault, for comparison
    raise               raises :class:`InjectedFault`
    exit, os_exit       ``sys.exit(13)`` or ``os._exit(13)``
    segfault, abort     a real SIGSEGV or SIGABRT
    sigkill, sigstop    the process sends itself the signal
    loop                a Python loop that keeps a core busy for ``seconds``
    sleep, gil_sleep    a sleep of ``seconds``, which releases or holds the GIL
    balloon             allocates up to ``limit_mib`` of additional memory: MemoryError, or death
    nan_observation     the floats of the observation are NaN
    bad_shape           every part of the observation has an additional axis of size 2
    bad_dtype           every part of the observation is a string
    missing_key         the first key of a Dict observation is missing
    nan_reward          the reward is NaN
    not_a_tuple         returns None
    leak                rewards of later episodes of the same object increase by 0.001 per faulty episode
    spawn               each object starts a child process, which its ``close`` kills
    ==================  ===========================================================================

    Faults occur in the listed episodes, and in attempts that are drawn with ``attempt_rates`` and ``step_rate``. The
    draw depends only on the episode and the attempt, so a retry can succeed on any runner. If an evaluator does not
    call ``begin_episode``, the draws have no fixed seed.

    A hang ends after ``seconds``, and the environment then continues normally.

    Args:
        env: Environment to wrap.
        kind: Kind of the fault.
        phase: ``construct``, ``reset``, ``step`` or ``close``; by default the kind's first phase.
        episodes: Indices of the faulty episodes; None for all. A constructor does not know its episode, so it
            fails for every value. ``close`` fails after the start of a faulty episode, or always if ``episodes`` is
            None or empty.
        attempts: Numbers of the faulty attempts of these episodes, from 1; None for all.
        step: In phase ``step``, the number of the step that fails, from 1. A shorter episode does not fail.
        attempt_rates: Additional faults: probabilities that the first, second, ... attempt of every episode fails.
            Attempts after the last probability do not fail.
        within_steps: For ``attempt_rates``, the step that fails is drawn uniformly from 1 to this number. A shorter
            attempt does not fail.
        step_rate: Additional faults: probability that a step fails, for every step of every attempt.
        after: Number of faults that each object skips before its first fault.
        seconds: Duration of hangs, and lifetime of child processes, in seconds.
        folder: Folder of files that record faults, with names ``KIND-PHASE[-INDEX]`` and the id of the process as
            content. A recorded fault does not occur again in any process. So each listed episode fails only once. In
            ``construct``, and with ``episodes=None``, there is only one fault in total. Pass a folder if the fault
            kills the process, since such a fault uses up no attempt. ``spawn`` is not limited; it writes a file
            ``spawn-PID`` for each child.
        limit_mib: Highest additional memory of ``balloon``.
        new_session: Whether children of ``spawn`` start a separate session, which a signal to the process group does
            not reach.

    Raises:
        ValueError: The kind or the phase is unknown, or they do not fit each other or the environment.
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
        """Whether the current attempt is one of the faulty attempts."""
        self._drawn_step = np.inf
        self._announced = False
        self._label = ""
        self._last_listed: int | None = None
        """Index of the last faulty episode that started."""
        if self._is_due("construct"):
            self._strike()

    def begin_episode(self, index: int, seed: int, attempt: int) -> None:
        """Decide whether and at which step the next attempt fails. The wrapped environment gets the same call."""
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
        """Reset the environment. If a fault is due in this reset, inject the fault."""
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
        """Take a step. If a fault is due at this step, inject the fault."""
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
        """Inject the fault if it is due. Then kill the child process, and close the environment."""
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
        """Return whether the fault occurs in this phase now.

        With ``folder``, record the fault, so that it is not repeated.
        """
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
        """Apply the fault to the process or to this object."""
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
        # The child must not inherit the pipes of this process: their readers would wait for it.
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
    """Build a :class:`FaultyEnv`. The context has ``env`` and ``env_kwargs``, and the arguments of the class."""
    env, kwargs = wrapped_env(context)
    return FaultyEnv(env, **kwargs)


def dict_observation(context: EnvContext) -> FaultyEnv:
    """Build a :class:`DictObservation`. The arguments of :class:`FaultyEnv` add faults."""
    env, kwargs = wrapped_env(context)
    return FaultyEnv(DictObservation(env), **kwargs)
