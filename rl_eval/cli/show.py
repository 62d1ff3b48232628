"""``rl-eval show``: the runs in a folder, and the details of one run or its episodes."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from rl_eval.cli.printing import AsJson, print_json, print_line, print_note, print_report
from rl_eval.cli.settings import episodes_option, parse_episodes
from rl_eval.errors.redaction import redact_text
from rl_eval.reports.page import Line, Page, lines, one_line
from rl_eval.results.text import counted, number

if TYPE_CHECKING:
    from rl_eval.log.ownership import RunState
    from rl_eval.records.episode import Fault
    from rl_eval.results.result import EvalResult
    from rl_eval.results.story import Event


_GAP: Final = "   "
_SHOWN: Final = 5
"""Maximum number of faults, slow episodes and failed episodes shown."""


def _list(folder: Path, *, as_json: bool) -> None:
    """Print the runs in a folder and its subfolders, newest first. Files are only read; no code in them runs."""
    from rl_eval.reports.listing import HEADINGS, list_runs, used

    runs = list_runs(folder)
    if as_json:
        print_json([run.to_dict() for run in runs])
        return
    if not runs:
        print_note(f"no runs in {folder}; rl-eval run writes to runs/ unless --output is set")
        return
    cells = [run.cells for run in runs]
    headings = used(HEADINGS, cells)
    rows = [headings, *([each.get(heading, "") for heading in headings] for each in cells)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        line = _GAP.join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        print_line(line.rstrip())


def show(
    path: Annotated[str, typer.Argument(metavar="DIR", help="Run folder or URI, or a folder of runs.")] = "runs",
    episodes: Annotated[str | None, episodes_option("Show the events of these episodes, in order.")] = None,
    faults: Annotated[bool, typer.Option("--faults", help="Show every fault with its traceback.")] = False,
    as_json: AsJson = False,
) -> None:
    """List the runs in a folder, or show one run, finished or not: numbers, faults, slowest and failed episodes."""
    if episodes is None and not faults and _holds_runs(path):
        _list(Path(path), as_json=as_json)
        return
    from rl_eval.reports.pages import result_page
    from rl_eval.results.loading import load

    result = load(path)
    if episodes is not None:
        _show_episodes(result, episodes, faults=faults, as_json=as_json)
        return
    run, slowest, failed = _run(path), _slowest(result), _failed(result)
    state = "finished" if run is None else _state(path, result)
    if as_json:
        described = {"state": state, "run": run, "num_finished": len(result.episodes)}
        print_json({**described, "slowest": slowest, "failed": failed, "result": result.to_dict()})
        return
    page = result_page(result)
    if state == "running":
        assert run is not None
        page = replace(page, failure=f"{run['last']} writes this run")
    print_report(page if state == "finished" else replace(page, state=state))
    cells: dict[str, list[tuple[str, str]]] = {}
    if run:
        damaged = f"damaged: {', '.join(run['damaged'])}" if run["damaged"] else ""
        cells["sessions"] = [(f"{run['sessions']:,}", f"last: {run['last']}")]
        cells["segments"] = [(f"{run['segments']:,}", damaged)]
    if not faults:
        cells["faults"] = [(f"{count:,}", kind) for kind, count in result.fault_counts.items()]
        cells["messages"] = [("", _located(fault)) for fault in result.faults[-_SHOWN:]]
    steps = result.table.rows["length"].tolist()
    cells["slowest"] = [
        (f"episode {one['index']}", f"{number(one['seconds'])} s   {counted(steps[one['index']], 'step')}")
        for one in slowest
    ]
    cells["failed"] = [
        (f"episode {one['index']}", f"seed {one['seed']}   {one['attempts']} attempts   {one['last_error']}")
        for one in failed[:_SHOWN]
    ]
    if len(failed) > _SHOWN:
        cells["failed"].append(("", f"and {len(failed) - _SHOWN:,} more; use --json for all"))
    if section := [
        Line("" if position else label, value, text)
        for label, found in cells.items()
        for position, (value, text) in enumerate(found)
    ]:
        print_line()
        shown = "saved result" if run is None else state
        print_report(Page(redact_text(path) if run is None else run["output"], "", shown, [section]))
    if faults:
        _print_faults(result.faults)


def _holds_runs(path: str) -> bool:
    """Whether a path is the folder of runs and not a run: the default folder, or a folder that is not a run."""
    from rl_eval.log.storage import is_uri
    from rl_eval.results.files import RESULT_FILE, is_log_folder

    folder = Path(path)
    return (
        not is_uri(path)
        and not is_log_folder(folder)
        and not (folder / RESULT_FILE).exists()
        and (folder.is_dir() or path == "runs")
    )


def _run(path: str) -> dict[str, Any] | None:
    """Return sessions and segments of a log; None for a saved result without a log."""
    from rl_eval.log.ownership import read_claims
    from rl_eval.log.storage import open_storage

    storage = open_storage(path)
    with suppress(NotADirectoryError):  # The path is a result.json.
        if claims := read_claims(storage):
            return {
                "output": storage.label,
                "sessions": len(claims),
                "last": str(claims[-1]),
                "released": claims[-1].released,
                "segments": len(storage.names("segments")),
                "damaged": storage.names("damaged"),
            }
    return None


def _state(path: str, result: EvalResult) -> RunState:
    from rl_eval.log.ownership import state_of
    from rl_eval.log.storage import open_storage
    from rl_eval.records.determinism import UNFINISHED

    whole = not result.stopped_early and result.determinism != UNFINISHED
    return state_of(open_storage(path), whole=whole, watch=True)


def _slowest(result: EvalResult) -> list[dict[str, Any]]:
    import numpy as np

    from rl_eval.records.plain import plain
    from rl_eval.results.metrics import episode_seconds

    completed = np.flatnonzero(result.table.completed)
    seconds = episode_seconds(result.table.rows[completed])
    slowest = np.argsort(-seconds, kind="stable")[:_SHOWN]
    return [plain({"index": completed[place], "seconds": seconds[place]}) for place in slowest]


def _failed(result: EvalResult) -> list[dict[str, Any]]:
    import numpy as np

    table, lost = result.table, "no fault recorded"
    failed = [table.record(int(index)) for index in np.flatnonzero(table.filled & ~table.completed)]
    return [
        {
            "index": record.index,
            "seed": record.seed,
            "attempts": record.attempts,
            "last_error": next((f"{fault.error_type}: {fault.message}" for fault in record.faults[::-1]), lost),
        }
        for record in failed
    ]


def _located(fault: Fault) -> str:
    return f"{fault}, on {fault.node}{'' if fault.charged else ' (no attempt used up)'}"


def _print_faults(faults: list[Fault]) -> None:
    for fault in faults:
        print_line(f"\n{one_line(_located(fault))}")
        print_line(lines(fault.traceback))
    print_line(f"\n{counted(len(faults), 'fault')}")


def _show_episodes(result: EvalResult, episodes: str, *, faults: bool, as_json: bool) -> None:
    from rl_eval.records.plain import plain
    from rl_eval.results.story import story

    stories = {index: story(result, index) for index in parse_episodes(episodes, len(result.plan))}
    if as_json:
        print_json([{"index": index, "events": plain([*map(asdict, found)])} for index, found in stories.items()])
        return
    for position, (index, events) in enumerate(stories.items()):
        if position:
            print_line()
        end = next(event.kind for event in reversed(events) if event.kind != "check")
        print_report(Page(f"episode {index}", events[0].text, end, [[_event_line(event) for event in events[1:]]]))
        if faults:
            _print_faults([event.fault for event in events if event.fault is not None])


def _event_line(event: Event) -> Line:
    label = f"attempt {event.attempt}" if event.attempt else event.kind
    runner = "" if event.runner is None else f"runner {event.runner}"
    after = "" if event.seconds is None else f" ({number(event.seconds)} s)"
    return Line(label, runner, f"{event.text}{after}")
