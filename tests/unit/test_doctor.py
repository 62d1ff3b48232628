"""Findings of ``rl-eval doctor``: each environment or policy below has one defect, which it names."""

import random
import socket
import sys
import threading
import time

import gymnasium as gym
import numpy as np
import pytest
import yaml
from typer.testing import CliRunner

from rl_eval.cli import app, checks, examination
from rl_eval.cli.checks import check_address, check_machine, check_policy
from rl_eval.cli.examination import check_environment
from rl_eval.config.builder import EvalConfig
from rl_eval.errors import ConfigError
from rl_eval.execution.evaluate import evaluate
from rl_eval.records.episode import without_place
from rl_eval.scheduling.plan import EpisodePlan
from tests.refused import refused, result_of, untold
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


class WastesRandomNumbers(Good):
    def step(self, action):
        random.random()
        return super().step(action)


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


class BreaksSometimes(Good):
    """Draws where it breaks from a generator that no seed reaches."""

    steps_of_all = 0

    def step(self, action):
        random.random()
        BreaksSometimes.steps_of_all += 1
        if BreaksSometimes.steps_of_all % 70 == 0:
            raise RuntimeError("the simulator broke")
        return super().step(action)


class SeedsInReset(Good):
    """Draws late in an episode, beside whom it does not matter for a few short ones."""

    def reset(self, *, seed=None, options=None):
        np.random.seed(seed)  # noqa: NPY002
        return super().reset(seed=seed)


class StartsByCount(Good):
    """Takes the next of its stored starts at each reset, and no seed."""

    def __init__(self):
        super().__init__()
        self.start = 0

    def reset(self, *, seed=None, options=None):
        self.start += 1
        return super().reset(seed=seed)

    def draw(self):
        return float(self.start)


class Fixed(Good):
    """Is the same for all seeds, and moved by actions alone."""

    def draw(self):
        return 0.5


class FixedStart(Fixed):
    """Has one start, and chance after it."""

    def draw(self):
        return float(self.np_random.random()) if self.steps else 0.5


class Endless(Good):
    def step(self, action):
        return *super().step(action)[:2], False, False, {}


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

    def draw(self):
        return super().draw() if self.steps < 28 else random.random()


class OldReset(Good):
    def reset(self, *, seed=None, options=None):
        return super().reset(seed=seed)[0]


class TextInfo(Good):
    def step(self, action):
        return *super().step(action)[:4], {"distance": "far"}


class ArrayReward(Good):
    def step(self, action):
        observation, reward, *rest = super().step(action)
        return observation, np.array([reward]), *rest


class OutsideOnce(Good):
    def observe(self):
        return np.array([200 if self.steps == 23 else 0, self.draw()], np.float32)


class BreaksOnClose(Good):
    def close(self):
        raise RuntimeError("too late")


def settings_of(env, *, lanes=4, environment=None, **sections):
    config = EvalConfig().environment(lambda context: env(), **(environment or {})).runners(num_envs_per_runner=lanes)
    for section, values in sections.items():
        getattr(config, section)(**values)
    return config.build()


def examine(env, **sections):
    return list(check_environment(settings_of(env, **sections), elsewhere=False))


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
    assert {finding.level for finding in findings} == {"ok", "note"}
    assert sum(untold(one.text, 30) == [] for one in findings if one.level == "ok") >= 2
    assert "step 30" in texts(findings, "note")


@pytest.fixture
def patient(monkeypatch):
    """Steps bound the episodes, and no clock."""
    monkeypatch.setattr(examination, "MAX_SECONDS", 600.0)
    monkeypatch.setattr(examination, "MAX_STEPS", 1000)


def test_an_endless_environment_is_a_problem(patient):
    assert "1,000 steps" in worst(examine(Endless))
    assert isinstance(worst(examine(Endless, fault_tolerance={"episode_timeout_s": None})), str)
    findings = examine(Endless, evaluation={"max_episode_steps": 40})
    assert not worst(findings)
    assert untold(texts(findings, "ok"), 40) == []


