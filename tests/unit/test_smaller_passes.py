"""Passes of fewer rows than a block: the probe finds their sizes, and they change no bit of a result."""

from __future__ import annotations

import importlib
import math
import time
from collections.abc import Callable
from types import ModuleType
from typing import Any

import gymnasium as gym
import numpy as np
import numpy.typing as npt
import pytest

from rl_eval import EvalConfig, evaluate
from rl_eval.config.settings import PolicySection
from rl_eval.policies.inference import inference as genuine
from rl_eval.policies.inference import probe
from rl_eval.policies.inference.probe import BLOCK
from rl_eval.testing import make_gru
from tests.unit.planting import planted
from tests.unit.test_inference import ACTIONS, OBSERVATIONS, pool, total

Array = npt.NDArray[Any]

SIZES = (1, 2, 4, 8, 12)


def without_clock(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Use smaller passes whatever time they save."""
    monkeypatch.setattr(module, "_SAVED_S", -math.inf)
    monkeypatch.setattr(module, "_COMPILED", math.inf)


@pytest.fixture
def _always(monkeypatch: pytest.MonkeyPatch) -> None:
    without_clock(probe, monkeypatch)


class Sized:
    """Sums its observations; the last bits depend on the number of rows, as in a matrix product. Notes its passes."""

    def __init__(self, unit: int = 1, widest: int = 1000) -> None:
        self.unit, self.widest = unit, widest
        self.passes: list[int] = []
        self.live: list[int] = []

    def initial_state(self, batch_size: int) -> Array:
        return np.zeros((batch_size, 2))

    def act(self, observations: Array, state: Any, live: Any, noise: Any) -> tuple[Array, Array]:
        size = len(observations)
        self.passes.append(size)
        self.live.append(int(live.sum()))
        other = size % self.unit > 0 or size > self.widest
        following = state + total(observations) + 1e-9 * other
        return following + noise.uniform(2), following


def inferred(policy: Any, lanes: int, module: Any = genuine) -> Any:
    section = PolicySection(actions="none", deterministic=False)
    inference = module.RowInference(policy, OBSERVATIONS, ACTIONS, lanes, section)
    inference.probe()
    return inference


def sizes_of(policy: Any, lanes: int = 16) -> tuple[int, ...]:
    return inferred(policy, lanes)._sizes[:-1]


# ------------------------------------------------------------------------------ what the probe finds


@pytest.mark.usefixtures("_always")
@pytest.mark.parametrize(
    ("unit", "lanes", "sizes"),
    [
        (1, 1, (1,)),
        (1, 3, (1, 2, 4)),
        (1, 8, (1, 2, 4, 8)),
        (1, 16, SIZES),
        (1, 64, SIZES),
        (2, 1, (2,)),
        (4, 1, (4,)),
        (4, 5, (4, 8)),
        (4, 16, (4, 8, 12)),
        (8, 16, (8,)),
        (16, 16, ()),
    ],
)
def test_sizes_with_the_bits_of_a_block_are_found(unit: int, lanes: int, sizes: tuple[int, ...]) -> None:
    assert sizes_of(Sized(unit), lanes) == sizes


@pytest.mark.usefixtures("_always")
def test_a_single_size_with_other_bits_is_left_out() -> None:
    """NumPy computes a product of one row in another way than all other products of narrow matrices."""
    weights = np.random.default_rng(0).normal(size=(4, 2))
    sizes = sizes_of(Plain(lambda x: x @ weights))
    rows = pool(160)
    blocks = np.concatenate([rows[at : at + BLOCK] @ weights for at in range(0, 160, BLOCK)])
    for size in SIZES:
        parts = [rows[at : at + size] @ weights for at in range(0, 160 // size * size, size)]
        equal = np.array_equal(np.concatenate(parts), blocks[: len(parts) * size])
        assert equal == (size in sizes)


class Plain:
    """Applies a function to observations."""

    def __init__(self, function: Callable[[Array], Array]) -> None:
        self.function = function
        self.passes: list[int] = []

    def act(self, observations: Array, state: Any, live: Any, noise: Any) -> tuple[Array, None]:
        self.passes.append(len(observations))
        return self.function(observations), None


@pytest.mark.usefixtures("_always")
def test_a_policy_that_needs_a_whole_block_keeps_it() -> None:
    """Its reference is still a block, and nothing is noted."""

    def picky(observations: Array) -> Array:
        if len(observations) % BLOCK:
            raise ValueError("wrong batch size")
        return total(observations)

    inference = inferred(Plain(picky), 3)
    assert inference._sizes == (BLOCK,)
    assert inference.numerics["reference"] == f"block of {BLOCK}"
    assert inference.notes == ()


@pytest.mark.parametrize("lanes", [1, 4, 16, 64])
@pytest.mark.parametrize("unit", [1, 2, 4, 8, 16])
def test_the_key_does_not_know_of_the_sizes_and_they_cost_few_rows(
    unit: int, lanes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys, rows = [], []
    monkeypatch.setattr(probe, "_SAVED_S", math.inf)
    for always in (False, True):
        if always:
            without_clock(probe, monkeypatch)
        policy = Sized(unit)
        keys.append(inferred(policy, lanes).numerics)
        rows.append(sum(policy.passes))
    assert keys[0] == keys[1]
    assert 0 < rows[1] - rows[0] <= 120


# ------------------------------------------------------------------------------ the clock


def test_only_a_policy_that_saves_time_gets_smaller_passes() -> None:
    """A planner computes row by row; a small sum takes less time than a gathering of rows."""

    def plan(observations: Array) -> Array:
        time.sleep(0.002 * len(observations))
        return total(observations)

    cheap = Plain(total)
    assert sizes_of(Plain(plan), 4) == (1, 2, 4)
    assert sizes_of(cheap, 4) == ()
    assert set(cheap.passes) == {BLOCK}


def test_a_policy_that_compiles_for_each_size_keeps_blocks() -> None:
    """One size is tried, and no second one."""
    known = set()

    def compiled(observations: Array) -> Array:
        time.sleep(0.0001 * len(observations) + 0.5 * (len(observations) not in known))
        known.add(len(observations))
        return total(observations)

    assert sizes_of(Plain(compiled)) == ()
    assert known == {1, BLOCK}


# ------------------------------------------------------------------------------ passes

NEEDED = [0, *SIZES, BLOCK]


def due(count: int, policy: Sized, rows: int) -> list[int]:
    """Return the sizes of the passes for a number of live rows."""
    if count > BLOCK and rows <= policy.widest:
        return [rows]
    rest = next(size for size in NEEDED if size >= count % BLOCK and size % policy.unit == 0)
    return [BLOCK] * (count // BLOCK) + [rest] * (rest > 0)


def run_passes(module: Any) -> None:
    """Act through random histories, and compare each action with those of whole blocks."""
    for lanes, unit, widest in ((1, 1, 1000), (3, 4, 1000), (12, 2, 1000), (20, 1, 1000), (20, 4, 1000), (40, 4, 20)):
        policy, other = Sized(unit, widest), Sized(unit, widest)
        small, blocks = inferred(policy, lanes, module), inferred(other, lanes)
        blocks._sizes = (BLOCK,)
        assert small.numerics == blocks.numerics
        rng = np.random.default_rng(lanes)
        for step in range(40):
            for lane in range(lanes):
                for one in (small, blocks):
                    one.observations.write(lane, pool(200)[(lane + step) % 200])
                if draw := rng.choice(["begin", "end", ""], p=[0.2, 0.2, 0.6]):
                    for one in (small, blocks):
                        one.begin(lane, 100 * step + lane) if draw == "begin" else one.end(lane)
            if not (count := int(small.live.sum())):
                continue
            policy.passes, policy.live = [], []
            (found, errors), (expected, _) = small.act(), blocks.act()
            assert not errors
            live = np.flatnonzero(small.live).tolist()
            assert [found[lane].tobytes() for lane in live] == [expected[lane].tobytes() for lane in live]
            assert policy.passes == due(count, policy, len(small.live))
            assert sum(policy.live) == count


@pytest.mark.usefixtures("_always")
def test_smaller_passes_have_the_live_rows_and_no_other_bits() -> None:
    """State and noise are those of each row; rows without an episode fill up a pass; no live row is in two passes."""
    run_passes(genuine)


INFERENCE = {
    "fills up with copies of live rows": (
        'np.argsort(~self.live, kind="stable")[: blocks * BLOCK + last]',
        "np.resize(np.flatnonzero(self.live), blocks * BLOCK + last)",
    ),
    "takes rows without an episode first": ("np.argsort(~self.live", "np.argsort(self.live"),
    "drops the rest": ("blocks * BLOCK + last", "max(blocks, 1) * BLOCK"),
    "does not fill up": ("if size >= rest)", "if size >= rest) and rest"),
    "takes the next smaller size": ("if size >= rest)", "if size * 2 > rest)"),
    "takes all rows where only blocks have the bits": (
        "if count > BLOCK and self._chunk == self._rows:",
        "if count > BLOCK:",
    ),
}
PROBE = {
    "takes a size with other bits": ("            if not self._same(reference, size):\n                continue\n", ""),
    "stops at the first size": ("if size >= self._lanes:", "if size:"),
    "looks only at garbage": ("            yield kept\n        for", "            yield ~kept\n        for"),
}


@pytest.mark.usefixtures("_always")
@pytest.mark.parametrize("bug", [*INFERENCE, *PROBE])
def test_a_planted_bug_is_caught(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "inference" if bug in INFERENCE else "probe"
    module = planted(f"rl_eval.policies.inference.{name}", *(INFERENCE | PROBE)[bug], monkeypatch)
    if name == "probe":
        without_clock(module, monkeypatch)
        module = with_probe(module, monkeypatch)
    with pytest.raises((AssertionError, KeyError, ValueError)):
        run_passes(module)


def with_probe(bad: ModuleType, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Return an inference with another probe."""
    module = planted(genuine.__name__, "_ALL: Final = slice(None)\n", "_ALL: Final = slice(None)\n", monkeypatch)
    module.Probe = bad.Probe
    return module


# ------------------------------------------------------------------------------ evaluations

WEIGHTS = [np.random.default_rng(seed).normal(size=shape).astype("f") for seed, shape in enumerate([(3, 64), (64, 1)])]
PENDULUM = gym.make("Pendulum-v1")
POLICIES: dict[str, Callable[[], Any]] = {
    "network": lambda: importlib.import_module("rl_eval.policies.mlp").make_mlp(
        PENDULUM.observation_space, PENDULUM.action_space
    ),
    "matrix product": lambda: lambda x: 2 * np.tanh(np.tanh(x @ WEIGHTS[0]) @ WEIGHTS[1]),
    "row by row": lambda: lambda x: np.stack([np.tanh(row * WEIGHTS[1][:3, 0]).sum(keepdims=True) for row in x]),
}


@pytest.mark.parametrize("name", POLICIES)
def test_the_fingerprint_is_that_of_blocks(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = POLICIES[name]()
    config = EvalConfig().environment("Pendulum-v1").evaluation(num_episodes=20, seed=3, max_episode_steps=40)
    expected = evaluate(config, policy).fingerprint
    without_clock(probe, monkeypatch)
    for lanes in (1, 3, 4, 8, 16, 20):
        assert evaluate(config.copy().runners(num_envs_per_runner=lanes), policy).fingerprint == expected


@pytest.mark.parametrize("lanes", [1, 3, 20])
def test_the_fingerprint_of_a_sampled_recurrent_policy_is_that_of_blocks(
    lanes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    cart = gym.make("CartPole-v1")
    gru = make_gru(cart.observation_space, cart.action_space)
    config = EvalConfig().environment("CartPole-v1").policy(deterministic=False).evaluation(num_episodes=20)
    expected = evaluate(config, gru).fingerprint
    without_clock(probe, monkeypatch)
    assert evaluate(config.copy().runners(num_envs_per_runner=lanes), gru).fingerprint == expected
