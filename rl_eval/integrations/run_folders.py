"""Schemes of the checkpoints of rsl_rl, skrl and rl_games, with the training configurations beside them."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from rl_eval.config.builder import compose_yaml, read_text
from rl_eval.config.model_files import ModelFile
from rl_eval.config.policy_sources import PolicyScheme, PolicySource, absolute, file_in, user_path
from rl_eval.errors import ConfigError

_BESIDE: Final = ("params/agent.yaml", "../params/agent.yaml")
"""Places of the training configuration in a run folder of Isaac Lab, relative to the folder of a checkpoint."""
_OWN: Final = re.compile(r"(rsl_rl(\.\w+)+[.:])?\w+(Model|Distribution)|ActorCritic(Recurrent)?")
"""Names of rsl_rl's own classes in a configuration."""


def run_config(path: str | Path) -> dict[str, Any]:
    """Return the training configuration in a YAML file, without running code of the file.

    Raises:
        ConfigError: The file cannot be read, is not a mapping, or contains Python objects other than tuples.
    """
    file = user_path(str(path))
    values, _ = compose_yaml(read_text(file), file)
    if not isinstance(values, dict):
        problem = f"policy_kwargs.cfg: {str(path)!r} is not a training configuration"
        raise ConfigError(problem, key="policy.policy_kwargs.cfg", value=str(path), fix="Pass a YAML file of settings.")
    return values


def _beside(path: Path) -> Path | None:
    """Return the training configuration of a checkpoint in a run folder; None if there is none."""
    return next((found for place in _BESIDE if (found := (path.parent / place).resolve()).is_file()), None)


def _scheme(
    library: str, form: str, recognises: Callable[[ModelFile], bool], runs_code: Callable[[Path | None], bool]
) -> dict[str, PolicyScheme]:
    """Return the scheme of a library's checkpoints.

    Args:
        library: Name of the library.
        form: Template of the policy string. With CONFIG or MODULE, a checkpoint alone is not enough.
        recognises: Whether a file is a checkpoint of the library.
        runs_code: Whether the library can run code that a configuration names; of an unknown one, if it is None.
    """

    def source(reference: str, path: Path | None, given: Collection[str]) -> PolicySource:
        path = file_in(form.replace("PATH", "model_1000.pt"), path)
        kwargs = {"path": absolute(path)}
        factory, said = f"rl_eval.integrations.{library}:load_policy", f"the policy of {library} in {path}"
        if ":" in reference:
            return PolicySource(factory, f"{said}, a {reference}", kwargs | {"model": reference})
        if {"cfg", "activation", "model"} & {*given}:
            code = "the file of policy.policy_kwargs.cfg" if "cfg" in given and runs_code(None) else None
            return PolicySource(factory, said, kwargs, pickled=code)
        config = user_path(reference).resolve() if reference else _beside(path)
        if config is not None and config.is_file():
            code = str(config) if runs_code(config) else None
            said = f"{said} with the configuration {config}"
            return PolicySource(factory, said, kwargs | {"cfg": str(config)}, pickled=code)
        if "@" not in form:
            return PolicySource(factory, said, kwargs)
        problem = (
            f"the policy {str(path)!r} is a checkpoint of {library}, which does not contain the network, and there is "
            f"no {reference or 'params/agent.yaml beside it'}"
        )
        fix = f"Write the policy as {form}, with the class of the model or the training configuration."
        raise ConfigError(problem, key="policy.policy", value=str(path), fix=fix)

    return {library: PolicyScheme(form, source, recognises)}


def _names_foreign_classes(config: Path | None) -> bool:
    """Return whether a configuration of rsl_rl names, or may name, classes of other packages for the actor."""
    return config is None or not all(map(_OWN.fullmatch, _class_names(run_config(config))))


def _class_names(values: Mapping[str, Any]) -> Iterator[str]:
    """Return the names of the classes that rsl_rl builds the actor from."""
    actor = values.get("actor")
    for section in (actor, actor.get("distribution_cfg")) if isinstance(actor, Mapping) else ():
        if isinstance(section, Mapping):
            yield str(section.get("class_name"))


def _has(file: ModelFile, *keys: str) -> bool:
    return file.is_torch and not file.texts.isdisjoint(keys)


RSL_RL: Final = _scheme(
    "rsl_rl",
    "rsl_rl:PATH",
    lambda file: _has(file, "actor_state_dict", "model_state_dict"),
    _names_foreign_classes,
)
SKRL: Final = _scheme(
    "skrl",
    "skrl:MODULE:ATTR@FILE",
    lambda file: _has(file, "observation_preprocessor", "state_preprocessor", "value_preprocessor"),
    lambda _: True,  # The Runner evaluates texts as Python.
)
RL_GAMES: Final = _scheme(
    "rl_games",
    "rl_games:CONFIG.yaml@FILE",
    lambda file: file.is_torch and any(text.startswith("a2c_network.") for text in file.texts),
    lambda _: False,
)
