"""Contract of a runner with observers: they see every step in order, and what they raise is theirs alone."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any, Final, NamedTuple

from rl_eval.records.canonical import canonical_digest
from rl_eval.records.episode import EpisodeRecord, EpisodeSpec
from rl_eval.runners import SingleAgentEvalRunner
from rl_eval.runners.observers import observer_factories
from rl_eval.testing.contracts.suite import RunnerSuite, expect, leases_of, play


class _Seen(NamedTuple):
    """Artifact of the observer: what it was shown of the attempt that counts."""

    episode: int
    seed: int
    attempt: int
    steps: tuple[bytes, ...]
    """Digests of the first observation, and of each step's action and results."""


class _Diary:
    """Observer that keeps all it is shown."""

    def __init__(self, env: Any) -> None:
        self.steps: list[bytes] = [b"the start was not shown"]

    def on_episode_start(self, spec: EpisodeSpec, attempt: int, observation: Any) -> None:
        self.start = (spec.index, spec.seed, attempt)
        self.steps = [canonical_digest(observation)]

    def on_step(self, observation: Any, action: Any, *results: Any) -> None:
        # The last one is what the policy computed besides, which rounds as its batch does.
        self.steps.append(canonical_digest((observation, action, *results[:-1])))

    def on_episode_end(self, record: EpisodeRecord) -> _Seen:
        expect((record.index, record.seed, record.attempts), self.start, "record and start of an observed episode")
        return _Seen(*self.start, tuple(self.steps))


_FEW: Final = 4
"""Episodes of a test."""
_DIARY: Final = _Diary.__qualname__
_METHODS: Final = ("on_episode_start", "on_step", "on_episode_end")


def _raising(where: str) -> Callable[[Any], Any]:
    """Return the factory of an observer that raises in one place."""

    def fail(*args: Any) -> None:
        raise OSError("disk full")

    def broken(env: Any) -> Any:
        if where == "factory":
            fail()
        observer: Any = _Diary(env)
        setattr(observer, where, fail)
        return observer

    return broken


class ObserverContract(RunnerSuite):
    """Tests of what a runner owes to ``evaluation.observers``; part of :class:`EvalRunnerContract`."""

    def test_an_observer_sees_every_step_of_each_episode_in_order(self) -> None:
        """What it keeps of an episode is what it keeps beside the reference loop, bit for bit."""
        for lanes, runner in self.runners(observers=[_Diary]):
            played = play(runner, leases_of(_FEW), budget_s=0.0)
            self._expect_seen(played.artifacts, {}, f"{lanes} lanes")
            self.expect_reference(played.rows, f"{lanes} lanes, observed")
            expect(played.notes, (), f"notes, {lanes} lanes")

    def test_an_observer_sees_a_new_attempt_from_its_start(self) -> None:
        """What is kept is of the attempt that counts; attempts that failed have no end."""
        fault = {"kind": "raise", "step": 2, "episodes": [1, 3], "attempts": [1, 2]}
        for lanes, runner in self.runners(fault, observers=[_Diary]):
            self._expect_seen(play(runner, leases_of(_FEW)).artifacts, {1: 3, 3: 3}, f"{lanes} lanes, with faults")

    def test_what_an_observer_raises_is_its_own(self) -> None:
        """A note names the observer; episodes have no fault and their rows, and other observers see what they would."""
        for where in ("factory", *_METHODS):
            broken = _raising(where)
            (name,) = observer_factories([broken])
            for lanes, runner in self.runners(observers=[broken, _Diary]):
                played, what = play(runner, leases_of(_FEW)), f"{lanes} lanes, an observer raises in {where}"
                expect(played.faults, (), f"faults, {what}")
                self.expect_reference(played.rows, what)
                self._expect_seen(played.artifacts, {}, what)
                if not any(name in note and "disk full" in note for note in played.notes):
                    raise AssertionError(f"{what}: no note has its name, {name!r}, and its error, but {played.notes}")

    def test_an_episode_that_runs_to_be_compared_is_not_observed(self) -> None:
        """A lease with ``fresh`` is the determinism check's."""
        leases = [lease._replace(fresh=True) for lease in leases_of(3)]
        for lanes, runner in self.runners(observers=[_Diary]):
            played = play(runner, leases)
            self.expect_reference(played.rows, f"{lanes} lanes, fresh environments")
            expect(played.artifacts, {}, f"artifacts, {lanes} lanes, fresh environments")

    def _expect_seen(self, artifacts: dict[int, Any], attempts: dict[int, int], what: str) -> None:
        """Assert that the diary of each episode is the reference loop's.

        Args:
            artifacts: By index and observer.
            attempts: Attempts that count, by index; 1 by default.
            what: For the message.
        """
        kept = [(index, name) for index in sorted(artifacts) for name in artifacts[index]]
        expect(kept, [(index, _DIARY) for index in sorted(self._seen)], f"episodes and observers of artifacts, {what}")
        for index, due in self._seen.items():
            seen = artifacts[index][_DIARY]
            expect(
                seen[:3], (index, due.seed, attempts.get(index, 1)), f"index, seed and attempt of an artifact, {what}"
            )
            if seen.steps != due.steps:
                raise AssertionError(
                    f"{what}: the observer of episode {index} saw {len(seen.steps) - 1} steps, and should have seen "
                    f"these {len(due.steps) - 1}: show it the reset and each step, once, in order, as the environment "
                    "returned them"
                )

    @cached_property
    def _seen(self) -> dict[int, _Seen]:
        """What the observer is shown by the reference loop, by index."""
        with self.make_runner(1, runner=SingleAgentEvalRunner, observers=[_Diary]) as runner:
            artifacts = play(runner, leases_of(_FEW)).artifacts
        return {index: kept[_DIARY] for index, kept in artifacts.items()}
