"""``rl-eval serve``: actions are those of the policy in this process, and a bad client loses only its connection."""

from __future__ import annotations

import http.client
import signal
import socket
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

from rl_eval import EvalConfig, evaluate
from rl_eval.cli.exits import ExitCode
from rl_eval.config.settings import PolicySection
from rl_eval.errors import ConfigError
from rl_eval.errors.redaction import MASK
from rl_eval.integrations.openpi.connection import LostError, RejectedError
from rl_eval.integrations.openpi.served import ServedPolicy
from rl_eval.integrations.openpi.wire import pack, unpack
from rl_eval.policies.inference.inference import RowInference
from tests.planted import secret
from tests.refused import refused, untold
from tests.served import CLIENTS, HORIZON, Client, Flat, Recurrent, Served
from tests.unit.cli_world import call

pytestmark = pytest.mark.process

TOKEN = secret("served")
SEEN = np.array([0.3, -0.2, 1.5], np.float32)


@pytest.fixture(autouse=True)
def clients() -> Iterator[None]:
    yield
    while CLIENTS:
        CLIENTS.pop().close()


@pytest.fixture(scope="module")
def recurrent() -> Iterator[Served]:
    server = Served("recurrent", "--stochastic", "--rows", "16")
    yield server
    server.kill()


@pytest.fixture(scope="module")
def flat() -> Iterator[Served]:
    server = Served("flat")
    yield server
    server.kill()


def here(policy: Any, seeds: list[int], steps: int, **section: Any) -> list[Any]:
    """Return the actions of the policy in this process, of shape (steps, episodes, ...)."""
    spaces = (gym.spaces.Box(-9, 9, (3,), np.float32), gym.spaces.Box(-2, 2, (1,), np.float32))
    inference = RowInference(policy, *spaces, len(seeds), PolicySection(actions="none", **section))
    for lane, seed in enumerate(seeds):
        inference.begin(lane, seed)
    found = []
    for step in range(steps):
        for lane in range(len(seeds)):
            inference.observations.write(lane, SEEN + np.float32(0.1) * step)
        found.append(np.array(inference.act()[0])[: len(seeds)].copy())
    return found


def test_episodes_have_their_own_state_and_noise(recurrent: Served) -> None:
    """Repeated requests get the same answer, and the others go on."""
    client = Client(recurrent.port)
    assert (client.greeting["rl_eval"], client.greeting["deterministic"]) == (1, False)
    seeds, expected = [3, 8, 5], here(Recurrent(), [3, 8, 5], 6, deterministic=False)
    for step in range(6):
        for episode in (1, 2, 0):
            client.send(SEEN + np.float32(0.1) * step, episode, step, seed=seeds[episode])
            if step % 2:
                client.send(SEEN + np.float32(0.1) * step, episode, step, seed=seeds[episode])
        for _ in range(6 if step % 2 else 3):
            episode, action = client.answer()
            assert action.tobytes() == expected[step][episode].astype(np.float64).tobytes()


def test_an_episode_that_is_not_known_here_is_unavailable(recurrent: Served) -> None:
    client = Client(recurrent.port)
    assert client.ask(SEEN, 5, 3)["unavailable"] is True
    client.ask(SEEN, 6)
    client.end(6)
    assert client.ask(SEEN, 6, 1)["unavailable"] is True


def test_an_episode_waits_for_a_lane(recurrent: Served) -> None:
    """A lane is free when its episode ends, or when its connection is closed."""
    first, second = Client(recurrent.port), Client(recurrent.port)
    for episode in range(16):
        first.ask(SEEN, episode)
    second.send(SEEN, 7)
    second.send(SEEN, 8)
    first.ask(SEEN, 2, 1)
    first.end(1)
    assert second.answer()[0] == 7
    first.reset()
    assert second.answer()[0] == 8


def test_the_error_of_a_row_is_that_of_this_row(recurrent: Served) -> None:
    client = Client(recurrent.port)
    client.send(SEEN, 1)
    client.send(np.array([0, 0, 7], np.float32), 2)
    client.send(np.zeros(4, np.float32), 3)
    found = dict(client.answer() for _ in range(3))
    assert "seven" in found[2]["error"]
    assert "error" in found[3]
    assert not {"unavailable"} & (found[2].keys() | found[3].keys())
    assert found[1].shape == (1,)
    assert client.ask(SEEN, 1, 1).shape == (1,)


def test_a_stock_client_gets_actions_that_it_can_use(flat: Served) -> None:
    client = Client(flat.port)
    for _ in range(3):
        client.link.send(pack({"observation": SEEN}))
        action = unpack(client.receive())["actions"]
        assert action.tolist() == np.clip(here(Flat(), [0], 1)[0][0], -2, 2).tolist()
        assert action.dtype == np.float32


def test_a_stock_client_cannot_use_a_policy_with_memory(recurrent: Served) -> None:
    client = Client(recurrent.port)
    client.link.send(pack({"observation": SEEN}))
    assert "numbers its episodes" in client.receive()
    with pytest.raises(LostError):
        client.receive()


def test_a_stock_client_gets_whole_chunks() -> None:
    server = Served("chunks", "--set", "policy.chunk.execute=2")
    client = Client(server.port)
    client.link.send(pack({"observation": SEEN}))
    assert unpack(client.receive())["actions"].shape == (HORIZON, 1)
    assert client.ask(SEEN, 1).shape == (HORIZON, 1)
    server.kill()


