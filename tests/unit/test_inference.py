"""What a lane's action depends on: its own observations, state and noise, and nothing that happens in other rows."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np
import numpy.typing as npt
import pytest
import torch
from gymnasium import spaces
from torch import nn

from rl_eval import EvalConfig, EvalRunnerGroup, evaluate
from rl_eval.config.settings import PolicySection
from rl_eval.errors import PolicyError, PolicyUnavailable
from rl_eval.policies import CallablePolicy
from rl_eval.policies.inference import probe
from rl_eval.policies.inference.inference import BLOCK, RowInference
from rl_eval.policies.mlp import make_mlp
from rl_eval.policies.module import ModulePolicy
from rl_eval.policies.noise import EpisodeNoise
from rl_eval.testing import make_gru
from tests.refused import refused, untold

Array = npt.NDArray[Any]

LANES = (1, 3, 8, 16, 24, 64)
OBSERVATIONS = spaces.Box(-np.inf, np.inf, (4,), np.float32)
ACTIONS = spaces.Box(-np.inf, np.inf, (2,), np.float64)
THREE = spaces.Discrete(3)
NESTED = spaces.Dict({"a": OBSERVATIONS, "b": spaces.Tuple((spaces.Discrete(7), spaces.Box(0, 255, (3, 3), np.uint8)))})


@pytest.fixture(autouse=True, params=["blocks", "smaller passes"])
def _passes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run every test with blocks alone, and with all smaller passes that have their bits, whatever time they save."""
    monkeypatch.setattr(probe, "_SAVED_S", math.inf if request.param == "blocks" else -math.inf)
    monkeypatch.setattr(probe, "_COMPILED", math.inf)


def infer(
    policy: Any, lanes: int, observations: Any = OBSERVATIONS, actions: Any = ACTIONS, **section: Any
) -> RowInference:
    inference = RowInference(policy, observations, actions, lanes, PolicySection(actions="none", **section))
    inference.probe()
    return inference


def network(seed: int = 0, actions: gym.Space[Any] = ACTIONS, *, deterministic: bool = True) -> ModulePolicy:
    """Return a network of the usual size, with weights of its seed."""
    torch.manual_seed(seed)
    return ModulePolicy(make_mlp(OBSERVATIONS, actions), actions, deterministic)


def pool(count: int) -> Array:
    return np.random.default_rng(5).normal(size=(count, 4)).astype(np.float32)


def act_once(inference: RowInference, rows: dict[int, int], garbage: float = 0.0) -> dict[int, bytes]:
    """Put pool row r on lane l for each l: r, with the row as its seed; return the bytes of each lane's action."""
    inference.live[:] = False
    inference.observations.arrays[:] = garbage
    for lane, row in rows.items():
        inference.begin(lane, 1000 + row)
        inference.observations.write(lane, pool(200)[row])
    actions, errors = inference.act()
    assert not errors
    return {lane: np.asarray(actions[lane]).tobytes() for lane in rows}


def assert_alone(inference: RowInference, alone: RowInference) -> None:
    """64 lanes act as one does alone."""
    assert inference.numerics == alone.numerics
    found = act_once(inference, {lane: lane for lane in range(64)})
    assert found == {lane: act_once(alone, {0: lane})[0] for lane in range(64)}


# ------------------------------------------------------------------------------ rows are invariant


@pytest.mark.parametrize("space", [ACTIONS, spaces.Discrete(3)], ids=["numbers", "logits"])
@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("lanes", LANES)
def test_a_row_of_a_network_is_the_same_in_every_layout(lanes: int, deterministic: bool, space: Any) -> None:
    """To the last bit: alone or among others, on any lane, whatever the dead rows hold; near ties of logits, too."""
    policy = network(0, space, deterministic=deterministic)
    inference = infer(policy, lanes, actions=space, deterministic=deterministic)
    alone = infer(policy, 1, actions=space, deterministic=deterministic)
    assert inference.numerics == alone.numerics
    assert inference.numerics["reference"] == f"block of {BLOCK}"
    expected = [act_once(alone, {0: row})[0] for row in range(lanes)]
    shuffled = np.random.default_rng(lanes).permutation(lanes)
    for rows in ({int(lane): int(row) for lane, row in enumerate(shuffled)}, {lanes - 1: 0}, {0: lanes - 1}):
        for garbage in (0.0, 1e9, np.nan):
            found = act_once(inference, rows, garbage)
            assert found == {lane: expected[row] for lane, row in rows.items()}


