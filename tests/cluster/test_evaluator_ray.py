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
from machines import eventually

from rl_eval import Evaluator
from rl_eval.errors import ConfigError

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
    found: list[int] = evaluator._engine._group.foreach_runner(lambda runner: os.getpid())  # type: ignore[attr-defined]
    return found


def policy_with_weights() -> Any:
    from evaluator_modules import Scale

    return Scale(4.0)


def test_init_fn_comes_first_once_in_every_process_also_in_those_that_replace_others(tmp_path: Path) -> None:
    """Neither torch, nor gymnasium, nor the modules of environment and policy are imported when it runs."""
    setting = config().runners(num_runners=2, num_envs_per_runner=1, init_fn=noting(tmp_path))
    told: list[BaseException] = []
    with Evaluator(setting, policy_with_weights(), on_error=told.append) as ev:
        assert ev.evaluate().mean_return == 4.0
        assert eventually(lambda: len(pids(ev)) == 2)
        first = pids(ev)
        assert notes(tmp_path) == {f"{pid}-0": "" for pid in sorted(first, key=str)}
        os.kill(first[0], signal.SIGKILL)
        assert eventually(lambda: len(set(pids(ev)) - set(first)) == 1)
        everyone = {*first, *pids(ev)}
        assert notes(tmp_path) == {f"{pid}-0": "" for pid in sorted(everyone, key=str)}
        assert ev.evaluate().mean_return == 4.0
    assert told == []


def test_an_init_fn_may_be_named(tmp_path: Path) -> None:
    """As ``module:attr``; a name that there is not is an error that says so."""
    setting = config().runners(num_runners=1, num_envs_per_runner=1, init_fn="evaluator_init:nothing")
    with Evaluator(setting) as ev, pytest.raises(ConfigError, match=r"runners\.init_fn is 'evaluator_init:nothing'"):
        ev.evaluate()


def test_an_init_fn_that_raises_is_named() -> None:
    """The error says what raised, and what; every request gets it, and nothing waits."""

    def broken() -> None:
        raise RuntimeError("no display")

    with Evaluator(config().runners(num_runners=1, num_envs_per_runner=1, init_fn=broken)) as ev:
        for _ in range(2):
            with pytest.raises(ConfigError, match=r"runners\.init_fn raised RuntimeError: no display"):
                ev.evaluate()


@pytest.mark.parametrize("backend", ["inline", "thread", None])
def test_an_init_fn_needs_a_process_of_its_own(backend: Any) -> None:
    """In this process torch may be imported already: refused by its key."""
    with pytest.raises(ConfigError, match=r"runners\.init_fn"):
        Evaluator(config().runners(num_runners=0, init_fn=noting(Path())), backend=backend)


def test_what_is_no_function_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"runners\.init_fn is 3"):
        Evaluator(config().runners(num_runners=1, init_fn=3))


def test_a_killed_runner_delays_a_result_and_changes_nothing(tmp_path: Path) -> None:
    """It is replaced, its episodes run again, with the weights of the request."""
    from evaluator_modules import Scale

    with Evaluator(config(gate=str(tmp_path)), Scale(), backend="ray") as ev:
        group = ev._engine._group  # type: ignore[attr-defined]
        (pid,) = group.foreach_runner(lambda runner: os.getpid())
        handle = ev.submit(Scale(6.0), step=1)
        evaluator_world.wait_for(tmp_path / "entered")
        os.kill(pid, signal.SIGKILL)
        (tmp_path / "open").touch()
        result = handle.result(LIMIT_S)
        assert {(one.episode_return, one.weights_version) for one in result.episodes} == {(6.0, 1)}
        assert result.provenance["runners_lost"] == 1
        assert pids(ev) != [pid]


_ALONE = """
import sys
sys.path[:0] = {path!r}
import aiohttp.web, ray, torch  # Ray imports the first late, which adds a filter for warnings of its own.
import signal
import trainer_state
from evaluator_modules import Scale
from evaluator_world import config
from rl_eval import Evaluator

module = Scale(2.0)
torch.manual_seed(1)
signal.signal(signal.SIGTERM, signal.SIG_IGN)  # A trainer's own; where there is none, Ray's ends the cluster.
before = trainer_state.observe(module)
with Evaluator(config(), module, backend="ray") as ev:
    trainer_state.compare(before, trainer_state.observe(module))
    assert ev.evaluate(module).mean_return == 2.0
    trainer_state.compare(before, trainer_state.observe(module))
trainer_state.compare(before, trainer_state.observe(module))
print("untouched")
"""


@pytest.mark.slow
def test_a_trainer_without_a_cluster_is_untouched_by_the_one_that_is_started_for_it() -> None:
    """In a fresh process, with a local cluster that begins and ends with the evaluator."""
    script = _ALONE.format(path=[str(HERE), str(ROOT)])
    environment = os.environ | {"PYTHONPATH": f"{HERE}{os.pathsep}{ROOT}"}
    environment.pop("RAY_ADDRESS", None)
    ran = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env=environment, timeout=240, check=False
    )
    assert ran.stdout.strip().endswith("untouched"), ran.stderr[-3000:]


def test_numpy_policies_need_no_torch_in_the_runner() -> None:
    """A policy without tensors runs in a process that never imports torch."""
    with Evaluator(config(), backend="ray") as ev:
        ev.evaluate()
        (loaded,) = ev._engine._group.foreach_runner(  # type: ignore[attr-defined]
            lambda runner: "torch" in __import__("sys").modules
        )
        assert not loaded
