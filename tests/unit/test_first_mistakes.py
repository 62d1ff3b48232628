"""Typical first mistakes: each message names the field, without a traceback and without starting Ray."""

import json
import sys
import traceback
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch
from torch import nn

from rl_eval import EvalConfig, EvalRunnerGroup, Evaluator, compare, evaluate, evaluate_policy, load
from rl_eval.cli.exits import ExitCode
from rl_eval.errors import ConfigError, EnvError, PolicyError
from tests.refused import refused, untold
from tests.unit.cli_world import call, make_folder, sets

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


def bare_policy(states):
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
    Path("model.zip").write_bytes(b"PK\x03\x04\xe9\xff")
    return tmp_path


def run(*words, config="toy.yaml"):
    return call("run", config, "--num-episodes", 4, *words)


MLP = "policy.policy=rl_eval.policies.mlp:make_mlp"
ENV = "environment.env="
POLICY = "policy.policy="
REFUSED = {
    "a misspelt environment": (sets(ENV + "CartPol-v1"), "environment.env"),
    "a misspelt section": (sets("evaluations.seed=1"), "evaluations.seed"),
    "a misspelt key": (sets("evaluation.num_episode=3"), "'evaluation.num_episodes'"),
    "a key below one that is no mapping": (sets("evaluation.seed.x=1"), "evaluation.seed"),
    "a key in no section": (sets("num_episodes=3"), "'evaluation.num_episodes'"),
    "a key below one in no section": (sets("env_kwargs.goal=0.5"), "'environment.env_kwargs.goal'"),
    "a nested key in no section": (sets("nowhere.at.all=1"), "nowhere.at"),
    "a policy as environment": (sets(ENV + "mistakes:acts"), "environment.env", "'mistakes:acts'"),
    "an id that a module registers": (sets(ENV + "MyCart-v0"), "my_module:MyEnv-v0"),
    "a value that is no YAML": (sets("evaluation.num_episodes={"), "evaluation.num_episodes"),
    "a value of another type": (sets("evaluation.num_episodes=many"), "evaluation.num_episodes", "'many'"),
    "an assignment without =": (sets("evaluation.seed"), "--set", "evaluation.seed"),
    "a negative count": (sets("runners.num_runners=-1"), "runners.num_runners", "-1"),
    "a section that is not there": (["--section", "x"], "'x'"),
    "an address without runners": (["--address", "host:1"], "runners.address", "'host:1'"),
    "a key of no weights": (sets("policy.weights_key=model"), "policy.weights"),
    "force without a folder": (["--force"], "--output"),
    "an output below a file": (["--output", "file/below"], "file/below"),
    "an output that is a file": (["--output", "file"], "file "),
    "an output that cannot be": (["--output", "/proc/x"], "/proc/x"),
    "no policy": (sets(POLICY + "null"), "policy.policy"),
    "no environment": (sets(ENV + "null"), "environment.env"),
    "a module that is not there": (sets(POLICY + "polices:make"), "polices"),
    "a module that cannot be imported": (sets(POLICY + "broken_module:make"), "nothing_of_that_name"),
    "a name that is not in its module": (sets(ENV + "mistakes:Fin"), "environment.env"),
    "a misspelt class": (sets(ENV + "mistakes:Leveled"), "'mistakes:Levelled'"),
    "something that builds nothing": (sets(ENV + "mistakes:number"), "environment.env"),
    "a live environment": (sets(ENV + "mistakes:live"), "environment.env", "Fine"),
    "an environment without its arguments": (sets(ENV + "mistakes:Levelled"), "environment.env_kwargs"),
    "an environment that takes no seed": (sets(ENV + "mistakes:Unseeded"), "Unseeded"),
    "weights that are not there": (sets(MLP, "policy.weights=best.pt"), "'best.pt'"),
    "a training checkpoint": (sets(MLP, "policy.weights=ckpt.pt"), "policy.weights_key", "model"),
    "a whole module": (sets(MLP, "policy.weights=whole.pt"), "'whole.pt'"),
    "no weights at all": (sets(MLP, "policy.weights=notes.pt"), "'notes.pt'"),
    "weights of another network": (sets(ENV + "CartPole-v1", MLP, "policy.weights=narrow.pt"), "'body.0.bias'"),
    "a GPU that nobody was given": (sets("policy.device=cuda", "runners.num_runners=2"), "policy.device", "'cuda'"),
    "a deadline in this process": (sets("fault_tolerance.step_timeout_s=1"), "fault_tolerance.step_timeout_s", "1"),
    "an argument that the factory does not take": (sets(MLP, "policy.policy_kwargs.hiden=3"), "hiden"),
    "a policy where its factory should be": (
        sets(POLICY + "mistakes:bare_policy"),
        "policy.policy_kwargs",
    ),
    "a module without its arguments": (sets(POLICY + "mistakes:Sized"), "'inputs'", "'outputs'"),
    "a module in place of what makes it": (sets(POLICY + "mistakes:net"), "def make(): return net"),
    "an object in place of what makes it": (sets(POLICY + "mistakes:agent"), "agent.get_action("),
    "a class of agents": (sets(POLICY + "mistakes:Agent"), "agent.get_action("),
    "a policy by its file": (["--policy", "./some/toys.py:ones"], "some.toys:ones"),
    "a file of policies": (["--policy", "cli_toys.py"], "cli_toys:NAME"),
    "a model without its ending": (["--policy", "./narrow"], "'narrow.pt'"),
    "an environment by its file": (["--env", "cli_toys.py:count"], "'cli_toys:count'"),
    "an environment as Python imports it": (["--env", "cli_toys.Count"], "'cli_toys:Count'"),
    "weights for a policy that has a file": (
        ["--policy", "rllib:.", "--trust", "--weights", "a.pt"],
        "--weights",
        "a.pt",
    ),
    "a metric that there is not": (["--require", "kurtosis > 5"], "'kurtosis'"),
    "a part of a metric's name": (["--require", "max > 5"], "'episode_len_max'"),
    "a metric by a wrong name": (["--require", "return_mean > 5"], "'episode_return_mean'"),
    "a misspelt random": (["--policy", "randm"], "'random'"),
    "an id without its package": (["--env", "Nobodys/Pong-v5"], "Nobodys"),
}
CONFIGS = {
    "CartPole-v1": "--env CartPole-v1",
    "toi.yaml": "'toi.yaml'",
    "broken.yaml": "line 3",
    "array.npy": "array.npy",
    "model.zip": "--policy model.zip",
}


