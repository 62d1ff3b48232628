"""Frames of the first episode of an evaluation, rendered where it runs."""

from __future__ import annotations

from typing import Any, Final, final

import numpy as np

from rl_eval.records.episode import EpisodeRecord, EpisodeSpec
from rl_eval.trajectories.recorder import CompressedRows
from rl_eval.trajectories.trajectory import CompressedArray

__all__ = ["FirstEpisodeFrames"]

_MAX_BYTES: Final = 2**30


@final
class FirstEpisodeFrames:
    """Observer that renders after each step of episode 0, and does nothing in an environment that does not render.

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
        """See :class:`rl_eval.runners.EpisodeObserver`."""
        self._frames, self._filming = 0, self._renders and spec.index == 0

    def on_step(self, *step: Any) -> None:
        """See :class:`rl_eval.runners.EpisodeObserver`."""
        if not self._filming:
            return
        frame = np.asarray(self._env.render(), np.uint8)[..., :3]
        if (self._frames + 1) * frame.nbytes > _MAX_BYTES:
            return
        if self._frames == 0:
            self._rows = CompressedRows(frame.shape, frame.dtype)
        assert self._rows is not None
        self._rows.write(self._frames, frame)
        self._frames += 1

    def on_episode_end(self, record: EpisodeRecord) -> CompressedArray | None:
        """Return the frames; None without any."""
        rows, self._rows = self._rows, None
        return rows.taken(self._frames) if self._filming and rows is not None else None
