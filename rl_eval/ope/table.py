"""Table of off-policy estimates, in colour and as text."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

from rich import box
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from rl_eval.results.text import decimals, number

if TYPE_CHECKING:
    from rl_eval.ope.estimate import Estimate, OffPolicyEstimates

__all__ = ["estimates_table", "estimates_text"]

_WIDTH: Final = 110
_LABELS: Final = {
    "behaviour": "behaviour",
    "trajectory_is": "trajectory IS",
    "weighted_is": "weighted IS",
    "per_decision_is": "per-decision IS",
    "weighted_per_decision_is": "weighted per-decision IS",
    "doubly_robust": "doubly robust",
    "weighted_doubly_robust": "weighted doubly robust",
    "fitted_q": "fitted Q (model)",
    "simulation": "simulation",
}


def estimates_text(estimates: OffPolicyEstimates) -> str:
    """Write the table without colours."""
    console = Console(width=_WIDTH, color_system=None, force_terminal=False, highlight=False)
    with console.capture() as captured:
        console.print(estimates_table(estimates))
    return "\n".join(line.rstrip() for line in captured.get().splitlines())


def estimates_table(estimates: OffPolicyEstimates) -> Group:
    """Lay out the table, and below it why values are missing."""
    level = f"{100 * estimates.estimates[0].interval.confidence:g} % interval"
    title = (
        f"Value of the target policy from {estimates.num_episodes:,} episodes of another, {estimates.num_steps:,} "
        f"steps, at most {estimates.longest:,} each; discount {estimates.gamma:g}"
    )
    table = Table(box=box.SIMPLE_HEAD, show_edge=False)
    table.add_column("estimator", no_wrap=True)
    simulated = next((one.value for one in estimates if one.name == "simulation"), None)
    gap = () if simulated is None else ("- simulation",)
    for name in ("value", level, *gap, "ESS", "largest", "mean weight"):
        table.add_column(name, justify="right", no_wrap=True)
    for one in estimates:
        table.add_row(*_cells(one, simulated), style="" if one.verdict in ("identified", "measured") else "dim")
    return Group(Text(title), Text(), table, *[Text(note, style="yellow") for note in _notes(estimates)])


def _cells(one: Estimate, simulated: float | None) -> list[str]:
    places = decimals((one.interval.high - one.interval.low) / 4, one.value)
    cells = [_LABELS[one.name], "none" if math.isnan(one.value) else number(one.value, places)]
    ends = f"{number(one.interval.low, places)} to {number(one.interval.high, places)}"
    cells.append(ends if one.interval.exists else "")
    if simulated is not None:
        gap = math.nan if one.name == "simulation" else one.value - simulated
        cells.append("" if math.isnan(gap) else number(gap, places))
    return [*cells, *_weight_cells(one)]


def _weight_cells(one: Estimate) -> tuple[str, str, str]:
    if one.weights is None:
        return "", "", ""
    ends = one.weights.mean_weight_interval
    return (
        number(one.weights.effective_sample_size, 1),
        "n/a" if math.isnan(one.weights.largest_share) else f"{100 * one.weights.largest_share:.1f} %",
        f"{one.weights.mean_weight:.3g} ({ends.low:.3g} to {ends.high:.3g})",
    )


def _notes(estimates: OffPolicyEstimates) -> list[str]:
    """Say once each why values or intervals are missing, and of which estimators."""
    why: dict[str, list[str]] = {}
    for one in estimates:
        if one.reason or not one.interval.exists:
            told = "not identified: " if one.verdict == "not identified" else ""
            why.setdefault(told + (one.reason or one.interval.note), []).append(_LABELS[one.name])
    notes = [f"{', '.join(names)} {reason}" for reason, names in why.items()]
    if any(one.verdict == "model" for one in estimates):
        notes.append("The interval of fitted Q leaves out the error of the fit.")
    return notes
