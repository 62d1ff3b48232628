"""Weights of a group have one owner: numbers are never given twice, and a refusal undoes its own weights only."""

from concurrent.futures import ThreadPoolExecutor

import torch

from rl_eval.execution.runner_pool import GroupWeights, PublishedWeights
from rl_eval.weights import snapshot_weights


def published(version: int) -> PublishedWeights:
    return PublishedWeights(f"handle {version}", snapshot_weights({"w": torch.zeros(1)}, version))


def test_threads_get_numbers_that_differ() -> None:
    weights = GroupWeights()
    with ThreadPoolExecutor(8) as pool:
        numbers = list(pool.map(lambda _: weights.number(), range(2_000)))
    assert sorted(numbers) == list(range(1, 2_001))


def test_a_given_number_is_where_the_next_goes_on() -> None:
    weights = GroupWeights()
    assert [weights.number(version) for version in (None, 10_000, None, 7, None)] == [1, 10_000, 10_001, 7, 8]


def test_a_refusal_brings_the_former_weights_back() -> None:
    weights, bad = GroupWeights(good := published(1)), published(2)
    weights.post(bad)
    former = weights.send(bad)
    weights.withdraw(bad, former)
    assert weights.sent is weights.posted is good


def test_a_refusal_leaves_weights_alone_that_were_posted_meanwhile() -> None:
    weights, bad, newer = GroupWeights(published(1)), published(2), published(3)
    weights.post(bad)
    former = weights.send(bad)
    weights.post(newer)
    weights.withdraw(bad, former)
    assert weights.sent is former
    assert weights.posted is newer
