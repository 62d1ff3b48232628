"""Texts on Ray actors: an instruction per episode reaches the policy of every runner."""

from __future__ import annotations

from typing import Any

import pytest

from rl_eval import evaluate
from tests.unit.test_texts import Reads, config, obey

pytestmark = [pytest.mark.usefixtures("ray_cluster")]


@pytest.mark.parametrize("policy", [obey, Reads()], ids=["function", "module"])
def test_two_runners_have_the_records_of_one_slot(policy: Any) -> None:
    one = evaluate(config(policy=policy, num_envs_per_runner=1))
    two = evaluate(config(policy=policy, num_runners=2, num_envs_per_runner=4))
    assert two.fingerprint == one.fingerprint
    assert all(episode.episode_return == episode.length for episode in two.episodes)
