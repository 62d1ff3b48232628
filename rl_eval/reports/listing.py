"""List of the runs in a folder. Files are only read as data. A run that cannot be read has an error text.

The numbers of a complete result come from its summary, because it takes long to compute them again for many runs.
``load`` and ``rl-eval show`` compute them again. The numbers of any other run are computed from its records.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from rl_eval.errors import EvalError, UsageError
from rl_eval.errors.redaction import redact_text
from rl_eval.log.ownership import RunState, state_of
from rl_eval.log.storage import LocalStorage
from rl_eval.records.determinism import UNFINISHED
from rl_eval.records.parquet import parquet_columns
from rl_eval.records.plain import damage, plain
from rl_eval.reports.page import one_line
from rl_eval.reports.pages import with_ends, writer
from rl_eval.results.files import (
    EPISODES_FILE,
    RESULT_FILE,
    check_format,
    is_log_folder,
    is_summary,
    read_summary,
)
from rl_eval.results.loading import load
from rl_eval.results.text import (
    decimals,
    environment_name,
    of_planned,
    percent,
    policy_name,
    rounded,
    weights_file,
    weights_name,
)

HEADINGS: Final = ("when", "status", "success", "mean return", "episodes", "environment", "policy", "run")
"""Headings of the list's columns, in a terminal and in a browser."""

_LONGEST: Final = 200
"""Maximum length of a name or an error text."""


@dataclass(frozen=True, slots=True)
class ListedRun:
    """One run: a summary of its result, or the reason why it cannot be read."""

    path: str
    """Folder of the run, relative to the listed folder."""
    status: str
    """``complete``, ``partial``, ``failed``, or ``broken``."""
    episodes: int = 0
    """Number of episodes from which the mean is computed."""
    planned: int = 0
    mean_return: float = math.nan
    low: float = math.nan
    """Lower end of the interval of the mean; NaN if there is no interval."""
    high: float = math.nan
    policy: str = ""
    weights: str = ""
    """Path of the weights or of the model file; if there is none, digest and version of the weights."""
    environment: str = ""
    when: str = ""
    """ISO time of the end of the run. For a log, the time of the start."""
    problem: str = ""
    """Reason why a broken run cannot be read."""
    deterministic: bool | None = None
    """Whether the determinism check passed; None without a check."""
    state: RunState = "finished"
    """``running``, ``stopped`` (nobody writes the log, and the same command continues it) or ``finished``."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """All metrics of the result, with the success rate and its interval."""

    @property
    def name(self) -> str:
        """Path of the run, as text on one line."""
        return _line(self.path)

    @property
    def cells(self) -> Mapping[str, str]:
        """Texts by heading. A broken run has no numbers, and its error text follows its name."""
        if self.status == "broken":
            return {"status": "broken", "run": f"{self.name}: {self.problem}"}
        state = self.status if self.state == "finished" else self.state
        rate, low, high = (self.metrics.get(f"success_{name}", math.nan) for name in ("rate", "ci_low", "ci_high"))
        return {name: rounded(value) for name, value in self.metrics.items()} | {
            "when": self.when[:16].replace("T", " "),
            "status": f"{state}, not deterministic" if self.deterministic is False else state,
            "success": "" if math.isnan(rate) else with_ends(rate, low, high, percent),
            "mean return": self._mean,
            "episodes": of_planned(self.episodes, self.planned),
            "environment": self.environment,
            "policy": self.policy,
            "weights": self.weights,
            "run": self.name,
        }

    @property
    def _mean(self) -> str:
        """Mean return and its interval; in a zero-sum game, the mean return of each policy or agent."""
        by_policy, by_agent = (
            {name.removeprefix(key): value for name, value in self.metrics.items() if name.startswith(key)}
            for key in ("policy_per_capita_return_mean/", "agent_episode_returns_mean/")
        )
        if round(self.mean_return, 9) == 0 and any(by_agent.values()):
            parts = by_policy if len(by_policy) > 1 else by_agent
            best = sorted(parts.items(), key=lambda part: -part[1])
            return ", ".join(f"{name} {rounded(mean)}" for name, mean in best)
        places = decimals((self.high - self.low) / 4, self.mean_return)
        return with_ends(self.mean_return, self.low, self.high, writer(places))

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain JSON values; NaN becomes None."""
        return {name: plain(value) for name, value in asdict(self).items()}


