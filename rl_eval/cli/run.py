"""``rl-eval run``: one evaluation, from a config file to a printed result and two files; or an earlier one again."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from rl_eval.cli.evaluated import Evaluated, TrustPolicy, with_evaluated
from rl_eval.cli.exits import ExitCode
from rl_eval.cli.output import (
    Force,
    LogDir,
    Output,
    claimed_folders,
    finished_result,
    fresh_run_dir,
    save_patiently,
    unsaved_folder,
)
from rl_eval.cli.printing import AsJson, Quiet, flush_results, print_json, print_line, print_note, print_report
from rl_eval.cli.restarts import run_with_restarts
from rl_eval.cli.settings import (
    Assignments,
    OptionalConfigPath,
    Section,
    episodes_option,
    find_modules_here,
    load_to_run,
    parse_episodes,
    read_settings,
    with_episodes,
)
from rl_eval.cli.shared import absolute_place, option, shown
from rl_eval.cli.signals import Interruption
from rl_eval.errors import ClusterDied, ConfigError, UsageError
from rl_eval.results.text import interval_text

if TYPE_CHECKING:
    from rl_eval.cli.progress import Monitor
    from rl_eval.config.settings import EvalSettings
    from rl_eval.execution.handle import EvalHandle
    from rl_eval.results.requirements import MetricRequirement
    from rl_eval.results.result import EvalResult


_BESIDE_RETRY: Final = "retry attempts episodes accept_code_change trust require quiet as_json verbose no_color"
"""Parameters that may stand beside ``--retry``."""
_LOG, _RETRY = {"run_dir": "--log-dir"}, {"retry": "--retry"}
_NEEDED: Final = {"attempts": _RETRY, "accept_code_change": _LOG | _RETRY, "fresh": _LOG}
"""Parameters that go with another one, one of which has to be given."""
_NAMED: Final = 10
"""Failed episodes that a message names."""


@with_evaluated
def run(
    ctx: typer.Context,
    evaluated: Evaluated,
    config: OptionalConfigPath = None,
    section: Section = None,
    trust: TrustPolicy = False,
    episodes: Annotated[
        str | None, episodes_option("Run this range of the plan; with --retry, of what failed.")
    ] = None,
    run_dir: LogDir = None,
    retry: Annotated[str | None, option("DIR", "Run the failed episodes of DIR again.", parser=absolute_place)] = None,
    attempts: Annotated[
        int | None, option("N", "Further attempts of --retry; by default as in the config.", min=1)
    ] = None,
    accept_code_change: Annotated[
        bool, option(None, "Go on although the code of environment or policy changed.")
    ] = False,
    fresh: Annotated[bool, option(None, "Leave a run in DIR alone; begin in DIR-2, DIR-3, ...")] = False,
    max_restarts: Annotated[
        int, option("N", "Run in a child process, started again until N in a row brought no new episode.", min=0)
    ] = 0,
    output: Output = None,
    force: Force = False,
    assignments: Assignments = None,
    require: Annotated[
        list[str] | None, option("'METRIC >= X'", "Exit with 5 unless this holds; may be repeated.")
    ] = None,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Evaluate a policy as a config file or --env and --policy say, print the result and save it."""
    say = (lambda _: None) if quiet else print_note
    _check_options(ctx)
    if max_restarts:
        raise typer.Exit(run_with_restarts(run_dir, max_restarts, fresh=fresh))
    if config is None and retry is None:
        evaluated.check("run", assignments)
    requirements = _requirements(require or ())
    keys = evaluated.keys(say, assignments, trust=trust)
    earlier = None if retry is None else load_to_run(retry, trust)
    from rl_eval.cli.progress import Monitor

    with closing(Monitor(quiet=quiet or as_json)) as monitor:
        if retry is not None and earlier is not None:
            run_dir, settings = retry, _put_aside(retry, earlier, episodes, attempts, accept_code_change)
        else:
            settings = read_settings(config, section, assignments, keys)
            if episodes is not None:
                settings = with_episodes(settings, episodes)
            if config is None and not settings.runners.num_runners:
                say("running in this process: --runners 2 runs on two Ray actors")
            find_modules_here()
        result, log_dir = carry_out(
            settings,
            partial(deliver, quiet=quiet, as_json=as_json),
            say,
            ctx.obj,
            monitor,
            name=name_of(settings, config, section),
            output=output,
            run_dir=run_dir,
            force=force,
            fresh=fresh,
            accept_code_change=accept_code_change,
        )
    if result.num_failed and log_dir is None:
        say("no log was kept, so --retry cannot run the failed episodes again: add --log-dir DIR")
    elif result.num_failed:
        say(f"rl-eval run --retry {shown(str(log_dir))} runs what failed again")
    code = exit_code_of(result, ctx.obj)
    for requirement in requirements if code else ():
        print_note(f"{requirement}: not judged, since the result is {result.status}")
    if code := code or _unmet(requirements, result):
        raise typer.Exit(code)


