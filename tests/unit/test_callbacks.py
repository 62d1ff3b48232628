"""A stopping rule and a new best count complete results with a number only."""

import math

import numpy as np
import pytest
import torch
from evaluator_modules import Scale
from evaluator_world import config
from hypothesis import given
from hypothesis import strategies as st

from rl_eval.errors import UsageError, WeightsError
from rl_eval.results.result import EvalPoint
from rl_eval.training.callbacks import NewBest, StopOnThreshold
from rl_eval.training.evaluator import Evaluator
from rl_eval.weights import load_weights_file, save_weights_file, snapshot_weights
from tests.refused import refused, untold
from tests.unit.results_world import result_of as make_result

MEAN = "episode_return_mean"


def point(*returns, step=0, failed=(), missing=(), **more):
    result = make_result(np.array(returns, float), failed=failed, missing=missing)
    metrics = {f"eval/{key}": value for key, value in result.metrics.items()} | more
    return EvalPoint(step, step, result, metrics)


# ------------------------------------------------------------------------------ stop


def test_the_default_is_the_lower_end_of_the_interval():
    """A mean above the threshold is not enough when the interval reaches below it."""
    stop = StopOnThreshold(9.0)
    wide, narrow = point(*[0.0] * 4, *[20.0] * 6), point(*[9.5, 10.0, 10.5] * 10, step=7)
    assert wide.result.mean_return > 9.0
    stop(wide)
    assert (stop.reached, stop.point) == (False, None)
    stop(narrow)
    assert (stop.reached, stop.point) == (True, narrow)


@pytest.mark.parametrize("metric", ["episode_return_ci_low", "eval/episode_return_ci_low"])
def test_a_metric_without_a_value_is_explained_once(metric, caplog):
    """Otherwise a solved task trains for ever; bounds of the returns give it a value."""
    stop = StopOnThreshold(400.0, metric)
    for _ in range(2):
        stop(point(*[500.0] * 20))
    assert not stop.reached
    [record] = caplog.records
    assert record.levelname == "WARNING"
    assert untold(record.getMessage(), metric, "evaluation.return_bounds", "metric='episode_return_mean'") == []
    returns = np.full(20, 500.0)
    bounded = make_result(returns, return_bounds=(0.0, 500.0))
    stop(EvalPoint(0, 0, bounded, {f"eval/{key}": value for key, value in bounded.metrics.items()}))
    assert stop.reached
    caplog.clear()
    StopOnThreshold(400.0, metric)(point(*[500.0] * 20, failed=[3]))
    assert not caplog.records, "a failed evaluation has another reason"


def test_reached_is_reached():
    """The point is the first with which it was; later ones change nothing."""
    stop, first = StopOnThreshold(5, MEAN), point(6, 6)
    for found in (first, point(1, 1), point(9, 9)):
        stop(found)
    assert stop.reached
    assert stop.point is first


def test_patience_counts_in_a_row():
    """Also over a restart; a point below the threshold begins anew."""
    stop = StopOnThreshold(5, MEAN, patience=3)
    for value in (5, 6, 4, 5):
        stop(point(value, value))
        assert not stop.reached
    restored = StopOnThreshold(5, MEAN, patience=3)
    restored.load_state_dict(stop.state_dict())
    restored(point(5, 5))
    assert not restored.reached
    last = point(5, 5, step=9)
    restored(last)
    assert restored.reached
    assert restored.point is last
    restored.load_state_dict(restored.state_dict())
    assert (restored.reached, restored.point) == (True, None)


@pytest.mark.parametrize(
    "bad",
    [point(9, 9, 9, failed=[1]), point(9, 9, 9, missing=[2]), point(math.nan, 9.0)],
    ids=["failed", "stopped early", "NaN"],
)
def test_what_is_not_a_complete_number_does_not_count(bad):
    """It interrupts a streak, and is never the best, whatever the direction."""
    stop = StopOnThreshold(5, MEAN, patience=2)
    for found in (point(9, 9), bad, point(9, 9)):
        stop(found)
    assert not stop.reached
    for mode in ("max", "min"):
        seen = []
        best = NewBest(seen.append, mode=mode)
        best(bad)
        assert (seen, best.best, best.best_value) == ([], None, None)


def test_metrics_of_the_users_are_metrics():
    """Callbacks use the names that loggers show; an unknown name is an error."""
    stop = StopOnThreshold(0.5, "eval/caught_fish")
    stop(point(1, **{"eval/caught_fish": 0.7}))
    assert stop.reached
    for hook in (StopOnThreshold(1, "episode_return_men"), NewBest(print, "episode_return_men")):
        with refused(UsageError, "metric", value="episode_return_men"):
            hook(point(1, 2))


