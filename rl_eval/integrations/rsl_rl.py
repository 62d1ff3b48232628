"""rsl_rl: its models as policies, from a runner, an inference policy, or a checkpoint of ``model_*.pt``."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, cast, final

import gymnasium as gym
import torch
from rsl_rl.models import MLPModel
from rsl_rl.utils import resolve_class
from typing_extensions import override

from rl_eval.config.settings import PolicySection
from rl_eval.errors import ConfigError
from rl_eval.integrations.actors import Actor, State, copied
from rl_eval.integrations.policy_files import key_in, reading
from rl_eval.integrations.run_folders import run_config
from rl_eval.weights import read_tensors

_RENAMED: Final = {
    "actor_obs_normalizer.": "obs_normalizer.",
    "actor.": "mlp.",
    "memory_a.": "rnn.",
    "std": "distribution.std_param",
    "log_std": "distribution.log_std_param",
}
"""Names of tensors in rsl_rl 1 to 4, or their beginnings, and the names in rsl_rl 5."""
_OF_CRITICS: Final = ("critic.", "critic_obs_normalizer.", "memory_c.")
_FORMER: Final = re.compile(r"(rsl_rl(\.\w+)*[.:])?(ActorCritic(Recurrent)?|(MLP|RNN)Model)")
"""Classes of rsl_rl 1 to 4 whose actors are models of rsl_rl 5."""


@final
class RslRlActor(Actor):
    """Model of rsl_rl with its normalizer.

    Args:
        model: A model that no other code uses.
        clip_actions: Bound to which Isaac Lab's wrapper clips actions; None without a bound.
    """

    def __init__(self, model: MLPModel, clip_actions: float | None = None) -> None:
        super().__init__()
        self.model, self.normalizes = model, model.obs_normalization
        self._bound = clip_actions
        self.groups = (*model.obs_groups, *getattr(model, "obs_groups_2d", ()))
        if model.is_recurrent:
            recurrent = model.rnn.rnn
            parts = 2 if isinstance(recurrent, torch.nn.LSTM) else 1
            self.sizes = ((recurrent.num_layers, recurrent.hidden_size),) * parts
            model.reset()

    @override
    def check(self, section: PolicySection, observation_space: gym.Space[Any], action_space: gym.Space[Any]) -> None:
        _groups_in(observation_space, self.groups)

    @override
    def step(self, observations: Any, state: State, sample: bool) -> tuple[torch.Tensor, State]:
        groups = observations if isinstance(observations, dict) else {self.groups[0]: observations}
        if state:
            self.model.reset(hidden_state=state if len(state) > 1 else state[0])
        output = self.model({name: groups[name].float() for name in self.groups}, stochastic_output=sample)
        hidden = self.model.get_hidden_state()
        bounded = output if self._bound is None else output.clamp(-self._bound, self._bound)
        return bounded, hidden if isinstance(hidden, tuple) else () if hidden is None else (hidden,)


def portable(value: Any) -> RslRlActor:
    """Return a copy of the actor of a runner, or of an inference policy, on the CPU."""
    if isinstance(value, MLPModel):
        return RslRlActor(copied(value))
    return RslRlActor(copied(value.alg.get_policy()), value.cfg.get("clip_actions"))


def load_policy(
    path: str | os.PathLike[str],
    observation_space: gym.Space[Any],
    action_space: gym.Space[Any],
    cfg: str | Mapping[str, Any] | None = None,
    activation: str | None = None,
) -> RslRlActor:
    """Load the actor from a file that a runner of rsl_rl saved.

    Args:
        path: The file, ``model_*.pt``.
        observation_space: Observation space of the environment. If it is a Dict, its keys are the groups of
            observations.
        action_space: Action space of the environment.
        cfg: Training configuration of the runner, or its YAML file, such as Isaac Lab's ``params/agent.yaml``.
        activation: Activation function, if there is no configuration.

    Raises:
        ConfigError: The file cannot be read, does not fit the configuration or the spaces, or has no configuration.
    """
    file = Path(path).expanduser()
    with reading("path", path, "a checkpoint of rsl_rl"):
        tensors = _tensors(read_tensors(file), path)
        facts = _facts(tensors)
    given = run_config(cfg) if isinstance(cfg, str) else dict(cfg or {})
    plain = {"activation": activation, "hidden_dims": facts["hidden_dims"]}
    section = given.get("actor") or given.get("policy") or plain
    if "distribution_cfg" not in section:
        section = _present(section, tensors, facts)
    if section.get("activation", "") is None:
        problem = (
            f"policy_kwargs.path: {str(path)!r} does not contain the activation function of the actor. Its tensors "
            f"show {_said(facts)}"
        )
        fix = (
            "Set policy.policy_kwargs.cfg to the agent.yaml of the training, or policy.policy_kwargs.activation to the "
            "name of the function, such as elu."
        )
        raise ConfigError(problem, key="policy.policy_kwargs.activation", value=str(path), fix=fix)
    groups = given.get("obs_groups") or {}
    observed = _groups_in(observation_space, groups.get("actor") or groups.get("policy") or ("policy",))
    outputs = math.prod(action_space.shape or ())
    with reading("cfg", cfg or path, "a configuration of an actor"):
        build, arguments = resolve_class(section)
        model: MLPModel = build(observed, {"actor": list(observed)}, "actor", outputs, **arguments)
    _check_fit(path, tensors, model.state_dict())
    model.load_state_dict(tensors)
    return RslRlActor(model, given.get("clip_actions"))


def _tensors(saved: Mapping[str, Any], path: Any) -> dict[str, torch.Tensor]:
    """Return the tensors of the actor with their names in rsl_rl 5."""
    found = {f"obs_normalizer.{name}": tensor for name, tensor in saved.get("obs_norm_state_dict", {}).items()}
    for name, tensor in saved[key_in(saved, path, "actor_state_dict", "model_state_dict")].items():
        start = name if "." not in name else f"{name.partition('.')[0]}."
        if start not in _OF_CRITICS:
            found[_RENAMED.get(start, start) + name.removeprefix(start)] = tensor
    return found


def _facts(tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Return the facts of an actor that the shapes of its tensors show."""
    layers = sorted((int(name[4:-7]), name) for name in tensors if re.fullmatch(r"mlp\.\d+\.weight", name))
    shapes = [tensors[name].shape for _, name in layers]
    facts = {
        "observations": shapes[0][1],
        "hidden_dims": [shape[0] for shape in shapes[:-1]],
        "outputs": shapes[-1][0],
        "obs_normalization": "obs_normalizer._mean" in tensors,
    }
    if (inner := tensors.get("rnn.rnn.weight_hh_l0")) is not None:
        facts["observations"] = tensors["rnn.rnn.weight_ih_l0"].shape[1]
        facts["rnn_type"] = "lstm" if inner.shape[0] == 4 * inner.shape[1] else "gru"
        facts["rnn_hidden_dim"] = inner.shape[1]
        facts["rnn_num_layers"] = sum(name.startswith("rnn.rnn.weight_hh_l") for name in tensors)
    return facts


