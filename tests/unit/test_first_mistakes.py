"""Typical first mistakes: each message names the field and the fix, and none leaves a traceback or starts Ray."""

import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

from rl_eval import EvalConfig, Evaluator, evaluate, load
from rl_eval.cli.exits import ExitCode
from rl_eval.errors import ConfigError, PolicyError
from tests.unit.cli_world import CONFIG, call, make_folder

MISTAKES = '''
import gymnasium as gym
import numpy as np


class Old(gym.Env):
    """The contract of gym 0.21."""

    observation_space = gym.spaces.Box(-1.0, 1.0, (4,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        return np.zeros(4, np.float32), {}

    def step(self, action):
        return np.zeros(4, np.float32), 1.0, True, {}


class Fine(Old):
    def step(self, action):
        return np.zeros(4, np.float32), 1.0, True, False, {}


class Wide(Fine):
    """Its observations are wider than its space says."""

    def reset(self, *, seed=None, options=None):
        return np.zeros(5, np.float32), {}


class Levelled(Fine):
    def __init__(self, level):
        self.level = level


class Unseeded(Fine):
    def reset(self):
        return np.zeros(4, np.float32), {}


class Sized(__import__("torch").nn.Linear):
    def __init__(self, inputs, outputs):
        super().__init__(inputs, outputs)


class Agent:
    def get_action(self, observation):
        return 0


live = Fine()
number = 3
agent = Agent()
net = __import__("torch").nn.Linear(4, 2)


def vague():
    return lambda observations: "left"


def acts(observations):
    return np.zeros(len(observations), np.int64)


def policy_without_a_factory(states):
    return np.zeros(len(states), np.int64)
'''


@pytest.fixture
def folder(tmp_path, monkeypatch):
    make_folder(tmp_path, monkeypatch)
    (tmp_path / "mistakes.py").write_text(MISTAKES)
    (tmp_path / "broken_module.py").write_text("import sys\n\nsys.nothing_of_that_name\n")
    monkeypatch.delitem(sys.modules, "mistakes", raising=False)
    net = torch.nn.Linear(4, 2)
    torch.save({"model": net.state_dict(), "optimizer": {"state": {}}}, "ckpt.pt")
    torch.save(net, "whole.pt")
    torch.save({"weight": torch.zeros(2, 3), "bias": torch.zeros(2)}, "narrow.pt")
    Path("notes.pt").write_text("not weights\n" * 20)
    Path("broken.yaml").write_text("environment:\n  env: CartPole-v1\n evaluation:\n  seed: 1\n")
    Path("file").touch()
    np.save("array.npy", np.zeros(2))
    return tmp_path


def run(*assignments, config="toy.yaml", args=()):
    settings = [word for assignment in assignments for word in ("--set", assignment)]
    return call("run", config, "--num-episodes", 4, *settings, *args)


MLP = "policy.policy=rl_eval.policies.mlp:make_mlp"
CARTPOLE = "environment.env=CartPole-v1"