@pytest.mark.parametrize("lanes", [3, 20])
def test_episodes_that_act_at_their_own_pace_are_those_that_act_together(lanes: int) -> None:
    """State, noise and steps of those that wait stay where they are, whoever acts meanwhile."""
    gru = make_gru(OBSERVATIONS, spaces.Discrete(5))
    steps, found = 6, []
    for together in (True, False):
        inference = infer(gru, lanes, actions=spaces.Discrete(5), deterministic=False)
        rng, taken = np.random.default_rng(lanes), np.zeros(lanes, int)
        actions: dict[tuple[int, int], int] = {}
        for lane in range(lanes):
            inference.begin(lane, 1000 + lane)
        while (taken < steps).any():
            ready = np.zeros(len(inference.live), bool)
            ready[:lanes] = (taken < steps) & (together | (rng.random(lanes) < 0.4))
            for lane in np.flatnonzero(ready):
                inference.observations.write(int(lane), pool(200)[int(lane) + 20 * int(taken[lane])])
            if ready.any():
                inference.ask(np.flatnonzero(ready).tolist())
                _, chosen, errors = inference.answered()
                assert not errors
                actions |= {(int(lane), int(taken[lane])): int(chosen[lane]) for lane in np.flatnonzero(ready)}
                taken += ready[:lanes]
        assert inference.live[:lanes].all()
        found.append(actions)
    assert found[0] == found[1]


# ------------------------------------------------------------------------------ what the probe catches


def total(observations: Array) -> Array:
    """Two numbers per row that depend on that row alone, to the last bit."""
    flat = observations.reshape(len(observations), -1)
    return np.stack([flat[:, 0].astype(np.float64), flat.max(1)], 1)


def plus_position(x: Array) -> Array:
    return total(x) + np.arange(len(x))[:, None]


def plus_a_little_position(x: Array) -> Array:
    return total(x) + 1e-12 * np.arange(len(x))[:, None]


def plus_last(x: Array) -> Array:
    return total(x) + total(x)[-1:]


def minus_mean(x: Array) -> Array:
    return total(x) - total(x).mean(0)


def plus_neighbour(x: Array) -> Array:
    return total(x) + np.roll(total(x), 1, 0)


def sorted_rows(x: Array) -> Array:
    return np.sort(total(x), axis=0)


def plus_size(x: Array) -> Array:
    return total(x) + (len(x) > 1)


DEPENDENT: dict[str, Callable[[Array], Array]] = {
    function.__name__: function
    for function in (plus_position, plus_a_little_position, plus_last, minus_mean, plus_neighbour, sorted_rows)
}


@pytest.mark.parametrize("lanes", LANES)
@pytest.mark.parametrize("name", DEPENDENT)
def test_a_policy_that_depends_on_other_rows_is_computed_row_by_row(name: str, lanes: int) -> None:
    """Position-dependent and cross-row operations are caught, and every lane gets the result of a batch of one."""
    function = DEPENDENT[name]
    inference = infer(CallablePolicy(function), lanes)
    assert inference.numerics["reference"] == "row"
    found = act_once(inference, {lane: lane for lane in range(lanes)}, 7.0)
    assert found == {lane: function(pool(200)[lane : lane + 1])[0].tobytes() for lane in range(lanes)}


class Reusing:
    """Policy that returns the same arrays in every pass, with new values."""

    def __init__(self) -> None:
        self.whole, self.outputs = np.zeros((64, 2)), {"thought": np.zeros(64)}

    def act(self, observations: Any, state: Any, live: Any, noise: Any) -> tuple[Any, Any]:
        self.whole[: len(observations)] = minus_mean(observations)
        self.outputs["thought"][: len(observations)] = observations[:, 1]
        return self.whole[: len(observations)], None


def test_a_policy_may_return_the_same_arrays_in_every_pass() -> None:
    """Rows that are computed in several passes keep their own actions and outputs."""
    inference = infer(Reusing(), 3)
    inference.keeps_outputs = True
    assert inference.rows_per_pass == 1
    found = act_once(inference, {lane: lane for lane in range(3)})
    assert found == {lane: minus_mean(pool(200)[lane : lane + 1])[0].tobytes() for lane in range(3)}
    assert [inference.outputs(lane)["thought"] for lane in range(3)] == pool(200)[:3, 1].tolist()


