"""skrl: its agents and models as policies, from an object or from a checkpoint of ``agent_*.pt``."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, final

import gymnasium as gym
import torch
import tree
from skrl.agents.torch import Agent
from skrl.models.torch import Model
from skrl.resources.preprocessors.torch import RunningStandardScaler
from skrl.utils.runner.torch import Runner
from skrl.utils.spaces.torch import flatten_tensorized_space, tensorize_space
from typing_extensions import override

from rl_eval.config.references import import_attribute
from rl_eval.config.settings import PolicySection
from rl_eval.errors import ConfigError
from rl_eval.integrations.actors import Actor, State, copied
from rl_eval.integrations.policy_files import key_in, reading
from rl_eval.integrations.run_folders import run_config
from rl_eval.weights import read_tensors

_ROLES: Final = ("policy", "q_network")
"""Names of the model that acts."""
_SCALER: Final = "observation_preprocessor"
_FORMER_SCALER: Final = "state_preprocessor"


@final
class SkrlActor(Actor):
    """Model of skrl with the preprocessor of its observations. It acts as in an evaluation by skrl's trainer.

    Args:
        role: Name of the model in the agent: ``policy``, or ``q_network`` for DQN.
        model: A model that no other code uses.
        scaler: The preprocessor; None without one.
    """

    def __init__(self, role: str, model: Model, scaler: RunningStandardScaler | None) -> None:
        super().__init__()
        self.role, self.model, self.scaler = role, model, scaler
        self.normalizes = scaler is not None
        shapes = model.get_specification().get("rnn", {}).get("sizes", ())
        self.sizes = tuple((layers, units) for layers, _, units in shapes)

    @override
    def check(self, section: PolicySection, observation_space: gym.Space[Any], action_space: gym.Space[Any]) -> None:
        model = self.model
        for mine, theirs in ((model.observation_space, observation_space), (model.action_space, action_space)):
            if mine.shape != theirs.shape or type(mine) is not type(theirs):
                problem = f"the policy was made for {mine}, but the environment has {theirs}"
                raise ConfigError(problem, key="environment.env", value=theirs)

    @override
    def step(self, observations: Any, state: State, sample: bool) -> tuple[torch.Tensor, State]:
        arrays = tree.map_structure(lambda part: part.numpy(force=True), observations)
        device = next(self.parameters()).device
        flat = flatten_tensorized_space(tensorize_space(self.model.observation_space, arrays, device=device))
        inputs = {"observations": flat if self.scaler is None else self.scaler(flat), "states": None}
        if state:
            inputs["rnn"] = list(state)
        actions, outputs = self.model.act(inputs, role=self.role)
        following = tuple(outputs.get("rnn", ()))
        if self.role == "q_network":
            return actions.argmax(dim=1, keepdim=True), following
        return actions if sample else outputs.get("mean_actions", actions), following

    @override
    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> SkrlActor:
        """Move the bounds of actions, too, which skrl's models keep as plain attributes."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, value in vars(self.model).items():
            if isinstance(value, torch.Tensor):
                vars(self.model)[name] = fn(value)
        return self


def portable(value: Any) -> SkrlActor:
    """Return a copy of the actor of an agent, a runner or a model, on the CPU.

    Raises:
        ConfigError: The agent has no model that acts on one observation.
    """
    return copied(_actor_of(value))


