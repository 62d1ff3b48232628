"""Page of environments in another Python: its configs are valid, and its remote environment works."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import gymnasium as gym
import pytest
import yaml

from rl_eval import EvalConfig, evaluate
from tests.unit.pages_world import DOCS, Reader, blocks, pages

BLOCKS = blocks(DOCS / "other_python.md")


class _Answers(BaseHTTPRequestHandler):
    """Server of one CartPole. It can forget the seed, or be late once."""

    env = gym.make("CartPole-v1")
    forgets = False
    late: threading.Event | None = None

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/reset":
            seed = None if self.forgets else asked["seed"]
            observation, _ = self.env.reset(seed=seed)
            answer = {"observation": observation.tolist(), "seed": seed}
        else:
            if (late := self.late) is not None:
                type(self).late = None
                late.wait()
            observation, reward, terminated, truncated, _ = self.env.step(asked["action"])
            answer = {"observation": observation.tolist(), "reward": reward}
            answer |= {"terminated": bool(terminated), "truncated": bool(truncated)}
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(answer).encode())

    def log_message(self, *_: Any) -> None:
        """Print nothing."""


@pytest.fixture
def config(reader: Reader) -> Iterator[EvalConfig]:
    (block,) = (block for block in BLOCKS if block.title == "remote_env.py")
    (reader.folder / block.title).write_text(block.text)
    server = HTTPServer(("127.0.0.1", 0), _Answers)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    kwargs = {"url": f"http://127.0.0.1:{server.server_port}", "deadline_s": 2.0}
    made = EvalConfig().environment("remote_env:RemoteEnv", env_kwargs=kwargs).policy("random", deterministic=False)
    yield made.evaluation(num_episodes=5).runners(num_envs_per_runner=1)
    server.shutdown()
    thread.join()
    server.server_close()


def here() -> str:
    made = EvalConfig().environment("CartPole-v1").policy("random", deterministic=False)
    return evaluate(made.evaluation(num_episodes=5)).fingerprint


def test_the_remote_environment_is_the_one_of_this_process(config: EvalConfig, reader: Reader) -> None:
    assert evaluate(config.evaluation(determinism_check=0)).fingerprint == here()
    for page in pages("tests/unit/test_other_python.py"):
        reader.follow(page)


def test_a_late_answer_costs_an_attempt(config: EvalConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    late = threading.Event()
    monkeypatch.setattr(_Answers, "late", late)
    threading.Timer(3.0, late.set).start()
    result = evaluate(config.evaluation(determinism_check=0))
    assert [(fault.phase, fault.attempt) for fault in result.faults] == [("step", 1)]
    assert (result.status, result.fingerprint) == ("complete", here())


def test_a_server_without_seeds_is_an_error(config: EvalConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_Answers, "forgets", True)
    result = evaluate(config.fault_tolerance(max_attempts_per_episode=1))
    assert {(fault.phase, fault.error_type) for fault in result.faults} == {("reset", "RuntimeError")}


@pytest.mark.parametrize("text", [block.text for block in BLOCKS if block.language == "yaml"])
def test_its_configs_are_valid(text: str) -> None:
    given = {"policy": {"policy": "random", "deterministic": False}} | yaml.safe_load(text)
    settings = EvalConfig.from_dict(given).build()
    assert settings.environment.python
    assert settings.runners.runner == "subprocess"


def test_its_adapters_are_programs() -> None:
    for block in BLOCKS:
        if block.language == "python":
            compile(block.text, block.title, "exec")