@pytest.mark.parametrize("position", range(0, 64, 7))
def test_one_bad_position_is_enough(position: int) -> None:
    """Every position is probed: within a block it forces rows, beyond it blocks, and lanes agree either way."""

    def function(x: Array) -> Array:
        return total(x) + (np.arange(len(x)) == position)[:, None]

    inference = infer(CallablePolicy(function), 64)
    assert inference.numerics["reference"] == ("row" if position < BLOCK else f"block of {BLOCK}")
    assert_alone(inference, infer(CallablePolicy(function), 1))


def test_a_policy_that_depends_on_the_size_of_its_batch_gets_blocks() -> None:
    """What every block of 16 computes is the definition: a batch of another size is not used."""
    inference = infer(CallablePolicy(plus_size), 64)
    assert inference.numerics["reference"] == f"block of {BLOCK}"

    def sized(x: Array) -> Array:
        return total(x) + len(x)

    assert_alone(infer(CallablePolicy(sized), 64), infer(CallablePolicy(sized), 1))


def test_a_policy_may_refuse_made_up_observations() -> None:
    """A policy that only knows real observations is computed row by row, where nothing needs proof."""

    def picky(x: Array) -> Array:
        if not (x == np.round(x)).all():
            raise ValueError("these are no real observations")
        return plus_position(x)

    inference = infer(CallablePolicy(picky), 3)
    assert inference.numerics["reference"] == "row"
    (note,) = inference.notes
    assert "ValueError: these are no real observations" in note
    for lane in range(3):
        inference.begin(lane, lane)
        inference.observations.write(lane, np.full(4, lane))
    actions, errors = inference.act()
    assert not errors
    assert [actions[lane].tolist() for lane in range(3)] == [[0, 0], [1, 1], [2, 2]]


# ------------------------------------------------------------------------------ the numerics key

KEYED: dict[str, Callable[[int], tuple[Any, dict[str, Any]]]] = {
    "network": lambda seed: (network(seed), {}),
    "sampled network": lambda seed: (network(seed, deterministic=False), {"deterministic": False}),
    "logits": lambda seed: (network(seed, THREE), {"actions": THREE}),
    "recurrent": lambda seed: (make_gru(OBSERVATIONS, THREE, seed=seed), {"actions": THREE}),
    "row": lambda seed: (CallablePolicy(lambda x: plus_position(x) + seed), {}),
    "nested": lambda seed: (
        CallablePolicy(lambda x: total(x["a"]) + x["b"][0][:, None] + x["b"][1].max((1, 2))[:, None] + seed),
        {"observations": NESTED},
    ),
    "pair": lambda seed: (
        CallablePolicy(lambda x: total(x[0]) + x[1].sum(1)[:, None] + seed),
        {"observations": spaces.Tuple((OBSERVATIONS, spaces.MultiBinary(9)))},
    ),
}


def key_of(name: str, lanes: int, seed: int = 0) -> dict[str, Any]:
    policy, options = KEYED[name](seed)
    return infer(policy, lanes, **options).numerics


@pytest.mark.parametrize("name", KEYED)
def test_the_key_does_not_depend_on_the_number_of_lanes(name: str) -> None:
    """Runners of any layout have the same key for the same policy, so their results can be told to be equal."""
    assert len({repr(key_of(name, lanes)) for lanes in LANES}) == 1


@pytest.mark.parametrize("name", KEYED)
def test_the_key_tells_other_weights_apart(name: str) -> None:
    """The digest of the outputs is part of the key, whatever the policy's rows depend on."""
    assert key_of(name, 3, seed=0)["outputs"]
    assert key_of(name, 3, seed=0)["outputs"] != key_of(name, 3, seed=1)["outputs"]


def test_the_key_names_the_machine() -> None:
    """Instruction set, MKL mode, threads and torch's version are in the key; it is empty before the probe."""
    inference = RowInference(network(), OBSERVATIONS, ACTIONS, 2, PolicySection(actions="none"))
    assert inference.numerics == {}
    inference.probe()
    machine = {"torch", "cpu_capability", "mkl_cbwr", "num_threads", "device"}
    assert set(inference.numerics) == {"reference", "outputs"} | machine
    first = dict(inference.numerics)
    inference.probe()
    assert inference.numerics == first


