"""Statistics of normalizers: objects of other libraries, and files. This module does not import the libraries.

=====================================  ==============================================  ===========
normalizer                             formula                                         limit
=====================================  ==============================================  ===========
gymnasium ``NormalizeObservation``     ``(x - mean) / sqrt(var + epsilon)``            none
Stable-Baselines3 ``VecNormalize``     ``(x - mean) / sqrt(var + epsilon)``            ``clip_obs``
Tianshou ``VectorEnvNormObs``          ``(x - mean) / sqrt(var + eps)``                ``clip_max``
TorchRL ``ObservationNorm``            ``x * scale + loc`` or ``(x - loc) / scale``    none
TorchRL ``VecNorm``, ``VecNormV2``     ``(x - loc) / scale``                           none
rsl_rl ``EmpiricalNormalization``      ``(x - mean) / (std + eps)``                    none
skrl ``RunningStandardScaler``         ``(x - mean) / (sqrt(var) + epsilon)``          threshold
rl_games ``RunningMeanStd``            ``(x - mean) / sqrt(var + epsilon)``            5
RLlib ``MeanStdFilter``                ``(x - mean) / (std + 1e-8)``                   none
=====================================  ==============================================  ===========
"""

from __future__ import annotations

import io
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from rl_eval.bounded_read import check_inflation, open_zip, read_bytes, read_entry
from rl_eval.errors import ConfigError
from rl_eval.integrations.pickled_arrays import inert
from rl_eval.integrations.policy_files import reading
from rl_eval.weights import read_tensors

Array = npt.NDArray[Any]

_LARGE: Final = 2**26
_NAMES: Final[tuple[tuple[str, str, dict[str, Any]], ...]] = (
    ("mean", "var", {}),
    ("_mean", "_var", {"epsilon": 1e-2, "inside": False}),
    ("running_mean", "running_variance", {"epsilon": 1e-8, "inside": False, "clip": 5.0}),
    ("running_mean", "running_var", {"epsilon": 1e-5, "clip": 5.0}),
    ("loc", "scale", {}),
)
"""Names of the statistics in state dicts, and the default formula: those of ``Normalized``, rsl_rl, skrl, rl_games and
TorchRL."""
_CRITICS: Final = ("critic", "privileged", "reward", "value")
"""Texts in the names of statistics that do not normalize observations of the policy."""
_FORMULA: Final = {"clip": float, "epsilon": float, "inside": bool, "dtype": str}
_MODULES: Final = {
    "rsl_rl": {"epsilon": "eps"},
    "skrl": {"epsilon": "epsilon", "clip": "clip_threshold"},
    "rl_games": {"epsilon": "epsilon"},
}
"""Attributes of normalizers that are modules, by package and argument."""
_PACKAGES: Final = (*_MODULES, "gym", "gymnasium", "stable_baselines3", "tianshou", "torchrl")
_KNOWN: Final = (
    "Pass a NormalizeObservation of gymnasium, a VectorEnvNormObs of Tianshou, an ObservationNorm or VecNorm of "
    "TorchRL, a VecNormalize of Stable-Baselines3, an EmpiricalNormalization of rsl_rl, a RunningStandardScaler of "
    "skrl, a RunningMeanStd of rl_games or a file with mean and var; or pass mean and var to Normalized."
)


def frozen(source: Any) -> dict[str, Any]:
    """Return the statistics of a normalizer, as arguments of ``Normalized``: ``Normalized(policy, **frozen(env))``.

    The result is a copy of the statistics, with the formula and the dtype of the normalizer's library. Checkpoints do
    not contain ``epsilon`` and ``clip``, so for a checkpoint these are the default values of the library.

    Args:
        source: A normalizer: an object of a library in the table of this module, a wrapped environment of gymnasium,
            a state dict, or the path of a file. A file is an npz or safetensors file with ``mean`` and ``var``, a torch
            file with statistics, such as a checkpoint of rsl_rl, skrl or rl_games, a pickle of a normalizer, or a JSON
            file of ``save_filters``. No code of a file is run.

    Raises:
        ConfigError: The normalizer is unknown, has not seen an observation, or its file cannot be read. Or a wrapper
            changes the normalized observations.
    """
    if not isinstance(source, str | os.PathLike):
        return _frozen(source, f"a {type(source).__name__}")
    path = Path(source).expanduser()
    fix = "Write them with numpy.savez(FILE, **rl_eval.wrappers.frozen(NORMALIZER))."
    with reading("policy.normalizer", path, "statistics of a normalizer", fix):
        return _frozen(_read(path), str(path))


def _read(path: Path) -> Any:
    if path.suffix == ".npz":
        with open_zip(path) as archive:
            check_inflation(archive, path)
            return {
                name.removesuffix(".npy"): np.load(io.BytesIO(read_entry(archive, name, path, _LARGE)))
                for name in archive.namelist()
            }
    if path.suffix == ".json":
        from rl_eval.integrations.rllib.filters import load_filters

        (only,) = load_filters(path).values()
        return only
    if path.suffix in (".pkl", ".pickle"):
        return inert(read_bytes(path, _LARGE))
    return read_tensors(path)


