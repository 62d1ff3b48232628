"""Kinds of faults, and the phases in which each can strike."""

from __future__ import annotations

import copy
import ctypes
import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

import gymnasium as gym
import numpy as np
import tree

from rl_eval.errors import nearest

StrikePhase = Literal["construct", "reset", "step", "close"]

EXIT_STATUS: Final = 13
"""Status that ``exit`` and ``os_exit`` leave with."""

_BLOCK_BYTES: Final = 2**24


class InjectedFault(RuntimeError):
    """Exception that an environment of this package raises on purpose."""


class Strike(NamedTuple):
    """One fault that is due."""

    where: str
    """Phase, episode, attempt and step, for the message."""
    seconds: float
    """How long a hang lasts."""
    limit_mib: int
    """Memory that a balloon may take."""


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
    # The limit is what keeps the machine alive.
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
"""Kinds that befall the process."""


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
