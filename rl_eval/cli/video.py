"""``rl-eval video``: videos of chosen episodes of a run."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rl_eval.cli.episodes import episodes_option, parse_episodes
from rl_eval.cli.exits import Debug, ExitCode, reported
from rl_eval.cli.printing import AsJson, counted, print_json, print_page
from rl_eval.cli.shared import option, shown
from rl_eval.cli.show import Results
from rl_eval.cli.trusting import Trust, load_to_run
from rl_eval.errors import ConfigError
from rl_eval.reports.page import Line, Page

if TYPE_CHECKING:
    from rl_eval.results.result import EvalResult
    from rl_eval.video import Video

__all__ = ["video"]


def video(
    path: Results,
    select: Annotated[
        str | None,
        option(
            "SELECTORS",
            "Episodes: first:K, every:N, best:K, worst:K, failed:K, with commas; by default worst,best.",
            "--select",
        ),
    ] = None,
    episodes: Annotated[str | None, episodes_option("Which episodes instead, as in 3,7-9.")] = None,
    output: Annotated[
        Path | None,
        option(
            "FOLDER",
            "Where the MP4 files go; by default the folder videos in DIR, where reports find them.",
            "--output",
            "-o",
        ),
    ] = None,
    max_videos: Annotated[
        int, typer.Option("--max-videos", metavar="N", help="Most videos of what --select chooses.")
    ] = 8,
    fps: Annotated[
        float | None, typer.Option("--fps", show_default=False, help="Frames per second; by default the environment's.")
    ] = None,
    max_frames: Annotated[int, typer.Option("--max-frames", metavar="N", help="Most frames of a video.")] = 10_000,
    trust: Trust = False,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Run chosen episodes again in this process, from their provenance, and make a video of each."""
    with reported(debug):
        if select is not None and episodes is not None:
            raise ConfigError("--select and --episodes both say which episodes: give one of them")
        folder = output or _folder_in(path)
        result = load_to_run(path, trust)
        from rl_eval.video import record_videos

        selectors: str | list[str] = "worst,best" if select is None else select
        if episodes is not None:
            selectors = _selectors(result, episodes)
            max_videos = len(selectors)
        videos = record_videos(
            result, selectors, folder, max_videos=max_videos, fps=fps, max_frames=max_frames, trust=True
        )
        if as_json:
            print_json([_description(made) for made in videos])
        else:
            print_page(_page(videos, folder))
        if not all(made.identical for made in videos):
            raise typer.Exit(ExitCode.PARTIAL)


def _selectors(result: EvalResult, episodes: str) -> list[str]:
    from rl_eval.results.replay import recorded_episode

    return [f"episode:{recorded_episode(result, index).index}" for index in parse_episodes(episodes, len(result.plan))]


def _description(made: Video) -> dict[str, Any]:
    from rl_eval.records.plain import plain

    described = asdict(replace(made, content=b"")) | {"path": shown(str(made.path)), "identical": made.identical}
    return {key: plain(value) for key, value in described.items() if key != "content"}


def _folder_in(path: str) -> Path:
    """Return the folder of the videos of a run."""
    from rl_eval.log.storage import is_uri
    from rl_eval.results.videos import video_folder

    if is_uri(path):
        raise ConfigError("the run is not in a folder of this machine: say where its videos go with --output")
    return video_folder(path)


def _page(videos: list[Video], folder: Path) -> Page:
    different = [made for made in videos if not made.identical]
    cut = [made for made in videos if made.cut]
    notes = [
        f"episode {made.index} did not come out as recorded: {', '.join(made.differences)} differ" for made in different
    ] + [f"the video of episode {made.index} ends after {made.frames:,} frames, as --max-frames says" for made in cut]
    return Page(
        title=f"{counted(len(videos), 'video')} in {folder}",
        subtitle="",
        state="different" if different else "identical",
        sections=[[Line(f"episode {made.index}", made.name, f"{made.frames:,} frames") for made in videos]],
        notes=notes,
    )
