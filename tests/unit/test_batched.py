"""The batched runner: records equal those of single environments, for any width, mode of autoreset and fault."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any, ClassVar

import gymnasium as gym
import numpy as np
import pytest

from rl_eval import EvalConfig, EvalResult, EvalRunnerGroup, evaluate
from rl_eval.cli.simulator_checks import check_simulator
from rl_eval.errors import ConfigError, EnvError
from rl_eval.policies.inference.spaces import ObservationBatch
from rl_eval.recording.replay import compared, lease_of, rebuilt_runner
from rl_eval.runners.again import run_again
from rl_eval.runners.batched.simulator import BatchSimulator, BatchStep, checked
from rl_eval.runners.batched.vector_env import VectorEnvSimulator, _is_ale
from rl_eval.scheduling.plan import EpisodePlan
from tests import struck_simulator
from tests.refused import refused, result_of, untold
from tests.unit.vector_world import (
    IgnoresMask,
    LosesFinalObservations,
    OneSeed,
    OwnClass,
    StartsOther,
    Unseeded,
    Walk,
    as_class,
    follow,
    walks,
)

EPISODES = 64
WIDTHS = (1, 4, 7, 32, 100)


def batched(env: Callable[..., Any], width: int = 7, **evaluation: Any) -> EvalConfig:
    made = EvalConfig().environment(env).policy(follow).runners(runner="batched", num_envs_per_runner=width)
    return made.evaluation(num_episodes=EPISODES, **({"info_keys": ["height"], "gamma": 0.9} | evaluation))


def single(env: Callable[..., Any], **evaluation: Any) -> EvalResult:
    return evaluate(batched(env, **evaluation).runners(runner="vector"))


def seed_of(index: int) -> int:
    return EpisodePlan(EPISODES, 0)[index].seed


@pytest.fixture(scope="module")
def reference() -> EvalResult:
    return single(Walk)


def same(result: EvalResult, reference: EvalResult) -> None:
    """Every column of every record, not only those of the fingerprint."""
    assert result.status == "complete"
    assert result.fingerprint == reference.fingerprint
    for ours, theirs in zip(result.episodes, reference.episodes, strict=True):
        assert ours.discounted_return == theirs.discounted_return
        assert (ours.info, ours.truncated_by) == (theirs.info, theirs.truncated_by)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("mode", ["NextStep", "SameStep", "Disabled"])
def test_records_are_those_of_single_environments(reference: EvalResult, mode: str, width: int) -> None:
    result = evaluate(batched(partial(walks, mode=mode), width))
    same(result, reference)
    assert result.guarantee == "exact"
    assert result.determinism.passed


def test_numbers_of_hopper_are_those_of_single_environments() -> None:
    """A solver in floats, truncated episodes, and infos."""
    pytest.importorskip("mujoco")

    def make(num_envs: int) -> Any:
        return gym.vector.SyncVectorEnv([lambda: gym.make("Hopper-v5")] * num_envs)

    made = EvalConfig().policy(lambda observations: (-3 * observations[:, 8:11]).clip(-1, 1))
    made.evaluation(num_episodes=40, max_episode_steps=75, info_keys=["x_position"], determinism_check=0)
    reference = evaluate(made.copy().environment("Hopper-v5"))
    assert {record.truncated for record in reference.episodes} == {True, False}
    for width in struck_simulator.WIDTHS:
        one = made.copy().environment(make).runners(runner="batched", num_envs_per_runner=width)
        same(evaluate(one), reference)


@pytest.mark.parametrize("fault", ["", "raises"])
@pytest.mark.parametrize("width", struck_simulator.WIDTHS)
def test_numbers_of_cartpole_are_those_of_single_environments(
    width: int, fault: struck_simulator.Fault, tmp_path: Path
) -> None:
    """Also if half of the first attempts raise; ``tests/cluster/test_batched_ray.py`` adds Atari and processes."""
    result = evaluate(struck_simulator.config("CartPole", width, fault, tmp_path))
    alone = EvalConfig().environment("CartPole-v1").policy(struck_simulator.act)
    same(result, evaluate(alone.evaluation(num_episodes=len(result.plan), determinism_check=0)))
    assert result.guarantee == "exact"
    assert bool(result.faults) == bool(fault)
    assert all(fault.index % 2 == 0 for fault in result.faults if fault.charged), "only the struck half"


def test_a_class_that_is_not_known_is_tried_first(reference: EvalResult) -> None:
    same(evaluate(batched(as_class(OwnClass))), reference)


@pytest.mark.parametrize("deterministic", [True, False])
def test_networks_and_sampling_are_the_same(deterministic: bool) -> None:
    """The noise of an episode follows from its seed, and rows share a forward pass as they do elsewhere."""
    torch = pytest.importorskip("torch")
    module = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))
    configs = [batched(walks, width) for width in (1, 5, 40)] + [batched(Walk).runners(runner="vector")]
    found = {evaluate(one.policy(None, deterministic=deterministic), module).fingerprint for one in configs}
    assert len(found) == 1
    together = evaluate(configs[1].policy(None, inference="batched"), module).provenance["numerics"]
    assert together.items() >= {"guarantee": "conditions", "adapter": "SyncVectorEnv", "num_envs": 5}.items()


@pytest.mark.parametrize("width", [4, 64])
def test_a_poisoned_episode_fails_alone(reference: EvalResult, width: int) -> None:
    poison = seed_of(17)

    def raise_in(walk: Walk) -> None:
        if walk.seed == poison:
            raise RuntimeError("the simulator diverged")

    result = evaluate(batched(partial(walks, on_step=raise_in), width))
    assert result.status == "partial"
    assert [record.index for record in result.episodes if record.outcome == "failed"] == [17]
    for ours, theirs in zip(result.episodes, reference.episodes, strict=True):
        assert ours.index == 17 or (ours.episode_return, ours.attempts) == (theirs.episode_return, 1)


def test_an_exception_that_does_not_come_again_costs_nothing(reference: EvalResult) -> None:
    left = [3]

    def raise_sometimes(walk: Walk) -> None:
        if left[0] and walk.steps == 4:
            left[0] -= 1
            raise RuntimeError("a glitch")

    result = evaluate(batched(partial(walks, on_step=raise_sometimes)))
    same(result, reference)
    assert result.faults
    assert left == [0]


@pytest.mark.parametrize("part", ["reward", "observation"])
def test_one_row_that_is_not_finite_is_the_fault_of_its_episode(part: str) -> None:
    class Bad(Walk):
        def step(self, action: Any) -> Any:
            observation, reward, *rest = super().step(action)
            if self.seed == seed_of(10):
                observation, reward = (observation, np.nan) if part == "reward" else (observation * np.nan, reward)
            return observation, reward, *rest

    def make(num_envs: int) -> Any:
        return gym.vector.SyncVectorEnv([Bad] * num_envs)

    result = evaluate(batched(make))
    assert [record.index for record in result.episodes if record.outcome == "failed"] == [10]
    assert {fault.index for fault in result.faults} == {10}


@pytest.mark.parametrize("part", ["reward", "observation"])
@pytest.mark.parametrize("width", [4, 32])
@pytest.mark.parametrize("heals", [True, False])
def test_a_broken_slot_fails_no_episode(reference: EvalResult, part: str, width: int, heals: bool) -> None:
    """Its episodes complete alone in a simulator of one slot. After two faults, the simulator is built again."""

    class Flawed(Walk):
        def step(self, action: Any) -> Any:
            observation, reward, *rest = super().step(action)
            observation, reward = (observation, np.nan) if part == "reward" else (observation * np.nan, reward)
            return observation, reward, *rest

    def make(num_envs: int) -> Any:
        built.append(num_envs)
        broken = not heals or len(built) == 1
        return gym.vector.SyncVectorEnv([Flawed if broken and slot == 2 else Walk for slot in range(num_envs)])

    built: list[int] = []
    result = evaluate(batched(make, width))
    same(result, reference)
    assert {record.attempts for record in result.episodes} == {1}
    assert {(fault.error_type, fault.charged) for fault in result.faults} == {("EnvError", False)}
    assert len(result.faults) == 2 or not heals
    assert 1 in built


def test_an_environment_with_a_memory_is_found_out() -> None:
    class Remembers(Walk):
        episodes = 0

        def reset(self, **kwargs: Any) -> Any:
            self.episodes += 1
            return super().reset(**kwargs)

        def step(self, action: Any) -> Any:
            observation, reward, *rest = super().step(action)
            return observation, reward + self.episodes, *rest

    def make(num_envs: int) -> Any:
        return gym.vector.SyncVectorEnv([Remembers] * num_envs)

    found = evaluate(batched(make)).determinism
    assert (found.passed, found.remedy) == (False, "")  # The setting that may help is an error here.


def test_a_group_is_reused_and_cancelled(reference: EvalResult) -> None:
    with EvalRunnerGroup(batched(walks)) as group:
        group.submit().cancel()
        same(group.evaluate(), reference)
        assert group.foreach_runner(lambda runner: runner.foreach_env(lambda env: env.num_envs)) == [[7]]


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (as_class(OneSeed), ConfigError),
        (as_class(IgnoresMask), ConfigError),
        (Walk, ConfigError),
        (lambda num_envs: Walk(), ConfigError),
    ],
    ids=["one seed", "mask ignored", "no num_envs", "single"],
)
def test_a_simulator_that_cannot_keep_the_promise_is_rejected(make: Any, kind: type[Exception]) -> None:
    with pytest.raises(kind):
        evaluate(batched(make))


@pytest.mark.parametrize("make", [lambda: walks(7), lambda slots: walks(slots, "NextStep")])
def test_a_function_needs_the_number_of_slots(make: Any) -> None:
    with refused(ConfigError, "environment.env", value="<lambda>"):
        evaluate(batched(make))


def test_final_observations_that_are_missing_are_no_observations_of_the_next_episode() -> None:
    result = evaluate(batched(as_class(LosesFinalObservations, "SameStep"), 1))
    assert result.status == "failed"
    assert {fault.error_type for fault in result.faults} == {EnvError.__name__}


@pytest.mark.parametrize(
    "config",
    [
        {"environment": {"wrappers": ["gymnasium.wrappers:RecordEpisodeStatistics"]}},
        {"environment": {"env_reuse": "episode"}},
    ],
    ids=lambda config: next(iter(next(iter(config.values())))),
)
def test_settings_of_single_environments_are_rejected(config: dict[str, dict[str, Any]]) -> None:
    ((section, values),) = config.items()
    with refused(ConfigError, f"{section}.{next(iter(values))}"):
        evaluate(getattr(batched(walks), section)(**values))


def test_a_vector_environment_needs_the_batched_runner() -> None:
    with refused(ConfigError, "environment.env", value="SyncVectorEnv"):
        evaluate(batched(lambda: walks(3)).runners(runner="vector"))


class Leaky(Walk):
    """Its rewards depend on the steps of all walks."""

    steps_of_all = 0

    def step(self, action: Any) -> Any:
        Leaky.steps_of_all += 1
        observation, reward, *rest = super().step(action)
        return observation, reward + self.steps_of_all, *rest


class Fixed(Walk):
    """Ignores its seed."""

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return super().reset(seed=0)


@pytest.mark.parametrize(
    ("walk", "levels"),
    [(Walk, ["ok"]), (Leaky, ["problem"]), (Fixed, ["ok", "note"])],
)
def test_doctor_compares_widths_and_slots(walk: type[Walk], levels: list[str]) -> None:
    def make(num_envs: int) -> Any:
        return gym.vector.SyncVectorEnv([walk] * num_envs)

    assert [finding.level for finding in check_simulator(batched(make).build())] == levels


def test_doctor_measures_at_the_configured_width_too() -> None:
    """A compiler may round differently with more slots."""

    class Wide(Walk):
        def step(self, action: Any) -> Any:
            observation, reward, *rest = super().step(action)
            return observation, reward + 1e-9, *rest

    def make(num_envs: int) -> Any:
        return gym.vector.SyncVectorEnv([Wide if num_envs > 8 else Walk] * num_envs)

    for width, level in ((8, "ok"), (16, "problem")):
        assert [finding.level for finding in check_simulator(batched(make, width).build())] == [level]


def test_doctor_names_a_simulator_that_cannot_restart_its_slots() -> None:
    *_, last = check_simulator(batched(as_class(IgnoresMask)).build())
    assert last.level == "problem"


def test_doctor_names_slot_and_seed_of_the_first_difference() -> None:
    class Second(Walk):
        """Pays more in slot 1."""

        def step(self, action: Any) -> Any:
            observation, reward, *rest = super().step(action)
            return observation, reward + 1, *rest

    def make(num_envs: int) -> Any:
        return gym.vector.SyncVectorEnv([Second if slot == 1 else Walk for slot in range(num_envs)])

    (found, *_) = check_simulator(batched(make).build())
    assert not untold(found.text, "reward", "step 1", "episode 1", f"seed {seed_of(1)}", "slot 1 of 4", "slot 0 of 1")


@pytest.mark.parametrize(
    ("cls", "slot"), [(Unseeded, 0), (IgnoresMask, 0), (StartsOther, 6)], ids=["starts", "neighbours", "alone"]
)
def test_a_rejected_simulator_is_told_slot_and_seed(cls: type[gym.vector.SyncVectorEnv], slot: int) -> None:
    with refused(ConfigError, "environment.env") as caught:
        evaluate(batched(as_class(cls)))
    assert not untold(str(caught.value), f"slot {slot}", f"seed {EpisodePlan(7, seed=1)[slot].seed}")


# ------------------------------------------------------------------------------ slots without an episode, and traps


class Diverges(Walk):
    """Raises in its second step if its start is far out, as every fourth is."""

    def step(self, action: Any) -> Any:
        if self.steps == 1 and abs(self.start) > 1.2:
            raise RuntimeError("the simulator diverged")
        return super().step(action)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        result = super().reset(seed=seed, options=options)
        self.start = self.place
        return result


@pytest.mark.parametrize("mode", ["NextStep", "SameStep", "Disabled"])
def test_slots_without_an_episode_cost_no_episode(mode: str) -> None:
    """They run episodes that nobody planned; if one of these raises, no planned episode is charged."""
    expected = [record.outcome for record in single(Diverges).episodes]
    assert "failed" in expected
    make = as_class(gym.vector.SyncVectorEnv, mode, Diverges)
    for env, width in ((make, 4), (make, 24), (lambda num_envs: make(12), 12), (make(12), 12)):
        result = evaluate(batched(env, width))
        assert [record.outcome for record in result.episodes] == expected


class Reporter(Walk):
    """Reports success, and a scalar, in every way that info has."""

    kind = "np.bool_"

    def step(self, action: Any) -> Any:
        *result, _ = super().step(action)
        flag, last = bool(self.place > 0), self.steps >= self.length
        kinds: dict[str, Any] = {
            "np.bool_": {"is_success": np.bool_(flag)},
            "None until the end": {"is_success": flag if last else None},
            "int": {"success": int(flag)},
            "half": {"success": 0.5},
            "only at the end": {"is_success": flag} if last else {},
            "two keys": {"is_success": flag} if self.length % 2 else {"success": flag},
            "None hides the other": {"is_success": None, "success": flag},
            "array": {"height": np.array([self.place])},
            "np.float32": {"height": np.float32(self.place)},
            "text": {"height": "high"} if self.length == 3 else {"height": self.place},
        }
        return (*result, kinds[self.kind])


@pytest.mark.parametrize(
    "kind", ["np.bool_", "None until the end", "int", "half", "only at the end", "two keys", "None hides the other"]
)
@pytest.mark.parametrize("mode", ["NextStep", "SameStep"])
def test_success_is_read_as_from_single_environments(kind: str, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Reporter, "kind", kind)
    same(
        evaluate(batched(as_class(gym.vector.SyncVectorEnv, mode, Reporter), info_keys=[])),
        single(Reporter, info_keys=[]),
    )


@pytest.mark.parametrize("kind", ["array", "np.float32", "text"])
def test_scalars_are_read_as_from_single_environments(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Reporter, "kind", kind)
    result, reference = evaluate(batched(as_class(gym.vector.SyncVectorEnv, "NextStep", Reporter))), single(Reporter)
    assert [record.outcome for record in result.episodes] == [record.outcome for record in reference.episodes]
    assert {str(record.info) for record in result.episodes} == {str(record.info) for record in reference.episodes}
    assert any("float32" in note for note in result.notes) is (kind == "np.float32")


class Unmasked(gym.vector.SyncVectorEnv):
    """Reports its infos without masks, as simulators do in which all slots report."""

    def step(self, actions: Any) -> Any:
        *result, infos = super().step(actions)
        zeros = {"is_success": np.zeros(self.num_envs, bool), "height": np.zeros(self.num_envs)}
        final = {key: infos[key] for key in ("final_obs", "final_info") if key in infos}
        return (*result, {key: infos.get(key, zero) for key, zero in zeros.items()} | final)


class LosesFinalInfos(gym.vector.SyncVectorEnv):
    """Resets slots in the step that ends them, and does not return their last infos, or as a list."""

    as_list = False

    def step(self, actions: Any) -> Any:
        *result, infos = super().step(actions)
        final = infos.pop("final_info", None)
        return (*result, infos | ({"final_info": [final]} if self.as_list and final else {}))


@pytest.mark.parametrize("width", [1, 4, 7])
def test_infos_of_the_last_step_are_not_those_of_the_reset(reference: EvalResult, width: int) -> None:
    same(evaluate(batched(as_class(Unmasked, "SameStep"), width)), reference)


@pytest.mark.parametrize("as_list", [False, True])
def test_infos_of_the_last_step_that_are_missing_are_an_error(as_list: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LosesFinalInfos, "as_list", as_list)
    result = evaluate(batched(as_class(LosesFinalInfos, "SameStep"), 4, info_keys=[]))
    assert result.status == "failed"
    assert "final_info" in result.reason


@pytest.mark.process
def test_a_worker_that_dies_costs_its_episode_only() -> None:
    class Dies(Walk):
        def step(self, action: Any) -> Any:
            if self.seed == seed_of(5) and self.steps == 1:
                os._exit(3)
            return super().step(action)

    def make(num_envs: int) -> Any:
        return gym.vector.AsyncVectorEnv([Dies] * num_envs)

    result = evaluate(batched(make, 4, determinism_check=0), num_episodes=12)
    assert [record.index for record in result.episodes if record.outcome == "failed"] == [5]


class Broken(BatchSimulator):
    """Two slots, and one mistake."""

    def __init__(self, num_envs: int, **step: Any) -> None:
        self.num_envs, self.given = num_envs, step
        self.observation_space, self.action_space = gym.spaces.Box(-1, 1, (3,)), gym.spaces.Discrete(3)

    def restart(self, slots: Any, specs: Any) -> Any:
        return np.zeros((len(slots), 3), np.float32)

    def step(self, actions: Any) -> Any:
        count = self.num_envs
        whole: dict[str, Any] = {"rewards": np.ones(count), "terminated": np.ones(count, bool)}
        whole |= {"observations": np.zeros((count, 3), np.float32), "truncated": np.zeros(count, bool)} | self.given
        return BatchStep(**whole) if "step" not in self.given else None

    def close(self) -> None:
        """Nothing is open."""


class Strict(Broken):
    """Raises once, in a step in which a slot but the first ends, and whenever a slot steps that has ended."""

    restarts_idle = True
    calls, glitch = 0, 35

    def restart(self, slots: Any, specs: Any) -> Any:
        self.left = np.zeros(self.num_envs, int) if not hasattr(self, "left") else self.left
        self.left[slots] = [1 + spec.seed % 5 for spec in specs]
        return super().restart(slots, specs)

    def step(self, actions: Any) -> Any:
        assert (self.left > 0).all()
        self.left -= 1
        Strict.calls += bool((self.left[1:] == 0).any())
        if Strict.calls == self.glitch:
            Strict.calls += 1
            raise RuntimeError("a glitch")
        self.given["terminated"] = self.left == 0
        return super().step(actions)


def test_after_an_exception_slots_that_ended_are_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the simulator is an object, and so not built again."""
    monkeypatch.setattr(Strict, "calls", 0)
    result = evaluate(batched(Strict(6), 6, info_keys=[], determinism_check=0))
    assert result.status == "complete"
    assert {fault.message for fault in result.faults} == {"a glitch"}