@pytest.mark.parametrize(
    ("words", "config", "named"),
    [
        *((words, "toy.yaml", named) for words, *named in REFUSED.values()),
        *(([], config, [named]) for config, named in CONFIGS.items()),
    ],
    ids=[*REFUSED, *CONFIGS],
)
def test_a_mistake_is_refused_with_its_field_or_the_fix(folder, monkeypatch, words, config, named):
    """Before any runner is started: Ray is never asked for, and no folder is left behind."""

    def forbidden(*args, **kwargs):
        raise AssertionError("Ray was asked for")

    monkeypatch.setattr("rl_eval.backends.connection.Connection.__init__", forbidden)
    outcome = run(*words, config=config)
    assert outcome.exit_code == ExitCode.USAGE, outcome.output
    _, _, message = outcome.stderr.rpartition("error: ")
    assert [one for one in named if one not in message] == []
    assert outcome.stdout == ""
    assert "Traceback" not in outcome.output
    assert "\x1b" not in outcome.stderr
    assert not Path("runs").exists() or list(Path("runs").iterdir()) == []


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


OBJECT = (ConfigError, "policy.policy")
"""What is refused as it is; others when they act."""
LIVE = {
    "act of observations alone": (ActsOnObservationsAlone(), *OBJECT, "act(observations, state, live, noise)"),
    "act that returns actions alone": (ReturnsActionsAlone(), PolicyError, "act", "(actions, None)"),
    "for one observation": (for_one, PolicyError, "policy.policy", "lambda batch: "),
    "the same for all": (lambda _: 0, PolicyError, "action", "(16,)"),
    "nothing returned": (lambda _: None, PolicyError, "action", "None"),
    "an object that predicts": (Predicts(), *OBJECT, "lambda batch: model.predict(batch)[0]"),
    "a class": (Predicts, *OBJECT, f"'{__name__}:Predicts'"),
    "an object that gets actions": (GetsActions(), *OBJECT, "lambda batch: agent.get_action(batch)"),
    "actions with a state": (Predicts().predict, PolicyError, "action", "pass the model itself"),
    "actions with their logarithms": (
        lambda batch: (np.zeros(len(batch), np.int64), np.zeros(len(batch))),
        *(PolicyError, "action", "return the actions alone"),
    ),
    "sampled actions": (
        lambda batch: np.random.randint(0, 2, len(batch)),  # noqa: NPY002
        *(ConfigError, "policy.allow_nondeterministic", "the most likely action"),
    ),
    "whole numbers as floats": (lambda batch: np.ones(len(batch)), PolicyError, "action", "actions.astype(int)"),
    "words": (lambda batch: ["left"] * len(batch), PolicyError, "action", "Return integers."),
    "logits": (lambda batch: np.zeros((len(batch), 2)), PolicyError, "action", "logits.argmax(axis=1)"),
    "a column": (lambda batch: np.zeros((len(batch), 1), np.int64), PolicyError, "action", "actions.reshape(-1)."),
    "a net with other outputs": (torch.nn.Linear(4, 3), PolicyError, "logits", "last layer 2 outputs"),
    "what makes a policy": (lambda: for_one, *OBJECT, '"module:attr"'),
    "what makes one of settings alone": (lambda hidden=32: for_one, *OBJECT, '"module:attr"'),
}


