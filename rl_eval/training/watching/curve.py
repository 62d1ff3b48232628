"""Files for users: the learning curve in ``curve.csv`` and ``curve.png``, and the best checkpoint in ``best.json``.

The horizontal axis is the training step, or the number of the checkpoint if not all names have a step.
"""

from __future__ import annotations

import datetime
import io
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final

from rl_eval.results.csv_text import write_csv
from rl_eval.results.text import BIASED_BEST
from rl_eval.training.watching.journal import CheckpointScore, Entry

if TYPE_CHECKING:
    from matplotlib.axes import Axes


_SELECTION: Final = {
    "status": "status", "episode_return_mean": "mean", "episode_return_ci_low": "low", "episode_return_ci_high": "high",
    "num_episodes": "num_episodes", "num_failed_episodes": "num_failed", "fingerprint": "fingerprint",
    "reason": "reason", "determinism": "determinism", "interval": "interval",
}  # fmt: skip
"""Columns of the curve with the score on the selection episodes: column to field of :class:`CheckpointScore`."""
_HELD_OUT: Final = {
    "held_out_return_mean": "mean", "held_out_return_ci_low": "low", "held_out_return_ci_high": "high",
    "held_out_num_episodes": "num_episodes", "held_out_determinism": "determinism", "held_out_interval": "interval",
}  # fmt: skip
_COLUMNS: Final = ("step", "name", "modified", *_SELECTION, "best", *_HELD_OUT, "digest", "evaluation")

_LINE: Final = "#1f77b4"
_BEST: Final = "#d62728"


def curve_rows(entries: Sequence[Entry], best: str | None) -> list[dict[str, Any]]:
    """Return one row of JSON values per checkpoint.

    Args:
        entries: Checkpoints in the order of training.
        best: Id of the best checkpoint; None if there is none.
    """
    return [
        {
            "step": entry.info.step,
            "name": entry.info.name,
            "modified": datetime.datetime.fromtimestamp(entry.info.modified, datetime.timezone.utc).isoformat(
                timespec="seconds"
            ),
            "best": entry.id == best,
            "digest": entry.digest,
            "evaluation": entry.id if entry.selection.fingerprint else None,
            **{column: getattr(entry.selection, name) for column, name in _SELECTION.items()},
            **{column: getattr(entry.held_out, name, None) for column, name in _HELD_OUT.items()},
        }
        for entry in entries
    ]


def curve_csv(entries: Sequence[Entry], best: str | None) -> str:
    """Return :func:`curve_rows` as CSV. A missing value is an empty cell."""
    rows = ({**row, "best": str(row["best"]).lower()} for row in curve_rows(entries, best))
    return write_csv([_COLUMNS, *([row[name] for name in _COLUMNS] for row in rows)])


def describe(best: Entry, checkpoint: str) -> dict[str, Any]:
    """Return the content of ``best.json``: the best checkpoint, its two scores, and the meaning of each score.

    Args:
        best: The best checkpoint.
        checkpoint: Path of its copy, relative to the output folder.
    """
    repeats = best.held_out is None or not best.held_out.determinism
    worth = (
        "quote this number"
        if repeats
        else "depends on the number of runners and environments, so do not quote this number"
    )
    return {
        "checkpoint": checkpoint,
        "name": best.info.name,
        "step": best.info.step,
        "digest": best.digest,
        "selection": best.selection and {"meaning": BIASED_BEST, **asdict(best.selection)},
        "held_out": best.held_out and {"meaning": f"had no part in the choice: {worth}", **asdict(best.held_out)},
    }


def curve_png(entries: Sequence[Entry], best: str | None, title: str) -> bytes:
    """Draw mean returns with their intervals, and the held-out return of the best checkpoint; return a PNG file.

    Raises:
        ImportError: matplotlib is not installed.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.0, 4.5), dpi=120, layout="constrained")
    axes = figure.add_subplot()
    stepped = all(entry.info.step is not None for entry in entries)
    places = [entry.info.step if stepped else number for number, entry in enumerate(entries, 1)]
    scores = [(place, entry.selection) for place, entry in zip(places, entries, strict=True)]
    _draw(axes, scores, "selection episodes", color=_LINE, marker="o", markersize=4)
    partial = [(place, score) for place, score in scores if score and score.status == "partial"]
    _draw(axes, partial, "some episodes failed", color="black", marker="x", linestyle="")
    for place, entry in zip(places, entries, strict=True):
        if entry.id == best:
            label = "best on the selection episodes: biased upward"
            _draw(axes, [(place, entry.selection)], label, color=_BEST, marker="*", markersize=13)
            label = f"best on {entry.held_out.num_episodes if entry.held_out else 0} held-out episodes"
            _draw(axes, [(place, entry.held_out)], label, color=_BEST, marker="D", markersize=6, fillstyle="none")
    axes.set(xlabel="training step" if stepped else "checkpoint", ylabel="mean return")
    axes.set_title(title, fontsize="medium", parse_math=False)  # A name may contain two dollar signs.
    axes.grid(alpha=0.25)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize="small", loc="best")
    picture = io.BytesIO()
    figure.savefig(picture, format="png")
    return picture.getvalue()


def _draw(axes: Axes, scores: Sequence[tuple[Any, CheckpointScore | None]], label: str, **style: Any) -> None:
    """Draw the mean returns of checkpoints with their intervals; skip checkpoints without a mean return."""
    points = [(place, score.mean) for place, score in scores if score is not None and score.mean is not None]
    if points:
        axes.plot(*zip(*points, strict=True), label=label, **style)
    for place, score in scores:
        if score is not None and score.low is not None and score.high is not None:
            axes.vlines(place, score.low, score.high, color=style["color"], alpha=0.5)
