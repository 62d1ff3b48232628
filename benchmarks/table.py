"""Tables: one per scenario, with ratios to named references that were measured in the same run."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Final

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from benchmarks import environments as wild
from benchmarks import impurity as impure
from benchmarks import sampling
from benchmarks.contenders.beside import EVERY
from benchmarks.faults import SAME, UNDISTURBED, verdict
from benchmarks.policies import LAYOUTS, SILENT
from benchmarks.runner import NOT_INSTALLED, Row
from benchmarks.scenarios import TRUE_MEAN
from benchmarks.startup import REFERENCE

__all__ = [
    "TABLES",
    "best_share",
    "coverage_of_aggregates",
    "coverage_of_estimates",
    "most_wrong",
    "share_of_same",
    "show",
]

_STANDARD_ERRORS = 3.0
_NOMINAL = 0.95


def show(tables: Sequence[Table]) -> None:
    """Print to the terminal, or as plain text wide enough not to wrap."""
    console = Console() if sys.stdout.isatty() else Console(width=150)
    for table in tables:
        console.print(table)


def _failure(row: Row) -> str:
    """What to print instead of numbers."""
    if row["status"] == "not installed":
        missing_peer = row.get("peers", True)
        return NOT_INSTALLED if missing_peer else f"not installed: pip install -e . ({escape(row['error'])})"
    if row["status"] == "timeout":
        return f"times out: {escape(row['error'])}"
    return f"dies: {escape(row['error'])}"


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column(columns[0], no_wrap=True)
    for column in columns[1:]:
        table.add_column(column, justify="right")
    return table


def _best(rows: Sequence[Row], *contenders: str) -> float | None:
    speeds = [row["steps_per_second"] for row in rows if row["status"] == "ok" and row["contender"] in contenders]
    return max(speeds, default=None)


def _ratio(value: float, reference: float | None, pattern: str) -> str:
    return "-" if reference is None else pattern.format(value / reference)


def _spread(row: Row, key: str, pattern: str) -> str:
    """Least and most of a value over the turns, where there are several."""
    found = [turn[key] for turn in row["turns"]]
    return f"{pattern.format(min(found))} to {pattern.format(max(found))}" if len(found) > 1 else "-"


def throughput(rows: Sequence[Row], title: str = "throughput: CartPole-v1, 64x64 tanh MLP, ") -> list[Table]:
    """Counted steps per second, against the bare loop of the same interpreter and against RLlib's best row."""
    tables = []
    for column in dict.fromkeys(row["column"] for row in rows):
        here = [row for row in rows if row["column"] == column]
        table = _table(
            f"{title}{column}, medians over the turns",
            *("contender", "gymnasium", "episodes", "mean return"),
            *("counted steps/s", "least to most", "of the bare loop", "x RLlib's best"),
        )
        rllib = _best(here, "rllib")
        for row in here:
            table.add_row(row["label"], *_throughput_cells(row, _bare(here, row), rllib))
        tables.append(table)
    return tables


def _bare(rows: Sequence[Row], row: Row) -> float | None:
    """Speed of the bare loop in the interpreter of a row."""
    return _best([other for other in rows if other["peers"] == row["peers"]], "bare_loop")


def best_share(rows: Sequence[Row]) -> str:
    """Share of the bare loop's speed that rl_eval's fastest layout keeps in the first table of throughput."""
    here = [row for row in rows if row["column"] == rows[0]["column"]]
    ours = max(
        (row for row in here if row["contender"] == "rl_eval_" and row["status"] == "ok" and not row["peers"]),
        key=lambda row: row["steps_per_second"],
    )
    return f"{ours['steps_per_second'] / (_bare(here, ours) or math.nan):.0%}".replace("%", " %")


def _throughput_cells(row: Row, bare: float | None, rllib: float | None) -> list[str]:
    if row["status"] != "ok":
        return ["", "", "", _failure(row), "", "", ""]
    speed = row["steps_per_second"]
    return [
        row["versions"].get("gymnasium", "-"),
        str(row["episodes"]),
        f"{row['mean_return']:.1f}",
        f"{speed:,.0f}",
        _spread(row, "steps_per_second", "{:,.0f}"),
        _ratio(speed, bare, "{:.0%}"),
        _ratio(speed, rllib, "{:.2f}"),
    ]


