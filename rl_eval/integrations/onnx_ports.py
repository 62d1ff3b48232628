"""Roles of the inputs and outputs of an ONNX model: observations, states and actions."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import gymnasium as gym
import numpy as np

from rl_eval.errors import ConfigError, nearest
from rl_eval.policies.fixed_batch import note_on

Ports = Mapping[str, Any]
"""Inputs or outputs of a session by name, each with ``shape`` and ``type``. Free dimensions are not integers."""

_DIRECTIONS: Final = re.compile(r"(in|out)(puts?|s)?|prev|previous|last|next|new|initial|final")
"""Words that distinguish a state that a model takes from the state that it returns."""
_LOG_STD: Final = {"log_std", "logstd"}
_DTYPES: Final = {"float": "float32", "double": "float64"}
"""NumPy's names of types that have another name in ONNX."""
_FREE: Final = "Export the model with one free dimension in each input, that of the batch, by dynamic_axes."


@dataclass(frozen=True, slots=True)
class Roles:
    """Inputs and outputs by role."""

    observations: tuple[str, ...]
    """Inputs that take the observation, or the parts of a Dict of the same names."""
    states: Mapping[str, str]
    """The output that follows each recurrent input."""
    outputs: tuple[str, ...]
    """The output with actions or logits, and perhaps that with ``log_std``."""
    axes: Mapping[str, int]
    """Axis of the batch of each of these inputs and outputs."""
    dtypes: Mapping[str, np.dtype[Any]]
    """Dtypes of the inputs."""
    zeros: Mapping[str, tuple[int, ...]]
    """Shape of each recurrent input without the batch."""
    batch: int | None
    """Size of the batch; None if it is free."""
    notes: tuple[str, ...]
    """Notes for readers of the result."""


def _check_names(name: str, key: str, given: Iterable[str], known: Collection[str]) -> None:
    """Raise an error for the first name that the model does not have."""
    if (wrong := next((one for one in given if one not in known), None)) is not None:
        problem = f"policy_kwargs.{key} has {wrong!r}, which {name} does not have; {nearest(wrong, known)}"
        raise ConfigError(problem, key=f"policy.policy_kwargs.{key}", value=wrong)


def roles_of(
    name: str,
    takes: Ports,
    gives: Ports,
    observation_space: gym.Space[Any],
    *,
    states: Mapping[str, str] | None,
    outputs: Sequence[str],
) -> Roles:
    """Return the roles of a model's inputs and outputs.

    Args:
        name: Name of the model, for messages.
        takes: Inputs.
        gives: Outputs.
        observation_space: A space without parts, or a Dict.
        states: The output that follows each recurrent input; None to pair them by name.
        outputs: Outputs with actions or logits and ``log_std``. By default, the first output that is not a state, and
            one that is named ``log_std``.

    Raises:
        ConfigError: The inputs do not fit the observation space, or it is unclear which are states.
    """
    parts = dict(observation_space.spaces) if isinstance(observation_space, gym.spaces.Dict) else {}
    paired = _pairs(takes, gives, parts) if states is None else dict(states)
    seen = tuple(one for one in takes if one not in paired)
    rest = [one for one in gives if one not in paired.values()]
    chosen = tuple(outputs or [*rest[:1], *(one for one in rest[1:] if one.lower() in _LOG_STD)])
    spaces = parts or dict.fromkeys(seen[:1], observation_space)
    _check_names(name, "states", paired, takes)
    _check_names(name, "states", paired.values(), gives)
    _check_names(name, "outputs", chosen, gives)
    if not (seen and chosen and {*seen} <= {*spaces}):
        raise _unclear(name, takes, gives, observation_space)
    for one in seen:
        _check_fits(name, one, takes[one], spaces[one])
    first = takes[seen[0]].shape[0]
    culprit = next((one for one in (*seen, *paired) if all(map(_is_fixed, takes[one].shape))), None)
    batch = None if culprit is None else first if _is_fixed(first) else 1
    axes = dict.fromkeys(seen, 0) | {one: _axis(name, one, takes[one].shape, first, batch) for one in paired}
    unused = [one for one in rest if one not in chosen]
    notes = [f"actions are read from the output {chosen[0]!r} of {name}, and {unused} are not used"] if unused else []
    if culprit is not None and batch is not None:
        export = f"dynamic_axes={ {one: {axis: 'batch'} for one, axis in axes.items()} }, or with dynamic_shapes"
        notes.append(note_on(f"dimension {axes[culprit]} of the input {culprit!r} of {name}", batch, export))
    return Roles(
        observations=seen,
        states=paired,
        outputs=chosen,
        axes=axes | dict.fromkeys(chosen, 0) | {after: axes[before] for before, after in paired.items()},
        dtypes={one: _dtype(name, one, takes[one]) for one in axes},
        zeros={one: (*takes[one].shape[: axes[one]], *takes[one].shape[axes[one] + 1 :]) for one in paired},
        batch=batch,
        notes=tuple(notes),
    )


