"""``rl-eval view``: the runs in a folder as pages for a browser on this machine."""

from __future__ import annotations

import webbrowser
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rl_eval.cli.exits import Debug, reported
from rl_eval.cli.printing import AsJson, counted, print_json, print_line
from rl_eval.cli.shared import FolderOfRuns
from rl_eval.errors import ConfigError

if TYPE_CHECKING:
    from rl_eval.results.page.server import RunServer

__all__ = ["view"]


def view(
    folder: FolderOfRuns = Path("runs"),
    port: Annotated[
        int, typer.Option("--port", min=0, max=65_535, show_default=False, help="By default one that is free.")
    ] = 0,
    open_: Annotated[bool, typer.Option("--open", help="Open a browser.")] = False,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Show the runs in a folder to a browser on this machine: an index, a report of each, comparisons; until Ctrl-C."""
    with reported(debug), suppress(KeyboardInterrupt), _serving(folder, port) as server:
        runs = server.site.num_runs
        if as_json:
            print_json({"url": server.url, "folder": str(folder), "runs": runs})
        else:
            print_line(f"{server.url}   {counted(runs, 'run')} in {folder}, until Ctrl-C")
        if open_:
            webbrowser.open(server.url)
        server.serve_forever()


def _serving(folder: Path, port: int) -> RunServer:
    """Return a server of a folder that listens already.

    Raises:
        UsageError: There is no such folder.
        ConfigError: The port cannot be had.
    """
    from rl_eval.results.page.server import RunServer
    from rl_eval.results.page.site import RunSite

    site = RunSite(folder)
    try:
        return RunServer(site, port)
    except OSError as error:
        raise ConfigError(
            f"port {port} cannot be used: {error.strerror or error}; without --port it is a free one"
        ) from error