@pytest.mark.parametrize(
    ("make", "key"),
    [
        (lambda: StopOnThreshold(math.nan), "threshold"),
        (lambda: StopOnThreshold(1, patience=0), "patience"),
        (lambda: NewBest(print, mode="most"), "mode"),
        (NewBest, "callback"),
        (lambda: NewBest(save="best.zip"), "save"),
    ],
)
def test_impossible_arguments_are_refused(make, key):
    with refused(UsageError, key):
        make()


# ------------------------------------------------------------------------------ best


@given(values=st.lists(st.integers(-5, 5), max_size=20), cut=st.integers(0, 20), mode=st.sampled_from(["max", "min"]))
def test_the_callback_hears_of_each_improvement_once(values, cut, mode):
    """Also over a restart: what it hears is the strictly monotone record sequence."""
    seen = []
    hook = NewBest(seen.append, mode=mode)
    for number, value in enumerate(values):
        if number == cut:
            state, hook = hook.state_dict(), NewBest(seen.append, mode=mode)
            hook.load_state_dict(state)
            assert hook.best is None
        hook(point(value, value, step=number))
        if seen and seen[-1].step == number:
            assert hook.best is seen[-1]
    better = (lambda a, b: a > b) if mode == "max" else (lambda a, b: a < b)
    records = [n for n, value in enumerate(values) if all(better(value, former) for former in values[:n])]
    assert [found.step for found in seen] == records
    assert hook.best_value == ((max if mode == "max" else min)(values) if values else None)


def test_a_callback_that_fails_has_not_kept_the_best():
    """Its error is passed on, and the next good point is offered again."""

    def fail(point):
        raise OSError("the disk is full")

    hook = NewBest(fail)
    with pytest.raises(OSError, match="the disk is full"):
        hook(point(5, 5))
    assert hook.best is None
    kept = []
    hook.callback = kept.append
    hook(point(4, 4))
    assert [found.result.mean_return for found in kept] == [4.0]


# ------------------------------------------------------------------------------ the weights of the best


def _digest(path):
    return snapshot_weights(load_weights_file(path), 0).digest


@pytest.mark.parametrize("name", ["best.safetensors", "best.pt"])
@pytest.mark.parametrize("backend", ["inline", "thread"])
def test_the_weights_of_the_best_are_kept(tmp_path, backend, name):
    """Those that were evaluated, although training went on meanwhile; a worse point changes nothing."""
    best, module = NewBest(save=tmp_path / "kept" / name), Scale()
    with Evaluator(config(), Scale(), backend=backend, busy_policy="queue", on_result=best) as evaluator:
        results = []
        for value in (1.0, 3.0, 2.0):
            results.append(evaluator.submit(module.become(value)))
            module.become(-1.0)
        digests = [handle.result().provenance["weights"]["digest"] for handle in results]
        evaluator.drain()
    assert best.best.step == 1
    assert _digest(best.save) == digests[1] == snapshot_weights(Scale(3.0), 0).digest
    assert [path.name for path in best.save.parent.iterdir()] == [name]


def test_a_request_without_weights_saves_those_before(tmp_path):
    """The weights that were sent last, or those of the policy at the start."""
    best = NewBest(save=tmp_path / "best.safetensors")
    with Evaluator(config(), Scale(7.0), backend="inline", on_result=best) as evaluator:
        evaluator.evaluate()
        assert _digest(best.save) == snapshot_weights(Scale(7.0), 0).digest


def test_a_kept_point_keeps_no_weights(tmp_path):
    """Callbacks can read them; afterwards a thousand kept points cost no copy of them."""
    seen = []
    keep = lambda point: seen.append((point, point.weights.digest))  # noqa: E731
    with Evaluator(config(), Scale(), backend="inline", on_result=keep) as evaluator:
        evaluator.evaluate(Scale(1.0))
    ((kept, digest),) = seen
    assert digest == snapshot_weights(Scale(1.0), 0).digest
    assert kept.weights is None


def test_weights_that_cannot_be_saved_are_no_new_best(tmp_path):
    """The point does not count, and the callback is not called."""
    seen = []
    best = NewBest(seen.append, save=tmp_path / "best.pt")
    with refused(UsageError, "save"):
        best(point(1, 1, step=4))
    assert (seen, best.best) == ([], None)
    assert list(tmp_path.iterdir()) == []


class _Counted(torch.nn.Linear):
    """Layer whose extra state is not a tensor."""

    def get_extra_state(self):
        return {"count": 3}

    def set_extra_state(self, state):
        pass


def test_extra_state_needs_the_other_format(tmp_path):
    """A .safetensors file stores tensors only; a .pt file stores everything."""
    snapshot = snapshot_weights(_Counted(2, 2), 0)
    with refused(WeightsError, "_extra_state"):
        save_weights_file(snapshot, tmp_path / "best.safetensors")
    assert list(tmp_path.iterdir()) == []
    save_weights_file(snapshot, tmp_path / "best.pt")
    assert snapshot_weights(load_weights_file(tmp_path / "best.pt"), 0).digest == snapshot.digest
