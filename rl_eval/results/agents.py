"""Numbers about agents and their policies: mean returns, per-capita returns, wins, draws and losses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from rl_eval.records.agents import agents_in
from rl_eval.results.stats.aggregate import exact_mean

__all__ = ["agent_metrics", "policy_names", "policy_versions"]

_OUTCOMES: Final = {"win": 1, "draw": 0, "loss": -1}


def policy_names(provenance: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the ids of the policies of an evaluation, in the order in which records number them."""
    found: Any = provenance
    for key in ("config", "policy", "policies"):
        found = found.get(key) if isinstance(found, Mapping) else None
    return tuple(sorted(map(str, found))) if found and isinstance(found, Mapping) else ("default_policy",)


def policy_versions(provenance: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the version of the weights of each policy of an evaluation, in the order of :func:`policy_names`."""
    found: Any = provenance
    for key in ("weights", "versions"):
        found = found.get(key) if isinstance(found, Mapping) else None
    versions = found if isinstance(found, Mapping) else {}
    numbers = (versions.get(name, 0) for name in policy_names(provenance))
    return tuple(number if isinstance(number, int) and abs(number) < 2**63 else 0 for number in numbers)


def agent_metrics(rows: npt.NDArray[np.void], columns: Sequence[str], policies: Sequence[str]) -> dict[str, float]:
    """Return the numbers by agent and by policy; the same keys whatever the rows are.

    Args:
        rows: What :func:`rl_eval.records.agents.agent_rows` returned.
        columns: Columns of the records, which tell the agents; no numbers if there are none.
        policies: Ids of the policies.
    """
    agents = agents_in(columns)
    order = np.argsort(rows["seat"], kind="stable")
    ends = np.searchsorted(rows["seat"][order], np.arange(len(agents) + 1))
    numbers = {}
    for seat, agent in enumerate(agents):
        own = rows[order[ends[seat] : ends[seat + 1]]]
        numbers[f"agent_episode_returns_mean/{agent}"] = exact_mean(own["return"])
        numbers[f"agent_episode_len_mean/{agent}"] = exact_mean(own["length"])
    for policy in policies if agents else ():
        numbers |= _policy_numbers(policy, rows[rows["policy"] == policy])
    return numbers


def _policy_numbers(policy: str, own: npt.NDArray[np.void]) -> dict[str, float]:
    mean = exact_mean(own["return"])
    _, episode, counts = np.unique(own["index"], return_inverse=True, return_counts=True)
    sums = np.bincount(episode, own["return"], len(counts))
    numbers = {
        # RLlib's two spellings, of its new and its old API: the mean over episodes and agents.
        f"module_episode_returns_mean/{policy}": mean,
        f"policy_reward_mean/{policy}": mean,
        f"policy_team_return_mean/{policy}": exact_mean(sums),
        f"policy_per_capita_return_mean/{policy}": exact_mean(sums / counts),
        f"policy_episode_len_mean/{policy}": exact_mean(own["length"]),
        f"policy_terminated_rate/{policy}": exact_mean(own["terminated"]),
        f"policy_truncated_rate/{policy}": exact_mean(own["truncated"]),
    }
    rates = {f"{name}_rate/{policy}": exact_mean(own["outcome"] == value) for name, value in _OUTCOMES.items()}
    return numbers | rates
