"""One fault at a chosen place: which episodes, which of their attempts, in which phase and at which step."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import gymnasium as gym

from rl_eval.protocols import EnvContext
from rl_eval.testing.environments import wrapped_env
from rl_eval.testing.kinds import SPOILS, STRIKES, Strike, StrikePhase, check_kind

__all__ = ["FaultyEnv", "faulty"]


class FaultyEnv(gym.Wrapper[Any, Any, Any, Any]):
    """Goes wrong in one way at one place, and is the plain environment everywhere else.

    ==================  ===========================================================================
    kind                what happens
    ==================  ===========================================================================
    none                nothing: the undisturbed twin
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
    leak                later episodes of the same object have greater rewards: 0.001 per guilty episode
    spawn               each object starts a child process, which its ``close`` ends
    ==================  ===========================================================================

    A hang that nobody ends is over after ``seconds``, and the environment goes on as if nothing had been.

    Args:
        env: Environment to wrap.
        kind: What goes wrong.
        phase: ``construct``, ``reset``, ``step`` or ``close``; by default the kind's usual one.
        episodes: Indices of the guilty episodes. A constructor does not know its episode and strikes whatever is
            listed here; ``close`` strikes after a guilty
            episode was begun, or always if none is listed.
        attempts: Their guilty attempts, from 1; None for all.
        step: In phase ``step``, the step that strikes, from 1. A shorter episode is spared.
        seconds: How long hangs last, and children live.
        folder: Strike only once per episode (in ``construct``: once) over all processes: a file
            ``KIND-PHASE[-INDEX]`` in this folder remembers it, and holds the id of the process that was struck.
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
        kind: str = "none",
        phase: str | None = None,
        episodes: tuple[int, ...] | list[int] = (),
        attempts: tuple[int, ...] | list[int] | None = None,
        step: int = 1,
        seconds: float = 3600.0,
        folder: str | None = None,
        limit_mib: int = 512,
        new_session: bool = False,
    ) -> None:
        super().__init__(env)
        self._kind = kind
        self._phase = check_kind(kind, phase, env.observation_space)
        self._episodes = frozenset(episodes)
        self._attempts = None if attempts is None else frozenset(attempts)
        self._fatal_step = step
        self._seconds = seconds
        self._folder = None if folder is None else Path(folder)
        self._limit_mib = limit_mib
        self._new_session = new_session
        self._child: subprocess.Popen[bytes] | None = None
        self._steps = 0
        self._leaks = 0
        self._shift = 0.0
        self._guilty = False
        self._label = ""
        self._culprit: int | None = None
        """Index of the last guilty episode that was begun."""
        if self._is_due("construct"):
            self._strike()

    def begin_episode(self, index: int, seed: int, attempt: int) -> None:
        """Take note of whether the attempt that follows is guilty."""
        self._guilty = index in self._episodes and (self._attempts is None or attempt in self._attempts)
        self._label = f" of episode {index}, attempt {attempt}"
        if self._guilty:
            self._culprit = index
        if self.env.has_wrapper_attr("begin_episode"):
            self.env.get_wrapper_attr("begin_episode")(index, seed, attempt)

    def reset(self, **kwargs: Any) -> Any:
        """Reset, or go wrong."""
        self._steps = 0
        self._shift = 0.001 * self._leaks
        due = self._guilty and self._is_due("reset")
        if due:
            self._strike()
        result = self.env.reset(**kwargs)
        return self._spoiled(result) if due else result

    def step(self, action: Any) -> Any:
        """Step, or go wrong."""
        self._steps += 1
        due = self._guilty and self._steps == self._fatal_step and self._is_due("step")
        if due:
            self._strike()
        result = self.env.step(action)
        if self._shift:
            result = (result[0], float(result[1]) + self._shift, *result[2:])
        return self._spoiled(result) if due else result

    def close(self) -> None:
        """Close the environment and end its child, or go wrong."""
        try:
            if (self._culprit is not None or not self._episodes) and self._is_due("close"):
                self._strike()
        finally:
            if self._child is not None:
                self._child.kill()
                self._child.wait()
            super().close()

    def _is_due(self, phase: StrikePhase) -> bool:
        """Whether the fault strikes in this phase; if only once, the caller is who it strikes."""
        if phase != self._phase:
            return False
        if self._folder is None or self._kind == "spawn":
            return True
        name = f"{self._kind}-{phase}" if self._culprit is None else f"{self._kind}-{phase}-{self._culprit}"
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
        # Without the pipes of this process: whoever reads them must not wait for the child.
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
