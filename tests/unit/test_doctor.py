"""What ``rl-eval doctor`` finds: each environment or policy below is wrong in one way, and it names that one."""

import random
import socket
import sys
import threading
from itertools import islice

import gymnasium as gym
import numpy as np
import pytest
import yaml
from typer.testing import CliRunner

from rl_eval.cli import app
from rl_eval.cli.checks import episodes, machine
from rl_eval.cli.checks.environment import check_environment
from rl_eval.cli.checks.episodes import Player, first_difference, for_player, sampled_actions
from rl_eval.cli.checks.machine import check_address, check_machine
from rl_eval.cli.checks.policy import check_policy
from rl_eval.cli.checks.processes import check_processes
from rl_eval.config.builder import EvalConfig
from rl_eval.execution.group import evaluate
from rl_eval.records.episode import Lease, without_place
from rl_eval.records.trace import TRACE
from rl_eval.scheduling.plan import EpisodePlan
from tests.unit.cli_world import printed


class Good(gym.Env):
    """Ends after 30 steps; its observations and rewards are what ``draw`` returns."""

    def __init__(self, space=None):
        self.observation_space = gym.spaces.Box(-10.0, 100.0, (2,), np.float32) if space is None else space
        self.action_space = gym.spaces.Discrete(2)
        self.closed = False

    def draw(self):
        return float(self.np_random.random())

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        return self.observe(), {}

    def observe(self):
        return np.array([self.steps, self.draw()], np.float32)

    def step(self, action):
        self.steps += 1
        return self.observe(), self.draw(), self.steps >= 30, False, {}

    def close(self):
        self.closed = True


class Unseeded(Good):
    def draw(self):
        return random.random()


class SeedsNumpy(Good):
    def reset(self, *, seed=None, options=None):
        np.random.seed(seed)  # noqa: NPY002
        return super().reset(seed=seed)

    def draw(self):
        return float(np.random.random())  # noqa: NPY002


class SharesGenerator(Good):
    shared = None

    def reset(self, *, seed=None, options=None):
        type(self).shared = np.random.default_rng(seed)
        return super().reset(seed=seed)

    def draw(self):
        return float(self.shared.random())


class Remembers(Good):
    def __init__(self):
        super().__init__()
        self.wear = 0.0

    def draw(self):
        self.wear += 0.125
        return self.wear


class WastesRandomNumbers(Good):
    def step(self, action):
        random.random()
        return super().step(action)


class Misshapen(Good):
    def observe(self):
        return np.zeros(3, np.float32)


class Breaks(Good):
    def step(self, action):
        raise RuntimeError("the simulator broke")


class BreaksOnFirstAttempt(Good):
    def begin_episode(self, index, seed, attempt):
        self.attempt = attempt

    def step(self, action):
        if self.attempt == 1:
            raise RuntimeError("a hiccup")
        return super().step(action)


class Endless(Good):
    def step(self, action):
        return *super().step(action)[:2], False, False, {}


class RemembersTheThird(Good):
    """Like new after one to three episodes."""

    def __init__(self):
        super().__init__()
        self.resets = 0

    def reset(self, *, seed=None, options=None):
        self.resets += 1
        return super().reset(seed=seed)

    def draw(self):
        return super().draw() + (self.resets > 3)


class RemembersInOne(Good):
    """Few seeds show that it remembers."""

    def __init__(self):
        super().__init__()
        self.used = False

    def reset(self, *, seed=None, options=None):
        self.shows, self.used = self.used and seed == EpisodePlan(4, 0)[2].seed, True
        return super().reset(seed=seed)

    def draw(self):
        return super().draw() + self.shows


class WanderOff(Good):
    """Differs late in an episode."""

    def __init__(self):
        super().__init__()
        self.observation_space = gym.spaces.Box(-10.0, 1000.0, (2,), np.float32)

    def draw(self):
        return super().draw() if self.steps < 250 else random.random()

    def step(self, action):
        observation, reward, _, _, info = super().step(action)
        return observation, reward, self.steps >= 300, False, info


class Outside(Good):
    def observe(self):
        return np.array([self.steps - 25, self.draw()], np.float32)


class Doubles(Good):
    def observe(self):
        return super().observe().astype(np.float64)


