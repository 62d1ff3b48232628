"""Loggers for other programs: TensorBoard, Weights & Biases, MLflow, and the Prometheus endpoint of every Ray node."""

from __future__ import annotations

import importlib
import importlib.util
import math
import os
import re
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, final

import numpy as np
from typing_extensions import override

from rl_eval.errors import ConfigError
from rl_eval.log.storage import absolute_place
from rl_eval.records.episode import Outcome
from rl_eval.results.result import EvalPoint
from rl_eval.results.stats.aggregate import histogram_edges
from rl_eval.training.loggers.base import Logger, finite_metrics, prefix_of

if TYPE_CHECKING:
    from rl_eval.execution.handle import EvalProgress
    from rl_eval.recording.video import Video


_REFUSED: Final = re.compile(r"[^\w.\-/ ]", re.ASCII)
"""Characters that MLflow does not allow in the name of a metric."""
_COUNTERS: Final = {
    "episodes_done": "Episodes that completed.",
    "episodes_failed": "Episodes that ran out of attempts.",
    "episodes_retried": "Episodes that took more than one attempt.",
    "env_steps": "Environment steps, including those of failed attempts.",
    "faults": "Faults of environments, policies and runners.",
    "runner_restarts": "Runners lost during evaluations; each is replaced within the restart budget.",
    "evaluations": "Evaluations that ended.",
}
_GAUGES: Final = {
    "mean_return": "Mean return of the last evaluation with a mean return.",
    "evaluated_step": "Training step of the last evaluation.",
    "weights_version": "Weights version of the last evaluation.",
    "weights_lag": "Current training step minus the training step of the last evaluation.",
    "running_episodes_finished": "Finished episodes of the running evaluation.",
    "runners": "Ready runners.",
}


def _check_installed(logger: Logger, package: str) -> None:
    if importlib.util.find_spec(package) is None:
        fix = f"Run pip install 'rl-eval[{package}]'."
        raise ConfigError(f"{type(logger).__name__} needs the package {package}", key="logger", value=package, fix=fix)


def _check_run(logger: Logger, run: Any, *of_a_new_one: Any) -> None:
    if run is not None and any(of_a_new_one):
        problem = f"{type(logger).__name__} received a run and arguments of a new run"
        raise ConfigError(problem, key="run", fix="Pass either a run or arguments of a new run.")


@contextmanager
def _file_of(video: Video) -> Iterator[Path]:
    """Yield the path of a file with a video; use it only in the ``with`` block, because the file may be temporary."""
    with tempfile.TemporaryDirectory(prefix="rl_eval-") as folder:
        path = video.path or video.save(Path(folder)).path
        assert path is not None
        yield path


