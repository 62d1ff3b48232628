"""rl_games: its players and agents as policies, from an object or from a checkpoint with its configuration."""

from __future__ import annotations

import contextlib
import copy
import math
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, final

import gymnasium as gym
import torch
import tree
from rl_games.algos_torch import players
from rl_games.algos_torch.running_mean_std import RunningMeanStd, RunningMeanStdObs
from typing_extensions import override

from rl_eval.errors import ConfigError
from rl_eval.integrations.actors import Actor, State
from rl_eval.integrations.policy_files import key_in, reading
from rl_eval.integrations.run_folders import run_config
from rl_eval.weights import read_tensors

_PLAYERS: Final = {"a2c_continuous": players.PpoPlayerContinuous, "a2c_discrete": players.PpoPlayerDiscrete}
_COMPILED: Final = "_orig_mod."


@final
class RlGamesActor(Actor):
    """Network of rl_games with its normalizer. It acts as ``get_action`` of a player.

    Args:
        player: A player or an agent of PPO.
        clip_observations: Bound to which Isaac Lab's wrapper clips observations.
        clip_actions: Bound to which Isaac Lab's wrapper clips actions.
    """

    def __init__(self, player: Any, clip_observations: float = math.inf, clip_actions: float = math.inf) -> None:
        super().__init__()
        self.model = _plain(player.model)
        self.normalizes = self.model.normalize_input
        self._bounds = clip_observations, clip_actions
        self._rescales = getattr(player, "clip_actions", False) and hasattr(player, "actions_low")
        if self._rescales:
            self.register_buffer("low", player.actions_low.clone())
            self.register_buffer("high", player.actions_high.clone())
        if player.is_rnn:
            self.sizes = tuple((part.shape[0], part.shape[2]) for part in self.model.get_default_rnn_state())

    @override
    def step(self, observations: Any, state: State, sample: bool) -> tuple[torch.Tensor, State]:
        # The network normalizes the observations in this dict.
        batch = {"is_train": False, "prev_actions": None, "rnn_states": state or None}
        output = self.model(batch | {"obs": tree.map_structure(self._prepared, observations)})
        following = tuple(output["rnn_states"]) if state else ()
        if "mus" not in output:
            logits = output["logits"]
            parts = logits if isinstance(logits, list) else [logits]
            modes = torch.stack([part.argmax(dim=-1) for part in parts], dim=-1)
            return output["actions"] if sample else modes, following
        mean = output["mus"]
        actions = (output["actions"] if sample else mean).reshape(mean.shape)
        if self._rescales:
            actions = players.rescale_actions(self.low, self.high, actions.clamp(-1.0, 1.0))
        return actions.clamp(-self._bounds[1], self._bounds[1]), following

    def _prepared(self, part: torch.Tensor) -> torch.Tensor:
        bound = self._bounds[0]
        return part.float() / 255.0 if part.dtype == torch.uint8 else part.float().clamp(-bound, bound)


def portable(value: Any) -> RlGamesActor:
    """Return a copy of the actor of a player or an agent, on the CPU.

    Raises:
        ConfigError: The player is not one of PPO.
    """
    if not hasattr(getattr(value, "model", None), "a2c_network"):
        raise _not_ppo(type(value).__name__)
    return RlGamesActor(value).cpu()


def load_policy(
    path: str | os.PathLike[str],
    observation_space: gym.Space[Any],
    action_space: gym.Space[Any],
    cfg: str | Mapping[str, Any],
) -> RlGamesActor:
    """Load the actor from a checkpoint.

    Args:
        path: The checkpoint, ``*.pth``.
        observation_space: Observation space of the environment.
        action_space: Action space of the environment. Actions are rescaled to its bounds, unless the configuration has
            ``clip_actions: false``.
        cfg: Training configuration, or its YAML file.

    Raises:
        ConfigError: A file cannot be read, they do not fit, or actions cannot be rescaled to the action space.
    """
    with reading("path", path, "a checkpoint of rl_games"):
        saved = read_tensors(Path(path).expanduser())
        weights = {name.removeprefix(_COMPILED): tensor for name, tensor in saved[key_in(saved, path, "model")].items()}
        former = saved.get("running_mean_std") or {}  # Former versions store it apart from the model.
        weights |= {f"running_mean_std.{name}": tensor for name, tensor in former.items()}
    config = run_config(cfg) if isinstance(cfg, str) else copy.deepcopy(dict(cfg))
    with reading("cfg", cfg, "a training configuration of rl_games"):
        params = config.get("params", config)
        algorithm, limits = params["algo"]["name"], params.get("env") or {}
        bounds = float(limits.get("clip_observations", math.inf)), float(limits.get("clip_actions", math.inf))
    if algorithm not in _PLAYERS:
        raise _not_ppo(algorithm)
    actions = _bounded(action_space, bounds[1], rescales=params["config"].get("clip_actions", True))
    info = {"observation_space": observation_space, "action_space": actions}
    params["config"] |= {"env_info": info, "device_name": "cpu", "env_name": "", "vec_env": None, "player": {}}
    with reading("cfg", cfg, "a training configuration of rl_games"), contextlib.redirect_stdout(sys.stderr):
        actor = RlGamesActor(_PLAYERS[algorithm](params), *bounds)
    with reading("path", path, f"weights of the network in {cfg if isinstance(cfg, str) else 'cfg'}"):
        actor.model.load_state_dict(weights)
    return actor


def _bounded(space: gym.Space[Any], bound: float, *, rescales: bool) -> gym.Space[Any]:
    """Return the action space that rl_games had in the training.

    Raises:
        ConfigError: Actions are rescaled to the bounds of the space, but it has none.
    """
    if isinstance(space, gym.spaces.MultiDiscrete):
        return gym.spaces.Tuple([gym.spaces.Discrete(n) for n in space.nvec])
    if not isinstance(space, gym.spaces.Box):
        return space
    if bound < math.inf:  # Isaac Lab's wrapper replaces the bounds.
        space = gym.spaces.Box(-bound, bound, space.shape)
    if rescales and not space.is_bounded():
        problem = f"rl_games rescales actions to the bounds of the action space, but {space} has none"
        fix = "Set config.clip_actions to false in the training configuration if the training did not rescale actions."
        raise ConfigError(problem, key="policy.policy_kwargs.cfg", value=space, fix=fix)
    return space


def _not_ppo(name: str) -> ConfigError:
    problem = f"{name} of rl_games is not a player or an agent of PPO"
    fix = "Pass a player of a2c_continuous or a2c_discrete, or a function from observations to actions."
    return ConfigError(problem, key="policy", value=name, fix=fix)


def _plain(model: torch.nn.Module) -> Any:
    """Return a copy of a network, with normalizers that can be pickled. TorchScript modules cannot."""
    copied = copy.deepcopy(model)
    for name, part in list(copied.named_children()):
        if isinstance(part, torch.jit.ScriptModule):
            size = copied.obs_shape if name == "running_mean_std" else (copied.value_size,)
            with contextlib.redirect_stdout(sys.stderr):
                plain = (RunningMeanStdObs if isinstance(size, dict) else RunningMeanStd)(size)
            plain.load_state_dict(part.state_dict())
            setattr(copied, name, plain)
    return copied