def _frozen(source: Any, name: str) -> dict[str, Any]:
    package = _package_of(source)
    if hasattr(source, "moments"):
        found: dict[str, Any] = source.frozen()
        return found
    if isinstance(source, Mapping):
        return _of_tensors(source, name, {})
    if package == "torchrl" and "loc" in dir(source):
        return _of_transform(source, name)
    if hasattr(source, "original_name"):  # Of TorchScript, as the normalizers of rl_games.
        package = "rl_games"
    if package in _MODULES and not any(getattr(part, "norm_only", False) for part in source.modules()):
        named = [(key, name, part) for key, name in _MODULES[package].items() for part in source.modules()]
        own = {key: getattr(part, attribute) for key, attribute, part in named if hasattr(part, attribute)}
        return _of_tensors(source.state_dict(), name, own)
    return _of_environment(source, name)


def _package_of(value: Any) -> str:
    packages = [base.__module__.partition(".")[0] for base in type(value).__mro__]
    return next((one for one in packages if one in _PACKAGES), "")


def _arguments(parts: Mapping[str, Mapping[str, Any]], formula: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments for statistics by path, each with arrays by name; plain arrays for the only path ``""``."""
    names = next(iter(parts.values()))
    formula = {name: value for name, value in formula.items() if value is not None}  # None is an object in an npz file.
    if parts.keys() == {""}:
        return {**names, **formula}
    return {**{name: {path: one[name] for path, one in parts.items()} for name in names}, **formula}


def _array(value: Any) -> Array:
    array = np.array(value.numpy(force=True) if hasattr(value, "detach") else value)
    if array.dtype.kind not in "fiu" or not np.isfinite(array).all():
        raise ValueError("statistics must be finite numbers")
    return array


# ---------------------------------------------------------------------- environments


def _of_environment(source: Any, name: str) -> dict[str, Any]:
    owner, package = _normalizer_in(source, name)
    rms = vars(owner).get("obs_rms", owner)
    if package == "tianshou":
        formula = {"clip": rms.clip_max or None, "epsilon": rms.eps}
    elif package == "stable_baselines3":
        formula = {"clip": owner.clip_obs, "epsilon": owner.epsilon}
    else:
        formula = {"epsilon": getattr(owner, "epsilon", 1e-8)}
    parts = {
        path: {"mean": _array(one.mean), "var": _array(one.var)}
        for path, one in (rms if isinstance(rms, Mapping) else {"": rms}).items()
    }
    if all((one["mean"] == 0).all() and (one["var"] == 1).all() for one in parts.values()):
        raise _unseen(name)
    of_space = getattr(getattr(owner, "single_observation_space", None), "dtype", np.dtype(np.float32))
    if package in ("gym", "tianshou") or of_space.kind != "f":
        of_space = next(iter(parts.values()))["mean"].dtype
    formula["dtype"] = str(of_space)
    return _arguments(parts, formula)


def _normalizer_in(source: Any, name: str) -> tuple[Any, str]:
    """Return the only normalizer of observations in an environment, or the statistics alone; and their library."""
    found, changing, path = [], "", "env"
    outer = inner = source
    while hasattr(inner, "__dict__"):
        held, outer = vars(inner), inner
        if "obs_rms" in held or {"mean", "var"} <= held.keys():
            found.append((outer, path))
        inside = "venv" if "venv" in held else "env"
        inner, path = held.get(inside), f"{path}.{inside}"
        if not found and inner is not None and _changes(outer, inner):
            changing = type(outer).__name__
    owner, path = found[0] if len(found) == 1 and getattr(found[0][0], "norm_obs", True) else (None, "")
    package = _package_of(owner)
    if not package or (package == "stable_baselines3" and not hasattr(owner, "clip_obs")):
        problem = f"the statistics of {name} are unknown: it has {len(found)} normalizers of observations"
        several = "Each of its environments has its own. Pass one: frozen(envs.envs[0])."
        fix = several if hasattr(outer, "envs") else _KNOWN
        raise ConfigError(problem, key="policy.normalizer", value=name, fix=fix)
    if changing:
        problem = f"{changing} changes the observations of {name} after their normalization"
        fix = (
            f"Pass the normalizer itself, frozen({path}). If the wrapper limits numbers to [-10, 10], pass "
            f"Normalized(policy, **{{**frozen({path}), 'clip': 10.0}})."
        )
        raise ConfigError(problem, key="policy.normalizer", value=changing, fix=fix)
    return owner, package


def _changes(wrapper: Any, env: Any) -> bool:
    """Return whether a wrapper changes observations."""
    methods = ("observation", "observations")
    return any(callable(getattr(type(wrapper), name, None)) for name in methods) or (
        getattr(wrapper, "observation_space", None) != getattr(env, "observation_space", None)
    )


# ---------------------------------------------------------------------- modules and their state dicts


def _of_transform(transform: Any, name: str) -> dict[str, Any]:
    if not getattr(transform, "initialized", True) or getattr(transform, "_td", transform) is None:
        raise _unseen(name)
    keys = [key for key in transform.in_keys if key != "reward"]
    leaves = {}
    for key in keys:
        path = "" if keys == ["observation"] else "/".join((key, "") if isinstance(key, str) else (*key, ""))
        for part in ("loc", "scale"):
            value = getattr(transform, part)
            leaves[path + part] = value.get(key) if hasattr(value, "get") else value
        leaves[f"{path}standard_normal"] = transform.standard_normal
    return _of_tensors(leaves, name, {})


def _affine(loc: Array, scale: Array, standard: Any) -> dict[str, Array]:
    """Return the statistics of ``(x - loc) / scale`` or ``x * scale + loc``. A root of a square is exact."""
    if standard:
        return {"mean": loc, "var": scale * scale}
    return {"mean": -loc, "var": np.ones_like(loc), "factor": scale}


def _of_tensors(state: Mapping[str, Any], name: str, own: Mapping[str, Any]) -> dict[str, Any]:
    """Return the only statistics in a state dict, which can contain other state dicts.

    Args:
        state: The state dict.
        name: Name of the normalizer, for messages.
        own: Arguments of the formula that differ from the defaults of the library.
    """
    leaves = dict(_leaves(state))
    groups = [
        (prefix, mean, var, formula)
        for mean, var, formula in _NAMES
        for prefix in dict.fromkeys(re.sub(r"[^./]*$", "", one) for one in leaves)
        if {prefix + mean, prefix + var} <= leaves.keys()
        and f"{prefix}num_batches_tracked" not in leaves
        and not any(text in prefix for text in _CRITICS)
    ]
    # In skrl, the state is that of the critic if there is also an observation.
    groups = [one for one in groups if "observation_preprocessor" in one[0]] or groups
    paths = {_path(prefix) for prefix, *_ in groups}
    if not groups or len(paths) < len(groups) or len({one[1:3] for one in groups}) > 1:
        there = ", ".join(prefix + mean for prefix, mean, *_ in groups) or "none"
        problem = f"{name} must contain the mean and the variance of one normalizer of observations; found: {there}"
        fix = "Pass one of its parts: Normalized(policy, **frozen(STATE_DICT))." if groups else _KNOWN
        raise ConfigError(problem, key="policy.normalizer", value=name, fix=fix)
    said = {key: convert(leaves[key]) for key, convert in _FORMULA.items() if key in leaves}
    formula = {**groups[0][3], **own, **said}
    parts = {_path(prefix): _part(leaves, prefix, mean, var, formula) for prefix, mean, var, _ in groups}
    if groups[0][1] == "loc":
        return _arguments(parts, {"epsilon": 0.0, "dtype": str(next(iter(parts.values()))["mean"].dtype)})
    if groups[0][1] != "mean" and not any(_array(leaves[prefix + mean]).any() for prefix, mean, *_ in groups):
        raise _unseen(name)
    return _arguments(parts, formula | ({"epsilon": 0.0} if groups[0][2] == "running_var" else {}))


def _leaves(state: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in state.items():
        if isinstance(value, Mapping):
            yield from ((f"{key}.{name}", leaf) for name, leaf in _leaves(value))
        else:
            yield str(key), value


def _path(prefix: str) -> str:
    """Return the path of an observation part: ``a/b`` of ``a/b/``, and ``a`` of rl_games' ``running_mean_std.a.``."""
    of_rl_games = re.search(r"running_mean_std\.([^.]+)\.$", prefix)
    if of_rl_games and of_rl_games[1] != "running_mean_std":
        return of_rl_games[1]
    return prefix.rpartition(".")[2].rstrip("/")


def _part(leaves: Mapping[str, Any], prefix: str, mean: str, var: str, formula: Mapping[str, Any]) -> dict[str, Array]:
    """Return the arrays of a normalizer. Torch's roots are squared, because they can differ from those of NumPy."""
    centre, spread = leaves[prefix + mean], leaves[prefix + var]
    if mean == "loc":
        return _affine(_array(centre), _array(spread), leaves.get(f"{prefix}standard_normal", False))
    if mean == "mean":
        more = {name: _array(leaves[prefix + name]) for name in ("factor", "count") if prefix + name in leaves}
        return {"mean": _array(centre), "var": _array(spread), **more}
    if mean == "_mean":
        return _affine(_array(centre)[0], _array(leaves[f"{prefix}_std"])[0], True)
    inside = formula["epsilon"] if var == "running_var" else 0.0
    return _affine(_array(centre.float()), _array((spread.float() + inside).sqrt()), True)


def _unseen(name: str) -> ConfigError:
    problem = f"the statistics of {name} are uninitialized: they have not seen an observation"
    fix = "Pass the normalizer of the training, after the training."
    return ConfigError(problem, key="policy.normalizer", value=name, fix=fix)