def _check_options(ctx: typer.Context) -> None:
    """Refuse options that go with another one only.

    Raises:
        ConfigError: The other one is missing, or ``--retry`` stands beside what its log says.
    """
    given = {
        str(param.name): param.opts[0]
        for param in ctx.command.params
        if (source := ctx.get_parameter_source(str(param.name))) and source.name == "COMMANDLINE"
    }
    if "retry" in given and (others := [given[name] for name in given if name not in _BESIDE_RETRY.split()]):
        raise ConfigError(f"--retry takes the evaluation from its log: leave {', '.join(sorted(others))} out")
    for name, needed in _NEEDED.items():
        if name in given and not given.keys() & needed.keys():
            other = " or ".join(needed.values())
            raise ConfigError(f"{given[name]} goes with {other}: give that too, or leave {given[name]} out")


def _put_aside(
    path: str, result: EvalResult, episodes: str | None, attempts: int | None, accept_code_change: bool
) -> EvalSettings:
    """Have a log forget, for the count, that episodes failed; return settings with which they run again.

    Raises:
        UsageError: There is no log, or an episode that is asked for did not fail.
        LogMismatch: Weights or code differ from those of the log.
    """
    from rl_eval.config.settings import make_settings
    from rl_eval.log import EvaluationLog
    from rl_eval.log.contents import read_manifest
    from rl_eval.log.storage import open_storage
    from rl_eval.policies.live import configured_weights
    from rl_eval.recording.replay import recorded_config
    from rl_eval.results.provenance import manifest_of

    failed = [index for index, row in enumerate(result.table.completed) if result.table.filled[index] and not row]
    chosen = failed if episodes is None else parse_episodes(episodes, len(result.plan))
    if others := set(chosen) - set(failed):
        those = f"{', '.join(map(str, failed[:_NAMED]))}{', ...' * (len(failed) > _NAMED)}" if failed else "none"
        raise UsageError(f"--episodes {episodes}: episode {min(others)} did not fail; of this run did: {those}")
    if read_manifest(open_storage(path)) is None:
        raise UsageError(
            f"{shown(path)} has a result but no evaluation log, which --retry needs: evaluate again with --log-dir DIR"
        )
    config = recorded_config(result.provenance["config"])
    tolerance = config["fault_tolerance"]
    spent = max((fault.attempt for fault in result.faults), default=0)
    tolerance["max_attempts_per_episode"] = spent + (attempts or tolerance["max_attempts_per_episode"])
    settings = make_settings(config)
    if chosen:
        with closing(EvaluationLog.open(path, accept_code_change=accept_code_change)) as log:
            log.retry(manifest_of(settings, settings.plan(), configured_weights(settings.policy)), chosen)
    return settings


def _requirements(texts: Sequence[str]) -> list[MetricRequirement]:
    """Parse ``--require``; make sure that results have these metrics. Those of agents are known after a run."""
    if not texts:
        return []
    from rl_eval.records.episode import EpisodeTable
    from rl_eval.results.metrics import Timing
    from rl_eval.results.requirements import parse_metric
    from rl_eval.results.result import EvalResult
    from rl_eval.scheduling.plan import EpisodePlan

    requirements, timing = [parse_metric(text) for text in texts], Timing.of_totals({}, num_runners=0)
    empty = EvalResult(
        table=EpisodeTable(1), plan=EpisodePlan(1), status="partial", reason="", timing=timing, provenance={}
    )
    for requirement in requirements:
        if "/" not in requirement.metric:
            requirement.check(empty.metrics)
    return requirements


def _unmet(requirements: Sequence[MetricRequirement], result: EvalResult) -> int:
    """Write whether a result meets each requirement; return the exit code."""
    from rl_eval.results.requirements import Answer

    code = ExitCode.COMPLETE
    for requirement in requirements:
        name, answer, why = requirement.metric, requirement.judge(result.metrics), ""
        if result.determinism.passed is False and not name.startswith("num_"):
            answer, why = Answer.OPEN, f" (the result is {result.determinism})"
        elif answer is Answer.OPEN and "return_ci" in name and result.interval.note:
            why = f" ({result.interval.note})"
        print_note(f"{requirement}: {answer.value}, {name} is {result.metrics[name]:g}{why}")
        if answer is not Answer.HOLDS:
            code = ExitCode.REQUIREMENT
    return code


def name_of(settings: EvalSettings, config: Path | None, section: str | None) -> str:
    """Return the name of a run: that of its config file, and of the section, or what it evaluates."""
    if config is not None:
        return f"{config.stem}-{section}" if section else config.stem
    env = str(settings.identity()["environment"]["env"])
    return re.sub(r"[^\w.-]+", "-", env).strip("-.") or "run"


