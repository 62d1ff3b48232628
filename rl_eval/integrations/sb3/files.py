"""Scheme ``sb3:PATH``: saved models of Stable-Baselines3, and the normalizer next to them.

The attributes of a model show whether it was trained with a ``VecNormalize``. From pickles, this module builds only
arrays. It imports and runs no code that a file names, and it does not import Stable-Baselines3.
"""

from __future__ import annotations

import base64
import errno
import functools
import logging
import re
import zipfile
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from rl_eval.bounded_read import FEW_MB, BoundedFile, read_entry
from rl_eval.config.model_files import ModelFile, described
from rl_eval.config.policy_sources import PolicyScheme, PolicySource, absolute, file_in
from rl_eval.errors import ConfigError
from rl_eval.integrations.pickled_arrays import inert
from rl_eval.records.plain import parse_json

_logger: Final = logging.getLogger(__name__)

NORMALIZERS: Final = "*vec*normalize*.pkl"
"""Pattern of the file names of normalizers: ``vecnormalize.pkl`` of SB3's zoo and callbacks, and ``vec_normalize.pkl``
of SB3's models on the Hub."""
_ZOO: Final = ("args.yml", "config.yml")
"""Files that SB3's zoo saves next to the normalizer of a run."""
MASKABLE: Final = "sb3_contrib.common.maskable.policies"
"""Module that defines the policies with action masks."""
_SPACE: Final = "observation_space"
_LAST: Final = "_last_obs"
_ORIGINAL: Final = "_last_original_obs"
_REPLAY_BUFFER: Final = "buffer_size"
"""Attribute that only algorithms with a replay buffer have."""
_NUMBERS: Final = "biuf"
"""Kinds of dtypes of observations that can be compared."""
_ROUNDING: Final = 1e-4
_KEY: Final = "policy.policy_kwargs.vecnormalize"
PASS: Final = f"vecnormalize=FILE (--set {_KEY}=FILE)"
"""Way to pass the statistics of a model, for error messages: in Python, and on the command line."""


def _source(reference: str, path: Path | None, given: Collection[str]) -> PolicySource:
    """Return the policy source for a saved model. Include the file of the model's ``VecNormalize`` if it is found."""
    path = file_in("sb3:model.zip", path)
    if path.is_dir():
        path = _only(path, sorted(path.glob("*.zip")), "model", "policy.policy", "Pass the path of one model.")
    kwargs = {"path": absolute(path)}
    said = f"a model of Stable-Baselines3, {path}"
    if "vecnormalize" not in given:
        trained, normalizer = normalizer_of(path)
        if normalizer is not None:
            kwargs["vecnormalize"] = absolute(normalizer)
            said += f", with {normalizer}"
        elif trained is None:
            unknown(path.name)
    masked = MASKABLE in str(facts_of(path).get("policy_class"))
    return PolicySource(
        "rl_eval.integrations.sb3:load_policy",
        said + (", with the environment's action masks" if masked else ""),
        kwargs,
        {"environment.action_masks": True} if masked else {},
        pickled=str(path),
    )


def _recognises(file: ModelFile) -> bool:
    if file.is_folder:
        return any(_recognises(described(path)) for path in file.path.glob("*.zip") if path.is_file())
    return file.contains("data", "policy.pth") or is_policy(file)


def is_policy(file: ModelFile) -> bool:
    """Return whether ``policy.save`` of SB3 wrote a file."""
    return file.is_torch and {"state_dict", "data", _SPACE, "action_space"} <= file.texts