class NoInfo(Good):
    def step(self, action):
        return *super().step(action)[:4], None


class OldStep(Good):
    def step(self, action):
        observation, reward, terminated, _, info = super().step(action)
        return observation, reward, terminated, info


class OldReset(Good):
    def reset(self, *, seed=None, options=None):
        return super().reset(seed=seed)[0]


class NoReward(Good):
    def step(self, action):
        observation, _, *rest = super().step(action)
        return observation, None, *rest


class TextReward(Good):
    def step(self, action):
        observation, _, *rest = super().step(action)
        return observation, "0.3", *rest


class TextFlag(Good):
    def step(self, action):
        observation, reward, _, *rest = super().step(action)
        return observation, reward, "False", *rest


class TextInfo(Good):
    def step(self, action):
        return *super().step(action)[:4], {"distance": "far"}


class Infinite(Good):
    def __init__(self):
        super().__init__(gym.spaces.Box(-np.inf, np.inf, (2,), np.float32))

    def observe(self):
        return super().observe() + (np.inf if self.steps == 7 else 0)


class ArrayReward(Good):
    def step(self, action):
        observation, reward, *rest = super().step(action)
        return observation, np.array([reward]), *rest


class OutsideOnce(Good):
    def observe(self):
        return np.array([200 if self.steps == 23 else 0, self.draw()], np.float32)


class NotSeeded(Good):
    """Has a generator of its own, which is fine, and leaves gymnasium's alone, which is not asked for."""

    def reset(self, *, seed=None, options=None):
        self.generator = np.random.default_rng(seed)
        self.steps = 0
        return self.observe(), {}

    def draw(self):
        return float(self.generator.random())


class BreaksOnClose(Good):
    def close(self):
        raise RuntimeError("too late")


def settings_of(env, *, lanes=4, **sections):
    config = EvalConfig().environment(lambda context: env()).runners(num_envs_per_runner=lanes)
    for section, values in sections.items():
        getattr(config, section)(**values)
    return config.build()


def examine(env, **sections):
    return list(check_environment(settings_of(env, **sections)))


def examine_policy(made, env=Good, **sections):
    sections.setdefault("policy", {})
    sections["policy"]["policy"] = made
    return list(check_policy(settings_of(env, **sections)))


def worst(findings):
    """The text of the one problem; else of all warnings."""
    problems = [finding.text for finding in findings if finding.level == "problem"]
    assert len(problems) <= 1, problems
    return problems[0] if problems else [finding.text for finding in findings if finding.level == "warning"]


def texts(findings, level):
    return " | ".join(finding.text for finding in findings if finding.level == level)


@pytest.fixture(autouse=True)
def keep_global_generators():
    """Some of the environments above use them on purpose."""
    states = random.getstate(), np.random.get_state()  # noqa: NPY002
    yield
    random.setstate(states[0])
    np.random.set_state(states[1])  # noqa: NPY002


# The environment


def test_nothing_is_wrong_with_a_good_environment():
    findings = examine(Good)
    assert [finding.level for finding in findings] == ["ok"] * 8 + ["note"] * 2
    assert "check_env has no complaint" in texts(findings, "ok")
    assert "30 steps compared" in texts(findings, "ok")
    assert "episodes end by themselves, here after 30 to 30 steps" in texts(findings, "ok")
    assert "seen: 4 episodes, up to step 30, with made-up actions" in texts(findings, "note")


def test_gymnasium_environments_are_good():
    config = EvalConfig().environment("CartPole-v1").build()
    findings = list(check_environment(config))
    assert {finding.level for finding in findings} == {"ok", "note"}
    assert "after 500 steps at the latest (the environment's own limit)" in texts(findings, "ok")


@pytest.fixture
def patient(monkeypatch):
    """Steps bound what is played, and no clock."""
    monkeypatch.setattr(episodes, "MAX_SECONDS", 600.0)
    monkeypatch.setattr(episodes, "MAX_STEPS", 1000)


def test_an_endless_environment_is_a_problem(patient):
    text = worst(examine(Endless))
    assert "no episode ended in 1,000 steps" in text
    assert "only fault_tolerance.episode_timeout_s=3600 stops it" in text
    assert "nothing stops it" in worst(examine(Endless, fault_tolerance={"episode_timeout_s": None}))


