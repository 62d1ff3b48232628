"""Replay of recorded episodes, and comparison of the replays with the records.

:func:`rebuilt_runner` builds a runner in this process that is equal to the runners of the evaluation.
:func:`rl_eval.runners.again.run_again` runs episodes with this runner, and :func:`compared` compares them with their
records. Videos, exports of trajectories and ``rl-eval doctor`` use the same functions with other observers. The config
comes from the provenance of the result. A recorded config cannot contain Python objects, so the caller passes these
objects again.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Final

from rl_eval.backends.pickling import in_this_process
from rl_eval.config.builder import EvalConfig, settings_of
from rl_eval.config.objects import UNNAMEABLE
from rl_eval.config.policy_sources import changed_files
from rl_eval.config.settings import EvalSettings, make_settings, needs_interruption, needs_processes
from rl_eval.errors import ConfigError, UsageError, WeightsError
from rl_eval.errors.redaction import MASK
from rl_eval.policies.subject import configured_weights, subject_of
from rl_eval.records.episode import (
    EpisodeRecord,
    EpisodeSpec,
    Lease,
    RunReport,
    different_columns,
    outcomes_of,
    record_of,
)
from rl_eval.records.plain import leaves, plain
from rl_eval.results.loading import load
from rl_eval.results.provenance import check_trust
from rl_eval.results.result import EvalResult
from rl_eval.results.story import check_planned
from rl_eval.runners import Runner, class_of
from rl_eval.runners.again import run_again
from rl_eval.supervision.caller import one_thread, working_in
from rl_eval.weights import WeightsSnapshot

_GIVE_AGAIN: Final = (
    "Pass the Python objects of the run again: rl_eval.replay(DIR, INDEX, config=..., policy=...) or "
    "rl_eval.recording.video.record_videos(DIR, ..., config=..., policy=...)."
)
_FORMER_ITEMS: Final = (("observation_filter", "NoFilter"), ("filters", None))
"""Items that the section ``policy`` of older runs can contain. They have no effect."""


@dataclass(frozen=True)
class Replay:
    """Record of an episode from the evaluation, and record of the same episode from the replay."""

    recorded: EpisodeRecord
    again: EpisodeRecord
    differences: Mapping[str, tuple[Any, Any]]
    """Outcome columns that are not bitwise equal: by name, the recorded value and the new value."""
    numerics: Mapping[str, tuple[Any, Any]]
    """Items of the numerics key that differ: by name, the value of the run and the value of this process. If an item
    differs, outcomes may differ too."""

    comparable: bool = True
    """Whether the guarantee of the run is ``exact``, so that an episode that runs again must have the same outcome."""

    @property
    def identical(self) -> bool:
        """Whether all outcome columns are bitwise equal."""
        return not self.differences


def replay(
    source: str | os.PathLike[str] | EvalResult,
    index: int,
    config: EvalConfig | EvalSettings | None = None,
    policy: Any = None,
    *,
    trust: bool = False,
) -> Replay:
    """Run one episode of an evaluation again, in this process, and compare it with its record.

    If the environment killed or blocked its runner, it will probably do the same to this process.

    Args:
        source: Folder or URI of an evaluation log, folder of a saved result, or a result.
        index: Index of the episode.
        config: Config of the run. Pass it if the config contained Python objects. Default: the recorded config.
        policy: Policy object, if the run had one.
        trust: Whether this process may import and call code that the result names. ``trust`` is not needed if this
            process has evaluated the same code, or if ``config`` is passed.

    Raises:
        UsageError: The result does not exist, the episode has no record or cannot run alone (see :func:`lease_of`), or
            the config differs from that of the run.
        LogError: The evaluation log is damaged.
        UntrustedError: The result names code that no evaluation in this process has used, and ``trust`` is false.
        WeightsError: The weights are not those of the run.
        ConfigError: The recorded config cannot be used again.
    """
    result = source if isinstance(source, EvalResult) else load(source)
    (found,) = replay_each(result, [index], config, policy, trust=trust)
    return found


def replay_each(
    result: EvalResult,
    indices: Sequence[int],
    config: EvalConfig | EvalSettings | None = None,
    policy: Any = None,
    *,
    trust: bool = False,
) -> Iterator[Replay]:
    """Run episodes again, one after the other, with one runner in this process. Errors are those of :func:`replay`."""
    leases = [lease_of(result, index) for index in indices]
    with rebuilt_runner(result, config, policy, trust=trust) as runner, one_thread():
        for report in run_again(runner, leases):
            yield compared(result, report)


def lease_of(result: EvalResult, index: int) -> Lease:
    """Return a lease to run the recorded attempt of an episode again.

    The lease skips earlier attempts, which failed, because their faults may not occur again.

    Raises:
        UsageError: The episode has no record. Or it cannot run alone, because it depends on other episodes (guarantee
            ``layout``).
    """
    recorded = recorded_episode(result, index)
    if result.guarantee == "layout":
        problem = f"episode {index} cannot run alone: it depends on the other episodes of its block (runners.block)"
        raise UsageError(problem, key="runners.block", episode=index, fix="Evaluate again with the same settings.")
    return Lease(result.plan[index], recorded.attempts)


class Spectator:
    """Observer that keeps a reference to its environment and does nothing else."""

    env: Any = None

    def watch(self, env: Any) -> Spectator:
        """Observe another environment from now on."""
        self.env = env
        return self

    def on_episode_start(self, spec: EpisodeSpec, attempt: int, observation: Any) -> None:
        """Do nothing; see :class:`EpisodeObserver`."""

    def on_step(self, *step: Any) -> None:
        """Do nothing; see :class:`EpisodeObserver`."""

    def on_episode_end(self, record: EpisodeRecord) -> None:
        """Return no artifact; see :class:`EpisodeObserver`."""


@contextmanager
def rebuilt_runner(
    result: EvalResult, config: EvalConfig | EvalSettings | None = None, policy: Any = None, *, trust: bool = False
) -> Iterator[Runner]:
    """Build, in this process, a runner that is equal to the runners of an evaluation.

    Args:
        result: Result of the evaluation.
        config: Config of the run. Pass it if the config contained Python objects. Default: the recorded config.
        policy: Policy object, if the run had one.
        trust: Whether this process may import and call code that the result names.

    Raises:
        UsageError: The config differs from that of the run.
        UntrustedError: The result names code that no evaluation in this process has used, and ``trust`` is false.
        WeightsError: The weights are not those of the run.
        ConfigError: The recorded config cannot be used again.
    """
    settings, subject = subject_of(_settings(result.provenance, config, policy, trust), policy)
    settings, live = subject.packed(settings)
    weights = _weights(result.provenance["weights"], settings, live)
    with working_in(None):  # An environment may change the working directory.
        try:
            # A copy, so the caller's policy keeps its state. The weights come from the snapshot, if there is one.
            copied = in_this_process(live, with_weights=weights is None)(weights)
            runner = class_of(settings)(settings, 0, copied)
        except ConfigError as error:
            if config is not None:
                raise
            raise ConfigError(error.problem, key=error.key, value=error.value, fix=error.fix or _GIVE_AGAIN) from error
        try:
            if weights is not None:
                runner.set_weights(weights)
            yield runner
        finally:
            runner.stop()


def compared(result: EvalResult, report: RunReport) -> Replay:
    """Compare a report from :func:`run_again` with the record of the same episode."""
    index, keys = int(report.rows["index"][0]), result.table.info_keys
    was, now = result.table.outcomes(slice(index, index + 1)), outcomes_of(report.rows, report.infos, keys)
    ours, theirs = plain(report.numerics), result.provenance["numerics"]
    return Replay(
        recorded=result.table.record(index),
        again=record_of(report.rows[0].item(), dict(zip(keys, report.infos[0].tolist(), strict=True)), report.faults),
        differences={name: (was[name][0].item(), now[name][0].item()) for name in different_columns(was, now)},
        numerics={key: (theirs.get(key), ours.get(key)) for key in theirs | ours if theirs.get(key) != ours.get(key)},
        comparable=result.guarantee == "exact",
    )


def recorded_episode(result: EvalResult, index: int) -> EpisodeRecord:
    """Return the record of one episode.

    Raises:
        UsageError: The episode is not in the plan, or it did not finish.
    """
    check_planned(result, index)
    if not result.table.filled[index]:
        raise UsageError(f"episode {index} did not finish, so it has no record", key="episode", value=index)
    return result.table.record(index)


def _settings(
    provenance: Mapping[str, Any], config: EvalConfig | EvalSettings | None, policy: Any, trust: bool
) -> EvalSettings:
    """Return the settings of the run, for a process without Ray."""
    if config is None:
        usable = recorded_config(_without_ray(provenance["config"]), passed=policy is not None)
        if not trust:
            check_trust(provenance)
        return make_settings(usable)
    settings = settings_of(config)
    theirs, ours = provenance["identity"], plain(settings.identity())
    passed = set() if policy is None else {"policy", "policy_kwargs", "policies"}
    if different := [key for key in theirs if key not in passed and theirs[key] != ours.get(key)]:
        problem = f"this config and that of the run differ in {', '.join(different)}"
        raise UsageError(problem, key="config", value=", ".join(different))
    return make_settings(_without_ray({name: dict(section) for name, section in settings}))


def recorded_config(recorded: Mapping[str, Any], *, passed: bool = False) -> dict[str, dict[str, Any]]:
    """Return the recorded config of a run in a form that can be evaluated again.

    Args:
        recorded: The config in the provenance of the result.
        passed: Whether the caller passes the policy as a Python object.

    Raises:
        ConfigError: The config contains a Python object that could not be stored, or a secret that was not saved.
    """
    config = {name: dict(section) for name, section in recorded.items()}
    named = config["policy"].get("policies") or {}
    config["policy"]["policies"] = {name: _without_former(one) for name, one in named.items()}
    config["policy"] = _without_former(config["policy"])
    for key, value in leaves(config):
        if isinstance(value, str) and UNNAMEABLE.search(value) and not (passed and key == "policy.policy"):
            problem = f"the config of the run has a Python object, {key} = {value!r}"
            raise ConfigError(problem, key=key, value=value, fix=_GIVE_AGAIN)
    secret = [key for key, value in leaves(config) if isinstance(value, str) and MASK in value]
    if masked := [key for key in secret if not (passed and key.startswith("policy."))]:
        problem = f"{', '.join(masked)}: the value was a secret, so the run did not record it"
        fix = (
            "In Python, pass a config that contains the secret: rl_eval.replay(DIR, INDEX, config=...) or "
            "rl_eval.recording.video.record_videos(DIR, ..., config=...)."
        )
        raise ConfigError(problem, key=masked[0], fix=fix)
    return config


def _without_former(policy: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in policy.items() if (key, value) not in _FORMER_ITEMS}


def _without_ray(config: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return a config without settings that need runners in separate processes."""
    usable = {name: dict(section) for name, section in config.items()}
    for section, values in usable.items():
        for key in (*needs_processes(section), *needs_interruption(section)):
            values.pop(key, None)
    usable["runners"]["num_runners"] = 0
    return usable


