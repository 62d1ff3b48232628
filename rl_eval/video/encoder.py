"""Frames become an MP4 file one by one, so that a film never stands in memory uncompressed."""

from __future__ import annotations

import subprocess
import tempfile
from pathlib import Path
from typing import Any, Final, final

import numpy as np
import numpy.typing as npt

from rl_eval.errors import ClusterError, EnvError
from rl_eval.video.selection import check_encoder

__all__ = ["Encoder", "gif"]

_EVEN: Final = "pad=ceil(iw/2)*2:ceil(ih/2)*2"
"""Players want even sizes; a missing row or column is black."""
_END_TIMEOUT_S: Final = 120.0
"""Longest that ffmpeg may take for what it was given."""


@final
class Encoder:
    """Encodes frames as H.264, in an ffmpeg process with one thread.

    Args:
        path: The file to write; what ffmpeg has to say goes to a text file beside it.
        fps: Frames per second.

    Raises:
        ConfigError: imageio-ffmpeg is not installed.
    """

    def __init__(self, path: Path, fps: float) -> None:
        check_encoder()
        self._path = path
        self._fps = fps
        self._process: subprocess.Popen[bytes] | None = None
        self._messages = path.with_suffix(".txt")
        self.shape: tuple[int, ...] = ()
        """Height, width and channels of a frame; empty before the first."""
        self.frames = 0

    def write(self, frame: Any) -> None:
        """Add a frame.

        Args:
            frame: Array of uint8, shape (height, width, 3), as large as those before it.

        Raises:
            EnvError: It is something else.
            ClusterError: ffmpeg has ended.
        """
        pixels = _checked(frame, self.shape)
        if self._process is None:
            self.shape = pixels.shape
            self._process = self._start()
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(pixels.data)
        except OSError:
            self.close()
            raise
        self.frames += 1

    def close(self) -> None:
        """Finish the file; may be called again.

        Raises:
            ClusterError: ffmpeg failed.
        """
        process, self._process = self._process, None
        if process is None:
            return
        try:
            process.communicate(timeout=_END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
        if process.returncode:
            said = self._messages.read_text(errors="replace").strip()
            raise ClusterError(f"ffmpeg ended with code {process.returncode}: {said}")

    def _start(self) -> subprocess.Popen[bytes]:
        height, width, _ = self.shape
        source = ["-f", "rawvideo", "-pix_fmt", "rgb24", "-s", f"{width}x{height}", "-r", f"{self._fps:g}", "-i", "-"]
        film = ["-c:v", "libx264", "-pix_fmt", "yuv420p", "-vf", _EVEN, "-threads", "1", "-movflags", "+faststart"]
        command = [*_ffmpeg(), *source, *film, str(self._path)]
        with self._messages.open("wb") as messages:
            return subprocess.Popen(  # noqa: S603  # Ours.
                command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=messages
            )


def gif(content: bytes, *, width: int = 320, fps: float = 10.0) -> bytes:
    """Return an MP4 film as an animated GIF.

    Args:
        content: The MP4 file.
        width: Most pixels across; a smaller film keeps its size.
        fps: Most frames per second.

    Raises:
        ConfigError: imageio-ffmpeg is not installed.
    """
    with tempfile.TemporaryDirectory(prefix="rl_eval-") as folder:
        film, animation = Path(folder, "film.mp4"), Path(folder, "film.gif")
        film.write_bytes(content)
        scale = f"fps={fps:g},scale='min({width},iw)':-2"
        command = [*_ffmpeg(), "-i", str(film), "-vf", scale, str(animation)]
        subprocess.run(command, check=True, stdin=subprocess.DEVNULL, timeout=_END_TIMEOUT_S)  # noqa: S603  # Ours.
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
