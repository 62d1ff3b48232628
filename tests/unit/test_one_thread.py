"""Threads of torch while runners compute in the caller's process: one, and no other thread's number changes."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from rl_eval import EvalConfig, EvalResult, EvalRunnerGroup, evaluate, replay
from rl_eval.supervision.caller import one_thread
from rl_eval.training.evaluator import Evaluator

TRAINERS = 3


def in_new_thread(function: Callable[[], Any]) -> Any:
    with ThreadPoolExecutor(1) as executor:
        return executor.submit(function).result()


@pytest.fixture(autouse=True)
def _trainer() -> Iterator[None]:
    """A process in which torch has several threads."""
    former = torch.get_num_threads()
    torch.set_num_threads(TRAINERS)
    yield
    assert torch.get_num_threads() == TRAINERS
    assert in_new_thread(torch.get_num_threads) == TRAINERS
    torch.set_num_threads(former)


class Watching(torch.nn.Module):
    """Network that notes the number of threads in the thread that computes it, and in a new one."""

    seen: list[tuple[int, int]] = []  # noqa: RUF012 -- The copy of a runner writes into it, too.

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 2)

    def forward(self, observations: torch.Tensor) -> torch.Tensor:
        if len(self.seen) < 50:
            self.seen.append((torch.get_num_threads(), in_new_thread(torch.get_num_threads)))
        return torch.as_tensor(self.layer(observations))


def make_config(num_episodes: int = 4) -> EvalConfig:
    return EvalConfig().environment("CartPole-v1").evaluation(num_episodes=num_episodes, seed=0)


def by_evaluate() -> EvalResult:
    return evaluate(make_config(), Watching())


def by_a_group(threaded: bool) -> EvalResult:
    with EvalRunnerGroup(make_config(), Watching(), threaded=threaded) as group:
        result = group.evaluate()
        assert torch.get_num_threads() == TRAINERS
        return result


def by_an_evaluator() -> EvalResult:
    with Evaluator(make_config(), Watching()) as evaluator:
        return evaluator.submit(step=0).result()


DOORS = [
    by_evaluate,
    partial(by_a_group, threaded=False),
    partial(by_a_group, threaded=True),
    by_an_evaluator,
    partial(in_new_thread, by_evaluate),
]


@pytest.mark.parametrize("door", DOORS, ids=["evaluate", "group", "threaded group", "evaluator", "another thread"])
def test_an_evaluation_in_this_process_has_one_thread(door: Callable[[], EvalResult]) -> None:
    """The thread that computes has one; a thread that starts meanwhile has the trainer's number."""
    Watching.seen.clear()
    result = door()
    assert result.provenance["numerics"]["num_threads"] == 1
    assert set(Watching.seen) == {(1, TRAINERS)}


def test_the_number_is_restored_after_an_error() -> None:
    """Ctrl-C, too."""
    with pytest.raises(KeyboardInterrupt), one_thread():
        raise KeyboardInterrupt
    assert torch.get_num_threads() == TRAINERS


def test_torch_may_be_half_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    """By another thread, while one evaluates a policy without torch."""
    with monkeypatch.context() as patched:
        patched.setitem(sys.modules, "torch", ModuleType("torch"))
        with one_thread():
            assert torch.get_num_threads() == TRAINERS


def test_samples_come_back_to_a_caller_with_its_threads() -> None:
    """Between two batches the caller trains."""
    with EvalRunnerGroup(make_config(), Watching(), threaded=False) as group:
        for _ in group.iter_samples(num_episodes=1, num_batches=3, as_arrays=True):
            assert torch.get_num_threads() == TRAINERS


def test_evaluations_in_many_threads_leave_every_number_as_it_was() -> None:
    """The fixture checks those of this thread and of new ones."""
    everybody = threading.Barrier(9)
    with ThreadPoolExecutor(8, initializer=lambda: (torch.get_num_threads(), everybody.wait())) as executor:
        for _ in range(8):
            executor.submit(int)
        everybody.wait()  # A thread that computes for the first time meanwhile would be one more thing to time.
        results = [future.result() for future in [executor.submit(by_evaluate) for _ in range(24)]]
        after = {executor.submit(torch.get_num_threads).result() for _ in range(24)}
    assert {result.provenance["numerics"]["num_threads"] for result in results} == {1}
    assert after == {TRAINERS}


def test_an_episode_runs_again_as_it_ran(tmp_path: Path) -> None:
    """With one thread, so that nothing differs from the run."""
    config = make_config().policy("rl_eval.policies.mlp:make_mlp")
    evaluate(config).save(tmp_path / "out")
    replayed = replay(tmp_path / "out", 2, config)
    assert (replayed.identical, replayed.numerics) == (True, {})
