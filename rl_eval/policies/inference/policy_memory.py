"""Memory of a policy between its calls: random generators, tensors, counters.

A policy whose actions depend on such things is not a function of its observations. ``rl-eval doctor``, and a
determinism check that failed, compare them before and after the policy acts, and name the difference. The search goes
through attributes, closures, containers and the globals that a function uses, nearest first and up to a limit, and
calls nothing of the policy's.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import pickle
import random
import sys
import types
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from typing import Any, Final, NamedTuple

import numpy as np

from rl_eval.policies import CallablePolicy
from rl_eval.weights import module_of

__all__ = ["Memory", "changes", "likely_cause", "module_tensors_kept", "remembered", "weights_digest"]

_GLOBAL_GENERATORS: Final = ("Python's global generator", "numpy's global generator", "torch's global generator")

_MOST_PARTS: Final = 2000
_MOST_BYTES: Final = 2**20
"""Of one array; what lies behind them is not looked at."""
_LARGEST_BUFFER: Final = 2**26
_CONTAINERS: Final = (list, tuple, set, frozenset, deque)
_ENTRY_POINTS: Final = ("act", "forward", "__call__")
_TRAINED: Final = ("Dropout", "BatchNorm")
"""Beginnings of the names of layers, or their bases, that compute something else while training."""
_SCALARS: Final = (bool, int, float, complex, str, bytes, np.generic, type(None))


class Memory(NamedTuple):
    """Digests of the state that a policy keeps, by name, at one moment."""

    generators: Mapping[str, str]
    """The process's own generators are always among them."""
    values: Mapping[str, str]


def changes(before: Mapping[str, str], after: Mapping[str, str]) -> list[str]:
    """Return the names whose digest changed; a name that is new may be a cache."""
    return [name for name, digest in before.items() if name in after and after[name] != digest]


def remembered(policy: Any) -> Memory:
    """Return digests of the state that a policy keeps; of None, those of the process's generators."""
    generators = dict(zip(_GLOBAL_GENERATORS, map(_digest, _global_states()), strict=False))
    values: dict[str, str] = {}
    for name, part in _parts(policy):
        with contextlib.suppress(Exception):  # Whatever this is, it cannot be looked at.
            if (state := _generator_state(part)) is not None:
                generators[name] = _digest(state)
            elif (content := _content(part)) is not None:
                values[name] = _digest(content)
    return Memory(generators, values)


def likely_cause(policy: Any, act: Callable[[], None], act_on_others: Callable[[], None]) -> str:
    """Return the likely reason why a policy does not repeat itself; empty if nothing that it keeps shows one.

    Args:
        policy: The policy, also as it comes: a function, a module.
        act: Asks it for actions, always for the same observations.
        act_on_others: Asks it for actions for other observations.
    """
    act()  # What a first call leaves behind, such as a cache, changes only once.
    before = remembered(policy)
    act()
    after = remembered(policy)
    act_on_others()
    causes = []
    if layers := _training_layers(policy):
        causes.append(f"{_listed(layers)} in training mode: call eval() on the module that has them")
    if drawn := changes(before.generators, after.generators):
        causes.append(
            f"acting draws from {_listed(drawn)}: implement rl_eval.Policy, and draw from the noise argument of act()"
        )
    kept = changes(before.values, after.values) or changes(after.values, remembered(policy).values)
    if kept and not causes:  # Whatever chance has decided changes as well.
        causes.append(
            f"acting changes {_listed(kept)}, which the policy keeps between calls: freeze it, or declare it by "
            "initial_state()"
        )
    return "; ".join(causes)