REFUSED = {
    "a misspelt environment": ((CARTPOLE.replace("Pole", "Pol"),), {}, ["environment.env", "CartPole"]),
    "a misspelt section": (("evaluations.seed=1",), {}, ["evaluations.seed", "did you mean"]),
    "a misspelt key": (("evaluation.num_episode=3",), {}, ["evaluation.num_episode", "'num_episodes'"]),
    "a key below one that is no mapping": (("evaluation.seed.x=1",), {}, ["evaluation.seed is {'x': 1}"]),
    "a key in no section": (
        ("num_episodes=3",),
        {},
        ["unknown config key 'num_episodes': did you mean 'evaluation.num_episodes'?"],
    ),
    "a key below one in no section": (
        ("env_kwargs.goal=0.5",),
        {},
        ["unknown config key 'env_kwargs.goal': did you mean 'environment.env_kwargs.goal'?"],
    ),
    "a policy as environment": (
        ("environment.env=mistakes:acts",),
        {},
        ["environment.env is 'mistakes:acts', a function of observations: that is a policy, not an environment"],
    ),
    "an id that a module registers": (("environment.env=MyCart-v0",), {}, ['as in "my_module:MyEnv-v0"']),
    "a nested key in no section": (("nowhere.at.all=1",), {}, ["unknown config key 'nowhere.at'"]),
    "a value that is no YAML": (("evaluation.num_episodes={",), {}, ["not valid YAML"]),
    "a section that is not there": ((), {"args": ["--section", "x"]}, ["has no section 'x'"]),
    "an address without runners": ((), {"args": ["--address", "host:1"]}, ["runners.address is 'host:1'"]),
    "a key of no weights": (
        ("policy.weights_key=model",),
        {},
        ["policy.weights_key is 'model', but policy.weights is not set"],
    ),
    "force without a folder": ((), {"args": ["--force"]}, ["give --output"]),
    "an output below a file": (
        (),
        {"args": ["--output", "file/below"]},
        ["cannot be created (Not a directory): choose another one with --output"],
    ),
    "a value of another type": (("evaluation.num_episodes=many",), {}, ["evaluation.num_episodes is 'many'"]),
    "an assignment without =": (
        (),
        {"args": ["--set", "evaluation.seed"]},
        ["--set evaluation.seed", "it lacks = and a value"],
    ),
    "an environment as config": (
        (),
        {"config": "CartPole-v1"},
        ["there is no config file 'CartPole-v1'; an environment is given with --env CartPole-v1"],
    ),
    "a file that is not there": ((), {"config": "toi.yaml"}, ["there is no config file 'toi.yaml'"]),
    "broken YAML": ((), {"config": "broken.yaml"}, ["broken.yaml", "line 3", " evaluation:", "^"]),
    "a result as config": ((), {"config": "array.npy"}, ["array.npy", "no text file"]),
    "no policy": (("policy.policy=null",), {}, ["policy.policy is missing"]),
    "no environment": (("environment.env=null",), {}, ["environment.env is missing", "gymnasium id"]),
    "a module that is not there": (
        ("policy.policy=polices:make",),
        {},
        ["policy.policy", "polices", "call from the folder that has it, or name that folder in PYTHONPATH"],
    ),
    "a module that cannot be imported": (
        ("policy.policy=broken_module:make",),
        {},
        ["cannot be imported: module 'sys' has no attribute 'nothing_of_that_name'"],
    ),
    "a name that is not in its module": (("environment.env=mistakes:Fin",), {}, ["environment.env", "Fin"]),
    "something that builds nothing": (("environment.env=mistakes:number",), {}, ["environment.env", "callable"]),
    "weights that are not there": ((MLP, "policy.weights=best.pt"), {}, ["policy.weights", "no file 'best.pt'"]),
    "a training checkpoint": (
        (MLP, "policy.weights=ckpt.pt"),
        {},
        ["'ckpt.pt'", "'model', 'optimizer'", "policy.weights_key to model"],
    ),
    "a whole module": ((MLP, "policy.weights=whole.pt"), {}, ["'whole.pt'", "Linear", "state_dict"]),
    "no weights at all": ((MLP, "policy.weights=notes.pt"), {}, ["'notes.pt'", "not written by torch.save"]),
    "weights of another network": ((CARTPOLE, MLP, "policy.weights=narrow.pt"), {}, ["weights lack 'body.0.bias'"]),
    "a live environment": (("environment.env=mistakes:live",), {}, ["environment.env is a live Fine", "function"]),
    "a GPU that nobody was given": (
        ("policy.device=cuda", "runners.num_runners=2"),
        {},
        ["policy.device is 'cuda'", "runners.num_gpus_per_runner"],
    ),
    "a deadline in this process": (
        ("fault_tolerance.step_timeout_s=1",),
        {},
        ["fault_tolerance.step_timeout_s is 1", "runners.num_runners=1"],
    ),
    "an output that is a file": ((), {"args": ["--output", "file"]}, ["--output file is a file", "give a folder"]),
    "an output that cannot be": ((), {"args": ["--output", "/proc/x"]}, ["/proc/x", "choose another", "--output"]),
    "an argument that the factory does not take": (
        (MLP, "policy.policy_kwargs.hiden=3"),
        {},
        ["policy", "hiden", "make_mlp takes observation_space, action_space, "],
    ),
    "a policy where its factory should be": (
        ("policy.policy=mistakes:policy_without_a_factory",),
        {},
        [
            "policy.policy 'mistakes:policy_without_a_factory' cannot be built",
            "if it is itself a policy, which takes observations, call its parameter observations, or name a function",
            "as in def make(): return policy_without_a_factory; else give 'states' in policy.policy_kwargs",
        ],
    ),
    "an environment without its arguments": (
        ("environment.env=mistakes:Levelled",),
        {},
        ["environment.env_kwargs is empty, but Levelled takes level: missing a required argument: 'level'"],
    ),
    "an environment that takes no seed": (
        ("environment.env=mistakes:Unseeded",),
        {},
        ["built a Unseeded, whose reset() takes no seed", "reset(self, *, seed=None, options=None)"],
    ),
    "a module without its arguments": (
        ("policy.policy=mistakes:Sized",),
        {},
        [
            "as in def make(): return Sized(...); else give 'inputs' and 'outputs' in policy.policy_kwargs",
            "parameters called observation_space and action_space are given the spaces",
        ],
    ),
    "a misspelt class": (("environment.env=mistakes:Leveled",), {}, ["did you mean 'mistakes:Levelled'?"]),
    "a module in place of what makes it": (
        ("policy.policy=mistakes:net",),
        {},
        ["if it is itself a policy, which takes observations, ", "as in def make(): return net"],
    ),
    "an object in place of what makes it": (
        ("policy.policy=mistakes:agent",),
        {},
        ["makes nothing: name a function that returns a policy", "def make(): return lambda batch: agent.get_action("],
    ),
    "a class of agents": (
        ("policy.policy=mistakes:Agent",),
        {},
        ["nor a Policy: give a function of a batch of observations, such as lambda batch: agent.get_action(batch)"],
    ),
    "a negative count": (("runners.num_runners=-1",), {}, ["runners.num_runners is -1"]),
}


