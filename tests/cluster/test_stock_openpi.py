"""openpi's own package, in a Python of its own, at the other end of our client and of our server."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from rl_eval import EvalConfig, evaluate
from rl_eval.errors import ConfigError
from tests.planted import secret
from tests.refused import refused
from tests.served import HORIZON, Flat, Served

pytestmark = [pytest.mark.process, pytest.mark.slow]

TOKEN = secret("stock")
SCRIPT = Path(__file__).parents[1] / "stock_openpi.py"
PACKAGES = ("openpi-client==0.1.2", "numpy==1.26.4", "typing_extensions")


@pytest.fixture
def start(interpreter: Callable[..., str]) -> Any:
    """Start the script of the other side, which ends with its input."""
    python = interpreter("3.10", *PACKAGES)
    with ExitStack() as stack:

        def started(*arguments: str) -> Any:
            made = subprocess.Popen(
                [python, SCRIPT, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
            return stack.enter_context(made)

        yield started


def config(policy: Any, **section: Any) -> EvalConfig:
    made = EvalConfig().environment("Pendulum-v1").policy(policy, **section)
    return made.runners(num_envs_per_runner=8).evaluation(num_episodes=40, max_episode_steps=40)


def test_chunk_brokers_use_our_server_at_the_same_time_as_we_do(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """They act from before our first episode until after the last one."""
    chunk = {"execute": 3, "delay": 1}
    here = evaluate(config(Flat(horizon=HORIZON), chunk=chunk)).fingerprint
    monkeypatch.setenv("OPENPI_API_KEY", TOKEN)
    server = Served("chunks", "--set", "policy.chunk={execute: 3, delay: 1}", token=TOKEN)
    clients = [start("client", str(server.port)) for _ in range(2)]
    assert [client.stdout.readline() for client in clients] == ["numpy 1.26.4\n"] * 2
    result = evaluate(config(f"openpi://127.0.0.1:{server.port}", chunk=chunk))
    assert [client.poll() for client in clients] == [None, None]
    steps = [int(client.communicate("end\n")[0]) for client in clients]
    server.kill()
    assert (result.status, result.fingerprint, result.determinism.mismatched) == ("complete", here, ())
    assert [client.returncode for client in clients] == [0, 0]
    assert min(steps) > HORIZON


def test_a_server_written_with_it_gives_the_records_of_the_policy_in_this_process(start: Any) -> None:
    server = start("server", "fixed")
    result = evaluate(config(f"openpi://127.0.0.1:{int(server.stdout.readline())}"))
    server.communicate()
    assert result.fingerprint == evaluate(config(Flat())).fingerprint
    assert (result.status, result.determinism.mismatched) == ("complete", ())


def test_a_server_written_with_it_that_samples_is_rejected_or_labelled(start: Any) -> None:
    server = start("server", "random")
    address = f"openpi://127.0.0.1:{int(server.stdout.readline())}"
    with refused(ConfigError, "policy.allow_nondeterministic", value=False):
        evaluate(config(address))
    result = evaluate(config(address, allow_nondeterministic=True))
    server.communicate()
    assert result.determinism.mismatched
    assert any(address.removeprefix("openpi://") in note for note in result.notes)
