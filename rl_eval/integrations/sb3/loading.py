"""Policies from saved models: the acting part of a zip file, and the statistics beside it.

The algorithm is not built: its replay buffer may be larger than the machine, and the policy is all that acts.
"""

from __future__ import annotations

import inspect
import logging
import os
import pickle
from pathlib import Path
from typing import Any, Final, Literal

import torch
from stable_baselines3.common.policies import BasePolicy
from stable_baselines3.common.save_util import load_from_zip_file
from stable_baselines3.common.vec_env import VecNormalize

from rl_eval.errors import ConfigError
from rl_eval.integrations.sb3.files import normalizer_of, unknown
from rl_eval.integrations.sb3.live import attach
from rl_eval.integrations.sb3.normalizer import ATTRIBUTE, LACKS_STATISTICS, NOTES, refuse_empty

__all__ = ["load_policy"]

_logger: Final = logging.getLogger(__name__)

_NOT_ACTING: Final = ("learning_rate", "lr_schedule", "clip_range", "clip_range_vf", "exploration_schedule")
"""Pickled functions of the trainer, which are often what another version of Python cannot read."""


def load_policy(
    path: str | os.PathLike[str], vecnormalize: str | os.PathLike[str] | Literal[False] | None = None
) -> BasePolicy:
    """Load what ``model.save(path)`` and ``vec_normalize_env.save(vecnormalize)`` wrote.

    Use it as a factory::

        config.policy("rl_eval.integrations.sb3:load_policy", policy_kwargs={"path": "model.zip"})

    A relative path is relative to the working directory, ``~`` is the home directory, and ``.zip`` may be left out.
    Both files hold pickled objects, which can run code when they are loaded: load only what you trust.

    Args:
        path: Zip file of a model.
        vecnormalize: Pickle of the ``VecNormalize`` that it was trained with. None searches beside the model, unless
            the model shows that it was trained without. False for a model that was trained without, or with one that
            normalized rewards only.

    Returns:
        The policy on the CPU, with its statistics, to be given to ``evaluate(config, policy)``. Its ``result_notes``
        name the statistics that were found, or a model that does not show whether it needs some.

    Raises:
        ConfigError: A file is missing, unreadable, or something else; the model was trained with a ``VecNormalize``,
            and its statistics are neither given nor beside it; or several files beside it may be meant.
    """
    file = _existing("path", path, ".zip")
    try:
        saved, parameters, _ = load_from_zip_file(file, device="cpu", custom_objects=dict.fromkeys(_NOT_ACTING))
        data: dict[str, Any] = saved or {}
        policy = _build(data)
        policy.load_state_dict(parameters["policy"])
    except Exception as error:
        newer = isinstance(error, ImportError) and error.name == "numpy._core"
        raise ConfigError(
            f"policy_kwargs.path: {str(file)!r} cannot be read as a model of Stable-Baselines3: "
            f"{type(error).__name__}: {error}{'. It was saved with NumPy 2: install numpy>=2' if newer else ''}"
        ) from error
    notes: tuple[str, ...] = ()
    if vecnormalize is None:
        vecnormalize, notes = _beside(file)
    wrapper = _load_statistics(_existing("vecnormalize", vecnormalize, ".pkl")) if vecnormalize else None
    policy = attach(policy, wrapper, data.get("exploration_rate"))
    refuse_empty(getattr(policy, ATTRIBUTE), ConfigError)
    setattr(policy, NOTES, notes)
    return policy.eval()


def _beside(file: Path) -> tuple[Path | None, tuple[str, ...]]:
    """Return the statistics that were saved with a model, and notes for the reader of its results."""
    trained, found = normalizer_of(file)
    if found is not None:
        note = f"{file.name} has the VecNormalize statistics {found.name}, which are beside it"
        _logger.info(note)
        return found, (note,)
    if trained:
        raise ConfigError(
            f"policy_kwargs.vecnormalize is missing: {str(file)!r} {LACKS_STATISTICS}. Give the file that "
            "venv.save() wrote, which SB3's callbacks and its zoo name *vecnormalize*.pkl, as in --set "
            "policy.policy_kwargs.vecnormalize=FILE; or give False if it normalized rewards only"
        )
    return None, (unknown(file.name),) if trained is None else ()


def _build(data: dict[str, Any]) -> BasePolicy:
    """Build the policy as its algorithm does."""
    policy_class = data["policy_class"]
    kwargs = dict(data["policy_kwargs"])
    kwargs.pop("device", None)
    if "use_sde" in inspect.signature(policy_class).parameters:
        kwargs.setdefault("use_sde", data.get("use_sde", False))
    with torch.random.fork_rng(devices=[]):  # Initial weights are drawn, and then replaced.
        return policy_class(data["observation_space"], data["action_space"], lambda _: 0.0, **kwargs)


def _load_statistics(file: Path) -> VecNormalize:
    try:
        wrapper = pickle.loads(file.read_bytes())
    except Exception as error:
        raise ConfigError(
            f"policy_kwargs.vecnormalize: {str(file)!r} cannot be read: {type(error).__name__}: {error}"
        ) from error
    if not isinstance(wrapper, VecNormalize):
        raise ConfigError(
            f"policy_kwargs.vecnormalize: {str(file)!r} holds a {type(wrapper).__name__}, not a VecNormalize"
        )
    return wrapper


def _existing(key: str, path: str | os.PathLike[str], suffix: str) -> Path:
    given = Path(path).expanduser()
    for file in (given, given.with_name(given.name + suffix)):
        if file.is_file():
            return file
    raise ConfigError(
        f"policy_kwargs.{key}: there is no file {str(given)!r}"
        + ("" if given.is_absolute() else f" in {Path.cwd()}: give an absolute path if runners work elsewhere")
    )
