"""Logger for MLflow: metrics over the training step, and videos as artifacts of a run."""

from __future__ import annotations

import importlib.util
import os
import re
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, final

from rl_eval.errors import ConfigError
from rl_eval.results.result import EvalPoint
from rl_eval.training.loggers.base import Logger, finite_metrics, prefix_of

if TYPE_CHECKING:
    from rl_eval.recording.video import Video

__all__ = ["MLflowLogger"]

_REFUSED: Final = re.compile(r"[^\w.\-/ ]", re.ASCII)
"""Characters that MLflow has in no name of a metric."""


@final
class MLflowLogger(Logger):
    """Writer to a run of its own, or to the one that training logs to.

    It uses a client of its own, so the active run of ``mlflow.start_run`` is neither used nor changed. MLflow keeps
    every value of a metric, so a step that is evaluated again is a second value. Characters that MLflow refuses in
    names become ``_``.

    Args:
        experiment: Name of the experiment of the new run, which is made if it is missing; by default
            ``$MLFLOW_EXPERIMENT_NAME``, or MLflow's ``Default``.
        run: A run to log to, such as ``mlflow.active_run()``, or its id; it is not ended by :meth:`close`.
        tracking_uri: Server or store; by default as ``mlflow.set_tracking_uri`` and ``$MLFLOW_TRACKING_URI`` say.
        **settings: More arguments of ``MlflowClient.create_run``: ``run_name``, ``tags``, ``start_time``.

    Raises:
        ConfigError: mlflow is not installed, or ``run`` is given together with what is for a new one.
    """

    def __init__(
        self, experiment: str | None = None, *, run: Any = None, tracking_uri: str | None = None, **settings: Any
    ) -> None:
        if importlib.util.find_spec("mlflow") is None:
            raise ConfigError("MLflowLogger needs the package mlflow: pip install 'rl-eval[mlflow]'")
        if run is not None and (experiment or settings):
            raise ConfigError("MLflowLogger was given a run, and arguments for a new one: leave either out")
        self._ours = run is None
        self._run_id: str | None = run if run is None or isinstance(run, str) else run.info.run_id
        self._experiment = experiment
        self._tracking_uri = tracking_uri
        self._settings = settings

    def log(self, point: EvalPoint) -> None:
        """See :class:`Logger`."""
        from mlflow.entities import Metric

        now = time.time_ns() // 1_000_000
        metrics = [
            Metric(_REFUSED.sub("_", name), value, now, point.step) for name, value in finite_metrics(point).items()
        ]
        client = self._client()
        client.log_batch(self._run(client), metrics)

    def log_video(self, video: Video, point: EvalPoint) -> None:
        """See :class:`Logger`."""
        client = self._client()
        with tempfile.TemporaryDirectory(prefix="rl_eval-") as folder:
            path = video.path or video.save(Path(folder)).path
            place = _REFUSED.sub("_", f"{prefix_of(point)}step_{point.step}")
            client.log_artifact(self._run(client), str(path), place)

    def close(self) -> None:
        """See :class:`Logger`."""
        if self._ours and self._run_id is not None:
            self._client().set_terminated(self._run_id)
            self._run_id = None

    def _client(self) -> Any:
        from mlflow import MlflowClient

        return MlflowClient(self._tracking_uri)

    def _run(self, client: Any) -> str:
        """Return the id of the run, which is made for the first point."""
        if self._run_id is None:
            run = client.create_run(self._experiment_id(client), **self._settings)
            self._run_id = run.info.run_id
        return self._run_id

    def _experiment_id(self, client: Any) -> str:
        name = self._experiment or os.environ.get("MLFLOW_EXPERIMENT_NAME") or "Default"
        found = client.get_experiment_by_name(name)
        return str(client.create_experiment(name) if found is None else found.experiment_id)
