"""Exit codes: the table of the docs, the help of each command and what the commands do say the same."""

import re
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml

from rl_eval.cli.exits import ExitCode
from tests.unit.cli_world import call, make_folder, printed
from tests.unit.test_shared_options import COMMANDS

PAGE = Path(__file__).parents[2] / "docs" / "cli.md"
ALWAYS = {70, 129, 130, 143}
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
    """Return the codes of each command in its help, those of groups such as ``service`` as well."""
    return {
        name: {int(code) for code in re.findall(r"(?m)^(\d+) ", command.epilog)} for name, command in COMMANDS.items()
    }


def described():
    """Return the codes of ``run`` in the table of its own section."""
    section = PAGE.read_text().partition("\n## `rl-eval run ")[2].partition("\n## ")[0]
    cells = re.findall(r"(?m)^\| (\d[\d, ]*) \|", section)
    return {int(code) for cell in cells for code in cell.split(",")}


def test_the_table_has_what_the_help_has():
    table, of_help = documented(), helped()
    assert table.keys() == of_help.keys()
    for name, codes in table.items():
        assert codes >= ALWAYS
        assert codes - ALWAYS == of_help[name] - ALWAYS, name


def test_the_section_of_run_has_what_its_help_has():
    assert described() - ALWAYS == helped()["run"] - ALWAYS


TOYS = '''
from pathlib import Path

import cli_toys
import numpy as np

from rl_eval.errors import PolicyUnavailable


class Fickle(cli_toys.Count):
    """Every third episode fails. Once the file ``gone`` is there it cannot be built, or with ``changed`` pays more."""

    metadata = {"render_modes": ["rgb_array"]}

    def __init__(self, until, render_mode=None):
        super().__init__()
        self.render_mode, self.extra = render_mode, Path(until).exists()
        if self.extra and until == "gone":
            raise RuntimeError("the simulator is not installed any more")

    def begin_episode(self, index, seed, attempt):
        self.fail = index % 3 == 0

    def step(self, action):
        observation, reward, *rest = super().step(action)
        return observation, reward + self.extra, *rest

    def render(self):
        return np.zeros((16, 16, 3), np.uint8)


def fickle(context):
    return Fickle(**context)


class Coin:
    """Says that heads are as likely as tails; and acts, unless it is silent."""

    def __init__(self, silent=False):
        self.silent = silent

    def act(self, observations, state, live, noise):
        if self.silent:
            raise PolicyUnavailable("the server of the policy is silent")
        return np.ones(len(observations), np.int64), None

    def log_prob(self, observations, actions):
        return np.full(len(actions), np.log(0.5))
'''


def write_data(path):
    """Write a hundred episodes of two steps, of a policy that tosses a coin."""
    step = np.tile(np.arange(2), 100)
    np.savez(
        path,
        episode=np.repeat(np.arange(100), 2),
        step=step,
        observation=step[:, None].astype(np.float32),
        action=step,
        reward=np.arange(200) % 3 + 0.0,
        terminated=step == 1,
        truncated=np.zeros(200, bool),
        action_log_prob=np.full(200, np.log(0.5)),
    )


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
        Path("codes_toys.py").write_text(TOYS)
        patch.delitem(sys.modules, "codes_toys", raising=False)
        for name in ("gone", "changed"):
            call(
                "run",
                "toy.yaml",
                "-q",
                "--log-dir",
                name + "_run",
                *FICKLE,
                *SET,
                f"environment.env_kwargs.until={name}",
            )
            Path(name).touch()
        write_data("data.npz")
        yield folder


SET = ("--set",)
FAIL = ("--set", "environment.env_kwargs={fail: true}")
BROKEN = ("--set", "policy.policy=cli_toys:broken")
FLAKY = (
    *("--set", "environment.env=rl_eval.testing:faulty", "--set", "fault_tolerance.max_attempts_per_episode=1"),
    *("--set", "environment.env_kwargs={env: two_length, attempt_rates: [0.5, 1.0, 1.0]}"),
)
FICKLE = (*SET, "environment.env=codes_toys:fickle", *SET, "fault_tolerance.max_attempts_per_episode=1")
SILENT = (*SET, "policy.policy=codes_toys:Coin", *SET, "policy.policy_kwargs={silent: true}")
RUN = ("run", "toy.yaml", "-q")
OPE = ("ope", "data.npz", "toy.yaml", "--no-fit", *SET, "policy.policy=codes_toys:Coin")
VIDEO = ("--video", "-o", "videos", "--episodes")
NOBODY = ("--address", "127.0.0.1:1")
"""Where no cluster is."""

