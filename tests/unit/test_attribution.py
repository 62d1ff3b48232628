"""Attribution of a dead runner to episodes, on evidence only."""

from typing import Any

import pytest

from rl_eval.scheduling.runner_failures import attribute_loss
from rl_eval.supervision.flight_recorder import ALL_LANES, CrashReport, LaneEntry, Moment

LANES = (LaneEntry(True, 10, 100, 1, 5.0), LaneEntry(True, 11, 110, 2, 6.0), LaneEntry(False, 9, 90, 1, 1.0))
ENV_PHASES = ("construct", "reset", "step")


def crash_report(cause: Any, phase: Any, lane: int = 1, lanes: Any = LANES) -> CrashReport:
    return CrashReport(
        cause, Moment(phase, lane, 17, 8.0, lanes), 2.0, "longer than x=1", "main thread\n  stack", "host"
    )


@pytest.mark.parametrize("phase", ENV_PHASES)
@pytest.mark.parametrize("cause", ["deadline", "signal"])
def test_evidence_convicts_the_episode_of_the_call(cause: Any, phase: str) -> None:
    """A passed deadline or a written fatal signal in an environment's call charges that episode, and no other."""
    attribution = attribute_loss(crash_report(cause, phase), runner=4)
    assert (attribution.charged, attribution.suspects) == (((11, 2),), ())
    (fault,) = attribution.faults
    assert (fault.index, fault.seed, fault.attempt, fault.phase, fault.step) == (11, 110, 2, phase, 17)
    assert (fault.runner, fault.node, fault.seconds) == (4, "host", 4.0)
    assert fault.cause == ("timeout" if cause == "deadline" else "env")
    assert "stack" in fault.traceback
    assert not fault.charged


@pytest.mark.parametrize("phase", ENV_PHASES)
@pytest.mark.parametrize("cause", ["vanished", "stopped"])
def test_without_evidence_it_is_only_suspected(cause: Any, phase: str) -> None:
    """A killed or stopped process may have been pre-empted: its episode is suspected, not charged."""
    attribution = attribute_loss(crash_report(cause, phase), runner=4)
    assert (attribution.charged, attribution.suspects) == ((), ((11, 2),))
    assert [(fault.cause, fault.error_type, fault.charged) for fault in attribution.faults] == [
        ("runner", "RunnerLost", False)
    ]


@pytest.mark.parametrize("cause", ["deadline", "signal", "vanished", "stopped"])
def test_the_policy_makes_suspects_of_all_live_episodes(cause: Any) -> None:
    """A batch has many rows; only when a single one is live does evidence convict it."""
    attribution = attribute_loss(crash_report(cause, "act", 0), runner=4)
    assert (attribution.charged, attribution.suspects) == ((), ((10, 1), (11, 2)))
    alone = attribute_loss(crash_report(cause, "act", 0, LANES[1:]), runner=4)
    convicted = cause in ("deadline", "signal")
    assert (alone.charged, alone.suspects) == ((((11, 2),), ()) if convicted else ((), ((11, 2),)))


@pytest.mark.parametrize("phase", ENV_PHASES)
def test_a_call_for_all_slots_convicts_no_episode(phase: str) -> None:
    """A slot without an episode may be the cause, even if a single one is live."""
    attribution = attribute_loss(crash_report("signal", phase, ALL_LANES, LANES[1:]), runner=4)
    assert (attribution.charged, attribution.suspects) == ((), ((11, 2),))


@pytest.mark.parametrize("cause", ["deadline", "signal", "vanished", "stopped"])
def test_a_death_in_close_is_told_and_charged_to_nobody(cause: Any) -> None:
    """The episode whose environment closes is over and reported."""
    attribution = attribute_loss(crash_report(cause, "close", 2), runner=4)
    assert (attribution.charged, attribution.suspects) == ((), ())
    assert [(fault.index, fault.phase) for fault in attribution.faults] == [(9, "close")]


def test_nothing_known_blames_nobody() -> None:
    """A node that is gone tells nothing; a runner between calls was doing nothing."""
    for unknown in (None, CrashReport("vanished", None, 0.0, "", "", "host"), crash_report("vanished", "idle")):
        attribution = attribute_loss(unknown, runner=0)
        assert (attribution.charged, attribution.suspects, attribution.faults) == ((), (), ())


def test_a_lane_that_never_began_has_no_fault() -> None:
    """The first environment of a runner is built before any episode."""
    lanes = (LaneEntry(False, 0, 0, 0, 0.0),)
    assert attribute_loss(crash_report("vanished", "construct", 0, lanes), runner=0).faults == ()
