"""Checks of an environment: an episode has to be a function of its seed and the actions.

Runners as an evaluation has them play whole episodes with made-up actions: in a new environment, in a used one, beside
another one, and in other processes. Traces of the episodes are compared, as in the determinism check.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import Any, Final, final

import cloudpickle
import gymnasium as gym
import numpy as np
import numpy.typing as npt
from gymnasium.utils.env_checker import check_env

from rl_eval.cli.checks import Finding, note, ok, problem, raised, warning
from rl_eval.config.settings import EvalSettings, PolicySection, with_values
from rl_eval.errors import EnvError
from rl_eval.policies.inference.policy_memory import changes, remembered
from rl_eval.recording.replay import Spectator, run_again
from rl_eval.records.determinism import first_difference
from rl_eval.records.episode import EpisodeSpec, Lease, RunReport, Truncation, without_place
from rl_eval.runners import EvalRunner, runner_class
from rl_eval.runners.action_masks import ActionMasks
from rl_eval.runners.environment import time_limit
from rl_eval.runners.multi_agent.team import build_team
from rl_eval.scheduling.plan import EpisodePlan

MAX_STEPS: Final = 10_000
MAX_SECONDS: Final = 3.0

_EPISODES: Final = 4
"""Episodes that one environment plays in turn; the last is the first once more."""
_ENDLESS_STEPS: Final = 1_000
"""Steps without an end that make an environment endless, rather than slow."""
_POLICY: Final = "rl_eval.policies.uniform:UniformPolicy"
_PROCESS_S: Final = 120.0
_HASH_SEEDS: Final = ("1", "2")
_CALL: Final = "import sys, cloudpickle; cloudpickle.load(sys.stdin.buffer)(sys.argv[1])"

_NO_MATTER: Final = re.compile(
    r"different from the unwrapped version|is probably too (low|high)|symmetric and normalized|maximum and minimum"
    r"|Casting input|eterministic|not equal although similar|within the observation space|expecting .* dtype"
)
"""Warnings of gymnasium about wrappers and spaces that are hard to train on, which are no matter to an evaluation, and
about what whole episodes show as well, bit by bit."""
_MARKS: Final = re.compile(r"\x1b\[[0-9;]*m|(WARN|ERROR): ")

Trace = npt.NDArray[np.void]


def check_environment(settings: EvalSettings, *, elsewhere: bool = True) -> Iterator[Finding]:
    """Build the environment a few times and play whole episodes in it; only build one of several agents.

    Args:
        settings: What is to be evaluated.
        elsewhere: Whether two other processes play an episode as well, if there is no problem here.
    """
    if settings.runners.runner_class.several_agents:
        yield _check_agents(settings)
        return
    problems = False
    with ExitStack() as runners:
        examination = _Examination(settings, runners)
        for finding in examination.findings():
            problems = problems or finding.level == "problem"
            yield finding
        if elsewhere and not problems:
            yield examination.compare_processes()


def _check_agents(settings: EvalSettings) -> Finding:
    """Build an environment of several agents; episodes of it need the policies, which are checked after it."""
    try:
        with closing(build_team(settings, 0, 0)) as team:
            return ok(f"constructs; agents {', '.join(map(str, team.agents))}")
    except Exception as error:
        return raised("the constructor", error)


class _Watch(Spectator):
    """Observer of the environments of a runner; it has every observation compared with its space."""

    def __init__(self, runner: EvalRunner) -> None:
        self._look = runner.inference.observations.forget_notes  # Of many observations a runner compares a few.
        self.info_keys: set[Any] = set()
        self.after_reset = _generators()

    def on_episode_start(self, spec: EpisodeSpec, attempt: int, observation: Any) -> None:
        self.after_reset = _generators()

    def on_step(self, *step: Any) -> None:
        self._look()
        if isinstance(info := step[5], dict):  # The runner refuses anything else.
            self.info_keys.update(info)


def _generators() -> Mapping[str, int]:
    return remembered(None).generators


@final
class _Examination:
    """Episodes of several environments of one kind, and their comparison."""

    def __init__(self, settings: EvalSettings, runners: ExitStack) -> None:
        self._settings, self._runners = settings, runners
        self._steps = min(settings.evaluation.max_episode_steps or MAX_STEPS, MAX_STEPS)
        self._limit: int | None = None
        """The environment's own limit of steps."""
        self._attempts = settings.fault_tolerance.max_attempts_per_episode
        self._watches: list[_Watch] = []
        plan = EpisodePlan(_EPISODES, settings.evaluation.seed)
        self._leases = [Lease(index, plan[index].seed, 1, 0, traced=True) for index in range(_EPISODES)]
        self._reports: list[RunReport] = []

    def findings(self) -> Iterator[Finding]:
        """Yield the findings, as they are made."""
        try:
            runner, watch = self._new_runner()
        except Exception as error:
            yield raised("the constructor", error)
            return
        observations, actions = map(_short, runner.spaces)
        yield ok(f"constructs; observations {observations}, actions {actions}")
        yield from _check_contract(watch.env)
        if (limit := time_limit(watch.env)) is not None:
            self._limit, self._steps = limit, min(limit, self._steps)
        try:
            yield from self._play_and_compare()
        except EnvError as error:
            yield problem(f"an episode failed: {error}", "repair the environment")
        except Exception as error:
            yield raised("an episode", error, "repair the environment")

    def _play_and_compare(self) -> Iterator[Finding]:
        faults = self._fit_steps()
        if len(faults) == self._attempts:
            yield problem(
                f"every attempt of an episode failed; the last: {faults[-1]}",
                "repair the environment: an evaluation would record this episode as failed",
            )
            return
        if faults:
            yield warning(
                f"attempts that failed before one did not: {len(faults)}; the last: {faults[-1]}",
                "repair it, or let retries hide it: the result says how often it happened",
            )
        first, watch = self._new_runner()
        before = _generators()
        (reference,) = self._play(first, self._leases[0])
        touched = {"reset": changes(before, watch.after_reset), "step": changes(watch.after_reset, _generators())}
        second = self._new_runner()[0]
        if text := _difference(reference, *self._play(second, self._leases[0])):
            yield problem(
                f"equal seeds and actions give different episodes, first in {text}",
                "begin reset() with super().reset(seed=seed), and draw every random number from self.np_random, which "
                "that seeds; until then no two evaluations agree, and what follows from it is not checked",
            )
        else:
            yield ok(f"equal seeds and actions give equal episodes ({len(reference) - 1:,} steps compared)")
            yield self._check_reuse(reference, first, second)
            yield self._check_neighbours(reference)
        yield from self._check_reports()
        for phase, names in touched.items():
            for name in names:
                yield warning(f"{phase}() changes {name}, which other code shares", "draw from self.np_random instead")
        if not any(touched.values()):
            yield ok("global random state is left alone")

    def _fit_steps(self) -> list[str]:
        """Find an attempt that does not fail, and the number of steps for which there is time; return the faults."""
        faults: list[str] = []
        for attempt in range(1, self._attempts + 1):
            self._leases = [lease._replace(attempt=attempt) for lease in self._leases]
            report = self._new_runner()[0].run(self._leases[:1], MAX_SECONDS)
            if not report.faults:
                self._steps = min([self._steps, *(max(1, live.step) for live in report.progress)])
                break
            faults += [f"{fault.error_type}: {fault.message}" for fault in report.faults]
        return faults

    def _play(self, runner: EvalRunner, *leases: Lease) -> list[Trace]:
        """Play episodes, side by side if the runner has the lanes, and return their traces.

        Raises:
            EnvError: An attempt failed.
        """
        reports = list(run_again(runner, leases, len(leases)))
        self._reports += reports
        for fault in (fault for report in reports for fault in report.faults):
            raise EnvError(f"{fault.error_type}: {fault.message}")
        return [report.traces[lease.index] for report, lease in zip(reports, leases, strict=True)]

    def _check_reuse(self, reference: Trace, used: EvalRunner, other: EvalRunner) -> Finding:
        """Play episodes one after the other in one environment, and each in a new one."""
        first, *others = self._leases
        alone = [*(self._play(other, lease._replace(fresh=True))[0] for lease in others), reference]
        again = [self._play(used, lease)[0] for lease in (*others, first)]
        text = next(filter(None, map(_difference, alone, again)), "")
        if not text:
            return ok(f"an environment that has run episodes is like a new one ({len(alone)} compared)")
        text = f"an environment remembers its former episodes: a new one differs in {text}"
        if self._settings.environment.env_reuse == "episode":
            return note(f"{text}; environment.env_reuse: episode takes care of it")
        return problem(text, "put everything back in reset(), or set environment.env_reuse: episode")

    def _check_neighbours(self, reference: Trace) -> Finding:
        """Play the episode while another environment takes turns with it."""
        text = _difference(reference, self._play(self._new_runner(lanes=2)[0], *self._leases[:2])[0])
        if not text:
            return ok("environments in one process do not disturb each other")
        text = f"environments in one process disturb each other: stepped in turn, they differ in {text}"
        fix = "keep random generators and state in the instance, or set runners.num_envs_per_runner: 1"
        return (problem if self._settings.runners.lanes > 1 else warning)(text, fix)

    def _check_reports(self) -> Iterator[Finding]:
        """Yield what the runners reported beside the traces."""
        rows = np.concatenate([report.rows for report in self._reports])
        yield self._check_end(rows)
        notes = {without_place(text): text for report in reversed(self._reports) for text in report.notes}
        for text in notes.values():
            yield warning(text, "correct observation_space, or what the environment returns")
        if not notes:
            yield ok("observations are inside their space")
        seen = set().union(*(watch.info_keys for watch in self._watches))
        if missed := [key for key in self._settings.evaluation.info_keys if key not in seen]:
            had = ", ".join(sorted(map(str, seen))) or "nothing"
            yield warning(
                f"no step had {', '.join(map(repr, missed))} of evaluation.info_keys in its info, which had {had}",
                "correct the name, unless such steps are rare",
            )
        yield note(
            f"seen: {_EPISODES} episodes, up to step {rows['length'].max():,}, with made-up actions; what comes later, "
            "or only with the policy's actions, was not seen"
        )

    def _check_end(self, rows: npt.NDArray[np.void]) -> Finding:
        """Tell what ended the episodes, or would."""
        limits = {"evaluation.max_episode_steps": self._settings.evaluation.max_episode_steps}
        limits["the environment's own limit"] = self._limit
        if given := [(limit, whose) for whose, limit in limits.items() if limit is not None]:
            limit, whose = min(given)
            return ok(f"episodes end after {limit:,} steps at the latest ({whose})")
        if len(lengths := rows["length"][rows["truncated_by"] != Truncation.MAX_EPISODE_STEPS]):
            return ok(f"episodes end by themselves, here after {lengths.min():,} to {lengths.max():,} steps")
        timeout = self._settings.fault_tolerance.episode_timeout_s
        stop = f"only fault_tolerance.episode_timeout_s={timeout:g} stops it" if timeout else "nothing stops it"
        return (problem if self._steps >= _ENDLESS_STEPS else warning)(
            f"no episode ended in {self._steps:,} steps or {MAX_SECONDS:g} s: if none ever does, {stop}",
            "set evaluation.max_episode_steps",
        )

    def compare_processes(self) -> Finding:
        """Let two processes with different ``PYTHONHASHSEED`` play the first episode."""
        try:
            play = cloudpickle.dumps(partial(_play_first, self._made_up(1), self._leases[0]))
            with ThreadPoolExecutor(len(_HASH_SEEDS)) as both:  # Most of their time goes into imports.
                ours, theirs = both.map(partial(_play_elsewhere, play), _HASH_SEEDS)
        except Exception as error:  # Whatever cannot be sent, imported or finished there.
            return note(f"not compared between processes: {type(error).__name__}: {error}")
        if text := _difference(ours, theirs):
            return problem(
                f"two processes play different episodes: they differ in {text}",
                "look for the order of a set or of hash(), an id(), the clock, files; rl-eval and its runners start "
                "with PYTHONHASHSEED=0, a script that evaluates in its own process may not",
            )
        return ok(f"two processes with other hash seeds play equal episodes ({len(ours) - 1:,} steps compared)")

    def _new_runner(self, lanes: int = 1) -> tuple[EvalRunner, _Watch]:
        runner = runner_class("vector")(self._made_up(lanes), 0)
        assert isinstance(runner, EvalRunner)
        watch = _Watch(runner)
        self._watches.append(watch)
        self._runners.callback(runner.stop)
        runner.observe({"doctor": watch.watch})
        runner.run((), 0.0)  # It probes the policy in its first call.
        return runner, watch

    def _made_up(self, lanes: int) -> EvalSettings:
        """Return settings with made-up actions instead of the policy, which may not pickle."""
        policy = PolicySection(policy=_POLICY, actions="none", deterministic=False)
        return with_values(
            self._settings.model_copy(update={"policy": policy}),
            environment={"env_reuse": "lane"},
            runners={"runner": "vector", "num_envs_per_runner": lanes},
            evaluation={"max_episode_steps": self._steps, "observers": ()},
            fault_tolerance={"episode_timeout_s": None},
        )