def scaling(rows: Sequence[Row]) -> list[Table]:
    """Counted steps per second by number of runners, and whether all had the same result."""
    tables = []
    for column in dict.fromkeys(row["column"] for row in rows):
        here = [row for row in rows if row["column"] == column]
        columns = ("runners x environments", "episodes", "counted steps/s", "least to most", "times one runner")
        table = _table(f"scaling: {column}", *columns)
        one = _best(here[:1], "rl_eval_")
        for row in here:
            table.add_row(row["label"], *_scaling_cells(row, one))
        same = len({row["fingerprint"] for row in here if row["status"] == "ok"}) == 1
        table.caption = f"the fingerprints are {'equal' if same else 'NOT equal'}"
        tables.append(table)
    return tables


def _scaling_cells(row: Row, one: float | None) -> list[str]:
    if row["status"] != "ok":
        return ["", _failure(row), "", ""]
    speed = row["steps_per_second"]
    spread = _spread(row, "steps_per_second", "{:,.0f}")
    return [str(row["episodes"]), f"{speed:,.0f}", spread, _ratio(speed, one, "{:.2f}")]


def correctness(rows: Sequence[Row]) -> list[Table]:
    """Mean return per cell; bold with its distance where it is outside three standard errors."""
    columns = list(dict.fromkeys(row["column"] for row in rows))
    counts = sorted({row["episodes"] for row in rows if row["status"] == "ok"})
    episodes = " to ".join(map(str, dict.fromkeys([counts[0], counts[-1]])))
    title = (
        f"correctness: mean return of {episodes} episodes; the true mean is {TRUE_MEAN}. Bold: more than "
        f"{_STANDARD_ERRORS:g} standard errors (SE) away from it, or no result"
    )
    table = _table(title, "contender", *columns)
    for label in dict.fromkeys(row["label"] for row in rows):
        found = {row["column"]: row for row in rows if row["label"] == label}
        table.add_row(label, *(_mean_cell(found[column]) if column in found else "" for column in columns))
    table.caption = _layout_note(rows)
    return [table]


def _layout_note(rows: Sequence[Row]) -> str | None:
    """Whether rl_eval's fingerprints, one per evaluation, are the same in every column."""
    prints = [row["fingerprints"] for row in rows if row["status"] == "ok" and "fingerprints" in row]
    if len(prints) < 2:
        return None
    same = all(other == prints[0] for other in prints)
    verdict = "are equal" if same else "are NOT equal"
    where = f"the {len(prints)} columns"
    return f"rl_eval: the fingerprints in {where} {verdict}, for each of the {len(prints[0])} evaluations"


def _mean_cell(row: Row) -> str:
    if row["status"] != "ok":
        return f"[bold]{_failure(row)}[/bold]"
    mean, episodes = row["mean_return"], row["episodes"]
    distance = (mean - TRUE_MEAN) / math.sqrt(TRUE_MEAN * (1 - TRUE_MEAN) / episodes)
    if abs(distance) <= _STANDARD_ERRORS:
        return f"{mean:.3f}"
    return f"[bold]{mean:.3f} ({distance:+.0f} SE)[/bold]"


def broadcast(rows: Sequence[Row]) -> list[Table]:
    """Seconds and multiples of one memcpy of the same bytes, measured in turns in the same process."""
    table = _table(
        "weight broadcast", "contender", "MB", "seconds", "one memcpy", "memcpys", "least to most", "first rounds"
    )
    for row in rows:
        if row["status"] != "ok":
            table.add_row(row["label"], "", _failure(row))
            continue
        multiples = [multiple for turn in row["turns"] for multiple in turn["memcpys_all"]]
        table.add_row(
            row["label"],
            f"{row['bytes'] / 1e6:.0f}",
            f"{row['seconds']:.3f}",
            f"{row['memcpy_seconds']:.4f}",
            f"{row['memcpys']:.1f}",
            f"{min(multiples):.1f} to {max(multiples):.1f}",
            ", ".join(f"{multiple:.0f}" for multiple in row["memcpys_first"]),
        )
    return [table]


