"""The shipped configs load, round-trip and say what their comments promise."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from rl_eval import EvalConfig, evaluate

ROOT = Path(__file__).parents[2]
CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))
SECTIONS = {"ppo_cartpole.yaml": "evaluation"}


def load(path: Path) -> EvalConfig:
    return EvalConfig.from_yaml(path, SECTIONS.get(path.name))


def test_the_promised_configs_are_there() -> None:
    """One for each way to start."""
    assert {path.stem for path in CONFIGS} == {
        "cartpole",
        "cartpole_final",
        "flaky",
        "hopper",
        "local",
        "ppo_cartpole",
        "tictactoe",
    }


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_a_config_builds_and_round_trips(path: Path) -> None:
    """It is valid, its weights exist, and YAML gives it back."""
    config = load(path)
    settings = config.build()
    assert settings.policy.policies or Path(settings.policy.weights or "").is_file()
    assert EvalConfig.from_dict(yaml.safe_load(config.to_yaml())).build() == settings


@pytest.mark.process  # MuJoCo looks for its libraries with a program.
@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_a_config_runs(path: Path) -> None:
    """A few of its episodes complete in this process."""
    config = load(path).runners(num_runners=0, num_envs_per_runner=4).evaluation(num_episodes=4, max_episode_steps=50)
    assert evaluate(config).status == "complete"


def test_the_flaky_simulator_changes_nothing() -> None:
    """flaky.yaml has the fingerprint of cartpole.yaml, though three in ten of its first attempts fail."""
    plain, flaky = (
        evaluate(load(ROOT / "configs" / name).runners(num_runners=0).evaluation(num_episodes=24)) for name in PAIR
    )
    assert flaky.fingerprint == plain.fingerprint
    assert 0.2 < sum(record.attempts > 1 for record in flaky.episodes) / len(flaky.episodes) < 0.4


PAIR = ("cartpole.yaml", "flaky.yaml")


@pytest.mark.process
def test_results_load_nothing_heavy_and_an_evaluation_in_this_process_does_not_import_ray() -> None:
    """Heavy packages load when they are first used; num_runners=0 needs no Ray."""
    code = f"""
import sys
import rl_eval.results.result, rl_eval.results.comparison
assert not {{'scipy.stats', 'pandas', 'rich', 'torch', 'ray'}} & set(sys.modules)
from rl_eval import EvalConfig, evaluate
config = EvalConfig.from_yaml({str(ROOT / "configs" / "local.yaml")!r}).evaluation(num_episodes=4)
assert evaluate(config).status == "complete"
assert "ray" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
