"""Policy of an RLModule with its connectors, which acts on a batch of observations, each row for itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast, final

import gymnasium as gym
import numpy as np
import numpy.typing as npt
import torch
import tree
from ray.rllib.core.columns import Columns
from ray.rllib.utils.spaces.space_utils import get_base_struct_from_space

from rl_eval.errors import ConfigError
from rl_eval.integrations.rllib.actions import Actions, read_actions
from rl_eval.integrations.rllib.observations import FILTERS, Observations, filter_tensors
from rl_eval.policies.random_state import random_state_kept
from rl_eval.protocols import NoiseSource

__all__ = ["RLModulePolicy", "check_spaces"]

Array = npt.NDArray[Any]
Live = npt.NDArray[np.bool_]


@final
class RLModulePolicy:
    """A policy around an RLModule and the connector pieces before and behind it.

    Without noise it acts as RLlib does with ``explore=False`` (``forward_inference`` and the distribution's mode), with
    noise as with ``explore=True`` (``forward_exploration``), except that samples come from the episode's own stream.

    Args:
        module: A torch RLModule of its own: the filters become its submodule ``env_to_module``, so that weights and
            statistics travel together.
        env_to_module: Pieces of the env-to-module pipeline.
        module_to_env: Pieces of the module-to-env pipeline.
        spaces: Observation and action space of the environment that it was trained in.
        statistics: Of the filters, if they are not those of the pieces; see :func:`filter_tensors`.
        agent: Whose part of pieces for several agents; None where there is one.

    Raises:
        ConfigError: A piece cannot be applied to a batch, or the module is not torch's.
        WeightsError: A filter is uninitialized.
    """

    def __init__(
        self,
        module: Any,
        env_to_module: Sequence[Any],
        module_to_env: Sequence[Any],
        spaces: tuple[gym.Space[Any], gym.Space[Any]],
        statistics: Mapping[str, torch.Tensor] | None = None,
        agent: Any = None,
    ) -> None:
        if not isinstance(module, torch.nn.Module):
            raise ConfigError(
                f"the RLModule {type(module).__name__} is not a torch module, and rl_eval runs torch only"
            )
        self.module = module.eval()
        known = filter_tensors(env_to_module, agent=agent) if statistics is None else statistics
        self._observations = Observations(env_to_module, known, agent)
        self.module.add_module(FILTERS, self._observations)
        self._actions = Actions(module_to_env, spaces[1])
        self._trained_on = get_base_struct_from_space(spaces[0])
        self._familiar = False
        # RLModule's methods are not those that torch knows.
        self._rl_module = cast("Any", module)
        with random_state_kept():
            self._stateful = bool(self._rl_module.is_stateful())

    def initial_state(self, batch_size: int) -> Any:
        """Return recurrent state and earlier frames of fresh episodes; None if the policy has neither."""
        state: dict[str, Any] = {}
        if self._stateful:
            state[Columns.STATE_IN] = tree.map_structure(
                lambda leaf: _tensor(leaf).expand(batch_size, *leaf.shape).clone(), self._rl_module.get_initial_state()
            )
        if (frames := self._observations.initial_frames(batch_size)) is not None:
            state["frames"] = frames
        return state or None

    def probe_outputs(self, observations: Any) -> list[Array]:
        """Return what actions are read from, such as logits, for fresh episodes."""
        rows = len(tree.flatten(observations)[0])
        outputs, _ = self._forward(observations, self.initial_state(rows), np.ones(rows, bool), explore=False)
        return [np.asarray(leaf.cpu()) for leaf in tree.flatten(outputs) if isinstance(leaf, torch.Tensor)]

    def act(self, observations: Any, state: Any, live: Live, noise: NoiseSource | None) -> tuple[Any, Any]:
        """Choose actions; see :class:`rl_eval.Policy`."""
        outputs, state = self._forward(observations, state, live, explore=noise is not None)
        return self._actions.for_env(read_actions(self.module, outputs, live, noise)), state

    def _forward(self, observations: Any, state: Any, live: Live, *, explore: bool) -> tuple[Mapping[str, Any], Any]:
        """Run connectors and module; return its outputs without their time dimension, and the next state."""
        if not self._familiar:
            self._check_familiar(observations)
        state = state or {}
        inputs, frames = self._observations(observations, state.get("frames"), live)
        batch: dict[str, Any] = {Columns.OBS: tree.map_structure(self._to_device, inputs)}
        if self._stateful:
            batch[Columns.OBS] = tree.map_structure(lambda leaf: leaf[:, None], batch[Columns.OBS])
            batch[Columns.STATE_IN] = tree.map_structure(self._to_device, state[Columns.STATE_IN])
        forward = self._rl_module.forward_exploration if explore else self._rl_module.forward_inference
        # Only epsilon-greedy modules read the time step, and those draw by themselves, which is refused later.
        outputs = dict(forward(batch, t=0) if explore else forward(batch))
        following: dict[str, Any] = {} if frames is None else {"frames": frames}
        if self._stateful:
            following[Columns.STATE_IN] = outputs.pop(Columns.STATE_OUT)
            outputs = tree.map_structure(lambda leaf: leaf[:, 0], outputs)
        return outputs, following or None

    def _check_familiar(self, observations: Any) -> None:
        """Make sure, once, that observations look like those of training."""
        ours, theirs = tree.flatten(self._trained_on), tree.flatten(observations)
        if [space.shape for space in ours] != [leaf.shape[1:] for leaf in theirs]:
            raise ConfigError(
                f"the policy was trained with the observation space {self._trained_on}, but the environment's "
                f"observations have the shapes {[leaf.shape[1:] for leaf in theirs]}"
            )
        self._familiar = True

    def _to_device(self, value: Any) -> torch.Tensor:
        weight = next(self.module.parameters(), None)
        return _tensor(value) if weight is None else _tensor(value).to(weight.device)


def check_spaces(
    what: str,
    trained: tuple[gym.Space[Any] | None, gym.Space[Any] | None],
    offered: tuple[gym.Space[Any] | None, gym.Space[Any] | None],
) -> None:
    """Make sure that a policy is run in an environment like the one it was trained in.

    Bounds of observations may differ: environments widen them without harm.

    Raises:
        ConfigError: The spaces differ; the message shows both.
    """
    for kind, ours, theirs in zip(("observation", "action"), trained, offered, strict=True):
        if ours is None or theirs is None or ours == theirs:
            continue
        boxes = isinstance(ours, gym.spaces.Box) and isinstance(theirs, gym.spaces.Box)
        if kind == "observation" and boxes and (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype):
            continue
        raise ConfigError(f"{what} was trained with the {kind} space {ours}, but the environment has {theirs}")


def _tensor(value: Any) -> torch.Tensor:
    """As RLlib's NumpyToTensor: floats become float32, except float16."""
    tensor = value if isinstance(value, torch.Tensor) else torch.from_numpy(np.ascontiguousarray(value))
    return tensor.float() if tensor.is_floating_point() and tensor.dtype != torch.float16 else tensor