def log(rows: Sequence[Row]) -> list[Table]:
    """Time and memory of a process that does one thing with a log."""
    row = rows[0]
    title = f"log: {row['num_episodes']:,} rows, {row['segments']} files, {row['bytes_per_episode']:.0f} bytes per row"
    table = _table(title, "step", "seconds", "CPU seconds", "peak MB", "before MB")
    for step in ("write", "continue", "summarise"):
        numbers = (row[f"{step}_{name}"] for name in ("seconds", "cpu_seconds", "peak_mb", "peak_mb_before"))
        table.add_row(step, *(f"{number:.1f}" for number in numbers))
    return [table]


def coverage(rows: Sequence[Row]) -> list[Table]:
    """How often intervals of both methods hold the true mean, a row for each number of values."""
    kinds, shares = dict.fromkeys(row["distribution"] for row in rows), {}
    for row in rows:
        shares[row["values"], row["distribution"]] = f"{row['bca']:.1%} / {row['student_t']:.1%}"
    title = f"coverage: 95 % intervals of {rows[0]['samples']:,} samples each, BCa / Student t"
    table = _table(title, "values", *kinds)
    for size in dict.fromkeys(row["values"] for row in rows):
        table.add_row(str(size), *(shares[size, kind] for kind in kinds))
    return [table]


def most_wrong(rows: Sequence[Row]) -> str:
    """Return how often intervals with bounds are wrong, at most."""
    above, below = (max(row[side] for row in rows if row["bounds"] is not None) for side in ("above", "below"))
    return f"at most {above} are above and {below} below"


def coverage_of_aggregates(rows: Sequence[Row]) -> str:
    """Return the lowest and the highest coverage of aggregates over three to nine seeds."""
    names = ("IQM", "mean", "median", "optimality gap")
    found = [row["shares"][name] for row in rows if row["seeds"] < 10 for name in names]
    return f"{min(found):.1%} to {max(found):.1%}"


def coverage_of_estimates(rows: Sequence[Row]) -> str:
    """Return the lowest and the highest coverage of off-policy estimates."""
    found = [row["coverage"] for row in rows]
    return f"{min(found):.1%} to {max(found):.1%}"


def levels(rows: Sequence[Row]) -> list[Table]:
    """How often an interval is above or below the true mean, a row for each distribution, with and without bounds."""
    sizes = [*dict.fromkeys(row["values"] for row in rows)]
    cells = {(row["distribution"], str(row["bounds"]), row["values"]): row for row in rows}
    title = f"levels: of {rows[0]['runs']:,} evaluations, intervals above / below the true mean / no interval"
    table = _table(title, "returns", "bounds", *map(str, sizes))
    for name, bounds in dict.fromkeys((row["distribution"], str(row["bounds"])) for row in rows):
        found = [cells[name, bounds, size] for size in sizes]
        shown = "-" if found[0]["bounds"] is None else "{:g} to {:g}".format(*found[0]["bounds"])
        table.add_row(name, shown, *(f"{row['above']} / {row['below']} / {row['none']}" for row in found))
    return [table]


def seeds(rows: Sequence[Row]) -> list[Table]:
    """How often intervals of suites hold the true numbers, a row for each distribution and number of seeds."""
    title = f"seeds: 95 % intervals of {rows[0]['suites']:,} suites of five tasks each"
    table = _table(title, "scores", "seeds", *rows[0]["shares"])
    for row in rows:
        shares = ("none" if share is None else f"{share:.1%}" for share in row["shares"].values())
        table.add_row(row["distribution"], str(row["seeds"]), *shares)
    return [table]