@pytest.mark.parametrize("mistake", REFUSED)
def test_a_mistake_is_refused_with_its_field_and_the_fix(folder, monkeypatch, mistake):
    """Before any runner is started: Ray is never asked for."""

    def forbidden(*args, **kwargs):
        raise AssertionError("Ray was asked for")

    monkeypatch.setattr("rl_eval.backends.connection.Connection.__init__", forbidden)
    assignments, options, words = REFUSED[mistake]
    outcome = run(*assignments, **options)
    assert outcome.exit_code == ExitCode.USAGE, outcome.output
    _, _, message = outcome.stderr.rpartition("error: ")
    assert outcome.stdout == ""
    assert [word for word in words if word not in message] == []
    assert "Traceback" not in outcome.output
    assert "\x1b" not in outcome.stderr


def for_one(observation):
    _, _, angle, _ = observation
    return int(angle > 0)


class Predicts:
    """A policy as Stable-Baselines3 has them."""

    def predict(self, observations):
        return np.zeros(len(observations), np.int64), None


class GetsActions:
    """An agent of a loop of one's own."""

    def get_action(self, observation):
        return 0


class ActsOnObservationsAlone:
    def act(self, observations):
        return np.zeros(len(observations), np.int64), None


class ReturnsActionsAlone:
    def act(self, observations, state, live, noise):
        return np.zeros(len(observations), np.int64)


