"""``rl-eval replay``: episodes once more, compared with their records, in a window or as videos if wanted."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from rl_eval.cli.exits import ExitCode
from rl_eval.cli.printing import AsJson, counted, print_either, print_json, print_line, print_report
from rl_eval.cli.settings import Results, Trust, episodes_option, load_to_run, parse_episodes
from rl_eval.cli.shared import option, shown
from rl_eval.errors import ConfigError, UsageError
from rl_eval.reports.page import Line, Page

if TYPE_CHECKING:
    from rl_eval.recording.replay import Replay
    from rl_eval.recording.video import Video
    from rl_eval.results.result import EvalResult


def replay(
    path: Results,
    episodes: Annotated[str | None, episodes_option("Which episodes, as in 3,7-9.")] = None,
    select: Annotated[
        str | None, option("SELECTORS", "Instead: first:K, every:N, best:K, worst:K, failed:K; by default worst,best.")
    ] = None,
    max_episodes: Annotated[int, typer.Option(metavar="N", min=1, help="Most episodes that --select chooses.")] = 8,
    render: Annotated[
        Literal["human"] | None, typer.Option(show_default=False, help="Show the episodes in a window meanwhile.")
    ] = None,
    video: Annotated[bool, typer.Option("--video", help="Write a video of each episode.")] = False,
    output: Annotated[
        Path | None, option("FOLDER", "By default videos in DIR, where reports find them.", "--output", "-o")
    ] = None,
    fps: Annotated[float | None, option("FPS", "Frames per second of a video; by default the environment's.")] = None,
    max_frames: Annotated[int | None, option("N", "Most frames of a video; by default 10,000.")] = None,
    trust: Trust = False,
    as_json: AsJson = False,
) -> None:
    """Run episodes again in this process, from their provenance, and compare each with its record."""
    from rl_eval.log.storage import is_uri
    from rl_eval.recording.video_selection import select_episodes, video_folder

    if select is not None and episodes is not None:
        raise ConfigError("--select and --episodes both choose the episodes: give one of them")
    if video and render:
        raise ConfigError("--video and --render both render the episodes: give one of them")
    if not video and (output is not None or fps is not None or max_frames is not None):
        raise ConfigError("--output, --fps and --max-frames are about videos: give --video, or leave them out")
    if video and output is None and is_uri(path):
        raise ConfigError("the run is not in a folder of this machine: name the folder of its videos with --output")
    result = load_to_run(path, trust)
    if episodes is None:
        indices = select_episodes(result, select or "worst,best", max_episodes)
        if not indices:
            raise UsageError(f"--select {select or 'worst,best'} selects no episode of this run")
    else:
        indices = parse_episodes(episodes, len(result.plan))
    seen: Sequence[Replay | Video]
    if video:
        folder = output or video_folder(path)
        seen = _record(result, indices, folder, fps, max_frames or 10_000, as_json=as_json)
    else:
        seen = _run_again(result, indices, in_window=render is not None, as_json=as_json)
    if not all(again.identical for again in seen):
        raise typer.Exit(ExitCode.PARTIAL)


def _record(
    result: EvalResult, indices: list[int], folder: Path, fps: float | None, max_frames: int, *, as_json: bool
) -> Sequence[Video]:
    """Make videos, and print what they are."""
    from rl_eval.recording.replay import recorded_episode
    from rl_eval.recording.video import record_videos
    from rl_eval.records.plain import plain

    chosen = [f"episode:{recorded_episode(result, index).index}" for index in indices]
    videos = record_videos(result, chosen, folder, max_videos=len(chosen), fps=fps, max_frames=max_frames, trust=True)
    notes, lines, described = [], [], []
    for made in videos:
        fields = {key: value for key, value in vars(made).items() if key != "content"}
        described.append(fields | {"path": shown(str(made.path)), "identical": made.identical})
        lines.append(Line(f"episode {made.index}", made.name, f"{made.frames:,} frames"))
        if made.differences:
            notes.append(f"episode {made.index} did not come out as recorded: {', '.join(made.differences)} differ")
        if made.cut:
            notes.append(f"the video of episode {made.index} ends after {made.frames:,} frames")
    state = "identical" if all(made.identical for made in videos) else "different"
    page = Page(f"{counted(len(videos), 'video')} in {folder}", "", state, [lines], notes)
    print_either(as_json, plain(described), page)
    return videos


def _run_again(result: EvalResult, indices: list[int], *, in_window: bool, as_json: bool) -> Sequence[Replay]:
    """Run episodes again, and print each when it has run, or all as JSON."""
    if in_window:
        from rl_eval.recording.video import replay_in_window as run
    else:
        from rl_eval.recording.replay import replay_each as run
    seen: list[Replay] = []
    for again in run(result, indices, trust=True):
        if not as_json:
            if seen:
                print_line()
            print_report(_page(again))
        seen.append(again)
    if as_json:
        print_json([_described(again) for again in seen])
    return seen


def _described(replayed: Replay) -> Any:
    from rl_eval.records.plain import plain

    again = replayed.again
    described = {name: getattr(again, name) for name in ("index", "seed", "episode_return", "length")}
    described |= {"attempt": again.attempts, "identical": replayed.identical, "faults": list(map(str, again.faults))}
    for key, found in (("differences", replayed.differences), ("numerics", replayed.numerics)):
        described[key] = {name: {"recorded": was, "again": now} for name, (was, now) in found.items()}
    return plain(described)


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
