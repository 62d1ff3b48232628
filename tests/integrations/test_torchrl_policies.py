"""Tensordict policies act as TorchRL's own rollout makes them act, without touching anything global."""

from __future__ import annotations

import copy
import subprocess
import sys
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torchrl")

import gymnasium as gym
import numpy as np
import torch
from tensordict import TensorDict
from tensordict.nn import ProbabilisticTensorDictModule, TensorDictModule, TensorDictSequential
from tensordict.nn.distributions import NormalParamExtractor
from torch import distributions as torch_distributions
from torch import nn
from torchrl.data import Categorical, Composite, OneHot, Unbounded
from torchrl.envs import (
    CatFrames,
    Compose,
    DoubleToFloat,
    EnvBase,
    FrameSkipTransform,
    GymEnv,
    InitTracker,
    ObservationNorm,
    RewardSum,
    StepCounter,
    TensorDictPrimer,
    TransformedEnv,
    VecNormV2,
)
from torchrl.envs.utils import ExplorationType, exploration_type, set_exploration_type
from torchrl.modules import (
    MLP,
    Actor,
    AdditiveGaussianModule,
    EGreedyModule,
    GRUModule,
    IndependentNormal,
    LSTMModule,
    MaskedCategorical,
    OneHotCategorical,
    ProbabilisticActor,
    QValueActor,
    QValueModule,
    TanhNormal,
    TruncatedNormal,
)
from torchrl_worlds import normalized, torque

import rl_eval
from rl_eval import EvalConfig, evaluate
from rl_eval.errors import ConfigError
from rl_eval.integrations.torchrl import as_env, portable
from rl_eval.integrations.torchrl.policy import TensorDictPolicy
from rl_eval.integrations.torchrl.stages import _choose
from rl_eval.policies.noise import EpisodeNoise
from tests.refused import refused
from tests.unit.test_texts import TASKS, Obeys

pytestmark = [
    pytest.mark.timeout(180),
    pytest.mark.filterwarnings("ignore:Support of VecNormV2"),
    pytest.mark.filterwarnings("ignore:Exception ignored in.*socket"),  # Which torchrl opens on import.
]

BOX = gym.spaces.Box(-1.0, 1.0, (4,), np.float32)
ONE = gym.spaces.Box(-1.0, 1.0, (1,), np.float32)
TWO = gym.spaces.Box(-2.0, 2.0, (1,), np.float32)
BATCH = 8


def net(inputs: int, outputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(inputs, 16), nn.Tanh(), nn.Linear(16, outputs))


def categorical_actor(kind: Any = OneHotCategorical) -> ProbabilisticActor:
    return ProbabilisticActor(
        TensorDictModule(net(4, 2), ["observation"], ["logits"]),
        in_keys=["logits"],
        distribution_class=kind,
        return_log_prob=True,
    )


def normal_actor(kind: Any = TanhNormal, inputs: int = 4, actions: int = 1, **kwargs: Any) -> ProbabilisticActor:
    module = nn.Sequential(net(inputs, 2 * actions), NormalParamExtractor())
    return ProbabilisticActor(
        TensorDictModule(module, ["observation"], ["loc", "scale"]),
        in_keys=["loc", "scale"],
        distribution_class=kind,
        distribution_kwargs=kwargs,
    )


def two_part_actor() -> TensorDictSequential:
    values = TensorDictModule(net(4, 5), ["observation"], ["action_value"])
    return TensorDictSequential(values, QValueModule("mult_one_hot", var_nums=[2, 3]))


def observations(seed: int = 0) -> Any:
    return np.random.default_rng(seed).normal(size=(BATCH, 4)).astype(np.float32)


def act(policy: TensorDictPolicy, batch: Any, noise: Any = None, state: Any = None) -> Any:
    return policy.act(batch, state, np.ones(BATCH, bool), noise)[0]


def noise(step: int = 0) -> EpisodeNoise:
    return EpisodeNoise(np.arange(BATCH), np.full(BATCH, step))


