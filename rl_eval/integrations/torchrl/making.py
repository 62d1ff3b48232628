"""Environments, policies and observers of TorchRL's evaluators and collectors, built in a runner's process.

Pickles contain only the user's objects and plain values. The environments and the policy of one evaluator share a
:class:`Scope` in each process. Weights are sent to policies, but TorchRL keeps normalizers in environments. So the
statistics of normalizers are sent with the weights, and the policy loads them into the environments of its scope. The
step limit and the mode of a request are sent in the same way.
"""

from __future__ import annotations

import copy
import inspect
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, final

import gymnasium as gym
import numpy as np
import numpy.typing as npt
import torch
from tensordict import TensorDictBase, unravel_key
from tensordict.nn import TensorDictModule, TensorDictModuleBase
from torchrl.data import Composite, TensorSpec
from torchrl.envs import EnvBase, Transform, TransformedEnv
from torchrl.envs.utils import RandomPolicy
from typing_extensions import override

from rl_eval.errors import ConfigError, UsageError, WeightsError
from rl_eval.integrations.torchrl.env import action_space, action_writer, as_env, peel
from rl_eval.integrations.torchrl.normalizers import check_initialized, load_statistics, state_of
from rl_eval.integrations.torchrl.policy import Key, TensorDictPolicy
from rl_eval.policies.uniform import UniformPolicy
from rl_eval.protocols import EnvContext, NoiseSource
from rl_eval.records.episode import EpisodeRecord, EpisodeSpec
from rl_eval.runners import EvalRunner
from rl_eval.runners.trajectories import CompressedArray, CompressedRows

UNIFORM: Final = "uniform"
"""Mode of uniformly random actions."""

_MAX_FRAME_BYTES: Final = 2**30


# ------------------------------------------------------------------ shared by environments and policies


@dataclass(frozen=True)
class Rules:
    """Rules that are sent with the weights of one request."""

    tensors: int | None = None
    """Number of the policy's tensors in the request; None if the request has no tensors, so that the policy keeps its
    weights."""
    statistics: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """State of each transform, by the path of the transform in the environment, such as ``transform[0]``."""
    max_steps: int | None = None
    """Step limit of every episode; None for the configured limit."""
    mode: str | None = None
    """Mode of the policy; None for the current mode."""

    def following(self, former: Rules) -> Rules:
        """Return these rules with the statistics and the mode of an earlier request that stay in use."""
        return replace(self, statistics={**former.statistics, **self.statistics}, mode=self.mode or former.mode)


@final
class Scope:
    """Environments of one evaluator in this process, with the rules of the last request."""

    def __init__(self) -> None:
        self.rules = Rules()
        self._environments: weakref.WeakSet[Any] = weakref.WeakSet()
        self.statistics: dict[str, Mapping[str, Any]] = {}
        """States that were sent, by the path of their transform."""
        self._checked = False

    def adopt(self, env: Any) -> None:
        """Add a new environment, and load the statistics of the scope into it."""
        self._environments.add(env)
        self._checked = False
        for path, state in self.statistics.items():
            load_statistics(env, path, state)

    def obey(self, rules: Rules) -> None:
        """Store the rules of a request, and load its statistics into all environments of the scope.

        Raises:
            WeightsError: Statistics do not fit a transform of the environment.
        """
        for path, state in rules.statistics.items():
            for env in self._environments:
                load_statistics(env, path, state)
        self.statistics |= rules.statistics
        self.rules = rules
        self._checked = False

    def any_env(self) -> Any:
        """Return an environment of the scope, to build a policy from; None if the scope has no environment."""
        return next(iter(self._environments), None)

    def check(self) -> None:
        """Check, once after each change, that every normalizer has statistics.

        Raises:
            ConfigError: A normalizer has no statistics.
        """
        if not self._checked:
            for env in self._environments:
                check_initialized(env, "the evaluation environment", "environment.env")
            self._checked = True