def off_policy(rows: Sequence[Row]) -> list[Table]:
    """Errors of estimates in random tabular MDPs, and how often their intervals hold the exact value."""
    names = (
        "estimator",
        "episodes",
        "data sets",
        "refused",
        "mean error",
        "its std error",
        "RMSE",
        "95 % intervals hold",
    )
    table = _table("ope: random tabular MDPs of up to three steps, discount 0.9, against exact values", *names)
    for row in rows:
        table.add_row(
            row["estimator"],
            str(row["episodes"]),
            f"{row['data_sets']:,}",
            f"{row['refused']:.1%}",
            f"{row['bias']:+.4f}",
            f"{row['bias_standard_error']:.4f}",
            f"{row['rmse']:.4f}",
            f"{row['coverage']:.1%}",
        )
    return [table]


def planning(rows: Sequence[Row]) -> list[Table]:
    """Driver time and memory per episode, outside runners and Ray."""
    table = _table("planning", "simulated", "CPU µs per episode", "least to most", "bytes per episode")
    for row in rows:
        micros, size = row["micros_per_episode"], row["bytes_per_episode"]
        spread = _spread(row, "micros_per_episode", "{:.1f}")
        table.add_row(row["label"], f"{micros:.1f}" if micros else "-", spread, f"{size:.0f}" if size else "-")
    return [table]


def batched_null(rows: Sequence[Row]) -> list[Table]:
    """What the batched runner adds to a simulator and a policy."""
    table = _table("batched_null", "slots", "CPU µs per slot and step", "least to most", "with episodes of 200 steps")
    for row in rows:
        shown = f"{row['micros_per_step']:.3f}", _spread(row, "micros_per_step", "{:.3f}")
        table.add_row(row["label"], *shown, f"{row['micros_with_starts']:.3f}")
    return [table]


def fewest_rows(rows: Sequence[Row]) -> list[Table]:
    """Rows of passes per step, without and with smaller passes than blocks."""
    names = "policy", "slots", "rows per step", "in blocks", "more rows of the probe", "CPU, x plain loop"
    table = _table("rows: 3,200 steps of Pendulum-v1", *names)
    for row in rows:
        if row["status"] != "ok":
            table.add_row(row["label"], _failure(row))
            continue
        loop = f"{row['times_loop']:.2f}" if "times_loop" in row else "-"
        shown = f"{row['per_step']:.2f}", f"{row['per_step_of_blocks']:.2f}", f"{row['probe']:.0f}"
        table.add_row(row["label"], str(row["slots"]), *shown, loop)
    return [table]


def multi_agent(rows: Sequence[Row]) -> list[Table]:
    """Environment steps per CPU second of two runners of several agents, and their ratio."""
    found = _table("several agents: 16 environments of 4", "runner", "env steps per CPU second")
    for row in rows:
        if row["status"] != "ok":
            found.add_row(row["status"], row.get("error", ""))
            continue
        for name, rate in row["rates"].items():
            found.add_row(name, f"{rate:,.0f}")
        found.add_row("ratio", f"{row['ratio']:.1f}")
    return [found]


def slots(rows: Sequence[Row]) -> list[Table]:
    """Share of the ideal, at which no process ever waits; and the costs of slots in two interpreters."""
    table = _table("slots: steps of 1 to 50 ms", "environments", "seconds", "ideal", "share of the ideal")
    costs = _table("slots: steps of 0 ms", "environments", "CPU µs of the runner per step", "seconds to start")
    for row in rows:
        if "cpu_us" in row:
            costs.add_row(row["label"], f"{row['cpu_us']:.0f}", f"{row['start_s']:.2f}")
            continue
        seconds, ideal = f"{row['seconds']:.2f}", f"{row['ideal_seconds']:.2f}"
        table.add_row(row["label"], seconds, ideal, f"{row['share_of_ideal']:.3f}")
    return [table, costs] if costs.row_count else [table]


def servers(rows: Sequence[Row]) -> list[Table]:
    """Rows per second as a share of the limit; and how long simulators wait for chunks."""
    rates = _table("servers: rows per second", "runners x slots, policy", "rows/s", "limit", "share of the limit")
    waits = _table("servers: chunks", "runners x slots, policy", "time for which environments wait")
    for row in rows:
        if "waiting" in row:
            waits.add_row(row["label"], f"{row['waiting']:.1%}")
        else:
            rates.add_row(row["label"], f"{row['rows_per_second']:.0f}", f"{row['limit']:.0f}", f"{row['share']:.2f}")
    return [rates, waits]