def config(env: Any, episodes: int = 6, **policy: Any) -> EvalConfig:
    return EvalConfig().environment(lambda _: env()).evaluation(num_episodes=episodes).policy(**policy)


def rollouts(make: Any, policy: Any, result: Any, limit: int = 2000) -> list[float]:
    """Run the same episodes by TorchRL alone and return their returns, summed as we sum."""
    env, returns = make(), []
    for record in result.episodes:
        env.set_seed(record.seed, static_seed=True)
        with set_exploration_type(ExplorationType.DETERMINISTIC), torch.no_grad():
            rewards = env.rollout(limit, policy.eval())["next", "reward"]
        returns.append(float(np.cumsum(rewards.double().numpy())[-1]))
        assert len(rewards) == record.length
    return returns


# ------------------------------------------------------------------------------ what an action is


@pytest.mark.parametrize(
    ("make", "space"),
    [
        (categorical_actor, gym.spaces.Discrete(2)),
        (lambda: categorical_actor(torch_distributions.Categorical), gym.spaces.Discrete(2)),
        (lambda: categorical_actor(torch_distributions.OneHotCategorical), gym.spaces.Discrete(2)),
        (lambda: normal_actor(low=-2.0, high=2.0), TWO),
        (lambda: normal_actor(IndependentNormal), ONE),
        (lambda: normal_actor(torch_distributions.Normal), ONE),
        (lambda: normal_actor(TruncatedNormal, low=-1.0, high=1.0), ONE),
        (lambda: Actor(net(4, 1)), ONE),
        (lambda: QValueActor(net(4, 2), spec=OneHot(2), action_space="one_hot"), gym.spaces.Discrete(2)),
        (lambda: QValueActor(net(4, 2), action_space="categorical"), gym.spaces.Discrete(2)),
        (two_part_actor, gym.spaces.MultiDiscrete([2, 3])),
    ],
)
def test_the_deterministic_action_is_torchrls(make: Any, space: Any) -> None:
    """It equals what the module writes under DETERMINISTIC, in the form of the space, whatever the global mode is."""
    torch.manual_seed(0)
    module = make().eval()
    with set_exploration_type(ExplorationType.DETERMINISTIC), torch.no_grad():
        written = module(TensorDict({"observation": torch.from_numpy(observations())}, [BATCH]))["action"].numpy()
    policy = TensorDictPolicy(portable(module), BOX, space)
    with set_exploration_type(ExplorationType.RANDOM), torch.inference_mode():
        actions = act(policy, observations())
        assert exploration_type() is ExplorationType.RANDOM
    if isinstance(space, gym.spaces.Discrete):
        written = written.argmax(1) if written.ndim == 2 else written
    elif isinstance(space, gym.spaces.MultiDiscrete):
        written = np.stack([written[:, :2].argmax(1), written[:, 2:].argmax(1)], 1)
    np.testing.assert_array_equal(actions, written)
    assert all(space.contains(action) for action in actions.astype(space.dtype))


def test_a_mask_is_kept_when_sampling() -> None:
    """An action that the mask forbids is never drawn."""
    module = ProbabilisticActor(
        TensorDictModule(net(4, 3), ["observation"], ["logits"]),
        in_keys={"logits": "logits", "mask": "mask"},
        distribution_class=MaskedCategorical,
    )
    space = gym.spaces.Dict({"observation": BOX, "mask": gym.spaces.Box(0, 1, (3,), bool)})
    policy = TensorDictPolicy(portable(module), space, gym.spaces.Discrete(3), "random")
    mask = np.tile([True, False, True], (BATCH, 1))
    with torch.inference_mode():
        drawn = np.concatenate(
            [act(policy, {"observation": observations(), "mask": mask}, noise(i)) for i in range(50)]
        )
    assert set(drawn) == {0, 2}


