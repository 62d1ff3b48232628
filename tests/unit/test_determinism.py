"""The determinism check: what runs twice, where, what the comparison says, and whose fault a difference is."""

import json
import math
import time
from dataclasses import replace
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from rl_eval import EvalConfig, EvalResult, EvalRunnerGroup, compare, evaluate, load
from rl_eval.errors import ComparisonError, PolicyUnavailable
from rl_eval.execution.determinism_check import Choice, DeterminismSample, Origin, Reruns, candidates
from rl_eval.policies.inference.spaces import ObservationBatch
from rl_eval.records.determinism import (
    DETERMINISM,
    TRACE,
    Determinism,
    FirstDifference,
    TracedRuns,
    TraceRecorder,
    first_difference,
)
from rl_eval.records.episode import PROGRESS, ROW, EpisodeTable, Fault, Outcome, RunReport
from rl_eval.runners import layout_of
from rl_eval.scheduling.plan import EpisodePlan
from tests.refused import refused

MLP = "rl_eval.policies.mlp:make_mlp"


def table(episodes: int = 100, runners: int = 2, failed: tuple[int, ...] = (), seconds: float = 0.01) -> EpisodeTable:
    rows = np.zeros(episodes, ROW)
    rows["index"], rows["seed"] = np.arange(episodes), EpisodePlan(episodes).seeds
    rows["outcome"], rows["runner"], rows["attempts"] = (
        Outcome.COMPLETED,
        np.arange(episodes) % runners,
        1 + np.arange(episodes) % 3,
    )
    rows["outcome"][list(failed)] = Outcome.FAILED
    rows["step_seconds"] = seconds
    filled = EpisodeTable(episodes)
    filled.fill(rows)
    return filled


def origins(records: EpisodeTable, *indices: int, position: int | None = None) -> dict[int, Origin]:
    return {i: origin(records, i, position, None) for i in indices}


def origin(records: EpisodeTable, index: int, position: int | None, trace) -> Origin:
    row = records.rows[index : index + 1]
    position = int(row["runner"][0]) if position is None else position
    return Origin(row, records.outcomes(slice(index, index + 1)), position, trace)


def check_of(records: EpisodeTable, *indices: int, runners: int = 2) -> Reruns:
    return reruns_of(records, Choice(origins(records, *indices)), runners)


def reruns_of(records: EpisodeTable, choice: Choice, runners: int) -> Reruns:
    return Reruns(EpisodePlan(len(records)), choice, runners)


def report(rows, faults=(), traces=None) -> RunReport:
    empty = np.zeros((len(rows), 0)), tuple(faults), np.zeros(0, PROGRESS)
    return RunReport(rows, *empty, (), 0, 0.0, 0.0, 0.0, 0, extra={DETERMINISM: TracedRuns(traces or {})})


def play(check: Reruns, records: EpisodeTable, pool: dict[int, int], lanes: int = 3) -> dict[int, int]:
    """Let runners (number: position) do everything; return who ran what."""
    ran: dict[int, int] = {}
    for _ in range(1000):
        if check.done:
            break
        for runner, position in pool.items():
            leases = check.take(runner, position, lanes, list(pool.values()))
            assert len(leases) <= lanes
            for lease in leases:
                assert lease.how.fresh
                assert lease.seed == records.rows["seed"][lease.index]
                assert lease.attempt == records.rows["attempts"][lease.index]
                ran[lease.index] = position
            check.reported(runner, position, report(records.rows[[lease.index for lease in leases]]))
    assert check.done
    return ran


# ------------------------------------------------------------------------------ which episodes