def test_a_slow_environment_is_cut_at_the_steps_that_fit_into_the_time(monkeypatch):
    class Slow(Endless):
        def step(self, action):
            time.sleep(0.02)
            return super().step(action)

    monkeypatch.setattr(examination, "MAX_SECONDS", 0.2)
    (text,) = worst(examine(Slow))
    assert "0.2 s" in text


@pytest.mark.parametrize(
    ("env", "found"),
    [
        (WanderOff, ("reward", "step 28")),
        (Unseeded, ("observation", "reset")),
        (RemembersInOne, ("observation", "reset")),
        (SeedsNumpy, ("reward", "step 1")),
    ],
)
def test_episodes_that_are_not_functions_of_seed_and_actions_are_a_problem(env, found):
    assert untold(worst(examine(env)), *found) == []


def test_a_setting_takes_the_harm_out_of_memory_and_of_disturbance():
    findings = list(
        check_environment(settings_of(RemembersInOne, environment={"env_reuse": "episode"}), elsewhere=False)
    )
    assert "environment.env_reuse" in texts(findings, "note")
    assert not texts(findings, "problem")
    assert untold(texts(examine(SeedsNumpy, lanes=1), "warning"), "reward", "step 1") == []


@pytest.mark.parametrize("env", [OldReset, TextInfo, Breaks])
def test_an_error_of_every_episode_is_a_problem_in_the_words_of_an_evaluation(env):
    sections = {"evaluation": {"info_keys": ["distance"], "num_episodes": 1}}
    fault = result_of(evaluate, settings_of(env, policy={"policy": zeros}, **sections)).faults[-1]
    assert worst(examine(env, **sections)).endswith(f"{fault.error_type}: {fault.message}")
    assert f"{fault.error_type}: {fault.message}" in worst(examine_policy(zeros, env, **sections))


def test_a_note_of_an_evaluation_is_a_warning_in_the_same_words():
    settings = settings_of(ArrayReward, policy={"policy": zeros}, evaluation={"num_episodes": 1})
    (note,) = (without_place(text) for text in evaluate(settings).notes if "array of" in text)
    found = texts(list(check_environment(settings, elsewhere=False)), "warning")
    assert note in found


def test_every_observation_is_looked_at():
    (text,) = worst(examine(OutsideOnce))
    assert "step 23: 200.0" in text


def test_info_keys_that_no_step_had_are_a_warning():
    (text,) = worst(examine(Good, evaluation={"info_keys": ["distence"]}))
    assert "'distence'" in text


@pytest.mark.parametrize(
    ("env", "phases"),
    [
        (Unseeded, ("reset", "step")),
        (SeedsNumpy, ("reset", "step")),
        (WastesRandomNumbers, ("step",)),
        (SeedsInReset, ("reset",)),
        (BreaksSometimes, ("step",)),
    ],
)
def test_touching_a_global_generator_is_a_warning(env, phases):
    found = texts(examine(env), "warning")
    assert tuple(phase for phase in ("reset", "step") if f"{phase}() changes" in found) == phases


def test_a_constructor_that_raises_and_a_space_without_batches_are_problems():
    def explode():
        raise ValueError("no licence")

    any_length = gym.spaces.Sequence(gym.spaces.Discrete(2))
    for env, said in ((explode, "ValueError: no licence"), (lambda: Good(any_length), "cannot batch")):
        (finding,) = examine(env)
        assert finding.level == "problem"
        assert said in finding.text


def test_an_environment_that_a_retry_saves_is_a_warning():
    for findings in (examine(BreaksOnFirstAttempt), examine_policy(zeros, BreaksOnFirstAttempt)):
        assert "RuntimeError: a hiccup" in " ".join(worst(findings))


def test_all_checks_run_in_an_environment_that_breaks_sometimes():
    """It is a warning with the number of failed attempts; an evaluation would retry them."""
    BreaksSometimes.steps_of_all = 0
    findings = examine(BreaksSometimes)
    assert not texts(findings, "problem")
    assert "RuntimeError: the simulator broke" in texts(findings, "warning")
    checked = {one.text.partition("(")[0] for one in examine(WastesRandomNumbers) if one.level == "ok"}
    assert checked == {one.text.partition("(")[0] for one in findings if one.level == "ok"}