def test_sampling_what_only_torch_can_sample_is_refused() -> None:
    """A distribution that draws by another function, and a plain callable, say so."""
    module = normal_actor(torch_distributions.Cauchy)
    policy = TensorDictPolicy(portable(module), BOX, ONE, "random")
    with refused(ConfigError, "policy.deterministic", value=False):
        act(policy, observations(), noise())
    with refused(ConfigError, "policy.deterministic", value=False):
        TensorDictPolicy(lambda data: data, BOX, ONE, "random")


def test_exploration_modules_are_left_out() -> None:
    """Deterministic actions are those of the actor alone; sampling with them is refused by name."""
    q_actor = QValueActor(net(4, 2), spec=OneHot(2), action_space="one_hot")
    greedy = EGreedyModule(OneHot(2), eps_init=1.0, eps_end=1.0)
    noisy = AdditiveGaussianModule(GymEnv("Pendulum-v1").action_spec, sigma_init=1.0)
    for actor, explorer, space in ((q_actor, greedy, gym.spaces.Discrete(2)), (Actor(net(4, 1)), noisy, ONE)):
        whole = portable(TensorDictSequential(actor, explorer))
        alone, both = (act(TensorDictPolicy(policy, BOX, space), observations()) for policy in (portable(actor), whole))
        np.testing.assert_array_equal(alone, both)
        with refused(ConfigError, "policy.deterministic"):
            TensorDictPolicy(whole, BOX, space, "random")


def test_a_module_that_reads_the_global_mode_is_refused() -> None:
    """Its actions would depend on the trainer's collectors."""

    class Moody(nn.Module):
        def forward(self, observation: torch.Tensor) -> torch.Tensor:
            return observation[:, :1] * (2.0 if exploration_type() is ExplorationType.RANDOM else 1.0)

    moody = TensorDictModule(Moody(), ["observation"], ["action"])
    tolerant = TensorDictSequential(categorical_actor(), partial_tolerant=True)
    for module in (moody, tolerant):
        with refused(ConfigError, "policy"):
            TensorDictPolicy(portable(module), BOX, ONE)


def test_safe_actors_project_their_actions() -> None:
    """The hook of ``safe=True`` does its work here as well."""
    env = GymEnv("Pendulum-v1")
    actor = Actor(nn.Linear(3, 1), spec=env.action_spec, safe=True)
    nn.init.constant_(actor.module.bias, 50.0)
    space = gym.spaces.Box(-1.0, 1.0, (3,), np.float32)
    actions = act(TensorDictPolicy(portable(actor), space, gym.spaces.Box(-9.0, 9.0, (1,))), observations()[:, :3])
    assert (actions == 2.0).all()


# ------------------------------------------------------------------------------ what an observation is


def test_dict_observations_are_read_by_key() -> None:
    """Also nested ones; a key that is missing is named, with those that there are."""
    module = TensorDictModule(net(3, 1), in_keys=[("agent", "position")], out_keys=["action"])
    space = gym.spaces.Dict({"agent": gym.spaces.Dict({"position": gym.spaces.Box(-1, 1, (3,))}), "goal": BOX})
    batch = {"agent": {"position": observations()[:, :3]}, "goal": observations()}
    assert act(TensorDictPolicy(portable(module), space, ONE), batch).shape == (BATCH, 1)
    with refused(ConfigError, "policy", value="[('agent', 'position')]"):
        TensorDictPolicy(portable(module), gym.spaces.Dict({"other": BOX}), ONE)
    with refused(ConfigError, "policy", value="['move']"):
        TensorDictPolicy(portable(TensorDictModule(net(4, 1), ["observation"], ["move"])), BOX, ONE)
    two = TensorDictModule(lambda one, other: one, in_keys=["one", "other"], out_keys=["action"])
    with refused(ConfigError, "policy", value="['one', 'other']"):
        TensorDictPolicy(portable(two), BOX, ONE)