def _pairs(takes: Ports, gives: Ports, parts: Mapping[str, Any]) -> dict[str, str]:
    """Return inputs and outputs whose names differ only in direction or number, such as ``h_in`` and ``h_out``."""
    found: dict[str, str] = {}
    for stem in (_stem, _bare_stem):
        inputs = [one for one in takes if one not in found and one not in parts and stem(one)]
        for one in inputs:
            rivals = [other for other in inputs if stem(other) == stem(one)]
            same = [other for other in gives if other not in found.values() and stem(other) == stem(one)]
            if len(rivals) == len(same) == 1 and _agree(takes[one].shape, gives[same[0]].shape):
                found[one] = same[0]
    return found


def _stem(name: str) -> str:
    """Return the words of a name without directions; an empty string if no letters remain."""
    stem = "_".join(word for word in re.split(r"[^a-z0-9]+", name.lower()) if not _DIRECTIONS.fullmatch(word))
    return stem if re.search("[a-z]", stem) else ""


def _bare_stem(name: str) -> str:
    """Return the stem without a number at its end, or the ``n`` of ``h_n`` and ``c_n``."""
    return re.sub(r"_?\d+$|(?<=^[hc])_?n$", "", _stem(name))


def _agree(one: Sequence[Any], other: Sequence[Any]) -> bool:
    """Return whether two shapes are equal, where a free dimension has any size."""
    pairs = zip(one, other, strict=False)
    return len(one) == len(other) and all(a == b or not (_is_fixed(a) and _is_fixed(b)) for a, b in pairs)


def _is_fixed(size: Any) -> bool:
    return isinstance(size, int)


def _axis(name: str, port: str, shape: Sequence[Any], first: Any, batch: int | None) -> int:
    """Return the axis of the batch of a state: its free dimension, or one with the size of a fixed batch."""
    free = [axis for axis, size in enumerate(shape) if not _is_fixed(size)]
    axes = [axis for axis in free if shape[axis] == first] or free
    if not axes:
        axes = [axis for axis in sorted(range(len(shape)), key=lambda axis: axis != 1) if shape[axis] == batch]
        axes = axes[:1] if batch == 1 else axes  # Dimensions of size 1 can be exchanged.
    if len(axes) != 1 or len(free) > 1:
        problem = f"the batch of the state {port!r} of {name} is not clear from its shape {_shown(shape)}"
        raise ConfigError(problem, key="policy.policy_kwargs.states", value=port, fix=_FREE)
    return axes[0]


def _dtype(name: str, port: str, value: Any) -> np.dtype[Any]:
    """Return the dtype of an input."""
    kind = str(value.type).removeprefix("tensor(").removesuffix(")")
    try:
        return np.dtype(_DTYPES.get(kind, kind))
    except TypeError:
        problem = f"the input {port!r} of {name} has the type {value.type}, which NumPy does not have"
        raise ConfigError(problem, key="policy.policy", value=port, fix="Export the model in float32.") from None


def _check_fits(name: str, port: str, value: Any, space: gym.Space[Any]) -> None:
    """Check that an input takes batches of observations."""
    dtype = _dtype(name, port, value)
    fits = space.shape is not None and _agree(value.shape[1:], space.shape) and len(value.shape) > 0
    if not fits or not np.can_cast(space.dtype or np.float64, dtype, "same_kind"):
        problem = f"the input {port!r} of {name} has shape {_shown(value.shape)} and dtype {dtype}, but it gets {space}"
        fix = "Export the model for batches of these observations, or wrap the environment."
        raise ConfigError(problem, key="policy.policy", value=port, fix=fix)


def _unclear(name: str, takes: Ports, gives: Ports, space: gym.Space[Any]) -> ConfigError:
    """Return the error for a model whose observations, states or actions cannot be found by their names."""
    pairs = zip([*takes][1:], [*gives][1:], strict=False)
    mapping = ", ".join(f"{one}: {other}" for one, other in pairs) or "INPUT: OUTPUT"
    problem = (
        f"{name} has the inputs {_listed(takes)} and the outputs {_listed(gives)}. It is not clear which inputs take "
        f"{space}, and which are states"
    )
    fix = (
        f"Name the output that follows each state, as in policy_kwargs: {{states: {{{mapping}}}}}. The inputs for the "
        "parts of a Dict have the names of the parts."
    )
    return ConfigError(problem, key="policy.policy_kwargs.states", value=", ".join(takes), fix=fix)


def _listed(ports: Ports) -> str:
    return ", ".join(f"{one} {_shown(port.shape)}" for one, port in ports.items())


def _shown(shape: Sequence[Any]) -> str:
    return f"[{', '.join(map(str, shape))}]"
