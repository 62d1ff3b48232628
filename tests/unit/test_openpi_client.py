"""Client of a server of openpi's protocol: a bad answer is that of its row, and no episode stays at the server."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from multiprocessing.connection import wait
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from websockets.exceptions import ConnectionClosed
from websockets.sync.server import Server, ServerConnection, serve

from rl_eval.config.settings import PolicySection
from rl_eval.errors import PolicyError, PolicyUnavailable
from rl_eval.integrations.openpi import load_policy
from rl_eval.integrations.openpi.client import PolicyClient
from rl_eval.integrations.openpi.greeting import EXTENSION, greeting
from rl_eval.integrations.openpi.wire import pack, unpack
from rl_eval.policies.inference.inference import RowInference
from tests.refused import refused, untold

SPACES = gym.spaces.Box(-1, 1, (1,), np.float32), gym.spaces.Box(-99, 99, (16,), np.float32)
SECTION = PolicySection()
ROWS = np.arange(16, dtype=np.float32)[:, None]
LIVE = np.ones(16, bool)

Start = Callable[..., PolicyClient]


@pytest.fixture
def start() -> Iterator[Start]:
    """Start a server that answers a request with the result of a function; return its client."""
    servers: list[Server] = []
    clients: list[PolicyClient] = []

    def started(answer: Callable[[Any], Any], metadata: Any = None) -> PolicyClient:
        def talk(connection: ServerConnection) -> None:
            with suppress(ConnectionClosed):
                connection.send(metadata if isinstance(metadata, str | bytes) else pack(metadata or {}))
                for message in connection:
                    assert isinstance(message, bytes)
                    found = answer(unpack(message))
                    for one in found if isinstance(found, list) else [found]:
                        if one is not None:
                            connection.send(pack(one))

        servers.append(serve(talk, "127.0.0.1", 0, close_timeout=0.1))
        threading.Thread(target=servers[-1].serve_forever).start()
        address = f"127.0.0.1:{servers[-1].socket.getsockname()[1]}"
        clients.append(PolicyClient(load_policy(address, patience_s=0.2), SECTION, *SPACES))
        return clients[-1]

    yield started
    for client in clients:
        client._drop()
    for server in servers:
        server.shutdown()


def action(request: Any) -> Any:
    return request["observation"] + np.arange(16, dtype=np.float32)


def test_an_action_may_be_a_list(start: Start) -> None:
    """A batch has as many rows as an action has numbers, so rows and numbers could be confused."""
    found, _ = start(lambda request: {"actions": action(request).tolist()}).act(ROWS, None, LIVE, None)
    assert np.array_equal(found, ROWS + np.arange(16))


@pytest.mark.parametrize("bad", ["left", [[1, 2], [3]], np.zeros(3, np.float32), {"a": 1.0}])
def test_a_bad_action_is_that_of_its_row_alone(start: Start, bad: Any) -> None:
    policy = start(lambda request: {"actions": bad if request["observation"] == 5 else action(request)})
    number, answers = policy.send(ROWS, None, None), list[Any]()
    while sum(len(one.rows) for one in answers) < len(ROWS):
        answers += policy.received()
    alone = [one.rows for one in answers if len(one.rows) == 1 and (one.error or np.shape(one.actions) != (1, 16))]
    assert alone == [[5]]
    assert {one.request for one in answers} == {number}


@pytest.mark.parametrize("named", [5, [1], {"id": np.arange(3)}, {}])
def test_a_number_of_an_episode_that_is_none_is_ignored(start: Start, named: Any) -> None:
    found, _ = start(lambda request: {"actions": action(request), EXTENSION: named}).act(ROWS, None, LIVE, None)
    assert np.array_equal(found, ROWS + np.arange(16))


def test_an_episode_that_failed_to_begin_does_not_stay_at_the_server(start: Start) -> None:
    begun, ended = set(), set()

    def answer(request: Any) -> Any:
        named = {key: request[EXTENSION].get(key) for key in ("id", "step")}
        if request[EXTENSION].get("end"):
            ended.add(named["id"])
            return None
        begun.add(named["id"])
        return (
            {EXTENSION: {**named, "error": "five"}}
            if request["observation"] == 5
            else {"actions": action(request), EXTENSION: named}
        )

    policy = start(answer, {"rl_eval": 1, **greeting(SECTION, *SPACES)})
    state = policy.initial_state(16)
    with pytest.raises(PolicyError):
        policy.act(ROWS, state, LIVE, None)
    policy.act(ROWS[:1], state[:1], LIVE[:1], None)
    assert len(ended) == 16
    assert len(begun - ended) == 1


def test_a_second_answer_is_not_that_of_the_next_step(start: Start) -> None:
    """A server that sends each answer twice, the second time before that of the next request."""
    former: list[Any] = []

    def answer(request: Any) -> Any:
        if request[EXTENSION].get("end"):
            return None
        named = {key: request[EXTENSION][key] for key in ("id", "step")}
        answers = [*former, {"actions": action(request), EXTENSION: named}]
        former[:] = answers[-1:]
        return answers

    policy = start(answer, {"rl_eval": 1, **greeting(SECTION, *SPACES)})
    state = policy.initial_state(1)
    for row in ROWS:
        found, state = policy.act(row[None], state, LIVE[:1], None)
        assert np.array_equal(found, [row + np.arange(16)])


@pytest.mark.parametrize("greeted", [pack(5), pack([1]), b"\xc1garbage", b"", "hello"])
def test_a_greeting_that_is_no_metadata_is_told_after_the_patience(start: Start, greeted: Any) -> None:
    policy = start(action, greeted)
    with refused(PolicyUnavailable, "policy.policy") as seen:
        policy.initial_state(1)
    assert not untold(str(seen.value), policy.server.rpartition(" ")[2])


def test_an_answer_too_many_puts_the_former_ones_in_doubt(start: Start) -> None:
    """Answers without numbers may have been those of other rows. A new connection is in step again."""

    def answer(request: Any) -> Any:
        return [{"actions": action(request)}] * (2 if request["observation"] == 3 else 1)

    policy = start(answer)
    for row in ROWS:
        found, _ = policy.act(row[None], None, LIVE[:1], None)
        assert bool(policy.doubt) == (row > 3)
        if row == 3:
            assert wait([policy.fileno()], 60)
        assert np.array_equal(found, [row + np.arange(16)])
    assert policy.connections == 2
    policy.reconnect()
    assert not policy.doubt


def test_a_probe_that_shows_an_answer_too_many_says_so(start: Start) -> None:
    """The probe itself finds it, and its own answers come over a new connection, in step."""
    twice: list[int] = []

    def answer(request: Any) -> Any:
        return [{"actions": action(request)}] * (1 + bool(twice and twice.pop()))

    policy = start(answer)
    inference = RowInference(policy, *SPACES, 1, SECTION)
    inference.probe()
    outputs = inference.numerics["outputs"]
    inference.probe_again()
    assert inference.numerics["outputs"] == outputs
    twice.append(1)
    policy.act(ROWS[:1], None, LIVE[:1], None)
    assert wait([policy.fileno()], 60)
    inference.probe_again()
    assert not untold(inference.numerics["outputs"], policy.server)
