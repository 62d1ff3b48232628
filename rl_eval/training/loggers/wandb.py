"""Logger for Weights & Biases: points and videos as a run."""

from __future__ import annotations

import importlib.util
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

import numpy as np

from rl_eval.errors import ConfigError
from rl_eval.results.result import EvalPoint
from rl_eval.results.stats.aggregate import histogram_edges
from rl_eval.training.loggers.base import Logger, finite_metrics, prefix_of

if TYPE_CHECKING:
    from rl_eval.recording.video import Video

__all__ = ["WandbLogger"]


@final
class WandbLogger(Logger):
    """Writer to a run of its own, or to the one that training logs to.

    Everything is drawn over ``<log_prefix>/step``, and not over W&B's own counter, which must not go back: evaluations
    report steps that training has left behind. W&B's history cannot be rewritten, so a step that is evaluated again is
    a second row.

    Args:
        project: Project of the new run.
        mode: ``online``, ``offline`` or ``disabled``; by default as W&B's environment variables say.
        run: A live run to log to; it is not finished by :meth:`close`.
        **settings: More arguments of ``wandb.init``, such as ``name``, ``dir``, ``id``, ``group``.

    Raises:
        ConfigError: wandb is not installed, or ``run`` is given together with what is for a new one.
    """

    def __init__(
        self, project: str | None = None, *, mode: str | None = None, run: Any = None, **settings: Any
    ) -> None:
        if importlib.util.find_spec("wandb") is None:
            raise ConfigError("WandbLogger needs the package wandb: pip install 'rl-eval[wandb]'")
        if run is not None and (project or mode or settings):
            raise ConfigError("WandbLogger was given a run, and arguments for a new one: leave either out")
        self._ours = run is None
        self._run = run
        self._settings = {"project": project, "mode": mode, "resume": "allow", "reinit": "create_new", **settings}
        self._defined: set[str] = set()

    def log(self, point: EvalPoint) -> None:
        """See :class:`Logger`."""
        import wandb

        prefix = prefix_of(point)
        row: dict[str, Any] = finite_metrics(point)
        returns = point.result.counted_rows["episode_return"]
        if len(returns):
            row[f"{prefix}episode_return"] = wandb.Histogram(
                np_histogram=np.histogram(returns, histogram_edges(returns))
            )
        self._log(row, point)

    def log_video(self, video: Video, point: EvalPoint) -> None:
        """See :class:`Logger`."""
        import wandb

        with tempfile.TemporaryDirectory(prefix="rl_eval-") as folder:
            path = video.path or video.save(Path(folder)).path
            self._log({f"{prefix_of(point)}episode_{video.index}": wandb.Video(str(path), format="mp4")}, point)

    def close(self) -> None:
        """See :class:`Logger`."""
        if self._ours and self._run is not None:
            self._run.finish()
            self._run = None

    def _log(self, row: dict[str, Any], point: EvalPoint) -> None:
        import wandb

        if self._run is None:
            self._run = wandb.init(**self._settings)
        axis = f"{prefix_of(point)}step"
        for name in row.keys() - self._defined:
            self._run.define_metric(name, step_metric=axis)
        self._defined |= row.keys()
        self._run.log({**row, axis: point.step})
