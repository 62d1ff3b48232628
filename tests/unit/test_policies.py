"""How the user's object becomes a policy: what actions its outputs mean, and that the object itself is left alone."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import numpy.typing as npt
import pytest
import safetensors.numpy
import torch
import trainer_state
from gymnasium import spaces
from scipy import special, stats
from torch import nn

from rl_eval.config.builder import EvalConfig
from rl_eval.config.references import import_attribute
from rl_eval.config.settings import PolicySection
from rl_eval.errors import ConfigError, PolicyError
from rl_eval.execution.evaluate import evaluate
from rl_eval.execution.group import EvalRunnerGroup
from rl_eval.policies import CallablePolicy, adapt_policy
from rl_eval.policies.inference.spaces import ActionReader
from rl_eval.policies.mlp import MLPActor, make_mlp
from rl_eval.policies.module import ModulePolicy
from rl_eval.policies.noise import EpisodeNoise
from rl_eval.protocols import Policy
from tests.refused import refused

Array = npt.NDArray[Any]

WEIGHTS = Path(__file__).parents[2] / "configs" / "weights"
OBSERVATIONS = spaces.Box(-1, 1, (3,), np.float32)


class Constant(nn.Module):
    """Returns the same output for every row, or what a function of the batch makes."""

    def __init__(self, output: Any) -> None:
        super().__init__()
        self.anchor = nn.Parameter(torch.zeros(1))
        self._output = output

    def forward(self, observations: Any) -> Any:
        return self._output(observations) if callable(self._output) else self._output.expand(len(observations), -1)


class Stateful:
    """The least object that implements the protocol."""

    module: nn.Module
    args: tuple[Any, ...]

    def __init__(self, *args: Any) -> None:
        self.args = args

    def act(self, observations: Any, state: Any, live: Any, noise: Any) -> tuple[Any, Any]:
        return np.zeros(len(live), int), state


def act(
    module: nn.Module, space: gym.Space[Any], batch: int = 4, *, deterministic: bool = True, seed: int = 0
) -> Array:
    """Run a module as a policy, on rows of zeros whose episodes have consecutive seeds."""
    policy = ModulePolicy(module, space, deterministic)
    noise = None if deterministic else EpisodeNoise(np.arange(seed, seed + batch), np.zeros(batch, np.int64))
    with torch.inference_mode():
        actions, state = policy.act(np.zeros((batch, 3), np.float32), None, np.ones(batch, bool), noise)
    assert state is None
    checked: Array = ActionReader(space, "clip").read(actions, np.ones(batch, bool))
    return checked


def frequencies_fit(counts: Array, probabilities: Array) -> bool:
    return bool(stats.chisquare(counts, probabilities * counts.sum()).pvalue > 1e-4)


# ------------------------------------------------------------------------------ deterministic actions


FIRST_GREATEST = [[0.0, 3.0, 1.0], [5.0, 5.0, 1.0], [-3.0, -2.0, -1.0]]
PARTS = [[0.0, 1.0, 9.0, 0.0, 0.0], [1.0, 0.0, 0.0, 0.0, 9.0]]
MODES: list[tuple[gym.Space[Any], list[list[float]], list[Any]]] = [
    (spaces.Discrete(3), FIRST_GREATEST, [1, 0, 2]),
    (spaces.Discrete(3, start=10), FIRST_GREATEST, [11, 10, 12]),
    (spaces.Discrete(3, start=-1), FIRST_GREATEST, [0, -1, 1]),
    (spaces.MultiDiscrete([2, 3]), PARTS, [[1, 0], [0, 2]]),
    (spaces.MultiDiscrete([2, 3], start=[4, -4]), PARTS, [[5, -4], [4, -2]]),
    (spaces.MultiDiscrete([[2, 3], [2, 2]]), [[0, 1, 0, 0, 1, 1, 0, 0, 1]], [[[1, 2], [0, 1]]]),
    (spaces.MultiBinary(4), [[-1.0, 0.0, 1.0, 1e-9]], [[0, 0, 1, 1]]),
    (spaces.MultiBinary((2, 2)), [[-1.0, 0.0, 1.0, 1e-9]], [[[0, 0], [1, 1]]]),
    (spaces.Box(-1, 1, (2,)), [[0.25, -0.5]], [[0.25, -0.5]]),
    (spaces.Box(-1, 1, (), np.float64), [[0.25], [0.5]], [0.25, 0.5]),
    (spaces.Box(-1, 1, (2, 2), np.float64), [[0.0, 0.25, 0.5, 0.75]], [[[0.0, 0.25], [0.5, 0.75]]]),
]


@pytest.mark.parametrize(("space", "output", "actions"), MODES, ids=lambda value: str(value)[:30])
def test_actions_are_the_mode_in_the_shape_of_the_space(space: Any, output: Any, actions: Any) -> None:
    """The first greatest logit of each part, the positive bits, or the numbers themselves; row by row."""
    found = act(Constant(lambda observations: torch.tensor(output, dtype=torch.float32)), space, len(output))
    assert found.tolist() == actions


def test_the_mode_of_a_gaussian_is_its_mean() -> None:
    """A module may return (mean, log_std)."""
    mean = torch.tensor([[0.25, -0.5]])
    module = Constant(lambda x: (mean.expand(len(x), 2), torch.ones(2)))
    assert act(module, spaces.Box(-1, 1, (2,)), 3).tolist() == [[0.25, -0.5]] * 3


@pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")
def test_a_module_without_forward_is_refused() -> None:
    """As agents of CleanRL are; one that was compiled, or has it as an attribute of its own, does act."""
    agent = type("Agent", (nn.Module,), {"get_action": print})()
    with refused(ConfigError, "policy.policy"):
        adapt(agent)
    agent.forward = lambda observations: torch.zeros(len(observations), 2)
    for acting in (agent, torch.jit.script(nn.Linear(2, 2))):
        adapt(acting)


# ------------------------------------------------------------------------------ sampled actions

LOGITS = [1.0, 0.0, -2.0, 0.5]
MANY = 20_000


def test_discrete_samples_follow_the_softmax() -> None:
    """Over 20000 episodes the frequencies are those of the softmax, from the space's start on."""
    counts = np.bincount(
        act(Constant(torch.tensor([LOGITS])), spaces.Discrete(4), MANY, deterministic=False), minlength=4
    )
    assert frequencies_fit(counts, special.softmax(LOGITS))
    shifted = act(Constant(torch.tensor([LOGITS])), spaces.Discrete(4, start=5), MANY, deterministic=False)
    assert (np.bincount(shifted - 5, minlength=4) == counts).all()


