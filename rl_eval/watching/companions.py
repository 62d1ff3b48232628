"""Files that belong to a checkpoint beside its own, such as the normalizer of a model."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from rl_eval.adapters import loader_of
from rl_eval.config.model_files import digest_of, file_digests
from rl_eval.config.policy_schemes import schemes
from rl_eval.config.settings import EvalSettings, with_values
from rl_eval.errors import ConfigError

__all__ = ["companions_of", "with_companions", "without_companions"]

_PATH: Final = "path"
"""Argument of the factories of libraries' models that names the model."""


def companions_of(model: Path, settings: EvalSettings) -> dict[str, Path]:
    """Return the files that belong to a checkpoint, by the argument of the policy's factory that takes each.

    Args:
        model: The checkpoint.
        settings: Whose policy it is; what its arguments name is meant for all checkpoints.

    Raises:
        ConfigError: It has another file of its own than the arguments name.
    """
    configured, own = settings.policy.policy_kwargs, _own(model, settings.policy.policy)
    for name, file in own.items():
        if _is_file(configured.get(name)) and digest_of(Path(configured[name]).expanduser()) != digest_of(file):
            raise ConfigError(
                f"policy.policy_kwargs.{name} is {configured[name]!r}, but {model} has its own, {file.name}: leave it "
                "out of the config, and each checkpoint has its own"
            )
    return {name: file for name, file in own.items() if name not in configured}


def without_companions(settings: EvalSettings) -> EvalSettings:
    """Return settings without the files that belong to the model that they name, in whose place checkpoints come."""
    configured = settings.policy.policy_kwargs
    own = _own(Path(configured.get(_PATH) or "").expanduser(), settings.policy.policy)
    kept = {name: value for name, value in configured.items() if name not in own or value != str(own[name])}
    return settings if len(kept) == len(configured) else with_values(settings, policy={"policy_kwargs": kept})


def with_companions(settings: EvalSettings, companions: Mapping[str, Path]) -> EvalSettings:
    """Return settings whose policy is made with the files of a checkpoint."""
    if not companions:
        return settings
    kwargs = settings.policy.policy_kwargs | {name: str(file) for name, file in companions.items()}
    return with_values(settings, policy={"policy_kwargs": kwargs})


def _own(model: Path, factory: Any) -> dict[str, Path]:
    """Return the files that plainly belong to a model; none where several may, which loading it then says to lack."""
    library = loader_of(factory)
    scheme = schemes().get(library.name) if library else None
    if scheme is None or not model.exists() or not scheme.recognises(model):
        return {}
    with suppress(ConfigError):
        source = scheme.source("", model, ())
        files = file_digests(factory, source.kwargs)
        return {name: Path(source.kwargs[name]) for name in files if name != _PATH}
    return {}


def _is_file(value: Any) -> bool:
    return isinstance(value, str) and Path(value).expanduser().is_file()
