"""Videos of chosen episodes, or a window: each is run once more, in an environment of its own that renders.

Built on a group and its runners. Imported by loggers, training and the command line.
"""

from __future__ import annotations

from rl_eval.recording.video.recording import Video, record_episode, record_videos, record_with_group
from rl_eval.recording.video.rendering import replay_in_window
from rl_eval.recording.video.selection import VideoSettings, select_episodes

__all__ = [
    "Video",
    "VideoSettings",
    "record_episode",
    "record_videos",
    "record_with_group",
    "replay_in_window",
    "select_episodes",
]
