"""Policies named on the command line: a reference, a scheme with a path, or a path whose kind is plain to see."""

from __future__ import annotations

import json
import re
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from rl_eval.errors import ConfigError, nearest

__all__ = ["PolicySource", "policy_source"]

_WEIGHTS: Final = (".safetensors", ".pt", ".pth")
_NORMALIZERS: Final = "*vec*normalize*.pkl"
"""``vecnormalize.pkl`` of SB3's zoo and callbacks, ``vec_normalize.pkl`` of its models on the Hub."""
_UNKNOWN: Final = object()
_MASKABLE: Final = "sb3_contrib.common.maskable.policies"
"""Module of the class of a masked policy."""


@dataclass(frozen=True, slots=True)
class PolicySource:
    """What a policy on the command line stands for."""

    keys: Mapping[str, Any]
    """Config keys, by dotted name; they replace all that a config file says of its policy's making."""
    said: str
    """What it was taken for, in words."""
    pickled: str | None = None
    """File or folder that holds pickled objects, which can run code when they are loaded."""


def policy_source(text: str) -> PolicySource:
    """Return what ``random``, ``sb3:model.zip``, ``rllib:checkpoint``, ``pkg.module:attr`` or a path stands for.

    Raises:
        ConfigError: There is no such file, its kind cannot be told, or more than one is possible.
    """
    scheme, colon, rest = text.partition(":")
    if text == "random":
        return PolicySource(
            _keys("rl_eval.policies.uniform:UniformPolicy") | {"policy.deterministic": False},
            "uniform random actions",
        )
    if colon and scheme in _SCHEMES:
        return _SCHEMES[scheme](Path(rest).expanduser())
    path = Path(text).expanduser()
    if path.exists():
        return _guess(path)
    if colon and rest and "/" not in scheme:
        return PolicySource(_keys(text), text)
    raise ConfigError(
        f"--policy {text}: there is no such file or folder, and it is none of random, {_listed()} or pkg.module:attr"
        + (f": {nearest(scheme, [*_SCHEMES])}" if colon else "")
    )


def _guess(path: Path) -> PolicySource:
    """Return what a path plainly is."""
    if path.suffix in _WEIGHTS:
        raise ConfigError(
            f"--policy {path}: the file holds weights alone; give what they belong to, as --policy pkg.module:make "
            f"--weights {path}"
        )
    kinds = [make for recognised, make in ((_is_sb3, _sb3), (_is_rllib, _rllib)) if recognised(path)]
    if len(kinds) != 1:
        raise ConfigError(f"--policy {path}: its kind cannot be told: say it with one of {_listed()}")
    return kinds[0](path)


def _is_sb3(path: Path) -> bool:
    if path.is_dir():
        return any(map(_is_sb3, path.glob("*.zip")))
    if not zipfile.is_zipfile(path):
        return False
    with zipfile.ZipFile(path) as archive:
        return {"data", "policy.pth"} <= set(archive.namelist())


def _is_rllib(path: Path) -> bool:
    return path.is_dir() and (path / "rllib_checkpoint.json").exists()


def _sb3(path: Path) -> PolicySource:
    """Return a model of Stable-Baselines3, with the normalizer that lies beside it, if it was trained with one."""
    if path.is_dir():
        path = _only(path, sorted(path.glob("*.zip")), "one model")
    facts = _facts_of(path)
    kwargs = {"path": str(path.resolve())}
    said = f"a model of Stable-Baselines3, {path}"
    if facts.get("_last_original_obs", _UNKNOWN) is not None and (normalizer := _normalizer_of(path)) is not None:
        kwargs["vecnormalize"] = str(normalizer.resolve())
        said += f", with {normalizer}"
    keys = _keys("rl_eval.integrations.sb3:load_policy", **kwargs)
    if _MASKABLE in str(facts.get("policy_class")):
        keys["environment.action_masks"] = True
        said += ", with the environment's action masks"
    return PolicySource(keys, said, pickled=str(path))


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

    The zoo's is in the folder of the environment's name, beside all models of the run.
    """
    folder = model.parent
    found = sorted([*folder.glob(_NORMALIZERS), *model.with_suffix("").glob(_NORMALIZERS)])
    found = found or sorted(folder.glob(f"*/{_NORMALIZERS}"))
    own = [path for path in found if re.sub("_?vec_?normalize", "", path.stem) == model.stem]
    return _only(folder, own or found, "one normalizer") if found else None


def _rllib(path: Path) -> PolicySource:
    keys = _keys("rl_eval.integrations.rllib:load_policy", path=str(path.resolve()))
    return PolicySource(keys, f"a checkpoint of RLlib, {path}", pickled=str(path))


def _keys(factory: str, **kwargs: Any) -> dict[str, Any]:
    return {
        "policy.policy": factory,
        "policy.policy_kwargs": kwargs,
        "policy.weights": None,
        "policy.weights_key": None,
    }


def _only(folder: Path, found: list[Path], what: str) -> Path:
    if len(found) == 1:
        return found[0]
    names = ", ".join(str(path.relative_to(folder)) for path in found) or "none"
    raise ConfigError(f"--policy: {folder} should hold {what}, and holds {names}: name the file")


def _listed() -> str:
    return ", ".join(f"{scheme}:PATH" for scheme in _SCHEMES)


_SCHEMES: Final[Mapping[str, Callable[[Path], PolicySource]]] = {"sb3": _sb3, "rllib": _rllib}