LIVE = {
    "act of observations alone": (ActsOnObservationsAlone(), "is act(observations, state, live, noise): too many"),
    "act that returns actions alone": (ReturnsActionsAlone(), "(actions, None) where there is no state"),
    "for one observation": (for_one, "takes one observation, and raises ValueError: "),
    "the same for all": (lambda _: 0, "return an action for each observation of the batch"),
    "nothing returned": (lambda _: None, "the policy returned None: return actions, one for each observation"),
    "an object that predicts": (Predicts(), "such as lambda batch: model.predict(batch)[0]"),
    "a class": (Predicts, "is the class Predicts: give an object of it, or its name as 'tests.unit.test_first_mista"),
    "an object that gets actions": (GetsActions(), "such as lambda batch: agent.get_action(batch)"),
    "actions with a state": (Predicts().predict, "Return the actions alone, without a state"),
}


@pytest.mark.parametrize("policy", LIVE)
@pytest.mark.parametrize("environments", [1, 8])
def test_a_policy_of_another_kind_is_told_what_one_is(policy, environments):
    live, words = LIVE[policy]
    config = EvalConfig().environment("CartPole-v1").runners(num_runners=0, num_envs_per_runner=environments)
    with pytest.raises((ConfigError, PolicyError), match=re.escape(words)):
        evaluate(config, live)


@pytest.mark.parametrize("make", [lambda: for_one, lambda hidden=32: for_one], ids=["nothing", "settings alone"])
def test_what_makes_a_policy_is_none(make):
    with pytest.raises(ConfigError, match="does not take observations alone: if it makes the policy, give what it"):
        evaluate(EvalConfig().environment("CartPole-v1"), make)


def test_true_is_an_action():
    """Comparisons give arrays of bool, which environments do not take."""
    config = EvalConfig().environment("CartPole-v1").evaluation(num_episodes=4)
    as_bool, as_number = (
        evaluate(config, lambda batch, dtype=dtype: (batch[:, 2] > 0).astype(dtype)) for dtype in (bool, np.int64)
    )
    assert as_bool.status == "complete"
    assert as_bool.fingerprint == as_number.fingerprint


def test_a_policy_is_named_in_every_way(folder):
    """As the key of the config, and as the argument."""
    sys.path.insert(0, str(folder))
    config = EvalConfig().environment("CartPole-v1").evaluation(num_episodes=4)
    named = EvalConfig().environment("CartPole-v1").evaluation(num_episodes=4).policy("random")
    assert evaluate(config, "random").fingerprint == evaluate(named).fingerprint
    assert evaluate(config.build(), "cli_toys:ones").status == "complete"
    Path("model.zip").touch()
    for make in (lambda: evaluate(config, "model.zip"), lambda: config.policy("model.zip").build()):
        with pytest.raises(ConfigError, match=r"'model.zip', a file or folder: say of what kind, as in sb3:PATH, "):
            make()
    Path("net.pt").touch()
    with pytest.raises(ConfigError, match=r"'net.pt', a file or folder: say of what kind, as in torch:MODULE:ATTR@net"):
        evaluate(EvalConfig().environment("CartPole-v1"), "net.pt")


def test_a_model_is_no_result(folder):
    Path("model.zip").touch()
    for outcome in (call("compare", "model.zip", "model.zip"), call("report", "model.zip"), call("show", "model.zip")):
        assert outcome.exit_code == ExitCode.USAGE
        assert "a model is evaluated first, with rl-eval run --policy model.zip" in " ".join(outcome.stderr.split())


def test_a_failed_run_is_shown_with_its_reason(folder):
    failed = run("environment.env=mistakes:Old", args=["--log-dir", "log", "-n", "40"])
    assert failed.exit_code == ExitCode.FAILED
    told = json.loads(Path("log/result.json").read_text())["reason"]
    assert "failed like this" in told
    assert load("log").reason == told
    assert "failed like this" in " ".join(call("show", "log").stdout.split())


def test_one_episode_of_the_plan_is_said_to_be_one(folder):
    """Whoever knows ``n_eval_episodes`` may take it for their number."""
    outcome = call("run", "toy.yaml", "--episodes", "20")
    assert "only --episodes 20 of the plan: -n sets how many it has" in outcome.stderr


