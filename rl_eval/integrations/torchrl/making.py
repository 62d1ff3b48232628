"""Building, in a runner's process, of the environment factory and the policy that TorchRL's evaluators are given.

These objects are pickled and sent, so they hold the user's objects and plain values only.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, final

import gymnasium as gym
import numpy as np
import numpy.typing as npt
import torch
from tensordict.nn import TensorDictModuleBase
from torchrl.data import Composite, TensorSpec
from torchrl.envs import EnvBase, Transform
from torchrl.envs.libs.gym import _gym_to_torchrl_spec_transform
from torchrl.envs.utils import RandomPolicy, _make_compatible_policy

from rl_eval.errors import ConfigError, UsageError, WeightsError
from rl_eval.integrations.torchrl.env import as_env, peel
from rl_eval.integrations.torchrl.keys import Key
from rl_eval.integrations.torchrl.policy import TensorDictPolicy
from rl_eval.integrations.torchrl.scope import Rules, Scope, scope_of
from rl_eval.integrations.torchrl.uniform import UNIFORM, RandomActions
from rl_eval.policies.random_state import random_state_kept
from rl_eval.protocols import EnvContext, NoiseSource
from rl_eval.runners import EvalRunner

__all__ = ["EnvMaker", "PolicyMaker", "ScopedPolicy", "dump_transforms", "make_policy"]


@dataclass(frozen=True)
class EnvMaker:
    """An environment factory as rl_eval calls it."""

    factory: Callable[[], Any] | None
    template: Any
    """An environment to copy, used instead of a factory."""
    token: str
    reward_key: Key | None = None
    done_key: Key | None = None
    as_recorded: bool = False
    """Whether frames are collected: then every key is shown, and actions are not judged."""
    horizon: int | None = None
    """Steps of an episode after which nobody needs more of it."""

    def __call__(self, context: EnvContext) -> gym.Env[Any, Any]:
        """Build the environment of one lane."""
        built = copy.deepcopy(self.template) if self.factory is None else self.factory()
        scope = scope_of(self.token)
        if isinstance(built, gym.Env):
            scope.adopt(built)
            return _Limited(built, scope, self.horizon)
        if built.batch_size:
            built = _one_of(built, context.lane_index)
        _refuse_recorders(built, context.num_runners)
        keys: dict[str, Any] = {"reward_key": self.reward_key, "done_key": self.done_key}
        adapted = as_env(built, **keys, check_normalizers=False, as_recorded=self.as_recorded)
        scope.adopt(built)
        return _Limited(adapted, scope, self.horizon)


@dataclass(frozen=True)
class PolicyMaker:
    """A policy, or the factory of one."""

    policy: Any
    factory: Callable[..., Any] | None
    token: str
    mode: str
    device: str = "cpu"

    def build(self, observation_space: gym.Space[Any], action_space: gym.Space[Any]) -> ScopedPolicy:
        """Build the policy for the environments that its process has."""
        scope = scope_of(self.token)
        policy = self.policy if self.factory is None else _call(self.factory, scope.latest())
        return ScopedPolicy(policy, scope, self.mode, observation_space, action_space, self.device)


def make_policy(maker: PolicyMaker, observation_space: gym.Space[Any], action_space: gym.Space[Any]) -> ScopedPolicy:
    """Build a policy from what was sent; this is what the configuration names."""
    return maker.build(observation_space, action_space)


@final
class ScopedPolicy:
    """A policy whose weights arrive with rules, which its environments follow too.

    Args:
        policy: A tensordict module, a plain module, a ``RandomPolicy`` or a callable on tensordicts.
        scope: What it shares with its environments.
        mode: How actions are taken, unless the rules say otherwise.
        observation_space: Space of one observation.
        action_space: Space of one action.
        device: Torch device to run on.
    """

    def __init__(
        self,
        policy: Any,
        scope: Scope,
        mode: str,
        observation_space: gym.Space[Any],
        action_space: gym.Space[Any],
        device: str,
    ) -> None:
        self._scope, self._mode = scope, mode
        module = None if policy is None else _as_module(policy, scope.latest())
        self._build: Callable[[str], TensorDictPolicy] = lambda how: TensorDictPolicy(
            RandomActions(_specs(scope.latest())[1]) if how == UNIFORM else module,
            observation_space,
            action_space,
            "random" if how == UNIFORM else how,
            device=device,
        )
        self._inner = self._build(mode)
        self.module = _Received(
            policy if isinstance(policy, torch.nn.Module) else None, self._obey, lambda: scope.rules
        )

    @property
    def outputs(self) -> Any:
        """What the policy wrote for the last batch."""
        return self._inner.outputs

    def initial_state(self, batch_size: int) -> Any:
        """Return the state of fresh episodes."""
        return self._inner.initial_state(batch_size)

    def probe_outputs(self, observations: Any) -> list[npt.NDArray[Any]]:
        """Return every number that the module computes on the way to an action."""
        return self._inner.probe_outputs(observations)

    def act(
        self, observations: Any, state: Any, live: npt.NDArray[np.bool_], noise: NoiseSource | None
    ) -> tuple[Any, Any]:
        """Choose actions; see :class:`rl_eval.Policy`."""
        self._scope.check()
        return self._inner.act(observations, state, live, noise)

    def _obey(self, rules: Rules) -> None:
        if rules.mode is not None and rules.mode != self._mode:
            self._inner = self._build(rules.mode)
            self._mode = rules.mode
        self._scope.obey(rules)


class _Received(torch.nn.Module):
    """Module that weights are sent to: the policy's, and the rules that come with them as extra state."""

    def __init__(
        self, policy: torch.nn.Module | None, obey: Callable[[Rules], None], rules: Callable[[], Rules]
    ) -> None:
        super().__init__()
        self._obey, self._rules = obey, rules
        if policy is not None:
            self.policy = policy
        names = {name for name, _ in self.named_parameters(remove_duplicate=False)}
        names |= {name for name, _ in self.named_buffers(remove_duplicate=False)}
        volatile = {
            f"{prefix}.{name}" for prefix, part in self.named_modules() for name in part._non_persistent_buffers_set
        }
        self._all, self._required = len(names), len(names - volatile)
        # Rules may come without weights, so no tensor is required by name; the rules say how many there are.
        self._non_persistent_buffers_set = names

    def get_extra_state(self) -> Rules:
        return self._rules()

    def set_extra_state(self, state: Rules) -> None:
        if state.tensors is not None and not self._required <= state.tensors <= self._all:
            raise WeightsError(f"{state.tensors} tensors were sent, but the policy has {self._all}")
        try:
            self._obey(state)
        except UsageError as error:
            raise WeightsError(str(error)) from error