def test_one_array_is_the_one_input() -> None:
    """Whatever its name; float64 observations meet float32 weights."""
    module = TensorDictModule(net(4, 1), in_keys=["pixels"], out_keys=["action"])
    space = gym.spaces.Box(-1.0, 1.0, (4,), np.float64)
    assert act(TensorDictPolicy(portable(module), space, ONE), observations().astype(np.float64)).dtype == np.float32


def test_a_portable_copy_shares_nothing() -> None:
    """Training on changes nothing in it, and the module given keeps its mode and gradients."""
    module = categorical_actor().train()
    module(TensorDict({"observation": torch.zeros(1, 4)}, [1]))["logits"].sum().backward()
    gradients = [parameter.grad for parameter in module.parameters()]
    before = copy.deepcopy(module.state_dict())
    detached = portable(module)
    for parameter in module.parameters():
        parameter.data.fill_(9.0)
    assert all(torch.equal(before[name], value) for name, value in detached.state_dict().items())
    assert [parameter.grad for parameter in module.parameters()] == gradients
    assert module.training


# ------------------------------------------------------------------------------ memory


@pytest.mark.parametrize("kind", [LSTMModule, GRUModule])
def test_recurrent_policies_remember_their_own_episode(kind: Any) -> None:
    """Returns equal those of TorchRL's rollout, which carries the state through the environment."""
    torch.manual_seed(0)
    recurrent = kind(input_size=4, hidden_size=8, in_key="observation", out_key="features")
    policy = TensorDictSequential(
        recurrent,
        TensorDictModule(MLP(in_features=8, out_features=2, num_cells=[]), ["features"], ["logits"]),
        ProbabilisticActor(
            TensorDictModule(nn.Identity(), ["logits"], ["logits"]),
            in_keys=["logits"],
            distribution_class=OneHotCategorical,
        ),
    )

    def make() -> Any:
        return TransformedEnv(GymEnv("CartPole-v1"), Compose(InitTracker(), recurrent.make_tensordict_primer()))

    result = evaluate(config(make, episodes=8), policy)
    assert result.status == "complete", result.reason
    assert [record.episode_return for record in result.episodes] == rollouts(make, policy, result)
    # Without the primer the state comes from the module's own declaration.
    plain = evaluate(config(lambda: GymEnv("CartPole-v1"), episodes=8), policy)
    assert plain.fingerprint == result.fingerprint


# ------------------------------------------------------------------------------ environments


@pytest.mark.parametrize(
    ("transforms", "steps"),
    [
        (list, 200),
        (lambda: [StepCounter(60), RewardSum(), InitTracker()], 60),
        (lambda: [ObservationNorm(in_keys=["observation"], loc=torch.ones(3) / 10, scale=torch.ones(3) / 2)], 200),
        (lambda: [CatFrames(N=2, dim=-1, in_keys=["observation"]), StepCounter(60)], 60),
        (lambda: [DoubleToFloat(), RewardSum(), StepCounter(60)], 60),
        (lambda: [FrameSkipTransform(frame_skip=2)], 100),
    ],
    ids=["none", "bookkeeping", "norm", "frames", "casts", "skip"],
)
def test_an_environment_is_that_of_rollout(transforms: Any, steps: int) -> None:
    """Returns, lengths and ends are those of ``env.rollout`` on the same seeds.

    Returns of a chaotic environment may differ by what a row of a batch differs from a row alone: last bits of float32.
    """

    def make() -> Any:
        return TransformedEnv(GymEnv("Pendulum-v1"), Compose(*transforms())) if transforms() else GymEnv("Pendulum-v1")

    torch.manual_seed(0)
    policy = TensorDictModule(
        net(make().full_observation_spec["observation"].shape[-1], 1), ["observation"], ["action"]
    )
    result = evaluate(config(make, episodes=3), policy)
    assert result.status == "complete", result.reason
    returns = [record.episode_return for record in result.episodes]
    assert returns == pytest.approx(rollouts(make, policy, result), abs=1e-3)
    assert {(record.length, record.truncated, record.terminated) for record in result.episodes} == {
        (steps, True, False)
    }