@given(st.integers(1, 2000), st.integers(0, 2**32))
def test_auto_chooses_from_the_second_half(episodes: int, seed: int) -> None:
    """Most environments have served others by then; a short plan is taken as it is."""
    chosen = candidates(episodes, "auto", seed)
    first = min(episodes // 2, max(0, episodes - 5))
    assert len(set(chosen)) == len(chosen) == min(6, episodes - first)
    assert all(first <= index < episodes for index in chosen)
    assert chosen == candidates(episodes, "auto", seed)


@pytest.mark.parametrize(("share", "count"), [(0.02, 2), (0.021, 3), (0.0001, 1), (1.0, 100), (0.0, 0)])
def test_a_share_is_of_the_plan_and_at_least_one(share: float, count: int) -> None:
    """It is asked for, so it has no limit of time."""
    chosen = candidates(100, share, 3)
    assert len(set(chosen)) == len(chosen) == count


def choice_of(records: EpisodeTable, build: float = 0.0, run: float = 10.0, runners: int = 1, **sections) -> Choice:
    made = EvalConfig().environment("CartPole-v1", **sections).policy(MLP).runners(num_envs_per_runner=32)
    table = EpisodeTable(len(records.rows))
    store = SimpleNamespace(table=table, counted=table, ended_by=None, numerics={})
    settings = made.build()
    outcome = SimpleNamespace(settings=settings, layout=layout_of(settings), store=store, suspect="")
    sample = DeterminismSample(outcome)
    sample.begin(None)
    sample.counted(replace(report(records.rows[:0]), extra={DETERMINISM: TracedRuns(construct_seconds=build)}), set())
    store.table = store.counted = records
    return sample.choose(run, runners)


@given(
    st.lists(st.floats(1e-4, 100.0), min_size=5, max_size=40),
    st.floats(0, 10_000.0),
    st.floats(0, 5.0),
    st.integers(1, 8),
)
def test_auto_takes_no_longer_than_two_seconds_or_two_percent(seconds, run, build, runners) -> None:
    """Four episodes if they fit, fewer if not, none if not even the shortest does."""
    records = table(len(seconds))
    records.rows["step_seconds"] = seconds
    choice = choice_of(records, build, run, runners, env_reuse="episode")
    costs = {index: records.rows["step_seconds"].astype(float)[index] + build for index in choice.origins}
    budget = max(2.0, 0.02 * run)
    assert len(costs) <= 4
    assert sum(costs.values()) <= budget * runners * (1 + 1e-9)
    assert all(cost <= budget for cost in costs.values())
    assert bool(choice.remark) != bool(costs)
    if max(seconds) + build <= budget / 4:
        assert len(costs) == 4


def test_a_network_that_is_slow_for_one_is_not_run_again() -> None:
    """32 episodes share a forward pass of 5 ms: 0.16 s of 1000 passes is a share, and 5 s the price of another run."""
    records = table(episodes=64, seconds=0.3)
    records.rows["inference_seconds"] = 5.0 / 32
    assert choice_of(records).origins == {}
    assert len(choice_of(records, run=1500.0).origins) == 4


@pytest.mark.parametrize("differs", [False, True])
def test_where_building_takes_too_long_used_environments_serve(differs: bool) -> None:
    """They have another history than the first time, so a leak shows."""
    records = table(runners=1)
    choice = choice_of(records, build=3.0)
    reruns = reruns_of(records, choice, 1)
    leases = reruns.take(1, 0, 8, [0])
    assert len(leases) == 4
    assert not any(lease.how.fresh for lease in leases)
    rows = records.rows[[lease.index for lease in leases]]
    rows["episode_return"] += differs
    reruns.reported(1, 0, report(rows))
    assert reruns.done
    assert reruns.result.passed is not differs
    assert "3.0 s" in reruns.result.remark


def test_what_takes_too_long_without_building_is_not_checked() -> None:
    """The same where every episode has an environment of its own anyway."""
    for choice in (choice_of(table(seconds=3.0), 3.0), choice_of(table(), 3.0, env_reuse="episode")):
        assert choice.origins == {}
        assert "evaluation.determinism_check=" in choice.remark


def test_what_a_former_session_ran_counts_as_another_process(tmp_path) -> None:
    """A continued run that lacks only its check compares with the process before."""
    evaluate(cartpole(determinism_check=0), output=tmp_path)
    found = evaluate(cartpole(determinism_check=0.1), output=tmp_path).determinism
    assert (found.checked, found.elsewhere, found.passed) == (3, 3, True)


# ------------------------------------------------------------------------------ where, and how often


def test_every_episode_runs_once_more_on_another_runner() -> None:
    """A process that checks itself does not see what all its environments share."""
    records = table()
    check = check_of(records, 10, 11, 12, 13)
    ran = play(check, records, {7: 0, 9: 1})
    assert sorted(ran) == [10, 11, 12, 13]
    assert all(position != records.rows["runner"][index] for index, position in ran.items())
    assert check.result == Determinism(checked=4, elsewhere=4)
    assert str(check.result) == "4 of 4 re-run episodes identical (4 in another process)"


@pytest.mark.parametrize(("position", "elsewhere"), [(0, 0), (-1, 2)])
def test_a_single_runner_checks_itself_or_a_former_session(position: int, elsewhere: int) -> None:
    """In a fresh environment at least; a continued run compares with the process before."""
    records = table(runners=1)
    check = reruns_of(records, Choice(origins(records, 3, 4, position=position)), 1)
    play(check, records, {4: 0})
    assert (check.result.passed, check.result.elsewhere) == (True, elsewhere)
    assert bool(check.result.remark) is not bool(elsewhere)


def test_what_a_lost_runner_held_is_tried_again_and_then_a_finding() -> None:
    """A check ends after any loss; an episode that cannot be repeated is a finding."""
    records = table()
    check = check_of(records, 1, 2)
    for number in range(100):
        if check.done:
            break
        check.take(number, 0, 8, [0])
        check.lost(number)
    assert check.done
    assert check.result.passed is False
    assert check.result.failed == (1, 2)


@pytest.mark.parametrize("dies", [False, True])
def test_an_environment_that_cannot_be_built_again_ends_the_check_without_a_verdict(dies: bool) -> None:
    """Its episodes are no finding; those that ran again count."""
    records = table()
    check = check_of(records, 1, 2, 3, 4)
    first, *_ = check.take(1, 1, 1, [1])
    check.reported(1, 1, report(records.rows[[first.index]]))
    second, *_ = check.take(1, 1, 1, [1])
    if dies:
        check.lost(1, "construct")
    else:
        fault = Fault(second.index, 0, 1, "env", "construct", 0, "RuntimeError", "port in use", "", 0, "", 0.0)
        check.reported(1, 1, report(records.rows[:0], [fault]))
    assert check.done
    found = check.result
    assert (found.passed, found.checked, found.failed, bool(found.remark)) == (True, 1, (), True)


def test_a_re_run_that_fails_is_tried_again_and_then_a_finding() -> None:
    """With the error that it failed with."""
    records = table()
    check = check_of(records, 6, 7)
    fault = Fault(6, 1006, 1, "env", "reset", 0, "RuntimeError", "port in use", "", 0, "", 0.0)
    for number in range(10):
        leases = check.take(number, 0, 1, [0])
        if leases and leases[0].index == 6:
            check.reported(number, 0, report(records.rows[:0], [fault]))
        elif leases:
            check.reported(number, 0, report(records.rows[[7]]))
    assert check.done
    assert check.result.checked == 1
    assert check.result.failed == (6,)
    assert check.result.failure == "RuntimeError: port in use"


def test_a_check_that_is_cut_short_is_no_verdict() -> None:
    """Only episodes that ran again count."""
    records = table()
    check = check_of(records, 10, 12, 14)
    taken = check.take(5, 1, 2, [1])
    check.reported(5, 1, report(records.rows[[taken[0].index]]))
    check.stop("cancelled")
    assert check.done
    assert check.result.passed
    assert (check.result.checked, check.result.failed) == (1, ())
    assert "cancelled" in str(check.result)
    untouched = check_of(records, 10)
    untouched.stop("cancelled")
    assert untouched.result.passed is None


# ------------------------------------------------------------------------------ whose fault it is


def steps(*rows) -> np.ndarray:
    return np.array(list(rows), TRACE)


RESET = (0, 0.0, False, False, 7)


@pytest.mark.parametrize(
    ("other", "first_found"),
    [
        ((0, 0.0, False, False, 8), FirstDifference(3, 0, "observation", "environment")),
        ((5, 1.0, False, False, 9), FirstDifference(3, 1, "reward", "environment")),
        ((6, 2.0, False, False, 9), FirstDifference(3, 1, "action", "policy")),
        ((5, 2.0, True, False, 9), FirstDifference(3, 1, "terminated", "environment")),
    ],
)
def test_the_first_difference_tells_the_cause(other, first_found) -> None:
    """Equal observations and another action are the policy's; anything else is the environment's."""
    records = table()
    first = steps(RESET, (5, 2.0, False, False, 9))
    again = steps(other) if other[0] == 0 else steps(RESET, other)
    check = reruns_of(records, Choice({3: origin(records, 3, 1, first)}), 2)
    assert check.take(1, 0, 1, [0])[0].how.traced
    check.reported(1, 0, report(records.rows[[3]], traces={3: again}))
    found = check.result
    assert found.mismatched == (3,), "equal sums do not hide another course"
    assert found.first == first_found
    assert str(found).endswith(f"{first_found} (cause: {first_found.cause})")


@given(st.data())
def test_traces_part_where_they_first_differ(data) -> None:
    """The step and the column, in the order in which columns come about."""
    length = data.draw(st.integers(1, 30))
    one = np.zeros(length, TRACE)
    for name in TRACE.names:
        one[name] = data.draw(st.lists(st.integers(0, 1), min_size=length, max_size=length))
    one["reward"][0] = math.nan  # Columns are compared bit by bit.
    other = one.copy()
    assert first_difference(3, one, other) is None
    assert first_difference(3, one, other[: length - 1]) == (3, length - 1, "length", "environment")
    step, name = data.draw(st.integers(0, length - 1)), data.draw(st.sampled_from(TRACE.names))
    other[name][step] = not other[name][step]
    other["observation"][step + 1 :] += 5
    assert first_difference(3, one, other)[:3] == (3, step, name)


class _Odd(gym.Env):
    observation_space, action_space = gym.spaces.Box(-1, 1, (2,)), gym.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        return {"a": np.zeros(2), "b": (1, "text")}, {}

    def step(self, action):
        return [object()], "0.3", None, False


def test_a_trace_does_not_judge_what_an_environment_returns() -> None:
    """That is the runner's business, and its words are the ones to be read."""
    env = _Odd()
    recorder = TraceRecorder(env.reset, env.step, ObservationBatch(env.observation_space, 1).content)
    assert recorder.reset(seed=1)[0]["b"] == (1, "text")
    assert len(recorder.step(0)) == 4
    assert len(recorder.trace) == 1


# ------------------------------------------------------------------------------ the value


def test_the_limit_of_the_rate() -> None:
    """For none of k it is the rule of three's exact form; with mismatches Clopper and Pearson's."""
    assert Determinism(100).rate_below() == pytest.approx(1 - 0.05 ** (1 / 100), rel=1e-9)
    assert Determinism(20, mismatched=(3,)).rate_below() == pytest.approx(0.2161, abs=1e-4)
    assert Determinism().rate_below() == 1.0
    assert Determinism(2, mismatched=(0, 1)).rate_below() == 1.0


@pytest.mark.parametrize(
    "value",
    [
        Determinism(),
        Determinism(remark="switched off"),
        Determinism(4, 2, remark="x"),
        Determinism(4, 2, (3, 7), (9,), "gone", FirstDifference(3, 17, "action", "policy"), "process", "x", 9),
    ],
)
def test_a_finding_survives_json(value: Determinism) -> None:
    """It is stored in results and logs."""
    assert TypeAdapter(Determinism).validate_python(json.loads(json.dumps(value.to_dict()))) == value


# ------------------------------------------------------------------------------ whole evaluations


def cartpole(**evaluation) -> EvalConfig:
    evaluation = {"num_episodes": 24} | evaluation
    return EvalConfig().environment("CartPole-v1").policy(MLP).runners(num_envs_per_runner=4).evaluation(**evaluation)


def test_the_check_is_on_by_default_and_shows_everywhere(tmp_path) -> None:
    """In the table, the metrics, the JSON and the log."""
    result = evaluate(cartpole(), output=tmp_path / "log")
    line = "4 of 4 re-run episodes identical (in the same process)"
    assert str(result.determinism) == line
    assert line in " ".join(result.details.split())
    assert line.partition(" (")[0] in str(result)
    assert result.metrics["num_determinism_checked"] == 4
    assert result.to_dict()["determinism"]["summary"] == line
    (note,) = result.notes
    assert note.startswith(f"{MLP} draws the weights at random")
    result.save(tmp_path / "saved")
    for again in (EvalResult.load(tmp_path / "saved"), load(tmp_path / "log")):
        assert again.determinism == result.determinism
    off = evaluate(cartpole(determinism_check=0))
    assert off.determinism.passed is None
    assert str(off.determinism) == "not checked: switched off by evaluation.determinism_check=0"
    assert off.fingerprint == result.fingerprint
    assert off.timing.env_steps == result.timing.env_steps, "steps of the check are not steps of the evaluation"


def test_an_environment_that_leaks_is_found_and_the_cure_named() -> None:
    """State that leaks across resets shows when the episode starts in a fresh environment."""
    result = evaluate(cartpole().environment("rl_eval.testing:impure"))
    assert result.status == "complete"
    assert result.determinism.passed is False
    assert result.determinism.remedy == "episode"
    assert result.determinism.first.cause == "environment"
    assert result.determinism.first.cause in str(result.determinism)
    assert result.metrics["num_determinism_mismatched"] >= 1
    cured = evaluate(cartpole().environment("rl_eval.testing:impure", env_reuse="episode"))
    assert cured.determinism.passed
    cured.provenance["identity"] = result.provenance["identity"]
    with refused(ComparisonError, "determinism", value="b"):
        compare(cured, result)
    assert compare(cured, result, force=True).notes


class Walk(gym.Env):
    """Random walk; its subclasses are not functions of the seed."""

    observation_space, action_space = gym.spaces.Box(-np.inf, np.inf, (1,), np.float64), gym.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.place, self.left = self.np_random.normal(), int(self.np_random.integers(5, 30))
        return np.array([self.place]), {}

    def step(self, action):
        self.place, self.left = self.place + (0.2 if action else -0.2), self.left - 1
        return np.array([self.place]), self.place, self.left == 0, False, {}


class Reseeded(Walk):
    """Seeds a generator that all environments of the process share, and draws from it."""

    def reset(self, *, seed=None, options=None):
        np.random.seed(seed)  # noqa: NPY002
        return super().reset(seed=seed)

    def step(self, action):
        self.place += np.random.randn()  # noqa: NPY002
        return super().step(action)


class SeededOnce(Walk):
    """Seeds the shared generator when it is built. Neither new environments nor an own process help alone."""

    def __init__(self):
        np.random.seed(0)  # noqa: NPY002

    def step(self, action):
        self.place += np.random.randn()  # noqa: NPY002
        return super().step(action)


class Counts(Walk):
    """Rewards grow with the number of episodes of the environment."""

    episodes = 0

    def reset(self, **kwargs):
        self.episodes += 1
        return super().reset(**kwargs)

    def step(self, action):
        place, reward, *flags = super().step(action)
        return place, reward + self.episodes, *flags


class CountsTogether(Counts):
    """The number of episodes of all environments of the process."""

    @property
    def episodes(self):
        return total[0]

    @episodes.setter
    def episodes(self, value):
        total[0] = value


class Stored(Walk):
    """Takes its starts from a table, one after the other."""

    episodes = 0

    def reset(self, **kwargs):
        super().reset(**kwargs)
        self.place, self.left, self.episodes = float(STARTS[self.episodes]), 10, self.episodes + 1
        return np.array([self.place]), {}


class Averaged(Walk):
    """Subtracts the mean of all observations so far."""

    total, count = 0.0, 0

    def step(self, action):
        place, *rest = super().step(action)
        self.total, self.count = self.total + place[0], self.count + 1
        return place - self.total / self.count, *rest


total, STARTS = [0], np.random.default_rng(0).normal(size=100)


def walk(env, lanes: int, episodes: int = 60, **environment) -> EvalResult:
    made = EvalConfig().environment(env, **environment).policy(lambda seen: (seen[:, 0] < 0).astype(int))
    return evaluate(made.evaluation(num_episodes=episodes).runners(num_envs_per_runner=lanes))


@pytest.mark.parametrize(("lanes", "episodes"), [(8, 60), (16, 10)])
@pytest.mark.parametrize(
    ("env", "remedy"),
    [
        (Reseeded, "process"),
        (SeededOnce, ""),
        (Counts, "episode"),
        (CountsTogether, ""),
        (Stored, "conditions"),
        (Averaged, "episode"),
    ],
)
def test_a_setting_is_recommended_only_if_it_helps(env, remedy: str, lanes: int, episodes: int) -> None:
    """Even where each environment has run only one episode; and results in this setting do not depend on the layout."""
    found = walk(env, lanes, episodes).determinism
    assert (found.passed, found.remedy) == (False, remedy)
    reuse = "episode" if remedy == "episode" else "lane"
    followed = [walk(env, width, episodes, env_reuse=reuse) for width in ((1,) if remedy == "process" else (3, 8))]
    if remedy in ("episode", "process"):
        assert all(result.determinism.passed for result in followed)
        assert len({result.fingerprint for result in followed}) == 1


@pytest.mark.parametrize("env", [Counts, Reseeded, Stored])
def test_a_setting_that_was_not_tried_is_not_recommended(env) -> None:
    """One environment has no neighbours; and nothing needs a repair where it has none."""
    found = walk(env, 1).determinism
    assert found.passed is (env is Reseeded)
    assert found.remedy == ("conditions" if env is Stored else "")
    if env is not Stored:
        renewed = walk(env, 8, env_reuse="episode").determinism
        assert (renewed.passed, renewed.remedy) == ((True, "") if env is Counts else (False, "process"))


class DrawsToo(Counts):
    """Also draws from a global generator."""

    def reset(self, **kwargs):
        np.random.random()  # noqa: NPY002
        return super().reset(**kwargs)


@pytest.mark.parametrize("threaded", [False, True])
def test_no_new_environments_are_recommended_if_a_generator_changes(threaded: bool) -> None:
    """Also in a group with its own thread, whose runner has no sensor."""
    made = EvalConfig().environment(DrawsToo).policy(lambda seen: (seen[:, 0] < 0).astype(int))
    config = made.evaluation(num_episodes=60).runners(num_envs_per_runner=8)
    with EvalRunnerGroup(config, threaded=threaded) as group:
        found = group.evaluate().determinism
    assert (found.passed, found.remedy) == (False, "")


def test_a_finding_of_an_older_version_can_be_read() -> None:
    """Fields that no longer exist are dropped."""
    older = {"checked": 4, "mismatched": [3], "env_reuse_helps": True, "likely_cause": "draws", "passed": False}
    assert TypeAdapter(Determinism).validate_python(older) == Determinism(4, mismatched=(3,))


def counting():
    calls = [0]

    def act(observations):
        calls[0] += 1
        return np.full(len(observations), calls[0] // 3 % 2)

    return act


def drawing():
    generator = np.random.default_rng(0)
    return lambda observations: generator.integers(0, 2, len(observations))


@pytest.mark.parametrize("make", [counting, drawing])
def test_a_policy_that_keeps_something_to_itself_is_found(make) -> None:
    """A call counter, a generator: the same observation leads to another action. No setting is recommended."""
    result = evaluate(cartpole().policy(make(), allow_nondeterministic=True))
    assert result.determinism.passed is False
    assert result.determinism.first.cause == "policy"
    assert result.determinism.first.cause in str(result.determinism)
    assert result.determinism.remedy == ""
    assert "initial_state" in "\n".join(result.notes)


class Begun(gym.Wrapper):
    episodes = 0

    def __init__(self) -> None:
        super().__init__(gym.make("CartPole-v1"))

    def reset(self, **options):
        type(self).episodes += 1
        return super().reset(**options)


def test_a_policy_that_is_unavailable_during_the_check_is_no_finding() -> None:
    """Its server may have died meanwhile; the result does not wait for another one."""

    def act(observations):
        if Begun.episodes > 20:
            raise PolicyUnavailable("the server does not answer")
        return np.zeros(len(observations), np.int64)

    Begun.episodes = 0
    result = evaluate(cartpole().environment(Begun).policy(act), num_episodes=20)
    assert (result.status, result.determinism.passed) == ("complete", None)
    assert result.determinism.mismatched == result.determinism.failed == ()


def test_an_episode_that_failed_at_first_is_repeated_at_the_attempt_that_counts() -> None:
    """A fault of the first attempt is not part of the episode's record."""
    assert evaluate(
        cartpole().environment("rl_eval.testing:faulty", env_kwargs={"env": "CartPole-v1", "attempt_rates": [1.0]})
    ).determinism.passed


class Counted(gym.Wrapper):
    open = 0

    def __init__(self) -> None:
        super().__init__(gym.make("CartPole-v1"))
        type(self).open += 1

    def close(self) -> None:
        type(self).open -= 1
        super().close()


def test_every_environment_is_closed_once() -> None:
    """Those of the check as well as those that it set aside."""
    Counted.open = 0
    with EvalRunnerGroup(cartpole().environment(Counted)) as group:
        for _ in range(3):
            assert group.evaluate().determinism.passed
        assert 4 <= Counted.open <= 8
    assert Counted.open == 0


class Clocked(gym.Wrapper):
    """Observations with something beside what the space has, and noise below its precision."""

    def __init__(self) -> None:
        super().__init__(gym.make("CartPole-v1"))
        self.observation_space = gym.spaces.Dict({"state": self.env.observation_space})

    def _with_clock(self, state):
        noisy = state.astype(np.float64) * (1 + 1e-12 * np.random.default_rng().random())
        return {"state": noisy, "clock": time.time(), "handle": object()}

    def reset(self, **kwargs):
        state, info = super().reset(**kwargs)
        return self._with_clock(state), info

    def step(self, action):
        state, *rest = super().step(action)
        return (self._with_clock(state), *rest)


def test_only_what_the_policy_gets_is_compared() -> None:
    """A clock beside the space's parts, or noise that its dtype swallows, changes nothing."""
    config = cartpole().environment(Clocked).policy(lambda o: (o["state"][:, 2] > 0).astype(int))
    assert evaluate(config).determinism.passed
