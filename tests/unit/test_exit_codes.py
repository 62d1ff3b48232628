"""Exit codes: the table of the docs, the help of each command and what the commands do say the same."""

import re
import shutil
from pathlib import Path

import pytest
import yaml
from typer.main import get_command

from rl_eval.cli import app
from tests.unit.cli_world import call, make_folder, printed

PAGE = Path(__file__).parents[2] / "docs" / "cli.md"
ALWAYS = {70, 130, 143}
"""A bug, and a signal: what any command may end with; not all say so."""


def documented():
    """Return the codes of each command in the table."""
    rows = re.search(r"## Exit codes\n.*?\n\| command \|(.*?)\n\n", PAGE.read_text(), re.DOTALL)[1].splitlines()
    codes = [[int(code) for code in cell.split(",")] for cell in rows[0].strip(" |").split("|")]
    found = {}
    for row in rows[2:]:
        names, *cells = [cell.strip() for cell in row.strip("|").split("|")]
        present = {code for group, cell in zip(codes, cells, strict=True) if cell for code in group}
        found |= {name.strip(" `"): present for name in names.split(",")}
    return found


def helped():
    """Return the codes of each command in its help."""
    commands = get_command(app).commands
    return {
        name: {int(code) for code in re.findall(r"(?m)^(\d+) ", command.epilog)}
        for name, command in commands.items()
        if command.epilog
    }


