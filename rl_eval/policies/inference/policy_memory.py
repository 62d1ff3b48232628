"""Memory of a policy between its calls: random generators, tensors, counters.

A policy whose actions depend on this state is not a function of its observations. ``rl-eval doctor`` compares the state
before and after the policy acts, and names the difference. The search goes through attributes, closures, containers and
the globals of functions. It visits the nearest objects first, and stops at a limit. It calls no code of the policy.
"""

from __future__ import annotations

import contextlib
import functools
import pickle
import random
import sys
import types
from collections import deque
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any, Final, NamedTuple

import numpy as np

from rl_eval.errors import listed
from rl_eval.policies import CallablePolicy
from rl_eval.policies.inference.probe import Probe, buffers_kept
from rl_eval.records.generators import changes, generator_states

_MOST_PARTS: Final = 2000
_MOST_BYTES: Final = 2**20
"""Bytes of one array that are hashed; the rest is ignored."""
_CONTAINERS: Final = (list, tuple, set, frozenset, deque)
_ENTRY_POINTS: Final = ("act", "forward", "__call__")
_TRAINED: Final = ("Dropout", "BatchNorm")
"""Prefixes of the class names of layers that give other results in training mode."""
_SCALARS: Final = (bool, int, float, complex, str, bytes, np.generic, type(None))


class Memory(NamedTuple):
    """Hashes of the state that a policy keeps, by name, at one moment."""

    generators: Mapping[str, int]
    """Random generators, including those of the process."""
    values: Mapping[str, int]


def remembered(policy: Any) -> Memory:
    """Return hashes of the state that a policy keeps, and of the process's random generators."""
    generators, values = generator_states(), dict[str, int]()
    for name, part in _parts(policy):
        with contextlib.suppress(Exception):  # Some objects cannot be inspected.
            if (state := _generator_state(part)) is not None:
                generators[name] = hash(state)
            elif (content := _content(part)) is not None:
                values[name] = hash(content)
    return Memory(generators, values)


def likely_cause_at(runner: Any) -> str:
    """Return the likely reason why a runner's policy does not repeat its results.

    Return an empty string if no reason is found, or if the policy cannot be inspected.
    """
    try:
        return likely_cause(runner.inference.new_probe())
    except Exception:  # Not every runner has one policy that can be inspected.
        return ""


def likely_cause(probe: Probe) -> str:
    """Return the likely reason why a policy does not repeat its results; an empty string if no reason is found."""
    policy, causes = probe.policy, []
    with buffers_kept(policy):
        probe.act_once()  # Some state, such as a cache, changes only in the first call.
        before = remembered(policy)
        probe.act_once()
        after = remembered(policy)
        probe.act_once(other=True)
        last = remembered(policy)
    if layers := _training_layers(policy):
        causes.append(f"{listed(layers, 3)} in training mode: call eval() on the module that has these layers")
    if drawn := changes(before.generators, after.generators):
        causes.append(
            f"the policy draws from {listed(drawn, 3)} when it acts: implement rl_eval.Policy, and draw from the "
            "noise argument of act()"
        )
    kept = changes(before.values, after.values) or changes(after.values, last.values)
    if kept and not causes:  # Values that depend on random numbers change as well.
        causes.append(
            f"the policy changes {listed(kept, 3)} when it acts, and keeps the change between calls: freeze this "
            "state, "
            "or declare it with initial_state()"
        )
    return "; ".join(causes)


def _training_layers(policy: Any) -> list[str]:
    """Return the dropout and batch norm layers in training mode, whose results differ in this mode."""
    found = []
    for name, part in _parts(policy):
        if _is(part, "nn", "Module") and part.training:
            kind = getattr(part, "original_name", type(part).__name__)  # TorchScript has one class for all layers.
            classes = (kind, *(cls.__name__.lstrip("_") for cls in type(part).__mro__))
            if any(cls.startswith(_TRAINED) for cls in classes):
                found.append(f"{name} ({kind})".strip())
    return found


def _is(part: Any, *path: str) -> bool:
    """Whether an object is an instance of the torch class at a path, such as ``"nn", "Module"``.

    False if torch is not imported.
    """
    torch: Any = sys.modules.get("torch")
    return torch is not None and isinstance(part, functools.reduce(getattr, path, torch))