@pytest.mark.parametrize("policy", LIVE)
@pytest.mark.parametrize("environments", [1, 8])
def test_a_policy_of_another_kind_is_told_what_one_is(policy, environments):
    live, kind, key, named = LIVE[policy]
    config = EvalConfig().environment("CartPole-v1").runners(num_runners=0, num_envs_per_runner=environments)
    with refused(kind, key) as caught:
        evaluate(config, live)
    assert named in str(caught.value)
    assert "_Unrepeatable" not in "".join(traceback.format_exception(caught.value))


def test_actions_without_their_axis_are_reshaped():
    with refused(PolicyError, "action") as caught:
        evaluate("Pendulum-v1", lambda batch: np.zeros(len(batch)), num_episodes=1)
    assert "actions.reshape(-1, 1)" in caught.value.fix


def test_weights_of_nan_are_the_cause():
    """Another policy for these spaces would not help."""
    net = torch.nn.Linear(4, 2)
    torch.nn.init.constant_(net.weight, torch.nan)
    with refused(PolicyError, "policy") as caught:
        evaluate("CartPole-v1", net, num_episodes=2)
    assert "Check the weights" in str(caught.value)
    assert "Pass a policy" not in str(caught.value)


def looks_up(batch):
    return json.loads("{")["key"]


@pytest.mark.parametrize("policy", [looks_up, lambda batch: {}["key"]])
def test_an_error_of_a_policy_has_the_line_of_its_code(policy):
    with refused(PolicyError, "policy") as caught:
        evaluate("CartPole-v1", policy, num_episodes=2)
    line = policy.__code__.co_firstlineno + (policy is looks_up)
    assert f"{__file__}:{line}" in caught.value.fix


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
        with refused(ConfigError, "policy.policy", value="model.zip"):
            make()
    Path("net.pt").touch()
    with refused(ConfigError, "policy.policy", value="net.pt"):
        evaluate(EvalConfig().environment("CartPole-v1"), "net.pt")


def test_a_result_that_is_not_complete_is_a_warning(caplog):
    """In a script, nobody may look at anything but the mean."""
    assert evaluate(Unlicensed, zeros, num_episodes=2).status == "failed"
    [warned] = caplog.messages
    assert untold(warned, 2, "failed", "RuntimeError") == []


FAILED = {
    "the old step": ("environment.env=mistakes:Old", ["EnvError", "step()", "4"]),
    "observations of another shape": ("environment.env=mistakes:Wide", ["observation", "(5,)", "(4,)"]),
    "actions that are none": ("policy.policy=mistakes:vague", ["action"]),
}


@pytest.mark.parametrize("mistake", FAILED)
def test_a_mistake_in_code_is_told_in_the_result(folder, mistake):
    """Such a result is a failure, which says what the code did; the tracebacks are kept for ``show --faults``."""
    assignment, words = FAILED[mistake]
    outcome = run(*sets(assignment, *(() if "policy" in assignment else ("policy.policy=cli_toys:ones",))))
    assert outcome.exit_code != ExitCode.COMPLETE
    shown = " ".join(outcome.output.split())
    assert [word for word in words if word not in shown] == []
    assert "Traceback" not in outcome.output


@pytest.mark.parametrize("config", [3, {"environment": {"env": "CartPole-v1"}}, None])
def test_what_is_no_config_is_refused(config):
    """As somebody passes who knows ``gymnasium.make``."""
    with refused(ConfigError, "config"):
        evaluate(config, lambda observations: np.zeros(len(observations), np.int64))
    with refused(ConfigError, "config"):
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
    assert all(option in missing.stderr for option in ("--env", "--policy"))
    section = call(command, *options, *more, "--section", "a")
    assert "--section a" in section.output
    assert section.exit_code == ExitCode.USAGE


def test_a_policy_that_rejects_generated_observations_is_judged_on_a_real_one():
    """It takes a batch, but parses only what the environment shows; a row of its batch is no error for it either."""

    def parse(observations):
        if np.abs(observations).max() > 1000 or (np.ndim(observations) == 2 and np.abs(observations).max() > 0.06):
            raise ValueError("not from this environment")
        return np.zeros(len(observations), np.int64)

    config = EvalConfig().environment("CartPole-v1").evaluation(num_episodes=4, max_episode_steps=1)
    for inference in ("exact", "batched"):
        result = evaluate(config.copy().policy(inference=inference), parse)
        assert result.status == "complete"
        assert result.mean_return == 1.0


# Mistakes of a call from Python


