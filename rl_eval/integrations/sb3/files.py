"""Scheme ``sb3:PATH``: saved models of Stable-Baselines3, and the normalizer that lies beside them.

Whether a model was trained with a ``VecNormalize`` is read from its attributes. Nothing that a file names is imported
or run: arrays are the only objects that are read, and this module does not import Stable-Baselines3.
"""

from __future__ import annotations

import base64
import functools
import io
import json
import logging
import pickle
import re
import zipfile
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from rl_eval.config.policy_sources import PolicyScheme, PolicySource, absolute, path_in
from rl_eval.errors import ConfigError

_logger: Final = logging.getLogger(__name__)

NORMALIZERS: Final = "*vec*normalize*.pkl"
"""``vecnormalize.pkl`` of SB3's zoo and callbacks, ``vec_normalize.pkl`` of its models on the Hub."""
_ZOO: Final = ("args.yml", "config.yml")
"""What the zoo puts beside the normalizer of a run."""
_MASKABLE: Final = "sb3_contrib.common.maskable.policies"
"""Module of the class of a masked policy."""
_SPACE: Final = "observation_space"
_LAST: Final = "_last_obs"
_ORIGINAL: Final = "_last_original_obs"
_REPLAY_BUFFER: Final = "buffer_size"
"""Setting of the algorithms that have one."""
_ARRAYS: Final = ("_frombuffer", "_reconstruct", "dtype", "ndarray", "scalar")
"""Names in NumPy of which a pickled array consists."""
_ROUNDING: Final = 1e-4


def _source(reference: str, path: Path | None, given: Collection[str]) -> PolicySource:
    """Return a model, with the normalizer that lies beside it, if it was trained with one."""
    path = path_in("sb3:model.zip", path)
    if path.is_dir():
        path = _only(path, sorted(path.glob("*.zip")), "one model", "name the file")
    kwargs = {"path": absolute(path)}
    said = f"a model of Stable-Baselines3, {path}"
    if "vecnormalize" not in given:
        trained, normalizer = normalizer_of(path)
        if normalizer is not None:
            kwargs["vecnormalize"] = absolute(normalizer)
            said += f", with {normalizer}"
        elif trained is None:
            unknown(path.name)
    masked = _MASKABLE in str(facts_of(path).get("policy_class"))
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


def normalizer_of(model: Path) -> tuple[bool | None, Path | None]:
    """Return whether a model was trained with a ``VecNormalize``, and the statistics that were saved with it.

    The callbacks of SB3 save them beside the model. The zoo saves them in a folder that has the environment's name and
    is beside all models of the run. Statistics in other folders belong to other models.

    Returns:
        The verdict of :func:`trained_normalized`, and the file. None if it is not
        there, or if the model was trained without.

    Raises:
        ConfigError: Several files may be meant; or the model was trained with one, and the file has another's name.
    """
    trained = trained_normalized(facts_of(model))
    if trained is False:
        return trained, None
    folder = model.parent
    found = sorted([*folder.glob(NORMALIZERS), *model.with_suffix("").glob(NORMALIZERS)])
    found = found or [path for path in sorted(folder.glob(f"*/{NORMALIZERS}")) if _is_of_the_zoo(path.parent)]
    own = [path for path in found if _name_of(path) == model.stem]
    possible = own or [path for path in found if not _is_of_another(_name_of(path), model)]
    if trained and found and not possible:
        raise ConfigError(
            f"the policy: {found[0].name} beside {model.name} is another model's, by its name. Set "
            "policy.policy_kwargs.vecnormalize to the file of this model, or to false if it was trained without one"
        )
    remedy = "choose it, with policy.policy_kwargs.vecnormalize"
    return trained, _only(folder, possible, "one normalizer", remedy) if possible else None


@functools.cache
def unknown(name: str) -> str:
    """Return the note on a file whose model may lack its statistics; log it, once in a process."""
    note = (
        f"{name} does not show whether it was trained with a VecNormalize, and there are no statistics beside it: "
        "its observations are not normalized. If it was, set policy.policy_kwargs.vecnormalize to the file of "
        "venv.save(); if not, to false"
    )
    _logger.warning(note)
    return note


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


# ---------------------------------------------------------------------- attributes of a saved model


