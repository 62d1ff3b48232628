"""Meaning of ``--log-dir``: a new run, one to continue, one that is complete, or, if fresh, one beside it."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from rl_eval.config.live import configured_weights
from rl_eval.config.settings import EvalSettings
from rl_eval.errors import ConfigError, LogError
from rl_eval.log import LogContents, read_log
from rl_eval.log.code_changes import code_differences, newest_code
from rl_eval.log.contents import read_manifest
from rl_eval.log.storage import is_uri, open_storage
from rl_eval.results.files import RESULT_FILE
from rl_eval.results.loading import result_of_log
from rl_eval.results.provenance import manifest_of
from rl_eval.results.result import EvalResult

__all__ = ["finished_result", "fresh_run_dir"]


def fresh_run_dir(run_dir: str) -> str:
    """Return the first of DIR, DIR-2, DIR-3, ... in which there is nothing yet."""
    # A query belongs to the file system, not to the folder.
    base, mark, query = run_dir.partition("?") if is_uri(run_dir) else (run_dir, "", "")
    base = base.rstrip("/") or base
    names = itertools.chain([base], (f"{base}-{number}" for number in itertools.count(2)))
    return next(name + mark + query for name in names if _is_free(name + mark + query))


def finished_result(run_dir: str, settings: EvalSettings, say: Callable[[str], None]) -> EvalResult | None:
    """Return the result of a run of these settings that needs nothing any more.

    Args:
        run_dir: Folder or URI of its evaluation log, which need not exist.
        settings: What is evaluated. Whether another run may be continued is for the log to decide.
        say: Called with a line about what is there already.

    Raises:
        ConfigError: The folder holds a result without a log; or its URI, or the weights, cannot be opened.
        UsageError: The log contradicts the result beside it.
    """
    label = open_storage(run_dir).label
    contents = _read(run_dir, label, say)
    if contents is None or _differs(contents, settings):
        return None
    finished, planned = len(contents.rows), contents.manifest.num_episodes
    if finished < planned:
        say(f"continuing {label}: {finished:,} of {planned:,} episodes were finished")
        return None
    result = result_of_log(contents, label)
    if _is_to_be_checked(settings.evaluation.determinism_check, contents, result):
        say(f"continuing {label}: all {planned:,} episodes were finished; some of them are run again, as a check")
        return None
    say(f"{label} is complete: nothing is left to run")
    return result


def _is_to_be_checked(share: float | Literal["auto"], contents: LogContents, result: EvalResult) -> bool:
    """Whether the determinism check is missing; that ``auto`` decided against one counts as a check."""
    if share == "auto":
        return not contents.determinism
    return bool(share) and result.determinism.passed is None


def _read(run_dir: str, label: str, say: Callable[[str], None]) -> LogContents | None:
    """Return what a log holds; None if there is none, or one that has to be repaired first."""
    try:
        if read_manifest(open_storage(run_dir)) is not None:
            return read_log(run_dir)
    except LogError as error:
        say(str(error))
        return None
    except OSError:
        return None  # Whether such a folder can be used is said where it is opened.
    if not is_uri(run_dir) and Path(run_dir, RESULT_FILE).exists():
        raise ConfigError(
            f"{label} holds a result, but no evaluation log that could be continued: give another --log-dir, or start "
            "beside it with --fresh"
        )
    return None


def _differs(contents: LogContents, settings: EvalSettings) -> bool:
    weights = configured_weights(settings.policy)
    ours, theirs = manifest_of(settings, settings.plan(), weights), contents.manifest
    return bool(theirs.differences(ours) or code_differences(newest_code(theirs, contents.amendments), ours.code))


def _is_free(run_dir: str) -> bool:
    storage = open_storage(run_dir)
    try:
        return not any(storage.names(folder) for folder in ("", "owners", "segments"))
    except OSError as error:
        raise ConfigError(f"run_dir {storage.label} cannot be read: {error}") from error