def load_policy(
    path: str | os.PathLike[str],
    observation_space: gym.Space[Any],
    action_space: gym.Space[Any],
    model: str | Callable[..., Model] | None = None,
    cfg: str | Mapping[str, Any] | None = None,
    preprocessor: str | None = _SCALER,
    preprocessor_kwargs: Mapping[str, Any] | None = None,
) -> SkrlActor:
    """Load the actor from a checkpoint of an agent.

    Args:
        path: The checkpoint, ``agent_*.pt``.
        observation_space: Observation space of the environment.
        action_space: Action space of the environment.
        model: Class of the policy's model, or ``"module:Class"``. It is called with those of ``observation_space``,
            ``state_space``, ``action_space`` and ``device`` that it takes.
        cfg: Configuration of skrl's ``Runner``, or its YAML file, instead of ``model``. The ``Runner`` can run code of
            the configuration.
        preprocessor: Name of the observation's preprocessor in the checkpoint; None for observations that were not
            preprocessed. In checkpoints of skrl 1, it is ``state_preprocessor``.
        preprocessor_kwargs: Arguments of the preprocessor that the training changed, such as ``clip_threshold``, if
            there is no configuration.

    Raises:
        ConfigError: The file cannot be read, or does not fit the model.
    """
    with reading("path", path, "a checkpoint of skrl"):
        saved = read_tensors(Path(path).expanduser())
        role = key_in(saved, path, *_ROLES)
    spaces = {"observation_space": observation_space, "state_space": None, "action_space": action_space}
    if cfg is not None:
        config = run_config(cfg) if isinstance(cfg, str) else dict(cfg)
        with reading("cfg", cfg, "a configuration of skrl's Runner"):
            actor = _actor_of(_Untrained(SimpleNamespace(**spaces, device="cpu", num_envs=1), config))
        preprocessor = next((name for name in (_SCALER, _FORMER_SCALER) if name in saved), None)
    else:
        build = import_attribute("policy_kwargs.model", model) if isinstance(model, str) else model
        if build is None:
            problem = f"policy_kwargs.path: {str(path)!r} does not contain the network of the policy"
            fix = "Set policy.policy_kwargs.model to the class of its model, or policy.policy_kwargs.cfg."
            raise ConfigError(problem, key="policy.policy_kwargs.model", value=str(path), fix=fix)
        takes = inspect.signature(build).parameters
        made = build(**{name: value for name, value in {**spaces, "device": "cpu"}.items() if name in takes})
        _check_preprocessor(path, saved, preprocessor)
        scaler = RunningStandardScaler(observation_space, device="cpu", **(preprocessor_kwargs or {}))
        actor = SkrlActor(role, made, scaler if preprocessor in saved else None)
    with reading("path", path, f"weights of {type(actor.model).__name__}"):
        actor.model.load_state_dict(saved[role])
        if actor.scaler is not None:
            actor.scaler.load_state_dict(saved[preprocessor])
    return actor


class _Untrained(Runner):  # type: ignore[misc]
    """Runner without a trainer, which would write files."""

    @override
    def _generate_trainer(self, *_: Any) -> None: ...


def _actor_of(value: Runner | Agent | Model) -> SkrlActor:
    if isinstance(value, Model):
        return SkrlActor(_ROLES[0], value, None)
    agent = value.agent if isinstance(value, Runner) else value
    role = next((role for role in _ROLES if agent.models.get(role) is not None), None)
    if role is None:
        problem = f"the {type(agent).__name__} of skrl has no model that acts, but {', '.join(agent.models)}"
        raise ConfigError(problem, key="policy", value=type(agent).__name__)
    scaler = getattr(agent, "_observation_preprocessor", None)
    return SkrlActor(role, agent.models[role], scaler if isinstance(scaler, RunningStandardScaler) else None)


def _check_preprocessor(path: Any, saved: Mapping[str, Any], name: str | None) -> None:
    """Raise if it is unknown how the observations of a checkpoint were preprocessed."""
    if name in (None, *saved) or _FORMER_SCALER not in saved:
        return
    problem = f"policy_kwargs.path: {str(path)!r} has no {name}, but a {_FORMER_SCALER}"
    fix = (
        f"Set policy.policy_kwargs.preprocessor to {_FORMER_SCALER} if skrl 1 saved the file, whose states are the "
        "observations. Otherwise, set it to null."
    )
    raise ConfigError(problem, key="policy.policy_kwargs.preprocessor", value=name, fix=fix)
