"""Tables of benchmarks on the pages are those of the committed results; ``python -m benchmarks tables`` writes them."""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.table import Table

sys.path.append(str(Path(__file__).parents[2]))  # The benchmarks are not part of the package.
from benchmarks import pages, provenance, table
from benchmarks.__main__ import main
from benchmarks.faults import UNDISTURBED

RESULTS = sorted(pages.RESULTS.glob("*.json"))
MADE = {
    "started": "2026-11-22T09:00:00+00:00",
    "commit": "abc1234567",
    "uncommitted_changes": False,
    "machine": {"cpu": "A CPU", "cores": 4, "memory_gb": 16, "machine": "x86_64", "system": "Linux"},
    "versions": {"python": "3.12.1", "gymnasium": "1.4.0"},
}
STALE = "<!-- benchmark: {} -->\n\n| of | before |\n\n<!-- end of benchmark -->"


def cell(label: str, contender: str, *speeds: float, peers: bool = False) -> dict[str, Any]:
    """Return a merged row of throughput."""
    return {
        "label": label,
        "contender": contender,
        "column": "500-step episodes",
        "peers": peers,
        "status": "ok",
        "episodes": 64,
        "mean_return": 500.0,
        "steps_per_second": statistics.median(speeds),
        "versions": {"python": "3.11.7", "gymnasium": "1.2.2"} if peers else MADE["versions"],
        "turns": [{"steps_per_second": speed} for speed in speeds],
    }


SPEEDS = [
    cell("bare", "bare_loop", 400.0, 380.0, 390.0),
    cell("rl_eval", "rl_eval_", 300.0, 310.0, 312.0),
    cell("rl_eval, peers'", "rl_eval_", 900.0, peers=True),
    cell("RLlib", "rllib", 80.0, 90.0, 70.0, peers=True),
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the results of one benchmark."""
    (tmp_path / "throughput.json").write_text(json.dumps({**MADE, "settings": {"name": "throughput"}, "rows": SPEEDS}))
    return tmp_path


@pytest.mark.parametrize("page", pages.pages(), ids=lambda page: page.name)
def test_a_page_has_the_tables_of_the_committed_results(page: Path) -> None:
    text = page.read_text()
    assert text.count("\n<!-- benchmark: ") == text.count("\n<!-- end of benchmark -->\n"), (
        f"{page.name}: marks are in pairs"
    )
    assert text == pages.generated(text), f"{page.name} and benchmarks/results differ: run {pages.COMMAND!r}"


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_committed_results_are_on_a_page_and_say_where_they_come_from(path: Path) -> None:
    found = json.loads(path.read_text())
    assert found["settings"]["name"] == path.stem
    assert not found["settings"]["quick"]
    assert not found["settings"].get("only"), "a part of a benchmark is no result of it"
    assert found["rows"]
    assert any(path.stem in pages.named(page.read_text()) for page in pages.pages()), f"no page shows {path.name}"
    assert found["started"].startswith("20")
    assert found["commit"] not in ("", "unknown")
    assert {"cpu", "cores", "memory_gb"} <= found["machine"].keys()
    assert "python" in found["versions"]


def test_every_benchmark_has_its_place_on_a_page() -> None:
    assert {name for page in pages.pages() for name in pages.named(page.read_text())} == set(table.TABLES)


def test_a_table_has_medians_with_least_and_most_and_says_where_it_was_measured(folder: Path) -> None:
    """The number in a sentence is made too."""
    sentence = "up to <!-- figure: throughput -->99 %<!-- end of figure --> of it"
    made = pages.generated(f"{sentence}\n{STALE.format('throughput')}\nafter\n", folder)
    assert "of | before" not in made
    assert made.startswith(sentence.replace("99", "79"))
    assert made.endswith("\n<!-- end of benchmark -->\nafter\n")
    assert "| rl_eval | 1.4.0 | 64 | 500.0 | 310 | 300 to 312 | 79% | 3.88 |" in made
    assert "| RLlib | 1.2.2 | 64 | 500.0 | 80 | 70 to 90 | - | 1.00 |" in made
    assert "commit `abc1234567`; A CPU, 4 cores, 16 GB, Linux; python 3.12.1" in made
    assert pages.generated(made, folder) == made


@pytest.mark.parametrize(("again", "share"), [("a", "1 of 1"), ("b", "0 of 1")])
def test_a_sentence_says_how_many_faults_changed_nothing(again: str, share: str) -> None:
    ours = {"label": "rl_eval", "peers": False, "status": "ok", "says": "complete", "episodes": 4, "asked": 4}
    rows = [
        {**ours, "column": UNDISTURBED, "mean_return": 0.5, "fingerprint": "a"},
        {**ours, "column": "SIGKILL", "struck": True, "mean_return": 0.5, "fingerprint": again},
        {**ours, "column": "SIGKILL", "mean_return": 0.1, "label": "RLlib", "peers": True},
    ]
    assert table.share_of_same(rows) == share


@pytest.mark.parametrize("change", [("steps_per_second", 311.0), ("status", "timeout"), ("label", "other")])
def test_no_result_changes_without_its_page(folder: Path, change: tuple[str, Any]) -> None:
    made = pages.generated(STALE.format("throughput"), folder)
    found = json.loads((folder / "throughput.json").read_text())
    found["rows"][1] |= {change[0]: change[1], "error": "no result after 3 s"}
    (folder / "throughput.json").write_text(json.dumps(found))
    assert pages.generated(made, folder) != made


def test_what_has_no_results_stays_and_what_is_no_benchmark_is_named(folder: Path) -> None:
    text = STALE.format("startup") + "\n" + STALE.format("safety")
    assert pages.generated(text, folder) == text
    with pytest.raises(ValueError, match=r"'speed'.*throughput"):
        pages.generated(STALE.format("speed"), folder)


def test_text_of_cells_is_text_and_bold_stays_bold() -> None:
    shown = Table(title="odd: a_b _c_", caption="1 * 2")
    shown.add_column("said")
    shown.add_row("[bold]dies: x | `y`\n<br> {z} \\[w][/bold]")
    lines = pages.markdown(shown).splitlines()
    assert lines[0] == "**odd: a_b \\_c\\_**"
    assert lines[4] == "| **dies: x \\| \\`y\\` &lt;br&gt; \\{z\\} \\[w\\]** |"
    assert lines[6] == "1 \\* 2."


def test_a_measurement_writes_its_provenance_and_all_turns(tmp_path: Path) -> None:
    """No path of the machine is written."""
    path = tmp_path / "planning.json"
    main(["planning", "--repeat", "2", "--episodes", "1000", "--json", str(path)])
    found = json.loads(path.read_text())
    assert found.keys() == {*provenance.provenance(), "settings", "rows"}
    assert [len(row["turns"]) for row in found["rows"]] == [2, 2, 0]
    assert str(tmp_path) not in path.read_text()
    assert "µs per episode" in pages.generated(STALE.format("planning"), tmp_path)
