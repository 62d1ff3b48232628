"""Videos of a result's episodes: selection of episodes, file names, and the video files in the folder of a run.

A selection is a list of selectors, read from left to right until ``max_videos`` episodes are chosen:

============  ==================================================================================
``first:K``   the first K episodes of the plan
``every:N``   every N-th episode of the plan, from episode 0
``best:K``    the K completed episodes with the highest return; if returns are equal, the lowest index
``worst:K``   the K completed episodes with the lowest return; if returns are equal, the lowest index
``median:K``  the K completed episodes in the middle of those sorted by return
``failed:K``  the first K episodes that failed on all attempts; without ``:K``, all such episodes
``episode:I`` the episode with index I
============  ==================================================================================

For ``first``, ``best``, ``worst`` and ``median``, K is 1 by default. An episode is chosen only once, even if several
selectors choose it. An episode without a record is never chosen. If the run was stopped early, ``best``, ``worst`` and
``median`` choose only from the episodes before the first one without a record.

A file name contains the index, seed and return of the episode. A video belongs to the record that has the same index,
seed and return.
"""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np

from rl_eval.errors import ConfigError, nearest
from rl_eval.records.episode import Outcome

if TYPE_CHECKING:
    from rl_eval.results.result import EvalResult


@dataclass(frozen=True)
class VideoSettings:
    """Settings of the videos of every evaluation.

    Args:
        select: Selectors (see the table of this module), as a comma-separated string or as a sequence.
        folder: Folder of the MP4 files, with one subfolder per training step.
        max_videos: Maximum number of videos of one evaluation.
        fps: Frames per second; by default ``render_fps`` of the environment's metadata, or 30 if it is missing.
        max_frames: Maximum number of frames of one video; the rest of the episode is not recorded.
        timeout_s: Longest time that one video may take, in seconds.

    Raises:
        ConfigError: A selector is unknown, a number is out of range, or the encoder is not installed.
    """

    select: str | Sequence[str] = "worst,best"
    folder: str | os.PathLike[str] = "videos"
    max_videos: int = 8
    fps: float | None = None
    max_frames: int = 10_000
    timeout_s: float = 600.0

    def __post_init__(self) -> None:
        _parse(self.select)
        object.__setattr__(self, "folder", str(Path(self.folder).absolute()))
        for name in ("max_videos", "max_frames", "fps", "timeout_s"):
            value, least = getattr(self, name), int(name.startswith("max_"))
            if value is not None and not (value >= least and 0 < value < float("inf")):
                wanted = "at least 1" if least else "a positive number"
                raise ConfigError(f"{name} is {value}", key=name, value=value, fix=f"Pass {wanted}.")
        check_encoder()


def check_encoder() -> None:
    """Check that the encoder of videos is installed.

    Raises:
        ConfigError: imageio-ffmpeg is not installed.
    """
    if importlib.util.find_spec("imageio_ffmpeg") is None:
        problem, fix = "videos need the package imageio-ffmpeg", "Run pip install 'rl-eval[video]'."
        raise ConfigError(problem, key="imageio-ffmpeg", fix=fix)


def select_episodes(result: EvalResult, select: str | Sequence[str], max_videos: int) -> list[int]:
    """Return the indices of the chosen episodes, in the order of the selectors.

    Raises:
        ConfigError: A selector is unknown or its number is out of range.
    """
    chosen = (index for kind, number in _parse(select) for index in _KINDS[kind](result, number))
    return list(islice(dict.fromkeys(chosen), max_videos))


def captions(result: EvalResult) -> dict[int, str]:
    """Return captions of the worst, the median and the best episode, in this order, by index."""
    found: dict[int, str] = {}
    for name in ("worst", "median", "best"):
        for index in select_episodes(result, name, 1):
            found.setdefault(index, f"{name}: episode {index}, return {result.table.record(index).episode_return:.6g}")
    return found


