"""No global state of the trainer changes: before, while and after an evaluation runs in its process or beside it."""

from __future__ import annotations

import random
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import evaluator_world
import numpy as np
import pytest
import torch
import trainer_state
from evaluator_modules import Scale
from evaluator_world import LIMIT_S, config
from torch import nn

from rl_eval import Evaluator
from rl_eval.errors import WeightsError
from rl_eval.weights import apply_weights, snapshot_weights
from tests.refused import refused


def trained() -> Scale:
    """A module in the middle of training."""
    module = Scale(3.0)
    module(torch.ones(2, 1)).sum().backward()
    return module.train()


@pytest.fixture(params=["inline", "thread"])
def backend(request: pytest.FixtureRequest) -> Any:
    return request.param


def test_the_trainer_is_untouched(backend: Any) -> None:
    """By creation, evaluations with and without weights, errors, and the end."""
    module = trained()
    evaluator_world.config()
    before = trainer_state.observe(module)
    with Evaluator(config(), module, backend=backend) as ev:
        trainer_state.compare(before, trainer_state.observe(module))
        ev.evaluate(module)
        ev.submit(module.state_dict()).result(LIMIT_S)
        with refused(WeightsError, "weight"):
            ev.evaluate({"weight": torch.zeros(2, 2)})
        trainer_state.compare(before, trainer_state.observe(module))
    trainer_state.compare(before, trainer_state.observe(module))


@pytest.mark.parametrize("mode", ["no_grad", "inference_mode"])
def test_the_callers_modes_stay_its_own(backend: Any, mode: str) -> None:
    """An evaluation begun under ``no_grad`` or ``inference_mode`` leaves them as they are, and works."""
    module = trained()
    with Evaluator(config(), module, backend=backend) as ev, getattr(torch, mode)():
        before = trainer_state.observe(module)
        assert ev.evaluate(module).mean_return == 3.0
        trainer_state.compare(before, trainer_state.observe(module))


def test_nothing_changes_while_an_evaluation_runs(tmp_path: Path) -> None:
    """As the training thread sees it, with the evaluation held up in the middle."""
    module = trained()
    before = trainer_state.observe(module)
    with Evaluator(config(gate=str(tmp_path)), module, backend="thread") as ev:
        handle = ev.submit(module)
        try:
            evaluator_world.wait_for(tmp_path / "entered")
            trainer_state.compare(before, trainer_state.observe(module))
            assert torch.ones(1, requires_grad=True).sum().requires_grad
        finally:
            (tmp_path / "open").touch()
        handle.result(LIMIT_S)
    trainer_state.compare(before, trainer_state.observe(module))


def test_a_factory_that_initializes_layers_takes_no_numbers_from_the_trainer(
    backend: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor gives any back: what training draws while the factory works is drawn once."""

    def slow_factory() -> nn.Module:
        layer = nn.Linear(1, 1)
        time.sleep(0.3)
        random.random()
        np.random.random()  # noqa: NPY002
        return layer

    monkeypatch.setattr(evaluator_world, "slow_factory", slow_factory, raising=False)

    def draw() -> tuple[float, float, float]:
        return random.random(), np.random.random(), float(torch.rand(()))  # noqa: NPY002

    def seed() -> None:
        random.seed(5)
        np.random.seed(5)  # noqa: NPY002
        torch.manual_seed(5)

    seed()
    expected = [draw() for _ in range(3)]
    seed()
    with Evaluator(config("evaluator_world:slow_factory"), backend=backend) as ev:
        drawn = [draw()]
        handle = ev.submit()
        drawn.append(draw())
        handle.result(LIMIT_S)
        drawn.append(draw())
    assert drawn == expected


def test_weights_are_copied_without_the_warnings_filters(monkeypatch: pytest.MonkeyPatch) -> None:
    """``warnings.catch_warnings`` is for the whole process: two threads in it leave each other's filters behind."""

    def forbidden(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError(threading.current_thread().name)

    snapshot = snapshot_weights(Scale(2.0), 1)
    monkeypatch.setattr(warnings, "catch_warnings", forbidden)
    module = Scale()
    apply_weights(snapshot_weights(Scale(2.0), 1), module)
    assert module.weight.item() == 2.0
    assert snapshot.digest