@pytest.mark.parametrize("runner", ["batched", "vector"])
def test_the_time_to_build_a_simulator_is_not_that_of_an_episode(runner: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An episode that runs again in a new one has its whole time limit."""
    passed, left = [0.0], [1]
    for module in ("batched.runner", "batched.attempts", "base", "lane"):
        monkeypatch.setattr(f"rl_eval.runners.{module}.perf_counter", lambda: perf_counter() + passed[0])

    def raise_once(walk: Walk) -> None:
        if left[0] and walk.steps == 3:
            left[0] = 0
            raise RuntimeError("a glitch")

    def made(env: Any) -> Any:
        passed[0] += 100_000
        return env

    def simulator(num_envs: int) -> Any:
        return made(walks(num_envs, on_step=raise_once))

    env = simulator if runner == "batched" else lambda: made(Walk(raise_once))
    result = evaluate(batched(env, 4, determinism_check=0.1).runners(runner=runner))
    assert (result.status, result.determinism.passed, left) == ("complete", True, [0])
    assert "timeout" not in {fault.cause for fault in result.faults}


def test_a_second_fault_in_a_slot_builds_the_simulator_again() -> None:
    """Also if an episode ran alone in between."""
    built: list[int] = []

    class Flawed(Walk):
        def step(self, action: Any) -> Any:
            observation, _, *rest = super().step(action)
            return observation, np.nan, *rest

    def make(num_envs: int) -> Any:
        built.append(num_envs)
        flawed = built.count(4) == 1
        return gym.vector.SyncVectorEnv([Flawed if flawed and slot == 2 else Walk for slot in range(num_envs)])

    with EvalRunnerGroup(batched(make, 4, determinism_check=0)) as group:
        faults = [len(group.evaluate(num_episodes=4).faults) for _ in range(3)]
    assert (faults, built) == ([1, 1, 0], [4, 1, 1, 4])


def test_a_constructor_that_raises_later_is_a_fault(reference: EvalResult) -> None:
    """The simulator is built again after a fault; if that raises once, nothing is lost, and the group can go on."""
    built, struck = [0], [False]

    def raise_once(walk: Walk) -> None:
        if not struck[0] and walk.steps == 3:
            struck[0] = True
            raise RuntimeError("a glitch")

    def make(num_envs: int) -> Any:
        built[0] += 1
        if built[0] == 2:
            raise RuntimeError("the license server is busy")
        return walks(num_envs, on_step=raise_once)

    with EvalRunnerGroup(batched(make)) as group:
        for _ in range(2):
            same(group.evaluate(), reference)


@pytest.mark.parametrize(
    ("mistake", "key"),
    [
        ({"step": None}, "step"),
        ({"rewards": np.ones(3)}, "rewards"),
        ({"rewards": np.ones((2, 1))}, "rewards"),
        ({"rewards": "many"}, "rewards"),
        ({"rewards": np.ma.array([1.0, 2.0], mask=[True, False])}, "rewards"),
        ({"rewards": np.ones(2, "m8[s]")}, "rewards"),
        ({"terminated": np.ma.ones(2, bool)}, "terminated"),
        ({"observations": np.ma.zeros((2, 3), np.float32)}, "observation"),
        ({"terminated": np.array([2, 0])}, "terminated"),
        ({"truncated": [0.5, 0.5]}, "truncated"),
        ({"observations": np.zeros((2, 4), np.float32)}, "observation"),
        ({"started": np.ones(2, bool)}, "started"),
        ({"started": (np.ones(3, bool), np.zeros((3, 3)))}, "started"),
        ({"values": lambda key: np.ones(2)}, "values"),
        ({"values": lambda key: (np.ones(3), np.ones(3, bool))}, "values"),
        ({"values": lambda key: (np.ones(2), [True, True])}, "values"),
        ({"values": lambda key: (np.ones(2), np.ones(2))}, "values"),
    ],
)
def test_a_step_of_a_wrong_shape_is_named(mistake: dict[str, Any], key: str) -> None:
    simulator = Broken(2, **mistake)
    with refused(EnvError, key):
        step = checked(simulator.step(None), 2)
        ObservationBatch(simulator.observation_space, 2).adopt(slice(0, 2), step.observations)
        step.reported(["success"])
    result = result_of(evaluate, batched(partial(Broken, **mistake), 2, info_keys=[]))
    assert result.status == "failed"
    assert {fault.error_type for fault in result.faults} == {"EnvError"}


class SaysNoMode(gym.vector.SyncVectorEnv):
    """A class that neither has an autoreset mode nor says one in metadata of its own."""

    metadata: ClassVar[dict[str, Any]] = {}

    def __init__(self, env_fns: Any, autoreset_mode: Any = None) -> None:
        super().__init__(env_fns)
        del self.autoreset_mode
        self.metadata = {}


@pytest.mark.parametrize(
    ("make", "key"),
    [
        (as_class(SaysNoMode), "environment.env"),
        (
            lambda num_envs: gym.wrappers.vector.TransformReward(walks(num_envs), lambda reward: reward),
            "environment.env",
        ),
        (lambda num_envs: walks(num_envs + 1), "environment.env"),
    ],
    ids=["no mode", "a vector wrapper", "another width"],
)
def test_what_cannot_be_known_is_rejected(make: Any, key: str) -> None:
    with refused(ConfigError, key):
        evaluate(batched(make))


@pytest.mark.parametrize(
    "make", [walks, lambda num_envs=3: walks(num_envs), Broken, lambda num_envs=3: Broken(num_envs)]
)
def test_a_simulator_of_many_slots_needs_the_batched_runner(make: Any) -> None:
    """The error is the same with and without a default number of slots."""
    with refused(ConfigError, "environment.env") as caught:
        evaluate(batched(make).runners(runner="vector"))
    assert "--batched" in caught.value.fix


@pytest.mark.parametrize(
    "make",
    [lambda opened, num_envs: opened(num_envs + 1), lambda opened, num_envs: opened(num_envs, SaysNoMode)],
    ids=["another width", "no mode"],
)
def test_a_rejected_environment_is_closed(make: Any) -> None:
    built: list[gym.vector.VectorEnv[Any, Any, Any]] = []

    def opened(num_envs: int, cls: type[gym.vector.SyncVectorEnv] = gym.vector.SyncVectorEnv) -> Any:
        built.append(cls([Walk] * num_envs))
        return built[-1]

    with refused(ConfigError, "environment.env"):
        evaluate(batched(partial(make, opened)))
    assert [env.closed for env in built] == [True]


def test_the_width_has_one_name() -> None:
    with refused(ConfigError, "environment.env_kwargs.num_envs", value=3):
        evaluate(batched(walks).environment(env_kwargs={"num_envs": 3}))


@pytest.mark.parametrize("mode", ["NextStep", "SameStep"])
def test_an_unknown_class_with_short_episodes_passes_the_trial(reference: EvalResult, mode: str) -> None:
    for width in (4, 32):
        same(evaluate(batched(as_class(OwnClass, mode), width)), reference)


def test_every_result_names_the_simulator() -> None:
    with EvalRunnerGroup(batched(walks)) as group:
        for _ in range(2):
            assert any("SyncVectorEnv" in note for note in group.evaluate().notes)


def test_slots_wait_for_others_where_a_restart_is_expensive(reference: EvalResult) -> None:
    together: list[int] = []

    class Expensive(VectorEnvSimulator):
        min_free = 5

        def restart(self, slots: Any, specs: Any) -> Any:
            together.append(len(slots))
            return super().restart(slots, specs)

    made = batched(lambda num_envs: Expensive(walks(num_envs)), 10, determinism_check=0)
    result = evaluate(made)
    assert result.fingerprint == reference.fingerprint
    assert sum(together) == EPISODES
    assert min(together[:-3]) >= 5  # The last leases come in smaller groups.


def test_rewards_of_atari_are_not_clipped() -> None:
    pytest.importorskip("ale_py")
    assert _is_ale("ale_py:ALE/Qbert-v5")
    assert not _is_ale("CartPole-v1")


def test_the_guarantee_does_not_depend_on_the_simulator_in_use() -> None:
    """After a fault, the last episodes run in another simulator, and new weights are probed before one is built."""
    torch = pytest.importorskip("torch")

    class Coupled(VectorEnvSimulator):
        couples_slots = True

    def make(num_envs: int) -> Any:
        return Coupled(walks(num_envs, on_step=raise_in))

    def raise_in(walk: Walk) -> None:
        if walk.seed == seed_of(60):
            raise RuntimeError("the simulator diverged")

    module = torch.nn.Linear(3, 3)
    with EvalRunnerGroup(batched(make).policy(None), module) as group:
        for _ in range(2):
            assert group.evaluate().guarantee == "conditions"
            group.sync_weights(module)


def test_the_note_of_the_trial_outlives_the_simulator() -> None:
    def make(num_envs: int) -> Any:
        return as_class(OwnClass, "NextStep", Fixed)(num_envs)

    with EvalRunnerGroup(batched(make)) as group:
        for _ in range(2):
            notes = group.evaluate().notes
            assert any("distinct" in note and "OwnClass" in note for note in notes)


@pytest.mark.parametrize("call", ["step", "reset"])
def test_a_fault_of_a_replay_costs_no_other_episode(call: str) -> None:
    """Episodes that the runner gives back run again, and those that are only suspected do so alone."""
    armed, struck = [False], seed_of(9)

    class Struck(Walk):
        def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
            if call == "reset" and armed[0] and seed == struck:
                raise RuntimeError("the simulator diverged")
            return super().reset(seed=seed, options=options)

        def step(self, action: Any) -> Any:
            if call == "step" and armed[0] and self.seed == struck:
                raise RuntimeError("the simulator diverged")
            return super().step(action)

    config = batched(as_class(gym.vector.SyncVectorEnv, walk=Struck))
    result = evaluate(config)
    armed[0] = True
    with rebuilt_runner(result, config) as runner:
        leases = [lease_of(result, index) for index in range(16)]
        again = [compared(result, report) for report in run_again(runner, leases, 14)]
    assert [one.recorded.index for one in again if not one.identical] == [9]


def test_a_factory_of_one_width_serves_the_determinism_check() -> None:
    def make(num_envs: int) -> Any:
        return walks(7)

    result = evaluate(batched(make, 7))
    same(result, single(Walk))
    assert result.determinism.passed