def _parse(select: str | Sequence[str]) -> list[tuple[str, int | None]]:
    """Return (name, number) of every selector; the number is None for a selector without a number."""
    texts = select.split(",") if isinstance(select, str) else list(select)
    if not texts:
        fix = f"Pass some of {', '.join(_KINDS)}."
        raise ConfigError("the selection of videos is empty", key="select", value="", fix=fix)
    selectors: list[tuple[str, int | None]] = []
    for text in map(str.strip, texts):
        kind, colon, number = text.partition(":")
        least = int(kind != "episode")
        if kind not in _KINDS:
            problem = f"the selection of videos has {text!r}: {nearest(kind, _KINDS)}"
            raise ConfigError(problem, key="select", value=text)
        if not colon and kind in _NUMBERED:
            problem = f"the selection of videos has {kind!r}, which needs a number"
            raise ConfigError(problem, key="select", value=kind, fix=_NUMBERED[kind])
        if colon and (not number.isdecimal() or int(number) < least):
            fix = f"Pass an integer of at least {least}, such as '{kind}:2'."
            problem = f"the selection of videos has {text!r}, whose number is not valid"
            raise ConfigError(problem, key="select", value=text, fix=fix)
        selectors.append((kind, int(number) if colon else None))
    return selectors


def _recorded(result: EvalResult, indices: Iterable[int]) -> Iterable[int]:
    filled = result.table.filled
    return (index for index in indices if index < len(filled) and filled[index])


def _ranked(result: EvalResult, sign: int) -> list[int]:
    """Return the indices of the episodes that the metrics include, sorted by ``sign`` times their return."""
    rows = result.counted_rows
    return [int(index) for index in rows["index"][np.argsort(sign * rows["episode_return"], kind="stable")]]


def _middle(indices: list[int], count: int) -> list[int]:
    first = max(0, (len(indices) - count) // 2)
    return indices[first : first + count]


_KINDS: Final[dict[str, Callable[[EvalResult, int | None], Iterable[int]]]] = {
    "first": lambda result, number: _recorded(result, range(min(number or 1, len(result.table)))),
    "every": lambda result, number: _recorded(result, range(0, len(result.table), number or 1)),
    "best": lambda result, number: _ranked(result, -1)[: number or 1],
    "worst": lambda result, number: _ranked(result, 1)[: number or 1],
    "median": lambda result, number: _middle(_ranked(result, 1), number or 1),
    "failed": lambda result, number: map(int, np.flatnonzero(result.table.rows["outcome"] == Outcome.FAILED)[:number]),
    "episode": lambda result, number: _recorded(result, [] if number is None else [number]),
}
_NUMBERED: Final = {
    "every": "Pass an interval, such as 'every:10'.",
    "episode": "Pass an index, such as 'episode:37'.",
}
"""Selectors that need a number, with an example."""


_NAME: Final = re.compile(r"episode_(\d{1,15})_seed_\d+_(return_[\w.+-]+|failed)\.mp4", re.ASCII)


def video_name(index: int, seed: int, episode_return: float | None) -> str:
    """Return the file name of the video of an episode.

    Args:
        index: Index of the episode.
        seed: Seed of the episode.
        episode_return: Return of the episode; None if it failed.
    """
    value = "failed" if episode_return is None else f"return_{episode_return:.6g}"
    return f"episode_{index}_seed_{seed}_{value}.mp4"


def video_folder(path: str | os.PathLike[str]) -> Path:
    """Return the folder of a run's videos. ``path`` is the folder of the run, or a file in this folder."""
    run = Path(path)
    return (run.parent if run.is_file() else run) / "videos"


def video_files(path: str | os.PathLike[str]) -> dict[str, Path]:
    """Return the paths of the videos in a run's video folder, by file name; ignore links and other files."""
    place = video_folder(path)
    if place.is_symlink() or not place.is_dir():
        return {}
    with os.scandir(place) as entries:
        named = [entry for entry in entries if _NAME.fullmatch(entry.name)]
        return {entry.name: place / entry.name for entry in named if entry.is_file(follow_symlinks=False)}


def videos_of(result: EvalResult, path: str | os.PathLike[str]) -> dict[int, Path]:
    """Return the paths of the videos of a result's episodes, by index, in order.

    Args:
        result: The result. A video is returned only if its file name matches a record of the result.
        path: Path of the result; a URI has no videos.
    """
    files = video_files(path)
    found = {index: files[name] for name in files if (index := _index(name, result)) is not None}
    return dict(sorted(found.items()))


def _index(name: str, result: EvalResult) -> int | None:
    """Return the episode index in the file name of a video; None if the name does not match the episode's record."""
    matched = _NAME.fullmatch(name)
    index = int(matched[1]) if matched else -1
    if not (0 <= index < len(result.table) and result.table.filled[index]):
        return None
    row = result.table.rows[index]
    episode_return = float(row["episode_return"]) if row["outcome"] == Outcome.COMPLETED else None
    return index if name == video_name(index, int(row["seed"]), episode_return) else None
