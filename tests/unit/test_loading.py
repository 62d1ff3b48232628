"""``rl_eval.load``: a log, finished or not, gives the result that its run gave, or an error, never another number."""

import json
import shutil
import time

import numpy as np
import pytest

from rl_eval.config.builder import EvalConfig
from rl_eval.errors import LogError, UsageError
from rl_eval.execution.evaluate import evaluate
from rl_eval.execution.group import EvalRunnerGroup
from rl_eval.log import EvaluationLog, read_log
from rl_eval.results.loading import load
from rl_eval.results.result import EvalResult
from tests.refused import refused
from tests.unit.log_world import cut

NUM_EPISODES = 24


def ones(observations):
    return np.ones(len(observations), np.int64)


def config(**evaluation):
    return (
        EvalConfig()
        .environment("rl_eval.testing:faulty", env_kwargs={"env": "two_length", "attempt_rates": [0.3, 0.5]})
        .runners(num_envs_per_runner=4)
        .evaluation(num_episodes=NUM_EPISODES, seed=3, return_bounds=(0.0, 1.0), **evaluation)
        .fault_tolerance(max_attempts_per_episode=2)
    )


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The folder of a complete run, and its result."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    return folder, evaluate(config(), ones, output=folder)


@pytest.fixture
def run(finished, tmp_path):
    """A copy of it that may be harmed."""
    shutil.copytree(finished[0], tmp_path / "run")
    return tmp_path / "run"


def test_a_log_gives_back_the_result_of_its_run(finished):
    """Every number, the faults, and what was evaluated."""
    folder, result = finished
    loaded = load(folder)
    assert loaded.fingerprint == result.fingerprint
    ours, theirs = loaded.to_dict(), result.to_dict()
    for key in theirs.keys() - {"provenance", "faults"}:
        assert ours[key] == theirs[key], key
    assert sorted(map(str, loaded.faults)) == sorted(map(str, result.faults))
    assert (loaded.status, result.num_failed > 0) == ("partial", True)
    for key in ("identity", "weights", "config", "numerics", "packages"):
        assert loaded.provenance[key] == result.provenance[key]


def test_the_limit_of_the_config_and_info_keys_are_those_of_the_run(tmp_path):
    strict = config(info_keys=("x",)).fault_tolerance(max_failed_episodes=0)
    result = evaluate(strict, ones, output=tmp_path)
    loaded = load(tmp_path)
    assert loaded.status == result.status == "failed"
    assert loaded.table.info_keys == ("x",)


def test_an_unfinished_log_is_partial_and_says_how_to_continue(finished, tmp_path):
    """Its numbers go over the finished prefix of the plan."""
    loaded = load(cut(finished[0], tmp_path / "cut", 9))
    assert loaded.status == "partial"
    assert len(loaded.episodes) == 9
    assert f"--output {tmp_path / 'cut'}" in loaded.reason
    assert loaded.timing.env_steps == 7


def test_a_log_without_episodes_has_no_numbers(finished, tmp_path):
    """It was killed before the first flush."""
    loaded = load(cut(finished[0], tmp_path / "cut", 0))
    assert loaded.status == "failed"
    assert np.isnan(loaded.aggregates.mean)


def test_a_place_is_a_folder_a_file_or_a_uri(finished, run, tmp_path):
    """A place without log and result is an error that names it."""
    finished[1].save(tmp_path / "saved")
    for place in (f"file://{run}", tmp_path / "saved", tmp_path / "saved" / "result.json", str(run)):
        assert load(place).fingerprint == finished[1].fingerprint
    with refused(LogError, value=f"{run}/nothing"):
        load(f"file://{run}/nothing")
    with refused(UsageError, str(tmp_path / "nowhere")):
        load(tmp_path / "nowhere")


# A result beside the log


@pytest.mark.parametrize("state", ["whole", "older", "cut short"])
def test_a_result_beside_the_log_is_not_a_contradiction(finished, run, tmp_path, state):
    """Also if it was saved before the run was continued, or with new episodes and an old summary: the log counts."""
    before = load(cut(finished[0], tmp_path / "cut", 9))
    (before if state == "older" else finished[1]).save(run)
    if state == "cut short":
        before.to_json(run / "result.json")
        with refused(UsageError, str(run)):
            EvalResult.load(run)
    assert load(run).fingerprint == finished[1].fingerprint


