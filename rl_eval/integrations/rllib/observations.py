"""Input of an RLModule: RLlib's env-to-module connector pieces, applied to all rows of a batch at once.

RLlib passes one Python object per episode through its pieces, and the output for an episode depends only on this
episode. So this module can apply the operations of RLlib's pieces to whole batches, with bitwise equal results.

Filters are frozen: observations never change their statistics.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import gymnasium as gym
import numpy as np
import numpy.typing as npt
import torch
import tree
from ray.rllib.connectors.common.flatten_observations import FlattenObservations
from ray.rllib.connectors.common.frame_stacking import FrameStacking
from ray.rllib.connectors.env_to_module.mean_std_filter import MeanStdFilter
from ray.rllib.connectors.env_to_module.observation_preprocessor import SingleAgentObservationPreprocessor
from ray.rllib.utils.filter import RunningStat
from ray.rllib.utils.numpy import SMALL_NUMBER, flatten_inputs_to_1d_tensor
from ray.rllib.utils.spaces.space_utils import get_base_struct_from_space
from typing_extensions import override

from rl_eval.errors import ConfigError, WeightsError

FILTERS: Final = "env_to_module"
"""Name of the module's submodule with the statistics of the filters."""

_PLUMBING: Final = frozenset(
    {
        "AddObservationsFromEpisodesToBatch",
        "AddStatesFromEpisodesToBatch",
        "AddTimeDimToBatchAndZeroPad",
        "AgentToModuleMapping",
        "BatchIndividualItems",
        "NumpyToTensor",
        "WriteObservationsToEpisodes",
    }
)
"""Pieces that only move data between episodes and batches. They are left out, because the rows are a batch already."""

Array = npt.NDArray[Any]
Stage = Callable[[Any, npt.NDArray[np.bool_]], Any]


class Observations(torch.nn.Module):
    """Stages that apply one env-to-module pipeline to batches of observations.

    Args:
        pieces: RLlib's connector pieces, in order. Of these pieces, this object stores only users' preprocessors.
        statistics: Statistics of the filters, from :func:`filter_tensors`.
        agent: Agent whose settings and statistics are used, in pieces that treat each agent separately; None in an
            environment with one agent.

    Raises:
        ConfigError: A piece cannot be applied to a batch; the message names it.
    """

    def __init__(self, pieces: Sequence[Any], statistics: Mapping[str, torch.Tensor], agent: Any = None) -> None:
        super().__init__()
        self._stages: list[Stage] = []
        self._frames: _Frames | None = None
        for piece in pieces:
            if type(piece).__name__ not in _PLUMBING or not type(piece).__module__.startswith("ray.rllib."):
                self._append(piece, statistics, _agent_of(piece, agent), agent)

    @override
    def forward(self, observations: Any, frames: Any, live: npt.NDArray[np.bool_]) -> tuple[Any, Any]:
        """Convert a batch of the environment's observations into the input of the module.

        Args:
            observations: Nested arrays with a leading batch dimension.
            frames: Earlier frames, from :meth:`initial_frames` or the last call; None without frame stacking.
            live: Mask of the rows that run an episode, shape (batch,).

        Returns:
            Nested arrays for the module, and the frames of the next call.
        """
        for stage in self._stages:
            observations = stage(observations, live)
        return (observations, None) if self._frames is None else self._frames(observations, frames)

    def initial_frames(self, batch_size: int) -> Any:
        """Return zeros as the frames before the first observation of an episode; None without frame stacking."""
        return None if self._frames is None else self._frames.initial(batch_size)

    def _append(self, piece: Any, statistics: Mapping[str, torch.Tensor], part: Any, agent: Any) -> None:
        kind = type(piece)
        if self._frames is not None:
            problem = f"the connector piece {kind.__name__} comes after FrameStacking"
            raise ConfigError(
                problem, key="env_to_module", value=kind.__name__, fix="Put this piece before FrameStacking."
            )
        if kind is MeanStdFilter:
            if kind.__name__ in self._modules:
                problem = f"the env-to-module pipeline has two {kind.__name__} pieces, which RLlib saves as one"
                raise ConfigError(problem, key="env_to_module", value=kind.__name__)
            stage = _Filter(piece, part, statistics)
            self.add_module(kind.__name__, stage)
            self._stages.append(stage)
        elif kind is FlattenObservations:
            if part is None or not piece._agent_ids or agent in piece._agent_ids:
                self._stages.append(_flatten(piece, part))
        elif kind is FrameStacking:
            self._frames = _Frames(piece, part)
        elif isinstance(piece, SingleAgentObservationPreprocessor):
            self._stages.append(_preprocess(piece))
        else:
            problem = (
                f"the connector piece {kind.__name__} of the env-to-module pipeline cannot be applied to a batch of "
                "observations"
            )
            fix = (
                "Use MeanStdFilter, FlattenObservations, FrameStacking, a SingleAgentObservationPreprocessor or an "
                "environment wrapper."
            )
            raise ConfigError(problem, key="env_to_module", value=kind.__name__, fix=fix)