def faults(rows: Sequence[Row]) -> list[Table]:
    """One word per fault and contender, and what rl_eval's runs took."""
    labels = list(dict.fromkeys(row["label"] for row in rows))
    cells = {(row["label"], row["column"]): row for row in rows}
    matrix = _table("faults: one strikes, once", "fault", *(label.partition(",")[0] for label in labels))
    for fault in dict.fromkeys(row["column"] for row in rows):
        words = (verdict(cells[label, fault], cells[label, UNDISTURBED]) for label in labels)
        matrix.add_row(fault, *(word if word == SAME else f"[bold]{word}[/bold]" for word in words))
    ours = [row for row in rows if "fingerprint" in row]
    return [matrix, _fault_details(ours, cells)] if ours else [matrix]


def share_of_same(rows: Sequence[Row]) -> str:
    """How many of the faults left rl_eval's result as it was, as in ``22 of 22``."""
    undisturbed = {row["label"]: row for row in rows if row["column"] == UNDISTURBED}
    struck = [row for row in rows if not row["peers"] and row["column"] != UNDISTURBED]
    return f"{sum(verdict(row, undisturbed[row['label']]) == SAME for row in struck)} of {len(struck)}"


def policies(rows: Sequence[Row]) -> list[Table]:
    """One verdict per policy, with what the error or the label says."""
    layouts = ", ".join(f"{runners} x {envs}" for runners, envs in LAYOUTS)
    table = Table(title=f"policies: runners x environments {layouts}", title_justify="left")
    for column in ("policy", "verdict", "said"):
        table.add_column(column, no_wrap=column != "said")
    for row in rows:
        word = row["verdict"]
        table.add_row(row["label"], f"[bold]{word}[/bold]" if word == SILENT else word, escape(_shortened(row["said"])))
    silent = sum(row["verdict"] == SILENT for row in rows)
    table.caption = f"{len(rows)} policies, {silent} silent mismatches"
    return [table]


def _shortened(text: str, longest: int = 240) -> str:
    return text if len(text) <= longest else f"{text[: longest - 1]}…"


def _fault_details(rows: Sequence[Row], cells: dict[tuple[str, str], Row]) -> Table:
    deadline = rows[0]["params"]["deadline_s"]
    table = _table(
        f"faults: rl_eval with deadlines of {deadline:g} s",
        *("contender", "fault", "status", "fingerprint", "seconds more", "struck process gone after"),
        *("charged", "stop()", "processes left"),
    )
    for row in rows:
        twin = cells[row["label"], UNDISTURBED]
        gone = row["struck_process_ended_s"]
        table.add_row(
            row["label"],
            row["column"],
            row["says"],
            "same" if row["fingerprint"] == twin.get("fingerprint") else "[bold]OTHER[/bold]",
            f"{row['seconds'] - twin.get('seconds', math.nan):+.1f}",
            "-" if gone is None else f"{gone:.2f} s",
            str(row["charged"]),
            f"{row['stop_seconds']:.2f} s",
            str(row["actors_left"] + row["processes_left"]),
        )
    return table


def honesty(rows: Sequence[Row]) -> list[Table]:
    """Coverage of the reported interval, and bias and coverage of each way to be rid of failed episodes."""
    ways = [f"{way}: bias (covers)" for way in rows[0]["ways"]]
    title = f"honesty: {rows[0]['runs']} evaluations per row, nominal coverage 95 %; ! marks less"
    table = _table(title, "returns", "attempts that crash", "truth", "failed", "covers", "width", *ways)
    for row in rows:
        found = row["ways"].values()
        table.add_row(
            row["label"],
            row["link"],
            f"{row['truth']:g}",
            f"{row['failed_share']:.1%}",
            _coverage(row["coverage"]),
            f"{row['width']:.3g}",
            *(f"{way['bias']:+.2g} ({way['coverage']:.0%})" for way in found),
        )
    made, equal = (sum(row[key] for row in rows) for key in ("real_runs", "real_runs_equal"))
    table.caption = f"of {made} evaluations that were also made for real, {equal} gave the same table and interval"
    return [table]


