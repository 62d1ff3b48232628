"""``rl-eval run``: run an evaluation, or retry an earlier one; print and save its result."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, Literal

import typer

from rl_eval.cli.evaluated import Evaluated, TrustPolicy, with_evaluated
from rl_eval.cli.exits import CODES, VERBOSE, ExitCode
from rl_eval.cli.output import Force, Output, earlier_result, folder_to_save, run_folder, save_patiently, short_name
from rl_eval.cli.printing import AsJson, Quiet, flush_results, print_json, print_line, print_note, print_report
from rl_eval.cli.restarts import run_with_restarts
from rl_eval.cli.settings import (
    Assignments,
    OptionalConfigPath,
    Section,
    load_to_run,
    only_one,
    parse_episodes,
    read_settings,
    with_indices,
)
from rl_eval.cli.shared import absolute_place, advanced, option, shown
from rl_eval.cli.signals import Interruption
from rl_eval.errors import ClusterDied, ConfigError, EpisodeError, UsageError, summary_of
from rl_eval.results.text import first_clause, interval_text, percent

if TYPE_CHECKING:
    from rl_eval.cli.progress import Monitor
    from rl_eval.config.settings import EvalSettings
    from rl_eval.execution.handle import EvalHandle
    from rl_eval.results.requirements import MetricRequirement
    from rl_eval.results.result import EvalResult
    from rl_eval.training.loggers import Logger


_BESIDE_RETRY: Final = "retry attempts indices accept_code_change trust logger require quiet as_json verbose no_color"
"""Parameters that ``--retry`` allows."""
_Tracker = Literal["wandb", "mlflow", "tensorboard"]
_OUTPUT, _RETRY = {"output": "--output"}, {"retry": "--retry"}
_NEEDED: Final = {"attempts": _RETRY, "accept_code_change": _OUTPUT | _RETRY, "force": _OUTPUT}
"""Parameters that need another parameter. Each has a mapping of alternatives: one of these parameters is enough."""
_NAMED: Final = 10
"""Maximum number of failed episodes in a message."""


@with_evaluated
def run(
    ctx: typer.Context,
    evaluated: Evaluated,
    config: OptionalConfigPath = None,
    section: Section = None,
    trust: TrustPolicy = False,
    indices: Annotated[
        str | None,
        advanced("I,J-K", "Indices of the episodes to run: a range of the plan; with --retry, any failed episodes."),
    ] = None,
    output: Output = None,
    force: Force = False,
    retry: Annotated[
        str | None, advanced("DIR", "Run the failed episodes of DIR again.", parser=absolute_place)
    ] = None,
    attempts: Annotated[
        int | None, advanced("N", "Additional attempts per episode for --retry. [default: from the config]", min=1)
    ] = None,
    accept_code_change: Annotated[
        bool, advanced(None, "Continue a log even if the code of the environment or policy has changed.")
    ] = False,
    max_restarts: Annotated[
        int,
        advanced(
            "N",
            "Run in a child process. Restart the process when it dies. Stop after N consecutive restarts without a new "
            "episode.",
            min=0,
        ),
    ] = 0,
    assignments: Assignments = None,
    logger: Annotated[
        _Tracker | None,
        advanced(None, "Log the metrics as a new run of this tracker; tensorboard writes into the run folder."),
    ] = None,
    require: Annotated[
        list[str] | None,
        option(
            "'METRIC >= X'",
            "Requirement on a metric. Exit with 5 if it is not met, with 6 if it has no answer. May be repeated.",
        ),
    ] = None,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Evaluate a policy from a config file or from --env and --policy, and print and save the result."""
    say = (lambda _: None) if quiet else print_note
    _check_options(ctx)
    if max_restarts:
        raise typer.Exit(run_with_restarts(output, max_restarts))
    if config is None and retry is None:
        evaluated.check("run", assignments)
    requirements = _requirements(require or ())
    keys = evaluated.keys(say, assignments, trust=trust)
    earlier, remark = None if retry is None else load_to_run(retry, trust, _is_unfinished), ""
    finished = None if earlier is None or _is_unfinished(earlier) else earlier
    from rl_eval.cli.progress import Monitor

    with closing(Monitor(quiet=quiet or as_json)) as monitor:
        if retry is not None and earlier is not None:
            output, settings = retry, _put_aside(retry, earlier, indices, attempts, accept_code_change)
            remark = "" if finished is None else "no episode failed or is missing"
        else:
            settings = read_settings(config, section, assignments, keys)
            if indices is not None:
                settings = with_indices(settings, indices)
                remark = only_one(settings, indices)
        name = name_of(settings, config, section)
        if logger is not None:
            _logger(logger, name)  # Raises if its package is missing.
        one_line = quiet and not as_json

        def present(result: EvalResult, folder: Path | None, mistake: EpisodeError | None) -> None:
            unmet = [line for line, code in _judged(requirements, result) if one_line and code]
            told = [remark, *unmet, str(mistake) if one_line and mistake else ""]
            line = " ".join("; ".join(filter(None, told)).split())
            deliver(result, folder, quiet=quiet, as_json=as_json, verbose=ctx.meta[VERBOSE], remark=line)
            if mistake and mistake.fix and not (quiet or as_json):
                print_line(mistake.fix)

        result, output = carry_out(
            settings,
            present,
            say,
            ctx.obj,
            monitor,
            name=name,
            output=output,
            force=force,
            accept_code_change=accept_code_change,
            finished=finished,
        )
    if logger is not None:
        _log_to(logger, name, result, output)
    judged = _judged(requirements, result)
    for line, found in judged:
        (print_note if found and not one_line else say)(line)
    code = exit_code_of(result, ctx.obj) or min((found for _, found in judged if found), default=ExitCode.COMPLETE)
    if not (quiet or as_json):
        print_line(_last_line(result, remark))
    if code:
        raise typer.Exit(code)


