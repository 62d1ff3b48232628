"""Learning curve as files: ``curve.csv`` has every checkpoint, ``curve.png`` those with a mean return.

Points stand at their training step, or, where not all names have one, in the order of the checkpoints.
"""

from __future__ import annotations

import csv
import datetime
import io
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from rl_eval.watching.journal import Entry, Score

__all__ = ["CSV_FILE", "PNG_FILE", "curve_csv", "curve_png", "curve_rows"]

CSV_FILE: Final = "curve.csv"
PNG_FILE: Final = "curve.png"

_COLUMNS: Final = (
    "step", "name", "modified", "status", "episode_return_mean", "episode_return_ci_low", "episode_return_ci_high",
    "num_episodes", "num_failed_episodes", "best", "held_out_return_mean", "held_out_return_ci_low",
    "held_out_return_ci_high", "held_out_num_episodes", "digest", "fingerprint", "evaluation", "reason",
    "determinism", "held_out_determinism", "interval", "held_out_interval",
)  # fmt: skip

_LINE: Final = "#1f77b4"
_BEST: Final = "#d62728"


def curve_csv(entries: Sequence[Entry], best: str | None) -> str:
    """Return :func:`curve_rows` as lines; absent numbers are empty."""
    text = io.StringIO()
    writer = csv.DictWriter(text, _COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows({**row, "best": str(row["best"]).lower()} for row in curve_rows(entries, best))
    return text.getvalue()


def curve_rows(entries: Sequence[Entry], best: str | None) -> list[dict[str, Any]]:
    """Return one row per checkpoint, in the order of training, as JSON values.

    Args:
        entries: Checkpoints.
        best: Id of the one that was kept as the best.
    """
    return [_row(entry, best) for entry in entries]


def _row(entry: Entry, best: str | None) -> dict[str, Any]:
    score, held_out = entry.selection, entry.held_out
    modified = datetime.datetime.fromtimestamp(entry.info.modified, datetime.timezone.utc)
    return {
        "step": entry.info.step,
        "name": entry.info.name,
        "modified": modified.isoformat(timespec="seconds"),
        "status": score.status,
        "episode_return_mean": score.mean,
        "episode_return_ci_low": score.low,
        "episode_return_ci_high": score.high,
        "num_episodes": score.num_episodes,
        "num_failed_episodes": score.num_failed,
        "best": entry.id == best,
        "held_out_return_mean": held_out and held_out.mean,
        "held_out_return_ci_low": held_out and held_out.low,
        "held_out_return_ci_high": held_out and held_out.high,
        "held_out_num_episodes": held_out and held_out.num_episodes,
        "digest": entry.digest,
        "fingerprint": score.fingerprint,
        "evaluation": entry.id if score.fingerprint else None,
        "reason": score.reason,
        "determinism": score.determinism,
        "held_out_determinism": held_out and held_out.determinism,
        "interval": score.interval,
        "held_out_interval": held_out and held_out.interval,
    }


def curve_png(entries: Sequence[Entry], best: str | None, title: str) -> bytes:
    """Draw mean returns with their intervals, and the best checkpoint with its held-out return.

    Raises:
        ImportError: matplotlib is not installed.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.0, 4.5), dpi=120, layout="constrained")
    axes = figure.add_subplot()
    stepped = all(entry.info.step is not None for entry in entries)
    places = {entry.id: entry.info.step if stepped else number for number, entry in enumerate(entries, 1)}
    _draw_points(axes, [(places[entry.id], entry.selection) for entry in entries])
    for entry in entries:
        if entry.id == best:
            _draw_best(axes, places[entry.id], entry)
    axes.set(xlabel="training step" if stepped else "checkpoint", ylabel="mean return")
    axes.set_title(title, fontsize="medium")
    axes.grid(alpha=0.25)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize="small", loc="best")
    picture = io.BytesIO()
    figure.savefig(picture, format="png")
    return picture.getvalue()


def _draw_points(axes: Axes, scores: list[tuple[Any, Score]]) -> None:
    points = [(place, score.mean) for place, score in scores if score.mean is not None]
    if not points:
        return
    axes.plot(*zip(*points, strict=True), color=_LINE, marker="o", markersize=4, label="selection episodes")
    for place, score in scores:
        _draw_interval(axes, place, score, _LINE)
    partial = [(place, score.mean) for place, score in scores if score.status == "partial" and score.mean is not None]
    if partial:
        axes.plot(*zip(*partial, strict=True), "x", color="black", label="some episodes failed")


def _draw_best(axes: Axes, place: Any, entry: Entry) -> None:
    if entry.selection.mean is not None:
        label = "best, chosen on these: biased upward"
        axes.plot(place, entry.selection.mean, "*", color=_BEST, markersize=13, label=label)
    held_out = entry.held_out
    if held_out is not None and held_out.mean is not None:
        label = f"best on {held_out.num_episodes} held-out episodes"
        axes.plot(place, held_out.mean, "D", color=_BEST, markersize=6, fillstyle="none", label=label)
        _draw_interval(axes, place, held_out, _BEST)


def _draw_interval(axes: Axes, place: Any, score: Score, color: str) -> None:
    if score.low is not None and score.high is not None:
        axes.vlines(place, score.low, score.high, color=color, alpha=0.5)