def test_no_environment_that_shares_a_generator_is_called_independent_of_others():
    """Four short episodes that are equal do not show it."""
    good, shares = (len([one for one in examine(env) if one.level == "ok"]) for env in (Good, SeedsInReset))
    assert shares == good - 2


@pytest.mark.parametrize(("env", "noted"), [(StartsByCount, True), (Fixed, True), (FixedStart, False), (Good, False)])
def test_seeds_without_effect_are_a_note(env, noted):
    """A note, since some environments are meant to be like that."""
    findings = [examine(one) for one in (Good, env)]
    notes = [len([one for one in found if one.level == "note"]) for found in findings]
    assert notes[1] - notes[0] == noted
    assert not any("env_reuse" in one.fix for one in findings[1]), "copies of one episode are no remedy"


def test_every_environment_is_closed_and_a_broken_close_is_survived():
    built = []

    def build():
        built.append(Good())
        return built[-1]

    examine(build)
    assert len(built) > 2
    assert all(env.closed for env in built)
    assert not texts(examine(BreaksOnClose), "problem")


# Two processes


def elsewhere(env):
    return list(check_environment(EvalConfig().environment(env).build()))[-1]


class Hashes(Good):
    def draw(self):
        return float(hash(str(self.steps)) % 100)


def hashing(context):
    return Hashes()


@pytest.mark.process
def test_two_processes_are_compared():
    finding = elsewhere("tests.unit.test_doctor:hashing")
    assert finding.level == "problem"
    assert untold(finding.text, "observation", "reset") == []
    lock = threading.Lock()
    finding = elsewhere(lambda context: lock and Good())
    assert finding.level == "note"
    assert "cannot pickle" in finding.text


# The policy


def zeros(observations):
    return np.zeros(len(observations), np.int64)


def test_a_plain_function_is_fine():
    findings = examine_policy(zeros)
    assert {finding.level for finding in findings} == {"ok", "note"}
    assert "all 4 environments" in texts(findings, "ok")
    assert "policy.deterministic: false" in texts(findings, "note")


def module():
    import torch

    return torch.nn.Linear(2, 2)


def test_a_module_can_sample_too_and_lacks_weights():
    findings = examine_policy(module())
    assert "policy.deterministic: false" in texts(findings, "note")
    assert "policy.weights" in texts(findings, "warning")


def test_weights_fit_or_are_a_problem(tmp_path):
    import torch

    for name, outputs in (("fit.pt", 2), ("unfit.pt", 3)):
        torch.save(torch.nn.Linear(2, outputs).state_dict(), tmp_path / name)
    findings = examine_policy(module(), policy={"weights": str(tmp_path / "fit.pt")})
    assert "2 tensors" in texts(findings, "ok")
    assert "'weight'" in worst(examine_policy(module(), policy={"weights": str(tmp_path / "unfit.pt")}))


def explode(observations):
    raise KeyError("layer")


@pytest.mark.parametrize(
    ("act", "said"),
    [
        (lambda observations: zeros(observations) + 7, "PolicyError: "),
        (lambda observations: np.zeros((len(observations), 3), int), "(16, 3)"),
        (explode, "KeyError"),
        (None, "policy.policy"),
    ],
)
def test_a_policy_that_cannot_act_is_a_problem(act, said):
    assert said in worst(examine_policy(act))


def test_an_environment_that_fails_under_the_policy_alone_is_a_problem():
    class Fragile(Good):
        def step(self, action):
            if action:
                raise RuntimeError("the gripper jammed")
            return super().step(action)

    findings = examine_policy(lambda observations: zeros(observations) + 1, Fragile)
    assert "RuntimeError: the gripper jammed" in worst(findings)
    assert "policy.deterministic" not in texts(findings, "ok")