def test_the_result_of_another_plan_beside_the_log_is_refused(run):
    """Never one of the two by chance."""
    other = evaluate(config().evaluation(seed=4), ones)
    other.to_parquet(run / "episodes.parquet")
    other.to_json(run / "result.json")
    with refused(UsageError, str(run / "result.json")) as caught:
        load(run)
    assert caught.value.__cause__.key == "plan of the evaluation log"
    (run / "result.json").write_text("{")
    with refused(UsageError, str(run / "result.json")) as caught:
        load(run)
    assert caught.value.__cause__.key == str(run / "result.json")


def test_another_record_beside_the_log_is_refused(finished, run, tmp_path):
    """Of an episode that both have."""
    other = load(cut(finished[0], tmp_path / "cut", 9))
    index = int(np.flatnonzero(other.table.completed)[0])
    other.table.rows["episode_return"][index] += 1e-9
    other.save(run)
    with refused(UsageError, str(run / "result.json"), episode=index):
        load(run)


def test_a_complete_result_with_another_fingerprint_is_refused(tmp_path):
    """Even when only the summary says so."""
    calm = config().environment(env_kwargs={"env": "two_length", "attempt_rates": []})
    evaluate(calm, ones, output=tmp_path / "run").save(tmp_path / "run")
    path = tmp_path / "run" / "result.json"
    data = json.loads(path.read_text())
    assert data["status"] == "complete"
    path.write_text(json.dumps(data | {"fingerprint": "0" * 64}))
    with refused(UsageError, str(path)) as caught:
        load(tmp_path / "run")
    assert caught.value.__cause__.key == "evaluation log"


def test_the_determinism_check_is_read_from_the_log(tmp_path):
    """What a second run of some episodes found is committed behind them."""
    result = evaluate(config(determinism_check=0.2), ones, output=tmp_path)
    assert result.determinism.passed
    assert load(tmp_path).determinism == result.determinism


# Damage


def test_a_damaged_log_is_an_error_that_names_the_file(run):
    """Never the result of what is left."""
    segment = min((run / "segments").glob("*episodes*"))
    data = bytearray(segment.read_bytes())
    data[len(data) // 2] ^= 1
    segment.write_bytes(data)
    with refused(LogError, segment.name, value=str(run)):
        load(run)


def test_a_manifest_whose_plan_is_not_its_own_is_refused(finished, tmp_path):
    """Seeds come from the plan; another package might draw others."""
    import dataclasses

    found = read_log(finished[0])
    log = EvaluationLog.open(tmp_path)
    log.begin(dataclasses.replace(found.manifest, plan_fingerprint="0" * 64))
    log.close()
    with refused(UsageError, f"plan of {tmp_path}"):
        load(tmp_path)


def test_a_live_log_can_be_read(tmp_path):
    """While its driver is at work."""
    with EvalRunnerGroup(config().evaluation(num_episodes=100_000), ones) as group:
        handle = group.submit(output=tmp_path)
        while not handle.progress().num_finished:
            assert not handle.done()
            time.sleep(0.01)
        loaded = load(tmp_path)
        handle.cancel()
    assert 0 < len(loaded.episodes) < 100_000


@pytest.mark.parametrize("name", ["manifest.json", "segments"])
def test_a_result_may_be_saved_beside_a_file_with_a_name_of_the_log(finished, tmp_path, name):
    folder = tmp_path / "site"
    (folder / name).mkdir(parents=True)
    if name == "manifest.json":
        (folder / name).rmdir()
        (folder / name).write_text('{"name": "my app"}')
    finished[1].save(folder)
    assert load(folder).fingerprint == finished[1].fingerprint


def test_the_result_of_another_policy_is_not_saved_beside_a_log(run, finished):
    """It would replace the result of the log, which could not be loaded any more."""
    other = evaluate(config(), lambda observations: np.zeros(len(observations), np.int64))
    assert other.plan_fingerprint == finished[1].plan_fingerprint
    with refused(UsageError, key=str(run)):
        other.save(run)
    assert load(run).fingerprint == finished[1].fingerprint
    load(run).save(run)