def test_the_probe_leaves_no_trace() -> None:
    """Lanes, observations, recurrent state and global random state are as they were before the probe."""
    policy = Recurrent()
    inference = infer(policy, 3)
    inference.begin(1, 5)
    inference.observations.write(1, np.ones(4))
    inference.act()
    torch.manual_seed(1)
    before = (random.getstate(), repr(np.random.get_state()), torch.get_rng_state().tolist())  # noqa: NPY002
    inference.probe()
    assert before == (random.getstate(), repr(np.random.get_state()), torch.get_rng_state().tolist())  # noqa: NPY002
    actions, _ = inference.act()
    assert actions[1].tolist() == [1002.0, 1002.0]
    assert inference.live.tolist()[:3] == [False, True, False]


# ------------------------------------------------------------------------------ shapes


class Sliced(nn.Module):
    """Returns a part of the observations as logits."""

    def __init__(self, rows: int | None, columns: int) -> None:
        super().__init__()
        self.part = slice(rows), slice(columns)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[self.part]


@pytest.mark.parametrize("lanes", [1, 3, 24])
@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize(
    ("returned", "key"),
    [
        (lambda x: np.zeros((len(x) + 1, 2)), "action"),
        (lambda x: np.zeros(len(x)), "action"),
        (lambda x: None, "action"),
        (lambda x: {"action": np.zeros((len(x), 2))}, "action"),
        (lambda x: [[0.0, 1.0]] * (len(x) - 1) + [[0.0]], "action"),
        (lambda x: np.array([["a", "b"]] * len(x)), "action"),
        (Sliced(None, 2), "logits"),
        (Sliced(1, 3), "forward"),
    ],
)
def test_a_wrong_shape_is_found_by_the_probe(returned: Any, key: str, lanes: int, deterministic: bool) -> None:
    """Before any episode runs, actions that fit no observation are a PolicyError; of a module, too, sampled or not."""
    module = isinstance(returned, nn.Module)
    policy = ModulePolicy(returned, THREE, deterministic) if module else CallablePolicy(returned)
    with refused(PolicyError, key):
        infer(policy, lanes, actions=THREE if module else ACTIONS, deterministic=deterministic)


def test_nested_observations_and_actions_pass() -> None:
    """Dicts and tuples go in and come out as the spaces say, one action per lane."""
    actions = spaces.Dict({"move": ACTIONS, "more": spaces.Tuple((spaces.Discrete(3), spaces.MultiBinary(2)))})

    def function(x: Any) -> Any:
        index = x["b"][0] % 3
        return {"move": total(x["a"]), "more": (index, np.stack([index > 0, index > 1], 1))}

    for lanes in (1, 3, 24):
        inference = infer(CallablePolicy(function), lanes, NESTED, actions)
        lane = lanes - 1
        inference.begin(lane, 1)
        inference.observations.write(lane, {"a": np.arange(4), "b": (5, np.zeros((3, 3), np.uint8))})
        chosen, errors = inference.act()
        assert not errors
        assert actions.contains(chosen[lane])
        assert chosen[lane]["move"].tolist() == [0, 3]
        assert (chosen[lane]["more"][0], chosen[lane]["more"][1].tolist()) == (2, [1, 1])


# ------------------------------------------------------------------------------ recurrent state


class Recurrent:
    """Counts its steps, and fails or returns NaN for observations of 666 or 667.

    With ``in_place`` it writes into the state that it was given, with ``positional`` its rows depend on their place.
    """

    def __init__(self, *, in_place: bool = False, positional: bool = False, torch_state: bool = False) -> None:
        self.in_place = in_place
        self.positional = positional
        self.torch_state = torch_state

    def initial_state(self, batch_size: int) -> Any:
        sums = np.zeros((batch_size, 2))
        return {"sums": torch.from_numpy(sums) if self.torch_state else sums, "calls": np.zeros(batch_size, np.int64)}

    def act(self, observations: Array, state: Any, live: Any, noise: Any) -> tuple[Array, Any]:
        addend = torch.from_numpy(total(observations)) if self.torch_state else total(observations)
        if self.in_place:
            state["sums"] += addend
            state["calls"] += 1
        else:
            state = {"sums": state["sums"] + addend, "calls": state["calls"] + 1}
        if (observations[live] == 666).any():
            raise ZeroDivisionError("666 is in the batch")
        sums = state["sums"].numpy() if self.torch_state else state["sums"]
        actions = sums + 1000.0 * (state["calls"] - 1)[:, None]
        if noise is not None:
            actions = actions + noise.uniform(2)
        if self.positional:
            actions = actions + np.arange(len(actions))[:, None]
        actions[(observations == 667).any(1)] = np.nan
        return actions, state