def test_rows_that_depend_on_their_batch_are_a_warning():
    def mixes_rows(observations):
        return (observations[:, 1] > observations[:, 1].mean()).astype(np.int64)

    assert [one.fix for one in examine_policy(mixes_rows) if one.level == "warning" and "MKL_CBWR" in one.fix]


def test_batched_inference_is_a_warning_without_advice_on_rows():
    findings = examine_policy(zeros, policy={"inference": "batched"})
    assert "policy.inference" in texts(findings, "warning")
    assert [one.fix for one in findings if "MKL_CBWR" in one.fix] == []


def test_a_policy_that_does_not_repeat_itself_is_a_problem_in_the_words_of_an_evaluation():
    calls = []

    def counts(observations):
        calls.append(0)
        return zeros(observations) + len(calls) % 2

    with refused(ConfigError, "policy.allow_nondeterministic") as caught:
        evaluate(settings_of(Good, policy={"policy": counts}, evaluation={"num_episodes": 1}))
    calls.clear()
    assert worst(examine_policy(counts)) == str(caught.value)


# The machine


def test_versions_other_than_the_tested_ones_are_one_quiet_line(monkeypatch):
    versions = {"Python": "3.11.7", "gymnasium": "0.29.1", "numpy": "2.1.0", "ray": "2.60.0", "torch": "2.13.0+cpu"}
    monkeypatch.setattr(checks, "_version", versions.get)
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
    assert (level, str(port) in text) == ("problem", True)
    assert find(None)[0] == find("auto")[0] == "note"


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


def test_doctor_is_2_with_a_problem_and_goes_on(folder):
    outcome = call("toy.yaml", "--set", "environment.env=rl_eval.testing:impure")
    assert outcome.exit_code == 2
    assert "environment.env_reuse" in outcome.stdout
    assert "policy.deterministic" in outcome.stdout


@pytest.mark.process
def test_an_environment_alone_is_checked_with_random_actions(folder):
    outcome = call("--env", "CartPole-v1", "--set", "environment.env_kwargs.sutton_barto_reward=true")
    assert outcome.exit_code == 0, outcome.output
    assert "environment" in outcome.stdout.splitlines()


@pytest.mark.parametrize("given", [("--policy", "random"), ("--set", "environment.env=CartPole-v1"), ("-n", "6")])
def test_half_of_what_says_what_to_check_is_not_enough(folder, given):
    outcome = call(*given)
    assert outcome.exit_code == 2
    assert "--env" in outcome.stderr


def test_doctor_prints_json(folder):
    """All findings, or with ``--quiet`` the problems."""
    words = ("toy.yaml", "--set", "environment.env=CartPole-v77", "--json")
    found = printed("doctor", call(*words).stdout)
    assert (found["problems"], found["findings"][0]["section"]) == (1, "machine")
    assert {finding["level"] for finding in found["findings"]} >= {"ok", "note", "problem"}
    assert not any(one["section"] == "policy" and one["level"] == "ok" for one in found["findings"])
    (problem,) = printed("doctor", call(*words, "-q").stdout)["findings"]
    assert (problem["section"], problem["level"]) == ("environment", "problem")
    assert "CartPole-v77" in problem["text"]


def test_doctor_stops_where_nothing_further_can_be_checked(folder):
    outcome = call("toy.yaml", "--set", "policy.weigths=x")
    assert outcome.exit_code == 2
    assert "'policy.weights'" in outcome.stdout


@pytest.mark.process
def test_quiet_prints_problems_only(folder):
    """And nothing where there is none, though there are notes."""
    outcome = call("toy.yaml", "--quiet", "--set", "environment.env=rl_eval.testing:impure")
    assert outcome.exit_code == 2
    lines = outcome.stdout.split("\n")
    assert lines[0] == "environment"
    assert lines[1].startswith("  problem  ")
    assert not any(line.startswith(("  ok", "  note", "  warning", "policy")) for line in lines)
    reusing = ["--set", "environment.env=rl_eval.testing:impure", "--set", "environment.env_reuse=episode"]
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
    found = list(check_environment(config.runners(num_runners=0).build(), elsewhere=False))
    assert not [finding for finding in found if finding.level in ("problem", "warning")], found