@final
class TensorBoardLogger(Logger):
    """Writer of event files in a separate folder inside ``log_dir``.

    The folder has the name of the metrics' prefix (``log_dir/eval``). So TensorBoard shows the evaluation as a separate
    run, next to the training that writes to ``log_dir``.

    Each finite metric is a scalar. The mean return and its interval also form one chart with a band, under "Custom
    Scalars". Videos become animated GIFs, because TensorBoard shows no other format.

    If training continues from an earlier checkpoint, a point may have the same step as the last point, or a lower step.
    TensorBoard then hides the old points at this step and at higher steps. The first point of a new logger in an
    existing folder has the same effect. Only the evaluation's folder is affected. Use one logger per ``log_dir`` and
    prefix, because a second logger would hide points of the first logger.

    With ``writer``, points are written to this existing writer, under names with the prefix. The logger flushes it, but
    never closes it. Earlier values stay: a step that is evaluated again has two values. The chart with the band is
    omitted, because a folder can have only one layout of custom charts, and the trainer may have set it.

    Args:
        log_dir: Folder that TensorBoard is started with, or a folder inside it; the trainer may write there too.
        writer: A ``SummaryWriter`` of torch or of tensorboardX, instead of ``log_dir``. It cannot be pickled.

    Raises:
        ConfigError: tensorboard is not installed, or not exactly one of ``log_dir`` and ``writer`` is passed.
    """

    def __init__(self, log_dir: str | os.PathLike[str] | None = None, *, writer: Any = None) -> None:
        is_path, is_writer = isinstance(log_dir, str | os.PathLike), hasattr(writer, "add_scalar")
        if (is_path, is_writer) != (writer is None, log_dir is None):
            fix = "Pass TensorBoardLogger(path) or TensorBoardLogger(writer=SummaryWriter(...))."
            raise ConfigError("TensorBoardLogger needs a path or a writer", key="log_dir", value=log_dir, fix=fix)
        if writer is None:
            _check_installed(self, "tensorboard")
        self._ours = writer is None
        self._log_dir = "" if log_dir is None else absolute_place(log_dir)
        self._writer: Any = writer
        self._last_step = -1

    @override
    def log(self, point: EvalPoint) -> None:
        if point.step <= self._last_step:
            self.close()
        self._last_step = point.step
        writer = self._writer or self._open(point)
        for name, value in finite_metrics(point).items():
            writer.add_scalar(name, value, point.step)
        returns = point.result.counted_rows["episode_return"]
        if len(returns):
            writer.add_histogram(
                f"{prefix_of(point)}episode_return", returns, point.step, bins=histogram_edges(returns)
            )
        writer.flush()

    @override
    def log_video(self, video: Video, point: EvalPoint) -> None:
        from rl_eval.recording.video import gif

        writer = self._writer or self._open(point)
        message = _messages_of(writer)
        picture = message.Image(
            height=video.height, width=video.width, colorspace=3, encoded_image_string=gif(video.content)
        )
        tag = f"{prefix_of(point)}episode_{video.index}"
        writer.file_writer.add_summary(message(value=[message.Value(tag=tag, image=picture)]), point.step)
        writer.flush()

    @override
    def close(self) -> None:
        if self._ours and self._writer is not None:
            self._writer.close()
            self._writer = None

    def _open(self, point: EvalPoint) -> Any:
        from torch.utils.tensorboard import SummaryWriter

        prefix = prefix_of(point)
        name = prefix.strip("/") or "eval"
        # ``purge_step`` hides all values in its folder from this step on. The trainer's values at later steps must stay
        # visible, so the evaluation needs another folder.
        writer = self._writer = SummaryWriter(os.path.join(self._log_dir, name), purge_step=point.step)  # noqa: PTH118 - a URL too.
        band = [f"{prefix}episode_return_{end}" for end in ("mean", "ci_low", "ci_high")]
        writer.add_custom_scalars({name: {"episode return": ["Margin", band]}})
        return writer


def _messages_of(writer: Any) -> Any:
    """Return the protocol buffer class ``Summary`` that a writer needs, since tensorboardX has its own class."""
    own = any(base.__module__.startswith("tensorboardX.") for base in type(writer).__mro__)
    package = "tensorboardX.proto" if own else "tensorboard.compat.proto"
    return importlib.import_module(f"{package}.summary_pb2").Summary


@final
class WandbLogger(Logger):
    """Writer to a separate run, or to the run of the training.

    The horizontal axis is ``<log_prefix>/step``. W&B's own counter is not used as the axis: it cannot decrease, and
    training may already be at a later step when a point is logged. W&B's history cannot be rewritten, so a step that is
    evaluated again has two rows.

    Args:
        project: Project of the new run.
        mode: ``online``, ``offline`` or ``disabled``; by default as W&B's environment variables set it.
        run: An active run to log to; :meth:`close` does not finish it.
        **settings: More arguments of ``wandb.init``, such as ``name``, ``dir``, ``id``, ``group``.

    Raises:
        ConfigError: wandb is not installed, or ``run`` is passed together with arguments of a new run.
    """

    def __init__(
        self, project: str | None = None, *, mode: str | None = None, run: Any = None, **settings: Any
    ) -> None:
        _check_installed(self, "wandb")
        _check_run(self, run, project, mode, settings)
        self._ours = run is None
        self._run = run
        self._settings = {"project": project, "mode": mode, "resume": "allow", "reinit": "create_new", **settings}
        self._defined: set[str] = set()

    @override
    def log(self, point: EvalPoint) -> None:
        import wandb

        prefix = prefix_of(point)
        row: dict[str, Any] = finite_metrics(point)
        returns = point.result.counted_rows["episode_return"]
        if len(returns):
            row[f"{prefix}episode_return"] = wandb.Histogram(
                np_histogram=np.histogram(returns, histogram_edges(returns))
            )
        self._log(row, point)

    @override
    def log_video(self, video: Video, point: EvalPoint) -> None:
        import wandb

        with _file_of(video) as path:
            self._log({f"{prefix_of(point)}episode_{video.index}": wandb.Video(str(path), format="mp4")}, point)

    @override
    def close(self) -> None:
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


