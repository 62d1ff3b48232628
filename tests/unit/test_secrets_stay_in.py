"""Secrets planted wherever a user may put one, and real commands: no file and no line has any of them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

import rl_eval
from rl_eval import EvalConfig, Evaluator, evaluate
from rl_eval.cli.exits import ExitCode
from rl_eval.errors import ConfigError, redaction
from rl_eval.results.loading import load
from rl_eval.training.loggers import ConsoleLogger, CSVLogger, JSONLinesLogger, TensorBoardLogger
from tests.planted import leaking_files, leaks, secret
from tests.refused import refused
from tests.unit.cli_world import call, call_alone, make_folder

TOYS = '''
from cli_toys import Count, ones


class Vault(Count):
    """Tells its key when it breaks, which every third episode does once."""

    def __init__(self, api_key, url):
        super().__init__()
        self.api_key, self.url = api_key, url

    def begin_episode(self, index, seed, attempt):
        self.breaks = index % 3 == 0 and attempt == 1

    def step(self, action):
        if self.breaks:
            raise ConnectionError(f"{self.url} refused the key {self.api_key!r}")
        return super().step(action)


def vault(context):
    return Vault(**context)


def broken(context):
    raise ConnectionError(f"no connection with {dict(context)}")


def guarded(token):
    assert token
    return ones()
'''

CONFIG = {
    "environment": {
        "env": "planted_toys:vault",
        "env_kwargs": {"api_key": secret("kwarg"), "url": f"https://me:{secret('uri')}@there/x?sig={secret('query')}"},
    },
    "policy": {"policy": "planted_toys:guarded", "policy_kwargs": {"token": secret("file")}},
    "runners": {"num_runners": 0, "num_envs_per_runner": 4},
    "evaluation": {"num_episodes": 12, "seed": 0},
}

SET = ("--set", f"policy.policy_kwargs.token={secret('argument')}")
BROKEN = ("--set", "environment.env=planted_toys:broken")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    make_folder(tmp_path, monkeypatch)
    monkeypatch.setattr(redaction, "_known", set())
    monkeypatch.delitem(sys.modules, "planted_toys", raising=False)
    (tmp_path / "planted_toys.py").write_text(TOYS)
    (tmp_path / "planted.yaml").write_text(yaml.safe_dump(CONFIG))
    return tmp_path


def said(*args: str, code: int = 0) -> str:
    """Run a command without known secrets; return its output, which contains none."""
    redaction._known.clear()
    outcome = call(*args)
    assert outcome.exit_code == code, outcome.output
    assert not leaks(outcome.stdout + outcome.stderr), args
    return outcome.stdout + outcome.stderr


def test_no_command_writes_or_prints_a_secret(folder: Path) -> None:
    said("run", "planted.yaml", *SET)
    uri = f"file://{folder}/log"
    for _ in range(2):
        said("run", "planted.yaml", *SET, "--output", "runs/one")
    for _ in range(2):
        said("run", "planted.yaml", *SET, "--output", uri)
    faults = said("show", "runs/one", "--faults")
    assert "ConnectionError: https://***@there/x?sig=*** refused the key '***'" in faults
    for command in (
        ("show", "runs/one"),
        ("show", "runs/one", "--json"),
        ("show", "runs/one", "--episodes", "3"),
    ):
        assert said(*command)
    said("export", "runs/one", "--to", "json", "--output", "episodes.jsonl")
    said("compare", "runs/one", "runs/one", "--json")

    assert list(leaking_files(folder)) == []
    assert load("runs/one").provenance["config"]["environment"]["env_kwargs"] == {
        "api_key": "***",
        "url": "https://***@there/x?sig=***",
    }


@pytest.mark.process
def test_the_command_line_of_a_process_is_kept_without_its_secrets(folder: Path) -> None:
    """And the doctor hands none to the processes that it starts."""
    assert call_alone("run", "planted.yaml", *SET, "--output", "results").returncode == 0
    assert "policy.policy_kwargs.token=***" in load("results").provenance["command"]
    assert list(leaking_files(folder)) == []
    said("doctor", "planted.yaml", *SET)


@pytest.mark.parametrize(
    ("args", "code"),
    [
        (BROKEN, ExitCode.FAILED),
        ((*BROKEN, "-v"), ExitCode.FAILED),
        (("--set", f"runners.runtime_env.env_vars.DATABASE={secret('variable')}"), ExitCode.USAGE),
        (
            (
                *("--set", f"runners.num_runners={secret('wrong')}"),
                *("--set", f"policy.policy_kwargs.token={secret('wrong')}"),
            ),
            ExitCode.USAGE,
        ),
        (("--set", f"environment.env_kwargs.api_key='{secret('open')}"), ExitCode.USAGE),
        (("--set", f"runners.runtime_env=K={secret('text')}"), ExitCode.USAGE),
        ((*BROKEN, "--set", f"environment.env_kwargs.dsn=password={secret('dsn')}"), ExitCode.FAILED),
        ((*BROKEN, "--set", f"environment.env_kwargs.args=[--token, '{secret('o')}']"), ExitCode.FAILED),
        (("--output", f"nosuch://me:{secret('wrong')}@there/x?token={secret('wrong')}"), ExitCode.USAGE),
    ],
    ids=["constructor", "traceback", "env_vars", "value", "quotes", "runtime_env", "dsn", "args", "output"],
)
def test_no_error_message_has_a_secret(folder: Path, args: tuple[str, ...], code: int) -> None:
    assert "***" in said("run", "planted.yaml", *args, code=code)
    assert list(leaking_files(folder)) == []


def test_another_secret_is_another_run_and_a_masked_config_is_not_replayed(folder: Path) -> None:
    """The log holds a digest, and not the value."""
    said("run", "planted.yaml", "--output", "runs")
    again = said("run", "planted.yaml", "--output", "runs", *SET, code=ExitCode.USAGE)
    assert "policy_kwargs.token: " in again
    message = said("replay", "runs", "--episodes", "1", code=ExitCode.USAGE)
    for key in ("environment.env_kwargs.api_key", "environment.env_kwargs.url", "policy.policy_kwargs.token"):
        assert key in message


def count(context: Any) -> Any:
    import gymnasium

    assert context["api_key"] == secret("live")
    return gymnasium.make("CartPole-v1")


def zeros(observations: Any) -> Any:
    return np.zeros(len(observations), np.int64)


def live(**env_kwargs: Any) -> EvalConfig:
    return EvalConfig().environment(count, env_kwargs=env_kwargs).policy(zeros).evaluation(num_episodes=3)


def test_a_replay_with_the_config_given_again_is_identical(tmp_path: Path) -> None:
    evaluate(live(api_key=secret("live")), output=tmp_path)
    with refused(ConfigError, "environment.env_kwargs.api_key"):
        rl_eval.replay(tmp_path, 1, policy=zeros)
    assert rl_eval.replay(tmp_path, 1, live(api_key=secret("live")), policy=zeros).identical


def test_loggers_write_no_secret(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    loggers = [
        CSVLogger(tmp_path / "points.csv"),
        JSONLinesLogger(tmp_path / "points.jsonl"),
        TensorBoardLogger(tmp_path / "tensorboard"),
        ConsoleLogger(),
    ]
    with Evaluator(live(api_key=secret("live")), loggers=loggers) as evaluator:
        evaluator.evaluate(step=1)
    assert (tmp_path / "points.csv").exists()
    assert list(leaking_files(tmp_path)) == []
    assert not leaks("".join(capsys.readouterr()))


def test_the_search_finds_what_was_not_redacted(tmp_path: Path) -> None:
    """In text and in bytes, but not in the files that plant it."""
    (tmp_path / "planted.yaml").write_text(secret("a"))
    assert list(leaking_files(tmp_path)) == []
    (tmp_path / "b.bin").write_bytes(b"\0\xff" + secret("b").encode())
    found = list(leaking_files(tmp_path))
    (tmp_path / "b.bin").unlink()  # The scan of the whole suite would find it, too.
    assert len(found) == 1
