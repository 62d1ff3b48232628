"""Policy of a tensordict module: the keys that it reads from a batch of observations, and the meaning of its action.

=====================  =========================================================================================
what                   rule
=====================  =========================================================================================
observations           a Dict space is read by key, nested keys by path; any other space is the policy's one input
floating inputs        are cast to the dtype of the policy's first floating parameter
``is_init``            True at an episode's first step
recurrent state        an output ``("next", k)`` with an input ``k`` is carried from step to step, per lane
one-hot actions        become indices when the action space is Discrete, part by part when it is MultiDiscrete
normalizers            a ``VecNormV2`` inside the policy is frozen; one without statistics is an error
=====================  =========================================================================================
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, Final, final

import gymnasium as gym
import numpy as np
import numpy.typing as npt
import torch
from tensordict import TensorDict, TensorDictBase, unravel_key
from tensordict.nn import TensorDictModuleBase

from rl_eval.config.settings import PolicySection
from rl_eval.errors import ConfigError, PolicyError
from rl_eval.integrations.torchrl.keys import Key, nested
from rl_eval.integrations.torchrl.normalizers import check_initialized, freeze_normalizers, normalizers_of
from rl_eval.integrations.torchrl.stages import Stage, stages_of
from rl_eval.policies.noise import EpisodeNoise
from rl_eval.policies.sampling import refuse_nan
from rl_eval.protocols import NoiseSource

__all__ = ["TensorDictPolicy", "as_policy", "portable"]

Array = npt.NDArray[Any]

_IS_INIT: Final = "is_init"


def portable(value: Any) -> Any:
    """Return a copy of a policy on the CPU that shares nothing with the trainer's.

    Args:
        value: A tensordict module. Its mode, device, gradients and hooks stay as they are.
    """
    detached = {id(tensor): tensor.detach().cpu().clone() for tensor in [*value.parameters(), *value.buffers()]}
    for parameter in value.parameters():
        if not torch.nn.parameter.is_lazy(parameter):
            detached[id(parameter)] = torch.nn.Parameter(detached[id(parameter)], parameter.requires_grad)
    return copy.deepcopy(value, detached)


def as_policy(
    value: Any, section: PolicySection, observation_space: gym.Space[Any], action_space: gym.Space[Any]
) -> TensorDictPolicy:
    """Read a tensordict module as a policy.

    Args:
        value: The module; it is put into ``eval()`` mode and its normalizers are frozen.
        section: How it acts.
        observation_space: Space of one observation.
        action_space: Space of one action.

    Raises:
        ConfigError: It cannot act in these spaces as configured; the message names the key or the module.
    """
    mode = "deterministic" if section.deterministic else "random"
    return TensorDictPolicy(value, observation_space, action_space, mode, device=section.device)


@final
class TensorDictPolicy:
    """A policy around a tensordict module, or around a callable that maps tensordicts to tensordicts.

    Args:
        policy: The module. It is changed (``eval()``, frozen normalizers), so give a copy.
        observation_space: Space of one observation.
        action_space: Space of one action.
        mode: ``random``, or one of :data:`~.distributions.MODES`.
        device: Torch device to run on.

    Raises:
        ConfigError: As :func:`as_policy`.
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
        self._normalized = False
        if isinstance(policy, TensorDictModuleBase):
            policy.to(self._device).eval()
            freeze_normalizers(policy)
            _run_step_by_step(policy)
            self._normalized = any(True for _ in normalizers_of(policy))
            self._stages = tuple(stages_of(policy, mode))
        elif mode == "random":
            raise ConfigError(
                "policy.deterministic is False, but the policy is a plain callable, whose distribution rl_eval cannot "
                "see: give it as a ProbabilisticActor, or set policy.deterministic to True"
            )
        inputs = [unravel_key(key) for key in getattr(policy, "in_keys", ())]
        outputs = [unravel_key(key) for key in getattr(policy, "out_keys", ())]
        self._state_keys = [key for key in inputs if ("next", *_path(key)) in map(_path, outputs)]
        self._tracks_start = _IS_INIT in inputs
        self._needed = [key for key in inputs if key not in self._state_keys and key != _IS_INIT]
        self._inputs = self._read_by(observation_space, known=bool(inputs))
        self._action_keys = _action_keys(outputs, action_space)
        self._dtype = _floating_dtype(policy)
        self._last: TensorDictBase | None = None
        """What the policy wrote for the last batch."""

    @property
    def outputs(self) -> dict[str, Array] | None:
        """What the policy wrote for the last batch, by dotted key: its own form of the action, values.

        A recurrent state is there as it was before, and under ``next`` as it is after.
        """
        if self._last is None:
            return None
        given = {_path(key) for key, _ in self._inputs} | {(_IS_INIT,)}
        states = {("next", *_path(key)) for key in self._state_keys}
        written = ((_path(key), tensor) for key, tensor in self._last.items(include_nested=True, leaves_only=True))
        return {
            ".".join(path): _array(tensor)
            for path, tensor in written
            if path not in given and (path[0] != "next" or path in states)
        }

    def initial_state(self, batch_size: int) -> dict[str, torch.Tensor] | None:
        """Return the state of fresh episodes, by dotted key; None for a policy without memory."""
        if not self._state_keys and not self._tracks_start:
            return None
        state = {".".join(_path(key)): self._zeros(key, batch_size) for key in self._state_keys}
        return {**state, _IS_INIT: torch.ones(batch_size, 1, dtype=torch.bool)}

    def probe_outputs(self, observations: Any) -> list[Array]:
        """Return every number that the module computes on the way to an action."""
        count = _count(observations)
        batch = self._batch(observations, self.initial_state(count))
        output = self._run(batch, EpisodeNoise(np.zeros(count, np.int64), np.zeros(count, np.int64)))
        given = set(map(_path, batch.keys(include_nested=True, leaves_only=True)))
        return [
            _array(tensor)
            for key, tensor in output.items(include_nested=True, leaves_only=True)
            if (_path(key) not in given or tensor is not batch.get(key)) and not _path(key)[-1].endswith("log_prob")
        ]

    def act(
        self, observations: Any, state: Any, live: npt.NDArray[np.bool_], noise: NoiseSource | None
    ) -> tuple[Any, Any]:
        """Choose actions; see :class:`rl_eval.Policy`."""
        if self._normalized:
            check_initialized(self.module, "the policy")
        self._last = output = self._run(self._batch(observations, state), noise)
        actions = self._read(output, live)
        if state is None:
            return actions, None
        following = {name: self._next_state(output, name) for name in state if name != _IS_INIT}
        return actions, {**following, _IS_INIT: torch.zeros_like(state[_IS_INIT])}

    # ------------------------------------------------------------------ in

    def _read_by(self, space: gym.Space[Any], *, known: bool) -> list[tuple[Key, tuple[str, ...]]]:
        """Say which part of an observation each input is: (key in the tensordict, path in the observation)."""
        leaves = _leaf_paths(space)
        if leaves == [()]:
            wanted = self._needed or ([] if known else ["observation"])
            if len(wanted) > 1:
                wanted = [key for key in wanted if _path(key)[-1] == "observation"]
            if len(wanted) > 1 or (self._needed and not wanted):
                raise ConfigError(
                    f"the policy reads {self._needed}, but the observation space {space} is one array: use an "
                    "environment with a Dict space of these keys"
                )
            return [(key, ()) for key in wanted]
        wanted = self._needed if known else [path if len(path) > 1 else path[0] for path in leaves]
        if missing := [key for key in wanted if _path(key) not in leaves]:
            raise ConfigError(
                f"the policy reads {missing}, but observations have {['.'.join(path) for path in leaves]}: rename "
                "the policy's in_keys, or give the environment what it reads (for a TorchRL environment, "
                "as_env(env, observation_keys=[...]) chooses what it shows)"
            )
        return [(key, _path(key)) for key in wanted]

    def _batch(self, observations: Any, state: Any) -> TensorDictBase:
        count = _count(observations)
        batch = TensorDict({}, batch_size=[count], device=None)
        for key, path in self._inputs:
            leaf = observations
            for part in path:
                leaf = leaf[part]
            batch.set(key, self._tensor(leaf))
        if state is not None:
            for key in self._state_keys:
                batch.set(key, state[".".join(_path(key))].to(self._device))
            if self._tracks_start:
                batch.set(_IS_INIT, state[_IS_INIT].to(self._device))
        return batch

    def _tensor(self, array: Array) -> torch.Tensor:
        tensor = torch.from_numpy(array)
        if self._dtype is not None and tensor.is_floating_point():
            tensor = tensor.to(self._dtype)
        return tensor.to(self._device)

    # ------------------------------------------------------------------ through

    def _run(self, batch: TensorDictBase, noise: NoiseSource | None) -> TensorDictBase:
        if not isinstance(self.module, TensorDictModuleBase):
            written: TensorDictBase = self.module(batch.copy())
            return written
        output = batch.copy()
        for stage in self._stages:
            output = stage(output, noise)
        return output

    # ------------------------------------------------------------------ out

    def _read(self, output: TensorDictBase, live: npt.NDArray[np.bool_]) -> Any:
        """Read the action of every row in the structure of the action space."""
        read = {path: self._read_leaf(output, key, space, live) for path, key, space in self._action_keys}
        return read[()] if list(read) == [()] else nested(read)

    def _read_leaf(self, output: TensorDictBase, key: Key, space: gym.Space[Any], live: npt.NDArray[np.bool_]) -> Array:
        tensor = output.get(key, None)
        if tensor is None:
            written = sorted(".".join(_path(name)) for name in output.keys(include_nested=True, leaves_only=True))
            raise ConfigError(f"the policy wrote no {key!r}, which is where its action is read; it has {written}")
        array = _array(tensor)
        if array.dtype.kind == "f":
            refuse_nan(array, live, f"the policy's {key!r}")
        return _as_actions(array, space)

    def _next_state(self, output: TensorDictBase, name: str) -> torch.Tensor:
        value: torch.Tensor | None = output.get(("next", *name.split(".")), None)
        if value is None:
            raise PolicyError(f"the policy wrote no ('next', {name!r}), although it is one of its out_keys")
        return value

    def _zeros(self, key: Key, batch_size: int) -> torch.Tensor:
        """Build the recurrent state of fresh episodes as the module that reads it declares it."""
        for part in self.module.modules():
            if key in getattr(part, "in_keys", ()) and hasattr(part, "make_tensordict_primer"):
                spec = part.make_tensordict_primer().primers[key]
                return torch.zeros(batch_size, *spec.shape, dtype=spec.dtype, device=self._device)
        declared = _at(self._observation_space, _path(key))
        if declared is not None and declared.shape is not None:
            zeros = torch.from_numpy(np.zeros((batch_size, *declared.shape), declared.dtype))
            return zeros.to(self._dtype) if self._dtype is not None and zeros.is_floating_point() else zeros
        raise ConfigError(
            f"the policy carries {key!r} from step to step, but says nowhere what shape it has: give the module that "
            "reads it a make_tensordict_primer() method, or the environment a TensorDictPrimer for it"
        )