def test_few_equal_episodes_pass_no_gate(folder):
    outcome = run("environment.env=mistakes:Fine", args=["--require", "episode_return_ci_low >= 0"])
    assert outcome.exit_code == ExitCode.REQUIREMENT
    assert "cannot be answered" in outcome.stderr


def test_a_result_that_is_not_complete_is_a_warning(folder, caplog):
    """In a script, nobody may look at anything but the mean."""
    sys.path.insert(0, str(folder))
    config = EvalConfig().environment("mistakes:Old").evaluation(num_episodes=2)
    assert evaluate(config, lambda observations: np.zeros(len(observations), np.int64)).status == "failed"
    [warned] = caplog.messages
    assert warned.startswith("the evaluation is failed: 2 of 2 episodes failed; first: episode 0")


FAILED = {
    "the old step": ("environment.env=mistakes:Old", ["failed in step after 0 steps"]),
    "observations of another shape": ("environment.env=mistakes:Wide", ["observation", "(5,)", "(4,)"]),
    "actions that are none": ("policy.policy=mistakes:vague", ["action"]),
}


@pytest.mark.parametrize("mistake", FAILED)
def test_a_mistake_in_code_is_told_in_the_result(folder, mistake):
    """Such a result is a failure, which says what the code did; the tracebacks are kept for ``show --faults``."""
    assignment, words = FAILED[mistake]
    outcome = run(assignment, *(() if "policy" in assignment else ("policy.policy=cli_toys:ones",)))
    assert outcome.exit_code != ExitCode.COMPLETE
    shown = " ".join(outcome.output.split())
    assert [word for word in words if word not in shown] == []
    assert "Traceback" not in outcome.output


TYPED = {
    "a policy by its file": (["--policy", "./some/toys.py:ones"], "not in a file: some.toys:ones"),
    "a file of policies": (["--policy", "cli_toys.py"], "not in a file: cli_toys:NAME"),
    "a model without its ending": (["--policy", "./narrow"], "did you mean 'narrow.pt'?"),
    "an environment by its file": (["--env", "cli_toys.py:count"], "write 'cli_toys:count'"),
    "weights for a policy that has a file": (["--policy", "rllib:.", "--trust", "--weights", "a.pt"], "leave one out"),
    "a metric that there is not": (["--require", "kurtosis > 5"], "no metric 'kurtosis': known: "),
    "a part of a metric's name": (["--require", "max > 5"], "did you mean 'episode_len_max' or 'episode_return_max'"),
    "a metric by its name in Python": (["--require", "mean_return > 5"], "did you mean 'episode_return_mean' or"),
    "an environment as Python imports it": (["--env", "cli_toys.Count"], "did you mean 'cli_toys:Count'?"),
    "a misspelt random": (["--policy", "randm"], "did you mean 'random'?"),
    "an id without its package": (
        ["--env", "Nobodys/Pong-v5"],
        "for Nobodys? The package that registers an id is named before",
    ),
}


@pytest.mark.parametrize("mistake", TYPED)
def test_what_is_typed_wrong_is_told_before_anything_runs(folder, mistake):
    given, words = TYPED[mistake]
    outcome = call("run", "toy.yaml", "-q", *given)
    assert outcome.exit_code == ExitCode.USAGE
    assert words in outcome.stderr
    assert not Path("runs").exists() or list(Path("runs").iterdir()) == []


def test_a_model_is_no_config(folder):
    Path("model.zip").write_bytes(b"PK\x03\x04\xe9\xff")
    outcome = call("run", "model.zip")
    assert outcome.exit_code == ExitCode.USAGE
    assert "a model is given with --policy model.zip" in outcome.stderr