def test_an_endless_environment_may_be_cut():
    findings = examine(Endless, evaluation={"max_episode_steps": 40})
    assert not worst(findings)
    assert "after 40 steps at the latest (evaluation.max_episode_steps)" in texts(findings, "ok")
    assert "(40 steps compared)" in texts(findings, "ok")


def test_whole_episodes_are_compared(patient):
    assert worst(examine(WanderOff)).startswith(
        "equal seeds and actions give different episodes, first in the reward in step 250: "
    )


@pytest.mark.parametrize("env", [RemembersTheThird, RemembersInOne])
def test_several_episodes_are_played_after_each_other(env):
    assert worst(examine(env)).startswith("an environment remembers its former episodes")


@pytest.mark.parametrize(
    ("env", "said"),
    [
        (NoInfo, "`info` returned by `step()` must be a python dictionary"),
        (OldStep, "old step API"),
        (OldReset, "not a tuple of the form `(obs, info)`"),
    ],
)
def test_a_broken_contract_is_a_problem_that_ends_the_search(env, said):
    findings = examine(env)
    assert worst(findings).startswith("gymnasium's contract: ")
    assert said in worst(findings)
    assert "no episodes were played" in texts(findings, "note")


@pytest.mark.parametrize("env", [NoReward, TextReward, TextFlag, TextInfo, Infinite])
def test_what_fails_every_episode_of_an_evaluation_is_a_problem_in_the_same_words(env):
    sections = {"evaluation": {"info_keys": ["distance"], "num_episodes": 1}}
    told = evaluate(settings_of(env, policy={"policy": zeros}, **sections)).faults[-1]
    found = worst(examine(env, **sections))
    assert found == f"every attempt of an episode failed; the last: {told.error_type}: {told.message}"
    assert found in worst(examine_policy(zeros, env, **sections)).replace("under the policy's actions ", "")


@pytest.mark.parametrize("env", [ArrayReward, Doubles, Outside])
def test_what_an_evaluation_notes_is_a_warning_in_the_same_words(env):
    space = {"space": gym.spaces.Box(-30.0, 0.0, (2,), np.float32)} if env is Outside else {}
    settings = settings_of(lambda: env(**space), policy={"policy": zeros}, evaluation={"num_episodes": 1})
    (note,) = (without_place(text) for text in evaluate(settings).notes if "first seen" in text or "array of" in text)
    (text,) = (text for text in worst(list(check_environment(settings))) if "gymnasium's contract" not in text)
    assert text.startswith(note)


def test_every_observation_is_looked_at():
    (text,) = worst(examine(OutsideOnce))
    assert text.startswith("observation is outside of its space; first seen in episode 0 at step 23: 200.0")


def test_info_keys_that_no_step_had_are_a_warning():
    (text,) = worst(examine(Good, evaluation={"info_keys": ["distence"]}))
    assert text == "no step had 'distence' of evaluation.info_keys in its info, which had nothing"


def test_what_breaks_the_contract_and_no_evaluation_is_a_warning():
    (text,) = worst(examine(NotSeeded))
    assert "An evaluation rests on it only where self.np_random is drawn from." in text


def test_a_time_limit_among_the_wrappers_is_found():
    class Limited(gym.Wrapper):
        def __init__(self):
            super().__init__(gym.wrappers.TimeLimit(Good(), 17))

    for given in ({}, {"evaluation": {"max_episode_steps": 900}}):
        findings = examine(Limited, **given)
        assert not worst(findings)
        assert "after 17 steps at the latest (the environment's own limit)" in texts(findings, "ok")
    assert "(17 steps compared)" in texts(findings, "ok")


def test_unseeded_random_numbers_are_a_problem():
    findings = examine(Unseeded)
    assert worst(findings) == "equal seeds and actions give different episodes, first in the observation after reset"
    assert "reset() changes Python's global generator, which" in texts(findings, "warning")
    assert "step() changes Python's global generator, which" in texts(findings, "warning")


@pytest.mark.parametrize("env", [SeedsNumpy, SharesGenerator])
def test_environments_that_disturb_each_other_are_a_problem(env):
    assert worst(examine(env)).startswith(
        "environments in one process disturb each other: stepped in turn, they differ in the reward in step 1: "
    )