def _run_step_by_step(policy: torch.nn.Module) -> None:
    """Let recurrent modules take one step per call, whatever their default is."""
    for part in policy.modules():
        if getattr(part, "_recurrent_mode", None):
            vars(part)["_recurrent_mode"] = False


def _action_keys(outputs: list[Key], space: gym.Space[Any]) -> list[tuple[tuple[str, ...], Key, gym.Space[Any]]]:
    """Say where the action is: (path in the action space, key in the tensordict, space of this part)."""
    if isinstance(space, gym.spaces.Dict):
        leaves = _leaf_paths(space)
        return [(path, path if len(path) > 1 else path[0], _expect_space(space, path)) for path in leaves]
    candidates = [key for key in outputs if _path(key)[-1] == "action" and _path(key)[0] != "next"]
    if not outputs or "action" in candidates:
        candidates = ["action"]
    if len(candidates) != 1:
        raise ConfigError(
            f"the policy's action is not to be found: out_keys are {outputs}, and exactly one must be 'action' or end "
            "with it"
        )
    return [((), candidates[0], space)]


def _as_actions(array: Array, space: gym.Space[Any]) -> Array:
    """Bring a batch of raw actions into the form of the space; one-hot parts become indices."""
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
    shape = (batch, *(space.shape or ()))
    if isinstance(space, gym.spaces.MultiBinary):
        return _reshaped(array, shape, space).astype(np.int8)
    return _reshaped(array, shape, space)