def test_multi_discrete_samples_follow_the_softmax_of_each_part() -> None:
    """Each part has its own distribution, and the parts are independent."""
    logits = torch.tensor([[*LOGITS, 0.0, 1.0]])
    drawn = act(Constant(logits), spaces.MultiDiscrete([4, 2]), MANY, deterministic=False)
    joint = np.bincount(drawn[:, 0] * 2 + drawn[:, 1], minlength=8)
    assert frequencies_fit(joint, np.outer(special.softmax(LOGITS), special.softmax([0.0, 1.0])).ravel())


def test_multi_binary_samples_follow_the_sigmoid() -> None:
    """Each bit is set with the sigmoid of its logit; huge logits are certain, and warn of nothing."""
    logits = torch.tensor([[0.0, 1.0, -1.5, 1000.0, -1000.0]])
    drawn = act(Constant(logits), spaces.MultiBinary(5), MANY, deterministic=False)
    ones = drawn.sum(0)
    assert (ones[3], ones[4]) == (MANY, 0)
    for bit, logit in enumerate((0.0, 1.0, -1.5)):
        probability = special.expit(logit)
        assert frequencies_fit(np.array([ones[bit], MANY - ones[bit]]), np.array([probability, 1 - probability]))


@pytest.mark.parametrize("std_per_row", [False, True])
def test_box_samples_follow_the_gaussian(std_per_row: bool) -> None:
    """Samples are mean + exp(log_std) * standard normal, dimension by dimension, and independent of each other."""
    mean, log_std = torch.tensor([0.5, -1.0]), torch.tensor([0.0, -1.0])
    module = Constant(lambda x: (mean.expand(len(x), 2), log_std.expand(len(x), 2) if std_per_row else log_std))
    drawn = act(module, spaces.Box(-np.inf, np.inf, (2,), np.float64), MANY, deterministic=False)
    standard = (drawn - mean.numpy()) / np.exp(log_std.numpy())
    for dimension in range(2):
        assert stats.kstest(standard[:, dimension], "norm").pvalue > 1e-4
    assert abs(np.corrcoef(standard.T)[0, 1]) < 5 / np.sqrt(MANY)


