"""Attempts that an idle runner runs again: one after the other, or in different neighbourhoods."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import islice
from typing import Final, NamedTuple

import numpy as np

from rl_eval.records.episode import Lease, RunReport, failed_row
from rl_eval.records.generators import changes, generator_states
from rl_eval.runners import Runner

_BUDGET_S: Final = 1.0


def run_again(runner: Runner, leases: Iterable[Lease], at_once: int = 1) -> Iterator[RunReport]:
    """Run one attempt of each episode with an idle runner; yield one report per episode, in order.

    If the runner returns an episode without running it, the runner gets this episode again. If the runner cannot tell
    which of several episodes caused a fault, each of them runs again alone.

    Args:
        runner: The runner.
        leases: Episodes to run, with the attempt of each episode.
        at_once: Maximum number of unfinished episodes in the runner at one time.

    Yields:
        Report of one episode: its row and infos, even if the attempt failed, and its fault, if there is one. The other
        fields are equal to those of the runner's report.
    """
    waiting, held, again = iter(leases), deque[Lease](), list[Lease]()
    reports: dict[int, RunReport] = {}
    while True:
        new = list(islice(waiting, at_once - len(held)))
        held += new
        if not held:
            return
        report = runner.run([*again, *new], _BUDGET_S)
        again = [lease for lease in held if lease.index in report.returned]
        for place, index in enumerate(report.rows["index"].tolist()):
            part = slice(place, place + 1)
            reports[index] = replace(report, rows=report.rows[part], infos=report.infos[part], faults=())
        for fault in report.faults:
            place, lease = next((place, one) for place, one in enumerate(held) if one.index == fault.index)
            if not (fault.charged or lease.how.alone):
                held[place] = lease.with_how(alone=True)
                again.append(held[place])
                continue
            row = failed_row(fault.index, fault.seed, fault.attempt, report.weights_version)
            nothing = np.full((1, report.infos.shape[1]), np.nan)
            reports[fault.index] = replace(report, rows=row, infos=nothing, faults=(fault,))
        while held and held[0].index in reports:
            yield reports.pop(held.popleft().index)


class Neighbourhoods(NamedTuple):
    """Reports of an episode that ran again in different neighbourhoods."""

    new: RunReport
    """Alone, in a new environment."""
    used: RunReport
    """Alone, in an environment that ran another episode before. With ``environment.env_reuse`` ``episode``, in a new
    environment of a process that ran another episode before."""
    beside: RunReport
    """In a new environment, stepped in turn with a new environment that runs the other episode. In a runner of one
    lane, the other episode runs before."""
    other: RunReport
    """The other episode, beside this one."""
    drew: bool
    """Whether a global random generator of the process changed meanwhile. In a process with other threads, these may
    have changed it."""


def in_neighbourhoods(runner: Runner, lease: Lease, other: Lease, *, renewing: bool) -> Neighbourhoods:
    """Run an episode again in different neighbourhoods.

    Args:
        runner: An idle runner.
        lease: The episode.
        other: Another episode.
        renewing: Whether each episode gets a new environment.
    """
    lease, other = (one.with_how(again=True, traced=True, fresh=True) for one in (lease, other))
    states = generator_states()
    (new,) = run_again(runner, [lease])
    _, used = run_again(runner, [one.with_how(fresh=renewing) for one in (other, lease)])
    before, beside = run_again(runner, [other, lease], 2)
    return Neighbourhoods(new, used, beside, before, bool(changes(states, generator_states())))
