"""``rl-eval replay``: run episodes again and compare them with their records, optionally in a window or as videos."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from rl_eval.cli.exits import ExitCode
from rl_eval.cli.printing import AsJson, print_either, print_json, print_line, print_report
from rl_eval.cli.settings import Results, Trust, episodes_option, load_to_run, parse_episodes
from rl_eval.cli.shared import option, shown
from rl_eval.errors import ConfigError, UsageError
from rl_eval.reports.page import Line, Page
from rl_eval.results.text import counted

if TYPE_CHECKING:
    from rl_eval.recording.replay import Replay
    from rl_eval.recording.video import Video
    from rl_eval.results.result import EvalResult


def replay(
    path: Results,
    episodes: Annotated[str | None, episodes_option("Episodes to run, such as 3,7-9.")] = None,
    select: Annotated[
        str | None,
        option(
            "SELECTORS",
            "Select episodes by rule: first:K, every:N, best:K, median:K, worst:K, failed:K. [default: worst,best]",
        ),
    ] = None,
    max_episodes: Annotated[int, typer.Option(metavar="N", min=1, help="Maximum number of episodes for --select.")] = 8,
    render: Annotated[
        Literal["human"] | None, typer.Option(show_default=False, help="Show the episodes in a window while they run.")
    ] = None,
    video: Annotated[bool, typer.Option("--video", help="Write a video of each episode.")] = False,
    output: Annotated[
        Path | None,
        option("FOLDER", "Folder of the videos. [default: DIR/videos, where reports find them]", "--output", "-o"),
    ] = None,
    fps: Annotated[float | None, option("FPS", "Frames per second of a video. [default: from the environment]")] = None,
    max_frames: Annotated[int | None, option("N", "Maximum number of frames per video. [default: 10,000]")] = None,
    trust: Trust = False,
    as_json: AsJson = False,
) -> None:
    """Run recorded episodes again in this process, with their config and seeds, and compare each with its record."""
    from rl_eval.log.storage import is_uri
    from rl_eval.recording.video_selection import select_episodes, video_folder

    if select is not None and episodes is not None:
        raise ConfigError("--select and --episodes both choose episodes", key="--select", value=select, fix="Pass one.")
    if video and render:
        raise ConfigError("--video and --render both render episodes", key="--video", value=video, fix="Pass one.")
    if not video and (output is not None or fps is not None or max_frames is not None):
        raise ConfigError(
            "--output, --fps and --max-frames need --video", key="--video", value=video, fix="Add --video."
        )
    if video and output is None and is_uri(path):
        fix = "Pass a local folder for the videos with --output."
        raise ConfigError(f"{path} is not a local folder", key="--output", fix=fix)
    result = load_to_run(path, trust)
    if episodes is None:
        indices = select_episodes(result, select or "worst,best", max_episodes)
        if not indices:
            rule = select or "worst,best"
            fix = "Pass another --select, or --episodes."
            raise UsageError(f"--select {rule} matches no episode of this run", key="--select", value=rule, fix=fix)
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
    """Record videos, and print their names and lengths."""
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
            notes.append(f"episode {made.index} differs from its record in: {', '.join(made.differences)}")
        if made.cut:
            notes.append(f"the video of episode {made.index} ends after {made.frames:,} frames")
    state = "identical" if all(made.identical for made in videos) else "different"
    page = Page(f"{counted(len(videos), 'video')} in {folder}", "", state, [lines], notes)
    print_either(as_json, plain(described), page)
    return videos


def _run_again(result: EvalResult, indices: list[int], *, in_window: bool, as_json: bool) -> Sequence[Replay]:
    """Run episodes again; print each one when it ends, or all of them as JSON."""
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
            "the policy computes other outputs than in the run, for example because its weights differ"
            if list(replayed.numerics) == ["outputs"]
            else "this process computes floats differently than in the run"
        )
        notes.append(f"{why}, so episodes may differ: {found}")
    differences = [
        Line(name.removeprefix("episode_"), _text(now), f"recorded as {_text(was)}")
        for name, (was, now) in replayed.differences.items()
    ]
    lines = [
        Line("return", _text(again.episode_return), counted(again.length, "step")),
        Line("attempts", str(again.attempts), f"faults during this replay: {len(again.faults)}"),
    ]
    state = "identical" if replayed.identical else "different" if replayed.comparable else "not comparable bit for bit"
    return Page(f"episode {again.index}, seed {again.seed}", "", state, [differences, lines], notes)


def _text(value: Any) -> str:
    """Return a value as text; two different floats have different texts."""
    return "not reported" if value is None else repr(value)
