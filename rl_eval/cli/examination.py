"""Checks that the seed and the actions determine an episode of an environment.

Runners like those of an evaluation play whole episodes with random actions: in a new environment, in a reused
environment, in one of two environments that are stepped in turn, and in other processes. The traces are compared, as in
the determinism check.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator
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

from rl_eval.adapters import RANDOM
from rl_eval.cli.checks import Finding, note, ok, problem, raised, warning
from rl_eval.cli.simulator_checks import check_simulator
from rl_eval.config.settings import EvalSettings, PolicySection, with_values
from rl_eval.errors import EnvError
from rl_eval.recording.replay import Spectator
from rl_eval.records.determinism import first_difference, traced_runs
from rl_eval.records.episode import Condition, Fault, Lease, RunReport, Truncation, without_place
from rl_eval.runners import EvalRunner, VectorEvalRunner, class_of, layout_of
from rl_eval.runners.action_masks import ActionMasks
from rl_eval.runners.again import run_again
from rl_eval.runners.environment import takes_context, time_limit
from rl_eval.runners.interpreter import PYTHON
from rl_eval.runners.multi_agent.team import build_team
from rl_eval.runners.slot_process import slot_env_of
from rl_eval.scheduling.plan import EpisodePlan

MAX_STEPS: Final = 10_000
MAX_SECONDS: Final = 3.0

_EPISODES: Final = 4
"""Number of different episodes that one environment plays in turn; after them, it plays the first episode again."""
_CONDITIONS: Final = 8
_ENDLESS_STEPS: Final = 1_000
"""Number of steps without a finished episode after which an environment counts as endless."""
_PROCESS_S: Final = 120.0
_HASH_SEEDS: Final = ("1", "2")
_CALL: Final = "import sys, cloudpickle; cloudpickle.load(sys.stdin.buffer)(sys.argv[1])"

_NO_MATTER: Final = re.compile(
    r"different from the unwrapped version|is probably too (low|high)|symmetric and normalized|maximum and minimum"
    r"|Casting input|eterministic|not equal although similar|within the observation space|expecting .* dtype"
)
"""Warnings of gymnasium that are ignored: about wrappers, about spaces that are hard to train on, and about differences
that the bitwise comparison of whole episodes finds as well."""
_MARKS: Final = re.compile(r"\x1b\[[0-9;]*m|(WARN|ERROR): ")

Trace = npt.NDArray[np.void]


def check_environment(settings: EvalSettings, *, elsewhere: bool = True) -> Iterator[Finding]:
    """Build the environment a few times and play whole episodes in it; a multi-agent environment is only built.

    Args:
        settings: Settings of the evaluation.
        elsewhere: Whether two other processes also play an episode. They do so only if this process found no problem.
    """
    facts = class_of(settings).facts
    if facts.steps_all_slots:
        yield from check_simulator(settings)
        return
    if facts.agents:
        yield _check_agents(settings)
        return
    problems = False
    with ExitStack() as runners:
        examination = _Examination(settings, runners)
        for finding in examination.findings():
            problems = problems or finding.level == "problem"
            yield finding
        if elsewhere and not problems and settings.environment.python is None:
            yield examination.compare_processes()


def _check_agents(settings: EvalSettings) -> Finding:
    """Build a multi-agent environment; its episodes need the policies, which are checked later."""
    try:
        with closing(build_team(settings, 0, 0)) as team:
            return ok(f"the environment can be built; agents {', '.join(map(str, team.agents))}")
    except Exception as error:
        return raised("the constructor", error)


class _Watch(Spectator):
    """Observer of the environments of a runner; checks every observation against the observation space."""

    def __init__(self, runner: EvalRunner) -> None:
        self._look = runner.inference.observations.forget_notes  # By default a runner checks a sample.
        self.info_keys: set[Any] = set()

    def on_step(self, *step: Any) -> None:
        self._look()
        if isinstance(info := step[5], dict):  # The runner rejects anything else.
            self.info_keys.update(info)


class _Reseeded(gym.Wrapper[Any, Any, Any, Any]):
    """Environment that gets the same seed in every episode."""

    def __init__(self, env: gym.Env[Any, Any], seed: int) -> None:
        super().__init__(env)
        self._seed = seed

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return self.env.reset(seed=self._seed, options=options)


@final
class _Examination:
    """Plays episodes in several instances of the environment, and compares the episodes."""

    def __init__(self, settings: EvalSettings, runners: ExitStack) -> None:
        self._settings, self._runners = settings, runners
        self._one_instance = settings.environment.instances == "one"
        """Whether a process can build only one environment, so that each runner needs another process."""
        self._python = settings.environment.python is not None
        """Whether the environment is in another interpreter, with one process per environment."""
        self._runner = "subprocess" if self._one_instance or self._python else "vector"
        self._steps = min(settings.evaluation.max_episode_steps or MAX_STEPS, MAX_STEPS)
        self._limit: int | None = None
        """Step limit of the environment itself, if it has one."""
        self._attempts = settings.fault_tolerance.max_attempts_per_episode
        self._watches: list[_Watch] = []
        plan = EpisodePlan(_EPISODES, settings.evaluation.seed, conditions=settings.evaluation.conditions)
        self._leases = [Lease(plan[index], 1).with_how(traced=True) for index in range(_EPISODES)]
        self._reports: list[RunReport] = []
        """Reports of completed episodes."""
        self._failures: list[str] = []
        """Errors of failed attempts."""
        self._given_up = ""
        """Last error of an episode that failed on all attempts; empty if there is none."""
        self._generators: dict[str, None] = {}
        """Changes of global random generators, as keys, as the runners reported them."""

    def findings(self) -> Iterator[Finding]:
        """Yield the findings one by one."""
        try:
            runner, watch = self._new_runner()
        except Exception as error:
            yield raised("the constructor", error)
            return
        observations, actions = map(_short, runner.spaces)
        yield ok(f"the environment can be built; observations {observations}, actions {actions}")
        if self._python:
            found = {key: value for key, value in runner.inference.numerics.items() if key.startswith("environment/")}
            yield ok(f"{PYTHON}: {', '.join(f'{key[12:]} {value}' for key, value in found.items())}")
        else:
            yield from _check_contract(watch.env)
        limit = time_limit(watch.env) if self._runner == "vector" else slot_env_of(watch.env).time_limit
        if limit is not None:
            self._limit, self._steps = limit, min(limit, self._steps)
        try:
            if self._fit_steps():
                yield from self._tried(self._play_and_compare())
        except Exception as error:
            yield raised("an episode", error, "fix the environment")
        yield from self._check_failures()
        if self._reports:
            yield from self._check_reports()
        yield from self._check_generators()

    def _tried(self, findings: Iterator[Finding]) -> Iterator[Finding]:
        """Yield the findings of a check until an episode fails on all attempts, which is reported later."""
        try:
            yield from findings
        except EnvError as error:
            self._given_up = str(error)

    def _play_and_compare(self) -> Iterator[Finding]:
        (reference,) = self._play(self._new_runner()[0], self._leases[0])
        used = self._new_runner()[0]
        if text := _difference(reference, *self._play(used, self._leases[0])):
            yield problem(
                f"equal seeds and actions give different episodes, first in {text}",
                "begin reset() with super().reset(seed=seed), which seeds self.np_random. Draw every random number "
                "from self.np_random. Until then, equal seeds give different episodes, and other checks are skipped",
            )
            return
        yield ok(f"equal seeds and actions give equal episodes ({len(reference) - 1:,} steps compared)")
        yield from self._tried(self._check_reuse(reference, used))
        yield from self._tried(self._check_neighbours(reference))
        yield from self._tried(self._check_conditions())

    def _fit_steps(self) -> bool:
        """Find an attempt that does not fail; return whether there is one.

        The later episodes run at most as many steps as this attempt makes in ``MAX_SECONDS``.
        """
        for attempt in range(1, self._attempts + 1):
            self._leases = [lease._replace(attempt=attempt) for lease in self._leases]
            report = self._new_runner()[0].run(self._leases[:1], MAX_SECONDS)
            self._generators |= dict.fromkeys(report.generators)
            if not report.faults:
                self._steps = min([self._steps, *report.progress["step"].clip(1).tolist()])
                return True
            self._failures += map(_described, report.faults)
        self._given_up = self._failures[-1]
        return False

    def _play(self, runner: EvalRunner, *leases: Lease) -> list[Trace]:
        """Play episodes, in parallel if the runner has several lanes, and return their traces.

        If an episode fails, all of them run again, up to the maximum number of attempts.

        Raises:
            EnvError: An episode failed on all attempts.
        """
        for _ in range(self._attempts):
            reports = list(run_again(runner, leases, len(leases)))
            self._reports += [report for report in reports if not report.faults]
            self._generators |= dict.fromkeys(change for report in reports for change in report.generators)
            faults = {fault.index: fault for report in reports for fault in report.faults}
            if not faults:
                return [traced_runs(report).traces[lease.index] for report, lease in zip(reports, leases, strict=True)]
            self._failures += map(_described, faults.values())
            leases = tuple([one._replace(attempt=one.attempt + (one.index in faults)) for one in leases])
        raise EnvError(self._failures[-1])

    def _check_failures(self) -> Iterator[Finding]:
        """Report failed attempts: a problem if all attempts of an episode failed."""
        if self._given_up:
            yield problem(
                f"every attempt of an episode failed; last error: {self._given_up}",
                "fix the environment; an evaluation would record this episode as failed",
            )
        elif self._failures:
            yield warning(
                f"{len(self._failures)} attempts of episodes failed, and {len(self._reports)} completed; last error: "
                f"{self._failures[-1]}",
                "fix the environment, or rely on retries; the result counts these faults",
            )

    def _check_generators(self) -> Iterator[Finding]:
        for change in self._generators:
            yield warning(
                f"{change}, so environments of one process can affect each other",
                "draw random numbers from self.np_random instead",
            )
        if self._reports and not self._generators:
            yield ok("global random state is unchanged")

    def _check_reuse(self, reference: Trace, used: EvalRunner) -> Iterator[Finding]:
        """Compare episodes in a reused environment with the same episodes in new environments."""
        first, *others = self._leases
        again = [self._play(used, lease)[0] for lease in (*others, first)]
        alone = [*(self._play(self._new_runner()[0], lease)[0] for lease in others), reference]
        text = next(filter(None, map(_difference, alone, again)), "")
        if self._python:
            starts = zip((*others, first), alone, again, strict=True)
            texts = [f"seed {one.seed}: {_start(new)}, {_start(reused)}" for one, new, reused in starts]
            yield ok(f"digests of first observations in a new and in a reused environment: {'; '.join(texts[-2:])}")
        copies = list(self._check_starts(alone))
        if not text:
            yield ok(f"a reused environment gives the same episodes as a new one ({len(alone)} compared)")
        else:
            text = f"an environment keeps state between episodes: a reused and a new environment differ in {text}"
            if self._settings.environment.env_reuse == "episode":
                yield note(text if copies else f"{text}; environment.env_reuse: episode avoids this")
            else:
                fix = "restore all state in reset()"
                yield problem(text, fix if copies else f"{fix}, or set environment.env_reuse: episode")
        yield from copies

    def _check_starts(self, alone: list[Trace]) -> Iterator[Finding]:
        """Compare episodes with different seeds and equal actions, if their first observations are equal."""
        starts = {int(trace["observation"][0]) for trace in alone}
        if len(starts) > 1 or self._settings.evaluation.conditions is not None or self._python:
            return
        first, *others = self._leases
        wrappers = [partial(_Reseeded, seed=lease.seed) for lease in others]  # The actions depend on the lease's seed.
        episodes = [self._play(self._new_runner(wrapper=wrapper)[0], first)[0] for wrapper in wrappers]
        if not any(_difference(alone[-1], episode) for episode in episodes):
            yield note(
                f"{len(alone)} seeds gave 1 distinct episode with equal actions: the seed has no effect on a new "
                "environment. If it should have one, reset() must use it; for a table of starts, use "
                "evaluation.conditions"
            )

    def _check_neighbours(self, reference: Trace) -> Iterator[Finding]:
        """Compare an episode in a single environment with the same episode beside a second environment.

        The two environments are stepped in turn, in one process.
        """
        if self._python:
            return
        if self._one_instance:
            yield note("environment.instances is one, so episodes beside another environment were not compared")
            return
        text = _difference(reference, self._play(self._new_runner(lanes=2)[0], *self._leases[:2])[0])
        if text:
            text = (
                "environments in one process affect each other: with a second environment, an episode differs in "
                f"{text}"
            )
            fix = "keep random generators and other state in the instance, or set runners.num_envs_per_runner: 1"
            yield (problem if layout_of(self._settings).lanes > 1 else warning)(text, fix)
        elif not self._generators:
            yield ok("environments in one process do not affect each other")

    def _check_conditions(self) -> Iterator[Finding]:
        """Compare the first observations of episodes that have the same seed and different conditions."""
        conditions = self._settings.evaluation.conditions
        rows = [] if conditions is None else [Condition(*one) for one in conditions.rows.items()][:_CONDITIONS]
        if not rows:
            return
        first = self._leases[0]
        leases = [first._replace(spec=first.spec._replace(condition=row)) for row in rows]
        runner = self._new_runner()[0]
        starts = {int(self._play(runner, lease)[0]["observation"][0]) for lease in leases}
        if len(starts) == 1 < len(rows):
            text = f"{len(rows)} conditions with one seed gave the same first observation"
            yield note(f"{text}: reset() ignores the conditions, or the conditions change only later steps")
        else:
            yield ok(f"{len(rows)} conditions with one seed gave {len(starts)} different first observations")

    def _check_reports(self) -> Iterator[Finding]:
        """Yield findings from the episode records and notes of the runners."""
        if self._python:
            seconds = sum(one.step_seconds for one in self._reports) / sum(one.env_steps for one in self._reports)
            yield note(f"a step of the environment takes {1e3 * seconds:.3g} ms in its process")
        rows = np.concatenate([report.rows for report in self._reports])
        yield self._check_end(rows)
        notes = {without_place(text): text for report in reversed(self._reports) for text in report.notes}
        for text in notes.values():
            yield warning(text, "correct observation_space or the returned observations")
        if not notes:
            yield ok("observations are in their space")
        seen = set().union(*(watch.info_keys for watch in self._watches))
        if missed := [key for key in self._settings.evaluation.info_keys if key not in seen]:
            had = ", ".join(sorted(map(str, seen))) or "nothing"
            yield warning(
                f"evaluation.info_keys: no info contained {', '.join(map(repr, missed))}; keys found: {had}",
                "correct the name, or ignore this if the key is rare",
            )
        yield note(
            f"checked {_EPISODES} episodes up to step {rows['length'].max():,}, with random actions. Later steps are "
            "not checked, nor are states that random actions do not reach"
        )

    def _check_end(self, rows: npt.NDArray[np.void]) -> Finding:
        """Check that episodes end, and report what ends them."""
        limits = {"evaluation.max_episode_steps": self._settings.evaluation.max_episode_steps}
        limits["the environment's own limit"] = self._limit
        if given := [(limit, whose) for whose, limit in limits.items() if limit is not None]:
            limit, whose = min(given)
            return ok(f"episodes end after {limit:,} steps at the latest ({whose})")
        if len(lengths := rows["length"][rows["truncated_by"] != Truncation.MAX_EPISODE_STEPS]):
            return ok(f"episodes end by themselves, here after {lengths.min():,} to {lengths.max():,} steps")
        timeout = self._settings.fault_tolerance.episode_timeout_s
        stop = (
            f"only fault_tolerance.episode_timeout_s={timeout:g} ends these episodes"
            if timeout
            else "there is no limit"
        )
        return (problem if self._steps >= _ENDLESS_STEPS else warning)(
            f"no episode ended in {self._steps:,} steps or {MAX_SECONDS:g} s; {stop}",
            "set evaluation.max_episode_steps",
        )

    def compare_processes(self) -> Finding:
        """Compare the first episode in two processes with different values of ``PYTHONHASHSEED``."""
        try:
            self._runners.close()
            play = cloudpickle.dumps(partial(_play_first, self._made_up(1), self._leases[0], self._attempts))
            one_by_one = self._one_instance or takes_context(self._settings.environment)
            # Imports take most of the time.
            with ThreadPoolExecutor(1 if one_by_one else len(_HASH_SEEDS)) as both:
                ours, theirs = both.map(partial(_play_elsewhere, play), _HASH_SEEDS)
        except Exception as error:  # Pickling, an import or the episode itself failed.
            return note(f"episodes were not compared between processes: {type(error).__name__}: {error}")
        if text := _difference(ours, theirs):
            return problem(
                f"two processes play different episodes: they differ in {text}",
                "search for code that depends on set order, hash(), id(), the clock or files. rl-eval and its runners "
                "start with PYTHONHASHSEED=0, but a script that evaluates in its own process may start without it",
            )
        return ok(f"two processes with different hash seeds play equal episodes ({len(ours) - 1:,} steps compared)")

    def _new_runner(self, lanes: int = 1, wrapper: Any = None) -> tuple[EvalRunner, _Watch]:
        """Build a runner, after the environments of the last one are closed: both may use the same port or folder."""
        self._runners.close()
        settings = self._made_up(lanes)
        if wrapper is not None:
            wrappers = (*settings.environment.wrappers, wrapper)
            settings = with_values(settings, environment={"wrappers": wrappers})
        runner: Any = class_of(settings)(settings, 0)
        watch = _Watch(runner)
        self._watches.append(watch)
        self._runners.callback(runner.stop)
        runner.observe({"doctor": watch.watch})
        runner.run((), 0.0)  # The first call probes the policy.
        return runner, watch

    def _made_up(self, lanes: int) -> EvalSettings:
        """Return settings with random actions instead of the policy, which may not support pickling."""
        policy = PolicySection(policy=RANDOM, actions="none", deterministic=False)
        return with_values(
            self._settings.model_copy(update={"policy": policy}),
            environment={"env_reuse": "lane"},
            runners={"runner": self._runner, "num_envs_per_runner": lanes},
            evaluation={"max_episode_steps": self._steps, "observers": ()},
            fault_tolerance={"episode_timeout_s": None},
        )


def _described(fault: Fault) -> str:
    return f"{fault.error_type}: {fault.message}"


def _start(trace: Trace) -> str:
    """Return a digest of the first observation."""
    return f"{int(trace['observation'][0]) % 2**32:08x}"


def _difference(ours: Trace, theirs: Trace) -> str:
    """Return the first difference between two episodes as text; empty if they are equal."""
    found = first_difference(0, ours, theirs)
    if found is None:
        return ""
    where = f"in step {found.step}" if found.step else "after reset"
    return f"the {found.what} {where}"


def _check_contract(env: Any) -> Iterator[Finding]:
    """Run gymnasium's ``check_env``: a few resets and steps, up to the first error."""
    if not isinstance(env, gym.Env) or isinstance(env, ActionMasks):
        yield note("gymnasium's check_env is skipped: it only supports a gymnasium.Env without action masks")
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
        yield warning(f"gymnasium's check_env: {text}", "see https://gymnasium.farama.org/api/env")
    if not found:
        yield ok("gymnasium's check_env passes")


