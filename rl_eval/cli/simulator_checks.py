"""Findings of ``rl-eval doctor`` about a batched simulator."""

from __future__ import annotations

from collections.abc import Iterator

from rl_eval.cli.checks import Finding, note, ok, problem, raised, warning
from rl_eval.config.settings import EvalSettings
from rl_eval.runners import layout_of
from rl_eval.testing.simulator_checks import EPISODES, block_difference, measure, widths_of


def check_simulator(settings: EvalSettings) -> Iterator[Finding]:
    """Compare episodes with different numbers of slots. With ``runners.block``, compare two runs of one block."""
    try:
        if settings.runners.block is None:
            yield from _check_slots(settings)
        else:
            yield _check_block(settings)
    except Exception as error:
        yield raised("the simulator", error, "fix the simulator")


def _check_slots(settings: EvalSettings) -> Iterator[Finding]:
    measured = measure(settings)
    *narrower, widest = widths_of(settings)
    widths = f"{', '.join(map(str, narrower))} and {widest} slots, and if an episode changes its slot"
    if measured.broken:
        yield problem(
            f"an episode depends on the number of slots or on its neighbours: {measured.broken}. The simulator "
            f"declares {measured.promised}, but the guarantee is {measured.guarantee}",
            "seed each slot separately in restart(), and draw its random numbers from its own generator. If the steps "
            "of the simulator mix the slots, set couples_slots. Or set runners.block",
        )
    elif measured.promised == "exact":
        yield ok(f"exact: {EPISODES} episodes are equal with {widths}")
    else:
        yield ok(f"conditions: {EPISODES} episodes have equal first observations with {widths}")
    if (starts := measured.distinct_starts) < EPISODES:
        yield note(f"{EPISODES} seeds gave {starts} distinct first observation{'s' if starts > 1 else ''}")


def _check_block(settings: EvalSettings) -> Finding:
    block = f"the first steps of a block of {layout_of(settings).block_size} episodes"
    if (difference := block_difference(settings)) is None:
        return ok(f"layout, repeatable: {block} are equal when they run again")
    return warning(
        f"layout, not repeatable: {block} differ when they run again: {difference}",
        "seed every generator of the simulator in reset(seed=...); until then, no run can be repeated",
    )
