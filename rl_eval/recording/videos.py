"""Videos of the episodes of a result: how their files are called, and those that lie in its folder.

A name says episode, seed and return, so that a video is known for one of a result's record, or for none of it.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Final

from rl_eval.records.episode import Outcome

if TYPE_CHECKING:
    from rl_eval.results.result import EvalResult

__all__ = ["video_files", "video_folder", "video_name", "videos_of"]

_NAME: Final = re.compile(r"episode_(\d{1,15})_seed_\d+_(return_[\w.+-]+|failed)\.mp4", re.ASCII)


def video_name(index: int, seed: int, episode_return: float | None) -> str:
    """Return the name of the file of an episode's video.

    Args:
        index: Of the episode.
        seed: Of the episode.
        episode_return: None if it failed.
    """
    value = "failed" if episode_return is None else f"return_{episode_return:.6g}"
    return f"episode_{index}_seed_{seed}_{value}.mp4"


def video_folder(path: str | os.PathLike[str]) -> Path:
    """Return the folder of a run's videos, whether the run is given by its folder or by a file in it."""
    run = Path(path)
    return (run.parent if run.is_file() else run) / "videos"


def video_files(path: str | os.PathLike[str]) -> dict[str, Path]:
    """Return the files in the folder of a run's videos that are called like them, by name; links do not count."""
    place = video_folder(path)
    if place.is_symlink() or not place.is_dir():
        return {}
    with os.scandir(place) as entries:
        named = [entry for entry in entries if _NAME.fullmatch(entry.name)]
        return {entry.name: place / entry.name for entry in named if entry.is_file(follow_symlinks=False)}


def videos_of(result: EvalResult, path: str | os.PathLike[str]) -> dict[int, Path]:
    """Return the videos of a result's episodes, by index, in order.

    Args:
        result: Whose records their names must agree with.
        path: Where it was read from; at a URI there are none.
    """
    files = video_files(path)
    found = {index: files[name] for name in files if (index := _index(name, result)) is not None}
    return dict(sorted(found.items()))


def _index(name: str, result: EvalResult) -> int | None:
    """Return the index of the episode that a name is about; None if its record says something else."""
    matched = _NAME.fullmatch(name)
    index = int(matched[1]) if matched else -1
    if not (0 <= index < len(result.table) and result.table.filled[index]):
        return None
    row = result.table.rows[index]
    episode_return = float(row["episode_return"]) if row["outcome"] == Outcome.COMPLETED else None
    return index if name == video_name(index, int(row["seed"]), episode_return) else None