def environments(rows: Sequence[Row]) -> list[Table]:
    """Fingerprints by layout, what the results said of themselves, and whether fresh environments are a cure."""
    table = _table("environments: 24 short episodes in each layout", "environment", "verdict")
    columns = [f"{runners} x {lanes}" for runners, lanes in wild.LAYOUTS]
    for column in (*columns, "fresh", "env_reuse: episode", "determinism"):
        table.add_column(column)
    for row in rows:
        table.add_row(row["label"], wild.verdict(row), *_layouts(row))
    verdicts = [wild.verdict(row) for row in rows]
    table.caption = ", ".join(f"{verdicts.count(word)} {word}" for word in dict.fromkeys(verdicts))
    return [table]


def impurity(rows: Sequence[Row]) -> list[Table]:
    """A verdict per kind and layout, and the false alarms of environments that are functions of their seeds."""
    kinds, families = [row for row in rows if "lanes" in row], [row for row in rows if "lanes" not in row]
    table = _table("impurity: 50 episodes in each layout", "kind", "slots", "verdict")
    for column in ("the result says", "advice that was followed"):
        table.add_column(column)
    for row in kinds:
        advice = ", ".join(f"{key}={value}" for _, key, value in row.get("advised", []))
        said = escape(_shortened(row.get("said", row.get("error", "")), 160))
        table.add_row(row["label"], str(row["lanes"]), impure.verdict(row), said, advice)
    counted = [row for row in kinds if row["label"] != impure.RARE]
    fine = sum(impure.verdict(row) in ("right", "flagged", "refused") for row in counted)
    table.caption = f"{fine} of {len(counted)} right or flagged, without wrong advice; the last kind is not counted"
    alarms = _table("impurity: environments that are functions of their seeds", "family", "evaluated", "false alarms")
    for row in families:
        found = len(row["evaluated"]), ", ".join(row["alarms"]) or 0
        alarms.add_row(row["label"], *map(str, found))
    return [table, alarms] if families else [table]


def _layouts(row: Row) -> list[str]:
    """A fingerprint per layout, with the number of episodes that differ from those in fresh environments.

    ``!`` marks results that say that they are not a function of their seed.
    """
    found = row if "layouts" in row else row.get("printed", {})
    if "layouts" not in found:
        return [*[""] * (len(wild.LAYOUTS) + 2), escape(row["error"])]
    layouts = found["layouts"]
    marks = [_mark(one) for one in [*layouts, found["fresh"][0]]]
    marks[-1:-1] = [""] * (len(wild.LAYOUTS) - len(layouts))
    failed = next((one for one in layouts if one["status"] != "complete"), None)
    flagged = next((one for one in layouts if one["passed"] is False), layouts[-1])
    words = f"{failed['status']}: {failed['reason']}" if failed else flagged["determinism"]
    return [*marks, {None: "", True: "cures it", False: "does not cure it"}[found["cured"]], escape(words)]


def _mark(one: Row) -> str:
    differ = f" ({one['differ']} differ)" if one["differ"] else ""
    return f"{one['fingerprint'][:8]}{differ}{'!' if one['passed'] is False else ''}"


def _coverage(share: float) -> str:
    return f"{share:.1%}" if share >= _NOMINAL else f"[bold]{share:.1%} ![/bold]"


def safety(rows: Sequence[Row]) -> list[Table]:
    """Counted steps per second, and shares of the first contender's in the same turn."""
    tables = []
    for column in dict.fromkeys(row["column"] for row in rows):
        here = [row for row in rows if row["column"] == column]
        title = f"safety: CartPole-v1, {column}, {len(here[0]['speeds'])} turns; shares of the first row"
        table = _table(title, "rl_eval", "episodes", "counted steps/s", "share", "least to most", "CPU time", "result")
        for row in here:
            table.add_row(
                row["label"],
                str(row["episodes"]),
                f"{row['steps_per_second']:,.0f}",
                f"{row['ratio']:.1%}",
                f"{min(row['ratios']):.1%} to {max(row['ratios']):.1%}",
                f"{row['cpu_ratio']:.1%}",
                "same" if row["same"] else "[bold]OTHER[/bold]",
            )
        tables.append(table)
    return tables


