"""``rl-eval replay``: episodes once more, compared with their records, in a window or as videos if wanted."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from rl_eval.cli.episodes import Results, episodes_option, parse_episodes
from rl_eval.cli.exits import ExitCode
from rl_eval.cli.printing import AsJson, counted, print_either, print_json, print_line, print_report
from rl_eval.cli.shared import option, shown
from rl_eval.cli.trusting import Trust, load_to_run
from rl_eval.errors import ConfigError, UsageError
from rl_eval.results.report.table import Line, Page

if TYPE_CHECKING:
    from rl_eval.results.replay import Replay
    from rl_eval.results.result import EvalResult
    from rl_eval.video import Video

__all__ = ["replay"]


def replay(
    path: Results,
    episodes: Annotated[str | None, episodes_option("Which episodes, as in 3,7-9.")] = None,
    select: Annotated[
        str | None,
        option(
            "SELECTORS",
            "Episodes instead of --episodes: first:K, every:N, best:K, worst:K, failed:K, with commas; by default "
            "worst,best.",
            "--select",
        ),
    ] = None,
    max_episodes: Annotated[
        int, typer.Option("--max-episodes", metavar="N", min=1, help="Most episodes of what --select chooses.")
    ] = 8,
    render: Annotated[
        Literal["human"] | None, typer.Option(show_default=False, help="Show the episodes in a window meanwhile.")
    ] = None,
    video: Annotated[bool, typer.Option("--video", help="Write a video of each episode.")] = False,
    output: Annotated[
        Path | None,
        option(
            "FOLDER",
            "Folder of the videos; by default the folder videos in DIR, where reports find them.",
            "--output",
            "-o",
        ),
    ] = None,
    fps: Annotated[
        float | None, option("FPS", "Frames per second of a video; by default the environment's.", "--fps")
    ] = None,
    max_frames: Annotated[int | None, option("N", "Most frames of a video; by default 10,000.", "--max-frames")] = None,
    trust: Trust = False,
    as_json: AsJson = False,
) -> None:
    """Run episodes again in this process, from their provenance, and compare each with its record."""
    if select is not None and episodes is not None:
        raise ConfigError("--select and --episodes both choose the episodes: give one of them")
    if video and render:
        raise ConfigError("--video and --render both render the episodes: give one of them")
    options = {"output": output, "fps": fps, "max_frames": max_frames}
    given = {name: value for name, value in options.items() if value is not None}
    if given and not video:
        names = ", ".join(f"--{name.replace('_', '-')}" for name in given)
        raise ConfigError(f"{names}: only videos have this: give --video, or leave it out")
    folder = (output or _folder_in(path)) if video else None
    result = load_to_run(path, trust)
    if episodes is None:
        from rl_eval.video import select_episodes

        indices = select_episodes(result, select or "worst,best", max_episodes)
        if not indices:
            raise UsageError(f"--select {select or 'worst,best'} selects no episode of this run")
    else:
        indices = parse_episodes(episodes, len(result.plan))
    if folder is not None:
        given.pop("output", None)
        identical = _record(result, indices, folder, given, as_json=as_json)
    else:
        identical = _run_again(result, indices, in_window=render is not None, as_json=as_json)
    if not identical:
        raise typer.Exit(ExitCode.PARTIAL)


def _folder_in(path: str) -> Path:
    """Return the folder of the videos of a run."""
    from rl_eval.log.storage import is_uri
    from rl_eval.results.videos import video_folder

    if is_uri(path):
        raise ConfigError("the run is not in a folder of this machine: name the folder of its videos with --output")
    return video_folder(path)


def _record(result: EvalResult, indices: list[int], folder: Path, how: dict[str, Any], *, as_json: bool) -> bool:
    """Make videos; return whether all episodes came out as recorded."""
    from rl_eval.records.plain import plain
    from rl_eval.results.replay import recorded_episode
    from rl_eval.video import record_videos

    selectors = [f"episode:{recorded_episode(result, index).index}" for index in indices]
    videos = record_videos(result, selectors, folder, max_videos=len(selectors), trust=True, **how)
    described = [
        {key: value for key, value in vars(made).items() if key != "content"}
        | {"path": shown(str(made.path)), "identical": made.identical}
        for made in videos
    ]
    print_either(as_json, plain(described), _videos_page(videos, folder))
    return all(made.identical for made in videos)


def _videos_page(videos: list[Video], folder: Path) -> Page:
    notes = [
        f"episode {made.index} did not come out as recorded: {', '.join(made.differences)} differ"
        for made in videos
        if made.differences
    ]
    state = "different" if notes else "identical"
    notes += [f"the video of episode {made.index} ends after {made.frames:,} frames" for made in videos if made.cut]
    lines = [Line(f"episode {made.index}", made.name, f"{made.frames:,} frames") for made in videos]
    return Page(f"{counted(len(videos), 'video')} in {folder}", "", state, [lines], notes)


def _run_again(result: EvalResult, indices: list[int], *, in_window: bool, as_json: bool) -> bool:
    """Print each episode when it has run, or all as JSON; return whether all came out as recorded."""
    if in_window:
        from rl_eval.video import replay_in_window as run
    else:
        from rl_eval.results.replay import replay_each as run
    seen: list[Replay] = []
    for again in run(result, indices, trust=True):
        if not as_json:
            if seen:
                print_line()
            print_report(_page(again))
        seen.append(again)
    if as_json:
        print_json(_described(seen))
    return all(again.identical for again in seen)


def _described(replays: Iterable[Replay]) -> list[dict[str, Any]]:
    from rl_eval.records.plain import plain

    def pairs(found: Mapping[str, tuple[Any, Any]]) -> dict[str, Any]:
        return {key: {"recorded": plain(was), "again": plain(now)} for key, (was, now) in found.items()}

    return [
        {
            "index": one.again.index,
            "seed": one.again.seed,
            "attempt": one.again.attempts,
            "identical": one.identical,
            "episode_return": plain(one.again.episode_return),
            "length": one.again.length,
            "differences": pairs(one.differences),
            "numerics": pairs(one.numerics),
            "faults": [str(fault) for fault in one.again.faults],
        }
        for one in replays
    ]


def _page(replayed: Replay) -> Page:
    again = replayed.again
    notes = [str(fault) for fault in again.faults]
    if replayed.numerics:
        found = ", ".join(f"{key} was {was!r}, is {now!r}" for key, (was, now) in replayed.numerics.items())
        why = (
            "the policy does not compute what it did in the run, as if it had other weights"
            if list(replayed.numerics) == ["outputs"]
            else "this process computes floats in another way than the run"
        )
        notes.append(f"{why}, so equality is not promised: {found}")
    differences = [
        Line(name.removeprefix("episode_"), _text(now), f"recorded as {_text(was)}")
        for name, (was, now) in replayed.differences.items()
    ]
    lines = [
        Line("return", _text(again.episode_return), f"{again.length:,} steps"),
        Line("attempts", str(again.attempts), f"faults while it ran again: {len(again.faults)}"),
    ]
    state = "identical" if replayed.identical else "different"
    return Page(f"episode {again.index}, seed {again.seed}", "", state, [differences, lines], notes)


def _text(value: Any) -> str:
    """Write a value so that different floats look different."""
    return "not reported" if value is None else repr(value)
