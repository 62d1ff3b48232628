"""Videos of a service: made by its runners after an evaluation, and saved in a thread."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final, final
from urllib.parse import quote

from rl_eval.redaction import redacted_traceback

if TYPE_CHECKING:
    from rl_eval.execution.jobs import FollowUp
    from rl_eval.video import Video, VideoSettings

__all__ = ["VideoWriter"]

_logger: Final = logging.getLogger(__name__)


@final
class VideoWriter:
    """Saves videos of evaluations, in a folder per client and step.

    Args:
        settings: Which episodes, and where; None for none.
    """

    def __init__(self, settings: VideoSettings | None) -> None:
        self._settings = settings
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="rl_eval videos")
        self._lock = threading.Lock()
        self._expected = 0

    @property
    def busy(self) -> bool:
        """Whether videos are being made or saved."""
        return self._expected > 0

    def expect(self) -> None:
        """Note that an evaluation is done, and its videos are to come."""
        with self._lock:
            self._expected += self._settings is not None

    def follow_up(self, client: str, step: int) -> FollowUp | None:
        """Return what records episodes after an evaluation; None if none are asked for."""
        if self._settings is None:
            return None
        from rl_eval.video.recording import follow_up_videos

        # Clients count steps of their own, and have names that need not be those of folders.
        folder = Path(self._settings.folder, f"client_{quote(client, safe='')}", f"step_{step}")

        def done(videos: Sequence[Future[Video]]) -> None:
            with suppress(RuntimeError):  # The service ends.
                self._thread.submit(self._save, videos, folder)

        return follow_up_videos(self._settings, done)

    def stop(self) -> None:
        """Save no more."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _save(self, videos: Sequence[Future[Video]], folder: Path) -> None:
        from rl_eval.video.recording import saved

        def report(error: Exception) -> None:
            _logger.error("a video in %s could not be made\n%s", folder, redacted_traceback(error).rstrip())

        try:
            for _ in saved((video.result for video in videos), folder, report):
                pass
        finally:
            with self._lock:
                self._expected -= 1
