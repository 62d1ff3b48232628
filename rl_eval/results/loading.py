"""Loading of results from a folder, which has an evaluation log or a saved result.

The log has the committed records, so it takes precedence over a ``result.json`` in the same folder. If the two
contradict each other, an error is raised.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rl_eval.errors import UsageError
from rl_eval.log.storage import is_uri
from rl_eval.records.determinism import UNFINISHED, Determinism
from rl_eval.records.episode import EpisodeTable
from rl_eval.records.plain import check_claim, damage, typed
from rl_eval.results.files import RESULT_FILE, check_fingerprint, is_log_folder, read_folder
from rl_eval.results.metrics import Timing
from rl_eval.results.result import EvalResult, decide_status
from rl_eval.scheduling.plan import EpisodePlan

if TYPE_CHECKING:
    from rl_eval.log import LogContents


def load(path: str | os.PathLike[str]) -> EvalResult:
    """Load the result of an evaluation.

    Args:
        path: Folder or URI of an evaluation log, finished or not; a folder that :meth:`EvalResult.save` wrote; or the
            ``result.json`` in such a folder.

    Raises:
        LogError: The log is damaged, or the URI has no log.
        UsageError: The folder has no result, or the result is damaged or contradicts the log beside it.
    """
    text = os.fspath(path)
    if Path(text).is_file() and Path(text).suffix != ".json":
        fix = f"Pass the folder of a run. To evaluate a model, use rl-eval run --policy {text}."
        raise UsageError(f"{text} is a file, not the folder of a run", key=text, fix=fix)
    if not is_uri(text) and not is_log_folder(Path(text)):
        return EvalResult.load(path)
    from rl_eval.log import read_log
    from rl_eval.log.storage import open_storage

    return result_of_log(read_log(path), open_storage(path).label)


def result_of_log(contents: LogContents, folder: str) -> EvalResult:
    """Build the result of a log.

    Raises:
        UsageError: The records do not fit the plan, or contradict the result that was saved beside the log.
    """
    try:
        return _result(contents, folder)
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise UsageError(f"{folder} is damaged: {damage(error)}", key=folder) from error


def _result(contents: LogContents, folder: str) -> EvalResult:
    manifest, config = contents.manifest, contents.manifest.config
    plan = EpisodePlan.from_dict(vars(manifest))
    check_claim(len(plan), len(contents.rows), len(manifest.info_keys))
    check_fingerprint(f"plan of {folder}", manifest.plan_fingerprint, plan.fingerprint)
    table = EpisodeTable(len(plan), manifest.info_keys)
    table.fill(contents.set_aside)
    table.fill(contents.rows, contents.infos, contents.faults, contents.pardons)
    if (ended_by := contents.ended_by) is not None:
        table = table.head(ended_by.after)
    unfinished = f"the run in {folder} is not finished: continue it with rl-eval run ... --output {folder}"
    status, reason = decide_status(table, config["fault_tolerance"]["max_failed_episodes"], unfinished, ended_by)
    bounds = config["evaluation"]["return_bounds"]
    saved = _compare_with_saved(folder, plan, table, contents.retried)
    if saved.get("status") == "failed" and saved.get("fingerprint") == table.fingerprint():
        status, reason = "failed", str(saved.get("reason"))
    found = contents.determinism
    runners = config["runners"]["num_runners"] if contents.num_runners is None else contents.num_runners
    return EvalResult(
        table=table,
        plan=plan,
        status=status,
        reason=reason,
        timing=typed(Timing, asdict(Timing.of_totals(contents.totals, runners))),
        provenance=_provenance(contents),
        return_bounds=None if bounds is None else typed(tuple[float, float], bounds),
        audit_mismatches=contents.mismatches,
        condition_target=config["evaluation"].get("condition_target", "rows"),  # Older logs have none.
        ended_by=ended_by,
        determinism=typed(Determinism, found) if found else UNFINISHED,
    )


def _provenance(contents: LogContents) -> dict[str, Any]:
    manifest = contents.manifest
    described = dict(manifest.provenance)
    described["started_at"] = described.pop("finished_at", None)  # The manifest was written at the start.
    return {
        "config": manifest.config,
        "identity": manifest.identity,
        "weights": manifest.weights,
        **described,
        "numerics": contents.numerics,
        "notes": contents.notes,
        "code": manifest.code,
        "code_changes": [asdict(change) for change in contents.amendments],
    }


def _compare_with_saved(
    folder: str, plan: EpisodePlan, table: EpisodeTable, retried: Sequence[int]
) -> Mapping[str, Any]:
    """Check that a saved result agrees with the log. Return the result's summary; empty if no result was saved.

    Failed episodes that ran again after the result was saved may differ.
    """
    path = Path(folder, RESULT_FILE)
    if is_uri(folder) or not path.exists():
        return {}
    try:
        data, saved = read_folder(folder)
        _check_copy(data, saved, plan, table, retried)
    except (UsageError, KeyError, TypeError) as error:
        reason = str(error) if isinstance(error, UsageError) else f"it is damaged ({damage(error)})"
        fix, episode = (
            f"Remove {path} if the evaluation log in the same folder is right.",
            getattr(error, "episode", None),
        )
        raise UsageError(f"{path}: {reason}", key=str(path), episode=episode, fix=fix) from error
    return data


def _check_copy(
    data: dict[str, Any], saved: EpisodeTable, plan: EpisodePlan, table: EpisodeTable, retried: Sequence[int]
) -> None:
    """Compare a saved result with the log.

    The saved result may lack episodes that finished later. After an interrupted save, its records are newer than its
    summary.
    """
    check_fingerprint("plan of the evaluation log", data["plan"]["fingerprint"], plan.fingerprint)
    if data["status"] == "complete" and table.filled.all():
        check_fingerprint("evaluation log", data["fingerprint"], table.fingerprint())
    shared = saved.filled & table.filled
    shared &= saved.completed | ~np.isin(np.arange(len(table)), retried)
    if different := table.mismatches(saved.rows[shared], saved.infos[shared]):
        index = int(different[0])
        problem = f"the evaluation log and the result have different records of episode {index}"
        raise UsageError(problem, key="records", episode=index)
