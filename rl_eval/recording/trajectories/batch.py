"""Batch of trajectories in the layout of TorchRL's episode data (TED): arrays by name, or a ``TensorDict``.

========================================  ==================================================================
key                                       value at a frame, one step of an episode
========================================  ==================================================================
``observation``, or the keys of a Dict    what the policy saw
``action``                                what the environment was given
``action_log_prob``, other ``outputs``    what the policy tells of the action; some tell another form of ``action``
``done``, ``terminated``, ``truncated``   False: no episode is over before its last step
``("next", ...)``                         observation, reward and flags after the step; ``("next", "info", key)``
``("collector", "traj_ids")``             index of the episode, also as ``("collector", "index")``
``("collector", "step")``                 number of the step in its episode, from 0
``("collector", "seed")`` and others      ``attempt`` and ``weights_version`` of the episode
``("collector", "mask")``                 when padded: whether a frame is one
``("collector", "arrival")``              in first-ready order only: the place of its episode among arrivals
========================================  ==================================================================
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from rl_eval.recording.trajectories.trajectory import Key, Trajectory

__all__ = ["Fragment", "as_arrays", "as_tensordict", "reserve"]

Array = npt.NDArray[Any]

_COLUMNS: Final = {"traj_ids": "index"} | {name: name for name in ("index", "seed", "attempt", "weights_version")}
_SCALARS: Final = {("done",), ("terminated",), ("truncated",)} | {
    ("next", name) for name in ("reward", "done", "terminated", "truncated")
}
"""What TorchRL keeps as a column of its own, of shape (..., 1)."""


class Fragment(NamedTuple):
    """Steps ``start`` to ``stop - 1`` of a trajectory."""

    trajectory: Trajectory
    start: int
    stop: int

    @property
    def frames(self) -> int:
        """Number of steps."""
        return self.stop - self.start


def as_arrays(fragments: Sequence[Fragment], *, padded: bool = False, arrivals: bool = False) -> dict[str, Array]:
    r"""Return a batch as arrays, by the keys of this module's table joined with dots.

    Args:
        fragments: What the batch has, in order; at least one.
        padded: Give each fragment a row of its own, filled with zeros to the longest; by default frames stand in line.
        arrivals: Say that the order is that of arrival.

    Returns:
        Arrays of shape (frames, \*shape), or (fragments, longest, \*shape).
    """
    return {".".join(key): array for key, array in _batch(fragments, padded, arrivals).items()}


def as_tensordict(fragments: Sequence[Fragment], *, padded: bool = False, arrivals: bool = False) -> Any:
    """Return a batch as a ``TensorDict`` of batch size (frames,), or (fragments, longest); see :func:`as_arrays`."""
    import torch
    from tensordict import TensorDict

    arrays = _batch(fragments, padded, arrivals)
    size = arrays["collector", "traj_ids"].shape
    batch = TensorDict({}, batch_size=size)
    for key, array in arrays.items():
        tensor = torch.from_numpy(array)
        batch.set(key, tensor.unsqueeze(-1) if key in _SCALARS else tensor)
    return batch


def reserve(*files: Path) -> None:
    """Reserve disk space for memory-mapped files: a write to a page without room ends the process.

    Raises:
        OSError: There is not enough left.
    """
    for file in files:
        with file.open("r+b") as opened:
            if size := file.stat().st_size:
                os.posix_fallocate(opened.fileno(), 0, size)


def _batch(fragments: Sequence[Fragment], padded: bool, arrivals: bool) -> dict[Key, Array]:
    lengths = np.array([fragment.frames for fragment in fragments])
    flat = dict(_recorded(fragments)) | _flags(fragments, lengths) | _labels(fragments, lengths)
    if arrivals:
        flat["collector", "arrival"] = np.repeat(np.arange(len(fragments)), lengths)
    if not padded:
        return flat
    mask = np.arange(lengths.max()) < lengths[:, None]
    return {key: _padded(array, mask) for key, array in flat.items()} | {("collector", "mask"): mask}


def _recorded(fragments: Sequence[Fragment]) -> Iterator[tuple[Key, Array]]:
    r"""Return what was recorded, frame after frame, each array of shape (frames, \*shape)."""
    first = fragments[0].trajectory
    for key in first.observations:
        wholes = [np.asarray(trajectory.observations[key]) for trajectory, _, _ in fragments]
        parts = list(zip(wholes, fragments, strict=True))
        yield key, np.concatenate([whole[start:stop] for whole, (_, start, stop) in parts])
        yield ("next", *key), np.concatenate([whole[start + 1 : stop + 1] for whole, (_, start, stop) in parts])
    for key in first.actions:
        yield key, np.concatenate([trajectory.actions[key][start:stop] for trajectory, start, stop in fragments])
    yield ("next", "reward"), np.concatenate([whole.rewards[start:stop] for whole, start, stop in fragments])
    for name in first.infos:
        yield ("next", "info", name), np.concatenate([one.infos[name][start:stop] for one, start, stop in fragments])
    for key in first.told:
        if all(key in one.outputs for one, _, _ in fragments):
            yield key, np.concatenate([one.outputs[key][start:stop] for one, start, stop in fragments])


def _flags(fragments: Sequence[Fragment], lengths: npt.NDArray[np.int64]) -> dict[Key, Array]:
    """Return the flags before each step, which are False, and after it, which are False but at an episode's end."""
    frames, ends = int(lengths.sum()), lengths.cumsum() - 1
    whole = np.array([fragment.stop == len(fragment.trajectory) for fragment in fragments])
    after = {
        "done": whole,
        "terminated": whole & [fragment.trajectory.terminated for fragment in fragments],
        "truncated": whole & [fragment.trajectory.truncated for fragment in fragments],
    }
    flags: dict[Key, Array] = {(name,): np.zeros(frames, bool) for name in after}
    for name, at_end in after.items():
        flags["next", name] = np.zeros(frames, bool)
        flags["next", name][ends] = at_end
    return flags


def _labels(fragments: Sequence[Fragment], lengths: npt.NDArray[np.int64]) -> dict[Key, Array]:
    """Return what tells the frames of one episode from those of others."""
    labels: dict[Key, Array] = {
        ("collector", name): np.repeat([getattr(one.trajectory, field) for one in fragments], lengths)
        for name, field in _COLUMNS.items()
    }
    starts = np.array([fragment.start for fragment in fragments])
    labels["collector", "step"] = np.arange(lengths.sum()) + np.repeat(starts - lengths.cumsum() + lengths, lengths)
    return labels


def _padded(flat: Array, mask: npt.NDArray[np.bool_]) -> Array:
    rows = np.zeros((*mask.shape, *flat.shape[1:]), flat.dtype)
    rows[mask] = flat
    return rows