def test_a_sample_depends_on_seed_and_step_alone() -> None:
    """Wherever an episode stands in the batch, and whoever stands beside it, it draws the same action."""
    module, space = Constant(torch.tensor([LOGITS])), spaces.Discrete(4)
    together = act(module, space, 100, deterministic=False, seed=7)
    alone = [int(act(module, space, 1, deterministic=False, seed=7 + row)[0]) for row in range(100)]
    assert together.tolist() == alone
    assert len(set(alone)) == 4


def test_masked_actions_are_never_sampled() -> None:
    """A logit of minus infinity is a probability of zero, at either end of the row."""
    logits = torch.tensor([[-torch.inf, 0.0, -torch.inf, 0.0, -torch.inf]])
    drawn = act(Constant(logits), spaces.Discrete(5), MANY, deterministic=False)
    assert set(drawn.tolist()) == {1, 3}


def test_large_logits_do_not_overflow() -> None:
    """Only differences of logits matter, however large they are."""
    small = act(Constant(torch.tensor([LOGITS])), spaces.Discrete(4), 1000, deterministic=False)
    large = act(Constant(torch.tensor([LOGITS]).double() + 1e6), spaces.Discrete(4), 1000, deterministic=False)
    assert (small == large).mean() > 0.999


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("deterministic", [True, False])
def test_modules_of_any_floating_dtype_act(dtype: torch.dtype, deterministic: bool) -> None:
    """Observations are cast to the module's dtype, and outputs of any dtype are read."""
    module = nn.Linear(3, 4).to(dtype)
    with torch.no_grad():
        module.weight.zero_()
        module.bias.copy_(torch.tensor([0.0, 0.0, 9.0, 0.0]))
    assert act(module, spaces.Discrete(4), 1, deterministic=deterministic, seed=3).tolist() == [2]


# ------------------------------------------------------------------------------ what a module is called with


def received(observations: Any, **attributes: Any) -> Any:
    """Return what a module of float64, with attributes, is called with."""
    seen: list[Any] = []

    def forward(given: Any) -> torch.Tensor:
        seen.append(given)
        return torch.zeros(2, 2)

    module = Constant(forward).double()
    vars(module).update(attributes)
    ModulePolicy(module, spaces.Discrete(2), True).act(observations, None, np.ones(2, bool), None)
    return seen[-1]


def test_floating_observations_are_cast_to_the_modules_dtype_and_others_are_not() -> None:
    """A float64 module gets float64; images and indices keep their integers; the structure stays."""
    seen = received({"a": np.ones((2, 3), np.float32), "b": (np.ones((2, 4), np.uint8), np.ones(2, np.int64))})
    assert seen["a"].dtype == torch.float64
    assert (seen["b"][0].dtype, seen["b"][1].dtype) == (torch.uint8, torch.int64)
    assert seen["b"][0].shape == (2, 4)


@pytest.mark.parametrize(("declared", "expected"), [(torch.float32, torch.float32), (None, torch.float16)])
def test_a_module_may_declare_its_observation_dtype(declared: Any, expected: torch.dtype) -> None:
    """``observation_dtype`` wins over the parameters' dtype; None keeps the space's own."""
    assert received(np.ones((2, 3), np.float16), observation_dtype=declared).dtype == expected


# ------------------------------------------------------------------------------ what is refused


each_kind_of_space = pytest.mark.parametrize(
    "space",
    [spaces.Discrete(2), spaces.MultiDiscrete([2]), spaces.MultiBinary(2), spaces.Box(-1, 1, (2,))],
    ids=lambda space: type(space).__name__,
)


@pytest.mark.parametrize("deterministic", [True, False])
@each_kind_of_space
@pytest.mark.parametrize("value", [np.nan, [np.nan, 0.0]], ids=["all", "one"])
def test_nan_is_the_policys_fault(value: Any, space: gym.Space[Any], deterministic: bool) -> None:
    """A NaN in what the module computes is told as that, never read as an action."""
    row = torch.tensor(value).expand(2)
    output = (lambda x: (row.expand(len(x), 2), torch.zeros(2))) if isinstance(space, spaces.Box) else row[None]
    with refused(PolicyError, "output"):
        act(Constant(output), space, 3, deterministic=deterministic)


