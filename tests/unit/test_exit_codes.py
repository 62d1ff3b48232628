"""Exit codes of the commands, and the JSON that they print, as the docs have them."""

import sys
from pathlib import Path

import numpy as np
import pytest
import yaml

from rl_eval.cli import COMMANDS
from rl_eval.cli.exits import EXIT_CODES
from tests.unit.cli_world import call, faulty, make_folder, printed

DOCS = Path(__file__).parents[2] / "docs"

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
        call("run", "toy.yaml", "-q", "--output", "ones")
        call("run", "toy.yaml", "-q", "--output", "alternate", *SET, "policy.policy=cli_toys:alternate")
        call("run", "toy.yaml", "-q", "--output", "flaky", *FLAKY)
        call("run", "toy.yaml", "-q", "--output", "damaged")
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
                "--output",
                name + "_run",
                *FICKLE,
                *SET,
                f"environment.env_kwargs.until={name}",
            )
            Path(name).touch()
        write_data("data.npz")
        Path("model.zip").touch()
        Path("empty").mkdir()
        yield folder


SET = ("--set",)
FAIL = ("--set", "environment.env_kwargs={fail: true}")
BROKEN = ("--set", "policy.policy=cli_toys:broken")
FLAKY = faulty(1, 0.5, 1.0, 1.0)
FICKLE = (*SET, "environment.env=codes_toys:fickle", *SET, "fault_tolerance.max_attempts_per_episode=1")
SILENT = (
    *(*SET, "policy.policy=codes_toys:Coin", *SET, "policy.policy_kwargs={silent: true}"),
    *(*SET, "fault_tolerance.max_runner_restarts=0"),
)
RUN = ("run", "toy.yaml", "-q")
OPE = ("ope", "data.npz", "toy.yaml", "--no-fit", *SET, "policy.policy=codes_toys:Coin")
NOBODY = ("--address", "127.0.0.1:1")
"""Where no cluster is."""

