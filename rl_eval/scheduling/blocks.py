"""Schedule of blocks: consecutive episodes that one runner runs together, from one full reset of its simulator.

If a simulator cannot restart single slots, an episode depends on the episodes in the other slots. So a block is
granted, retried and recorded as a whole. :class:`BlockSchedule` is a :class:`~rl_eval.scheduling.schedule.Schedule`
that treats each block as one episode. It translates indices of episodes into numbers of blocks, and back.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, final

import numpy as np
from typing_extensions import assert_never, override

from rl_eval.records.episode import EpisodeSpec, Lease
from rl_eval.scheduling import events
from rl_eval.scheduling.plan import EpisodePlan
from rl_eval.scheduling.schedule import Schedule


class _BlockPlan:
    """Plan whose episodes are blocks; the spec of a block is the spec of its first episode."""

    def __init__(self, plan: EpisodePlan, size: int) -> None:
        self._plan, self._firsts = plan, range(0, len(plan), size)

    def __len__(self) -> int:
        return len(self._firsts)

    def __getitem__(self, block: int) -> EpisodeSpec:
        return self._plan[self._firsts[block]]


@final
class BlockSchedule(Schedule):
    """Assigns the blocks of a plan to runners; its events and commands name episodes, not blocks.

    A report of a runner contains either all rows of a block, or one fault with the index of the block's first episode.

    Args:
        plan: Episodes to run.
        size: Number of episodes of a block; the last block may have fewer.
        expected_runners: Number of runners that should join.
        done: Indices that are already finished, in a resumed run. A block is done if all its episodes are finished.
        attempts: Numbers of used attempts, by the index of any episode of a block.
        max_attempts: Maximum number of attempts of a block.
        pardoned: Numbers of pardoned attempts, by the index of any episode of a block.
    """

    def __init__(
        self,
        plan: EpisodePlan,
        size: int,
        expected_runners: int = 1,
        done: Collection[int] = (),
        attempts: Mapping[int, int] | None = None,
        max_attempts: int = 3,
        pardoned: Mapping[int, int] | None = None,
    ) -> None:
        self._episodes, self._size = plan, size
        counts = np.bincount(np.array(sorted(done), np.int64) // size, minlength=-(-len(plan) // size))
        finished = [block for block, count in enumerate(counts.tolist()) if count == len(self._indices(block))]
        blocks: EpisodePlan = _BlockPlan(plan, size)  # type: ignore[assignment]  # It has what a schedule reads.
        super().__init__(
            blocks, expected_runners, finished, self._highest(attempts), max_attempts, self._highest(pardoned)
        )

    @override
    def handle(self, event: events.Event) -> events.Decision:
        rows: list[list[int]] = []
        match event:
            case events.RunnerReported():
                positions = self._whole_blocks(event.finished)
                rows = list(positions.values())
                event = replace(
                    event,
                    finished=tuple(positions),
                    failed_attempts=self._pairs(event.failed_attempts),
                    suspects=self._pairs(event.suspects),
                    returned=self._blocks(event.returned),
                    live=self._blocks(event.live),
                )
            case events.RunnerLost():
                event = replace(event, charged=self._pairs(event.charged), suspects=self._pairs(event.suspects))
            case events.RunnerJoined():
                event = replace(event, lanes=1)
            case _:
                pass
        decision = super().handle(event)
        verdict, commands = self._verdict_on_episodes(decision.verdict, rows), self._translated(decision.commands)
        return events.Decision(verdict, tuple(commands))

    @property
    @override
    def unfinished(self) -> int:
        """Number of episodes in blocks that are neither recorded nor given up."""
        return sum(len(self._indices(block)) for block, done in enumerate(self._done) if not done)

    @override
    def gave_up(self, index: int) -> bool:
        return super().gave_up(index // self._size)

    # ---------------------------------------------------------------- episodes to blocks

    def _indices(self, block: int) -> range:
        return range(block * self._size, min((block + 1) * self._size, len(self._episodes)))

    def _blocks(self, indices: Iterable[int]) -> tuple[int, ...]:
        return tuple(dict.fromkeys(index // self._size for index in indices))

    def _highest(self, numbers: Mapping[int, int] | None) -> dict[int, int]:
        """Return the highest number of each block."""
        highest: dict[int, int] = {}
        for index, number in (numbers or {}).items():
            highest[index // self._size] = max(number, highest.get(index // self._size, 0))
        return highest

    def _pairs(self, pairs: Iterable[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
        return tuple(dict.fromkeys((index // self._size, attempt) for index, attempt in pairs))

    def _whole_blocks(self, rows: Iterable[int]) -> dict[int, list[int]]:
        """Return the positions of a block's rows in a report, by block. Omit a block if any of its rows is missing."""
        positions: dict[int, list[int]] = {}
        for position, index in enumerate(rows):
            positions.setdefault(index // self._size, []).append(position)
        return {block: found for block, found in positions.items() if len(found) == len(self._indices(block))}

    # ---------------------------------------------------------------- blocks to episodes

    def _verdict_on_episodes(self, verdict: events.Verdict, rows: list[list[int]]) -> events.Verdict:
        """Return the verdict on episodes, from the positions of the rows of each reported block."""
        record, audit = (tuple(at for one in blocks for at in rows[one]) for blocks in (verdict.record, verdict.audit))
        return events.Verdict(record, audit, tuple((block * self._size, attempt) for block, attempt in verdict.charge))

    def _translated(self, commands: Iterable[events.Command]) -> Iterator[events.Command]:
        """Yield commands that name episodes, from commands that name blocks."""
        for command in commands:
            match command:
                case events.Grant(runner, leases):
                    yield events.Grant(runner, tuple(self._block_lease(lease) for lease in leases))
                case events.Reclaim(runner, blocks):
                    yield events.Reclaim(runner, tuple(block * self._size for block in blocks))
                case events.Exclude(runner, failures, pardoned):
                    pairs = tuple((block * self._size, attempt) for block, attempt in pardoned)
                    yield events.Exclude(runner, failures, pairs)
                case events.GiveUp(block, _, attempts):
                    for index in self._indices(block):
                        yield events.GiveUp(index, self._episodes[index].seed, attempts)
                case events.Abort():
                    yield command
                case _:
                    assert_never(command)

    def _block_lease(self, lease: Lease) -> Lease:
        return lease.with_how(block=tuple(self._episodes[index] for index in self._indices(lease.index // self._size)))


def schedule_of(plan: EpisodePlan, block_size: int, **arguments: Any) -> Schedule:
    """Return a schedule of episodes, or of blocks if their size is not 0; ``arguments`` are those of both classes."""
    return BlockSchedule(plan, block_size, **arguments) if block_size else Schedule(plan, **arguments)


def repeat_decisions(history: Sequence[Any]) -> Iterator[events.Decision]:
    """Yield the decisions of a schedule again, from its history as plain JSON values.

    Args:
        history: Arguments of :func:`schedule_of` by name, and then the events, from :func:`~.events.to_list`.

    Raises:
        AssertionError: The schedule broke a rule.
    """
    arguments, *written = history
    for name in ("attempts", "pardoned"):  # JSON has no integers as keys.
        arguments = arguments | {name: {int(index): count for index, count in arguments[name].items()}}
    schedule = schedule_of(**arguments | {"plan": EpisodePlan.from_dict(arguments["plan"])})
    for event in written:
        yield schedule.handle(events.from_list(event))
        schedule.validate()