BOX = spaces.Box(-1, 1, (2,))


@pytest.mark.parametrize(
    ("space", "given"),
    [
        (BOX, [0.0, np.nan]),
        (BOX, [0.0, np.inf]),
        (spaces.Discrete(2), [np.inf, 0.0]),
        (spaces.Discrete(2), [0.0, np.inf]),
        (spaces.Discrete(2), [-np.inf, -np.inf]),
    ],
)
def test_what_is_no_distribution_cannot_be_sampled_from(space: gym.Space[Any], given: list[float]) -> None:
    """A spread that is NaN or infinite, an infinite logit, or minus infinity everywhere: the policy's fault."""
    row = torch.tensor(given)
    module = Constant((lambda x: (row[:1].expand(len(x), 2), row[1:].expand(2))) if space is BOX else row[None])
    with refused(PolicyError, "action" if space is BOX else "logits") as caught:
        act(module, space, 3, deterministic=False)
    assert ("nan" if np.isnan(given).any() else "inf") in caught.value.value


def test_nan_in_rows_that_are_not_live_does_not_matter() -> None:
    """Dead lanes hold garbage, and what the module makes of it is nobody's fault."""
    policy = ModulePolicy(Constant(lambda x: torch.tensor([[np.nan, 0.0], [0.0, 1.0]])), spaces.Discrete(2), True)
    actions, _ = policy.act(np.zeros((2, 3), np.float32), None, np.array([False, True]), None)
    assert actions[1] == 1


@pytest.mark.parametrize("shape", [(2, 3), (3,), (3, 2, 1), (3, 1), ()])
@each_kind_of_space
@pytest.mark.parametrize("deterministic", [True, False])
def test_outputs_of_another_shape_are_the_policys_fault(
    space: gym.Space[Any], shape: tuple[int, ...], deterministic: bool
) -> None:
    """The message says what came and what was due."""
    if shape == (3, 2, 1) and isinstance(space, (spaces.Box, spaces.MultiBinary)):
        shape = (3, 2, 2)
    output = (lambda x: (torch.zeros(shape), torch.zeros(()))) if isinstance(space, spaces.Box) else None
    module = Constant(output or (lambda x: torch.zeros(shape)))
    key = "forward" if shape[:1] != (3,) else "actions" if isinstance(space, spaces.Box) else "logits"
    came = (3, math.prod(shape[1:])) if key == "logits" and isinstance(space, spaces.MultiBinary) else shape
    with refused(PolicyError, key, value=str(came)):
        act(module, space, 3, deterministic=deterministic)


@pytest.mark.parametrize(
    ("output", "space"),
    [
        (lambda x: None, spaces.Discrete(2)),
        (lambda x: np.zeros((len(x), 2)), spaces.Discrete(2)),
        (lambda x: (torch.zeros(len(x), 2), torch.zeros(2)), spaces.Discrete(2)),
        (lambda x: {"mean": torch.zeros(len(x), 2)}, spaces.Box(-1, 1, (2,))),
        (lambda x: (torch.zeros(len(x), 2),) * 3, spaces.Box(-1, 1, (2,))),
    ],
)
def test_what_a_module_returns_must_be_readable(output: Any, space: gym.Space[Any]) -> None:
    """Anything but a tensor, or a pair of them for a Box, is the policy's fault, by the name of its type."""
    with refused(PolicyError, "forward"):
        act(Constant(output), space)


@pytest.mark.parametrize(
    ("space", "deterministic", "key"),
    [
        (spaces.Box(-1, 1, (2,)), False, "policy.deterministic"),
        (spaces.Dict({"a": spaces.Discrete(2)}), True, "policy.policy"),
        (spaces.Tuple((spaces.Discrete(2),)), True, "policy.policy"),
    ],
)
def test_what_cannot_be_read_as_actions_is_a_config_error(space: gym.Space[Any], deterministic: bool, key: str) -> None:
    """Box actions alone cannot be sampled from, and nested actions need the protocol."""
    with refused(ConfigError, key):
        act(Constant(torch.zeros(1, 2)), space, deterministic=deterministic)


# ------------------------------------------------------------------------------ which adapter


def adapt(policy: Any, action_space: gym.Space[Any] | None = None, **section: Any) -> Policy:
    return adapt_policy(PolicySection(policy=policy, **section), OBSERVATIONS, action_space or spaces.Discrete(2))