def _logger(tracker: _Tracker, name: str, folder: str = "") -> Logger:
    """Return a logger for a run of this name.

    Raises:
        ConfigError: The package of the logger is not installed.
    """
    from rl_eval.training import loggers

    if tracker == "tensorboard":
        return loggers.TensorBoardLogger(folder)
    return loggers.WandbLogger(name=name) if tracker == "wandb" else loggers.MLflowLogger(run_name=name)


def _log_to(tracker: _Tracker, name: str, result: EvalResult, folder: str) -> None:
    """Log a result as a separate run, with the version of the weights as the training step."""
    from rl_eval.results.result import EvalPoint

    versions = result.counted_rows["weights_version"]
    version = int(versions[0]) if len(versions) else 0
    metrics = {f"eval/{key}": value for key, value in result.metrics.items()}
    try:
        with _logger(tracker, name, folder) as logger:
            logger.log(EvalPoint(version, version, result, metrics))
    except Exception as error:  # An error of the tracker; the result is already saved.
        print_note(f"--logger {tracker} failed: {summary_of(error)}")


def _check_options(ctx: typer.Context) -> None:
    """Check for options that need another option, and for options that conflict with ``--retry``.

    Raises:
        ConfigError: A needed option is missing, or an option conflicts with ``--retry``.
    """
    given = {
        str(param.name): param.opts[0]
        for param in ctx.command.params
        if (source := ctx.get_parameter_source(str(param.name))) and source.name == "COMMANDLINE"
    }
    if "retry" in given and (others := [given[name] for name in given if name not in _BESIDE_RETRY.split()]):
        fix = f"Omit {', '.join(sorted(others))}."
        raise ConfigError("--retry takes all settings from the log", key=min(others), fix=fix)
    for name, needed in _NEEDED.items():
        if name in given and not given.keys() & needed.keys():
            other = " or ".join(needed.values())
            fix = f"Pass {other}, or omit {given[name]}."
            raise ConfigError(f"{given[name]} needs {other}", key=given[name], fix=fix)


def _is_unfinished(result: EvalResult) -> bool:
    """Return whether an episode of a result failed or is missing, so that ``--retry`` runs it."""
    return result.status != "complete" or bool(result.num_failed)


def _put_aside(
    path: str, result: EvalResult, indices: str | None, attempts: int | None, accept_code_change: bool
) -> EvalSettings:
    """Mark failed episodes in a log for a retry; return settings that run them again.

    Raises:
        UsageError: There is no log, or a chosen episode did not fail.
        LogMismatch: Weights or code differ from the log.
    """
    from rl_eval.config.settings import make_settings
    from rl_eval.log import EvaluationLog
    from rl_eval.log.contents import read_manifest
    from rl_eval.log.storage import open_storage
    from rl_eval.policies.subject import configured_weights
    from rl_eval.recording.replay import recorded_config
    from rl_eval.records.episode import used_attempts
    from rl_eval.results.provenance import manifest_of

    failed = [index for index, row in enumerate(result.table.completed) if result.table.filled[index] and not row]
    chosen = failed if indices is None else parse_episodes(indices, len(result.plan), "--indices")
    if others := set(chosen) - set(failed):
        those = f"{', '.join(map(str, failed[:_NAMED]))}{', ...' * (len(failed) > _NAMED)}"
        index, fix = min(others), f"Choose among the failed episodes: {those}." if failed else ""
        problem = f"--indices {indices}: {f'episode {index} did not fail' if failed else 'no episode has failed'}"
        raise UsageError(problem, key="--indices", value=indices, episode=index, fix=fix)
    if _is_unfinished(result) and read_manifest(open_storage(path)) is None:
        problem, fix = f"{shown(path)} has no evaluation log", "Evaluate again with another --output."
        raise UsageError(f"{problem}, which --retry needs", key="--retry", value=shown(path), fix=fix)
    config = recorded_config(result.provenance["config"])
    tolerance = config["fault_tolerance"]
    used, pardoned = used_attempts(result.table)
    spent = max((number - pardoned.get(index, 0) for index, number in used.items()), default=0)
    tolerance["max_attempts_per_episode"] = spent + (attempts or tolerance["max_attempts_per_episode"])
    settings = make_settings(config)
    if chosen:
        with closing(EvaluationLog.open(path, accept_code_change=accept_code_change)) as log:
            log.retry(manifest_of(settings, settings.plan(), configured_weights(settings.policy)), chosen)
    return settings