def test_disturbance_is_only_a_warning_with_one_environment_per_process():
    assert "disturb each other" in texts(examine(SharesGenerator, lanes=1), "warning")


def test_seeding_a_global_generator_is_a_warning():
    assert "reset() changes numpy's global generator, which" in texts(examine(SeedsNumpy), "warning")


def test_drawing_from_a_global_generator_to_no_effect_is_a_warning():
    findings = examine(WastesRandomNumbers)
    assert "step() changes Python's global generator, which other code shares" in worst(findings)


def test_memory_of_former_episodes_is_a_problem():
    assert worst(examine(Remembers)).startswith("an environment remembers its former episodes: a new one differs in")


def test_memory_does_no_harm_with_a_new_environment_per_episode():
    config = EvalConfig().environment(lambda context: Remembers(), env_reuse="episode").build()
    findings = list(check_environment(config))
    assert "env_reuse: episode takes care of it" in texts(findings, "note")
    assert not texts(findings, "problem")


def test_a_constructor_that_raises_is_a_problem():
    def explode():
        raise ValueError("no licence")

    (finding,) = examine(explode)
    assert finding.level == "problem"
    assert finding.text.endswith("cannot be constructed (3 attempts): ValueError: no licence")


def test_a_space_that_cannot_be_batched_is_a_problem():
    (finding,) = examine(lambda: Good(gym.spaces.Text(5)))
    assert finding.level == "problem"
    assert "cannot batch" in finding.text


def test_observations_outside_the_contract_are_a_problem():
    assert "observation has shape (3,)" in worst(examine(Misshapen))


def test_an_environment_that_always_raises_is_a_problem():
    assert worst(examine(Breaks)) == "every attempt of an episode failed; the last: RuntimeError: the simulator broke"


def test_an_environment_that_a_retry_saves_is_a_warning():
    findings = examine(BreaksOnFirstAttempt)
    assert "attempts that failed before one did not: 1; the last: RuntimeError: a hiccup" in worst(findings)
    assert "equal episodes (30 steps compared)" in texts(findings, "ok")


def test_a_broken_close_is_survived():
    assert not texts(examine(BreaksOnClose), "problem")


def test_every_environment_is_closed():
    built = []

    def build():
        built.append(Good())
        return built[-1]

    examine(build)
    assert len(built) > 2
    assert all(env.closed for env in built)


def test_nested_spaces_are_named_without_their_bounds():
    space = gym.spaces.Dict(
        {"a": gym.spaces.Box(0, 255, (2, 2), np.uint8), "b": gym.spaces.Tuple([gym.spaces.Discrete(3)])}
    )
    (first, *_) = examine(lambda: Good(space))
    assert "{a: Box(2, 2) of uint8, b: (Discrete(3))}" in first.text


# Comparing episodes


def test_first_difference_names_the_place():
    def trace(*, reward=0.5, **last):
        rows = np.zeros(4, TRACE)
        rows["reward"][3] = reward
        for name, value in last.items():
            rows[name][3] = value
        return rows

    assert first_difference(trace(), trace()) == first_difference(trace(), trace()[:2]) == ""
    assert first_difference(trace(), trace(observation=7)) == "the observation in step 3"
    assert first_difference(trace(), trace(reward=0.25)) == "the reward in step 3: 0.5 and 0.25"
    assert first_difference(trace(), trace(truncated=True)) == "the end of the episode in step 3"


def test_made_up_actions_leave_the_environment_alone():
    space = gym.spaces.Discrete(1000, seed=3)
    actions = list(islice(sampled_actions(space, 1), 50))
    assert actions == list(islice(sampled_actions(space, 1), 50))
    assert actions != list(islice(sampled_actions(space, 2), 50))
    assert space.sample() == gym.spaces.Discrete(1000, seed=3).sample()


def test_leaves_outside_of_their_space_are_named():
    class Nested(Good):
        def observe(self):
            return {"a": np.array([0.5], np.float32), "b": (1, np.int64(7))}

    space = gym.spaces.Dict(
        {"a": gym.spaces.Box(0, 1, (1,)), "b": gym.spaces.Tuple([gym.spaces.Discrete(3), gym.spaces.Discrete(3)])}
    )
    report = Player(for_player(settings_of(lambda: Nested(space)))).run([Lease(0, 0, 1, 0)])
    assert report.notes == (
        "observation['b'][1] is outside of its space; first seen in episode 0 at step 0: 7, with bounds 0 and 2",
    )