VARIANTS = {
    "copying": {},
    "in place": {"in_place": True},
    "row by row": {"positional": True},
    "row by row, in place": {"positional": True, "in_place": True},
    "torch": {"torch_state": True},
    "torch, in place": {"torch_state": True, "in_place": True},
}


@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("lanes", [1, 3, 20])
@pytest.mark.parametrize("variant", VARIANTS)
def test_state_and_noise_belong_to_the_lane(variant: str, lanes: int, deterministic: bool) -> None:
    """Through a random history of beginnings and ends, each lane acts as if it were alone in the world."""
    rng = random.Random(lanes)
    inference = infer(Recurrent(**VARIANTS[variant]), lanes, deterministic=deterministic)
    model: dict[int, tuple[int, int, Array]] = {}
    for _ in range(60):
        for lane in range(lanes):
            if lane in model and rng.random() < 0.2:
                inference.end(lane)
                del model[lane]
            elif lane not in model and rng.random() < 0.5:
                model[lane] = (rng.randrange(2**31), 0, np.zeros(2))
                inference.begin(lane, model[lane][0])
            value = rng.choice([666, 667]) if rng.random() < 0.05 else rng.randrange(600)
            inference.observations.write(lane, np.full(4, value))
        actions, errors = inference.act()
        for lane, (seed, steps, sums) in list(model.items()):
            observation = inference.observations.arrays[lane : lane + 1]
            if observation[0, 0] >= 666:
                assert isinstance(errors.pop(lane), ZeroDivisionError if observation[0, 0] == 666 else PolicyError)
                inference.end(lane)
                del model[lane]
                continue
            sums = sums + total(observation)[0]
            expected = sums + 1000.0 * steps
            if not deterministic:
                expected = expected + EpisodeNoise(np.array([seed]), np.array([steps])).uniform(2)[0]
            assert actions[lane].tobytes() == expected.tobytes()
            model[lane] = (seed, steps + 1, sums)
        assert not errors


# ------------------------------------------------------------------------------ one bad row


def blind(x: Array) -> Array:
    """Fails for its whole batch, and cannot know which of its rows are live."""
    if (x == 666).any():
        raise ZeroDivisionError("666 is in the batch")
    return np.where((x == 667).any(1)[:, None], np.nan, total(x))


@pytest.mark.parametrize("variant", [*VARIANTS, "blind"])
@pytest.mark.parametrize("lanes", [1, 3, 20, 64])
@pytest.mark.parametrize(("poison", "error"), [(666.0, ZeroDivisionError), (667.0, PolicyError)])
def test_one_bad_row_costs_one_lane(variant: str, lanes: int, poison: float, error: type[Exception]) -> None:
    """The policy's own error is told for its lane alone, and once, though the row stays as it was.

    The others act as without it, and advance once.
    """
    bad = lanes // 2
    policy: Any = CallablePolicy(blind) if variant == "blind" else Recurrent(**VARIANTS[variant])

    def play(poisoned: bool) -> tuple[dict[int, list[Any]], dict[int, Exception]]:
        inference = infer(policy, lanes)
        for lane in range(lanes):
            inference.begin(lane, lane)
        played: dict[int, list[Any]] = {lane: [] for lane in range(lanes) if lane != bad}
        seen: dict[int, Exception] = {}
        for step in range(4):
            for lane in np.flatnonzero(inference.live[:lanes]).tolist():
                value = poison if poisoned and (step, lane) == (1, bad) else step + 10 * lane
                inference.observations.write(lane, np.full(4, value))
            actions, errors = inference.act()
            seen |= errors
            for lane, chosen in played.items():
                chosen.append(actions[lane].tolist())
            for lane in errors:
                inference.end(lane)
        return played, seen

    undisturbed, no_errors = play(poisoned=False)
    disturbed, errors = play(poisoned=True)
    assert not no_errors
    assert list(errors) == [bad]
    assert type(errors[bad]) is error
    assert disturbed == undisturbed


class Sized(nn.Module):
    """Writes down the size of every batch, and lets rows leak into each other as a matrix product may."""

    def __init__(self, error: Exception | None = None) -> None:
        super().__init__()
        self.sizes: list[int] = []
        self.error = error

    def initial_state(self, batch_size: int) -> Array:
        return np.zeros((batch_size, 1))

    def act(self, observations: Any, state: Any, live: Any, noise: Any) -> Any:
        self.sizes.append(len(observations))
        if self.error is not None:
            raise self.error
        if (observations > 90).any():
            raise ValueError("too great")
        return observations[:, :2] + state, state + 1