def _listed(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _training_layers(policy: Any) -> list[str]:
    """Return the layers in training mode that then compute something else: dropout and batch norm."""
    torch = sys.modules.get("torch")
    if torch is None:
        return []
    found = []
    for name, part in _parts(policy):
        if isinstance(part, torch.nn.Module) and part.training:
            kind = getattr(part, "original_name", type(part).__name__)  # TorchScript has one class for all.
            classes = (kind, *(cls.__name__.lstrip("_") for cls in type(part).__mro__))
            if any(cls.startswith(_TRAINED) for cls in classes):
                found.append(f"{name} ({kind})".strip())
    return found


def weights_digest(policy: Any) -> str:
    """Return a digest of the beginning of each tensor of a policy's weights; empty without a module."""
    module = module_of(policy)
    if module is None:
        return ""
    digests = []
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        with contextlib.suppress(Exception):  # One that is not initialized has no content.
            digests.append(f"{name} {_digest(_tensor_content(tensor))}")
    return _digest("\n".join(digests).encode())


@contextlib.contextmanager
def module_tensors_kept(policy: Any) -> Iterator[None]:
    """Put buffers back that forward passes changed: statistics of a live policy are its trainer's."""
    torch = sys.modules.get("torch")
    if torch is None:
        yield
        return
    modules = [part for _, part in _parts(policy) if isinstance(part, torch.nn.Module)]
    buffers = [buffer for module in modules for buffer in module.buffers(recurse=False)]
    small = [buffer for buffer in buffers if buffer.numel() * buffer.element_size() <= _LARGEST_BUFFER]
    with torch.no_grad():
        former = [buffer.clone() for buffer in small]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, saved in zip(small, former, strict=True):
                if not torch.equal(buffer, saved):
                    buffer.copy_(saved)


# ---------------------------------------------------------------------- the walk


def _parts(policy: Any) -> Iterator[tuple[str, Any]]:
    """Yield everything that a policy holds, with its name, nearest first."""
    waiting = deque([("", policy.function if isinstance(policy, CallablePolicy) else policy)])
    seen: dict[int, Any] = {}
    while waiting and len(seen) < _MOST_PARTS:
        name, part = waiting.popleft()
        if isinstance(part, _SCALARS):
            yield name, part
        elif id(part) not in seen:
            seen[id(part)] = part  # Kept, or another object could get its id.
            yield name, part
            with contextlib.suppress(Exception):  # Whatever this is, it cannot be walked, or another thread changes it.
                waiting.extend([(_joined(name, key), child) for key, child in islice(_children(part), _MOST_PARTS)])


def _joined(name: str, key: str) -> str:
    if key.startswith("[") or not (name and key):
        return name + key
    return f"{name}.{key}"


def _children(part: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(part, (type, types.ModuleType, np.ndarray)):
        return
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
    else:
        yield from _attributes(part)


def _children_of_function(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """Yield what a function can keep things in: its closure, attributes, defaults, and the globals that it names."""
    code, names = function.__code__, function.__globals__
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # A cell that is still empty.
            yield name, cell.cell_contents
    yield from vars(function).items()
    yield from ((f"default {place} of {function.__name__}", item) for place, item in enumerate(_defaults(function)))
    for name in code.co_names:
        used = names.get(name)
        foreign = isinstance(used, types.FunctionType) and used.__globals__ is not names
        if not (used is None or foreign or isinstance(used, (type, types.ModuleType))):
            yield name, used


def _defaults(function: types.FunctionType) -> tuple[Any, ...]:
    return (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())


def _attributes(part: Any) -> Iterator[tuple[str, Any]]:
    """Yield an object's attributes, and of its methods those that make it act."""
    torch = sys.modules.get("torch")
    own: Mapping[str, Any] = getattr(part, "__dict__", {})
    if torch is not None and isinstance(part, torch.Tensor):
        return
    if torch is not None and isinstance(part, torch.nn.Module):
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
    """Return the attributes that every module has; a compiled one keeps its compiler in ``forward``."""
    return frozenset(vars(sys.modules["torch"].nn.Module())) | {"forward", "dynamo_ctx", "_c", "_concrete_type"}


# ---------------------------------------------------------------------- digests


def _global_states() -> Iterator[bytes]:
    yield pickle.dumps(random.getstate())
    yield pickle.dumps(np.random.get_state())  # noqa: NPY002
    if torch := sys.modules.get("torch"):
        states = [
            torch.random.get_rng_state(),
            *(torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else ()),
        ]
        yield b"".join(state.numpy().tobytes() for state in states)


def _generator_state(part: Any) -> bytes | None:
    torch = sys.modules.get("torch")
    if isinstance(part, random.Random):
        return pickle.dumps(part.getstate())
    if isinstance(part, (np.random.Generator, np.random.RandomState, np.random.BitGenerator)):
        return pickle.dumps(part)
    if torch is not None and isinstance(part, torch.Generator):
        return bytes(part.get_state().numpy().tobytes())
    return None


def _content(part: Any) -> bytes | None:
    torch = sys.modules.get("torch")
    if isinstance(part, _SCALARS):
        return repr(part).encode()
    if isinstance(part, (dict, *_CONTAINERS)):
        return str(len(part)).encode()
    if isinstance(part, np.ndarray):
        return _array_content(part)
    if torch is not None and isinstance(part, torch.nn.Parameter):
        return f"{id(part)} {part._version}".encode()
    if torch is not None and isinstance(part, torch.Tensor):
        return _tensor_content(part)
    return None


def _tensor_content(tensor: Any) -> bytes:
    flat = tensor.detach().reshape(-1)[: _MOST_BYTES // tensor.element_size()].cpu()
    return _array_content(flat.view(sys.modules["torch"].uint8).numpy())


def _array_content(array: np.ndarray[Any, Any]) -> bytes:
    return array.reshape(-1)[: _MOST_BYTES // max(1, array.itemsize)].tobytes()


def _digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=16).hexdigest()