def _difference(ours: Trace, theirs: Trace) -> str:
    """Return the first difference of two episodes as text; empty if there is none."""
    found = first_difference(0, ours, theirs)
    if found is None:
        return ""
    where = f"in step {found.step}" if found.step else "after reset"
    return f"the {found.what} {where}"


def _check_contract(env: Any) -> Iterator[Finding]:
    """Call gymnasium's own checker, which resets and steps a few times, and stops at the first broken part."""
    if not isinstance(env, gym.Env) or isinstance(env, ActionMasks):
        yield note("gymnasium's check_env takes a gymnasium.Env without action masks: not checked by it")
        return
    texts = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            check_env(env, skip_render_check=True, skip_close_check=True)
        except (Exception, SystemExit) as error:
            texts = [f"{type(error).__name__}: {error}"]
    texts = [text for one in caught if "WARN: " in (text := str(one.message))] + texts
    texts = [" ".join(_MARKS.sub("", text).split()) for text in texts]
    found = dict.fromkeys(text for text in texts if not _NO_MATTER.search(text))
    for text in found:
        yield warning(f"gymnasium's check_env: {text}", "https://gymnasium.farama.org/api/env has the contract")
    if not found:
        yield ok("gymnasium's check_env has no complaint")


def _short(space: gym.Space[Any]) -> str:
    """Return the name of a space without its bounds."""
    if isinstance(space, gym.spaces.Dict):
        return "{" + ", ".join(f"{name}: {_short(part)}" for name, part in space.spaces.items()) + "}"
    if isinstance(space, gym.spaces.Tuple):
        return "(" + ", ".join(map(_short, space.spaces)) + ")"
    if isinstance(space, gym.spaces.Discrete):
        return str(space)
    return f"{type(space).__name__}{space.shape} of {space.dtype}"


def _play_first(settings: EvalSettings, lease: Lease, file: str) -> None:
    """Play an episode, and write its trace to a file."""
    (report,) = run_again(runner_class("vector")(settings, 0), [lease])
    np.save(file, report.traces[lease.index])


def _play_elsewhere(play: bytes, hash_seed: str) -> Trace:
    """Play an episode in another process.

    Raises:
        RuntimeError: It failed there.
        TimeoutExpired: It did not end in time.
    """
    with tempfile.TemporaryDirectory(prefix="rl-eval-doctor-") as folder, tempfile.TemporaryFile() as errors:
        played = Path(folder) / "trace.npy"
        ended = subprocess.run(  # noqa: S603 -- This Python.
            [sys.executable, "-c", _CALL, played],
            env=os.environ | {"PYTHONHASHSEED": hash_seed, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            input=play,
            stdout=subprocess.DEVNULL,
            stderr=errors,  # No pipe: what an environment starts may hold its end open.
            timeout=_PROCESS_S,
            check=False,
        )
        if ended.returncode:
            errors.seek(0)
            lines = errors.read().decode(errors="replace").strip().splitlines()
            raise RuntimeError(lines[-1] if lines else f"it ended with exit status {ended.returncode}")
        return np.asarray(np.load(played))