def batched(policy: Any, lanes: int) -> RowInference:
    return infer(policy, lanes, inference="batched")


def test_batched_inference_is_one_pass_over_the_live_rows() -> None:
    """No probe but of the shapes; state follows its row, and the key and a note say how it is computed."""
    inference = batched(policy := Sized(), 40)
    policy.sizes = [BLOCK]
    for lanes in ([3], [3, 17, 39]):
        for lane in lanes:
            inference.observations.arrays[lane] = lane
            if not inference.live[lane]:
                inference.begin(lane, lane)
        actions, errors = inference.act()
        assert not errors
    assert policy.sizes == [BLOCK, 1, 3]
    assert [actions[lane].tolist() for lane in (3, 17, 39)] == [[4, 4], [17, 17], [39, 39]]
    assert inference.numerics["reference"] == "batched"
    assert untold(inference.notes[0], "policy.inference", "batched") == []


def test_batched_inference_finds_the_row_that_the_policy_fails_on() -> None:
    inference = batched(Sized(), 3)
    for lane in range(3):
        inference.begin(lane, lane)
        inference.observations.arrays[lane] = (1, 99, 3)[lane]
    actions, errors = inference.act()
    assert list(errors) == [1]
    assert [actions[lane].tolist() for lane in (0, 2)] == [[1, 1], [3, 3]]


@pytest.mark.parametrize("make", [infer, batched])
def test_a_policy_that_is_unavailable_is_no_episodes_fault(make: Any) -> None:
    """The error leaves the runner, during the probe and during an episode, and no row is charged."""
    gone = PolicyUnavailable("server gone", key="server")
    with refused(PolicyUnavailable, "server"):
        make(Sized(gone), 2)
    inference = make(policy := Sized(), 2)
    inference.begin(0, 0)
    policy.error, policy.sizes = gone, []
    with refused(PolicyUnavailable, "server"):
        inference.act()
    assert len(policy.sizes) == 1


# ------------------------------------------------------------------------------ clipped actions


class Push(nn.Module):
    """A policy of one number, far beyond all bounds for what no environment observes."""

    def __init__(self, force: float) -> None:
        super().__init__()
        self.force = nn.Parameter(torch.tensor(force))

    def forward(self, observations: torch.Tensor) -> torch.Tensor:
        made_up = (observations[:, :1] ** 2 + observations[:, 1:2] ** 2 - 1).abs() > 0.01
        return torch.where(made_up, 99.0, self.force.expand(len(observations), 1))


@pytest.mark.parametrize(("mode", "said"), [("clip", "of the bounds of the"), ("unsquash", r"of [-1, 1], which is")])
@pytest.mark.parametrize("lanes", [1, 3])
def test_a_result_says_that_actions_were_clipped(lanes: int, mode: Any, said: str) -> None:
    """Those of its own evaluation; the observations that a probe makes up do not count."""
    config = EvalConfig().environment("Pendulum-v1").evaluation(num_episodes=3)
    config.runners(num_envs_per_runner=lanes).policy(Push(2.0), actions=mode)
    bound = 2.0 if mode == "clip" else 1.0
    with EvalRunnerGroup(config) as group:
        clipped = []
        for force in (bound, bound + 0.5, -bound / 2):
            group.sync_weights(Push(force))
            clipped.append([note for note in group.evaluate().notes if "clipped" in note])
    assert [len(notes) for notes in clipped] == [0, 1, 0]
    assert said in clipped[1][0]


class Numbered:
    """A recurrent policy whose state depends on the row in which an episode starts."""

    def initial_state(self, batch_size: int) -> Array:
        return np.arange(batch_size, dtype=np.float64)

    def act(self, observations: Any, state: Any, live: Any, noise: Any) -> tuple[Array, Any]:
        return np.zeros(len(observations), np.int64), state


class Remembering(Numbered):
    """A recurrent policy whose state consists of objects."""

    def initial_state(self, batch_size: int) -> Array:
        return np.array([object() for _ in range(batch_size)], object)


def test_a_recurrent_state_of_objects_is_not_compared() -> None:
    result = evaluate(EvalConfig().environment("CartPole-v1").evaluation(num_episodes=2), Remembering())
    assert result.status == "complete"


def test_a_recurrent_state_that_depends_on_the_row_is_refused() -> None:
    """The number of environments would change the episodes."""
    with refused(PolicyError, key="initial_state"):
        evaluate(EvalConfig().environment("CartPole-v1").evaluation(num_episodes=2), Numbered())