# ---------------------------------------------------------------------- the walk


def _parts(policy: Any) -> Iterator[tuple[str, Any]]:
    """Yield every object that a policy refers to, with its name, nearest first."""
    waiting = deque([("", policy.function if isinstance(policy, CallablePolicy) else policy)])
    seen: dict[int, Any] = {}
    while waiting and len(seen) < _MOST_PARTS:
        name, part = waiting.popleft()
        if isinstance(part, _SCALARS):
            yield name, part
        elif id(part) not in seen:
            seen[id(part)] = part  # Keep the object, otherwise another object could get its id.
            yield name, part
            with contextlib.suppress(Exception):  # Some objects cannot be walked, or another thread changes them.
                waiting.extend([(_joined(name, key), child) for key, child in islice(_children(part), _MOST_PARTS)])


def _joined(name: str, key: str) -> str:
    return name + key if key.startswith("[") or not (name and key) else f"{name}.{key}"


def _children(part: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(part, dict):
        yield from ((f"[{key!r}]", item) for key, item in part.items())
    elif isinstance(part, _CONTAINERS):
        yield from ((f"[{place}]", item) for place, item in enumerate(part))
    elif isinstance(part, functools.partial):
        yield from (("", part.func), ("", part.args), ("", part.keywords))
    elif isinstance(part, types.MethodType):
        yield from (("", part.__self__), ("", part.__func__))
    elif isinstance(part, types.FunctionType):
        yield from _children_of_function(part)
    elif not isinstance(part, (type, types.ModuleType, np.ndarray)):
        yield from _attributes(part)


def _children_of_function(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """Yield the objects in which a function can keep state: closure, attributes, defaults, and the globals it uses."""
    code, names = function.__code__, function.__globals__
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # A cell that is still empty.
            yield name, cell.cell_contents
    yield from vars(function).items()
    defaults = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
    yield from ((f"default {place} of {function.__name__}", item) for place, item in enumerate(defaults))
    for name in code.co_names:
        used = names.get(name)
        foreign = isinstance(used, types.FunctionType) and used.__globals__ is not names
        if not (used is None or foreign or isinstance(used, (type, types.ModuleType))):
            yield name, used


def _attributes(part: Any) -> Iterator[tuple[str, Any]]:
    """Yield an object's attributes, and its methods of :data:`_ENTRY_POINTS`."""
    own: Mapping[str, Any] = getattr(part, "__dict__", {})
    if _is(part, "Tensor"):
        return
    if _is(part, "nn", "Module"):
        yield from part.named_children()
        yield from part.named_buffers(recurse=False)
        yield from part.named_parameters(recurse=False)
        own = {key: item for key, item in own.items() if key not in _framework_keys()}
    yield from ((key, item) for key, item in own.items() if not key.startswith("__"))
    for name in _ENTRY_POINTS:
        method = getattr(type(part), name, None)
        if isinstance(method, types.FunctionType) and not method.__module__.startswith("torch."):
            yield "", method


@functools.cache
def _framework_keys() -> frozenset[str]:
    """Return the names of attributes that every module has, or in which a compiled module keeps its compiler."""
    return frozenset(vars(sys.modules["torch"].nn.Module())) | {"forward", "dynamo_ctx", "_c", "_concrete_type"}


# ---------------------------------------------------------------------- contents


def _generator_state(part: Any) -> bytes | None:
    if isinstance(part, random.Random):
        return pickle.dumps(part.getstate())
    if isinstance(part, (np.random.Generator, np.random.RandomState, np.random.BitGenerator)):
        return pickle.dumps(part)
    return part.get_state().numpy().tobytes() if _is(part, "Generator") else None


def _content(part: Any) -> Any:
    """Return the hashable content of a part; None for a part without its own content."""
    if isinstance(part, _SCALARS):
        return repr(part)
    if isinstance(part, (dict, *_CONTAINERS)):
        return len(part)
    if _is(part, "nn", "Parameter"):
        return id(part), part._version
    if _is(part, "Tensor"):
        flat = part.detach().reshape(-1)[: _MOST_BYTES // part.element_size()].cpu()
        part = flat.view(sys.modules["torch"].uint8).numpy()
    return part.reshape(-1)[: _MOST_BYTES // max(1, part.itemsize)].tobytes() if isinstance(part, np.ndarray) else None