# Two processes


PROCESS_TOYS = """
import os
import gymnasium as gym
import numpy as np

class Toy(gym.Env):
    observation_space = gym.spaces.Box(-1.0, 100.0, (1,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.steps += 1
        return np.full(1, self.steps, np.float32), self.draw(), self.steps >= 20, False, {}

    def draw(self):
        return float(self.np_random.random())

class Hashes(Toy):
    def draw(self):
        return float(hash(str(self.steps)) % 1000)

class Exits(Toy):
    def reset(self, *, seed=None, options=None):
        os._exit(7)
"""


@pytest.fixture
def toys(tmp_path, monkeypatch):
    (tmp_path / "process_toys.py").write_text(PROCESS_TOYS)
    monkeypatch.syspath_prepend(tmp_path)
    yield lambda name: next(check_processes(EvalConfig().environment(f"process_toys:{name}").build()))
    sys.modules.pop("process_toys", None)


@pytest.mark.process
def test_what_depends_on_the_process_is_a_problem(toys):
    finding = toys("Hashes")
    assert finding.level == "problem"
    assert finding.text.startswith("two processes play different episodes: they differ in the reward in step 1")


@pytest.mark.process
def test_what_the_other_process_cannot_do_is_said(toys):
    assert toys("Exits").text == "not compared between processes: RuntimeError: it ended with exit status 7"
    lock = threading.Lock()
    (finding,) = check_processes(EvalConfig().environment(lambda context: lock and Good()).build())
    assert finding.level == "note"
    assert "cannot pickle" in finding.text


# The policy


def zeros(observations):
    return np.zeros(len(observations), np.int64)


def test_a_plain_function_is_fine():
    findings = examine_policy(zeros)
    assert {finding.level for finding in findings} == {"ok", "note"}
    assert "has no weights to set" in texts(findings, "ok")
    assert "one forward pass for all 4 environments" in texts(findings, "ok")
    assert "policy.deterministic: false would not work" in texts(findings, "note")


def module():
    import torch

    return torch.nn.Linear(2, 2)


def test_a_module_can_sample_too_and_lacks_weights():
    findings = examine_policy(module())
    assert "policy.deterministic: false would work too" in texts(findings, "note")
    assert "policy.weights is not set" in texts(findings, "warning")


def test_weights_that_fit(tmp_path):
    import torch

    torch.save(module().state_dict(), tmp_path / "fit.pt")
    findings = examine_policy(module(), policy={"weights": str(tmp_path / "fit.pt")})
    assert "weights fit: 2 tensors" in texts(findings, "ok")


def test_weights_that_do_not_fit_are_a_problem(tmp_path):
    import torch

    torch.save(torch.nn.Linear(2, 3).state_dict(), tmp_path / "unfit.pt")
    assert "have shape (3, 2)" in worst(examine_policy(module(), policy={"weights": str(tmp_path / "unfit.pt")}))


def test_actions_outside_the_space_are_a_problem():
    findings = examine_policy(lambda observations: zeros(observations) + 7)
    assert "cannot act: PolicyError: the policy returned action 7" in worst(findings)


def test_an_environment_that_fails_under_the_policy_alone_is_a_problem():
    class Fragile(Good):
        def step(self, action):
            if action:
                raise RuntimeError("the gripper jammed")
            return super().step(action)

    findings = examine_policy(lambda observations: zeros(observations) + 1, Fragile)
    assert worst(findings) == (
        "every attempt of an episode under the policy's actions failed; the last: RuntimeError: the gripper jammed"
    )
    assert "acts in the environment" not in texts(findings, "ok")


def test_an_environment_that_a_retry_saves_under_the_policy_is_a_warning():
    findings = examine_policy(zeros, BreaksOnFirstAttempt)
    assert "RuntimeError: a hiccup" in " ".join(worst(findings))
    assert "acts in the environment" in texts(findings, "ok")


def test_actions_of_the_wrong_shape_are_a_problem():
    assert "of shape (16, 3)" in worst(examine_policy(lambda observations: np.zeros((len(observations), 3), int)))


