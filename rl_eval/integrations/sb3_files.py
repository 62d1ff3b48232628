"""Scheme ``sb3:PATH``: models of Stable-Baselines3 with the normalizer that lies beside them, told without loading."""

from __future__ import annotations

import functools
import logging
import re
import zipfile
from collections.abc import Collection
from pathlib import Path
from typing import Final

from rl_eval.config.policy_schemes import PolicyScheme, PolicySource, absolute, path_in
from rl_eval.errors import ConfigError
from rl_eval.integrations.sb3_facts import facts_of, trained_normalized

__all__ = ["NORMALIZERS", "SCHEMES", "normalizer_of", "unknown"]

_logger: Final = logging.getLogger(__name__)

NORMALIZERS: Final = "*vec*normalize*.pkl"
"""``vecnormalize.pkl`` of SB3's zoo and callbacks, ``vec_normalize.pkl`` of its models on the Hub."""
_ZOO: Final = ("args.yml", "config.yml")
"""What the zoo puts beside the normalizer of a run."""
_MASKABLE: Final = "sb3_contrib.common.maskable.policies"
"""Module of the class of a masked policy."""


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
        The verdict of :func:`~rl_eval.integrations.sb3_facts.trained_normalized`, and the file. None if it is not
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


SCHEMES: Final = {"sb3": PolicyScheme("sb3:PATH", _source, _recognises, suffix=".zip")}