def test_the_table_has_what_the_help_has():
    table, of_help = documented(), helped()
    assert table.keys() == of_help.keys()
    for name, codes in table.items():
        assert codes >= ALWAYS
        assert codes - ALWAYS == of_help[name] - ALWAYS, name


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Two runs that differ, one that failed in part, a damaged log and a few inputs."""
    with pytest.MonkeyPatch.context() as patch:
        folder = make_folder(tmp_path_factory.mktemp("codes"), patch)
        call("run", "toy.yaml", "-q", "--log-dir", "ones")
        call("run", "toy.yaml", "-q", "--log-dir", "alternate", *SET, "policy.policy=cli_toys:alternate")
        call("run", "toy.yaml", "-q", "--log-dir", "flaky", *FLAKY)
        shutil.copytree("flaky", "failed")
        call("run", "toy.yaml", "-q", "--log-dir", "damaged")
        segment = min(Path("damaged/segments").iterdir())
        segment.write_bytes(segment.read_bytes()[:100])
        Path("damaged/manifest.json").write_text("{}")
        yield folder


SET = ("--set",)
FAIL = ("--set", "environment.env_kwargs={fail: true}")
BROKEN = ("--set", "policy.policy=cli_toys:broken")
FLAKY = (
    *("--set", "environment.env=rl_eval.testing:faulty", "--set", "fault_tolerance.max_attempts_per_episode=1"),
    *("--set", "environment.env_kwargs={env: two_length, attempt_rates: [0.5, 1.0, 1.0]}"),
)
RUN = ("run", "toy.yaml", "-q")

CASES = [
    ("run", 0, RUN),
    ("run", 1, (*RUN, *FLAKY)),
    ("run", 2, (*RUN, *SET, "evaluation.sed=1")),
    ("run", 3, (*RUN, *FAIL)),
    ("run", 4, (*RUN, "--log-dir", "damaged")),
    ("run", 5, (*RUN, "--require", "episode_return_mean >= 1000")),
    ("run", 70, (*RUN, *BROKEN)),
    ("retry", 0, ("retry", "ones")),
    ("retry", 1, ("retry", "flaky", "--attempts", "1")),
    ("retry", 2, ("retry", "nowhere")),
    ("retry", 4, ("retry", "damaged")),
    ("show", 0, ("show", "ones")),
    ("show", 2, ("show", "nowhere")),
    ("show", 4, ("show", "damaged")),
    ("export", 0, ("export", "ones", "--format", "csv", "--output", "ones.csv")),
    ("export", 2, ("export", "nowhere", "--format", "csv")),
    ("export", 4, ("export", "damaged", "--format", "csv")),
    ("report", 0, ("report", "ones", "-o", "ones.html")),
    ("report", 2, ("report", "nowhere", "-o", "none.html")),
    ("report", 4, ("report", "damaged", "-o", "none.html")),
    ("replay", 0, ("replay", "ones", "--episodes", "3")),
    ("replay", 2, ("replay", "nowhere", "--episodes", "3")),
    ("replay", 4, ("replay", "damaged", "--episodes", "3")),
    ("compare", 0, ("compare", "ones", "alternate", "--require", "b <= a")),
    ("compare", 1, ("compare", "ones", "alternate", "--fail-on", "regression")),
    ("compare", 2, ("compare", "ones", "flaky")),
    ("compare", 4, ("compare", "ones", "damaged")),
    ("plan", 0, ("plan", "toy.yaml")),
    ("plan", 2, ("plan", "toy.yaml", "--detect", "-1")),
    ("plan", 3, ("plan", "toy.yaml", *FAIL)),
    ("power", 0, ("power", "1/2", "2/3")),
    ("power", 2, ("power", "1/2", "x")),
    ("list", 0, ("list", ".")),
    ("list", 2, ("list", "nowhere")),
    ("view", 2, ("view", "nowhere")),
    ("init", 0, ("init", "made.yaml", "--env", "cli_toys:count", "--policy", "random")),
    ("init", 2, ("init", "toy.yaml", "--env", "cli_toys:count", "--policy", "random")),
    ("doctor", 2, ("doctor", "nowhere.yaml")),
]


@pytest.mark.parametrize(("command", "code", "words"), CASES, ids=[f"{name}-{code}" for name, code, _ in CASES])
def test_a_command_ends_with_its_code(place, command, code, words):
    outcome = call(*words)
    assert outcome.exit_code == code, outcome.output
    assert code in documented()[command]
    assert "nowhere" not in words or "nowhere" in outcome.stderr


ELSEWHERE = {
    **{name: {0, 1, 2, 3, 4} for name in ("watch", "video", "ope", "crossplay")},
    "doctor": {0},
    "retry": {3},
    "replay": {1, 3},
    "plan": {4},
    "view": {0},
}
"""Codes that the tests of a command itself see to: they need rendering, games, signals or a cluster."""


def test_every_code_has_a_case():
    for name, codes in helped().items():
        seen = {code for command, code, _ in CASES if command == name} | ELSEWHERE.get(name, set())
        assert codes - ALWAYS <= seen, name


# --json

PRINTED = {
    "compare": ("compare", "ones", "alternate", "--json"),
    "list": ("list", ".", "--json"),
    "plan": ("plan", "toy.yaml", *SET, "policy.policy=cli_toys:alternate", "--detect", "1", "--json"),
    "power": ("power", "17/20", "14/20", "--json"),
    "replay": ("replay", "ones", "--episodes", "3-4", "--json"),
    "retry": ("retry", "failed", "--attempts", "1", "--json"),
    "run": ("run", "toy.yaml", "-o", "out", "--json"),
    "show": ("show", "flaky", "--json"),
    "show --episodes": ("show", "ones", "--episodes", "3", "--json"),
}


@pytest.mark.parametrize("name", PRINTED)
def test_json_has_the_documented_shape(place, name):
    assert printed(name, call(*PRINTED[name]).stdout)


VALIDATED_ELSEWHERE = {"crossplay", "doctor", "ope", "video"}
"""Their own tests have the games, the data and the pictures."""


def test_every_command_that_prints_json_has_a_shape():
    commands = get_command(app).commands
    prints = {name for name, command in commands.items() if "as_json" in {param.name for param in command.params}}
    assert prints == {name.split()[0] for name in PRINTED} | VALIDATED_ELSEWHERE
    shapes = yaml.safe_load((PAGE.parent / "json_schemas.yaml").read_text())
    assert shapes.keys() - {"definitions"} == PRINTED.keys() | VALIDATED_ELSEWHERE
    page = PAGE.read_text()
    assert f"What {listed(sorted(prints))} print with `--json` has the JSON Schemas" in page


def listed(names):
    """Return names as the page lists them."""
    *first, last = [f"`{name}`" for name in names]
    return f"{', '.join(first)} and {last}"