class Plain(gym.Env):
    observation_space = gym.spaces.Box(-1, 1, (4,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        return np.zeros(4, np.float32), {}

    def step(self, action):
        return np.zeros(4, np.float32), 1.0, True, False, {}


class Composed(Plain):
    observation_space = gym.spaces.Dict(a=Plain.observation_space)

    def reset(self, *, seed=None, options=None):
        return {"a": np.zeros(4, np.float32)}, {}


class OldReset(Plain):
    def reset(self, *, seed=None, options=None):
        return np.zeros(4, np.float32)


class OldStep(Plain):
    def step(self, action):
        return np.zeros(4, np.float32), 1.0, True, {}


class WrongShape(Plain):
    def reset(self, *, seed=None, options=None):
        return np.zeros(5, np.float32), {}


class WrongType(Plain):
    def reset(self, *, seed=None, options=None):
        return np.full(4, "x"), {}


class WrongReward(Plain):
    def step(self, action):
        return np.zeros(4, np.float32), "much", True, False, {}


class Unlicensed(Plain):
    def step(self, action):
        raise RuntimeError("no licence")


def zeros(observations):
    return np.zeros(len(observations), np.int64)


FATAL = {
    "weights of another observation": (Plain, nn.Linear(3, 2), PolicyError),
    "an action outside of the space": (Plain, lambda observations: np.full(len(observations), 2), PolicyError),
    "torch code on arrays": (Plain, torch.relu, PolicyError),
    "an attribute that arrays lack": (Plain, lambda observations: observations.missing, PolicyError),
    "an action that is NaN": (
        "Pendulum-v1",
        lambda observations: np.full((len(observations), 1), np.nan, np.float32),
        PolicyError,
    ),
    "a module on a dict": (Composed, nn.Linear(4, 2), PolicyError),
    "four values of step": (OldStep, zeros, EnvError),
    "one value of reset": (OldReset, zeros, EnvError),
    "another shape": (WrongShape, zeros, EnvError),
    "another dtype": (WrongType, zeros, EnvError),
    "a reward that is text": (WrongReward, zeros, EnvError),
}


@pytest.mark.parametrize(("env", "policy", "error"), FATAL.values(), ids=FATAL)
def test_a_mistake_that_fails_every_attempt_raises(tmp_path, env, policy, error):
    """With the result, after the log was written, and in every call that returns a result."""
    with pytest.raises(error) as caught:
        evaluate(env, policy, num_episodes=3, output=tmp_path / "run")
    assert caught.value.result.status == "failed"
    assert load(tmp_path / "run").num_failed == 3
    space = gym.make(env).observation_space if isinstance(env, str) else env.observation_space
    assert error is EnvError or str(space) in str(caught.value)
    with pytest.raises(error):
        evaluate_policy(policy, env, 3)
    config = EvalConfig().environment(env).evaluation(num_episodes=3)
    with EvalRunnerGroup(config, policy, threaded=False) as group:
        assert group.submit().result().status == "failed"


def test_what_the_environment_raises_is_a_result():
    """It may depend on the episode; also an error after the first step."""
    assert evaluate(Unlicensed, zeros, num_episodes=3).status == "failed"
    assert evaluate("CartPole-v1", Forgetful(), num_episodes=3).status == "failed"


def test_errors_at_two_places_are_a_result():
    """As for ``fail_fast``, failures are alike if they are at the same place of the user's code."""
    assert evaluate("CartPole-v1", TwoErrors(), num_episodes=8).status == "failed"


class TwoErrors:
    """Policy that fails in the first step, in some episodes at another line than in others."""

    def __call__(self, observations):
        if observations[0, 0] > 0:
            raise ValueError("to the right")
        raise ValueError("to the left")


def make(kind):
    config = EvalConfig().environment("CartPole-v1").evaluation(num_episodes=2)
    if kind == "config":
        return config
    if kind == "evaluator":
        return Evaluator(config, zeros, backend="inline")
    result = evaluate(config, zeros)
    return {"result": result, "record": result.episodes[0], "comparison": compare(result, result)}[kind]


@pytest.mark.parametrize(
    ("kind", "name", "meant"),
    [
        ("config", "runner", "runners"),
        ("config", "env", "environment"),
        ("config", "from_file", "from_yaml"),
        ("evaluator", "evaluates", "evaluate"),
        ("result", "rewards", "returns"),
        ("record", "reward", "episode_return"),
        ("comparison", "differences", "difference"),
    ],
)
def test_an_unknown_attribute_names_the_nearest(kind, name, meant):
    with pytest.raises(AttributeError) as caught:
        getattr(make(kind), name)
    assert f"did you mean '{meant}'" in str(caught.value)


class Forgetful:
    """Policy that fails from the second step on."""

    def __call__(self, observations):
        if np.abs(observations[:, 1]).max() > 0.1:
            raise ValueError("too fast")
        return zeros(observations)
