"""Checks that an episode in a batched simulator depends on its seed and its actions alone.

The same few episodes run with random actions at several widths, and in other slots. Their traces are compared.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Final

import numpy as np

from rl_eval.cli.checks import Finding, note, ok, problem, raised, warning
from rl_eval.config.policy_sources import RANDOM
from rl_eval.config.settings import EvalSettings, PolicySection, with_values
from rl_eval.errors import EnvError
from rl_eval.records.determinism import first_difference
from rl_eval.records.episode import Lease, RunReport, different_columns, outcomes_of
from rl_eval.runners.batched.runner import BatchedEvalRunner
from rl_eval.scheduling.plan import EpisodePlan

_EPISODES: Final = 8
_WIDTHS: Final = (1, 4, 7)
"""Fewer slots than episodes, so that slots are restarted while others run."""
_MAX_STEPS: Final = 1_000
_CALL_S: Final = 0.5


def check_simulator(settings: EvalSettings) -> Iterator[Finding]:
    """Run episodes at several widths, and compare them; with blocks, run the first one twice."""
    if size := settings.runners.block_size:
        yield _check_block(settings, EpisodePlan(size, settings.evaluation.seed))
        return
    plan = EpisodePlan(_EPISODES, settings.evaluation.seed, conditions=settings.evaluation.conditions)
    leases = [plan[index].lease(1)._replace(traced=True) for index in range(_EPISODES)]
    keys = settings.evaluation.info_keys
    layouts = [(width, leases) for width in _WIDTHS] + [(_WIDTHS[-1], leases[::-1])]
    found: list[dict[int, RunReport]] = []
    for width, order in layouts:
        try:
            found.append(_play(settings, width, order))
        except Exception as error:
            yield raised(f"the simulator, with {width} slots,", error, "fix the simulator")
            return
        if len(found) == 1:
            yield ok("builds, and restarts slots one by one")
    for (width, order), reports in zip(layouts[1:], found[1:], strict=True):
        for index, report in reports.items():
            first: object = first_difference(index, found[0][index].traces[index], report.traces[index])
            if first is None and (columns := _other_columns(found[0][index], report, index, keys)):
                first = f"{columns[0]} of episode {index}"
            if first is not None:
                slots = f"in {width} slots" if order is leases else f"in {width} slots, in another order"
                yield problem(
                    f"an episode depends on the number of slots or on its neighbours: {first} is different {slots}",
                    "seed every slot alone in restart(), and draw its random numbers from a generator of its own",
                )
                return
    widths = ", ".join(map(str, _WIDTHS[:-1]))
    yield ok(f"exact: {_EPISODES} episodes are equal in {widths} and {_WIDTHS[-1]} slots, and in other slots")
    starts = {int(report.traces[index]["observation"][0]) for index, report in found[0].items()}
    if len(starts) < _EPISODES:
        yield note(f"{_EPISODES} seeds gave {len(starts)} distinct first observation{'s' if len(starts) > 1 else ''}")


def _other_columns(one: RunReport, other: RunReport, index: int, keys: tuple[str, ...]) -> list[str]:
    """Return the outcome columns of an episode that differ between two reports."""
    rows = []
    for report in (one, other):
        at = report.rows["index"] == index
        rows.append(outcomes_of(report.rows[at], report.infos[at], keys))
    return list(different_columns(*rows))


def _check_block(settings: EvalSettings, plan: EpisodePlan) -> Finding:
    """Run a block twice, each time in a new simulator, and compare the records."""
    lease = Lease(0, plan[0].seed, 1, 0, block=tuple(plan.seeds.tolist()))
    try:
        first, second = (_play(settings, settings.runners.lanes, [lease])[0].rows for _ in range(2))
    except Exception as error:
        return raised("the simulator", error, "fix the simulator")
    names = ("index", "episode_return", "length", "terminated", "truncated")
    if all(np.array_equal(first[name], second[name]) for name in names):
        return ok(f"layout, repeatable: a block of {len(plan)} episodes has equal records when it runs again")
    return warning(
        f"layout, not repeatable: a block of {len(plan)} episodes has other records when it runs again",
        "make reset(seed=...) seed every generator of the simulator; until then no run can be repeated",
    )


def _play(settings: EvalSettings, width: int, leases: Sequence[Lease]) -> dict[int, RunReport]:
    """Run episodes in a new simulator; return the report of each by its index.

    Raises:
        EnvError: An attempt failed.
    """
    steps = min(settings.evaluation.max_episode_steps or _MAX_STEPS, _MAX_STEPS)
    policy = PolicySection(policy=RANDOM, actions="none", deterministic=False)
    made_up = with_values(
        settings.model_copy(update={"policy": policy}),
        runners={"num_envs_per_runner": width, "num_runners": 0},
        evaluation={"max_episode_steps": steps, "observers": ()},
    )
    found: dict[int, RunReport] = {}
    with ExitStack() as stack:
        runner = BatchedEvalRunner(made_up, 0)
        stack.callback(runner.stop)
        runner.run((), 0.0)  # The first call probes the policy.
        report = runner.run(leases, _CALL_S)
        while not all(lease.index in found for lease in leases):
            for fault in report.faults:
                raise EnvError(f"{fault.error_type}: {fault.message}", episode=fault.index)
            found |= dict.fromkeys(report.rows["index"].tolist(), report)
            report = runner.run((), _CALL_S)
    return found