CASES = [
    ("run", 0, RUN),
    ("run", 1, (*RUN, *FLAKY)),
    ("run", 1, (*RUN, *FLAKY, "--require", "known_afterwards/of_agents >= 1")),
    ("run", 2, (*RUN, *SET, "evaluation.sed=1")),
    ("run", 3, (*RUN, *FAIL)),
    ("run", 4, (*RUN, "--log-dir", "damaged")),
    ("run", 5, (*RUN, "--require", "episode_return_mean >= 1000")),
    ("run", 5, (*RUN, "--require", "episode_return_mean >= 1000", "--require", "num_episodes >= 1")),
    ("run", 3, (*RUN, *BROKEN)),
    ("retry", 0, ("retry", "ones")),
    ("retry", 1, ("retry", "flaky", "--attempts", "1")),
    ("retry", 2, ("retry", "nowhere")),
    ("retry", 3, ("retry", "gone_run")),
    ("retry", 4, ("retry", "damaged")),
    ("show", 0, ("show", "ones")),
    ("show", 2, ("show", "nowhere")),
    ("show", 4, ("show", "damaged")),
    ("export", 0, ("export", "ones", "--to", "csv", "--output", "ones.csv")),
    ("export", 2, ("export", "nowhere", "--to", "csv")),
    ("export", 4, ("export", "damaged", "--to", "csv")),
    ("report", 0, ("report", "ones", "-o", "ones.html")),
    ("report", 2, ("report", "nowhere", "-o", "none.html")),
    ("report", 4, ("report", "damaged", "-o", "none.html")),
    ("replay", 0, ("replay", "ones", "--episodes", "3")),
    ("replay", 2, ("replay", "nowhere", "--episodes", "3")),
    ("replay", 1, ("replay", "changed_run", "--episodes", "4")),
    ("replay", 3, ("replay", "gone_run", "--episodes", "4")),
    ("replay", 4, ("replay", "damaged", "--episodes", "3")),
    ("replay", 3, ("replay", "gone_run", *VIDEO, "4")),
    ("compare", 0, ("compare", "ones", "alternate", "--require", "b <= a")),
    ("compare", 1, ("compare", "ones", "alternate", "--require", "b >= a", "--require", "b <= a")),
    ("compare", 1, ("compare", "ones", "alternate", "--fail-on", "regression")),
    ("compare", 2, ("compare", "ones", "flaky")),
    ("compare", 4, ("compare", "ones", "damaged")),
    ("plan", 0, ("plan", "toy.yaml")),
    ("plan", 2, ("plan", "toy.yaml", "--detect", "-1")),
    ("plan", 3, ("plan", "toy.yaml", *FAIL)),
    ("plan", 4, ("plan", "toy.yaml", *SILENT)),
    ("ope", 0, (*OPE, "--no-simulation")),
    ("ope", 2, (*OPE, *SET, "policy.policy=cli_toys:ones")),
    ("ope", 3, (*OPE, *FICKLE, *SET, "environment.env_kwargs.until=gone")),
    ("ope", 4, (*OPE, *SILENT)),
    ("plan", 0, ("plan", "--rates", "1/2", "2/3")),
    ("plan", 2, ("plan", "--rates", "1/2", "x")),
    ("list", 0, ("list", ".")),
    ("list", 2, ("list", "nowhere")),
    ("view", 2, ("view", "nowhere")),
    ("init", 0, ("init", "made.yaml", "--env", "cli_toys:count", "--policy", "random")),
    ("init", 2, ("init", "toy.yaml", "--env", "cli_toys:count", "--policy", "random")),
    ("doctor", 2, ("doctor", "nowhere.yaml")),
    ("service list", 2, ("service", "list", "--nowhere")),
    ("service list", 4, ("service", "list", *NOBODY)),
    ("service stop", 4, ("service", "stop", "any", *NOBODY)),
]


@pytest.mark.parametrize(("command", "code", "words"), CASES, ids=[f"{name}-{code}" for name, code, _ in CASES])
def test_a_command_ends_with_its_code(place, command, code, words):
    outcome = call(*words)
    assert outcome.exit_code == code, outcome.output
    assert code in documented()[command]
    assert "nowhere" not in words or "nowhere" in outcome.stderr


