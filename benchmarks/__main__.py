"""``python -m benchmarks NAME``: measure, print a table, write JSON; ``tables`` makes the docs' tables of it."""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import (
    batched_null,
    beside,
    coverage,
    environments,
    faults,
    honesty,
    impurity,
    log_size,
    matrix,
    memory,
    off_policy,
    pages,
    planning,
    policies,
    provenance,
    rows,
    safety,
    sampling,
    seeds,
    servers,
    slots,
    startup,
    table,
    threads,
)
from benchmarks.runner import Cell, Interpreters, Row, run_cell

_MEDIANS = ("steps_per_second", "steps_per_cpu_second", "seconds", "memcpys", "memcpy_seconds", "cost")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one benchmark; the exit status is 0 even where contenders fail, which the table then says."""
    args = _parser().parse_args(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # unwinds, so that contenders are ended
    if args.name == "tables":
        print("\n".join(map(str, pages.write())) or "every page is as the results have it")
        return 0
    made = provenance.provenance()
    rows = _MEASURES.get(args.name, _contest)(args)
    table.show(table.TABLES[args.name](rows))
    if args.json is not None:
        settings = {key: value for key, value in vars(args).items() if not isinstance(value, Path)}
        _write(args.json, {**made, "settings": settings, "rows": rows})
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    names = parser.add_subparsers(dest="name", required=True, metavar="NAME")
    peers = Path(os.environ.get("RL_EVAL_PEERS_PYTHON", ".venv-peers/bin/python"))

    def add(name: str, about: str, repeat: int) -> argparse.ArgumentParser:
        sub = names.add_parser(name, help=about, description=about)
        sub.add_argument("--json", type=Path, metavar="PATH", help="write every measurement to this file")
        sub.add_argument("--quick", action="store_true", help="small sizes, once: does everything run?")
        sub.add_argument("--repeat", type=_positive, default=repeat, help="turns; tables show medians (%(default)s)")
        return sub

    def add_contest(name: str, about: str, repeat: int) -> argparse.ArgumentParser:
        sub = add(name, about, repeat)
        sub.add_argument("--peers-python", type=Path, default=peers, help="interpreter with the peers (%(default)s)")
        sub.add_argument("--runners", type=_positive, default=2, help="Ray actors per contender (%(default)s)")
        sub.add_argument("--only", default="", metavar="REGEX", help="run the contenders whose label matches")
        return sub

    speed = add_contest("throughput", "counted environment steps per second", repeat=3)
    speed.add_argument("--episode-steps", type=int, default=10, help="length of short episodes; 0: none (%(default)s)")
    add_contest("simulators", "the same in other environments: physics, images, steps that take 5 ms", repeat=3)
    add_contest("scaling", "the same with 1 to 8 runners", repeat=3)
    right = add_contest("correctness", "mean return where the truth is known", repeat=1)
    right.add_argument("--episodes", type=_positive, default=100, help="episodes per evaluation (%(default)s)")
    right.add_argument("--evaluations", type=_positive, default=20, help="evaluations per cell (%(default)s)")
    weights = add_contest("broadcast", "new weights to every runner, in memcpys", repeat=3)
    weights.add_argument("--params", type=_positive, default=100_000_000, help="float32 parameters (%(default)s)")
    weights.add_argument("--rounds", type=_positive, default=15, help="broadcasts per process (%(default)s)")
    weights.add_argument("--object-store-gb", type=float, default=2.5, help="Ray's object store (%(default)s)")
    add("startup", "process start to result", repeat=5)
    add("memory", "memory of a process that evaluates a large policy", repeat=1)
    spun = add("threads", "evaluations in a process where torch has 1, 2 and all threads", repeat=5)
    spun.add_argument("--episodes", type=_positive, default=1000, help="episodes per evaluation (%(default)s)")
    uneven = add("slots", "slots in processes of their own, with steps of 1 to 50 ms", repeat=1)
    uneven.add_argument("--episodes", type=_positive, default=640, help="episodes of 20 steps (%(default)s)")
    served = add("servers", "a policy on a server, and a slow one in the process, with many simulators", repeat=1)
    served.add_argument("--slower", type=float, default=10.0, help="factor for all times (%(default)s)")
    served.add_argument("--episodes", type=_positive, default=192, help="episodes per layout (%(default)s)")
    null = add("batched_null", "cost of the batched runner itself, per slot and step", repeat=5)
    null.add_argument("--seconds", type=float, default=1.0, help="CPU time of a measurement (%(default)s)")
    plan = add("planning", "plan, seeds and schedule, per episode", repeat=3)
    plan.add_argument("--episodes", type=_positive, default=1_000_000, help="episodes (%(default)s)")
    add("rows", "rows that a policy computes per step with few environments", repeat=3)
    struck = add_contest("faults", "what becomes of an evaluation in which one fault strikes", repeat=1)
    struck.add_argument(
        "--patience", type=float, default=60.0, help="seconds more than undisturbed: hangs (%(default)s)"
    )
    kinds = add("policies", "policies of every kind in three layouts: right, refused or labelled", repeat=1)
    kinds.add_argument("--only", default="", metavar="REGEX", help="evaluate the policies whose name matches")
    many = add("multi_agent", "steps per second with several agents, against RLlib's runner", repeat=1)
    many.add_argument("--peers-python", type=Path, default=peers, help="interpreter with the peers (%(default)s)")
    many.add_argument("--episodes", type=_positive, default=32, help="episodes per round (%(default)s)")
    many.add_argument("--only", default="", metavar="REGEX", help="run the cells whose label matches")
    taken = add("sampling", "frames per second of samples, what recording costs, memory", repeat=3)
    taken.add_argument("--peers-python", type=Path, default=peers, help="interpreter with the peers (%(default)s)")
    taken.add_argument("--only", default="", metavar="REGEX", help="run the cells whose label matches")
    taken.add_argument("--frames", type=_positive, default=100_000, help="frames of a batch (%(default)s)")
    taken.add_argument("--memory", action="store_true", help="stream 5 million frames, and watch memory instead")
    log = add("log", "an evaluation log written, continued and summarised", repeat=1)
    log.add_argument("--episodes", type=_positive, default=1_000_000, help="rows (%(default)s)")
    safe = add("safety", "cost of log, recorder and deadlines when nothing happens", repeat=9)
    safe.add_argument("--runners", type=_positive, default=2, help="Ray actors per contender (%(default)s)")
    safe.add_argument("--before", default=safety.BEFORE, metavar="COMMIT", help="the reference (%(default)s)")
    safe.add_argument("--episode-steps", type=int, default=10, help="length of short episodes; 0: none (%(default)s)")
    train = add("beside", "training throughput with evaluation beside it", repeat=1)
    train.add_argument("--peers-python", type=Path, default=peers, help="interpreter with the peers (%(default)s)")
    train.add_argument("--stretch", type=float, default=10.0, help="seconds with or without evaluation (%(default)s)")
    train.add_argument("--stretches", type=_positive, default=18, help="of both kinds together (%(default)s)")
    wild = add("environments", "published environments: the same records in every layout, or a word about it", repeat=1)
    wild.add_argument("--only", default="", metavar="REGEX", help="take the environments whose name matches")
    wild.add_argument("--timeout", type=float, default=300.0, help="seconds for one environment (%(default)s)")
    impure = add("impurity", "environments that are no function of their seed: right, or a word about it", repeat=1)
    impure.add_argument("--only", default="", metavar="REGEX", help="take the kinds and families whose name matches")
    impure.add_argument("--timeout", type=float, default=120.0, help="seconds for one evaluation (%(default)s)")
    honest = add("honesty", "coverage when failing depends on the outcome", repeat=1)
    honest.add_argument("--runs", type=_positive, default=1000, help="simulated evaluations per row (%(default)s)")
    honest.add_argument("--real-runs", type=int, default=5, help="of these, made for real as well (%(default)s)")
    honest.add_argument("--episodes", type=_positive, default=100, help="episodes per evaluation (%(default)s)")
    held = add("coverage", "how often intervals of a mean hold it", repeat=1)
    held.add_argument("--samples", type=_positive, default=1000, help="samples of each kind (%(default)s)")
    wrong = add("levels", "how often an end of an interval is wrong, with and without bounds", repeat=1)
    wrong.add_argument("--runs", type=_positive, default=1000, help="simulated evaluations of each kind (%(default)s)")
    few = add("seeds", "how often intervals of suites with few training seeds hold the number", repeat=1)
    few.add_argument("--suites", type=_positive, default=500, help="simulated suites of each kind (%(default)s)")
    logged = add("ope", "off-policy estimates against exact values: bias and coverage", repeat=4)
    logged.add_argument("--worlds", type=_positive, default=150, help="random tabular MDPs (%(default)s)")
    names.add_parser("tables", help="make the tables of README.md and docs/ again from benchmarks/results")
    return parser


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is below 1")
    return value


def _cells(args: argparse.Namespace) -> list[Cell]:
    if args.name == "throughput":
        sizes = matrix.Sizes.quick(args.runners) if args.quick else matrix.Sizes(args.runners)
        cells = matrix.throughput(sizes, args.episode_steps)
    elif args.name == "correctness":
        cells = matrix.correctness(args.runners, args.episodes, 4 if args.quick else args.evaluations)
    elif args.name == "simulators":
        cells = matrix.simulators(args.runners, quick=args.quick)
    elif args.name == "scaling":
        cells = matrix.scaling(quick=args.quick)
    elif args.name == "multi_agent":
        cells = matrix.multi_agent(16 if args.quick else args.episodes)
    elif args.name == "sampling":
        cells = _sampling(args)
    else:
        rounds = 3 if args.quick else args.rounds
        cells = matrix.broadcast(args.runners, args.params, rounds, args.object_store_gb)
    return cells


def _sampling(args: argparse.Namespace) -> list[Cell]:
    if args.memory:
        return sampling.memory(200_000 if args.quick else 5_000_000)
    return sampling.cells(4_000 if args.quick else args.frames, rounds=2 if args.quick else 10)


def _safety(args: argparse.Namespace) -> list[Row]:
    sizes = matrix.Sizes.quick(args.runners) if args.quick else matrix.Sizes(args.runners)
    turns = 2 if args.quick else args.repeat
    work = [(sizes.episodes(args.runners * safety.LANES), None), (sizes.short_episodes, args.episode_steps)]
    rows = []
    for episodes, steps in work:
        if steps != 0:
            rows += safety.measure(turns, args.runners, episodes, steps, args.before, _say)
    return rows


def _contest(args: argparse.Namespace) -> list[Row]:
    cells = [cell for cell in _cells(args) if re.search(args.only, cell.label)]
    if not cells:
        raise SystemExit(f"--only {args.only}: no contender of {args.name} matches")
    return _measure(cells, _places(args), 1 if args.quick else args.repeat)


def _places(args: argparse.Namespace) -> Interpreters:
    return Interpreters(args.peers_python.absolute())


def _faults(args: argparse.Namespace) -> list[Row]:
    return faults.measure(_places(args), args.runners, args.patience, only=args.only, quick=args.quick, progress=_say)


def _beside(args: argparse.Namespace) -> list[Row]:
    stretch_s, stretches = (2.0, 4) if args.quick else (args.stretch, args.stretches)
    return beside.measure(_places(args), stretch_s, stretches, _say)


def _planning(args: argparse.Namespace) -> list[Row]:
    episodes, turns = (100_000, 1) if args.quick else (args.episodes, args.repeat)
    return planning.measure(episodes, turns, _say)


def _batched_null(args: argparse.Namespace) -> list[Row]:
    seconds, turns = (0.1, 1) if args.quick else (args.seconds, args.repeat)
    return batched_null.measure(seconds, turns, _say)


def _environments(args: argparse.Namespace) -> list[Row]:
    return environments.measure(only=args.only, quick=args.quick, timeout_s=args.timeout, progress=_say)


def _impurity(args: argparse.Namespace) -> list[Row]:
    return impurity.measure(only=args.only, quick=args.quick, timeout_s=args.timeout, progress=_say)


def _off_policy(args: argparse.Namespace) -> list[Row]:
    return off_policy.measure(10 if args.quick else args.worlds, repeats=1 if args.quick else args.repeat)


def _measure(cells: Sequence[Cell], interpreters: Interpreters, repeat: int) -> list[Row]:
    """Take turns, so that a change in the machine's load meets every contender; then merge the turns."""
    turns: dict[int, list[Row]] = {number: [] for number in range(len(cells))}
    for turn in range(repeat):
        for number, cell in enumerate(cells):
            if any(row["status"] != "ok" for row in turns[number]):
                continue
            _say(f"turn {turn + 1} of {repeat}: {cell.label} {cell.column}")
            turns[number].append(run_cell(cell, interpreters))
    return [_merged(cell, turns[number]) for number, cell in enumerate(cells)]


