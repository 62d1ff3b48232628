"""Models with a batch of fixed size."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rl_eval.policies.fixed_batch import row_by_row


@pytest.mark.parametrize("size", [1, 2, 16])
def test_each_live_row_is_computed_alone(size: int) -> None:
    sizes = []

    def model(inputs: Any) -> Any:
        sizes.append(len(inputs["a"]))
        return {"sum": inputs["a"].sum(1) + inputs["b"], "a": inputs["a"]}

    inputs = {"a": np.arange(12.0).reshape(4, 3), "b": np.arange(4.0)}
    live = np.array([False, True, False, True])
    found, every = row_by_row(model, inputs, size, live), model(inputs)
    assert sizes == [size, size, 4]
    for name, whole in every.items():
        assert found[name].shape == whole.shape
        np.testing.assert_array_equal(found[name][live], whole[live])


def test_the_shape_is_known_without_a_live_row() -> None:
    assert row_by_row(lambda rows: rows[:, :1], np.zeros((5, 3)), 2, np.zeros(5, bool)).shape == (5, 1)
