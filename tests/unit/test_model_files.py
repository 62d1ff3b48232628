"""Files that a policy's factory is given: a result says which they were, and a log is not continued with others."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest
import yaml

from rl_eval import EvalConfig, load, replay
from rl_eval.cli.exits import ExitCode
from rl_eval.config.policy_sources import digest_of, file_digests
from rl_eval.config.settings import PolicySection
from rl_eval.errors import ConfigError
from rl_eval.policies import check_files
from tests.refused import refused, untold
from tests.unit.cli_world import call, make_folder

GAIN = """
import json
from pathlib import Path

import numpy as np


def load(path):
    gain = json.loads(Path(path).read_text())
    return lambda observations: (observations[:, 2] + gain * observations[:, 3] > 0).astype(np.int64)
"""
RUN = ("run", "gain.yaml", "--output", "runs/gain", "--quiet")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A policy that is a number in a file, and a config that names the file."""
    made = make_folder(tmp_path, monkeypatch)
    (made / "gain_of_file.py").write_text(GAIN)
    (made / "gain.json").write_text("1.0")
    policy = {"policy": "gain_of_file:load", "policy_kwargs": {"path": "gain.json"}}
    config = {"environment": {"env": "CartPole-v1"}, "policy": policy, "evaluation": {"num_episodes": 4}}
    (made / "gain.yaml").write_text(yaml.safe_dump(config | {"runners": {"num_runners": 0}}))
    return made


def test_a_result_says_which_file_it_was(folder: Path) -> None:
    outcome = call(*RUN[:-1], "-v")
    assert outcome.exit_code == 0, outcome.output
    digest = digest_of(Path("gain.json"))
    assert load("runs/gain").provenance["weights"]["files"] == {"path": digest}
    assert untold(outcome.stdout, digest[:16]) == []


def test_a_complete_run_of_another_file_is_not_the_result_of_this_one(folder: Path) -> None:
    """A checkpoint is overwritten, as ``best_model.zip`` is: the number of the former one would be wrong."""
    first = call(*RUN)
    assert call(*RUN).stdout == first.stdout
    Path("gain.json").write_text("-1.0")
    outcome = call(*RUN)
    assert outcome.exit_code == ExitCode.USAGE
    assert outcome.stdout == ""
    assert "weights.files.path" in outcome.stderr
    Path("gain.json").write_text("1.0")
    assert call(*RUN).stdout == first.stdout


def test_an_episode_is_not_replayed_with_another_file(folder: Path) -> None:
    """It says why, and not that the machine computes otherwise."""
    call(*RUN)
    assert call("replay", "runs/gain", "--episodes", 2).exit_code == 0
    Path("gain.json").write_text("-1.0")
    outcome = call("replay", "runs/gain", "--episodes", 2)
    assert outcome.exit_code == ExitCode.USAGE
    assert digest_of(Path("gain.json"))[:16] in outcome.stderr


def test_digests_are_those_of_when_the_settings_were_made(folder: Path) -> None:
    """Runners load the file then; who rewrites it later changes nothing of what acts."""
    settings = EvalConfig.from_yaml("gain.yaml").build()
    before = digest_of(Path("gain.json"))
    Path("gain.json").write_text("7.0")
    assert settings.policy.file_digests == {"path": before}
    assert pickle.loads(pickle.dumps(settings)).policy.file_digests == {"path": before}
    for kwargs in ({}, {"path": "other.json"}):
        assert settings.policy.model_copy(update={"policy_kwargs": kwargs}).file_digests == {}
    Path("key.txt").write_text("s")
    given = {"path": "gain.json", "size": 3, "api_key": "key.txt"}  # A secret is left alone.
    several = {"policies": {"cat": {"policy": "m:f", "policy_kwargs": given}, "dog": "m:g"}}
    assert PolicySection.model_validate(several).file_digests == {"cat.path": digest_of(Path("gain.json"))}


@pytest.mark.parametrize("value", ["", "nowhere.zip", "x" * 5000, "a\0b", 3, None, ["gain.json"], "."])
def test_what_is_no_file_has_no_digest(folder: Path, value: object) -> None:
    """A folder may be anything, of any size; it is a model only to what loads models from folders."""
    assert file_digests("my:make", {"path": value}) == {}


def test_a_folder_is_all_its_names_and_files(folder: Path) -> None:
    loads = "rl_eval.integrations.rllib:load_policy"
    Path("model/part").mkdir(parents=True)
    Path("model/part/a").write_text("1")
    [first] = file_digests(loads, {"path": "model"}).values()
    Path("model/part/a").rename("model/part/b")
    assert file_digests(loads, {"path": "model"}) != {"path": first}
    Path("model/part/b").rename("model/part/a")
    assert file_digests(loads, {"path": Path("model")}) == {"path": first}
    assert file_digests("my:make", {"path": "model"}) == {}


def test_a_path_is_what_the_factory_makes_of_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SB3's ending may be left out, also where a folder of that name lies beside the file, and ~ is the home."""
    loads = "rl_eval.integrations.sb3:load_policy"
    Path("best").mkdir()
    Path("best.zip").write_text("1")
    monkeypatch.setenv("HOME", str(folder))
    due = {"path": digest_of(Path("best.zip"))}
    assert [file_digests(loads, {"path": path}) for path in ("best", "best.zip", "~/best")] == [due] * 3
    assert file_digests("my:make", {"path": "best"}) == {}


def test_a_file_that_only_one_side_found_keeps_nobody_from_continuing(folder: Path) -> None:
    """Whoever loads it says that it is missing; a complete run needs nothing."""
    first = call(*RUN)
    Path("gain.json").unlink()
    assert call(*RUN).stdout == first.stdout


def test_a_live_policy_takes_the_place_of_the_file(folder: Path) -> None:
    call(*RUN)
    Path("gain.json").write_text("-1.0")
    found = replay("runs/gain", 2, policy=lambda seen: (seen[:, 2] + 1.0 * seen[:, 3] > 0).astype(np.int64))
    assert found.identical


def test_a_model_that_was_rewritten_before_a_runner_loads_it_is_refused(folder: Path) -> None:
    """Another runner may have loaded the former one. What is not ours to load may be a file that is written."""
    settings = EvalConfig.from_yaml("gain.yaml").build()
    ours = settings.policy.model_copy(update={"policy": "rl_eval.integrations.sb3:load_policy"})
    Path("gain.json").write_text("2.0")
    with refused(ConfigError, "policy.policy_kwargs.path"):
        check_files(ours)
    check_files(settings.policy)
