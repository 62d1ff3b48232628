"""Logger for TensorBoard: scalars, the mean with its interval, histograms of returns, and videos."""

from __future__ import annotations

import importlib
import importlib.util
import os
from typing import TYPE_CHECKING, Any, final

from rl_eval.errors import ConfigError
from rl_eval.log.storage import absolute_place
from rl_eval.results.result import EvalPoint
from rl_eval.results.stats.aggregate import histogram_edges
from rl_eval.training.loggers.base import Logger, finite_metrics, prefix_of

if TYPE_CHECKING:
    from rl_eval.recording.video import Video

__all__ = ["TensorBoardLogger"]


@final
class TensorBoardLogger(Logger):
    """Writer of event files, in a folder of their own inside ``log_dir``.

    It is named after the metrics' prefix (``log_dir/eval``), so TensorBoard shows evaluation as a run beside that of
    the training which writes to ``log_dir``.

    Each finite metric is a scalar; the mean return and its interval also form one chart with a band, under "Custom
    Scalars". Videos become animated pictures, since TensorBoard shows no other.

    A step that is not greater than the last one, as when a training goes on from an earlier checkpoint, hides what was
    written from that step on. So does the first point of a logger that continues a folder. This concerns the folder of
    evaluation alone, and with it every logger that has the same ``log_dir`` and prefix: have one.

    A ``writer`` that is there already is written to as it is, under names with the prefix, and flushed, but never
    closed. What it wrote before stays: a step that is evaluated again is a second value. The chart with the band is
    left out, since a folder has one layout of such charts, and it may be the trainer's.

    Args:
        log_dir: The folder that TensorBoard is started with, or one inside it; the trainer may write there too.
        writer: A ``SummaryWriter`` of torch or of tensorboardX, instead of ``log_dir``. It cannot be pickled.

    Raises:
        ConfigError: tensorboard is not installed, or not exactly one of ``log_dir`` and ``writer`` is given.
    """

    def __init__(self, log_dir: str | os.PathLike[str] | None = None, *, writer: Any = None) -> None:
        is_path, is_writer = isinstance(log_dir, str | os.PathLike), hasattr(writer, "add_scalar")
        if (is_path, is_writer) != (writer is None, log_dir is None):
            raise ConfigError(
                "TensorBoardLogger takes either log_dir, a path, or writer, a SummaryWriter: TensorBoardLogger(path) "
                "or TensorBoardLogger(writer=writer)"
            )
        if writer is None and importlib.util.find_spec("tensorboard") is None:
            raise ConfigError("TensorBoardLogger needs the package tensorboard: pip install 'rl-eval[tensorboard]'")
        self._ours = writer is None
        self._log_dir = "" if log_dir is None else absolute_place(log_dir)
        self._writer: Any = writer
        self._last_step = -1

    def log(self, point: EvalPoint) -> None:
        """See :class:`Logger`."""
        writer, prefix = self._writer_for(point), prefix_of(point)
        for name, value in finite_metrics(point).items():
            writer.add_scalar(name, value, point.step)
        returns = point.result.counted_rows["episode_return"]
        if len(returns):
            writer.add_histogram(f"{prefix}episode_return", returns, point.step, bins=histogram_edges(returns))
        writer.flush()

    def log_video(self, video: Video, point: EvalPoint) -> None:
        """See :class:`Logger`."""
        from rl_eval.recording.video.encoder import gif

        if self._writer is None:
            self._writer = self._open(point)
        message = _messages_of(self._writer)
        picture = message.Image(
            height=video.height, width=video.width, colorspace=3, encoded_image_string=gif(video.content)
        )
        tag = f"{prefix_of(point)}episode_{video.index}"
        self._writer.file_writer.add_summary(message(value=[message.Value(tag=tag, image=picture)]), point.step)
        self._writer.flush()

    def close(self) -> None:
        """See :class:`Logger`."""
        if self._ours and self._writer is not None:
            self._writer.close()
            self._writer = None

    def _writer_for(self, point: EvalPoint) -> Any:
        if point.step <= self._last_step:
            self.close()
        if self._writer is None:
            self._writer = self._open(point)
        self._last_step = point.step
        return self._writer

    def _open(self, point: EvalPoint) -> Any:
        from torch.utils.tensorboard import SummaryWriter

        prefix = prefix_of(point)
        name = prefix.strip("/") or "eval"
        # A purge hides every tag of its folder from that step on, and training is ahead of its evaluation.
        writer: Any = SummaryWriter(os.path.join(self._log_dir, name), purge_step=point.step)  # noqa: PTH118 - a URL too.
        band = [f"{prefix}episode_return_{end}" for end in ("mean", "ci_low", "ci_high")]
        writer.add_custom_scalars({name: {"episode return": ["Margin", band]}})
        return writer


def _messages_of(writer: Any) -> Any:
    """Return the class of the protocol buffers that a writer takes: tensorboardX has its own."""
    own = any(base.__module__.startswith("tensorboardX.") for base in type(writer).__mro__)
    package = "tensorboardX.proto" if own else "tensorboard.compat.proto"
    return importlib.import_module(f"{package}.summary_pb2").Summary