def _reshaped(array: Array, shape: tuple[int, ...], space: gym.Space[Any]) -> Array:
    if array.size != int(np.prod(shape)):
        raise PolicyError(f"the policy returned actions of shape {array.shape}, but {space} needs {shape}")
    return array.reshape(shape)


def _leaf_paths(space: gym.Space[Any]) -> list[tuple[str, ...]]:
    if not isinstance(space, gym.spaces.Dict):
        return [()]
    return [(name, *path) for name, part in space.spaces.items() for path in _leaf_paths(part)]


def _at(space: gym.Space[Any], path: tuple[str, ...]) -> gym.Space[Any] | None:
    for part in path:
        if not isinstance(space, gym.spaces.Dict) or part not in space.spaces:
            return None
        space = space.spaces[part]
    return space


def _expect_space(space: gym.Space[Any], path: tuple[str, ...]) -> gym.Space[Any]:
    found = _at(space, path)
    assert found is not None
    return found


def _path(key: Any) -> tuple[str, ...]:
    return key if isinstance(key, tuple) else (key,)


def _count(observations: Any) -> int:
    while isinstance(observations, Mapping):
        observations = next(iter(observations.values()))
    return len(observations)


def _floating_dtype(policy: Any) -> torch.dtype | None:
    if not isinstance(policy, torch.nn.Module):
        return None
    return next((tensor.dtype for tensor in policy.parameters() if tensor.is_floating_point()), None)


def _array(tensor: torch.Tensor) -> Array:
    # numpy has no bfloat16.
    return np.asarray((tensor.float() if tensor.dtype is torch.bfloat16 else tensor).detach().cpu().numpy())