def test_a_callable_gets_the_batch_of_observations() -> None:
    """A plain function maps a numpy batch to actions; its state is None."""
    policy = adapt(lambda observations: observations[:, 0] > 0)
    assert isinstance(policy, CallablePolicy)
    actions, state = policy.act(np.array([[1.0], [-1.0]]), None, np.ones(2, bool), None)
    assert (actions.tolist(), state) == ([True, False], None)


def test_a_policy_is_taken_as_it_is() -> None:
    """An object with ``act``, a module too, is used itself; its module is put on its device in eval mode."""
    candidate = Stateful()
    candidate.module = nn.Dropout().train()
    assert adapt(candidate) is candidate
    assert adapt(candidate, deterministic=False) is candidate
    acting = type("Acting", (nn.Module,), {"act": Stateful.act})().train()
    assert adapt(acting, spaces.Dict({"a": spaces.Discrete(2)})) is acting
    module = nn.Sequential(nn.Linear(3, 2), nn.Dropout(0.5)).train()
    assert isinstance(adapt(module), ModulePolicy)
    assert not any(part.training for part in (candidate.module, acting, *module.modules()))


class Holding(nn.Module):
    """A module with ``act`` that has a part called ``module``; it pushes the cart to the side of its own weight."""

    def __init__(self, side: float) -> None:
        super().__init__()
        self.module = nn.BatchNorm1d(4)
        self.side = nn.Parameter(torch.tensor(side))

    def act(self, observations: Any, state: Any, live: Any, noise: Any) -> tuple[Any, Any]:
        assert not self.training
        return np.full(len(live), int(self.side), int), state


def test_all_weights_of_a_policy_with_a_part_called_module_arrive() -> None:
    """They are those of the whole policy, as its digest says."""
    config = EvalConfig().environment("CartPole-v1").evaluation(num_episodes=2)
    left, right = (evaluate(config, Holding(side)) for side in (0.0, 1.0))
    assert left.fingerprint != right.fingerprint
    with EvalRunnerGroup(config, Holding(0.0), threaded=False) as group:
        group.sync_weights(Holding(1.0), version=3)
        assert group.evaluate().fingerprint == right.fingerprint


def make_with_spaces(observation_space: Any, action_space: Any, size: int = 3) -> Any:
    return Stateful(observation_space, action_space, size)


def make_without_spaces(size: int = 3) -> Any:
    return Stateful(size)


def make_with_one_space(*, action_space: Any) -> Any:
    return Stateful(action_space)


def make_nothing() -> None:
    return None


def make_broken() -> Any:
    raise OSError("no such file")


def make_function() -> Any:
    return lambda observations: np.zeros(len(observations), int)


class Namespace:
    """Holds a factory."""

    make = staticmethod(make_without_spaces)


def test_a_factory_gets_the_spaces_that_it_asks_for_and_the_kwargs() -> None:
    """Parameters called ``observation_space`` and ``action_space`` are filled in; others come from the config."""
    space = spaces.Discrete(2)

    def args(name: str, **kwargs: Any) -> Any:
        return adapt(f"{__name__}:{name}", space, policy_kwargs=kwargs).args  # type: ignore[attr-defined]

    assert args("make_with_spaces") == (OBSERVATIONS, space, 3)
    assert args("make_with_spaces", size=5) == (OBSERVATIONS, space, 5)
    assert args("make_with_spaces", observation_space="mine") == ("mine", space, 3)
    assert args("make_with_one_space") == (space,)
    assert args("make_without_spaces") == (3,)
    assert args("Namespace.make", size=4) == (4,)


def lean(observations: Any, *, right: int = 1) -> Any:
    return np.full(len(observations), right)


def test_a_named_function_of_observations_is_the_policy() -> None:
    """By the name of its parameter; with ``policy_kwargs`` it is called, as any other."""
    policy = adapt(f"{__name__}:lean")
    assert isinstance(policy, CallablePolicy)
    assert policy.function is lean
    with refused(ConfigError, "policy.policy_kwargs", value="observations"):
        adapt(f"{__name__}:lean", policy_kwargs={"right": 0})


def test_what_a_factory_makes_is_adapted() -> None:
    """A factory may make a module, a callable or a policy."""
    assert isinstance(adapt("rl_eval.policies.mlp:make_mlp", policy_kwargs={"hidden": [8]}), ModulePolicy)
    assert isinstance(adapt(f"{__name__}:make_function"), CallablePolicy)


