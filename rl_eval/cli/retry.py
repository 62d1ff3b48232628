"""``rl-eval retry``: the failed episodes of a run once more, with further attempts."""

from __future__ import annotations

from contextlib import closing
from functools import partial
from typing import TYPE_CHECKING, Annotated, Final

import typer

from rl_eval.cli.episodes import episodes_option, parse_episodes
from rl_eval.cli.exits import Debug, reported
from rl_eval.cli.output import claimed_folder
from rl_eval.cli.printing import AsJson, Quiet
from rl_eval.cli.run import deliver, exit_code_of, print_result, run_evaluation
from rl_eval.cli.shared import absolute_place, argument, option, shown
from rl_eval.cli.signals import Interruption
from rl_eval.cli.trusting import Trust, load_to_run
from rl_eval.errors import UsageError
from rl_eval.redaction import redact_text

if TYPE_CHECKING:
    from rl_eval.config.settings import EvalSettings
    from rl_eval.results.result import EvalResult

__all__ = ["retry"]

_NAMED: Final = 10
"""Failed episodes that a message names."""


def retry(
    path: Annotated[str, argument("DIR", "Folder or URI of the evaluation log.", parser=absolute_place)],
    episodes: Annotated[
        str | None, episodes_option("Which of the failed episodes, as in 3,7-9; by default all.")
    ] = None,
    attempts: Annotated[
        int | None,
        option("N", "Further attempts of each failed episode; by default as many as the config gives.", min=1),
    ] = None,
    accept_code_change: Annotated[
        bool, typer.Option("--accept-code-change", help="Go on although the code of environment or policy was changed.")
    ] = False,
    trust: Trust = False,
    quiet: Quiet = False,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Run the failed episodes of a run again, with their seeds; what failed before stays in the log."""
    from rl_eval.cli.progress import make_monitor

    with Interruption() as interruption, reported(debug), closing(make_monitor(quiet=quiet or as_json)) as monitor:
        monitor.say(f"reading {redact_text(shown(path))}")
        result = load_to_run(path, trust)
        failed = _failed(result, episodes)
        if not (result.num_failed or result.stopped_early):
            monitor.close()
            typer.echo(f"no episode of {redact_text(shown(path))} failed: there is nothing to run again", err=True)
            print_result(result, quiet=quiet, as_json=as_json)
            return
        settings = _settings(result, attempts)
        _put_aside(path, failed, settings, accept_code_change)
        given = partial(deliver, folder=claimed_folder(None, path), quiet=quiet, as_json=as_json)
        result = run_evaluation(settings, path, accept_code_change, interruption, monitor, given)
        if code := exit_code_of(result, interruption):
            raise typer.Exit(code)


def _settings(result: EvalResult, attempts: int | None) -> EvalSettings:
    """Return the recorded settings, with more attempts than any episode has used up.

    Raises:
        ConfigError: They hold live objects, or secrets that were not written down.
    """
    from rl_eval.config.settings import make_settings
    from rl_eval.results.replay import check_recorded

    config = {name: dict(section) for name, section in result.provenance["config"].items()}
    check_recorded(config)
    tolerance = config["fault_tolerance"]
    spent = max((fault.attempt for fault in result.faults), default=0)
    tolerance["max_attempts_per_episode"] = spent + (attempts or tolerance["max_attempts_per_episode"])
    return make_settings(config)


def _failed(result: EvalResult, episodes: str | None) -> list[int]:
    """Return the episodes that failed, or those of them that are chosen."""
    import numpy as np

    failed = [int(index) for index in np.flatnonzero(result.table.filled & ~result.table.completed)]
    if episodes is None:
        return failed
    chosen = parse_episodes(episodes, len(result.plan))
    if others := set(chosen) - set(failed):
        those = f"{', '.join(map(str, failed[:_NAMED]))}{', ...' * (len(failed) > _NAMED)}" if failed else "none"
        raise UsageError(f"--episodes {episodes}: episode {min(others)} did not fail; of this run did: {those}")
    return chosen


def _put_aside(path: str, failed: list[int], settings: EvalSettings, accept_code_change: bool) -> None:
    """Have the log forget, for the count, that episodes failed.

    Raises:
        UsageError: There is no log.
        LogMismatch: Weights or code are others now.
    """
    from rl_eval.config.live import configured_weights
    from rl_eval.log import EvaluationLog
    from rl_eval.log.contents import read_manifest
    from rl_eval.log.storage import open_storage
    from rl_eval.results.provenance import manifest_of

    if read_manifest(open_storage(path)) is None:
        raise UsageError(
            f"{redact_text(shown(path))} has a result but no evaluation log. rl-eval retry needs one, and run "
            "--output alone saves none. Evaluate again with --log-dir DIR (and --output, if the result goes elsewhere)"
        )
    if not failed:
        return
    log = EvaluationLog.open(path, accept_code_change=accept_code_change)
    try:
        log.retry(manifest_of(settings, settings.plan(), configured_weights(settings.policy)), failed)
    finally:
        log.close()