@final
class MLflowLogger(Logger):
    """Writer to a separate run, or to the run of the training.

    It uses a separate client, so it neither uses nor changes the active run of ``mlflow.start_run``. MLflow keeps every
    value of a metric, so a step that is evaluated again has two values. Characters that MLflow rejects in names become
    ``_``.

    Args:
        experiment: Name of the experiment of the new run; created if it does not exist. By default
            ``$MLFLOW_EXPERIMENT_NAME``, or MLflow's ``Default``.
        run: A run to log to, such as ``mlflow.active_run()``, or its id; :meth:`close` does not end it.
        tracking_uri: Server or store; by default as ``mlflow.set_tracking_uri`` or ``$MLFLOW_TRACKING_URI`` set it.
        **settings: More arguments of ``MlflowClient.create_run``: ``run_name``, ``tags``, ``start_time``.

    Raises:
        ConfigError: mlflow is not installed, or ``run`` is passed together with arguments of a new run.
    """

    def __init__(
        self, experiment: str | None = None, *, run: Any = None, tracking_uri: str | None = None, **settings: Any
    ) -> None:
        _check_installed(self, "mlflow")
        _check_run(self, run, experiment, settings)
        self._ours = run is None
        self._run_id: str | None = run if run is None or isinstance(run, str) else run.info.run_id
        self._experiment = experiment
        self._tracking_uri = tracking_uri
        self._settings = settings

    @override
    def log(self, point: EvalPoint) -> None:
        from mlflow.entities import Metric

        now = time.time_ns() // 1_000_000
        metrics = [
            Metric(_REFUSED.sub("_", name), value, now, point.step) for name, value in finite_metrics(point).items()
        ]
        client = self._client()
        client.log_batch(self._run(client), metrics)

    @override
    def log_video(self, video: Video, point: EvalPoint) -> None:
        client, place = self._client(), _REFUSED.sub("_", f"{prefix_of(point)}step_{point.step}")
        with _file_of(video) as path:
            client.log_artifact(self._run(client), str(path), place)

    @override
    def close(self) -> None:
        if self._ours and self._run_id is not None:
            self._client().set_terminated(self._run_id)
            self._run_id = None

    def _client(self) -> Any:
        from mlflow import MlflowClient

        return MlflowClient(self._tracking_uri)

    def _run(self, client: Any) -> str:
        """Return the id of the run. At the first point, create the run."""
        if self._run_id is None:
            name = self._experiment or os.environ.get("MLFLOW_EXPERIMENT_NAME") or "Default"
            found = client.get_experiment_by_name(name)
            experiment = client.create_experiment(name) if found is None else found.experiment_id
            self._run_id = str(client.create_run(experiment, **self._settings).info.run_id)
        return self._run_id


@final
class RayMetrics(Logger):
    """Logger that writes counters and gauges of ``ray.util.metrics``.

    Ray exports a gauge as ``ray_rl_eval_<name>`` and a counter as ``ray_rl_eval_<name>_total``. A gauge without a value
    is not exported. This process must be connected to Ray, as a driver or an actor.

    Args:
        name: Value of the label ``evaluator`` of every series. It distinguishes several evaluators in one cluster.
    """

    def __init__(self, name: str = "eval") -> None:
        from ray.util.metrics import Counter, Gauge

        self._tags, label = {"evaluator": name}, ("evaluator",)
        self._counters: dict[str, Any] = {
            key: Counter(f"rl_eval_{key}", text, label) for key, text in _COUNTERS.items()
        }
        self._gauges: dict[str, Any] = {key: Gauge(f"rl_eval_{key}", text, label) for key, text in _GAUGES.items()}
        self._reached: int | None = None
        self._evaluated: int | None = None

    @override
    def log(self, point: EvalPoint) -> None:
        result = point.result
        self._count(
            episodes_done=int((result.table.rows["outcome"] == Outcome.COMPLETED).sum()),
            episodes_failed=result.num_failed,
            episodes_retried=result.num_retried,
            env_steps=result.timing.env_steps,
            faults=len(result.faults),
            runner_restarts=int(result.provenance.get("runners_lost") or 0),
            evaluations=1,
        )
        self._evaluated = point.step
        self._set(mean_return=result.aggregates.mean, evaluated_step=point.step, weights_version=point.weights_version)
        self.reached(point.step)

    @override
    def progress(self, progress: EvalProgress) -> None:
        self._set(running_episodes_finished=progress.num_finished, runners=progress.num_runners)

    @override
    def reached(self, step: int) -> None:
        self._reached = step if self._reached is None else max(self._reached, step)
        if self._evaluated is not None:
            self._set(weights_lag=self._reached - self._evaluated)

    def _count(self, **amounts: int) -> None:
        for name, amount in amounts.items():
            if amount > 0:
                self._counters[name].inc(amount, self._tags)

    def _set(self, **values: float) -> None:
        for name, value in values.items():
            if math.isfinite(value):
                self._gauges[name].set(value, self._tags)