CASES = [
    (0, RUN),
    (1, (*RUN, *FLAKY)),
    (1, (*RUN, *FLAKY, "--require", "known_afterwards/of_agents >= 1")),
    (2, (*RUN, *SET, "evaluation.sed=1")),
    (2, (*RUN, "--force")),
    (2, (*RUN, "--episodes", "10")),
    (6, (*RUN, "-n", "1", "--require", "episode_return_ci_low >= 1")),
    (5, (*RUN, "-n", "1", "--require", "episode_return_ci_low >= 1", "--require", "episode_return_mean >= 1000")),
    (2, (*RUN, "--accept-code-change")),
    (3, (*RUN, *FAIL)),
    (3, (*RUN, *BROKEN)),
    (4, (*RUN, "--output", "damaged")),
    (5, (*RUN, "--require", "episode_return_mean >= 1000", "--require", "num_episodes >= 1")),
    (0, ("run", "--retry", "ones")),
    (1, ("run", "--retry", "flaky", "--attempts", "1")),
    (2, ("run", "--retry", "nowhere")),
    (2, ("run", "--retry", "flaky", "--seed", "1")),
    (2, ("run", "toy.yaml", "--attempts", "1")),
    (3, ("run", "--retry", "gone_run")),
    (4, ("run", "--retry", "damaged")),
    (0, ("show", "ones")),
    (2, ("show", "nowhere")),
    (4, ("show", "damaged")),
    (0, ("export", "ones", "--to", "csv", "--output", "ones.csv")),
    (2, ("export", "nowhere", "--to", "csv")),
    (3, ("export", "gone_run", "--to", "npz", "--episodes", "4", "-o", "gone.npz")),
    (4, ("export", "damaged", "--to", "csv")),
    (0, ("report", "ones", "-o", "ones.html")),
    (2, ("report", "nowhere", "-o", "none.html")),
    (4, ("report", "damaged", "-o", "none.html")),
    (0, ("replay", "ones", "--episodes", "3")),
    (1, ("replay", "changed_run", "--episodes", "4")),
    (2, ("replay", "nowhere", "--episodes", "3")),
    (3, ("replay", "gone_run", "--episodes", "4")),
    (4, ("replay", "damaged", "--episodes", "3")),
    (0, ("compare", "ones", "alternate", "--require", "b <= a")),
    (1, ("compare", "ones", "alternate", "--require", "b >= a", "--require", "b <= a")),
    (2, ("compare", "ones", "alternate", "--require", "b is better")),
    (1, ("compare", "ones", "alternate", "--fail-on", "regression")),
    (0, ("compare", "alternate", "ones", "--fail-on", "regression")),
    (6, ("compare", "flaky", "flaky", "--fail-on", "regression")),  # Pairs that lack a failed side are no sample.
    (2, ("compare", "ones", "flaky")),
    (4, ("compare", "ones", "damaged")),
    (0, ("plan", "toy.yaml")),
    (2, ("plan", "toy.yaml", "--detect", "-1")),
    (3, ("plan", "toy.yaml", *FAIL)),
    (4, ("plan", "toy.yaml", *SILENT)),
    (0, (*OPE, "--no-simulation")),
    (2, (*OPE, *SET, "policy.policy=cli_toys:ones")),
    (3, (*OPE, *FICKLE, *SET, "environment.env_kwargs.until=gone")),
    (4, (*OPE, *SILENT)),
    (0, ("plan", "--rates", "1/2", "2/3")),
    (2, ("plan", "--rates", "1/2", "x")),
    (3, ("replay", "gone_run", "--video", "-o", "videos", "--episodes", "4")),
    (2, ("plan", "toy.yaml", "-n", "1")),
    *((2, (command, "model.zip")) for command in ("show", "report")),
    (2, ("report", ".")),
    (2, ("compare", "model.zip", "model.zip")),
    *((2, ("watch", place, "--env", "CartPole-v1", "--once")) for place in ("nowhere", "empty")),
    (0, ("show", ".")),
    (2, ("view", "nowhere")),
    (0, ("init", "made.yaml", "--env", "cli_toys:count", "--policy", "random")),
    (2, ("init", "toy.yaml", "--env", "cli_toys:count", "--policy", "random")),
    (2, ("doctor", "nowhere.yaml")),
    (2, ("service", "list", "--nowhere")),
    (4, ("service", "list", *NOBODY)),
    (4, ("service", "stop", "any", *NOBODY)),
]
"""Other tests have the codes that need checkpoints, pictures, games, a browser's server or a cluster."""


@pytest.mark.parametrize(("code", "words"), CASES, ids=[f"{code}-{' '.join(words)}" for code, words in CASES])
def test_a_command_ends_with_a_code_that_its_help_explains(place, code, words):
    outcome = call(*words)
    assert outcome.exit_code == code, outcome.output
    assert f"{code}" in ", ".join(EXIT_CODES).split(", ")
    assert "nowhere" not in words or "nowhere" in outcome.stderr


# --json

PRINTED = {
    "compare": ("compare", "ones", "alternate", "--json"),
    "export": ("export", "ones", "--to", "csv", "--output", "printed.csv", "--json"),
    "init": ("init", "printed.yaml", "--env", "CartPole-v1", "--policy", "random", "--json"),
    "plan": ("plan", "toy.yaml", *SET, "policy.policy=cli_toys:alternate", "--detect", "1", "--json"),
    "plan --rates": ("plan", "--rates", "17/20", "14/20", "--json"),
    "replay": ("replay", "ones", "--episodes", "3-4", "--json"),
    "report": ("report", "ones", "-o", "printed.html", "--json"),
    "run": ("run", "toy.yaml", "-o", "out", "--json"),
    "show": ("show", "flaky", "--json"),
    "show FOLDER": ("show", ".", "--json"),
    "show --episodes": ("show", "ones", "--episodes", "3", "--json"),
}


@pytest.mark.parametrize("name", PRINTED)
def test_json_has_the_documented_shape(place, name):
    assert printed(name, call(*PRINTED[name]).stdout)


def test_every_command_has_a_shape():
    """Those that are not printed here need games, data, a cluster, a browser or checkpoints."""
    shapes = yaml.safe_load((DOCS / "json_schemas.yaml").read_text()).keys()
    assert {name for _, name, *_ in COMMANDS} <= shapes
    assert PRINTED.keys() <= shapes
