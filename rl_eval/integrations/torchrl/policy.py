"""Policy around a tensordict module: keys of its inputs and outputs, and conversion of its actions.

=====================  =========================================================================================
item                   rule
=====================  =========================================================================================
observations           inputs are keys of a Dict space, nested keys are paths; another space is the single input
floating inputs        cast to the dtype of the policy's first floating parameter
``is_init``            True at an episode's first step
recurrent state        an output ``("next", k)`` becomes the input ``k`` of the next step, per lane
one-hot actions        become indices if the action space is Discrete, part by part if it is MultiDiscrete
normalizers            a ``VecNormV2`` inside the policy is frozen; an error without statistics
=====================  =========================================================================================
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, Final, TypeAlias, final

import gymnasium as gym
import numpy as np
import numpy.typing as npt
import torch
from tensordict import NonTensorStack, TensorDict, TensorDictBase, unravel_key
from tensordict.nn import TensorDictModuleBase

from rl_eval.config.settings import PolicySection
from rl_eval.errors import ConfigError, PolicyError
from rl_eval.integrations.torchrl.normalizers import check_initialized, freeze_normalizers, normalizers_of
from rl_eval.integrations.torchrl.stages import Chance, Stage, stages_of
from rl_eval.policies.inference.spaces import leaf_of
from rl_eval.policies.noise import EpisodeNoise
from rl_eval.policies.sampling import refuse_nan
from rl_eval.protocols import NoiseSource

Array = npt.NDArray[Any]
Key: TypeAlias = str | tuple[str, ...]
"""Key of a tensordict."""

_IS_INIT: Final = "is_init"


def portable(value: Any) -> Any:
    """Return a copy of a policy on the CPU that shares nothing with the original.

    Args:
        value: A tensordict module. Its mode, device, gradients and hooks do not change.
    """
    detached = {id(tensor): tensor.detach().cpu().clone() for tensor in [*value.parameters(), *value.buffers()]}
    for parameter in value.parameters():
        if not torch.nn.parameter.is_lazy(parameter):
            detached[id(parameter)] = torch.nn.Parameter(detached[id(parameter)], parameter.requires_grad)
    return copy.deepcopy(value, detached)


def as_policy(
    value: Any, section: PolicySection, observation_space: gym.Space[Any], action_space: gym.Space[Any]
) -> TensorDictPolicy:
    """Wrap a tensordict module as a policy.

    Args:
        value: The module. This call sets ``eval()`` mode and freezes its normalizers.
        section: Settings of the policy.
        observation_space: Space of one observation.
        action_space: Space of one action.

    Raises:
        ConfigError: The module cannot act in these spaces as configured; the message names the key or the module.
    """
    mode = "deterministic" if section.deterministic else "random"
    return TensorDictPolicy(value, observation_space, action_space, mode, device=section.device)


@final
class TensorDictPolicy:
    """A policy around a tensordict module, or around a callable that maps tensordicts to tensordicts.

    Args:
        policy: The module. Pass a copy, because the module is set to ``eval()`` mode, and its normalizers are frozen.
        observation_space: Space of one observation.
        action_space: Space of one action.
        mode: ``random``, or one of :data:`~.stages.MODES`.
        device: Torch device of the policy.

    Raises:
        ConfigError: The module cannot act in these spaces or in this mode; the message names the key or the module.
    """

    def __init__(
        self,
        policy: Any,
        observation_space: gym.Space[Any],
        action_space: gym.Space[Any],
        mode: str = "deterministic",
        *,
        device: str = "cpu",
    ) -> None:
        self.module = policy
        self._device = torch.device(device)
        self._observation_space = observation_space
        self._stages: tuple[Stage, ...] = ()
        self.normalizes = False
        if isinstance(policy, TensorDictModuleBase):
            policy.to(self._device).eval()
            freeze_normalizers(policy)
            for part in policy.modules():
                if getattr(part, "_recurrent_mode", None):
                    vars(part)["_recurrent_mode"] = False  # Each call computes one step.
            self.normalizes = bool(normalizers_of(policy))
            self._stages = tuple(stages_of(policy, mode))
        elif mode == "random":
            problem, fix = "the policy is a plain callable without a distribution", "Set policy.deterministic to True."
            raise ConfigError(problem, key="policy.deterministic", value=False, fix=fix)
        else:
            self._stages = (lambda batch, _: policy(batch),)
        inputs = [unravel_key(key) for key in getattr(policy, "in_keys", ())]
        outputs = [unravel_key(key) for key in getattr(policy, "out_keys", ())]
        self._state_keys = [key for key in inputs if ("next", *path_of(key)) in map(path_of, outputs)]
        self._tracks_start = _IS_INIT in inputs
        self._inputs = self._read_by(observation_space, [key for key in inputs if key not in self._state_keys])
        self._actions = _action_keys(outputs, action_space)
        weights = policy.parameters() if isinstance(policy, torch.nn.Module) else ()
        self._dtype = next((tensor.dtype for tensor in weights if tensor.is_floating_point()), None)
        self._last: TensorDictBase | None = None
        """Output of the policy for the last batch."""

    @property
    def outputs(self) -> dict[str, Array] | None:
        """Output of the policy for the last batch, by dotted key, such as the raw action or values.

        It contains the recurrent state before the step and, under ``next``, the state after the step.
        """
        if self._last is None:
            return None
        given = {path_of(key) for key in self._inputs} | {(_IS_INIT,)}
        states = {("next", *path_of(key)) for key in self._state_keys}
        return {
            ".".join(path): array_of(tensor)
            for path, tensor in _leaves(self._last).items()
            if path not in given and (path[0] != "next" or path in states)
        }

    def initial_state(self, batch_size: int) -> dict[str, torch.Tensor] | None:
        """Return the recurrent state of new episodes, by dotted key; None for a policy without such a state."""
        if not self._state_keys and not self._tracks_start:
            return None
        state = {".".join(path_of(key)): self._zeros(key, batch_size) for key in self._state_keys}
        return {**state, _IS_INIT: torch.ones(batch_size, 1, dtype=torch.bool)}

    def probe_outputs(self, observations: Any) -> list[Array]:
        """Return all numbers that the module computes for an action, such as logits."""
        count = _count(observations)
        batch = self._batch(observations, self.initial_state(count))
        given = _leaves(batch)
        noise = EpisodeNoise(np.zeros(count, np.int64), np.zeros(count, np.int64))
        output = self._run(batch, Chance(np.ones(count, bool), noise))
        return [
            array_of(tensor)
            for path, tensor in _leaves(output).items()
            if tensor is not given.get(path) and not path[-1].endswith("log_prob")
        ]

    def act(
        self, observations: Any, state: Any, live: npt.NDArray[np.bool_], noise: NoiseSource | None
    ) -> tuple[Any, Any]:
        """Choose actions, as :meth:`rl_eval.Policy.act`."""
        if self.normalizes:
            check_initialized(self.module, "the policy", "policy")
        self._last = output = self._run(self._batch(observations, state), Chance(live, noise))
        actions = self._read(output, live)
        if state is None:
            return actions, None
        following = {name: output[("next", *name.split("."))] for name in state if name != _IS_INIT}
        return actions, {**following, _IS_INIT: torch.zeros_like(state[_IS_INIT])}

    # ------------------------------------------------------------------ in

    def _read_by(self, space: gym.Space[Any], inputs: list[Key]) -> dict[Key, tuple[str, ...]]:
        """Return the path in the observation for each input of the policy."""
        paths, needed = list(leaf_spaces(space)), [key for key in inputs if key != _IS_INIT]
        known = bool(getattr(self.module, "in_keys", ()))
        if paths != [()]:
            wanted = needed if known else [unravel_key(path) for path in paths]
            if missing := [key for key in wanted if path_of(key) not in paths]:
                problem = f"the policy reads {missing}, but observations have {paths}"
                raise ConfigError(problem, key="policy", value=missing, fix="Rename the in_keys of the policy.")
            return {key: path_of(key) for key in wanted}
        if len(needed) > 1:
            needed = [key for key in needed if path_of(key)[-1] == "observation"]
            if len(needed) != 1:
                problem = f"the policy reads {inputs}, but an observation is one array: {space}"
                raise ConfigError(problem, key="policy", value=inputs)
        return dict.fromkeys(needed if known else ["observation"], ())

    def _batch(self, observations: Any, state: Any) -> TensorDictBase:
        batch = TensorDict({}, batch_size=[_count(observations)], device=None)
        for key, path in self._inputs.items():
            leaf = observations
            for part in path:
                leaf = leaf[part]
            is_text = leaf.dtype.kind == "U"
            value = NonTensorStack(*leaf.tolist()) if is_text else self._cast(torch.from_numpy(leaf))
            batch.set(key, value.to(self._device))
        if state is not None:
            for key in [*self._state_keys, *([_IS_INIT] if self._tracks_start else [])]:
                batch.set(key, self._begun(key, observations, state).to(self._device))
        return batch

    def _begun(self, key: Key, observations: Any, state: Any) -> torch.Tensor:
        """Return the recurrent state of a key. If observations have this key, an episode starts with their value."""
        current: torch.Tensor = state[".".join(path_of(key))]
        if key == _IS_INIT or path_of(key) not in leaf_spaces(self._observation_space):
            return current
        first = self._cast(torch.from_numpy(leaf_of(observations, path_of(key)))).to(current)
        started = state[_IS_INIT].reshape(-1, *[1] * (current.ndim - 1))
        return torch.where(started.to(current.device), first, current)

    def _cast(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self._dtype) if self._dtype is not None and tensor.is_floating_point() else tensor

    # ------------------------------------------------------------------ through

    def _run(self, batch: TensorDictBase, chance: Chance) -> TensorDictBase:
        output = batch.copy()
        for stage in self._stages:
            output = stage(output, chance)
        return output

    # ------------------------------------------------------------------ out

    def _read(self, output: TensorDictBase, live: npt.NDArray[np.bool_]) -> Any:
        """Return the actions of all rows, in the structure of the action space."""
        return nested({path: self._read_leaf(output, key, space, live) for path, key, space in self._actions})

    def _read_leaf(self, output: TensorDictBase, key: Key, space: gym.Space[Any], live: npt.NDArray[np.bool_]) -> Array:
        tensor = output.get(key, None)
        if tensor is None:
            written = sorted(map(".".join, _leaves(output)))
            problem = f"the policy did not write its action to {key!r}; it wrote {written}"
            raise ConfigError(problem, key="policy", value=str(key))
        array = array_of(tensor)
        if array.dtype.kind == "f":
            refuse_nan(array, live, f"the policy's {key!r}")
        return _as_actions(array, space)

    def _zeros(self, key: Key, batch_size: int) -> torch.Tensor:
        """Return the initial recurrent state of a key, as its module or the observation space declares it."""
        for part in self.module.modules():
            if key in getattr(part, "in_keys", ()) and hasattr(part, "make_tensordict_primer"):
                spec = part.make_tensordict_primer().primers[key]
                return torch.zeros(batch_size, *spec.shape, dtype=spec.dtype, device=self._device)
        declared = leaf_spaces(self._observation_space).get(path_of(key))
        if declared is not None and declared.shape is not None:
            return self._cast(torch.from_numpy(np.zeros((batch_size, *declared.shape), declared.dtype)))
        problem, fix = (
            f"the shape of the policy's state {key!r} is unknown",
            "The module of this state needs make_tensordict_primer().",
        )
        raise ConfigError(problem, key="policy", value=str(key), fix=fix)


def _action_keys(outputs: list[Key], space: gym.Space[Any]) -> list[tuple[tuple[str, ...], Key, gym.Space[Any]]]:
    """Return the parts of an action as tuples: path in the action space, key in the tensordict, space."""
    if isinstance(space, gym.spaces.Dict):
        return [(path, unravel_key(path), part) for path, part in leaf_spaces(space).items()]
    candidates = [key for key in outputs if path_of(key)[-1] == "action" and path_of(key)[0] != "next"]
    if not outputs or "action" in candidates:
        candidates = ["action"]
    if len(candidates) != 1:
        fix = "Exactly one of the out_keys must be 'action' or end with 'action'."
        raise ConfigError(f"the policy has the out_keys {outputs}", key="policy", value=outputs, fix=fix)
    return [((), candidates[0], space)]


def _as_actions(array: Array, space: gym.Space[Any]) -> Array:
    """Convert a batch of raw actions to the form of the space. One-hot vectors become indices."""
    batch = len(array)
    if isinstance(space, gym.spaces.Discrete):
        count = int(space.n)
        if array.shape == (batch, count) and count > 1:
            array = array.argmax(1)
        return _reshaped(array, (batch,), space) + int(space.start)
    if isinstance(space, gym.spaces.MultiDiscrete):
        sizes = [int(n) for n in space.nvec.ravel()]
        if array.shape == (batch, sum(sizes)) and sum(sizes) > len(sizes):
            parts = np.split(array, np.cumsum(sizes)[:-1], axis=1)
            array = np.stack([part.argmax(1) for part in parts], axis=1)
        return np.asarray(_reshaped(array, (batch, *space.shape), space) + space.start)
    array = _reshaped(array, (batch, *(space.shape or ())), space)
    return array.astype(np.int8) if isinstance(space, gym.spaces.MultiBinary) else array


def _reshaped(array: Array, shape: tuple[int, ...], space: gym.Space[Any]) -> Array:
    if array.size != int(np.prod(shape)):
        problem = f"the policy returned actions of shape {array.shape}, but {space} needs {shape}"
        raise PolicyError(problem, key="policy", value=array.shape)
    return array.reshape(shape)


def leaf_spaces(space: gym.Space[Any]) -> dict[tuple[str, ...], gym.Space[Any]]:
    """Return the spaces inside nested Dict spaces, by path. Any other space has the path ``()``."""
    if not isinstance(space, gym.spaces.Dict):
        return {(): space}
    return {(name, *path): leaf for name, part in space.items() for path, leaf in leaf_spaces(part).items()}


def nested(leaves: Mapping[tuple[str, ...], Any]) -> Any:
    """Return nested dicts, built from leaves and their paths. A leaf with the path ``()`` is the whole value."""
    whole: dict[str, Any] = {}
    for path, leaf in leaves.items():
        if not path:
            return leaf
        target = whole
        for part in path[:-1]:
            target = target.setdefault(part, {})
        target[path[-1]] = leaf
    return whole


def path_of(key: Key) -> tuple[str, ...]:
    """Return a key as a tuple."""
    return key if isinstance(key, tuple) else (key,)


def array_of(tensor: torch.Tensor) -> Array:
    """Return a tensor as a NumPy array; bfloat16 becomes float32."""
    return np.asarray((tensor.float() if tensor.dtype is torch.bfloat16 else tensor).detach().cpu().numpy())


def _leaves(data: TensorDictBase) -> dict[tuple[str, ...], torch.Tensor]:
    return {path_of(key): tensor for key, tensor in data.items(include_nested=True, leaves_only=True)}


def _count(observations: Any) -> int:
    while isinstance(observations, Mapping):
        observations = next(iter(observations.values()))
    return len(observations)