ELSEWHERE = {
    ("watch", 0): "unit/test_watching.py::test_a_folder_of_checkpoints_becomes_a_curve",
    ("watch", 1): "unit/test_watching.py::test_a_factory_can_load_checkpoints_itself",
    ("watch", 2): "unit/test_watching.py::test_mistakes_are_told_before_anything_runs",
    ("watch", 3): "unit/test_watching.py::test_when_nothing_can_be_loaded_the_watch_has_failed",
    ("watch", 4): "unit/test_watching.py::test_a_fault_of_the_environment_is_never_the_checkpoints",
    ("crossplay", 0): "unit/test_crossplay_cli.py::test_files_and_json_say_the_same",
    ("crossplay", 1): "unit/test_crossplay_cli.py::test_failed_games_are_counted",
    ("crossplay", 2): "unit/test_crossplay_cli.py::test_who_cannot_play_is_told_so",
    ("crossplay", 3): "unit/test_crossplay_cli.py::test_games_that_all_fail_leave_the_ordinary_report",
    ("crossplay", 4): "unit/test_crossplay_cli.py::test_a_damaged_log_is_told_before_a_game_is_played",
    ("doctor", 0): "unit/test_doctor.py::test_doctor_is_0_without_problems",
    ("view", 0): "unit/test_view.py::test_a_real_ctrl_c_ends_a_real_server",
    ("service list", 0): "cluster/test_service.py::test_clients_take_turns_and_have_room_of_their_own",
    (
        "service stop",
        0,
    ): "cluster/test_service.py::test_a_service_on_the_same_folder_goes_on_and_one_that_is_stopped_ends_its_processes",
    (
        "service stop",
        2,
    ): "cluster/test_service.py::test_a_service_on_the_same_folder_goes_on_and_one_that_is_stopped_ends_its_processes",
}
"""Tests of the codes that need checkpoints, pictures, games, a browser's server or a cluster."""


def test_every_code_has_one_case():
    cases = {(command, code) for command, code, _ in CASES if code not in ALWAYS}
    assert not cases & ELSEWHERE.keys()
    assert {(name, code) for name, codes in helped().items() for code in codes - ALWAYS} == cases | ELSEWHERE.keys()


@pytest.mark.parametrize(("case", "test"), ELSEWHERE.items(), ids=[f"{name}-{code}" for name, code in ELSEWHERE])
def test_a_case_elsewhere_is_there(case, test):
    """And asserts the code."""
    file, _, name = test.partition("::")
    body = re.search(rf"(?s)\ndef {name}\(.*?(?=\n\n\n|\Z)", (Path(__file__).parents[1] / file).read_text())[0]
    code = ExitCode(case[1])
    assert re.search(rf"assert .*(exit_code|returncode)\b.* == (\(?{code:d}\b|ExitCode\.{code.name}\b)", body), case


# --json

PRINTED = {
    "compare": ("compare", "ones", "alternate", "--json"),
    "export": ("export", "ones", "--to", "csv", "--output", "printed.csv", "--json"),
    "init": ("init", "printed.yaml", "--env", "CartPole-v1", "--policy", "random", "--json"),
    "list": ("list", ".", "--json"),
    "plan": ("plan", "toy.yaml", *SET, "policy.policy=cli_toys:alternate", "--detect", "1", "--json"),
    "plan --rates": ("plan", "--rates", "17/20", "14/20", "--json"),
    "replay": ("replay", "ones", "--episodes", "3-4", "--json"),
    "report": ("report", "ones", "-o", "printed.html", "--json"),
    "retry": ("retry", "failed", "--attempts", "1", "--json"),
    "run": ("run", "toy.yaml", "-o", "out", "--json"),
    "show": ("show", "flaky", "--json"),
    "show --episodes": ("show", "ones", "--episodes", "3", "--json"),
}


@pytest.mark.parametrize("name", PRINTED)
def test_json_has_the_documented_shape(place, name):
    assert printed(name, call(*PRINTED[name]).stdout)


VALIDATED_ELSEWHERE = {"crossplay", "doctor", "ope", "service list", "service stop", "replay --video", "view", "watch"}
"""Their own tests have the games, the data, the cluster, the pictures, the server and the checkpoints."""


def test_every_command_that_prints_json_has_a_shape():
    prints = {name for name, command in COMMANDS.items() if "as_json" in {param.name for param in command.params}}
    variants = {"show --episodes", "plan --rates", "replay --video"}
    assert prints == (PRINTED.keys() | VALIDATED_ELSEWHERE) - variants
    shapes = yaml.safe_load((PAGE.parent / "json_schemas.yaml").read_text())
    assert shapes.keys() - {"definitions"} == PRINTED.keys() | VALIDATED_ELSEWHERE