def normalizer_of(model: Path) -> tuple[bool | None, Path | None]:
    """Return whether a model was trained with a ``VecNormalize``, and the file of its statistics.

    SB3's callbacks save statistics in the model's folder. SB3's zoo saves them in a subfolder with the environment's
    name, for all models of the run. Statistics in other folders belong to other models.

    Returns:
        The result of :func:`trained_normalized`, and the file. The file is None if it does not exist, or if the model
        was trained without a ``VecNormalize``.

    Raises:
        ConfigError: Several files match, or the model was trained with a ``VecNormalize`` and every file found names
            another model.
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
        problem = f"the policy: according to its name, {found[0].name} belongs to another model than {model.name}"
        fix = f"Pass {PASS} with the file of this model, or False if it was trained without a VecNormalize."
        raise ConfigError(problem, key=_KEY, value=found[0].name, fix=fix)
    return trained, _only(
        folder, possible, "normalizer", _KEY, f"Pass {PASS} with one of these files."
    ) if possible else None


@functools.cache
def unknown(name: str) -> str:
    """Return the note for a model whose statistics may be missing. Log the note once per file name and process."""
    note = (
        f"observations are not normalized: there are no VecNormalize statistics next to {name}, and it does not show "
        f"whether it needs them. If it was trained with a VecNormalize, pass {PASS} with the file of venv.save()"
    )
    _logger.warning(note)
    return note


def _name_of(normalizer: Path) -> str:
    """Return the model name in a normalizer's file name (SB3's callbacks write it); an empty string without one."""
    return re.sub("_?vec_?normalize", "", normalizer.stem).strip("_")


def _is_of_another(name: str, model: Path) -> bool:
    """Whether a name is that of another model: a model with a file in the folder, or a model of the same series."""
    ours, theirs = ({*re.findall(r"[^\W\d_]+|\d+", text)} for text in (model.stem, name))
    more, less = theirs - ours, ours - theirs
    numbered = any(map(str.isdigit, more)) and any(map(str.isdigit, less))
    series = bool(more and less and (ours & theirs or numbered))
    return series or bool(name and model.with_name(f"{name}.zip").exists())


def _is_of_the_zoo(folder: Path) -> bool:
    """Whether SB3's zoo created a folder.

    Such a folder has the name of its parent folder without the number at the end, or contains files of the zoo.
    """
    run = re.sub(r"_\d+$", "", folder.parent.name)
    return run == folder.name or any((folder / name).is_file() for name in _ZOO)


def _only(folder: Path, found: list[Path], what: str, key: str, fix: str) -> Path:
    if len(found) == 1:
        return found[0]
    names = ", ".join(str(path.relative_to(folder)) for path in found) or "none"
    problem = f"the policy: {folder} must contain one {what}, but contains {names}"
    raise ConfigError(problem, key=key, value=str(folder), fix=fix)


# ---------------------------------------------------------------------- attributes of a saved model


def trained_normalized(facts: Mapping[str, Any]) -> bool | None:
    """Return whether a model was trained on observations that a ``VecNormalize`` normalized.

    ``learn`` stores two observations. ``_last_obs`` is the policy's input, float32 if it was normalized.
    ``_last_original_obs`` is the observation before normalization. Algorithms with a replay buffer set
    ``_last_original_obs`` even without a ``VecNormalize``. Then ``_last_original_obs`` is the observation of the
    previous step.

    Args:
        facts: Attributes of a model: ``vars(model)``, or those of a file from :func:`facts_of`.

    Returns:
        Whether observations were normalized; None if the attributes do not show this.
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
    """Return the attributes of a saved model; empty if the file cannot be read.

    Spaces and observations are unpickled. For other pickled attributes, the value is the JSON that SB3 saves for them.

    Raises:
        ConfigError: The attributes are much larger than the file, or have too many parts.
    """
    try:
        facts = attributes_of(model)
        found = facts | {name: _read(facts[name]) for name in (_SPACE, _LAST, _ORIGINAL) if name in facts}
    except (OSError, KeyError, TypeError, ValueError, zipfile.BadZipFile) as error:
        if getattr(error, "errno", None) != errno.EFBIG:
            return {}  # Loading the model reports the error.
        problem = f"the policy: the attributes of {model} are too large: {error}"
        fix = f"Save the model again, with exclude=[{_LAST!r}, {_ORIGINAL!r}], and pass {PASS}."
        raise ConfigError(problem, key="policy.policy", value=str(model), fix=fix) from error
    return found


def attributes_of(model: Path) -> dict[str, Any]:
    """Return the attributes of a saved model, as the JSON that SB3 saves for them.

    Raises:
        Exception: The file is not a saved model, or its attributes are much larger than the file.
    """
    with BoundedFile(model) as file, zipfile.ZipFile(file) as archive:
        found: dict[str, Any] = parse_json(read_entry(archive, "data", model, max(FEW_MB, file.stored)))
    return found


def _shown_by(last: Mapping[Any, Any], original: Mapping[Any, Any], space: Mapping[Any, Any]) -> bool | None:
    """Return whether a model's last observation was normalized, by comparing it key by key with the original one.

    The result is True if one key shows normalization, and False if all keys show that there was none. Otherwise, it is
    None.
    """
    verdicts = {_of_one(last[key], original.get(key), space.get(key)) for key in last}
    return True if True in verdicts else None if None in verdicts or not verdicts else False


def _of_one(last: Any, original: Any, space: Any) -> bool | None:
    if not isinstance(last, np.ndarray) or last.dtype.kind not in _NUMBERS:
        return None
    # A VecFrameStack around the VecNormalize changes the shape, and converts frames to the dtype of the space.
    if not isinstance(original, np.ndarray) or last.shape != original.shape:
        return True if _outside(last, space) else None
    # An environment may exceed its own bounds without normalization.
    if _outside(last, space) and not _outside(original, space):
        return True
    if last.dtype != original.dtype:
        return True if last.dtype == np.float32 else None
    return False if last.dtype != np.float32 or np.array_equal(last, original) else None


def _outside(observations: npt.NDArray[Any], space: Any) -> bool:
    """Return whether observations exceed a space's bounds by more than a rounding error; False without bounds."""
    low, high = getattr(space, "low", None), getattr(space, "high", None)
    if not isinstance(low, np.ndarray) or not isinstance(high, np.ndarray) or observations.shape[1:] != low.shape:
        return False
    below = observations < low - _ROUNDING * (1 + abs(low))
    return bool(np.any(below | (observations > high + _ROUNDING * (1 + abs(high)))))


def _parts(value: Any) -> dict[Any, Any]:
    """Return the entries of a Dict observation or a Dict space by key.

    Any other value gets the key None. There are no entries if the value is None.
    """
    value = getattr(value, "spaces", value)
    if isinstance(value, Mapping):
        return dict(value)
    return {} if value is None else {None: value}


def _read(value: Any) -> Any:
    """Return a pickled attribute; an empty mapping if it cannot be read.

    Raises:
        OSError: It has too many parts.
    """
    if value is None:
        return None
    try:
        return inert(base64.b64decode(value[":serialized:"]))
    except OSError:
        raise
    except Exception:
        return {}


SCHEMES: Final = {"sb3": PolicyScheme("sb3:PATH", _source, _recognises, suffix=".zip")}
