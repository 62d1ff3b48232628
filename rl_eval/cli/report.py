"""``rl-eval report`` and ``rl-eval view``: HTML pages of results, in one file or from a local server."""

from __future__ import annotations

import os
import time
import webbrowser
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated
from urllib.parse import quote

import typer

from rl_eval.atomic_write import write_text
from rl_eval.cli.printing import AsJson, print_either, print_note, written
from rl_eval.cli.settings import Trust, load_to_run
from rl_eval.cli.shared import FolderOfRuns, argument
from rl_eval.cli.signals import Interrupted
from rl_eval.errors import ConfigError
from rl_eval.results.text import counted

if TYPE_CHECKING:
    from rl_eval.reports.html import Source


def report(
    paths: Annotated[list[str], argument("DIR...", "Output folders, run folders or URIs.")],
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="FILE", help="HTML file to write; replaces an older report.")
    ] = Path("report.html"),
    videos: Annotated[
        bool, typer.Option("--videos", help="Record the worst, the median and the best episode of each result first.")
    ] = False,
    trust: Trust = False,
    force: Annotated[bool, typer.Option("--force", help="Replace the file even if it is not a report.")] = False,
    as_json: AsJson = False,
) -> None:
    """Write a self-contained HTML report: numbers, charts, faults and every episode.

    With several results, each one is compared with the first.
    """
    from rl_eval.reports.html import is_report, render

    with written(output):
        stranger = not force and output.exists() and not is_report(output)
    if stranger:
        fix = "Pass another --output, or --force to replace the file."
        raise ConfigError(f"{output} exists and is not a report", key="--output", value=str(output), fix=fix)
    text = render([_source(path, output, videos=videos, trust=trust) for path in paths])
    with written(output):
        write_text(output, text)
    size = len(text.encode())
    described = {"path": str(output), "results": len(paths), "bytes": size}
    print_either(as_json, described, f"{output}: {counted(len(paths), 'result')}, {size / 1000:,.0f} kB")


def _source(path: str, output: Path, *, videos: bool, trust: bool) -> Source:
    """Return a result, with links from the page ``output`` to the videos of the result.

    If ``path`` is a symbolic link, use its target. With ``videos``, the videos of the worst, the median and the best
    episode are recorded, unless they exist.
    """
    from rl_eval.log.storage import is_uri
    from rl_eval.recording.video_selection import captions, video_folder, videos_of
    from rl_eval.reports.html import Source
    from rl_eval.results.loading import load

    if videos and is_uri(path):
        raise ConfigError(f"{path} is not a local folder", key="--videos", value=path, fix="Copy the run first.")
    link = path
    if Path(path).is_symlink():  # runs/latest points to another run later.
        path = os.path.normpath(Path(path).parent / Path(path).readlink())
    result, beside = load(path), output.parent.resolve()
    if path != link:
        age = timedelta(seconds=round(time.time() - Path(path).stat().st_mtime))
        print_note(f"{link} is {path}, last written {age} ago")
    chosen = [f"episode:{index}" for index in captions(result) if videos and index not in videos_of(result, path)]
    if chosen:
        from rl_eval.recording.video import record_videos

        record_videos(load_to_run(path, trust), chosen, video_folder(path), trust=True)
    files = videos_of(result, path).items()
    return Source(path, result, {index: quote(os.path.relpath(file.resolve(), beside)) for index, file in files})


def view(
    folder: FolderOfRuns = Path("runs"),
    port: Annotated[
        int, typer.Option("--port", min=0, max=65_535, show_default=False, help="Port. [default: a free one]")
    ] = 0,
    open_: Annotated[bool, typer.Option("--open", help="Open a browser.")] = False,
    as_json: AsJson = False,
) -> None:
    """Start a web server on localhost that shows the runs in a folder. Stop it with Ctrl-C."""
    from rl_eval.reports.view import RunServer

    try:
        server = RunServer(folder, port)
    except OSError as error:
        why, fix = error.strerror or error, "Pass another --port, or omit it to use a free one."
        raise ConfigError(f"--port {port} cannot be used: {why}", key="--port", value=port, fix=fix) from error
    with server:
        described = {"url": server.url, "folder": str(folder), "runs": server.num_runs}
        print_either(
            as_json, described, f"{server.url}   {counted(server.num_runs, 'run')} in {folder}; stop with Ctrl-C"
        )
        if open_:
            webbrowser.open(server.url)
        try:
            server.serve_forever()
        except (Interrupted, KeyboardInterrupt) as stop:
            if (code := getattr(stop, "exit_code", 130)) != 130:
                raise typer.Exit(code) from None