def _short(space: gym.Space[Any]) -> str:
    """Return the name of a space without its bounds."""
    if isinstance(space, gym.spaces.Dict):
        return "{" + ", ".join(f"{name}: {_short(part)}" for name, part in space.spaces.items()) + "}"
    if isinstance(space, gym.spaces.Tuple):
        return "(" + ", ".join(map(_short, space.spaces)) + ")"
    if isinstance(space, gym.spaces.Discrete):
        return str(space)
    return f"{type(space).__name__}{space.shape} of {space.dtype}"


def _play_first(settings: EvalSettings, lease: Lease, attempts: int, file: str) -> None:
    """Play an episode, again if it fails, and write its trace to a file."""
    runner = VectorEvalRunner(settings, 0)
    tried = (next(run_again(runner, [lease._replace(attempt=lease.attempt + more)])) for more in range(attempts))
    np.save(file, traced_runs(next(report for report in tried if not report.faults)).traces[lease.index])


def _play_elsewhere(play: bytes, hash_seed: str) -> Trace:
    """Play an episode in another process.

    Raises:
        RuntimeError: The other process failed.
        TimeoutExpired: The other process did not end in time.
    """
    with tempfile.TemporaryDirectory(prefix="rl-eval-doctor-") as folder, tempfile.TemporaryFile() as errors:
        played = Path(folder) / "trace.npy"
        ended = subprocess.run(  # noqa: S603 -- This Python.
            [sys.executable, "-c", _CALL, played],
            env=os.environ | {"PYTHONHASHSEED": hash_seed, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            input=play,
            stdout=subprocess.DEVNULL,
            stderr=errors,  # Not a pipe: child processes of an environment may keep it open.
            timeout=_PROCESS_S,
            check=False,
        )
        if ended.returncode:
            errors.seek(0)
            lines = errors.read().decode(errors="replace").strip().splitlines()
            raise RuntimeError(lines[-1] if lines else f"the process exited with status {ended.returncode}")
        return np.asarray(np.load(played))
