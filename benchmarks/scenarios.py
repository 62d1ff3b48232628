"""What every contender runs: the environments, the policies and their weights.

Importable wherever numpy and gymnasium are (torch is imported on first use), so that rl_eval and its
peers, which live in different environments, run the same code. It imports no peer, and of rl_eval the environments
with faults alone, where they are built.
"""

from __future__ import annotations

import functools
import json
import os
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import gymnasium as gym
import numpy as np
import numpy.typing as npt

from benchmarks import worlds

if TYPE_CHECKING:
    from torch import nn

__all__ = [
    "CARTPOLE_WEIGHTS",
    "REPO",
    "TRUE_MEAN",
    "cartpole",
    "cartpole_policy",
    "env_factory",
    "heuristic",
    "idle_policy",
    "read_safetensors",
    "two_length_env",
    "wide_policy",
]

REPO: Final = Path(__file__).resolve().parent.parent
CARTPOLE_WEIGHTS: Final = REPO / "configs" / "weights" / "cartpole_ppo_final.safetensors"

TRUE_MEAN: Final = 0.5
"""Mean return of the environment of two lengths, whatever the policy does."""

_STEP_S: Final = 0.001
"""A step takes a moment, so that a run lasts seconds and a fault comes in its middle."""

_DTYPES: Final = {"F32": np.float32, "F64": np.float64, "I64": np.int64}


def read_safetensors(path: Path) -> dict[str, npt.NDArray[Any]]:
    """Read a safetensors file with numpy alone: an 8-byte length, a JSON table, the bytes."""
    raw = path.read_bytes()
    start = 8 + int.from_bytes(raw[:8], "little")
    table = json.loads(raw[8:start])
    arrays = {}
    for name, entry in table.items():
        if name == "__metadata__":
            continue
        first, last = entry["data_offsets"]
        flat = np.frombuffer(raw[start + first : start + last], dtype=_DTYPES[entry["dtype"]])
        arrays[name] = flat.reshape(entry["shape"]).copy()
    return arrays


def cartpole_policy(*_: Any) -> nn.Module:
    """The trained 64x64 tanh network, observations to logits: its argmax holds the pole for all 500 steps."""
    import torch
    from torch import nn

    body = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh())
    module = nn.Sequential(OrderedDict(body=body, head=nn.Linear(64, 2)))
    arrays = read_safetensors(CARTPOLE_WEIGHTS)
    module.load_state_dict({name: torch.from_numpy(arrays[name]) for name in module.state_dict()})
    return module.eval()


def idle_policy(*_: Any) -> nn.Module:
    """Logits for an environment whose rewards do not depend on actions: the same everywhere, width 2 to 2."""
    import torch
    from torch import nn

    module = nn.Linear(2, 2)
    with torch.no_grad():
        module.weight.zero_()
        module.bias.zero_()
    return module


def wide_policy(num_params: int) -> nn.Module:
    """About ``num_params`` float32 parameters in square layers, from CartPole observations to logits."""
    from torch import nn

    width = max(8, round((num_params / 4) ** 0.5))
    inner = [nn.Linear(width, width) for _ in range(4)]
    return nn.Sequential(nn.Linear(4, width), *inner, nn.Linear(width, 2)).eval()


def heuristic(obs: npt.NDArray[np.float32]) -> int:
    """Push towards the side the pole falls to; holds it for nearly 500 steps without any network."""
    return int(obs[2] + obs[3] > 0)


def cartpole(context: Any = None, *, max_episode_steps: int | None = None) -> gym.Env[Any, Any]:
    """CartPole-v1 as ``gym.make`` builds it. ``context`` is what a framework hands to its factories."""
    del context
    return gym.make("CartPole-v1", max_episode_steps=max_episode_steps)


def two_length_env(
    context: Any = None, *, step_seconds: float = 0.0, spare: int = 0, **fault: Any
) -> gym.Env[Any, Any]:
    """Short episodes worth 0 and long ones worth 1, with faults, built the way frameworks call their factories.

    Args:
        context: What a framework hands to its factories.
        step_seconds: How long a step takes at least.
        spare: Id of a process in which nothing happens: that of a driver which builds an environment just to
            look at its spaces.
        fault: Arguments of :class:`rl_eval.testing.FaultyEnv`.
    """
    from rl_eval.testing import FaultyEnv, TwoLengthEnv

    del context
    env = TwoLengthEnv(step_seconds)
    return env if os.getpid() == spare else FaultyEnv(env, **fault)


def env_factory(scenario: str, params: dict[str, Any]) -> Callable[..., gym.Env[Any, Any]]:
    """The environment factory of a scenario, picklable, called with or without a context."""
    if scenario == "simulators":
        return worlds.factory(params["world"])
    if scenario == "correctness":
        return functools.partial(two_length_env, step_rate=params.get("fault_rate", 0.0))
    if scenario == "faults":
        return functools.partial(two_length_env, step_seconds=_STEP_S, **params["strike"])
    return functools.partial(cartpole, max_episode_steps=params.get("episode_steps"))