@pytest.mark.parametrize(
    ("section", "key"),
    [
        ({"policy": None}, "policy.policy"),
        ({"policy": "make_policy"}, None),
        ({"policy": f"{__name__}:WEIGHTS"}, "policy.policy"),
        ({"policy": f"{__name__}:make_nothing"}, "policy.policy"),
        ({"policy": 3}, "policy.policy"),
        ({"policy": f"{__name__}:make_without_spaces", "policy_kwargs": {"sise": 3}}, "policy.policy_kwargs"),
        ({"policy": Stateful(), "policy_kwargs": {"size": 3}}, "policy.policy_kwargs"),
        ({"policy": len, "deterministic": False}, "policy.deterministic"),
        ({"policy": f"{__name__}:make_function", "deterministic": False}, "policy.deterministic"),
    ],
)
def test_what_cannot_be_a_policy_is_a_config_error(section: dict[str, Any], key: str | None) -> None:
    """A missing or wrong path, an object that cannot act, and kwargs or sampling without a use, are named."""
    with refused(ConfigError, key):
        adapt(**section)


def test_what_a_factory_raises_is_not_disguised() -> None:
    """The factory's own error passes."""
    with pytest.raises(OSError, match="no such file"):
        adapt(f"{__name__}:make_broken")


@pytest.mark.parametrize("path", ["", ":", "json", "json:", ":dumps", "json:dumps.no", "no_such.module:x", "json:nope"])
def test_a_wrong_path_names_its_key(path: str) -> None:
    with refused(ConfigError, "section.key", value=path):
        import_attribute("section.key", path)


# ------------------------------------------------------------------------------ the caller's module


def test_the_callers_module_is_left_alone() -> None:
    """An evaluation in this process changes no weight, mode, gradient or random state of the trainer's, who goes on."""
    module = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 2)).train()
    module[3].eval()
    module[0].bias.requires_grad_(False)
    module(torch.ones(3, 4)).sum().backward()
    before = trainer_state.observe(module)
    config = EvalConfig().environment("CartPole-v1").policy(deterministic=False).evaluation(num_episodes=5)
    first, second = (evaluate(config, module) for _ in range(2))
    trainer_state.compare(before, trainer_state.observe(module))
    assert first.fingerprint == second.fingerprint
    assert not any(parameter.is_inference() for parameter in module.parameters())
    optimizer = torch.optim.Adam(module.parameters())
    module(torch.ones(3, 4)).sum().backward()
    optimizer.step()


# ------------------------------------------------------------------------------ the shipped network


def forward(weights: dict[str, Array], observations: Array) -> Array:
    """Compute the network from its documentation, with numpy in float64."""
    hidden = observations.astype(np.float64)
    if "obs_mean" in weights:
        hidden = np.clip((hidden - weights["obs_mean"]) / np.sqrt(weights["obs_var"] + 1e-8), -10, 10)
    for layer in ("body.0", "body.2"):
        hidden = np.tanh(hidden @ weights[f"{layer}.weight"].T + weights[f"{layer}.bias"])
    return np.asarray(hidden @ weights["head.weight"].T + weights["head.bias"])


def load(name: str, observation_space: Any, action_space: Any, **kwargs: Any) -> tuple[MLPActor, dict[str, Array]]:
    weights = safetensors.numpy.load_file(WEIGHTS / name)
    module = make_mlp(observation_space, action_space, **kwargs)
    module.load_state_dict({key: torch.from_numpy(value) for key, value in weights.items()})
    return module, weights


@pytest.mark.parametrize("name", ["cartpole_ppo_early.safetensors", "cartpole_ppo_final.safetensors"])
def test_the_cartpole_network_is_what_its_documentation_says(name: str) -> None:
    """Logits equal a computation by hand, and so do the actions."""
    observation_space, action_space = gym.make("CartPole-v1").observation_space, spaces.Discrete(2)
    module, weights = load(name, observation_space, action_space)
    observations = np.random.default_rng(0).normal(size=(500, 4)).astype(np.float32)
    expected = forward(weights, observations)
    with torch.inference_mode():
        logits = module(torch.from_numpy(observations)).numpy()
        actions, _ = ModulePolicy(module, action_space, True).act(observations, None, np.ones(500, bool), None)
    np.testing.assert_allclose(logits, expected, rtol=1e-3, atol=1e-4)
    decided = np.abs(expected[:, 0] - expected[:, 1]) > 1e-3
    assert (actions == expected.argmax(1))[decided].all()
    assert 0 < actions.mean() < 1
    assert decided.mean() > 0.9