_SCOPES: Final[weakref.WeakValueDictionary[str, Scope]] = weakref.WeakValueDictionary()
"""Scopes by the token of their evaluator. Environments and policies keep their scope alive."""


# ------------------------------------------------------------------ environments


@dataclass(frozen=True)
class EnvMaker:
    """Environment factory for ``environment.env``."""

    source: Any
    """A callable that builds an environment, or an environment to copy."""
    token: str = field(compare=False)
    """Token of the evaluator, which does not change episodes."""
    reward_key: Key | None = None
    done_key: Key | None = None
    as_recorded: bool = False
    """Whether a collector uses the frames. Then policies see every key, and actions are not checked."""

    def __call__(self, context: EnvContext) -> gym.Env[Any, Any]:
        """Build the environment of one lane."""
        built = copy.deepcopy(self.source) if isinstance(self.source, EnvBase) else self.source()
        if not isinstance(built, EnvBase):
            name, fix = type(built).__name__, "Build a TorchRL environment."
            raise ConfigError(f"env builds a {name}, not a TorchRL environment", key="env", value=name, fix=fix)
        built = _one_of(built, context.lane_index) if built.batch_size else built
        _refuse_recorders(built, context.num_runners)
        adapted = as_env(
            built, None, self.reward_key, self.done_key, check_normalizers=False, as_recorded=self.as_recorded
        )
        scope = _SCOPES.setdefault(self.token, Scope())
        scope.adopt(built)
        return _Limited(adapted, scope)


class _Limited(gym.Wrapper[Any, Any, Any, Any]):
    """Environment that truncates episodes at the step limit of the rules, if the rules have a limit."""

    def __init__(self, env: gym.Env[Any, Any], scope: Scope) -> None:
        super().__init__(env)
        self._scope = scope
        self._steps = 0

    @override
    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        self._steps = 0
        return self.env.reset(seed=seed, options=options)

    @override
    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        observation, reward, terminated, truncated, info = self.env.step(action)
        self._steps += 1
        return observation, reward, terminated, truncated or self._steps == self._scope.rules.max_steps, info


def _one_of(batched: Any, lane_index: int) -> Any:
    """Build one environment of a ``SerialEnv`` or ``ParallelEnv``, with copies of the transforms around the batch."""
    transforms, inner = peel(batched)
    factories = vars(inner).get("create_env_fn")
    if factories is None or any(type(transform).__name__.startswith("VecNorm") for transform in transforms):
        problem, fix = f"env builds a {type(inner).__name__}, a batch of environments", "Build single environments."
        raise ConfigError(problem, key="env", value=type(inner).__name__, fix=fix)
    number = lane_index % len(factories)
    single = factories[number](**vars(inner)["create_env_kwargs"][number])
    for transform in transforms:
        single = TransformedEnv(single, transform.clone())
    batched.close(raise_if_closed=False)
    return single


def _refuse_recorders(env: Any, num_runners: int) -> None:
    for transform in peel(env)[0]:
        name = type(transform).__name__
        if name in {"VideoRecorder", "TensorDictRecorder"}:
            problem, fix = f"env has a {name}, which stores all frames", "Pass videos=VideoSettings(...) instead."
            raise ConfigError(problem, key="env", value=name, fix=fix)
        if num_runners > 1 and type(transform).dump is not Transform.dump:
            problem = f"env has a {name}, but only one process calls its dump()"
            raise ConfigError(problem, key="num_runners", value=num_runners, fix="Pass num_runners=1.")


def dump_transforms(runner: EvalRunner, step: int) -> None:
    """Call ``dump`` of all transforms of a runner's environments."""
    for found in runner.foreach_env(lambda env: getattr(env.unwrapped, "env", None)):
        for transform in peel(found)[0]:
            transform.dump(step=step)


