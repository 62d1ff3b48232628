"""Encoder of frames as MP4, one by one, so that a video never stands in memory uncompressed."""

from __future__ import annotations

import subprocess
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, final

import numpy as np
import numpy.typing as npt

from rl_eval.errors import ClusterError, EnvError
from rl_eval.recording.video.selection import check_encoder

__all__ = ["Encoder", "gif"]

_EVEN: Final = "pad=ceil(iw/2)*2:ceil(ih/2)*2"
"""Players want even sizes; a missing row or column is black."""
_H264: Final = ("-c:v", "libx264", "-pix_fmt", "yuv420p", "-threads", "1", "-movflags", "+faststart")
_PATIENCE_S: Final = 120.0
"""Longest time that ffmpeg may take for a frame, or for the end of a file."""


@final
class Encoder:
    """Encoder of frames as H.264, in an ffmpeg process with one thread.

    ``imageio_ffmpeg.write_frames`` is not used, since it hides the process: one that hangs could not be killed, nor one
    that fails be asked for its code and its words.

    Args:
        path: The file to write.
        fps: Frames per second.
        patience_s: Longest time that ffmpeg may take for a frame, or for the end of the file, in seconds.

    Raises:
        ConfigError: imageio-ffmpeg is not installed.
    """

    def __init__(self, path: Path, fps: float, *, patience_s: float = _PATIENCE_S) -> None:
        check_encoder()
        self._path = path
        self._fps = fps
        self._patience_s = patience_s
        self._process: subprocess.Popen[bytes] | None = None
        self.shape: tuple[int, ...] = ()
        """Height, width and channels of a frame; empty before the first."""
        self.frames = 0

    def write(self, frame: Any) -> None:
        """Add a frame.

        Args:
            frame: Array of uint8, shape (height, width, 3), as large as those before it.

        Raises:
            EnvError: It is something else.
            ClusterError: ffmpeg has ended, or hangs.
        """
        pixels = _checked(frame, self.shape)
        if self._process is None:
            self.shape = pixels.shape
            self._process = self._start()
        assert self._process.stdin is not None
        try:
            with _killed_after(self._patience_s, self._process):
                self._process.stdin.write(pixels.data)
        except OSError:
            self.close()
            raise
        self.frames += 1

    def close(self) -> None:
        """Finish the file; may be called again.

        Raises:
            ClusterError: ffmpeg failed, or hangs.
        """
        process, self._process = self._process, None
        if process is None:
            return
        with _killed_after(self._patience_s, process):
            words = process.communicate()[1].decode(errors="replace").strip()
        if process.returncode < 0:
            raise ClusterError(
                f"ffmpeg was ended by signal {-process.returncode}, as it is after {self._patience_s:g} s for a frame"
            )
        if process.returncode:
            raise ClusterError(f"ffmpeg ended with code {process.returncode}: {words}")

    def _start(self) -> subprocess.Popen[bytes]:
        height, width, _ = self.shape
        source = ["-f", "rawvideo", "-pix_fmt", "rgb24", "-s", f"{width}x{height}", "-r", f"{self._fps:g}", "-i", "-"]
        command = [*_ffmpeg(), *source, "-vf", _EVEN, *_H264, str(self._path)]
        return subprocess.Popen(  # noqa: S603  # Ours.
            command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
        )


@contextmanager
def _killed_after(seconds: float, process: subprocess.Popen[bytes]) -> Iterator[None]:
    """Kill a process that takes longer than the body may: a pipe that nobody reads blocks for ever."""
    timer = threading.Timer(seconds, process.kill)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def gif(content: bytes, *, fps: float = 10.0) -> bytes:
    """Return an MP4 video as an animated GIF of at most 320 pixels across, with colours of its own.

    Args:
        content: The MP4 file.
        fps: Most frames per second.

    Raises:
        ConfigError: imageio-ffmpeg is not installed.
    """
    with tempfile.TemporaryDirectory(prefix="rl_eval-") as folder:
        video, animation = Path(folder, "video.mp4"), Path(folder, "video.gif")
        video.write_bytes(content)
        palette = "split[frames][all];[all]palettegen[palette];[frames][palette]paletteuse"
        scale = f"fps={fps:g},scale='min(320,iw)':-2,{palette}"
        command = [*_ffmpeg(), "-i", str(video), "-filter_complex", scale, str(animation)]
        subprocess.run(command, check=True, stdin=subprocess.DEVNULL, timeout=_PATIENCE_S)  # noqa: S603  # Ours.
        return animation.read_bytes()


def _ffmpeg() -> list[str]:
    check_encoder()
    import imageio_ffmpeg

    return [imageio_ffmpeg.get_ffmpeg_exe(), "-y", "-v", "error"]


def _checked(frame: Any, shape: tuple[int, ...]) -> npt.NDArray[np.uint8]:
    if not isinstance(frame, np.ndarray) or frame.dtype != np.uint8 or frame.ndim != 3 or frame.shape[2] != 3:
        found = f"{frame.dtype} of shape {frame.shape}" if isinstance(frame, np.ndarray) else type(frame).__name__
        raise EnvError(f"render() returned {found}, not a uint8 array of shape (height, width, 3)")
    if shape and frame.shape != shape:
        raise EnvError(f"render() returned a frame of shape {frame.shape} after one of shape {shape}")
    return np.ascontiguousarray(frame)