@pytest.mark.process  # Something under MuJoCo asks the system for its name.
def test_the_hopper_network_is_what_its_documentation_says() -> None:
    """The normalizer works in float64, the mean equals a computation by hand, and samples add exp(log_std) * noise."""
    pytest.importorskip("mujoco")
    env = gym.make("Hopper-v5")
    module, weights = load(
        "hopper_ppo_final.safetensors", env.observation_space, env.action_space, normalize_observations=True
    )
    assert module.obs_mean.dtype == torch.float64
    observations = np.random.default_rng(0).normal(size=(200, 11)) * 5
    expected = forward(weights, observations)
    live = np.ones(200, bool)
    seeds, steps = np.arange(200), np.full(200, 17)
    with torch.inference_mode():
        mean, _ = ModulePolicy(module, env.action_space, True).act(observations, None, live, None)
        given = EpisodeNoise(seeds, steps)
        sampled, _ = ModulePolicy(module, env.action_space, False).act(observations, None, live, given)
    np.testing.assert_allclose(mean, expected, rtol=1e-3, atol=1e-4)
    noise = EpisodeNoise(seeds, steps).normal(3)
    np.testing.assert_allclose(sampled, mean + np.exp(weights["log_std"].astype(np.float64)) * noise, rtol=1e-6)
    assert mean.shape == sampled.shape == (200, 3)