@final
class FirstEpisodeFrames:
    """Observer that renders after each step of episode 0, if the ``render_mode`` is ``rgb_array``.

    Its artifact has shape (steps, height, width, 3), dtype uint8, and at most a gibibyte before compression.

    Args:
        env: The environment.
    """

    def __init__(self, env: Any) -> None:
        self._env = env
        self._renders = getattr(env, "render_mode", None) == "rgb_array"
        self._rows: CompressedRows | None = None
        self._frames, self._filming = 0, False

    def on_episode_start(self, spec: EpisodeSpec, attempt: int, observation: Any) -> None:
        """Start an episode. Drop the frames of an earlier attempt."""
        self._rows, self._frames, self._filming = None, 0, self._renders and spec.index == 0

    def on_step(self, *step: Any) -> None:
        """Render the environment after a step."""
        if not self._filming:
            return
        frame = np.asarray(self._env.render(), np.uint8)[..., :3]
        if (self._frames + 1) * frame.nbytes <= _MAX_FRAME_BYTES:
            self._rows = self._rows or CompressedRows(frame.shape, frame.dtype)
            self._rows.write(self._frames, frame)
            self._frames += 1

    def on_episode_end(self, record: EpisodeRecord) -> CompressedArray | None:
        """Return the frames; None if there are none."""
        return self._rows.taken(self._frames) if self._rows is not None else None


# ------------------------------------------------------------------ policies


@dataclass(frozen=True)
class PolicySource:
    """Policy or its factory, with the mode and the device of the policy."""

    policy: Any
    factory: Callable[..., Any] | None
    token: str = field(compare=False)
    mode: str
    """``random``, one of :data:`~.stages.MODES`, or :data:`UNIFORM`."""
    device: str


@final
class ScopedPolicy:
    """Policy that receives rules with its weights, and applies them to the environments of its scope.

    Args:
        source: The policy, or its factory.
        observation_space: Space of one observation.
        action_space: Space of one action.
    """

    def __init__(self, source: PolicySource, observation_space: gym.Space[Any], action_space: gym.Space[Any]) -> None:
        self._scope, self._mode = _SCOPES.setdefault(source.token, Scope()), source.mode
        env = self._scope.any_env()
        policy = source.policy if source.factory is None else _call(source.factory, env)
        module = None if policy is None else _as_module(policy, env)

        def build(mode: str) -> TensorDictPolicy:
            acting, mode = (RandomActions(env.full_action_spec), "random") if mode == UNIFORM else (module, mode)
            return TensorDictPolicy(acting, observation_space, action_space, mode, device=source.device)

        self._build = build
        self._act_in(source.mode)
        self.module = _Received(policy if isinstance(policy, torch.nn.Module) else None, self._obey, self._scope)

    @property
    def outputs(self) -> Any:
        """Output of the policy for the last batch."""
        return self._inner.outputs

    def _act_in(self, mode: str) -> None:
        self._inner = self._build(mode)
        self.initial_state, self.probe_outputs = self._inner.initial_state, self._inner.probe_outputs

    def act(
        self, observations: Any, state: Any, live: npt.NDArray[np.bool_], noise: NoiseSource | None
    ) -> tuple[Any, Any]:
        """Choose actions, as :meth:`rl_eval.Policy.act`."""
        self._scope.check()
        return self._inner.act(observations, state, live, noise)

    def models(self) -> dict[str, dict[str, Any]]:
        """Return the states of the policy and of all transforms whose states were sent, by name in ``weights_dict``."""
        sent = {f"env.{path}": dict(state) for path, state in self._scope.statistics.items()}
        policy = getattr(self.module, "policy", None)
        return sent if policy is None else {**sent, "policy": state_of(policy)}

    def _obey(self, rules: Rules) -> None:
        if rules.mode is not None and rules.mode != self._mode:
            self._act_in(rules.mode)
            self._mode = rules.mode
        self._scope.obey(rules)


