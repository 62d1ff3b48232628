"""Schemes of the checkpoints of rsl_rl, skrl and rl_games, with the training configurations beside them."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from rl_eval.config.builder import compose_yaml, read_text
from rl_eval.config.model_files import ModelFile
from rl_eval.config.policy_sources import PolicyScheme, PolicySource, absolute, path_in, user_path
from rl_eval.errors import ConfigError

_BESIDE: Final = ("params/agent.yaml", "../params/agent.yaml")
"""Places of the training configuration in a run folder of Isaac Lab, relative to the folder of a checkpoint."""
_OWN: Final = re.compile(r"(rsl_rl(\.\w+)+[.:])?\w+(Model|Distribution)|ActorCritic(Recurrent)?")
"""Names of rsl_rl's own classes in a configuration."""
_RSL_RL: Final = "rl_eval.integrations.rsl_rl:load_policy"
_SKRL: Final = "rl_eval.integrations.skrl:load_policy"
_RL_GAMES: Final = "rl_eval.integrations.rl_games:load_policy"


def run_config(path: str | Path) -> dict[str, Any]:
    """Return the training configuration in a YAML file, without running code of the file.

    Raises:
        ConfigError: The file cannot be read, is not a mapping, or contains Python objects other than tuples.
    """
    file = user_path(str(path))
    values, _ = compose_yaml(read_text(file), file, tuples=True)
    if not isinstance(values, dict):
        problem = f"policy_kwargs.cfg: {str(path)!r} is not a training configuration"
        raise ConfigError(problem, key="policy.policy_kwargs.cfg", value=str(path), fix="Pass a YAML file of settings.")
    return values


def _beside(path: Path) -> Path | None:
    """Return the training configuration of a checkpoint in a run folder; None if there is none."""
    return next((found for place in _BESIDE if (found := (path.parent / place).resolve()).is_file()), None)


def _rsl_rl(reference: str, path: Path | None, given: Collection[str]) -> PolicySource:
    path = path_in("rsl_rl:model_1000.pt", path)
    config = None if {"cfg", "activation"} & {*given} else _beside(path)
    own = config is None or all(map(_OWN.fullmatch, _class_names(run_config(config))))
    return PolicySource(
        _RSL_RL,
        f"the actor of rsl_rl in {path}{_with(config)}",
        {"path": absolute(path), **({} if config is None else {"cfg": str(config)})},
        pickled=None if own else str(config),
    )


def _class_names(values: Mapping[str, Any]) -> Iterator[str]:
    """Return the names of the classes that rsl_rl builds the actor from."""
    actor = values.get("actor")
    for section in (actor, actor.get("distribution_cfg")) if isinstance(actor, Mapping) else ():
        if isinstance(section, Mapping):
            yield str(section.get("class_name"))


def _skrl(reference: str, path: Path | None, given: Collection[str]) -> PolicySource:
    path = path_in("skrl:my_pkg.models:Policy@agent_1000.pt", path)
    kwargs: dict[str, Any] = {"path": absolute(path)}
    if ":" in reference or "model" in given:
        named = {"model": reference} if reference else {}
        return PolicySource(_SKRL, f"the policy {reference} of skrl with the weights of {path}", kwargs | named)
    config = _config("skrl", reference, path, "skrl:MODULE:ATTR@FILE, with the class of the policy's model")
    said = f"the policy of skrl in {path}{_with(config)}"
    # skrl's Runner evaluates texts of its configuration as Python.
    return PolicySource(_SKRL, said, kwargs | {"cfg": str(config)}, pickled=str(config))


def _rl_games(reference: str, path: Path | None, given: Collection[str]) -> PolicySource:
    path = path_in("rl_games:agent.yaml@run.pth", path)
    kwargs: dict[str, Any] = {"path": absolute(path)}
    config = None if "cfg" in given else _config("rl_games", reference, path, "rl_games:CONFIG.yaml@FILE")
    return PolicySource(
        _RL_GAMES,
        f"the policy of rl_games in {path}{_with(config)}",
        kwargs if config is None else kwargs | {"cfg": str(config)},
    )


def _config(library: str, reference: str, path: Path, form: str) -> Path:
    """Return the configuration that a policy string names, or the one beside the file.

    Raises:
        ConfigError: There is no such configuration.
    """
    found = user_path(reference).resolve() if reference else _beside(path)
    if found is None or not found.is_file():
        problem = (
            f"the policy {str(path)!r} is a checkpoint of {library}, which does not contain the network, and there is "
            f"no {reference or 'params/agent.yaml beside it'}"
        )
        raise ConfigError(problem, key="policy.policy", value=str(path), fix=f"Write the policy as {form}.")
    return found


def _with(config: Path | None) -> str:
    return "" if config is None else f" with the configuration {config}"


def _has(file: ModelFile, *keys: str) -> bool:
    return file.is_torch and not file.texts.isdisjoint(keys)


RSL_RL: Final = {
    "rsl_rl": PolicyScheme("rsl_rl:PATH", _rsl_rl, lambda file: _has(file, "actor_state_dict", "model_state_dict"))
}
SKRL: Final = {
    "skrl": PolicyScheme(
        "skrl:MODULE:ATTR@FILE",
        _skrl,
        lambda file: _has(file, "observation_preprocessor", "state_preprocessor", "value_preprocessor"),
    )
}
RL_GAMES: Final = {
    "rl_games": PolicyScheme(
        "rl_games:CONFIG.yaml@FILE",
        _rl_games,
        lambda file: file.is_torch and any(text.startswith("a2c_network.") for text in file.texts),
    )
}