def test_the_short_way_equals_the_long_one() -> None:
    """A GymEnv under bookkeeping alone is stepped without tensordicts, with the same outcomes."""

    def short() -> Any:
        return TransformedEnv(GymEnv("CartPole-v1"), Compose(StepCounter(15), RewardSum()))

    def long() -> Any:
        return as_env(short(), observation_keys=["observation"])

    torch.manual_seed(1)
    policy = categorical_actor()
    results = [evaluate(config(make, episodes=10), policy) for make in (short, long)]
    assert results[0].fingerprint == results[1].fingerprint
    assert "TorchRLEnv" not in type(as_env(short())).__name__


def test_normalizers_of_an_environment_are_frozen_and_needed() -> None:
    """Without statistics it is refused; with them its outcomes repeat."""
    with refused(ConfigError, "environment.env", value="VecNormV2"):
        evaluate(config(normalized), torque())
    trained = normalized()
    trained.rollout(40)
    make = partial(copy.deepcopy, trained)
    first, second = (evaluate(config(make, episodes=3), torque()) for _ in range(2))
    assert first.fingerprint == second.fingerprint


def test_a_normalizer_in_the_policy_needs_statistics() -> None:
    normalizer = VecNormV2(in_keys=["observation"], out_keys=["normalized"])
    policy = TensorDictSequential(normalizer, TensorDictModule(net(3, 1), ["normalized"], ["action"]))
    with refused(ConfigError, "policy", value="VecNormV2"):
        act(TensorDictPolicy(policy, gym.spaces.Box(-1.0, 1.0, (3,), np.float32), TWO), observations()[:, :3])


def test_a_batch_of_environments_is_refused() -> None:
    """The message says what to give instead."""
    from torchrl.envs import SerialEnv

    with refused(ConfigError, "environment.env", value="(2,)"):
        evaluate(config(lambda: SerialEnv(2, lambda: GymEnv("CartPole-v1"))), categorical_actor())


@pytest.mark.parametrize("encoding", [True, False])
def test_discrete_actions_in_both_encodings(encoding: bool) -> None:
    """One-hot and categorical environments have the same space, and the same outcomes."""
    torch.manual_seed(0)

    def make() -> Any:
        return GymEnv("CartPole-v1", categorical_action_encoding=encoding)

    env = as_env(make(), observation_keys=["observation"])
    assert env.action_space == gym.spaces.Discrete(2)
    kind = torch_distributions.Categorical if encoding else OneHotCategorical
    policy = categorical_actor(kind)
    result = evaluate(config(lambda: as_env(make(), observation_keys=["observation"])), policy)
    assert [record.episode_return for record in result.episodes] == rollouts(make, policy, result)


@pytest.mark.process
def test_a_plain_module_needs_tensordict_alone() -> None:
    """torchrl is not imported for a TensorDictModule in a gymnasium environment."""
    script = """
import sys
from torch import nn
from tensordict.nn import TensorDictModule, TensorDictSequential
import torch
from rl_eval import EvalConfig, evaluate
torch.manual_seed(0)
policy = TensorDictSequential(TensorDictModule(nn.Linear(4, 2), ["observation"], ["action"]))
result = evaluate(EvalConfig().environment("CartPole-v1").evaluation(num_episodes=3), policy)
assert result.status == "complete", result.reason
assert "torchrl" not in sys.modules
"""
    root = Path(rl_eval.__file__).parents[1]
    subprocess.run([sys.executable, "-c", script], check=True, cwd=root, timeout=120)


class OwnLogNormal(torch_distributions.LogNormal):
    """A distribution of a user: positive, so its deterministic value is the mode."""


class OwnBeta(torch_distributions.Beta):
    """A distribution of a user on an interval."""