class _Received(torch.nn.Module):
    """Module that receives the weights of the policy, and rules as extra state."""

    def __init__(self, policy: torch.nn.Module | None, obey: Callable[[Rules], None], scope: Scope) -> None:
        super().__init__()
        self._obey, self._scope = obey, scope
        if policy is not None:
            self.policy = policy
        named = (self.named_parameters(remove_duplicate=False), self.named_buffers(remove_duplicate=False))
        names = {name for tensors in named for name, _ in tensors}
        self._all, self._required = len(names), len(self.state_dict(keep_vars=True).keys() & names)
        # Rules may come without weights, so no tensor is required by name. The rules contain the number of tensors.
        self._non_persistent_buffers_set = names

    @override
    def get_extra_state(self) -> Rules:
        return self._scope.rules

    @override
    def set_extra_state(self, state: Rules) -> None:
        if state.tensors is not None and not self._required <= state.tensors <= self._all:
            problem = f"{state.tensors} tensors were sent, but the policy has {self._all}"
            raise WeightsError(problem, key="weights", value=state.tensors)
        try:
            self._obey(state)
        except UsageError as error:
            raise WeightsError(error.problem, key=error.key, value=error.value, fix=error.fix) from error


def _call(factory: Callable[..., Any], env: Any) -> Any:
    """Call a policy factory with the environment, or without arguments if it has no required parameter."""
    parameters = inspect.signature(factory).parameters.values()
    positional = (one for one in parameters if one.kind not in (one.KEYWORD_ONLY, one.VAR_KEYWORD))
    takes_it = any(one.default is one.empty or one.name == "env" for one in positional)
    return factory(env) if takes_it else factory()


def _as_module(policy: Any, env: Any) -> Any:
    """Wrap a plain module as TorchRL's collectors do: parameter names of ``forward`` are keys of the observations.

    Raises:
        ConfigError: A required parameter of ``forward`` does not have the name of a key.
    """
    if isinstance(policy, RandomPolicy):
        spec = policy.action_spec
        return RandomActions(spec if isinstance(spec, Composite) else {policy.action_key: spec})
    if not isinstance(policy, torch.nn.Module) or isinstance(policy, TensorDictModuleBase):
        return policy
    parameters = inspect.signature(policy.forward).parameters
    if set(parameters) in ({"tensordict"}, {"td"}):
        return policy
    keys = list(env.full_observation_spec.keys())
    read = [name for name in parameters if name in keys]
    if any(one.default is one.empty and name not in read for name, one in parameters.items()):
        problem, fix = (
            f"forward() of the policy takes {list(parameters)}, but observations do not have all of these keys",
            f"Give the parameters the names of observations: {keys}.",
        )
        raise ConfigError(problem, key="policy", value=list(parameters), fix=fix)
    return TensorDictModule(policy, read, list(env.action_keys))


@final
class RandomActions(TensorDictModuleBase):  # type: ignore[misc]  # If tensordict is not installed.
    """Counterpart of ``torchrl.modules.RandomPolicy`` that draws from each episode's own noise.

    Args:
        specs: Specs of the actions by key.

    Raises:
        ConfigError: Random actions of a spec are not supported.
    """

    def __init__(self, specs: Composite | dict[Key, TensorSpec]) -> None:
        super().__init__()
        leaves = specs.items(True, True) if isinstance(specs, Composite) else specs.items()
        self._drawn = {unravel_key(key): (UniformPolicy(action_space(one)), action_writer(one)) for key, one in leaves}
        self.in_keys: list[Key] = []
        self.out_keys = list(self._drawn)

    def draw_from_noise(self, batch: TensorDictBase, noise: NoiseSource | None) -> TensorDictBase:
        """Write actions into a batch of observations.

        If the batch has an ``action_mask``, only valid actions are drawn.

        Raises:
            ConfigError: There is no noise, because actions are deterministic.
        """
        mask: Any = batch.get("action_mask", None)
        seen = {} if mask is None else {"action_mask": mask.cpu().numpy()}
        for key, (policy, write) in self._drawn.items():
            actions, _ = policy.act(seen, None, np.ones(len(batch), bool), noise)
            batch.set(key, torch.stack([write(action) for action in actions]))
        return batch
