"""Policy around an ``nn.Module``; the action space defines the meaning of its outputs.

=================  =============================  ==========================================
action space       module output per row          action
=================  =============================  ==========================================
Discrete           logits, (n,)                   argmax, or sampled by inverse CDF
MultiDiscrete      logits, (sum(nvec),)           the same for each part
MultiBinary        logits, (n,)                   logit > 0, or sampled
Box                actions, or (mean, log_std)    the mean, or mean + exp(log_std) * noise
=================  =============================  ==========================================
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any, ClassVar, Final, cast, final

import gymnasium as gym
import numpy as np
import numpy.typing as npt
import torch
import tree

from rl_eval.errors import ConfigError, PolicyError
from rl_eval.policies.sampling import bernoulli, categorical, gaussian, log_probability, refuse_nan
from rl_eval.protocols import NoiseSource

Array = npt.NDArray[Any]

_UNDECLARED: Final = object()


@final
class ModulePolicy:
    """Policy around a module that maps observation tensors to logits or actions.

    Floating-point observations are cast to the dtype of the module's first floating-point parameter. To change this,
    give the module an attribute ``observation_dtype``: a torch dtype, or None to keep the dtype of the space.

    Args:
        module: Called with a batch of observation tensors in the structure of the observation space.
        action_space: Space that defines the meaning of the outputs.
        deterministic: Take the most likely action instead of sampling.
        device: Torch device to run on.

    Raises:
        ConfigError: The action space is not in the table above.
    """

    takes_device_arrays: ClassVar[bool] = True

    def __init__(
        self, module: torch.nn.Module, action_space: gym.Space[Any], deterministic: bool, device: str = "cpu"
    ) -> None:
        supported = (gym.spaces.Discrete, gym.spaces.MultiDiscrete, gym.spaces.MultiBinary, gym.spaces.Box)
        if not isinstance(action_space, supported):
            problem = f"policy.policy is an nn.Module, whose outputs cannot be read as actions of {action_space}"
            fix = "Implement rl_eval.Policy: its act() returns actions."
            raise ConfigError(problem, key="policy.policy", value=type(module).__name__, fix=fix)
        self.module = module.to(device)
        with suppress(NotImplementedError):  # A module of torch.export keeps the mode in which it was exported.
            self.module.eval()
        self._space = action_space
        self._deterministic = deterministic
        self._device = torch.device(device)
        self._dtype = _observation_dtype(module)
        self._last: tuple[Array, Array | None, Array] | None = None
        """Outputs of the module for the last batch, and the actions drawn from them."""

    @property
    def outputs(self) -> dict[str, Array] | None:
        """``action_log_prob``, shape (batch,): log-probability (or log-density) of each action of the last batch.

        It belongs to the drawn action, before ``policy.actions`` clips or maps this action into the action space. None
        if actions are not sampled.
        """
        if self._last is None:
            return None
        return {"action_log_prob": log_probability(self._space, *self._last)}

    def probe_outputs(self, observations: Any) -> list[Array]:
        """Return the outputs of the module, before actions are read from them."""
        return [array for array in self._forward(observations) if array is not None]

    def log_prob(self, observations: Any, actions: Array) -> npt.NDArray[np.float64]:
        """Return the log-probabilities of actions; see :class:`rl_eval.protocols.ActionLogProb`.

        Raises:
            ConfigError: The action space is a Box, and actions are not sampled or the module returns no ``log_std``. So
                no action has a density.
            PolicyError: The actions are not in the action space.
        """
        output, log_std = self._forward(observations)
        _check_actions(actions, len(output), self._space)
        sampled = not self._deterministic
        if isinstance(self._space, gym.spaces.Box) and not (sampled and log_std is not None):
            problem = "the policy takes one action per observation in a continuous space, so no action has a density"
            fix = "Set policy.deterministic to False, and return (mean, log_std) from the module."
            raise ConfigError(problem, key="policy.deterministic", value=self._deterministic, fix=fix)
        if sampled:
            return log_probability(self._space, output, log_std, actions)
        taken = self._read(output, log_std, np.ones(len(output), np.bool_), None)
        return np.where((taken == actions).reshape(len(output), -1).all(1), 0.0, -np.inf)

    def act(
        self, observations: Any, state: Any, live: npt.NDArray[np.bool_], noise: NoiseSource | None
    ) -> tuple[Array, None]:
        """Choose actions; see :class:`rl_eval.Policy`."""
        output, log_std = self._forward(observations)
        refuse_nan(output, live, "the module's output")
        if self._deterministic or noise is None:
            return self._read(output, log_std, live, None), None
        actions = self._read(output, log_std, live, noise)
        self._last = output, log_std, actions
        return actions, None

    def _forward(self, observations: Any) -> tuple[Array, Array | None]:
        flat = hasattr(observations, "dtype")
        result = self.module(self._tensor(observations) if flat else tree.map_structure(self._tensor, observations))
        batch = len(observations) if flat else len(tree.flatten(observations)[0])
        if isinstance(result, torch.Tensor):
            return _array(result, batch), None
        if isinstance(result, tuple) and len(result) == 2 and isinstance(self._space, gym.spaces.Box):
            mean, log_std = result
            return _array(mean, batch), _array(log_std.expand_as(mean), batch)
        box = isinstance(self._space, gym.spaces.Box)
        problem = f"the module returned {type(result).__name__}, but for {self._space} it must return a tensor" + (
            " of actions or a tuple (mean, log_std)" if box else " of logits"
        )
        raise PolicyError(problem, key="forward", value=type(result).__name__)

    def _tensor(self, array: Any) -> torch.Tensor:
        if isinstance(array, torch.Tensor):
            tensor = array
        else:
            tensor = torch.from_numpy(array) if isinstance(array, np.ndarray) else torch.utils.dlpack.from_dlpack(array)
        if self._dtype not in (None, tensor.dtype) and tensor.is_floating_point():
            tensor = tensor.to(self._dtype)
        return tensor.to(self._device)

    def _read(
        self, output: Array, log_std: Array | None, live: npt.NDArray[np.bool_], noise: NoiseSource | None
    ) -> Array:
        space = self._space
        batch = len(output)
        if isinstance(space, gym.spaces.Discrete):
            logits = _expect(output, (batch, int(space.n)), "logits", space)
            return categorical(logits, live, noise) + int(space.start)
        if isinstance(space, gym.spaces.MultiDiscrete):
            sizes = [int(n) for n in space.nvec.ravel()]
            logits = _expect(output, (batch, sum(sizes)), "logits", space)
            parts = np.split(logits, np.cumsum(sizes)[:-1], axis=1)
            chosen = np.stack([categorical(part, live, noise) for part in parts], axis=1)
            return chosen.reshape(batch, *space.shape) + space.start
        if isinstance(space, gym.spaces.MultiBinary):
            logits = _expect(output.reshape(batch, -1), (batch, int(np.prod(space.shape))), "logits", space)
            return bernoulli(logits, noise).reshape(batch, *space.shape)
        return self._read_box(output, log_std, noise)

    def _read_box(self, output: Array, log_std: Array | None, noise: NoiseSource | None) -> Array:
        shape = (len(output), *(self._space.shape or ()))
        if output.size != int(np.prod(shape)):
            _expect(output, shape, "actions", self._space)
        if noise is None:
            return output.reshape(shape)
        if log_std is None:
            problem = "policy.deterministic is False, but the module returns actions without a distribution"
            fix = "Return a tuple (mean, log_std) to sample from, or set policy.deterministic to True."
            raise ConfigError(problem, key="policy.deterministic", value=False, fix=fix)
        return gaussian(output, np.exp(log_std.astype(np.float64)), noise).reshape(shape)


def _observation_dtype(module: torch.nn.Module) -> torch.dtype | None:
    declared: Any = getattr(module, "observation_dtype", _UNDECLARED)
    if declared is not _UNDECLARED:
        return cast("torch.dtype | None", declared)
    return next((p.dtype for p in module.parameters() if p.is_floating_point()), None)


def _array(output: torch.Tensor, batch: int) -> Array:
    if output.ndim == 0 or len(output) != batch:
        shape = tuple(output.shape)
        raise PolicyError(
            f"the module returned a tensor of shape {shape} for a batch of {batch}", key="forward", value=str(shape)
        )
    # numpy has no bfloat16.
    return (output.float() if output.dtype is torch.bfloat16 else output).cpu().numpy()


def _expect(output: Array, shape: tuple[int, ...], what: str, space: gym.Space[Any]) -> Array:
    if output.shape != shape:
        hint = ""
        if what == "logits" and output.shape == shape[:1]:
            hint = "Return logits, which rl_eval turns into actions, or pass a function that returns actions."
        elif output.ndim == len(shape) == 2:
            hint = f"Give the last layer {shape[1]} outputs."
        problem = f"the policy returned {what} of shape {output.shape}, but {space} needs {shape}"
        raise PolicyError(problem, key=what, value=str(output.shape), fix=hint)
    return output


def _check_actions(actions: Array, batch: int, space: gym.Space[Any]) -> None:
    """Raise if actions are not in the space, because their probabilities would be read at wrong indices."""
    if actions.shape != (batch, *(space.shape or ())):
        problem = f"actions of shape {actions.shape} are not {batch} actions of {space}"
        fix = "Pass actions in the form that the environment takes, not one-hot."
        raise PolicyError(problem, key="actions", value=str(actions.shape), fix=fix)
    if isinstance(space, gym.spaces.Discrete | gym.spaces.MultiDiscrete):
        sizes = space.n if isinstance(space, gym.spaces.Discrete) else space.nvec
        if (outside := (actions < space.start) | (actions >= space.start + sizes)).any():
            wrong = actions[outside][0]
            raise PolicyError(f"action {wrong} is not in {space}", key="actions", value=wrong.item())
