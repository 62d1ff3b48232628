"""Extension of openpi's protocol between ``rl-eval serve`` and the client: the server announces what it serves.

The metadata of such a server has ``rl_eval: 1``, the fields of :func:`greeting`, ``horizon`` (None without chunks),
``memory`` (whether the policy is recurrent), ``weights`` (digest), ``numerics`` (key) and ``name``. A request has the
leaves of the observation by :func:`key_of`, and :data:`EXTENSION`: ``id``, ``seed``, ``step`` and ``begin``. The id is
the client's number of the episode, ``begin`` marks its first request at this server, and seed and step are those of the
noise. A request ``{EXTENSION: {"id": id, "end": True}}`` gets no answer. An answer names id and step in
:data:`EXTENSION`. It has ``actions``, as the policy returned them, before ``policy.actions`` is applied; with
``policy.chunk``, a whole chunk. Or it has ``error`` beside the id, with ``unavailable`` if the episode may run again.
"""

from __future__ import annotations

from typing import Any, Final

import gymnasium as gym

from rl_eval.config.settings import PolicySection
from rl_eval.policies.normalization import joined

EXTENSION: Final = "__rl_eval__"
"""Key of a request, for the number and the noise of the episode."""


def greeting(section: PolicySection, observation_space: gym.Space[Any], action_space: gym.Space[Any]) -> dict[str, Any]:
    """Return the settings on which client and server must agree."""
    return {
        "observation_space": str(observation_space),
        "action_space": str(action_space),
        "deterministic": section.deterministic,
        "actions": section.actions,
        "chunk": section.chunk and section.chunk.model_dump(exclude={"horizon"}),
    }


def key_of(path: tuple[Any, ...]) -> str:
    """Return the key of a leaf of the observation: its path, such as ``images/front``; ``observation`` without one."""
    return joined(path) or "observation"
