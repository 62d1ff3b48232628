"""Simulated clients of a policy server: episodes begin, end, repeat requests and lose connections at random times.

A lane of the model remembers which episode began in it and its last step, as the recurrent state of a policy does.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

BLOCK, PATIENCE_S = 4, 5.0
_TIE = 1e-9


@dataclass
class _Client:
    """Connection with episodes; a negative number of an episode is that of a row on its own."""

    number: int
    nameless: bool
    sent: int = 0
    begun: int = 0
    steps: dict[int, int] = field(default_factory=dict)
    """Steps of the live episodes that were asked for."""
    open: dict[int, Any] = field(default_factory=dict)
    """Rows without an answer, by request."""
    last: dict[int, Any] = field(default_factory=dict)
    """Last row of each live episode."""


class World:
    """One history of random clients; every method checks the laws."""

    def __init__(self, seed: int, lanes: ModuleType) -> None:
        self.random = random.Random(seed)
        self.module = lanes
        self.count = self.random.randint(1, 7)
        self.memory = self.random.random() < 0.7
        self.lanes = lanes.Lanes(self.count, BLOCK, memory=self.memory, patience_s=PATIENCE_S)
        self.now = 0.0
        self.clients: dict[int, _Client] = {}
        self.born = 0
        self.state: dict[int, tuple[tuple[int, int], int]] = {}
        """Episode and step of each lane."""
        self.waits: dict[tuple[int, int], float] = {}
        """Time at which each row began to wait for a lane."""

    # ------------------------------------------------------------------ clients

    def connect(self) -> None:
        self.born += 1
        self.clients[self.born] = _Client(self.born, self.random.random() < 0.2 and not self.memory)

    def send(self, client: _Client) -> None:
        client.sent += 1
        if client.nameless:
            row = self.row(client, -client.sent, 0, begin=True)
        else:
            idle = [one for one in client.steps if not any(row.episode == one for row in client.open.values())]
            again = [row for row in client.last.values() if self.random.random() < 0.1]
            if again:
                row = again[0]._replace(request=client.sent)
            elif idle and self.random.random() < 0.8:
                episode = self.random.choice(idle)
                client.steps[episode] += self.random.randint(1, 3)
                row = self.row(client, episode, client.steps[episode], begin=False)
            else:
                client.begun += 1
                client.steps[client.begun] = 0
                row = self.row(client, client.begun, 0, begin=True)
            client.last[row.episode] = row
        client.open[client.sent] = row
        self.waits[row.connection, row.request] = self.now
        self.told(self.lanes.add(row, self.now))

    def row(self, client: _Client, episode: int, step: int, *, begin: bool) -> Any:
        return self.module.Row(client.number, episode, 7, step, begin, client.sent)

    def unknown(self, client: _Client) -> None:
        """A client asks for a step of an episode that this server does not know."""
        found = self.lanes.add(self.module.Row(client.number, 10**6, 7, 3, False), self.now)
        assert isinstance(found, self.module.Refusal)

    def end(self, client: _Client) -> None:
        waiting = {row.episode for row in client.open.values()}
        if idle := [episode for episode in client.steps if episode not in waiting]:
            episode = self.random.choice(idle)
            del client.steps[episode], client.last[episode]
            freed = self.lanes.end(client.number, episode, self.now)
            assert len(freed) == 1
            self.free(freed)

    def leave(self, client: _Client) -> None:
        self.free(self.lanes.leave(client.number, self.now))
        del self.clients[client.number]
        self.waits = {key: since for key, since in self.waits.items() if key[0] != client.number}

    def free(self, lanes: list[int]) -> None:
        for lane in lanes:
            self.state.pop(lane, None)

    # ------------------------------------------------------------------ the server

    def told(self, found: Any) -> None:
        """Take an answer or a refusal: each request gets one, with the content of its own row."""
        if found is None:
            return
        client = self.clients[found.row.connection]
        row = client.open.pop(found.row.request)
        self.waits.pop((row.connection, row.request))
        if isinstance(found, self.module.Refusal):
            assert found.reason == self.module.NO_LANE
            client.steps.pop(row.episode, None)
            client.last.pop(row.episode, None)
            return
        assert found.message == f"{row.key} {row.step}".encode()

    def compute(self) -> bool:
        """Let a block begin, if there is one, and check its rows."""
        wait = self.lanes.wait_s(self.now)
        block = self.lanes.next_block(self.now)
        assert not block or wait is not None
        assert len(block) <= BLOCK
        assert len({place.lane for place in block}) == len(block)
        for lane, row, begins in block:
            assert 0 <= lane < self.count
            if begins:
                assert self.state.get(lane, ((0, 0), 0))[0] != row.key
                self.state[lane] = row.key, row.step
            elif self.memory:
                held, step = self.state[lane]
                assert held == row.key
                assert step < row.step
                self.state[lane] = held, row.step
            for reply in self.answers(row):
                self.told(reply)
            if row.episode < 0:
                self.free(self.lanes.end(*row.key, self.now))
        if block:
            self.lanes.pass_s = self.random.choice([0.01, 0.1, 1.0])
            self.now += self.lanes.pass_s
        return bool(block)

    def answers(self, row: Any) -> list[Any]:
        return self.lanes.answered(row, f"{row.key} {row.step}".encode())

    def refuse(self) -> None:
        assert not (self.lanes._free and self.lanes._waiting), "a row waits although a lane is free"
        for refusal in self.lanes.overdue(self.now):
            assert self.now >= self.waits[refusal.row.connection, refusal.row.request] + PATIENCE_S - _TIE
            self.told(refusal)

    def settle(self) -> None:
        """Without new rows, each row has an answer or a refusal when the server has waited as long as it says."""
        turns = 0
        while any(client.open for client in self.clients.values()):
            wait = self.lanes.wait_s(self.now)
            assert wait is not None, "a row waits, and the server waits for nothing"
            assert wait <= max(PATIENCE_S, self.lanes.pass_s / 2) + _TIE
            self.now += wait
            self.refuse()
            self.compute()
            turns += 1
            assert turns < 1000


def run_history(seed: int, lanes: ModuleType) -> None:
    """Run one history, and check at its end that no lane is held."""
    world = World(seed, lanes)
    for _ in range(120):
        world.now += world.random.choice([0.0, 0.0, 0.003, 0.05])
        if not world.clients or world.random.random() < 0.05:
            world.connect()
        client = world.random.choice([*world.clients.values()])
        action = world.random.random()
        if action < 0.6:
            world.send(client)
        elif action < 0.75:
            world.end(client)
        elif action < 0.78:
            world.leave(client)
        elif action < 0.8 and world.memory and not client.nameless:
            world.unknown(client)
        if world.random.random() < 0.5:
            world.refuse()
            world.compute()
        if world.random.random() < 0.05:
            world.settle()
    world.settle()
    for client in [*world.clients.values()]:
        world.leave(client)
    full = [lanes.Row(0, number) for number in range(world.count)]
    assert [world.lanes.add(row, world.now) for row in full] == [None] * world.count
    seen: set[int] = set()
    while block := world.lanes.next_block(world.now + 10):
        seen |= {place.lane for place in block}
    assert len(seen) == world.count, "a lane is lost"
