"""An evaluator whose runners are processes: what runs in them first, and what becomes of it when they die."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import evaluator_world
import pytest
from evaluator_world import LIMIT_S, config

from rl_eval import Evaluator
from rl_eval.errors import ConfigError
from tests.refused import refused

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
LATE = ("torch", "gymnasium", "evaluator_world", "evaluator_modules")
"""What a runner imports for its policy and its environment."""


pytestmark = pytest.mark.usefixtures("ray_cluster")


def noting(folder: Path) -> Any:
    """An ``init_fn`` that notes, once per call, in which process it runs and what is imported there."""
    path, late = str(folder), LATE

    def init() -> None:
        import os
        import sys
        from pathlib import Path

        note = Path(path, f"{os.getpid()}-{len(list(Path(path).glob(f'{os.getpid()}-*')))}")
        note.write_text(" ".join(name for name in late if name in sys.modules))

    return init


def notes(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in sorted(folder.iterdir())}


def pids(evaluator: Evaluator) -> list[int]:
    found: list[int] = evaluator._group.foreach_runner(lambda runner: os.getpid())  # type: ignore[attr-defined]
    return found


@pytest.mark.slow
def test_a_killed_runner_is_replaced_and_init_fn_comes_first_in_both_processes(tmp_path: Path) -> None:
    """Its episodes run again with the weights of the request; nothing is imported in either when the function runs."""
    from evaluator_modules import Scale

    gate, noted = tmp_path / "gate", tmp_path / "noted"
    gate.mkdir()
    noted.mkdir()
    setting = config(gate=str(gate)).runners(num_runners=1, num_envs_per_runner=1, init_fn=noting(noted))
    told: list[BaseException] = []
    with Evaluator(setting, Scale(4.0), on_error=told.append) as ev:
        (pid,) = pids(ev)
        assert notes(noted) == {f"{pid}-0": ""}
        handle = ev.submit(Scale(6.0), step=1)
        evaluator_world.wait_for(gate / "entered")
        os.kill(pid, signal.SIGKILL)
        (gate / "open").touch()
        result = handle.result(LIMIT_S)
        assert {(one.episode_return, one.weights_version) for one in result.episodes} == {(6.0, 1)}
        assert result.provenance["runners_lost"] == 1
        (other,) = pids(ev)
        assert notes(noted) == {f"{one}-0": "" for one in sorted({pid, other}, key=str)}
    assert told == []


def broken() -> None:
    raise RuntimeError("no display")


@pytest.mark.parametrize(("init_fn", "named"), [("evaluator_init:nothing", "evaluator_init"), (broken, "no display")])
def test_an_init_fn_that_does_not_work_is_an_error_of_every_request(init_fn: Any, named: str) -> None:
    """It may be named as ``module:attr``."""
    with Evaluator(config().runners(num_runners=1, num_envs_per_runner=1, init_fn=init_fn)) as ev:
        for _ in range(2):
            with refused(ConfigError, "runners.init_fn") as caught:
                ev.evaluate()
            assert named in str(caught.value)


@pytest.mark.parametrize(("init_fn", "runners"), [(broken, 0), (3, 1)])
def test_an_init_fn_is_a_function_for_another_process(init_fn: Any, runners: int) -> None:
    """In this process torch may be imported already."""
    with refused(ConfigError, "runners.init_fn"):
        Evaluator(config().runners(num_runners=runners, init_fn=init_fn))


_ALONE = """
import faulthandler, os, sys
sys.path[:0] = {path!r}
import aiohttp.web, ray, torch  # Ray imports the first late, which adds a filter for warnings of its own.
import signal
import trainer_state
from evaluator_modules import Scale
from evaluator_world import config
from rl_eval import Evaluator

module = Scale(2.0)
torch.manual_seed(1)
faulthandler.enable()
signal.signal(signal.SIGTERM, signal.SIG_IGN)  # A trainer's own; where there is none, Ray's ends the cluster.
before = trainer_state.observe(module)
with Evaluator(config(), module, backend="ray") as ev:
    trainer_state.compare(before, trainer_state.observe(module))
    assert ev.evaluate(module).mean_return == 2.0
    trainer_state.compare(before, trainer_state.observe(module))
    if not (child := os.fork()):
        os.abort()
    os.waitpid(child, 0)
trainer_state.compare(before, trainer_state.observe(module))
print("untouched", flush=True)
os.abort()
"""


def run_alone(script: str) -> subprocess.CompletedProcess[str]:
    """Run a script in a fresh process that knows of no cluster."""
    environment = os.environ | {"PYTHONPATH": f"{HERE}{os.pathsep}{ROOT}"}
    environment.pop("RAY_ADDRESS", None)
    command = [sys.executable, "-c", script.format(path=[str(HERE), str(ROOT)])]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=240, check=False)


@pytest.mark.slow
def test_a_trainer_without_a_cluster_is_untouched_by_the_one_that_is_started_for_it() -> None:
    """In a fresh process, with a local cluster that begins and ends with the evaluator; its crashes print stacks."""
    ran = run_alone(_ALONE)
    assert ran.stdout.strip().endswith("untouched"), ran.stderr[-3000:]
    assert ran.returncode == -signal.SIGABRT
    assert ran.stderr.count("Fatal Python error: Aborted") == 2, ran.stderr[-3000:]


_SHUT_DOWN = """
import sys
sys.path[:0] = {path!r}
import ray
from evaluator_modules import Scale
from evaluator_world import config
from rl_eval import EvalRunnerGroup

group = EvalRunnerGroup(config().runners(num_runners=1), Scale(2.0))
assert group.evaluate().mean_return == 2.0
ray.shutdown()
group.stop()
assert not ray.is_initialized()
group = EvalRunnerGroup(config().runners(num_runners=1), Scale(2.0))
ray.shutdown()
ray.init(address="local", include_dashboard=False, num_cpus=1)
group.stop()
print(ray.is_initialized())
"""


@pytest.mark.slow
def test_a_group_that_is_stopped_after_ray_connects_to_no_cluster() -> None:
    """Ray would start one, or join somebody's, for whatever is asked of an actor; and none but its own is left."""
    ran = run_alone(_SHUT_DOWN)
    assert ran.stdout.strip() == "True", ran.stderr[-3000:]
