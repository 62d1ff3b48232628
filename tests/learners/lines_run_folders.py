"""What the lines of rsl_rl, skrl and rl_games need. The tests of each library make it."""

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import yaml


def rsl_rl() -> dict[str, Any]:
    tests = import_module("test_rsl_rl")
    folder = Path("run")
    folder.mkdir()
    return {"runner": tests.run(folder, "model_1000.pt")}


def skrl_agent() -> dict[str, Any]:
    agent = import_module("test_skrl").agent_of(steps=64)
    agent.save("agent.pt")
    return {"agent": agent}


def skrl_runner() -> dict[str, Any]:
    tests = import_module("test_skrl")
    runner = tests.runner_of(tests.runner_config())
    runner.agent.save("agent.pt")
    Path("agent.yaml").write_text(yaml.dump(tests.runner_config()))
    return {}


def rl_games() -> dict[str, Any]:
    tests = import_module("test_rl_games")
    run = tests.run(Path.cwd())
    tests.checkpoint(run).rename("last.pth")
    (run / "params/agent.yaml").rename("agent.yaml")
    return {}


def player() -> dict[str, Any]:
    tests = import_module("test_rl_games")
    return {"player": tests.player_of(tests.run(Path.cwd()))}


BEFORE: dict[str, Callable[[], dict[str, Any]]] = {
    "rl-eval run --env Pendulum-v1 --policy run/model_1000.pt": rsl_rl,
    'evaluate("Pendulum-v1", runner)': rsl_rl,
    "rl-eval run --env Pendulum-v1 --policy skrl:skrl_models:Actor@agent.pt": skrl_agent,
    'evaluate("Pendulum-v1", agent)': skrl_agent,
    "rl-eval run --env Pendulum-v1 --policy skrl:agent.yaml@agent.pt --trust": skrl_runner,
    "rl-eval run --env Pendulum-v1 --policy rl_games:agent.yaml@last.pth": rl_games,
    'evaluate("Pendulum-v1", player)': player,
}