def test_a_chunk_is_that_of_the_server_and_fits_its_horizon() -> None:
    """An impossible value has the error that it has in this process."""
    server = Served("chunks", "--set", "policy.chunk={execute: 3, delay: 1}")
    config = EvalConfig().environment("Pendulum-v1").evaluation(num_episodes=1)
    for chunk, there in (
        ({"execute": HORIZON + 1}, False),
        ({"execute": 1, "delay": 3}, False),
        ({"execute": 2}, True),
        (None, True),
    ):
        served = config.copy().policy(f"openpi://127.0.0.1:{server.port}", chunk=chunk)
        with refused(ConfigError, "policy.chunk") as caught:
            evaluate(served)
        if not there:
            with refused(ConfigError, "policy.chunk", value=caught.value.value, fix=caught.value.fix):
                evaluate(config.copy().policy(Flat(horizon=HORIZON), chunk=chunk))
        assert not untold(str(caught.value), *((chunk or {"execute": 3}).values()), *([3] if there else [HORIZON]))
    server.kill()


def test_an_evaluation_has_the_records_of_the_policy_in_this_process(recurrent: Served, flat: Served) -> None:
    for policy, server, deterministic in ((Recurrent(), recurrent, False), (Flat(), flat, True)):
        config = EvalConfig().environment("Pendulum-v1").evaluation(num_episodes=5, max_episode_steps=10)
        config.policy(policy, deterministic=deterministic).runners(num_envs_per_runner=3)
        expected = evaluate(config).fingerprint
        for lanes in (1, 3):
            config.policy(f"openpi://127.0.0.1:{server.port}").runners(num_envs_per_runner=lanes)
            found = evaluate(config)
            assert (found.status, found.fingerprint) == ("complete", expected)
            assert found.determinism.checked > 0 == len(found.determinism.mismatched)


def raw(server: Served, data: bytes) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", server.port), timeout=30)
    connection.sendall(data)
    return connection


UPGRADE = (
    b"GET / HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n"
)


def test_bad_clients_lose_only_their_connections(flat: Served) -> None:
    """Half a frame, a stranger, garbage, a message that is no request, a frame that is too long, a reset."""
    good, action = Client(flat.port), here(Flat(), [0], 1)[0][0].tolist()
    page = http.client.HTTPConnection("127.0.0.1", flat.port, timeout=30)
    for path, status in (("/", 426), ("/healthz", 200)):
        page.request("GET", path)
        assert page.getresponse().status == status
        page.close()
    opened = [raw(flat, UPGRADE + b"\r\n" + tail) for tail in (b"\x82\xfe", b"\x82\xff" + b"\x7f" * 8, b"\xff" * 99)]
    opened += [raw(flat, b"\x00\x01garbage\r\n\r\n"), raw(flat, b"GET / HT")]
    opened.append(raw(flat, UPGRADE + b"Authorization: a\r\nAuthorization: \xff\r\n\r\n"))
    for message in (b"\xc1", b"\x01", pack({"observation": 1, "__rl_eval__": {"id": -1}}), pack([1]), b""):
        client = Client(flat.port)
        client.link.send(message)
        assert isinstance(client.receive(), str)
        with pytest.raises(LostError):
            client.receive()
        assert good.ask(SEEN, 1).tolist() == action
    for connection in opened[:2]:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    for connection in opened:
        connection.close()
    assert good.ask(SEEN, 2).tolist() == action


def test_a_wrong_token_is_rejected_and_the_token_is_not_shown() -> None:
    server = Served("flat", token=TOKEN)
    for token in ("", "wrong", TOKEN[:-1]):
        with pytest.raises(RejectedError):
            Client(server.port, token)
    assert Client(server.port, TOKEN).ask(SEEN, 1).shape == (1,)
    assert TOKEN not in str(server.announced)
    assert TOKEN.encode() not in Path(f"/proc/{server.process.pid}/cmdline").read_bytes()
    server.kill()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 0), (signal.SIGTERM, ExitCode.TERMINATED)])
def test_a_signal_ends_the_server(number: int, code: int) -> None:
    server = Served("flat")
    client = Client(server.port)
    assert server.kill(number) == code
    with pytest.raises(LostError):
        client.receive()


def test_mistakes_in_options(tmp_path: Path, flat: Served) -> None:
    policy = ["serve", "tests.served:flat", "--env", "Pendulum-v1"]
    assert call(*policy, "--host", "127.0.0.1", "--port", str(flat.port)).exit_code == ExitCode.USAGE
    assert call(*policy, "--host", "0.0.0.0").exit_code == ExitCode.USAGE
    (tmp_path / "shared").write_text("x" * 20)
    (tmp_path / "shared").chmod(0o644)
    for name in ("missing", "shared"):
        rejected = call(*policy, "--token-file", tmp_path / name)
        assert rejected.exit_code == ExitCode.USAGE
        assert str(tmp_path / name) in rejected.stderr
        assert MASK not in rejected.stderr
    with refused(ConfigError, "policy.inference"):
        config = EvalConfig().environment("Pendulum-v1").policy(Flat(), inference="batched")
        ServedPolicy(config.build(), 16)
