"""What every contender runs: the environments, the policies and their weights.

Importable wherever numpy and gymnasium are (torch is imported on first use), so that rl_eval and its
peers, which live in different environments, run the same code. It imports neither rl_eval nor a peer.
"""

from __future__ import annotations

import functools
import json
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import gymnasium as gym
import numpy as np
import numpy.typing as npt

from benchmarks.strike import StrikeEnv

if TYPE_CHECKING:
    from torch import nn

__all__ = [
    "CARTPOLE_WEIGHTS",
    "LONG_STEPS",
    "REPO",
    "SHORT_STEPS",
    "TRUE_MEAN",
    "TwoLengthEnv",
    "cartpole",
    "cartpole_policy",
    "env_factory",
    "heuristic",
    "idle_policy",
    "read_safetensors",
    "struck_env",
    "two_length_env",
    "wide_policy",
]

REPO: Final = Path(__file__).resolve().parent.parent
CARTPOLE_WEIGHTS: Final = REPO / "configs" / "weights" / "cartpole_ppo_final.safetensors"

SHORT_STEPS: Final = 5
LONG_STEPS: Final = 200
TRUE_MEAN: Final = 0.5
"""Mean return of :class:`TwoLengthEnv`, whatever the policy does."""

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
    """Logits for an environment whose rewards do not depend on actions: the same everywhere, width 1 to 2."""
    import torch
    from torch import nn

    module = nn.Linear(1, 2)
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


class TwoLengthEnv(gym.Env[npt.NDArray[np.float32], np.int64]):
    """Episodes are short and worthless or long and worth 1, decided by the reset seed.

    A short episode lasts :data:`SHORT_STEPS` steps and returns 0; a long one lasts :data:`LONG_STEPS`
    and returns 1, paid on its last step. Both are equally likely, so the mean return is
    :data:`TRUE_MEAN`, and an evaluator that prefers what finishes first reports less.

    Args:
        fault_rate: Probability that a step raises. The draws come from a generator of no fixed
            seed, as real faults do; an evaluator that announces its episodes through
            :meth:`begin_episode` gets draws that depend on seed and attempt, so that its runs repeat.
    """

    metadata: dict[str, Any] = {"render_modes": []}  # noqa: RUF012 (gymnasium's own declaration)

    def __init__(self, fault_rate: float = 0.0) -> None:
        self.observation_space = gym.spaces.Box(0.0, 1.0, (1,), np.float32)
        self.action_space = gym.spaces.Discrete(2)
        self._fault_rate = fault_rate
        self._faults = np.random.default_rng()
        self._length = LONG_STEPS
        self._step = 0

    def begin_episode(self, index: int, seed: int, attempt: int) -> None:
        """Draw this attempt's faults from the episode's identity."""
        self._faults = np.random.default_rng((index, seed, attempt))

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[npt.NDArray[np.float32], dict[str, Any]]:
        super().reset(seed=seed, options=options)
        self._length = LONG_STEPS if self.np_random.random() < TRUE_MEAN else SHORT_STEPS
        self._step = 0
        return self._observe(), {}

    def step(self, action: np.int64) -> tuple[npt.NDArray[np.float32], float, bool, bool, dict[str, Any]]:
        del action
        if self._fault_rate and self._faults.random() < self._fault_rate:
            raise RuntimeError("the simulator lost its connection")
        self._step += 1
        done = self._step >= self._length
        reward = 1.0 if done and self._length == LONG_STEPS else 0.0
        return self._observe(), reward, done, False, {}

    def _observe(self) -> npt.NDArray[np.float32]:
        return np.full(1, self._step / LONG_STEPS, np.float32)


def two_length_env(context: Any = None, *, fault_rate: float = 0.0) -> TwoLengthEnv:
    """A :class:`TwoLengthEnv`, built the way frameworks call their factories."""
    del context
    return TwoLengthEnv(fault_rate)


def struck_env(context: Any = None, **strike: Any) -> StrikeEnv:
    """A :class:`TwoLengthEnv` in which one fault strikes; the arguments are those of :class:`StrikeEnv`."""
    del context
    return StrikeEnv(TwoLengthEnv(), **strike)


def env_factory(scenario: str, params: dict[str, Any]) -> Callable[..., gym.Env[Any, Any]]:
    """The environment factory of a scenario, picklable, called with or without a context."""
    if scenario == "correctness":
        return functools.partial(two_length_env, fault_rate=params.get("fault_rate", 0.0))
    if scenario == "faults":
        return functools.partial(struck_env, **params["strike"])
    return functools.partial(cartpole, max_episode_steps=params.get("episode_steps"))