def beside(rows: Sequence[Row]) -> list[Table]:
    """Training steps per second with evaluation beside it, as a share of those without, in alternating stretches."""
    table = _table(
        f"beside: training on one core, one runner on the other, 100 episodes every {EVERY:,} steps",
        "training",
        "steps/s without",
        "share with",
        "least to most",
        "evaluations",
        "complete",
        "right version",
        "final policy",
    )
    for row in rows:
        if row["status"] != "ok":
            table.add_row(row["label"], _failure(row))
            continue
        table.add_row(
            row["label"],
            f"{row['steps_per_second']:,.0f}",
            f"{row['ratio']:.1%}",
            f"{min(row['ratios']):.1%} to {max(row['ratios']):.1%}",
            str(row["evaluations"]),
            str(row["complete"]),
            str(row["right_version"]),
            f"mean {row['final_mean']:.1f}" if row["final_complete"] else "[bold]MISSING[/bold]",
        )
    return [table]


def startup(rows: Sequence[Row]) -> list[Table]:
    """Median wall seconds from process start to exit, against the imports of torch and gymnasium."""
    reference = next((row["seconds"] for row in rows if row["label"] == REFERENCE and row["status"] == "ok"), None)
    table = _table("startup", "command", "seconds", "least to most", f"x {REFERENCE}")
    for row in rows:
        if row["status"] != "ok":
            table.add_row(row["label"], _failure(row))
        elif "imports" in row:
            table.add_row(row["label"], ", ".join(row["imports"]) or "none")
        else:
            spread = _spread(row, "seconds", "{:.2f}")
            table.add_row(row["label"], f"{row['seconds']:.2f}", spread, _ratio(row["seconds"], reference, "{:.2f}"))
    return [table]


def memory(rows: Sequence[Row]) -> list[Table]:
    """Resident memory beyond the policy of the caller, in copies of that policy."""
    table = _table("memory", "policy, MB", "runners", "most during the call", "left after it")
    for row in rows:
        size, where = str(row["megabytes"]), str(row["runners"] or "in process")
        found = [_failure(row)] if row["status"] != "ok" else [f"{row[name]:.2f}" for name in ("peak", "rest")]
        table.add_row(size, where, *found)
    return [table]


def threads(rows: Sequence[Row]) -> list[Table]:
    """Median seconds by number of threads, against one thread on the same cores."""
    one = {(row["label"], row["cores"]): row["seconds"] for row in rows if row["threads"] == 1}
    table = _table("threads", "contender", "cores", "threads of torch", "seconds", "least to most", "x one thread")
    for row in rows:
        times = _ratio(row["seconds"], one[row["label"], row["cores"]], "{:.2f}")
        shown = f"{row['seconds']:.2f}", _spread(row, "seconds", "{:.2f}"), times
        table.add_row(row["label"], row["cores"], str(row["threads"]), *shown)
    return [table]


TABLES: Final[Mapping[str, Callable[[Sequence[Row]], list[Table]]]] = {
    "throughput": throughput,
    "simulators": partial(throughput, title="simulators: "),
    "scaling": scaling,
    "correctness": correctness,
    "broadcast": broadcast,
    "slots": slots,
    "servers": servers,
    "startup": startup,
    "memory": memory,
    "threads": threads,
    "planning": planning,
    "rows": fewest_rows,
    "batched_null": batched_null,
    "honesty": honesty,
    "faults": faults,
    "policies": policies,
    "safety": safety,
    "log": log,
    "beside": beside,
    "environments": environments,
    "impurity": impurity,
    "ope": off_policy,
    "coverage": coverage,
    "levels": levels,
    "seeds": seeds,
    "multi_agent": multi_agent,
    "sampling": sampling.tables,
}