def test_the_normalizer_is_what_its_documentation_says() -> None:
    """clip((obs - mean) / sqrt(var + 1e-8), -10, 10), in float64 before it becomes float32: tiny variances and all."""
    module = make_mlp(spaces.Box(-1, 1, (4,)), spaces.Discrete(4), hidden=(), normalize_observations=True)
    mean, var = np.array([1e6, 0.0, 1.0, -2.0]), np.array([1.0, 0.0, 1e-8, 4.0])
    with torch.no_grad():
        module.head.weight.copy_(torch.eye(4))
        module.head.bias.zero_()
        module.obs_mean.copy_(torch.from_numpy(mean))
        module.obs_var.copy_(torch.from_numpy(var))
    observations = np.array([[1e6 + 1e-3, 1e-4, 1.0 + 1e-4, 50.0], [1e6 - 1e-3, -1.0, 1.0, -2.5]])
    expected = np.clip((observations - mean) / np.sqrt(var + 1e-8), -10, 10)
    with torch.inference_mode():
        np.testing.assert_allclose(module(torch.from_numpy(observations)).numpy(), expected, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("activation", ["tanh", "relu", "elu", "silu"])
@pytest.mark.parametrize("hidden", [(), (5,), (5, 6, 7)])
def test_the_network_has_the_layers_that_were_asked_for(hidden: tuple[int, ...], activation: str) -> None:
    """Widths and activation follow the arguments; no hidden layer is a linear policy."""
    module = make_mlp(spaces.Box(-1, 1, (2, 3)), spaces.Discrete(4), hidden=list(hidden), activation=activation)
    observations = torch.randn(10, 2, 3, generator=torch.Generator().manual_seed(0))
    x = observations.reshape(10, 6)
    for layer in range(len(hidden)):
        x = getattr(torch.nn.functional, activation)(nn.functional.linear(x, *module.body[2 * layer].parameters()))
    expected = nn.functional.linear(x, module.head.weight, module.head.bias)
    assert torch.equal(module(observations), expected)
    assert [module.body[2 * i].out_features for i in range(len(hidden))] == list(hidden)


def test_the_network_reads_any_box_and_acts_in_any_box() -> None:
    """Images are flattened; a Box of any shape gets one mean and one log_std per number."""
    module = make_mlp(spaces.Box(0, 255, (4, 4, 3), np.uint8), spaces.Box(-1, 1, (2, 2)))
    mean, log_std = module(torch.zeros(5, 4, 4, 3, dtype=torch.uint8))
    assert (tuple(mean.shape), tuple(log_std.shape)) == ((5, 4), (4,))


@pytest.mark.parametrize(
    ("observation_space", "action_space", "kwargs", "key"),
    [
        (spaces.Discrete(3), spaces.Discrete(2), {}, "observation_space"),
        (spaces.Dict({"a": OBSERVATIONS}), spaces.Discrete(2), {}, "observation_space"),
        (OBSERVATIONS, spaces.MultiBinary(2), {}, "action_space"),
        (OBSERVATIONS, spaces.Tuple((spaces.Discrete(2),)), {}, "action_space"),
        (OBSERVATIONS, spaces.Discrete(2), {"activation": "tnah"}, "policy.policy_kwargs.activation"),
    ],
)
def test_the_network_refuses_what_it_cannot_do(
    observation_space: Any, action_space: Any, kwargs: Any, key: str
) -> None:
    with refused(ConfigError, key):
        make_mlp(observation_space, action_space, **kwargs)


# ------------------------------------------------------------------------------ weights that nobody has again


def drawn() -> nn.Module:
    return nn.Linear(4, 2)


def drawn_in_part() -> nn.Module:
    module = drawn()
    module.bias.data.zero_()  # type: ignore[operator, union-attr]
    return module


def loaded() -> nn.Module:
    module = drawn()
    module.load_state_dict({"weight": torch.ones(2, 4), "bias": torch.zeros(2)})
    return module


def seeded() -> nn.Module:
    torch.manual_seed(3)
    return drawn()


def constant() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return drawn()


@pytest.mark.parametrize("make", [drawn, drawn_in_part, loaded, seeded, constant])
def test_weights_that_a_factory_draws_are_noted(make: Any) -> None:
    """With one runner and one build; the process's own generator goes on as if nothing had been built."""
    config = EvalConfig().environment("CartPole-v1").policy(f"{__name__}:{make.__name__}").evaluation(num_episodes=2)
    before = torch.random.get_rng_state()
    result = evaluate(config)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert len(result.notes) == (make in (drawn, drawn_in_part))


def test_weights_that_are_given_are_not_noted(tmp_path: Path) -> None:
    """A file of weights, or weights that are sent, take the place of those that were drawn."""
    torch.save(drawn().state_dict(), tmp_path / "weights.pt")
    config = EvalConfig().environment("CartPole-v1").policy(f"{__name__}:drawn").evaluation(num_episodes=2)
    with EvalRunnerGroup(config, threaded=False) as group:
        group.sync_weights(drawn())
        assert not group.evaluate().notes
    assert not evaluate(config.policy(weights=str(tmp_path / "weights.pt"))).notes


# ------------------------------------------------------------------------------ settings beside a policy object


def test_a_file_of_weights_belongs_to_the_policy_that_is_passed(tmp_path: Path) -> None:
    """If the config names no policy. Weights of a configured policy do not concern another one."""
    torch.save(drawn().state_dict(), tmp_path / "weights.pt")
    base = EvalConfig().environment("CartPole-v1").evaluation(num_episodes=4)
    config = base.copy().policy(weights=str(tmp_path / "weights.pt"))
    inside = evaluate(base.copy().policy(drawn(), weights=str(tmp_path / "weights.pt")))
    assert evaluate(config, drawn()).fingerprint == inside.fingerprint
    assert evaluate(config, drawn()).provenance["weights"] == inside.provenance["weights"]
    with refused(ConfigError):
        evaluate(base.copy().policy(weights=str(tmp_path / "missing.pt")), drawn())
    named = base.copy().policy(f"{__name__}:drawn", weights=str(tmp_path / "missing.pt"))
    assert evaluate(named, drawn()).status == "complete"


@pytest.mark.parametrize("inside", [True, False])
def test_arguments_of_a_factory_do_not_belong_to_an_object(inside: bool) -> None:
    config = EvalConfig().environment("CartPole-v1").policy(policy_kwargs={"hidden": 3}).evaluation(num_episodes=2)
    with refused(ConfigError, key="policy.policy_kwargs"):
        evaluate(config.policy(drawn()) if inside else config, None if inside else drawn())


def test_a_policy_in_place_of_random_actions_is_deterministic() -> None:
    """Sampling came with the random policy, and goes with it."""
    config = EvalConfig().environment("CartPole-v1").policy("random").evaluation(num_episodes=2)
    for given in (drawn(), f"{__name__}:seeded"):
        assert evaluate(config, given).provenance["identity"]["deterministic"] is True
    assert evaluate(config).provenance["identity"]["deterministic"] is False
