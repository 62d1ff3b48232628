"""Scheme ``sb3:PATH``: models of Stable-Baselines3 with the normalizer that lies beside them, told without loading."""

from __future__ import annotations

import json
import re
import zipfile
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Final

from rl_eval.config.policy_schemes import PolicyScheme, PolicySource, absolute
from rl_eval.errors import ConfigError

__all__ = ["NORMALIZERS", "SCHEMES"]

NORMALIZERS: Final = "*vec*normalize*.pkl"
"""``vecnormalize.pkl`` of SB3's zoo and callbacks, ``vec_normalize.pkl`` of its models on the Hub."""
_UNKNOWN: Final = object()
_REPLAY_BUFFER: Final = "buffer_size"
"""Setting of the algorithms that have one."""
_ZOO: Final = ("args.yml", "config.yml")
"""What the zoo puts beside the normalizer of a run."""
_MASKABLE: Final = "sb3_contrib.common.maskable.policies"
"""Module of the class of a masked policy."""


def _source(reference: str, path: Path | None, given: Collection[str]) -> PolicySource:
    """Return a model, with the normalizer that lies beside it, if it was trained with one."""
    if path is None:
        raise ConfigError("the policy 'sb3:' lacks a path, as in sb3:model.zip")
    if path.is_dir():
        path = _only(path, sorted(path.glob("*.zip")), "one model", "name the file")
    facts = _facts_of(path)
    kwargs = {"path": absolute(path)}
    said = f"a model of Stable-Baselines3, {path}"
    normalized = "vecnormalize" not in given and facts.get("_last_original_obs", _UNKNOWN) is not None
    if normalized and (normalizer := _normalizer_of(path)) is not None:
        kwargs["vecnormalize"] = absolute(normalizer)
        said += f", with {normalizer}"
    elif normalized and _REPLAY_BUFFER in facts:
        said += (
            "; its file does not tell whether it was trained with a VecNormalize: if it was, give "
            "--set policy.policy_kwargs.vecnormalize=FILE"
        )
    masked = _MASKABLE in str(facts.get("policy_class"))
    return PolicySource(
        "rl_eval.integrations.sb3:load_policy",
        said + (", with the environment's action masks" if masked else ""),
        kwargs,
        {"environment.action_masks": True} if masked else {},
        pickled=str(path),
    )


def _recognises(path: Path) -> bool:
    if path.is_dir():
        return any(map(_recognises, path.glob("*.zip")))
    if not zipfile.is_zipfile(path):
        return False
    with zipfile.ZipFile(path) as archive:
        return {"data", "policy.pth"} <= set(archive.namelist())


def _facts_of(model: Path) -> Mapping[str, Any]:
    """Return what a model says of itself, without loading what is pickled in it; nothing if it cannot be read."""
    try:
        with zipfile.ZipFile(model) as archive:
            facts = json.loads(archive.read("data"))
    except (OSError, KeyError, ValueError, zipfile.BadZipFile):
        return {}  # Loading it says what is wrong.
    return facts if isinstance(facts, dict) else {}


def _normalizer_of(model: Path) -> Path | None:
    """Return the normalizer that SB3's callbacks or its zoo saved with a model; None if there is none.

    The zoo's is in the folder of the environment's name, beside all models of the run. A normalizer in any other folder
    is somebody else's.

    Raises:
        ConfigError: Several may be meant, or the only one is another model's by its name.
    """
    folder = model.parent
    found = sorted([*folder.glob(NORMALIZERS), *model.with_suffix("").glob(NORMALIZERS)])
    found = found or [path for path in sorted(folder.glob(f"*/{NORMALIZERS}")) if _is_of_the_zoo(path.parent)]
    own = [path for path in found if _name_of(path) == model.stem]
    remedy = "choose it, with policy.policy_kwargs.vecnormalize"
    if not found:
        return None
    only = _only(folder, own or found, "one normalizer", remedy)
    if not own and _is_of_another(_name_of(only), model):
        raise ConfigError(
            f"the policy: {only.name} beside {model.name} is another model's, by its name: give that of this model "
            "with policy.policy_kwargs.vecnormalize, or false if it was trained without one"
        )
    return only


def _name_of(normalizer: Path) -> str:
    """Return the name of the model that a normalizer was saved with, as callbacks name both; empty if it has none."""
    return re.sub("_?vec_?normalize", "", normalizer.stem).strip("_")


def _is_of_another(name: str, model: Path) -> bool:
    """Return whether a name is that of another model, or one of a series whose other member this model is."""
    ours, theirs = ({*re.findall(r"[^\W\d_]+|\d+", text)} for text in (model.stem, name))
    more, less = theirs - ours, ours - theirs
    numbered = any(map(str.isdigit, more)) and any(map(str.isdigit, less))
    series = bool(more and less and (ours & theirs or numbered))
    return series or bool(name and model.with_name(f"{name}.zip").exists())


def _is_of_the_zoo(folder: Path) -> bool:
    """Return whether a folder is that of its run's environment: named in the run's name, or with the zoo's files."""
    run = re.sub(r"_\d+$", "", folder.parent.name)
    return run == folder.name or any((folder / name).is_file() for name in _ZOO)


def _only(folder: Path, found: list[Path], what: str, remedy: str) -> Path:
    if len(found) == 1:
        return found[0]
    names = ", ".join(str(path.relative_to(folder)) for path in found) or "none"
    raise ConfigError(f"the policy: {folder} should hold {what}, and holds {names}: {remedy}")


SCHEMES: Final = {"sb3": PolicyScheme("sb3:PATH", _source, _recognises, suffix=".zip")}