def _agent_of(piece: Any, agent: Any) -> Any:
    """Return ``agent`` if the connector piece treats each agent separately, otherwise None."""
    return agent if getattr(piece, "_multi_agent", False) else None


def _structure_of(space: gym.Space[Any], agent: Any) -> Any:
    structure = get_base_struct_from_space(space)
    return structure if agent is None else structure[agent]


def filter_tensors(
    pieces: Sequence[Any], others: Sequence[Mapping[str, Any]] = (), agent: Any = None
) -> dict[str, torch.Tensor]:
    """Return the statistics of a pipeline's filters as tensors. The keys are names of buffers in :class:`Observations`.

    Args:
        pieces: Connector pieces.
        others: States of the same pipeline in other processes. The result includes the observations that these
            processes have seen since RLlib's last merge.
        agent: Agent whose statistics are returned; None in an environment with one agent.

    Raises:
        WeightsError: A filter has seen fewer than two observations.
    """
    named: dict[str, torch.Tensor] = {}
    for piece in pieces:
        if type(piece) is not MeanStdFilter:
            continue
        name, part = type(piece).__name__, _agent_of(piece, agent)
        ours, *theirs = (
            [RunningStat.from_state(stat) for stat in state[part]["running_stats"]]
            for state in (piece.get_state(), *(state[name] for state in others if name in state))
        )
        for leaf, (stat, *elsewhere) in enumerate(zip(ours, *theirs, strict=True)):
            for one in elsewhere:
                stat.update(one)  # RLlib merges them in the same way. These are copies.
            if stat.num_pushes < 2:
                problem = f"the MeanStdFilter has seen {stat.num_pushes} observations, so it has no standard deviation"
                fix = "Train for an iteration before you evaluate."
                raise WeightsError(problem, key=name, value=stat.num_pushes, fix=fix)
            named[f"{name}.mean_{leaf}"] = torch.from_numpy(np.array(stat.mean, np.float64))
            # RLlib adds in float32; the sum is stored exactly.
            named[f"{name}.scale_{leaf}"] = torch.from_numpy(np.array(stat.std + SMALL_NUMBER, np.float64))
    return named