def _requirements(texts: Sequence[str]) -> list[MetricRequirement]:
    """Parse ``--require``, and check that the metrics exist; metrics of agents are checked after the run."""
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


def _judged(requirements: Sequence[MetricRequirement], result: EvalResult) -> list[tuple[str, ExitCode]]:
    """Return a line and an exit code for each requirement."""
    from rl_eval.results.requirements import Answer

    if code := CODES[result.status]:
        return [(f"{one}: not checked, because the result is {result.status}", code) for one in requirements]
    codes = {Answer.HOLDS: ExitCode.COMPLETE, Answer.FAILS: ExitCode.REQUIREMENT, Answer.OPEN: ExitCode.NO_ANSWER}
    judged = []
    for requirement in requirements:
        name, answer, why = requirement.metric, requirement.judge(result.metrics), ""
        if result.determinism.passed is False and not name.startswith("num_"):
            answer, why = Answer.OPEN, f" (the result is {result.determinism})"
        elif answer is Answer.OPEN and "return_ci" in name and result.interval.note:
            why = f" ({result.interval.note})"
        text = f"{requirement}: {answer.value}, {name} is {result.metrics[name]:g}{why}"
        judged.append((text, codes[answer]))
    return judged


def name_of(settings: EvalSettings, config: Path | None, section: str | None) -> str:
    """Return the name of a run: config file and section, or environment."""
    if config is not None:
        return f"{config.stem}-{section}" if section else config.stem
    env = str(settings.identity()["environment"]["env"])
    return re.sub(r"[^\w.-]+", "-", env).strip("-.") or "run"


def carry_out(
    settings: EvalSettings,
    deliver: Callable[[EvalResult, Path | None, EpisodeError | None], None],
    say: Callable[[str], None],
    interruption: Interruption,
    monitor: Monitor,
    *,
    name: str,
    output: str | None,
    force: bool,
    accept_code_change: bool = False,
    finished: EvalResult | None = None,
) -> tuple[EvalResult, str]:
    """Run an evaluation, unless it is complete; deliver the result, and return it with the folder or URI of the run.

    The result is delivered before the runners stop, because a stop may take a while. Runners in this process use the
    main thread, because some environments need it.
    """
    from rl_eval.cli.progress import headline

    if output is not None:
        found = finished or earlier_result(output, settings, say, force=force, accept_code_change=accept_code_change)
        if found is not None:
            monitor.close()
            deliver(found, folder_to_save(output, found.fingerprint, say), None)
            return found, output
    runners = settings.runners
    address, uses_ray = runners.address or os.environ.get("RAY_ADDRESS"), runners.num_runners > 0
    with run_folder(output, name) as place:
        monitor.say("loading")
        from rl_eval.execution.group import EvalRunnerGroup
        from rl_eval.execution.mistakes import mistake_in

        def begin(handle: EvalHandle) -> None:
            def cancel() -> None:
                monitor.announce("stopping; a second signal discards the result")
                handle.cancel()

            monitor.follow(handle.progress, runners.num_runners)
            interruption.defer(handle.flush, cancel=cancel)

        ray = f"connecting to Ray at {address}" if address else "starting Ray"
        monitor.say(ray if uses_ray else "building environment and policy", at_once=uses_ray)
        with EvalRunnerGroup(settings, threaded=uses_ray) as group:
            if not uses_ray:
                group.apply_to_one(type)  # Raises if environment or policy cannot be built.
            monitor.announce(headline(settings))
            handle = group.submit(output=place, accept_code_change=accept_code_change, on_submitted=begin)
            try:
                result = handle.result()
            except ClusterDied as error:
                # Ray's client may end this process at any time, at the latest when the group stops.
                monitor.close()
                os.write(2, f"error: {error}; {_continuation(place)}\n".encode())
                os._exit(ExitCode.CLUSTER)
            mistake = mistake_in(result, group.spaces)
            with monitor.room():
                deliver(result, folder_to_save(place, "", say), mistake)
            monitor.say("stopping the runners" if uses_ray else "closing the environments", at_once=uses_ray)
            if result.stopped_early and (interruption.number is not None or result.status == "partial"):
                print_note(_continuation(place))
            interruption.conclude(exit_code_of(result, interruption))
    return result, place


