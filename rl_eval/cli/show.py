"""``rl-eval show``: report on a run folder or a saved result, or on some of its episodes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from rl_eval.cli.episodes import episodes_option, parse_episodes
from rl_eval.cli.exits import Debug, reported
from rl_eval.cli.printing import AsJson, counted, print_json, print_line, print_page, print_report
from rl_eval.cli.shared import argument
from rl_eval.redaction import redact_text
from rl_eval.results.report.printable import lines, one_line
from rl_eval.results.report.table import Line, Page, number

if TYPE_CHECKING:
    from rl_eval.records.episode import EpisodeRecord, Fault
    from rl_eval.results.result import EvalResult
    from rl_eval.results.story import Event

__all__ = ["Results", "show"]

_SHOWN: Final = 5
"""Faults, slow episodes and failed ones that are shown."""

Results = Annotated[str, argument("DIR", "Run folder or URI, or the output folder of a result.")]


def show(
    path: Results,
    episodes: Annotated[
        str | None, episodes_option("Show what happened to these episodes, as in 3,7-9, in order.")
    ] = None,
    faults: Annotated[bool, typer.Option("--faults", help="Show every fault with its traceback.")] = False,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Show what came of an evaluation, finished or not: numbers, faults, slowest and failed episodes."""
    with reported(debug):
        from rl_eval.results.loading import load

        if episodes is not None:
            _show_episodes(load(path), episodes, faults=faults, as_json=as_json)
            return
        result, run = load(path), _describe_run(path)
        if as_json:
            print_json(_describe(result, run))
            return
        print_report(result)
        sections = [_run_lines(run), [] if faults else _fault_lines(result), _slow_lines(result), _failed_lines(result)]
        if any(sections):
            print_line()
            state = "saved result" if not run else "ended" if run["released"] else "at work, or killed"
            print_page(Page(run.get("run_dir", redact_text(path)), "", state, sections))
        if faults:
            _print_faults(result.faults)


# Single episodes


def _show_episodes(result: EvalResult, episodes: str, *, faults: bool, as_json: bool) -> None:
    from rl_eval.records.plain import plain
    from rl_eval.results.story import story

    stories = {index: story(result, index) for index in parse_episodes(episodes, len(result.plan))}
    if as_json:
        told = [
            {"index": index, "events": plain([asdict(event) for event in found])} for index, found in stories.items()
        ]
        print_json(told)
        return
    for position, (index, events) in enumerate(stories.items()):
        if position:
            print_line()
        _print_story(index, events, faults=faults)


def _print_story(index: int, events: Sequence[Event], *, faults: bool) -> None:
    end = next(event.kind for event in reversed(events) if event.kind != "check")
    print_page(Page(f"episode {index}", events[0].text, end, [[_event_line(event) for event in events[1:]]]))
    if faults:
        _print_faults([event.fault for event in events if event.fault is not None])


def _event_line(event: Event) -> Line:
    label = f"attempt {event.attempt}" if event.attempt else event.kind
    runner = "" if event.runner is None else f"runner {event.runner}"
    after = "" if event.seconds is None else f" ({number(event.seconds)} s)"
    return Line(label, runner, f"{event.text}{after}")


# The run


def _describe_run(path: str) -> dict[str, Any]:
    """Return what the files of a log say besides its episodes; empty for a saved result without a log."""
    from rl_eval.log.ownership import read_claims
    from rl_eval.log.storage import open_storage

    storage = open_storage(path)
    try:
        claims, segments, damaged = read_claims(storage), len(storage.names("segments")), storage.names("damaged")
    except NotADirectoryError:  # It is a result.json.
        return {}
    if not claims:
        return {}
    last = claims[-1]
    return {
        "run_dir": storage.label,
        "sessions": len(claims),
        "last": str(last),
        "released": last.released,
        "segments": segments,
        "damaged": damaged,
    }


def _run_lines(run: dict[str, Any]) -> list[Line]:
    if not run:
        return []
    damaged = run["damaged"]
    damage = f"{len(damaged):,} set aside as damaged: {', '.join(damaged)}" if damaged else ""
    return [
        Line("sessions", f"{run['sessions']:,}", f"the last one: {run['last']}"),
        Line("segments", f"{run['segments']:,}", damage),
    ]


# Its episodes


def _fault_lines(result: EvalResult) -> list[Line]:
    kinds = [Line("", f"{count:,}", kind) for kind, count in result.fault_counts.items()]
    messages = [Line("", "", _located(fault)) for fault in result.faults[-_SHOWN:]]
    return _labelled("faults", kinds) + _labelled("messages", messages)


def _slow_lines(result: EvalResult) -> list[Line]:
    return _labelled(
        "slowest",
        [
            Line("", f"episode {record.index}", f"{number(_seconds(record))} s   {record.length:,} steps")
            for record in _slowest(result)
        ],
    )


def _failed_lines(result: EvalResult) -> list[Line]:
    failed = _failed(result)
    lines = [
        Line("", f"episode {record.index}", f"seed {record.seed}   {record.attempts} attempts   {_last_error(record)}")
        for record in failed[:_SHOWN]
    ]
    more = [Line("", "", f"and {len(failed) - _SHOWN:,} more: --json has them all")] if len(failed) > _SHOWN else []
    return _labelled("failed", lines + more)


def _labelled(label: str, lines: list[Line]) -> list[Line]:
    return [line._replace(label="" if position else label) for position, line in enumerate(lines)]


def _slowest(result: EvalResult) -> list[EpisodeRecord]:
    import numpy as np

    from rl_eval.results.report.metrics import episode_seconds

    order = np.argsort(np.where(result.table.completed, -episode_seconds(result.table.rows), np.inf), kind="stable")
    return [result.table.record(int(index)) for index in order[: min(_SHOWN, int(result.table.completed.sum()))]]


def _failed(result: EvalResult) -> list[EpisodeRecord]:
    import numpy as np

    return [result.table.record(int(i)) for i in np.flatnonzero(result.table.filled & ~result.table.completed)]


def _seconds(record: EpisodeRecord) -> float:
    return record.reset_seconds + record.step_seconds + record.inference_seconds


def _last_error(record: EpisodeRecord) -> str:
    return f"{record.faults[-1].error_type}: {record.faults[-1].message}" if record.faults else "its faults are lost"


def _located(fault: Fault) -> str:
    return f"{fault}, on {fault.node}{'' if fault.charged else ' (not charged)'}"


def _print_faults(faults: list[Fault]) -> None:
    for fault in faults:
        print_line(f"\n{one_line(_located(fault))}")
        print_line(lines(fault.traceback))
    print_line(f"\n{counted(len(faults), 'fault')}")


# As JSON


def _describe(result: EvalResult, run: dict[str, Any]) -> dict[str, Any]:
    from rl_eval.records.plain import plain

    return {
        "run": run or None,
        "num_finished": len(result.episodes),
        "slowest": [{"index": record.index, "seconds": plain(_seconds(record))} for record in _slowest(result)],
        "failed": [
            {
                "index": record.index,
                "seed": record.seed,
                "attempts": record.attempts,
                "last_error": _last_error(record),
            }
            for record in _failed(result)
        ],
        "result": result.to_dict(),
    }
