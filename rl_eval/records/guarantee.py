"""Guarantee of a result: the changes in an execution that do not change the records.

The guarantee is a part of the numerics key, which lists everything on which a float may depend besides the weights. If
the guarantee is weaker than ``exact``, the key also contains the facts on which the records depend, such as the number
of environments. A key without a guarantee means ``exact``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Literal, get_args

Guarantee = Literal["exact", "conditions", "layout"]

MEANINGS: Final[Mapping[Guarantee, str]] = {
    "exact": "the same records for any number of runners and environments, and after faults",
    "conditions": "the same starts and random draws; steps may depend on their batch, or on a policy that varies",
    "layout": "exactly N episodes, without bias; records repeat only with the same number of environments",
}
"""Meaning of each guarantee, the strongest first."""

NUMERICS: Final = "numerics"
"""Key of the check of numerics keys in :attr:`rl_eval.records.episode.RunReport.extra`. The value is the digest of the
weights with which the runner built its policy; empty if weights were sent, or if the policy has none."""
_ORDER: Final = get_args(Guarantee)
_PARTS: Final = ("guarantee", "adapter", "num_envs", "block")


def is_of_guarantee(key: str) -> bool:
    """Whether an item of a numerics key is the guarantee, or a fact that is added if the guarantee is not ``exact``."""
    return key.rpartition("/")[2] in _PARTS


def is_served(numerics: Mapping[str, Any]) -> bool:
    """Whether a numerics key is that of a policy on a server, which may have been replaced by another policy."""
    return any(key.endswith(("server/weights", "server/protocol")) for key in numerics)


def guarantee_of(numerics: Mapping[str, Any]) -> Guarantee:
    """Return the weakest guarantee in a numerics key.

    The key may have a guarantee per policy. A guarantee that is unknown to this version is treated as ``layout``.
    """
    found = {value for key, value in numerics.items() if key.rpartition("/")[2] == "guarantee"}
    known: list[Guarantee] = [one for one in _ORDER if one in found]
    return "layout" if found - {*_ORDER} else known[-1] if known else "exact"
