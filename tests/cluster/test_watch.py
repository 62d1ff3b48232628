"""The checkpoint watcher on Ray actors: the same curve as in one process, from runners that stay."""

import os
from pathlib import Path

import pytest

from rl_eval import EvalConfig
from rl_eval.errors import ClusterError
from rl_eval.training.watching import Watcher, WatchOptions
from tests.refused import refused
from tests.unit.watch_world import CONFIG, age, best, curve, make_world, rows_in_logs, save

pytestmark = pytest.mark.usefixtures("ray_cluster")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    return make_world(tmp_path, monkeypatch)


def watch(output, **runners):
    """Evaluate what is there; return the processes that had the policy after each evaluation."""
    pids = []

    def processes(handle):
        pids.append(watcher._group.foreach_runner(lambda runner: os.getpid()))

    config = EvalConfig.from_dict(CONFIG).runners(**runners)
    options = WatchOptions(Path("run"), "*.safetensors", Path(output))
    watcher = Watcher(config.build(), options, print, lambda: False, processes)
    try:
        watcher.run(0.0, once=True)
    finally:
        watcher.close()
    return pids


@pytest.mark.slow
def test_actors_that_stay_give_the_same_curve(folder):
    """Three checkpoints and the second test of the best: the same process, which is not this one."""
    for step in (1, 2, 3):
        save(step, good=step == 2)
    watch("plain")
    pids = watch("actors", num_runners=1)
    assert curve("actors") == curve("plain")
    assert best("actors") == best("plain")
    assert set(rows_in_logs(folder="actors").values()) == {6}
    assert len(pids) == 4
    (seen,) = {pid for found in pids for pid in found}
    assert seen != os.getpid()


def test_an_actor_tells_a_bad_checkpoint_from_a_bad_environment(folder, monkeypatch):
    """The factory's error arrives as what it is: it is recorded, and that of an environment is not."""
    age(save(1))
    config = EvalConfig.from_dict(CONFIG | {"policy": {"policy": "watch_factories:reject"}})
    config = config.runners(num_runners=1, runtime_env={"env_vars": {"PYTHONPATH": str(folder)}})
    with refused(ClusterError, "model_1.safetensors"):
        watch_with_factory(config.copy().environment("watch_factories:without_licence"))
    (entry,) = watch_with_factory(config).curve
    assert "is no checkpoint of mine" in entry.selection.reason


def watch_with_factory(config):
    options = WatchOptions(Path("run"), "*.safetensors", Path("out"), key="policy.policy_kwargs.path")
    watcher = Watcher(config.build(), options, print, lambda: False, lambda handle: None)
    try:
        watcher.run(0.0, once=True)
    finally:
        watcher.close()
    return watcher.journal