def used(headings: Iterable[str], rows: Sequence[Mapping[str, str]]) -> list[str]:
    """Return the headings of the columns that are not empty in all rows."""
    return [heading for heading in headings if any(row.get(heading) for row in rows)]


def list_runs(folder: str | os.PathLike[str]) -> list[ListedRun]:
    """Return the runs in a folder and its subfolders, newest first.

    Links are not followed, and no code of a run is executed.

    Raises:
        UsageError: The folder does not exist.
    """
    if not Path(folder).is_dir():
        place, fix = os.fspath(folder), "Pass a folder of results or evaluation logs; rl-eval run writes to runs/."
        raise UsageError(f"{place} is not a folder", key=place, fix=fix)
    found = [_listed(place, os.path.relpath(place, folder)) for place in _places(folder)]
    return sorted(found, key=lambda run: run.when, reverse=True)


def _places(folder: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield the folders of runs, in the order of their paths."""
    for place, folders, files in os.walk(folder):
        is_run = is_log_folder(Path(place))
        if is_run or RESULT_FILE in files:
            yield Path(place)
        if is_run or is_summary(Path(place, RESULT_FILE)):
            folders[:] = []  # A run contains no other run.
        folders.sort()


def _listed(path: Path, name: str) -> ListedRun:
    try:
        if summary := _summary(path):
            return _run(name, summary)
        result = load(path)
        run = _run(name, result.to_dict())
        if not is_log_folder(path):
            return run
        whole = not result.stopped_early and result.determinism != UNFINISHED
        return replace(run, state=state_of(LocalStorage(path), whole=whole))
    except EvalError as error:
        problem = str(error)
    except Exception as error:  # Any error is possible in files of others.
        problem = f"damaged ({damage(error)})"
    return ListedRun(name, "broken", problem=_line(problem))


def _summary(path: Path) -> dict[str, Any]:
    """Return the summary of a complete result; empty if the run must be loaded instead."""
    if not (path / RESULT_FILE).exists():
        return {}
    data = read_summary(path / RESULT_FILE)
    if data.get("status") != "complete":
        return {}
    check_format(data)
    ended = data.get("ended_by")
    _check_records(path / EPISODES_FILE, int(ended["after"] if ended else data["plan"]["num_episodes"]))
    return data


def _run(name: str, data: Mapping[str, Any]) -> ListedRun:
    """Return the listed run for a summary, which may be malformed."""
    interval, provenance = data["interval"], data["provenance"]
    metrics = {_line(name): math.nan if value is None else float(value) for name, value in data["metrics"].items()}
    low, high = (math.nan if interval[end] is None else float(interval[end]) for end in ("low", "high"))
    passed = data["determinism"]["passed"]
    when = provenance.get("finished_at") or provenance.get("started_at") or ""
    return ListedRun(
        name,
        _line(str(data["status"])),
        episodes=int(metrics["num_episodes"]),
        planned=int(data["plan"]["num_episodes"]),
        mean_return=metrics["episode_return_mean"],
        low=low,
        high=high,
        policy=_line(policy_name(provenance)),
        weights=_line(weights_file(provenance) or weights_name(provenance, metrics.get("weights_version", math.nan))),
        environment=_line(environment_name(provenance)),
        when=_line(str(when)),
        deterministic=None if passed is None else bool(passed),
        metrics=metrics,
    )


def _check_records(path: Path, planned: int) -> None:
    """Check that there is a record of every episode that was planned, or that counts."""
    import pyarrow as pa

    try:
        with parquet_columns(path) as columns:
            count = columns.num_rows
    except (OSError, pa.ArrowException) as error:
        raise UsageError(f"{path.name} cannot be read: {error}", key=str(path)) from error
    if count != planned:
        raise UsageError(f"{path.name} contains {count} of {planned} episodes", key=str(path), value=count)


def _line(text: str) -> str:
    """Return a text on one line, without secrets, cut to the maximum length."""
    return " ".join(one_line(redact_text(text, 2 * _LONGEST)).split())[:_LONGEST]
