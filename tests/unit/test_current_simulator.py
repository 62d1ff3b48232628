"""The simulator that a batched runner steps: built only if necessary, closed only while nothing is live."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any, cast

import pytest

from rl_eval.errors import ConfigError
from rl_eval.records.episode import EpisodeSpec, Lease
from rl_eval.runners.batched.current_simulator import CurrentSimulator

WIDTH = 4
ORDINARY = Lease(EpisodeSpec(0, 1), 1)
LEASES = ORDINARY, ORDINARY.with_how(fresh=True), ORDINARY.with_how(alone=True)


@dataclass(eq=False)
class Simulator:
    num_envs: int
    closed: bool = False


@dataclass
class World:
    """Owner of a :class:`CurrentSimulator` that notes every simulator."""

    only: bool
    one_width: bool
    one_at_a_time: bool = False
    idle: bool = True
    built: list[Simulator] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.current = CurrentSimulator(WIDTH, self.build, self.close, only=self.only, one_at_a_time=self.one_at_a_time)

    def build(self, num_envs: int) -> Any:
        if self.one_width and num_envs != WIDTH:
            raise ConfigError("one width", key="environment.env", fix="")
        self.built.append(Simulator(num_envs))
        return self.built[-1]

    def close(self, simulator: Any) -> None:
        assert self.idle
        assert not simulator.closed
        simulator.closed = True

    def start(self, lease: Lease) -> Simulator | None:
        if not self.current.make_room(lease, idle=self.idle):
            assert not self.idle
            return None
        simulator = cast("Simulator", self.current.built(lease, 1))
        assert simulator is self.current.now
        self.idle = False
        return simulator

    @property
    def open(self) -> list[Simulator]:
        return [one for one in self.built if not one.closed]


@pytest.mark.parametrize("seed", range(60))
def test_no_order_of_starts_and_faults_breaks_a_law(seed: int) -> None:
    chance = random.Random(seed)
    world = World(chance.random() < 0.3, chance.random() < 0.5, chance.random() < 0.5)
    spoilt: set[int] = set()
    faulty: dict[int, int] = {}
    for _ in range(200):
        match chance.choice(("start", "start", "end", "reject", "blame")):
            case "start":
                lease, before = chance.choice(LEASES), len(world.built)
                simulator = world.start(lease)
                if simulator is not None:
                    assert not simulator.closed
                    assert id(simulator) not in spoilt
                    new = len(world.built) > before
                    assert new or world.only or lease is ORDINARY
                    whole = world.only or world.one_width or lease is ORDINARY
                    assert simulator.num_envs == (WIDTH if whole else 1)
            case "end":
                world.idle = True
            case "reject" if world.current.now is not None:
                world.current.reject()
                spoilt.add(id(world.current.now))
            case "blame" if world.current.now is not None:
                now = id(world.current.now)
                world.current.blame(0)
                faulty[now] = faulty.get(now, 0) + 1
                if faulty[now] == 2 and world.current.now is world.current.configured:
                    spoilt.add(now)
        assert len(world.open) <= (1 if world.only or world.one_at_a_time else 2)
    world.idle = True
    world.current.close()
    assert not world.open
    assert world.current.now is None


def test_a_rejected_simulator_is_replaced_once() -> None:
    world = World(only=False, one_width=False)
    first = world.start(ORDINARY)
    world.current.reject()
    assert world.start(ORDINARY) is None
    world.idle = True
    second = world.start(ORDINARY)
    assert second is not first
    world.idle = True
    assert world.start(ORDINARY) is second


def test_the_second_invalid_value_of_a_slot_rejects_its_simulator() -> None:
    world = World(only=False, one_width=False)
    for _ in range(2):  # The simulator that replaces another one begins without invalid values.
        simulator = world.start(ORDINARY)
        world.current.blame(0)
        world.current.blame(1)
        world.idle = True
        assert world.start(ORDINARY) is simulator
        world.current.blame(1)
        world.idle = True
        assert world.start(ORDINARY) is not simulator
        world.idle = True
    kept: Any = world.current.configured
    new = world.start(LEASES[1])
    for _ in range(2):  # Invalid values of a new simulator do not count for the other one.
        world.current.blame(2)
    world.current.reject()
    world.idle = True
    assert new is not kept
    assert world.start(ORDINARY) is kept
    world.current.blame(2)
    world.idle = True
    assert world.start(ORDINARY) is kept