def test_a_policy_that_raises_is_a_problem():
    def explode(observations):
        raise KeyError("layer")

    assert "KeyError" in worst(examine_policy(explode))


def test_rows_that_depend_on_their_batch_are_a_warning():
    def mixes_rows(observations):
        return (observations[:, 1] > observations[:, 1].mean()).astype(np.int64)

    assert "each environment has its own forward pass" in texts(examine_policy(mixes_rows), "warning")


def test_a_policy_that_does_not_repeat_itself_is_a_problem():
    import torch

    class Forced(torch.nn.Linear):
        def forward(self, observations):
            return torch.nn.functional.dropout(super().forward(observations), 0.5, training=True)

    calls = []

    def counts(observations):
        calls.append(0)
        return zeros(observations) + len(calls) % 2

    for made in (Forced(2, 2), counts, lambda observations: zeros(observations) + int(random.random() * 2)):
        assert worst(examine_policy(made)).startswith("the policy gives other results for ")


def test_a_policy_whose_state_is_declared_repeats_itself():
    class Recurrent:
        def initial_state(self, batch_size):
            return np.zeros(batch_size, np.int64)

        def act(self, observations, state, live, noise):
            state += 1
            return state % 2, state

    assert not texts(examine_policy(Recurrent()), "problem")


def test_no_policy_is_a_problem():
    assert "policy.policy is missing" in worst(list(check_policy(settings_of(Good))))


# The machine


def test_versions_other_than_the_tested_ones_are_one_quiet_line(monkeypatch):
    versions = {"Python": "3.11.7", "gymnasium": "0.29.1", "numpy": "2.1.0", "ray": "2.60.0", "torch": "2.13.0+cpu"}
    monkeypatch.setattr(machine, "_version", versions.get)
    findings = list(check_machine())
    assert [(finding.level, finding.text) for finding in findings] == [
        ("ok", "Python 3.11.7, gymnasium 0.29.1, numpy 2.1.0, ray 2.60.0, torch 2.13.0+cpu"),
        ("problem", "tensordict is not installed"),
        ("note", "tested with gymnasium 1.2 to 1.4, numpy 2.4"),
    ]


def test_ray_addresses(monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)

    def find(address):
        settings = settings_of(Good, runners={"num_runners": 2, "address": address})
        (finding,) = check_address(settings)
        return finding.level, finding.text

    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert find(f"127.0.0.1:{port}")[0] == "ok"
        assert find(f"ray://127.0.0.1:{port}")[0] == "ok"
    level, text = find(f"127.0.0.1:{port}")
    assert (level, "nothing answers" in text) == ("problem", True)
    assert find(None)[0] == find("auto")[0] == "note"


def test_ray_is_not_needed_in_this_process():
    (finding,) = check_address(settings_of(Good))
    assert finding.level == "ok"


# The command