def _continuation(place: str) -> str:
    """Return instructions to continue a run that ended early."""
    return f"finished episodes are in the log; continue with the same command and --output {shown(place)}"


def deliver(
    result: EvalResult,
    folder: Path | None,
    *,
    quiet: bool,
    as_json: bool,
    verbose: bool = False,
    remark: str = "",
    save: Callable[[Path], None] | None = None,
    show: Callable[[], None] | None = None,
) -> None:
    """Save and print a result; it is printed even if it cannot be saved.

    Args:
        result: Finished or unfinished result.
        folder: Folder to save it in, or None.
        quiet: Print one line.
        as_json: Print JSON.
        verbose: Print all numbers.
        remark: Addition to the line of ``quiet``.
        save: Replaces ``result.save``.
        show: Replaces :func:`print_result`.

    Raises:
        ClusterError: The result cannot be saved.
    """
    try:
        if folder is not None:
            save_patiently(partial(save or result.save, folder), folder)
    finally:
        (show or partial(print_result, result, quiet=quiet, as_json=as_json, verbose=verbose, remark=remark))()
    if folder is not None and not quiet:
        print_line(f"saved in {shown(folder)}{_next(result, short_name(folder))}", err=as_json)
    flush_results()


def print_result(result: EvalResult, *, quiet: bool, as_json: bool, verbose: bool = False, remark: str = "") -> None:
    """Print a result as JSON, in one line, as a short table, or as a table of all numbers."""
    from rl_eval.reports.pages import result_page
    from rl_eval.results.metrics import determinism_notes, value_notes

    if as_json:
        print_json(result.to_dict())
    elif quiet:
        notes = map(first_clause, [result.reason, *value_notes(result), *determinism_notes(result)])
        print_line("; ".join(filter(None, [_numbers(result, remark), *notes])))
    else:
        print_report(result_page(result) if verbose else result)


def _numbers(result: EvalResult, remark: str) -> str:
    """Return one line with the status and the means of the result."""
    from rl_eval.reports.pages import headlines

    parts, write = [], "{:.6g}".format
    if result.success_interval is not None and result.success_rate is not None:
        parts.append(f"success {percent(result.success_rate)} ({interval_text(result.success_interval, brief=True)})")
    if result.is_zero_sum:
        parts += [f"{line.label} {line.strong} ({line.rest})" for line in headlines(result, brief=True)]
    elif result.aggregates.count:
        parts.append(f"mean return {write(result.mean_return)} ({interval_text(result.interval, write, brief=True)})")
    parts.append(f"{result.aggregates.count:,} of {len(result.plan):,} episodes")
    return "; ".join(filter(None, [f"{result.status}: {', '.join(parts)}", remark]))


def _last_line(result: EvalResult, remark: str) -> str:
    """Return the line below the table: the status, the first number of the table, and a failed determinism check."""
    from rl_eval.reports.pages import means
    from rl_eval.results.metrics import determinism_notes

    label, strong, rest = means(result)[0]
    first = f"{label} {strong} ({rest.partition(' (')[0]}), " if result.aggregates.count else ""
    counted = f"{result.aggregates.count:,} of {len(result.plan):,} episodes"
    notes = map(first_clause, determinism_notes(result))
    return "; ".join(filter(None, [f"{result.status}: {first}{counted}", remark, *notes]))


def _next(result: EvalResult, folder: str) -> str:
    """Return the command that most users need after this result; empty if the same command continues the run."""
    if not (result.faults or result.table.filled.all()):
        return ""
    retry = f"run --retry {folder}" if result.num_failed else f"report {folder}"
    return f"; next: rl-eval {f'show {folder} --faults' if result.status == 'failed' else retry}"


def exit_code_of(result: EvalResult, interruption: Interruption) -> int:
    """Return the exit code for a result."""
    if interruption.number is not None and result.stopped_early:
        return 128 + interruption.number
    return CODES[result.status]