def trained_normalized(facts: Mapping[str, Any]) -> bool | None:
    """Return whether a model was trained on observations that a ``VecNormalize`` normalized.

    ``learn`` keeps two observations. ``_last_obs`` is the policy's input: float32 if it was normalized. The other,
    ``_last_original_obs``, is the one before normalization. Algorithms with a replay buffer have it without a
    ``VecNormalize`` too, from the step before.

    Args:
        facts: Attributes of a model, live (``vars(model)``) or as :func:`facts_of` reads them.

    Returns:
        None if the attributes do not show it.
    """
    if facts.get("_vec_normalize_env") is not None:
        return True
    last, original = facts.get(_LAST, {}), facts.get(_ORIGINAL, {})
    if original is None or (facts.get("env") is not None and last is not None):
        return False
    shown = _shown_by(_parts(last), _parts(original), _parts(facts.get(_SPACE)))
    if shown is None and _ORIGINAL in facts and _REPLAY_BUFFER not in facts:
        return True
    return shown


def facts_of(model: Path) -> Mapping[str, Any]:
    """Return the attributes of a saved model; none if the file cannot be read.

    Pickled attributes are the JSON that SB3 wrote beside them, but for spaces and observations.
    """
    try:
        with zipfile.ZipFile(model) as archive:
            facts = json.loads(archive.read("data"))
    except (OSError, KeyError, ValueError, zipfile.BadZipFile):
        return {}  # Loading it reports the error.
    if not isinstance(facts, dict):
        return {}
    return {**facts, **{name: _read(facts[name]) for name in (_SPACE, _LAST, _ORIGINAL) if name in facts}}


def _shown_by(last: Mapping[Any, Any], original: Mapping[Any, Any], space: Mapping[Any, Any]) -> bool | None:
    """Return the verdict of two observations, given by key: one normalized key is enough, and False needs all."""
    verdicts = {_of_one(last[key], original.get(key), space.get(key)) for key in last}
    return True if True in verdicts else None if None in verdicts or not verdicts else False


def _of_one(last: Any, original: Any, space: Any) -> bool | None:
    if not isinstance(last, np.ndarray):
        return None
    # A VecFrameStack around the VecNormalize changes the shape, and gives its frames the dtype of the space.
    if not isinstance(original, np.ndarray) or last.shape != original.shape:
        return True if _outside(last, space) else None
    # An environment that exceeds its own bounds shows nothing by that.
    if _outside(last, space) and not _outside(original, space):
        return True
    if last.dtype != original.dtype:
        return True if last.dtype == np.float32 else None
    return False if last.dtype != np.float32 or np.array_equal(last, original) else None


def _outside(observations: npt.NDArray[Any], space: Any) -> bool:
    """Return whether observations are outside of the bounds of a space, if it has any, by more than rounding."""
    low, high = getattr(space, "low", None), getattr(space, "high", None)
    if not isinstance(low, np.ndarray) or not isinstance(high, np.ndarray) or observations.shape[1:] != low.shape:
        return False
    below = observations < low - _ROUNDING * (1 + abs(low))
    return bool(np.any(below | (observations > high + _ROUNDING * (1 + abs(high)))))


def _parts(value: Any) -> dict[Any, Any]:
    """Return an observation or a space by key; the key of one that is not a Dict is None."""
    value = getattr(value, "spaces", value)
    if isinstance(value, Mapping):
        return dict(value)
    return {} if value is None else {None: value}


def _read(value: Any) -> Any:
    """Return a pickled attribute, or an empty mapping if it cannot be read."""
    if value is None:
        return None
    try:
        return _Arrays(io.BytesIO(base64.b64decode(value[":serialized:"]))).load()
    except Exception:
        return {}


class _Inert:
    """Stand-in for an object of any class but an array: it has the attributes, and no behaviour."""


class _Arrays(pickle.Unpickler):
    """Unpickler that builds arrays, and stand-ins for all other objects."""

    def find_class(self, module: str, name: str) -> Any:
        """Return a part of NumPy's arrays by its name, or a stand-in."""
        if module.partition(".")[0] == "numpy" and name in _ARRAYS:
            return super().find_class(module, name)
        return {"bytearray": bytearray, "OrderedDict": dict}.get(name, _Inert)


SCHEMES: Final = {"sb3": PolicyScheme("sb3:PATH", _source, _recognises, suffix=".zip")}