class _Limited(gym.Wrapper[Any, Any, Any, Any]):
    """An environment whose episodes end at the step limit of the rules, if these have one, or at the horizon."""

    def __init__(self, env: gym.Env[Any, Any], scope: Scope, horizon: int | None) -> None:
        super().__init__(env)
        self._scope, self._horizon = scope, horizon
        self._steps = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        self._steps = 0
        return self.env.reset(seed=seed, options=options)

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        observation, reward, terminated, truncated, info = self.env.step(action)
        self._steps += 1
        limited = self._steps in (self._scope.rules.max_steps, self._horizon)
        return observation, reward, terminated, truncated or limited, info


def _as_module(policy: Any, env: Any) -> Any:
    """Wrap a plain module as TorchRL's collectors do: its parameters' names are keys of the observations.

    Raises:
        ConfigError: A parameter of ``forward`` is not named like a key.
    """
    if isinstance(policy, RandomPolicy):
        return RandomActions(policy.action_spec, policy.action_key)
    if not isinstance(policy, torch.nn.Module) or isinstance(policy, TensorDictModuleBase):
        return policy
    every, wanted = _specs(env)[0], inspect.signature(policy.forward).parameters
    # TorchRL passes all keys to forward(), also those that it does not read.
    read = Composite({key: spec for key, spec in every.items() if key in wanted})
    try:
        with random_state_kept():  # It is called once, on random observations.
            return _make_compatible_policy(policy, read, env if isinstance(env, EnvBase) else None)
    except TypeError as error:
        if all(name in read for name in wanted):
            raise
        raise ConfigError(
            f"policy is a {type(policy).__name__} whose forward() takes {list(wanted)}, but observations have the keys "
            f"{list(every.keys())}: name its parameters like these, or wrap it in a TensorDictModule"
        ) from error


def _specs(env: Any) -> tuple[Composite, TensorSpec]:
    """Return the specs of the observations and the actions of an environment."""
    if isinstance(env, EnvBase):
        return env.full_observation_spec, env.full_action_spec
    seen = _gym_to_torchrl_spec_transform(env.observation_space)
    actions = _gym_to_torchrl_spec_transform(env.action_space, categorical_action_encoding=True)
    return seen if isinstance(seen, Composite) else Composite(observation=seen), actions


def _call(factory: Callable[..., Any], env: Any) -> Any:
    """Call a policy factory with the environment, or with nothing if it has no parameter without a default."""
    try:
        parameters = inspect.signature(factory).parameters.values()
    except (TypeError, ValueError):
        return factory(env)
    positional = (one for one in parameters if one.kind not in (one.KEYWORD_ONLY, one.VAR_KEYWORD))
    takes_it = any(one.default is one.empty or one.name == "env" for one in positional)
    return factory(env) if takes_it else factory()


def _one_of(batched: Any, lane_index: int) -> Any:
    """Build one environment of a ``SerialEnv`` or ``ParallelEnv``, with copies of the transforms around the batch."""
    from torchrl.envs import TransformedEnv

    transforms, inner = peel(batched)
    factories = vars(inner).get("create_env_fn")
    if factories is None or any(type(transform).__name__.startswith("VecNorm") for transform in transforms):
        raise ConfigError(
            f"env builds a {type(inner).__name__} of batch_size {tuple(batched.batch_size)}"
            + ("" if factories is None else " with a normalizer around it")
            + ", and rl_eval runs each episode in an environment of its own: let it build single ones (batch_size=[]), "
            "and say how many of them step together with num_envs"
        )
    number = lane_index % len(factories)
    single = factories[number](**vars(inner)["create_env_kwargs"][number])
    copies = [transform.clone() for transform in transforms]
    batched.close(raise_if_closed=False)
    for transform in copies:
        single = TransformedEnv(single, transform)
    return single


def dump_transforms(runner: EvalRunner, step: int) -> None:
    """Call ``dump`` of all transforms of a runner's environments."""
    for found in runner.foreach_env(lambda env: getattr(env.unwrapped, "env", None)):
        for transform in peel(found)[0] if isinstance(found, EnvBase) else ():
            transform.dump(step=step)


def _refuse_recorders(env: Any, num_runners: int) -> None:
    for transform in peel(env)[0]:
        if type(transform).__name__ in {"VideoRecorder", "TensorDictRecorder"}:
            raise ConfigError(
                f"env has a {type(transform).__name__}, which would keep the frames of all episodes: take it out of "
                "the evaluation environment, and pass videos=rl_eval.VideoSettings(...), which records chosen episodes"
            )
        if num_runners > 1 and type(transform).dump is not Transform.dump:
            raise ConfigError(
                f"env has a {type(transform).__name__}, whose dump() is called in one process: pass num_runners=1"
            )
