"""``rl-eval video``: films of chosen episodes of a run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rl_eval.cli.exits import Debug, ExitCode, reported
from rl_eval.cli.printing import print_page
from rl_eval.cli.show import Results
from rl_eval.cli.trusting import Trust, load_to_run

if TYPE_CHECKING:
    from rl_eval.report.table import Page
    from rl_eval.video import Video

__all__ = ["video"]


def video(
    path: Results,
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="FOLDER", show_default=False, help="Where the MP4 files go.")
    ],
    select: Annotated[
        str,
        typer.Option(
            "--select", metavar="WORDS", help="Episodes: first:K, every:N, best:K, worst:K, failed:K, with commas."
        ),
    ] = "worst,best",
    max_videos: Annotated[int, typer.Option("--max-videos", metavar="N", help="Most films.")] = 8,
    fps: Annotated[
        float | None, typer.Option("--fps", show_default=False, help="Frames per second; by default the environment's.")
    ] = None,
    max_frames: Annotated[int, typer.Option("--max-frames", metavar="N", help="Most frames of a film.")] = 10_000,
    trust: Trust = False,
    debug: Debug = False,
) -> None:
    """Run chosen episodes again in this process, from their provenance, and film them."""
    with reported(debug):
        result = load_to_run(path, trust)
        from rl_eval.video import record_videos

        films = record_videos(result, select, output, max_videos=max_videos, fps=fps, max_frames=max_frames, trust=True)
        print_page(_page(films, output))
        if not all(film.identical for film in films):
            raise typer.Exit(ExitCode.PARTIAL)


def _page(films: list[Video], folder: Path) -> Page:
    from rl_eval.report.table import Line, Page

    different = [film for film in films if not film.identical]
    cut = [film for film in films if film.cut]
    notes = [
        f"episode {film.index} did not come out as recorded: {', '.join(film.differences)} differ" for film in different
    ] + [f"the film of episode {film.index} ends after {film.frames:,} frames, as --max-frames says" for film in cut]
    return Page(
        title=f"{len(films)} {'film' if len(films) == 1 else 'films'} in {folder}",
        subtitle="",
        state="different" if different else "identical",
        sections=[[Line(f"episode {film.index}", film.name, f"{film.frames:,} frames") for film in films]],
        notes=notes,
    )