class _Filter(torch.nn.Module):
    """A frozen MeanStdFilter: ``clip((x - mean) / scale)`` of each Box leaf, in float64."""

    def __init__(self, piece: MeanStdFilter, agent: Any, statistics: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        state = piece.get_state()[agent]
        self._demean, self._destd = state["de_mean_to_zero"], state["de_std_to_one"]
        self._clip = state["clip_by_value"]
        structure = _structure_of(piece.input_observation_space, agent)
        self._normalized = [
            not isinstance(space, (gym.spaces.Discrete, gym.spaces.MultiDiscrete)) for space in tree.flatten(structure)
        ]
        for name, tensor in statistics.items():
            kind, _, own = name.rpartition(".")
            if kind == type(piece).__name__:
                self.register_buffer(own, tensor)

    @override
    def forward(self, observations: Any, live: npt.NDArray[np.bool_]) -> Any:
        leaves = tree.flatten(observations)
        places = iter(range(len(leaves)))
        normalized = [
            self._normalize(leaf, next(places)) if chosen else leaf
            for leaf, chosen in zip(leaves, self._normalized, strict=True)
        ]
        return tree.unflatten_as(observations, normalized)

    def _normalize(self, x: Array, leaf: int) -> Array:
        dtype = x.dtype
        if self._demean:
            x = x - self._array(f"mean_{leaf}")
        if self._destd:
            x = x / self._array(f"scale_{leaf}")
        if self._clip:
            x = np.clip(x, -self._clip, self._clip)
        return x.astype(dtype)

    def _array(self, name: str) -> Array:
        return np.asarray(self._buffers[name].cpu())  # type: ignore[union-attr]


def _flatten(piece: FlattenObservations, agent: Any) -> Stage:
    """Return a stage that does the work of a FlattenObservations piece.

    The stage concatenates the one-hot vectors of discrete leaves and the flat arrays of other leaves.
    """
    removed, structure = frozenset(piece._keys_to_remove), piece._input_obs_base_struct
    structure = structure if agent is None else structure[agent]

    def stage(observations: Any, live: npt.NDArray[np.bool_]) -> Any:
        if removed:
            observations = {key: value for key, value in observations.items() if key not in removed}
        return flatten_inputs_to_1d_tensor(observations, structure)

    return stage


def _preprocess(piece: SingleAgentObservationPreprocessor) -> Stage:
    """Return a stage that calls a user's preprocessor once for each live row, with the observation of this row."""
    episode = NoEpisode(f"the connector piece {type(piece).__name__}", "Use only the observation in a preprocessor.")

    def stage(observations: Any, live: npt.NDArray[np.bool_]) -> Any:
        # If no row is live, call it for all rows: only its result shows the shape of the output.
        chosen = live if live.any() else np.ones_like(live)
        rows = [
            piece.preprocess(tree.map_structure(lambda leaf, row=row: leaf[row], observations), episode)
            for row in np.flatnonzero(chosen).tolist()
        ]
        return tree.map_structure(lambda *leaves: _spread(leaves, chosen), *rows)

    return stage


class NoEpisode:
    """Replacement for RLlib's episode object. It raises an error if an attribute is read.

    Args:
        asking: Name of the function or object that gets the replacement, for the message.
        advice: Last sentence of the message.
    """

    def __init__(self, asking: str, advice: str) -> None:
        self._asking, self._advice = asking, advice

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        problem = f"{self._asking} reads {name!r} of RLlib's episode object, which does not exist in rl_eval"
        raise ConfigError(problem, key=self._asking.rpartition(" ")[2], value=name, fix=self._advice)


def _spread(leaves: Sequence[Any], live: npt.NDArray[np.bool_]) -> Array:
    """Return a batch from one leaf per live row. All other rows are zeros."""
    values = np.stack([np.asarray(leaf) for leaf in leaves])
    batch = np.zeros((len(live), *values.shape[1:]), values.dtype)
    batch[live] = values
    return batch


class _Frames:
    """Stage of FrameStacking: it concatenates the last frames on the last axis, with zeros before the first frame."""

    def __init__(self, piece: FrameStacking, agent: Any) -> None:
        self._earlier = piece.num_frames - 1
        self._structure = _structure_of(piece.input_observation_space, agent)

    def initial(self, batch_size: int) -> Any:
        return tree.map_structure(
            lambda leaf: np.zeros((batch_size, *leaf.shape[:-1], self._earlier), leaf.dtype), self._structure
        )

    def __call__(self, observations: Any, frames: Any) -> tuple[Any, Any]:
        stacked = tree.map_structure(lambda old, new: np.concatenate([old, new], axis=-1), frames, observations)
        return stacked, tree.map_structure(lambda leaf: leaf[..., 1:], stacked)
