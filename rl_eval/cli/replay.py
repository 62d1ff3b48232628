"""``rl-eval replay``: episodes once more, and whether they come out as they were recorded."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from rl_eval.cli.episodes import episodes_option, parse_episodes
from rl_eval.cli.exits import Debug, ExitCode, reported
from rl_eval.cli.printing import AsJson, print_json, print_line, print_page
from rl_eval.cli.show import Results
from rl_eval.cli.trusting import Trust, load_to_run
from rl_eval.results.report.table import Line, Page

if TYPE_CHECKING:
    from rl_eval.results.replay import Replay
    from rl_eval.results.result import EvalResult

__all__ = ["replay"]


def replay(
    path: Results,
    episodes: Annotated[str, episodes_option("Which episodes, as in 3,7-9.")],
    render: Annotated[
        Literal["human"] | None, typer.Option(show_default=False, help="Show the episodes in a window meanwhile.")
    ] = None,
    trust: Trust = False,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Run episodes again in this process, from their provenance, and compare each with its record."""
    with reported(debug):
        result = load_to_run(path, trust)
        indices = parse_episodes(episodes, len(result.plan))
        replays = _run_again(result, indices, in_window=render is not None)
        seen = _described(replays) if as_json else _printed(replays)
        if not all(again.identical for again in seen):
            raise typer.Exit(ExitCode.PARTIAL)


def _run_again(result: EvalResult, indices: list[int], *, in_window: bool) -> Iterator[Replay]:
    if in_window:
        from rl_eval.video import replay_in_window

        return replay_in_window(result, indices, trust=True)
    from rl_eval.results.replay import replay_each

    return replay_each(result, indices, trust=True)


def _printed(replays: Iterable[Replay]) -> list[Replay]:
    """Print each when it has run."""
    seen: list[Replay] = []
    for again in replays:
        if seen:
            print_line()
        print_page(_page(again))
        seen.append(again)
    return seen


def _described(replays: Iterable[Replay]) -> list[Replay]:
    """Print all as JSON."""
    seen = list(replays)
    print_json([_description(again) for again in seen])
    return seen


def _description(replayed: Replay) -> dict[str, Any]:
    from rl_eval.records.plain import plain

    def pairs(found: Mapping[str, tuple[Any, Any]]) -> dict[str, Any]:
        return {key: {"recorded": plain(was), "again": plain(now)} for key, (was, now) in found.items()}

    again = replayed.again
    return {
        "index": again.index,
        "seed": again.seed,
        "attempt": again.attempts,
        "identical": replayed.identical,
        "episode_return": plain(again.episode_return),
        "length": again.length,
        "differences": pairs(replayed.differences),
        "numerics": pairs(replayed.numerics),
        "faults": [str(fault) for fault in again.faults],
    }


def _page(replayed: Replay) -> Page:
    record, again = replayed.recorded, replayed.again
    lines = [
        Line("return", _text(again.episode_return), f"{again.length:,} steps"),
        Line("attempts", str(again.attempts), f"faults while it ran again: {len(again.faults)}"),
    ]
    notes = [str(fault) for fault in again.faults]
    if replayed.numerics:
        shown = ", ".join(f"{key} was {was!r}, is {now!r}" for key, (was, now) in replayed.numerics.items())
        why = (
            "the policy does not compute what it did in the run, as if it had other weights"
            if list(replayed.numerics) == ["outputs"]
            else "this process computes floats in another way than the run"
        )
        notes.append(f"{why}, so equality is not promised: {shown}")
    return Page(
        title=f"episode {record.index}, seed {record.seed}",
        subtitle="",
        state="identical" if replayed.identical else "different",
        sections=[_differences(replayed), lines],
        notes=notes,
    )


def _differences(replayed: Replay) -> list[Line]:
    return [
        Line(name.removeprefix("episode_"), _text(now), f"recorded as {_text(was)}")
        for name, (was, now) in replayed.differences.items()
    ]


def _text(value: Any) -> str:
    """Write a value so that different floats look different."""
    return "not reported" if value is None else repr(value)