@pytest.mark.parametrize(
    "distribution",
    [
        OwnLogNormal(torch.zeros(3), torch.ones(3)),
        OwnBeta(torch.full((3,), 2.0), torch.full((3,), 5.0)),
        torch_distributions.Independent(OwnLogNormal(torch.zeros(3, 2), torch.ones(3, 2)), 1),
        torch_distributions.Normal(torch.zeros(3), torch.ones(3)),
        torch_distributions.Independent(torch_distributions.Normal(torch.zeros(3, 2), torch.ones(3, 2)), 1),
        torch_distributions.Gamma(torch.full((3,), 2.0), torch.ones(3)),
    ],
)
def test_the_deterministic_value_of_a_distribution_is_that_of_tensordict(distribution: Any) -> None:
    head = ProbabilisticTensorDictModule(
        in_keys=["loc"], out_keys=["action"], distribution_class=lambda loc: distribution
    )
    with set_exploration_type(ExplorationType.DETERMINISTIC), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = head(TensorDict({"loc": torch.zeros(3)}, [3]))["action"]
    assert torch.equal(_choose(distribution, "deterministic"), theirs)


class Memory(nn.Module):
    """Counts down in its memory."""

    def forward(self, observation: Any, memory: Any) -> Any:
        return torch.stack([memory[..., 0], -memory[..., 0]], -1), memory - 1.0


def test_memory_begins_as_a_primer_of_the_environment_says() -> None:
    policy = TensorDictSequential(
        TensorDictModule(Memory(), ["observation", "memory"], ["logits", ("next", "memory")]),
        ProbabilisticActor(
            TensorDictModule(nn.Identity(), ["logits"], ["logits"]),
            in_keys=["logits"],
            distribution_class=OneHotCategorical,
        ),
    )

    def make() -> Any:
        primer = TensorDictPrimer(memory=Unbounded((1,)), default_value=3.5)
        return TransformedEnv(GymEnv("CartPole-v1"), Compose(InitTracker(), primer))

    result = evaluate(config(make), policy)
    assert [record.episode_return for record in result.episodes] == rollouts(make, policy, result)


class Limited(EnvBase):
    """Ends by a limit, and has no ``truncated`` key."""

    def __init__(self) -> None:
        super().__init__()
        self.observation_spec = Composite(observation=Unbounded((2,)))
        self.action_spec, self.reward_spec = OneHot(2), Unbounded((1,))
        flag = Categorical(2, (1,), dtype=torch.bool)
        self.full_done_spec = Composite(done=flag, terminated=flag.clone())

    def _set_seed(self, seed: int | None) -> None:
        pass

    def _reset(self, data: Any = None, **given: Any) -> Any:
        self.steps = 0
        return TensorDict({"observation": torch.zeros(2)}, [])

    def _step(self, data: Any) -> Any:
        self.steps += 1
        done = torch.tensor([self.steps == 4])
        values = {
            "observation": torch.zeros(2),
            "reward": torch.ones(1),
            "done": done,
            "terminated": torch.zeros(1).bool(),
        }
        return TensorDict(values, [])


def test_an_end_that_is_not_terminated_is_truncated() -> None:
    actor = ProbabilisticActor(
        TensorDictModule(net(2, 2), ["observation"], ["logits"]),
        in_keys=["logits"],
        distribution_class=OneHotCategorical,
    )
    result = evaluate(config(Limited, episodes=2), actor)
    assert [(record.terminated, record.length) for record in result.episodes] == [(False, 4)] * 2


def test_a_module_gets_texts_as_a_list() -> None:
    def look_up(texts: Any) -> torch.Tensor:
        return torch.tensor([TASKS[text] for text in texts])

    actor = TensorDictModule(look_up, in_keys=["instruction"], out_keys=["action"])
    for width in (1, 8):
        result = evaluate(Obeys, actor, num_episodes=4, num_envs_per_runner=width)
        assert all(episode.episode_return == episode.length for episode in result.episodes)
