"""Traps of simulators on a GPU: each gives the right result, a labelled one, or an error."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch

from rl_eval import EvalConfig, EvalResult, evaluate
from rl_eval.cli.simulator_checks import check_simulator
from rl_eval.errors import ConfigError
from rl_eval.runners.batched.simulator import BatchSimulator, BatchStep
from rl_eval.scheduling.plan import EpisodePlan
from rl_eval.testing import SimulatorContract
from tests.gpu_simulator import TRAPS, GpuAdapter, GpuSimulator, Trap
from tests.refused import refused

EPISODES, STRUCK = 24, 17
WIDTHS = (1, 5, 32)


def policy(observations: Any) -> Any:
    return (observations[:, 0] > 0).astype(np.int64) + 1


def config(trap: Trap, width: int = 7, **options: Any) -> EvalConfig:
    made = partial(GpuAdapter, trap=trap, struck=EpisodePlan(EPISODES, 0)[STRUCK].seed, **options)
    plan = EvalConfig().environment(made).policy(policy).evaluation(num_episodes=EPISODES)
    return plan.runners(runner="batched", num_envs_per_runner=width)


@pytest.fixture(scope="module")
def truth() -> list[tuple[float, int]]:
    """Return and length of each episode, from a plain loop over a simulator of one slot."""
    found, env = [], GpuSimulator(1)
    for spec in EpisodePlan(EPISODES, 0):
        observations, total, done = env.reset(spec.seed, [0]), 0.0, False
        while not done:
            observations, rewards, ended, _ = env.step(torch.as_tensor(policy(observations.numpy())))
            total, done = total + rewards.double().item(), bool(ended)
        found.append((total, int(env.steps)))
    return found


def outcomes(result: EvalResult) -> list[tuple[float, int]]:
    return [(record.episode_return, record.length) for record in result.episodes]


def is_right(trap: Trap, truth: list[tuple[float, int]]) -> None:
    for width in WIDTHS:
        result = evaluate(config(trap, width))
        assert (result.status, result.guarantee, outcomes(result)) == ("complete", "exact", truth)
        assert result.determinism.passed
        assert not result.faults


def is_rejected(trap: Trap, truth: list[tuple[float, int]]) -> None:
    """At every width with neighbours."""
    for width in WIDTHS[1:]:
        with refused(ConfigError, "environment.env", value="GpuAdapter"):
            evaluate(config(trap, width))


def strikes_one_episode(trap: Trap, truth: list[tuple[float, int]]) -> None:
    for width in WIDTHS:
        result = evaluate(config(trap, width))
        assert [record.index for record in result.episodes if record.outcome == "failed"] == [STRUCK]
        found = outcomes(result)
        assert found[:STRUCK] + found[STRUCK + 1 :] == truth[:STRUCK] + truth[STRUCK + 1 :]


def has_one_start(trap: Trap, truth: list[tuple[float, int]]) -> None:
    """The records are right, since they are functions of the index; the note says how few episodes they are."""
    result = evaluate(config(trap))
    assert len({*outcomes(result)}) == 1
    assert any("distinct" in note for note in result.notes)


def is_not_repeatable(trap: Trap, truth: list[tuple[float, int]]) -> None:
    """The records are right, but the determinism check compares the last observations too."""
    result = evaluate(config(trap))
    assert outcomes(result) == truth
    assert result.determinism.passed is False


VERDICTS: dict[Trap, Callable[[Trap, list[tuple[float, int]]], None]] = {
    "": is_right,
    "auto_reset": is_right,
    "no_final_observation": is_right,
    "aliases": is_right,
    "couples_slots": is_rejected,
    "next_as_last": is_not_repeatable,
    "ignores_seeds": is_rejected,
    "ignores_masks": is_rejected,
    "resets_neighbour": is_rejected,
    "reversed_rows": is_rejected,
    "noisy_steps": is_rejected,
    "one_start": has_one_start,
    "nan": strikes_one_episode,
    "raises": strikes_one_episode,
}


@pytest.mark.parametrize("trap", [trap for trap in TRAPS if trap not in ("dies", "hangs")])
def test_no_trap_gives_a_wrong_number(trap: Trap, truth: list[tuple[float, int]]) -> None:
    VERDICTS[trap](trap, truth)


def test_a_second_run_has_other_neighbours() -> None:
    """The determinism check finds exchanged rows without the trial, and in a plan of as many episodes as slots."""

    class Trusted(GpuAdapter):
        trusted = True

    plan = config("", 2).environment(Trusted, env_kwargs={"trap": "reversed_rows"}).evaluation(num_episodes=2)
    assert evaluate(plan).determinism.passed is False


# ------------------------------------------------------------------------------ labels


def test_coupled_slots_are_a_weaker_guarantee(truth: list[tuple[float, int]]) -> None:
    """The start of an episode is that of its index; the width joins the numerics key."""
    result = evaluate(config("couples_slots", couples_slots=True))
    assert (result.status, result.guarantee) == ("complete", "conditions")
    assert result.provenance["numerics"].items() >= {"adapter": "GpuAdapter", "num_envs": 7}.items()
    assert result.determinism.checked == 0


def test_one_generator_for_all_slots_needs_blocks() -> None:
    results = [evaluate(config("noisy_steps", width).runners(block=2)) for width in (7, 7, 5)]
    assert {result.guarantee for result in results} == {"layout"}
    first, second, narrow = map(outcomes, results)
    assert first == second != narrow
    assert results[0].determinism.passed


@pytest.mark.parametrize("block", [None, 2])
def test_a_way_to_start_that_an_adapter_lacks_is_named(block: int | None) -> None:
    class Bare(BatchSimulator):
        num_envs, observation_space, action_space = 7, gym.spaces.Box(-1, 1, (3,)), gym.spaces.Discrete(3)
        step = close = GpuAdapter.close  # type: ignore[assignment]

    with refused(ConfigError, "runners.block"):
        evaluate(config("").environment(lambda num_envs: Bare()).runners(block=block))


def test_a_block_that_does_not_repeat_is_named() -> None:
    result = evaluate(config("ignores_seeds").runners(block=2))
    assert (len(result.episodes), result.guarantee) == (EPISODES, "layout")
    assert result.determinism.passed is False


def test_a_step_that_the_simulator_refuses_costs_no_episode(truth: list[tuple[float, int]]) -> None:
    """A slot that has ended must restart, but the adapter does not declare it. Each episode completes alone."""

    class Forgetful(GpuAdapter):
        def __init__(self, num_envs: int) -> None:
            super().__init__(num_envs)
            self.restarts_idle = False

    result = evaluate(config("").environment(Forgetful))
    assert outcomes(result) == truth
    assert {(fault.error_type, fault.charged) for fault in result.faults} == {("RuntimeError", False)}
    assert any("trial" in note for note in result.notes)


def declared(trap: Trap, **options: Any) -> EvalConfig:
    return config(trap, **options).evaluation(num_episodes=8)


@pytest.mark.parametrize(
    ("tried", "levels", "guarantee"),
    [
        (declared("auto_reset"), ["ok"], "exact"),
        (declared("couples_slots", couples_slots=True), ["ok"], "conditions"),
        (declared("couples_slots"), ["problem"], ""),
        (declared("ignores_seeds", couples_slots=True), ["problem"], ""),
        (declared("one_start"), ["ok", "note"], "exact"),
        (declared("noisy_steps").runners(block=2), ["ok"], "layout"),
        (declared("ignores_seeds").runners(block=2), ["warning"], "layout"),
    ],
    ids=lambda value: value.build().environment.env.keywords["trap"] if isinstance(value, EvalConfig) else None,
)
def test_doctor_measures_the_guarantee(tried: EvalConfig, levels: list[str], guarantee: str) -> None:
    """A config that claims more is a problem."""
    findings = list(check_simulator(tried.build()))
    assert [finding.level for finding in findings] == levels
    assert guarantee in findings[0].text


# ------------------------------------------------------------------------------ the contract suite


class TestContract(SimulatorContract):
    config = EvalConfig().environment(GpuAdapter)


class TestContractOfCoupledSlots(SimulatorContract):
    config = EvalConfig().environment(GpuAdapter, env_kwargs={"trap": "couples_slots", "couples_slots": True})


class Overruns(GpuAdapter):
    """Steps of a slot past the end of its episode change the start of its next episode."""

    trusted = True

    def __init__(self, num_envs: int) -> None:
        super().__init__(num_envs, trap="auto_reset")
        self.ended, self.overrun = torch.zeros(num_envs, dtype=torch.bool), torch.zeros(num_envs)

    def restart(self, slots: Any, specs: Any) -> Any:
        overrun, self.ended[slots], self.overrun[slots] = self.overrun[slots], False, 0.0
        return super().restart(slots, specs) + overrun[:, None]

    def step(self, actions: Any) -> BatchStep:
        self.overrun += self.ended
        step = super().step(actions)
        self.ended |= step.terminated
        return step


def broken_tests(make: Callable[..., BatchSimulator], **options: Any) -> set[str]:
    """Return the tests of the contract that a simulator fails."""
    suite = SimulatorContract()
    suite.config = EvalConfig().environment(make, env_kwargs=options)
    found = set()
    for name in dir(suite):
        if name.startswith("test_"):
            try:
                getattr(suite, name)()
            except (AssertionError, ConfigError):
                found.add(name)
    return found


@pytest.mark.parametrize(
    "trap", [trap for trap, verdict in VERDICTS.items() if verdict not in (is_right, strikes_one_episode)]
)
def test_the_contract_finds_each_trap(trap: Trap) -> None:
    assert broken_tests(GpuAdapter, trap=trap)


def test_the_contract_steps_slots_past_the_end_of_their_episodes() -> None:
    assert broken_tests(Overruns) == {"test_episodes_are_the_same_in_every_layout"}