@pytest.mark.parametrize("command", ["show", "report", "compare"])
def test_a_folder_of_no_run_is_not_taken_for_a_broken_one(folder, command):
    outcome = call(command, ".", *(["."] if command == "compare" else []))
    assert outcome.exit_code == ExitCode.USAGE
    assert "'.' is not the folder of an evaluation" in outcome.stderr
    assert "rl-eval list . shows those below it" in outcome.stderr


def test_another_environment_is_told_before_another_number_of_episodes(folder):
    call("run", "toy.yaml", "-q", "--output", "a")
    call("run", "toy.yaml", "-q", "--output", "b", "--env", "cli_toys:Count", "-n", "5")
    assert "environment.env is 'cli_toys:count' in a and 'cli_toys:Count' in b" in call("compare", "a", "b").stderr


def test_a_live_environment_is_refused_in_python_too(folder):
    """In Python an instance is the first thing that a user tries; with runners it is refused at once."""
    sys.path.insert(0, str(folder))
    import mistakes

    config = EvalConfig().environment(mistakes.live).runners(num_runners=2)
    with pytest.raises(ConfigError, match=r"is a live Fine, but runners\.num_runners is 2"):
        evaluate(config, policy=torch.nn.Linear(4, 2))


def test_the_toy_itself_is_no_mistake(folder):
    """What the mistakes are made in runs."""
    assert yaml.safe_load(Path("toy.yaml").read_text()) == CONFIG
    assert run().exit_code == 0


@pytest.mark.parametrize("config", ["CartPole-v1", {"environment": {"env": "CartPole-v1"}}, None])
def test_what_is_no_config_is_refused(config):
    """As somebody passes who knows ``gymnasium.make``."""
    with pytest.raises(ConfigError, match=r"give an EvalConfig, such as EvalConfig\(\)\.environment\('CartPole-v1'\)"):
        evaluate(config, lambda observations: np.zeros(len(observations), np.int64))
    with pytest.raises(ConfigError, match="give an EvalConfig"):
        Evaluator(config, lambda observations: np.zeros(len(observations), np.int64), backend="inline")


@pytest.mark.parametrize(
    ("command", "more"),
    [
        ("run", ["-q"]),
        ("plan", ["--pilot", "5", "--json"]),
        pytest.param("doctor", ["-q"], marks=pytest.mark.process),
    ],
)
def test_commands_that_take_a_config_take_options_in_its_place(folder, command, more):
    options = ("--env", "cli_toys:count", "--policy", "cli_toys:alternate", "-n", "6")
    assert call(command, *options, *more).exit_code == 0
    missing = call(command, "-n", "6", *more)
    assert missing.exit_code == ExitCode.USAGE
    assert "give a CONFIG file, or --env and --policy" in missing.stderr
    section = call(command, *options, *more, "--section", "a")
    assert "--section a is a part of a config file" in section.output
    assert section.exit_code == ExitCode.USAGE


def test_one_episode_is_not_planned(folder):
    outcome = call("plan", "toy.yaml", "-n", "1")
    assert outcome.exit_code == ExitCode.USAGE
    assert "evaluation.num_episodes is 1, but one episode shows no difference" in outcome.stderr


def test_a_forgotten_file_of_weights_is_noted(folder):
    """A network that is initialized at random is another one in each run, which nobody can have again."""
    Path("networks.py").write_text(
        "import torch\n\nclass Net(torch.nn.Linear):\n    def __init__(self):\n        super().__init__(4, 2)\n"
    )
    outcome = call("run", "--env", "CartPole-v1", "--policy", "networks:Net", "-n", 3)
    assert "networks:Net draws the weights at random" in " ".join(outcome.stdout.split())


def test_watching_a_folder_without_checkpoints_says_so(folder):
    Path("empty").mkdir()
    for where, why in (("nowhere", "yet: there is no such folder"), ("empty", "yet")):
        outcome = call("watch", where, "--env", "CartPole-v1", "--once")
        assert outcome.exit_code == ExitCode.USAGE
        assert " ".join(outcome.stderr.split()).endswith(f"nothing in '{Path(where).resolve()}' matches '*' {why}")