def _weights(recorded: Mapping[str, Any], settings: EvalSettings, live: Any) -> WeightsSnapshot | None:
    """Return the weights of the run; None if the run had no weights."""
    version, digest = recorded["version"], recorded["digest"]
    if live is None or settings.policy.policies:
        # A file that had no digest in the run, or has none now, is not compared. Only outcomes can show a change of it.
        now, then = settings.policy.file_digests, recorded.get("files", {})
        for name in changed_files(then, now):
            problem = f"the file of {name} has digest {now[name][:16]} now; in the run it had {then[name][:16]}"
            fix = "Restore the file of the run."
            raise WeightsError(problem, key=f"policy.policy_kwargs.{name}", value=now[name][:16], fix=fix)
    if digest is None:
        return None
    section = settings.policy
    if section.policies:
        source = "the mapping of policies"
    elif live is not None:
        source = "the policy"
    elif section.weights is None:
        raise WeightsError("the weights of the run came from a policy object", key="policy", fix=_GIVE_AGAIN)
    else:
        source = repr(section.weights)
    found = configured_weights(section, live, version=version)
    if found is None or found.digest != digest:
        held = "no weights" if found is None else f"other weights (digest {found.digest[:16]})"
        problem = f"{source} has {held} now; the weights of the run have digest {digest[:16]}"
        raise WeightsError(problem, key="weights", value=digest[:16])
    return replace(found, version=version)