def _merged(cell: Cell, turns: Sequence[Row]) -> Row:
    """One row per cell: the last turn's values, with medians of what varies and all turns beside them.

    A cell that failed in any turn shows the failure.
    """
    row: dict[str, Any] = {
        "label": cell.label,
        "contender": cell.contender,
        "column": cell.column,
        "peers": cell.peers,
        "params": cell.params,
        **turns[-1],
    }
    if row["status"] == "ok":
        row |= {key: statistics.median(turn[key] for turn in turns) for key in _MEDIANS if key in row}
        row["turns"] = [{key: value for key, value in turn.items() if key != "versions"} for turn in turns]
    return row


def _write(path: Path, found: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(found, indent=1) + "\n")


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


_MEASURES: dict[str, Callable[[argparse.Namespace], list[Row]]] = {
    "startup": lambda args: startup.measure(1 if args.quick else args.repeat, _say),
    "memory": lambda args: memory.measure((100,) if args.quick else (100, 500, 1000), _say),
    "threads": lambda args: threads.measure(
        16 if args.quick else args.episodes, 1 if args.quick else args.repeat, _say
    ),
    "slots": lambda args: slots.measure(32 if args.quick else args.episodes, _say),
    "servers": lambda args: servers.measure(
        1.0 if args.quick else args.slower, 64 if args.quick else args.episodes, _say
    ),
    "planning": _planning,
    "rows": lambda args: rows.measure(1 if args.quick else args.repeat, _say),
    "batched_null": _batched_null,
    "faults": _faults,
    "policies": lambda args: policies.measure(args.only, quick=args.quick, progress=_say),
    "log": lambda args: [log_size.measure(50_000 if args.quick else args.episodes)],
    "ope": _off_policy,
    "coverage": lambda args: coverage.measure(20 if args.quick else args.samples, _say),
    "levels": lambda args: coverage.levels(20 if args.quick else args.runs, _say),
    "seeds": lambda args: seeds.measure(5 if args.quick else args.suites, _say),
    "safety": _safety,
    "beside": _beside,
    "environments": _environments,
    "impurity": _impurity,
    "honesty": lambda args: honesty.measure(30 if args.quick else args.runs, args.real_runs, args.episodes, _say),
}
"""All others are contests of cells."""


if __name__ == "__main__":
    raise SystemExit(main())