def carry_out(
    settings: EvalSettings,
    deliver: Callable[[EvalResult, Path | None], None],
    say: Callable[[str], None],
    interruption: Interruption,
    monitor: Monitor,
    *,
    name: str,
    output: Path | None,
    run_dir: str | None,
    force: bool,
    fresh: bool = False,
    accept_code_change: bool = False,
) -> tuple[EvalResult, str | None]:
    """Run an evaluation, unless its log is complete already; deliver the result, and return it with its log.

    It is delivered before the runners are stopped, which may take a while. Runners of this process work in this
    thread, the main one, since some environments need it.
    """
    from rl_eval.cli.progress import headline

    if run_dir is not None and fresh:
        run_dir = fresh_run_dir(run_dir, say)
    elif run_dir is not None and (found := finished_result(run_dir, settings, say)) is not None:
        monitor.close()
        deliver(found, unsaved_folder(found.fingerprint, output, run_dir, say, force=force))
        return found, run_dir
    runners = settings.runners
    address, uses_ray = runners.address or os.environ.get("RAY_ADDRESS"), runners.num_runners > 0
    with claimed_folders(output, run_dir, name, force=force) as (log_dir, folder):
        monitor.announce(headline(settings))
        monitor.say("loading")
        from rl_eval.execution.group import EvalRunnerGroup

        def begin(handle: EvalHandle) -> None:
            def cancel() -> None:
                monitor.announce("stopping; a second signal gives the result up")
                handle.cancel()

            monitor.follow(handle.progress, runners.num_runners)
            interruption.defer(None if log_dir is None else handle.flush, cancel=cancel)

        ray = f"connecting to Ray at {address}" if address else "starting Ray"
        monitor.say(ray if uses_ray else "building environment and policy", at_once=uses_ray)
        with EvalRunnerGroup(settings, threaded=uses_ray) as group:
            handle = group.submit(run_dir=log_dir, accept_code_change=accept_code_change, on_submitted=begin)
            try:
                result = handle.result()
            except ClusterDied as error:
                # Ray's client may end this process at any moment, and would do it when the group stops.
                monitor.close()
                os.write(2, f"error: {error}; {_continuation(log_dir)}\n".encode())
                os._exit(ExitCode.CLUSTER)
            with monitor.room("stopped" if result.stopped_early else "done"):
                deliver(result, folder)
            monitor.say("stopping the runners" if uses_ray else "closing the environments", at_once=uses_ray)
            if interruption.number is not None and result.stopped_early:
                print_note(_continuation(log_dir))
            interruption.conclude(exit_code_of(result, interruption))
    return result, log_dir


def _continuation(run_dir: str | None) -> str:
    """Return how to continue a run that ended early."""
    if run_dir is None:
        return "there is no log, so this run cannot be continued: --log-dir DIR keeps one"
    return f"what had finished is in the log: the same command with --log-dir {shown(run_dir)} continues"


def deliver(
    result: EvalResult,
    folder: Path | None,
    *,
    quiet: bool,
    as_json: bool,
    save: Callable[[Path], None] | None = None,
    show: Callable[[], None] | None = None,
) -> None:
    """Save and print a result. One that cannot be saved is printed all the same.

    Args:
        result: Finished or not.
        folder: Where it is saved, if anywhere.
        quiet: Print one line.
        as_json: Print JSON.
        save: Saves it in another way.
        show: Prints it in another way.

    Raises:
        ClusterError: It cannot be saved.
    """
    from rl_eval.results.files import EPISODES_FILE, RESULT_FILE

    try:
        if folder is not None:
            save_patiently(partial(save or result.save, folder), folder)
    finally:
        (show or partial(print_result, result, quiet=quiet, as_json=as_json))()
    if folder is not None and not quiet:
        print_line(f"\nsaved in {shown(folder)}: {RESULT_FILE}, {EPISODES_FILE}", err=as_json)
    flush_results()


def print_result(result: EvalResult, *, quiet: bool, as_json: bool) -> None:
    """Print a result as JSON, in one line, or as its table."""
    if as_json:
        print_json(result.to_dict())
    elif quiet:
        print_line(_summary(result))
    else:
        print_report(result)


def _summary(result: EvalResult) -> str:
    """Say the result in one line."""
    from rl_eval.results.metrics import value_notes

    parts = [f"{result.aggregates.count:,} of {len(result.plan):,} episodes"]
    if result.aggregates.count:
        interval = interval_text(result.interval, "{:.6g}".format)
        parts.insert(0, f"mean return {result.mean_return:.6g} ({interval})")
    said = [result.reason, ", ".join(parts)] if result.status == "failed" else [", ".join(parts), result.reason]
    return f"{result.status}: {'; '.join(filter(None, [*said, *value_notes(result)]))}"


def exit_code_of(result: EvalResult, interruption: Interruption) -> int:
    """Return the exit code of a command that made a result."""
    if interruption.number is not None and result.stopped_early:
        return 128 + interruption.number
    return {"complete": ExitCode.COMPLETE, "partial": ExitCode.PARTIAL, "failed": ExitCode.FAILED}[result.status]
