"""Policies on servers have the records of the policy in this process, in every layout and after every kill."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from contextlib import ExitStack
from functools import cache
from typing import Any

import pytest

from rl_eval import EvalConfig, evaluate
from tests.served import Flat, Recurrent, Served, Struck

pytestmark = [pytest.mark.process, pytest.mark.slow]

EPISODES, STRUCK = 12, 5
POLICIES = {"flat": Flat, "recurrent": Recurrent}
Case = tuple[int, int, int, bool, bool, bool, str]
FACTORS: tuple[tuple[Any, ...], ...] = ((1, 8), (1, 2), (False, True), (False, True), (False, True), (*POLICIES,))
"""Lanes, servers, whether answers are late, whether a server is killed and restarted, ``deterministic``, policy."""


def config(policy: Any, deterministic: bool, **context: Any) -> EvalConfig:
    made = EvalConfig().environment(Struck, env_kwargs=context).policy(policy, deterministic=deterministic)
    return made.evaluation(num_episodes=EPISODES).fault_tolerance(max_runner_restarts=20)


@cache
def expected(policy: str, deterministic: bool) -> str:
    return evaluate(config(POLICIES[policy](), deterministic)).fingerprint


def check(case: Case) -> None:
    """Run an evaluation, and compare it with the policy in this process."""
    runners, lanes, servers, late, killed, deterministic, policy = case
    options = (
        "--deterministic" if deterministic else "--stochastic",
        "--set",
        f"policy.policy_kwargs.delay_s={late / 50}",
    )
    with ExitStack() as stack:
        processes = [Served(policy, *options) for _ in range(servers)]
        for process in processes:
            stack.callback(process.kill)
        context = {"pid": processes[0].process.pid, "struck": STRUCK} if killed else {}
        if killed:
            stack.callback(processes[0].start_again().join)
        addresses = ",".join(f"127.0.0.1:{process.port}" for process in processes)
        made = config(f"openpi://{addresses}", deterministic, **context)
        made.runners(num_runners=runners, num_envs_per_runner=lanes, num_cpus_per_runner=0.25)
        result = evaluate(made)
    assert (result.status, result.fingerprint) == ("complete", expected(policy, deterministic))
    assert not any(record.attempts > 1 for record in result.episodes)


def pairwise(factors: tuple[tuple[Any, ...], ...]) -> Iterator[tuple[Any, ...]]:
    """Yield cases in which each pair of values of two factors occurs."""
    rows = [*itertools.product(*factors)]
    random.Random(0).shuffle(rows)
    pairs = [{*itertools.combinations(enumerate(row), 2)} for row in rows]
    left = set().union(*pairs)
    while left:
        best = max(range(len(rows)), key=lambda place: len(pairs[place] & left))
        left -= pairs[best]
        yield rows[best]


@pytest.mark.parametrize("case", [*itertools.product((0,), *FACTORS)], ids=str)
def test_in_this_process(case: Case) -> None:
    check(case)


@pytest.mark.parametrize("case", [*pairwise(((1, 2, 4), *FACTORS))], ids=str)
def test_on_runners(ray_cluster: str, case: Case) -> None:
    check(case)
