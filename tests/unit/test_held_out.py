"""Held-out episodes: how a range of the plan travels through settings, groups, logs, results and comparisons."""

import json
from pathlib import Path

import numpy as np

from rl_eval import EvalConfig, EvalRunnerGroup, compare, evaluate, load, replay
from rl_eval.errors import ComparisonError, ConfigError, LogMismatch
from rl_eval.log.manifest import Manifest, checksum
from rl_eval.results.result import EvalResult
from rl_eval.scheduling.plan import EpisodePlan
from tests.refused import refused


def zeros():
    return lambda observations: np.zeros(len(observations), np.int64)


def make_config(**evaluation):
    evaluation = {"num_episodes": 12, "seed": 5} | evaluation
    made = EvalConfig().environment("rl_eval.testing:two_length").policy("tests.unit.test_held_out:zeros")
    return made.evaluation(**evaluation)


def returns(result):
    return [record.episode_return for record in result.episodes]


def test_held_out_episodes_are_those_of_a_longer_plan():
    """The same episodes, whichever way they are asked for; indices are positions in the plan."""
    whole = evaluate(make_config(num_episodes=20))
    configured = evaluate(make_config(num_episodes=8, first_index=12))
    with EvalRunnerGroup(make_config()) as group:
        selection, held_out = group.evaluate(), group.evaluate(num_episodes=8, first_index=12)
    assert returns(selection) + returns(held_out) == returns(whole)
    assert held_out.fingerprint == configured.fingerprint
    assert [record.index for record in held_out.episodes] == list(range(8))
    assert held_out.plan.first_index == 12


def test_a_result_and_a_log_come_back_with_their_range(tmp_path):
    """And an episode of them is replayed by its position."""
    result = evaluate(make_config(first_index=12), log_dir=tmp_path / "log")
    result.save(tmp_path / "saved")
    for path in (tmp_path / "log", tmp_path / "saved"):
        loaded = load(path)
        assert loaded.plan.first_index == 12
        assert loaded.fingerprint == result.fingerprint
        assert replay(path, 3).identical


def test_a_log_is_continued_by_its_own_range_only(tmp_path):
    """The difference is named, also where two results are compared."""
    first = evaluate(make_config(), log_dir=tmp_path)
    with refused(ComparisonError, "plan.first_index"):
        compare(first, evaluate(make_config(first_index=12)))
    with refused(LogMismatch, "log_dir"):
        evaluate(make_config(first_index=12), log_dir=tmp_path)


def test_a_range_beyond_the_permutation_is_refused():
    """When the settings are made, and by a group."""
    with refused(ConfigError, "evaluation.first_index", value=2147483640):
        make_config(first_index=2**31 - 8).build()
    with EvalRunnerGroup(make_config()) as group, refused(ConfigError, "evaluation.first_index", value=-1):
        group.evaluate(first_index=-1)


def test_what_was_written_before_there_were_ranges_is_read(tmp_path):
    """A manifest and a result without the field begin at 0, and the log is continued."""
    result = evaluate(make_config(), log_dir=tmp_path)
    path = tmp_path / "manifest.json"
    body = json.loads(path.read_text())
    assert body.pop("first_index") == 0
    head = {"format": body.pop("format")}
    del body["checksum"]
    path.write_text(json.dumps(head | {"checksum": checksum(body)} | body))
    assert Manifest.from_json(path.read_text()).first_index == 0
    assert load(tmp_path).fingerprint == result.fingerprint
    assert evaluate(make_config(), log_dir=tmp_path).fingerprint == result.fingerprint
    described = result.to_dict()
    assert described["plan"].pop("first_index") == 0
    assert EvalResult.from_dict(described, result.table).plan_fingerprint == EpisodePlan(12, 5).fingerprint
    assert not Path(tmp_path, "damaged").exists()