def _check_fit(path: Any, tensors: Mapping[str, torch.Tensor], needed: Mapping[str, torch.Tensor]) -> None:
    """Raise if a file has other tensors than the actor of the configuration and the spaces."""
    shapes, wanted = ({name: tuple(one.shape) for name, one in group.items()} for group in (tensors, needed))
    if shapes == wanted:
        return
    others = sorted(name for name in {*shapes, *wanted} if shapes.get(name) != wanted.get(name))
    problem = (
        f"policy_kwargs.path: the tensors in {str(path)!r} show {_said(_facts(tensors))}, but the configuration and "
        f"the environment need {_said(_facts(needed))}. These tensors differ: {', '.join(others)}"
    )
    fix = "Pass the configuration of this training, and an environment with the same observations and actions."
    raise ConfigError(problem, key="policy.policy_kwargs.cfg", value=others[0], fix=fix)


def _said(facts: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in facts.items())


def _present(policy: Mapping[str, Any], tensors: Mapping[str, Any], facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the section ``actor`` of rsl_rl 5 for the section ``policy`` or ``actor`` of former versions.

    Raises:
        ConfigError: The class of the policy is another one.
    """
    if not _FORMER.fullmatch(name := str(policy.get("class_name", "MLPModel"))):
        problem = f"the configuration names the class {name}, whose actor rl_eval cannot build"
        fix = "Build the module yourself, and pass it as torch:MODULE:ATTR@FILE."
        raise ConfigError(problem, key="policy.policy_kwargs.cfg", value=name, fix=fix)
    spread = policy.get("state_dependent_std", False)
    distribution = {
        "class_name": "HeteroscedasticGaussianDistribution" if spread else "GaussianDistribution",
        "std_type": policy.get("noise_std_type", "log" if "distribution.log_std_param" in tensors else "scalar"),
    }
    return {
        "class_name": "RNNModel" if "rnn_type" in facts else "MLPModel",
        "hidden_dims": policy.get("actor_hidden_dims") or policy["hidden_dims"],
        "activation": policy.get("activation"),
        "distribution_cfg": distribution,
        **{name: value for name, value in facts.items() if name.startswith(("rnn_", "obs_"))},
    }


def _groups_in(space: gym.Space[Any], groups: Any) -> dict[str, torch.Tensor]:
    """Return one observation of zeros for each group.

    Raises:
        ConfigError: The observation space lacks a group.
    """
    parts = space.spaces if isinstance(space, gym.spaces.Dict) else {groups[0]: space}
    if missing := [name for name in groups if name not in parts]:
        problem = f"the actor needs the groups of observations {', '.join(groups)}, but the environment has {space}"
        fix = "Return a Dict observation with these keys from the environment."
        raise ConfigError(problem, key="environment.env", value=missing[0], fix=fix)
    return {name: torch.zeros((1, *cast("tuple[int, ...]", parts[name].shape))) for name in groups}