MODULE = """
import numpy as np

def make():
    return lambda observations: np.zeros(len(observations), np.int64)
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "doctor_toys.py").write_text(MODULE)
    config = {"environment": {"env": "CartPole-v1"}, "policy": {"policy": "doctor_toys:make"}}
    (tmp_path / "toy.yaml").write_text(yaml.safe_dump(config))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return tmp_path


def call(*args):
    return CliRunner().invoke(app, ["doctor", *args])


@pytest.mark.process
def test_doctor_is_0_without_problems(folder):
    outcome = call("toy.yaml")
    assert outcome.exit_code == 0, outcome.output
    assert [line for line in outcome.stdout.splitlines() if line and not line.startswith(" ")][:-1] == [
        "machine", "config", "environment", "policy", "ray",
    ]  # fmt: skip
    assert outcome.stdout.splitlines()[-1].startswith("0 problems, ")
    assert all(len(line) <= 80 and line == line.rstrip() for line in outcome.stdout.splitlines())
    assert "ok two processes with other hash seeds play equal episodes (" in " ".join(outcome.stdout.split())


def test_doctor_is_2_with_a_problem_and_goes_on(folder):
    outcome = call("toy.yaml", "--set", "environment.env=rl_eval.testing:impure")
    assert outcome.exit_code == 2
    assert "remembers its former episodes" in " ".join(outcome.stdout.split())
    assert "acts in the environment" in outcome.stdout


def test_without_a_config_the_machine_is_checked(folder):
    outcome = call()
    assert outcome.exit_code == 0, outcome.output
    assert "none is given: only the machine is checked" in outcome.stdout
    assert not [title for title in ("environment", "policy", "ray") if title in outcome.stdout.splitlines()]


@pytest.mark.process
def test_an_environment_alone_is_checked_with_random_actions(folder):
    outcome = call("--env", "CartPole-v1", "--set", "environment.env_kwargs.sutton_barto_reward=true")
    assert outcome.exit_code == 0, outcome.output
    assert "policy: uniform random actions" in outcome.stderr
    assert "environment" in outcome.stdout.splitlines()


@pytest.mark.parametrize("given", [("--policy", "random"), ("--set", "environment.env=CartPole-v1"), ("-n", "6")])
def test_half_of_what_says_what_to_check_is_not_enough(folder, given):
    outcome = call(*given)
    assert outcome.exit_code == 2
    assert "nothing says what to evaluate: give a CONFIG file, or --" in outcome.stderr


def test_doctor_prints_json(folder):
    """All findings, or with ``--quiet`` the problems."""
    words = ("toy.yaml", "--set", "environment.env=CartPole-v77", "--json")
    found = printed("doctor", call(*words).stdout)
    assert (found["problems"], found["findings"][0]["section"]) == (1, "machine")
    assert {finding["level"] for finding in found["findings"]} >= {"ok", "note", "problem"}
    (problem,) = printed("doctor", call(*words, "-q").stdout)["findings"]
    assert (problem["section"], problem["level"]) == ("environment", "problem")
    assert "CartPole-v77" in problem["text"]


def test_doctor_stops_at_a_config_that_cannot_work(folder):
    outcome = call("toy.yaml", "--set", "policy.weigths=x")
    assert outcome.exit_code == 2
    assert "did you mean 'weights'?" in outcome.stdout
    assert outcome.stdout.splitlines()[-1].startswith("1 problem, ")


def test_doctor_does_not_try_a_policy_without_an_environment(folder):
    outcome = call("toy.yaml", "--set", "environment.env=CartPole-v77")
    assert outcome.exit_code == 2
    assert "not checked, since a policy is built for an environment" in outcome.stdout


def test_quiet_prints_problems_only(folder, monkeypatch):
    """And nothing where there is none, though there are notes."""
    outcome = call("toy.yaml", "--quiet", "--set", "environment.env=rl_eval.testing:impure")
    assert outcome.exit_code == 2
    lines = outcome.stdout.split("\n")
    assert lines[0] == "environment"
    assert lines[1].startswith("  problem  an environment remembers its former episodes")
    assert not any(line.startswith(("  ok", "  note", "  warning", "policy")) for line in lines)
    reusing = ["--set", "environment.env=rl_eval.testing:impure", "--set", "environment.env_reuse=episode"]
    monkeypatch.setattr("rl_eval.cli.checks.processes.check_processes", lambda settings: ())
    outcome = call("toy.yaml", "--quiet", *reusing)
    assert (outcome.exit_code, outcome.stdout) == (0, "")


class Masked(Good):
    """Allows a part of its actions in each step, and does not survive any other."""

    def __init__(self, space):
        super().__init__()
        self.action_space = space

    def action_masks(self):
        return {gym.spaces.Discrete: [0, 1, 1], gym.spaces.MultiDiscrete: [0, 1, 1, 1, 0]}.get(
            type(self.action_space), [1, 0, 1, 1]
        )

    def step(self, action):
        first = int(np.ravel(action)[0])
        assert first == 0 if isinstance(self.action_space, gym.spaces.MultiBinary) else first != 0
        return super().step(action)


@pytest.mark.parametrize(
    "space", [gym.spaces.Discrete(3), gym.spaces.MultiDiscrete([2, 3]), gym.spaces.MultiBinary(2)], ids=repr
)
def test_actions_that_a_mask_forbids_are_not_tried(space):
    config = EvalConfig().environment(lambda: Masked(space), action_masks=True).policy(lambda o: o)
    found = list(check_environment(config.runners(num_runners=0).build()))
    assert not [finding for finding in found if finding.level in ("problem", "warning")], found
    assert any("knows no action masks" in finding.text for finding in found)
