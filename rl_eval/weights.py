"""Snapshots of a policy's weights, and their files.

A snapshot is one contiguous byte buffer and a table of names, dtypes, shapes and offsets. It is written to the object
store in one piece. Every runner on a node maps it without a copy, and copies it into the policy's tensors in place. It
contains parameters, buffers (persistent or not) and the ``get_extra_state`` of every submodule, so normalizers keep
their statistics. A snapshot is a copy: later training steps do not change it.

A module can have other state, such as tensors that are plain attributes, or the packed parameters of a quantized layer.
A snapshot has only digests of this state. A policy whose state differs rejects the snapshot.

torch is imported only inside functions, because an actor's process must not import torch before the user's code.
"""

from __future__ import annotations

import copy
import errno
import pickle
import re
import sys
import warnings
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, final
from zipfile import BadZipFile, ZipFile, is_zipfile

import numpy as np
import numpy.typing as npt

from rl_eval.adapters import integration_for
from rl_eval.atomic_write import write_atomically
from rl_eval.bounded_read import BoundedFile, open_zip
from rl_eval.errors import ConfigError, WeightsError
from rl_eval.records.plain import canonical_digest

if TYPE_CHECKING:
    import torch


_ALIGNMENT: Final = 64
_EXTRA_STATE: Final = "_extra_state"
_NO_EXTRA_STATE: Final = pickle.dumps({}, protocol=4)
"""Bytes that are hashed if there is no extra state. The digests in logs depend on these bytes."""
_TRIES: Final = 5
"""Number of tries to copy weights that another thread changes."""
_COMPILED: Final = "_orig_mod."
"""Prefix of names, added by torch.compile."""
_WRAPPED: Final = re.compile(r"(^|\.)module\.")
"""Prefix of names, added by DistributedDataParallel."""
_PICKLED: Final = re.compile(r"Unsupported (?:global|class): (?:GLOBAL )?([\w.]+)")
"""Part of torch's error message with the class that torch rejects."""


class TensorEntry(NamedTuple):
    """Place of one tensor in the buffer."""

    name: str
    dtype: str
    """Name of the torch dtype, such as ``float32``."""
    shape: tuple[int, ...]
    offset: int
    num_bytes: int


@dataclass(frozen=True)
class WeightsSnapshot:
    """One version of a policy's weights."""

    version: int
    entries: tuple[TensorEntry, ...]
    buffer: npt.NDArray[np.uint8]
    """All tensors, shape (num_bytes,); read-only in runners."""
    extra_state: bytes
    """Pickled ``{name: get_extra_state()}``."""
    extra_digest: bytes = b""
    """Canonical digest of the extra state; empty if there is no extra state."""
    other_state: Mapping[str, bytes] = field(default_factory=dict)
    """Digests of the state of modules that is neither in ``entries`` nor in ``extra_state``, by name."""
    versions: Mapping[str, int] = field(default_factory=dict)
    """With several policies, the version of each policy's latest weights. A policy that is missing here has version
    0."""

    @cached_property
    def digest(self) -> str:
        """Digest of the snapshot: 128-bit xxh3 over names, dtypes, shapes, bytes and extra state."""
        import xxhash

        digest = xxhash.xxh3_128()
        digest.update(repr([entry[:3] for entry in self.entries]).encode())
        digest.update(self.buffer.data)
        digest.update(self.extra_digest or _NO_EXTRA_STATE)
        return digest.hexdigest()

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the tensors by name, as views of the buffer."""
        return {entry.name: _view(self.buffer, entry) for entry in self.entries}


@final
class HeldWeights:
    """Weights of an evaluation, from its start until its result is delivered."""

    def __init__(self) -> None:
        self.snapshot: WeightsSnapshot | None = None

    def release(self) -> None:
        """Drop the weights."""
        self.snapshot = None


def snapshot_weights(weights: Any, version: int) -> WeightsSnapshot:
    """Copy weights into a snapshot.

    Args:
        weights: An ``nn.Module``, a state dict, a ``TensorDict``, or a mapping of names to any of these.
        version: Version of the weights. Every record that is made with these weights contains it.

    Raises:
        WeightsError: ``weights`` is of another type, or contains a tensor that is not dense or has no values. Or
            another thread changes the weights while they are copied.
    """
    for _ in range(_TRIES):
        tensors, extra = _collect(weights)
        before = _write_counts(tensors)
        snapshot = _snapshot(tensors, extra, version)
        changed = [name for name, count in _write_counts(tensors).items() if count != before[name]]
        if not changed:
            return replace(snapshot, other_state=_other_state(weights, ""))
    raise WeightsError(
        f"weights {_some(changed)} changed while they were copied, so the copy would mix two training steps",
        key=changed[0],
        fix="Hold a lock that the training thread holds during a step, or pass a copy made between two steps.",
    )


def check_tensors(weights: Any) -> None:
    """Check that a snapshot can contain all tensors of some weights.

    Raises:
        WeightsError: As for :func:`snapshot_weights`.
    """
    _collect(weights)


def _write_counts(tensors: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """Return the number of in-place writes to each tensor, which torch counts except in inference mode."""
    return {name: 0 if tensor.is_inference() else tensor._version for name, tensor in tensors.items()}


def _snapshot(tensors: Mapping[str, torch.Tensor], extra: Mapping[str, Any], version: int) -> WeightsSnapshot:
    entries, offset = [], 0
    for name, tensor in sorted(tensors.items()):
        entries.append(TensorEntry(name, _dtype(tensor), tuple(tensor.shape), offset, tensor.nbytes))
        offset += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
    buffer = np.zeros(offset, np.uint8)  # Gaps are zero, so that equal weights have equal digests.
    for entry in entries:
        if entry.num_bytes:
            source: Any = tensors[entry.name]
            _view(buffer, entry).copy_(source.to_local() if is_distributed(source) else source)
    digest = canonical_digest(extra) if extra else b""
    try:
        pickled = pickle.dumps(dict(sorted(extra.items())))
    except Exception as error:
        problem = f"the extra state of the weights, {_some(sorted(extra))}, cannot be pickled: {error}"
        fix = "Return only values that can be pickled from get_extra_state()."
        raise WeightsError(problem, key=min(extra), fix=fix) from error
    return WeightsSnapshot(version, tuple(entries), buffer, pickled, digest)


def apply_weights(
    snapshot: WeightsSnapshot, module: torch.nn.Module, act: Callable[[bool], object] | None = None
) -> None:
    """Copy a snapshot into the tensors of a module, in place. If an error is raised, its tensors have not changed.

    Args:
        snapshot: The weights.
        module: The module.
        act: Lets the policy of the module act, on different observations for False and True. It is called if other
            state differs, to leave out the values that forward passes keep.

    Raises:
        WeightsError: A tensor is missing, unknown or uninitialized, or has another shape or dtype. Or the module
            rejects the extra state, or has other state that differs.
    """
    import torch

    module = _bare(module)  # As for a snapshot, names are those inside wrappers.
    targets, required = _tensors_of(module)
    sources = {_resolve(entry.name, targets): entry for entry in snapshot.entries}
    _check_names(sources.keys(), targets.keys(), required)
    _check_other_state(snapshot, module, act)
    for name, target in targets.items():
        if name in sources:
            _check_tensor(name, sources[name], target)
    _apply_extra_state(pickle.loads(snapshot.extra_state), module)
    with torch.no_grad():
        for name, entry in sources.items():
            if entry.num_bytes:
                target, view = targets[name], _view(snapshot.buffer, entry)
                if 0 in target.stride():  # Of an expanded tensor, several elements share one place in memory.
                    target.data = view.clone()
                else:
                    target.copy_(view)


def load_weights_file(path: str | Path, key: str | None = None) -> dict[str, torch.Tensor]:
    """Read a safetensors file or a torch file, without running code in it.

    Args:
        path: The file.
        key: Key of the weights in a file that contains more, such as ``"model"`` in
            ``{"model": ..., "optimizer": ...}``. ``"a.b"`` selects the key ``b`` inside ``a``, or all names that begin
            with ``a.b.``, without this prefix.

    Raises:
        ConfigError: The file is missing, damaged, or a pickle that ``weights_only=True`` rejects, or it has no weights
            at ``key``.
    """
    path = Path(path)
    if not path.is_file():
        raise ConfigError(f"policy.weights: there is no file {str(path)!r}", key="policy.weights", value=str(path))
    try:
        loaded = read_tensors(path)
    except Exception as error:
        problem, fix = _explain_unreadable(path, error)
        raise ConfigError(f"policy.weights: {problem}", key="policy.weights", value=str(path), fix=fix) from None
    found = loaded if key is None else _select(loaded, key, path)
    if not _is_flat(found):
        raise _wrong_structure(found, key, path)
    return dict(found)


def save_weights_file(snapshot: WeightsSnapshot, path: str | Path) -> None:
    """Write a file atomically that :func:`load_weights_file` can read.

    Raises:
        WeightsError: The weights have extra state that is not a tensor, and the file is a safetensors file.
    """
    import torch
    from safetensors.torch import save_file

    path = Path(path)
    if path.suffix == ".safetensors":
        tensors = tensors_of(snapshot, f"Pass a name that ends in .pt instead of {str(path)!r}.")
        write_atomically(path, lambda temporary: save_file(tensors, temporary))
    else:
        write_atomically(path, lambda temporary: torch.save(_contents_of(snapshot), temporary))


def tensors_of(snapshot: WeightsSnapshot, advice: str = "") -> dict[str, torch.Tensor]:
    """Return all weights of a snapshot by name, for a safetensors file.

    Args:
        snapshot: The weights. The returned tensors are views of its buffer.
        advice: Next step of the user, for the error message.

    Raises:
        WeightsError: The weights have extra state that is not a tensor.
    """
    import torch

    contents = _contents_of(snapshot)
    if odd := [name for name, value in contents.items() if not isinstance(value, torch.Tensor)]:
        problem = (
            f"the weights have extra state that is not a tensor, {_some(odd)}; a safetensors file cannot contain it"
        )
        raise WeightsError(problem, key=odd[0], fix=advice)
    return contents


def read_tensors(path: Path, inside: bytes | None = None) -> Any:
    """Return the content of a file of weights, without running code of the file.

    Args:
        path: The file.
        inside: Content of a torch file that is a part of the file; None if the whole file is read.

    Raises:
        Exception: The file cannot be read; see the libraries of the formats.
    """
    if path.suffix == ".safetensors":
        from safetensors.torch import load_file

        with BoundedFile(path) as file:
            file.read(int.from_bytes(file.read(8), "little"))  # The header, which is parsed before anything is checked.
        return load_file(path)
    with suppress(BadZipFile), open_zip(path) if inside is None else ZipFile(BytesIO(inside)) as archive:
        if any(entry.compress_type for entry in archive.infolist()):  # A pickle can take 70 times its inflated size.
            raise OSError(errno.EINVAL, "its entries are compressed, which torch.save does not do", str(path))
    import torch

    with warnings.catch_warnings(), torch.serialization.safe_globals(_numpy_scalars()):
        warnings.simplefilter("ignore")  # We raise an error instead of torch's warning.
        return torch.load(path if inside is None else BytesIO(inside), map_location="cpu", weights_only=True)


def _numpy_scalars() -> list[Any]:
    """Return the functions and classes that a pickle of a NumPy scalar names. Checkpoints contain such scores."""
    scalar: Any = np.float32().__reduce__()[0]
    kinds = {type(np.dtype(code)) for code in np.typecodes["AllInteger"] + np.typecodes["AllFloat"] + "?"}
    return [(scalar, f"numpy.{package}.multiarray.scalar") for package in ("core", "_core")] + [np.dtype, *kinds]


def _explain_unreadable(path: Path, error: Exception) -> tuple[str, str]:
    """Return the reason why a file cannot be read, and the next step.

    From torch's message, only the rejected class is used.
    """
    name = repr(str(path))
    refused = _PICKLED.search(str(error))
    if refused or (isinstance(error, pickle.UnpicklingError) and _was_pickled(path)):
        example = f" (such as {refused[1]})" if refused else ""
        save = "safetensors.torch.save_file(module.state_dict(), 'x.safetensors')"
        return (
            f"{name} contains pickled objects, which could run code when loaded{example}",
            f"Pass a whole module as policy torch_module:{path} (--trust), or save only the weights with {save}.",
        )
    if isinstance(error, OSError):
        return f"{name} cannot be read: {error.strerror or error}", ""
    kind, other = ("safetensors", ".pt") if path.suffix == ".safetensors" else ("torch", ".safetensors")
    return (
        f"{name} is not a complete {kind} file of weights ({type(error).__name__})",
        f"If it is a {other} file, rename it. For a TorchScript archive, save its state_dict(). Otherwise, save again.",
    )


def _was_pickled(path: Path) -> bool:
    """Whether a file looks like a pickle or an archive of ``torch.save``."""
    with path.open("rb") as file:
        return file.read(1) == pickle.PROTO or is_zipfile(file)


def _select(loaded: Any, key: str, path: Path) -> Any:
    """Return the weights at a dotted key in nested mappings.

    A part of the key may also be a prefix that several names have in common. The prefix is removed from the names.
    """
    found = loaded
    for part in key.split("."):
        inner = found if isinstance(found, Mapping) else {}
        within = {name.removeprefix(f"{part}."): inner[name] for name in inner if str(name).startswith(f"{part}.")}
        found = inner.get(part, within)
        if isinstance(found, Mapping) and not found:
            there = _contents(inner or loaded)
            problem = f"policy.weights_key is {key!r}, but there is no {part!r} in {str(path)!r}: {there}"
            raise ConfigError(problem, key="policy.weights_key", value=key)
    return found


def _is_flat(value: Any) -> bool:
    return isinstance(value, Mapping) and all(
        isinstance(name, str) and (hasattr(item, "numel") or _is_extra_state(name)) for name, item in value.items()
    )


def _wrong_structure(found: Any, key: str | None, path: Path) -> ConfigError:
    """Return the error for a file without weights at a key.

    The error names the contents, and the keys that may contain the weights.
    """
    place = f"policy.weights: {str(path)!r}" if key is None else f"policy.weights_key: {key!r} of {str(path)!r}"
    inner = found if isinstance(found, Mapping) else {}
    fitting = [str(name) for name, value in inner.items() if value and _is_flat(value)]
    prefix = "" if key is None else f"{key}."
    return ConfigError(
        f"{place} must contain a flat mapping of names to tensors: {_contents(found)}",
        key="policy.weights" if key is None else "policy.weights_key",
        value=str(path) if key is None else key,
        fix=f"Set policy.weights_key to {prefix}{' or '.join(fitting)}." if fitting else "",
    )


def _contents(value: Any) -> str:
    if isinstance(value, Mapping):
        return f"found the keys {_some([str(name) for name in value], 12)}"
    return f"found a {type(value).__name__}"


def _collect(weights: Any) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Return tensors and extra state by name, from any form of weights."""
    import torch

    tensors: dict[str, torch.Tensor] = {}
    extra: dict[str, Any] = {}
    for name, value in _flatten(weights, ""):
        if _is_extra_state(name):
            extra[name] = value
        elif not isinstance(value, torch.Tensor):
            raise WeightsError(f"weights {name!r} are a {type(value).__name__}, not a tensor", key=name)
        elif torch.nn.parameter.is_lazy(value):
            fix = "Run the module once before you send its weights."
            raise WeightsError(f"weights {name!r} are uninitialized", key=name, fix=fix)
        elif kind := _unsupported(value):
            fix = (
                "Pass dense tensors with values; gather sharded ones with torch's get_model_state_dict in each process."
            )
            raise WeightsError(f"weights {name!r} are a {kind}, which cannot be copied", key=name, value=kind, fix=fix)
        else:
            tensors[name] = value.detach()
    return tensors, extra


def _unsupported(tensor: Any) -> str:
    """Return the kind of a tensor that a snapshot cannot contain; an empty string for a dense tensor with values."""
    import torch

    parts = zip(tensor.placements, tensor.device_mesh.shape, strict=True) if is_distributed(tensor) else ()
    kinds = {
        # All processes must gather it together: this process alone would wait for ever.
        "sharded tensor": any(size > 1 and not place.is_replicate() for place, size in parts),
        "meta tensor": tensor.is_meta,
        "nested tensor": tensor.is_nested,
        "quantized tensor": tensor.is_quantized,
        "sparse tensor": tensor.layout is not torch.strided,
    }
    return next((kind for kind, found in kinds.items() if found), "")


def is_distributed(tensor: Any) -> bool:
    """Whether a tensor is a ``DTensor``, as in a module of FSDP."""
    return hasattr(tensor, "placements")


def _other_state(value: Any, prefix: str) -> dict[str, bytes]:
    """Return digests of the state of modules that is neither a parameter or a buffer nor extra state, by name.

    These are tensors and arrays that are plain attributes, and what a layer adds to its state dict. A layer with extra
    state sends its state itself. Tensors with a gradient function, and tensors that a layer computes from its
    parameters, are no state.
    """
    import torch

    if isinstance(value, Mapping):
        nested = (_other_state(item, f"{prefix}{name}.") for name, item in value.items())
        return {name: digest for found in nested for name, digest in found.items()}
    if not isinstance(value, torch.nn.Module):
        return {}
    module = _bare(value)
    known, senders = _tensors_of(module)[0], [*_extra_state_holders(module).values()]
    found: dict[str, Any] = {}
    for path, submodule in module.named_modules():
        inside = f"{path}." if path else ""
        # A quantized layer overrides this method of torch. The complete state dict may need other processes.
        if type(submodule)._save_to_state_dict is not torch.nn.Module._save_to_state_dict:  # noqa: SLF001
            submodule._save_to_state_dict(found, inside, False)  # noqa: SLF001
        if any(submodule is sender for sender in senders):
            continue
        parameters = dict(submodule.named_parameters(recurse=False))
        for name, item in vars(submodule).items():
            computed = getattr(item, "grad_fn", None) or any(one.startswith(f"{name}_") for one in parameters)
            if isinstance(item, (torch.Tensor, np.ndarray)) and not computed:
                found[inside + name] = item
    named = {name.replace(_COMPILED, ""): item for name, item in found.items() if not _is_extra_state(name)}
    return {prefix + name: canonical_digest(_plain(item)) for name, item in named.items() if name not in known}


def _plain(value: Any) -> Any:
    """Return a value with dense tensors of plain dtypes, for a digest."""
    import torch

    if isinstance(value, (tuple, list)):
        return [_plain(item) for item in value]
    if not isinstance(value, torch.Tensor):
        return str(value) if isinstance(value, torch.dtype) else value
    if value.is_quantized:
        return [str(value.dtype), _plain(value.int_repr()), _plain(value.dequantize())]
    if value.is_nested:
        return [_plain(item) for item in value.unbind()]
    dense = value if value.layout is torch.strided else value.to_dense()
    return str(dense.dtype) if dense.is_meta else dense.detach().cpu()


def _check_other_state(
    snapshot: WeightsSnapshot, module: torch.nn.Module, act: Callable[[bool], object] | None
) -> None:
    ours = _other_state(module, "") if snapshot.other_state else {}
    sent = {_resolve(name, ours): digest for name, digest in snapshot.other_state.items()}
    different = sorted(name for name, digest in sent.items() if ours.get(name) != digest)
    if different and act is not None:
        states = [ours]
        for other in (False, True):
            act(other)
            states.append(_other_state(module, ""))
        different = [name for name in different if len({state.get(name) for state in states}) == 1]
    if different:
        problem = (
            f"the module differs from the policy in {_some(different)}, which are neither parameters nor buffers, so "
            "they are not sent with the weights"
        )
        fix = (
            "Register tensors with register_buffer(), or define get_extra_state() and set_extra_state(). For a "
            "quantized module, create a new evaluator with the module as its policy. If the policy does not need this "
            "state, pass module.state_dict()."
        )
        raise WeightsError(problem, key=different[0], fix=fix)


def _flatten(value: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    import torch

    if isinstance(value, torch.nn.Module):
        value = _bare(value)
        tensors, _ = _tensors_of(value)
        yield from ((prefix + name, tensor) for name, tensor in tensors.items())
        for name, holder in _extra_state_holders(value).items():
            yield prefix + name, holder.get_extra_state()
    elif isinstance(value, Mapping) or hasattr(value, "flatten_keys"):
        for name, item in value.items():
            key = f"{prefix}{name}".replace(_COMPILED, "")
            if isinstance(item, torch.Tensor) or _is_extra_state(key):
                yield key, item
            else:
                yield from _flatten(item, f"{key}.".replace(_COMPILED, ""))
    elif (extract := integration_for(value, "as_weights") or integration_for(value, "portable")) is not None:
        yield from _flatten(extract(value), prefix)
    elif prefix:
        yield prefix.removesuffix("."), value
    else:
        problem = (
            f"weights must be an nn.Module, a state dict, a TensorDict or a mapping of names to these, "
            f"not {type(value).__name__}"
        )
        raise WeightsError(problem, key="weights", value=type(value).__name__)


def _bare(module: torch.nn.Module) -> torch.nn.Module:
    """Return the module inside DistributedDataParallel, DataParallel and torch.compile."""
    import torch

    while True:
        if isinstance(module, (torch.nn.DataParallel, torch.nn.parallel.DistributedDataParallel)):
            module = module.module
        elif hasattr(module, "_orig_mod"):
            module = module.get_submodule("_orig_mod")
        else:
            return module


def _resolve(name: str, known: Container[str]) -> str:
    """Return the name in the policy for a name in the weights. A wrapped module adds ``module.`` to its names."""
    return name if name in known else _WRAPPED.sub(r"\1", name)


def _tensors_of(module: torch.nn.Module) -> tuple[dict[str, torch.Tensor], set[str]]:
    """Return every parameter and buffer by name, and the set of names that a complete state dict has."""
    named: dict[str, torch.Tensor] = dict(module.named_parameters(remove_duplicate=False))
    named.update(module.named_buffers(remove_duplicate=False))
    tensors = {name.replace(_COMPILED, ""): tensor for name, tensor in named.items()}
    volatile = {
        (f"{prefix}.{name}" if prefix else name).replace(_COMPILED, "")
        for prefix, submodule in module.named_modules()
        for name in submodule._non_persistent_buffers_set
    }
    return tensors, tensors.keys() - volatile


_SAME: Final = "Pass weights of this policy, or build the policy as in its training (policy.policy_kwargs)."


def _check_names(given: Any, known: Any, required: set[str]) -> None:
    if missing := sorted(required - set(given)):
        raise WeightsError(f"weights lack {_some(missing)}, which the policy has", key=missing[0], fix=_SAME)
    if unknown := sorted(set(given) - set(known)):
        raise WeightsError(f"weights have {_some(unknown)}, which are missing in the policy", key=unknown[0], fix=_SAME)


def _check_tensor(name: str, entry: TensorEntry, target: torch.Tensor) -> None:
    import torch

    if torch.nn.parameter.is_lazy(target):
        raise WeightsError(
            f"the policy's {name!r} are uninitialized", key=name, fix="Run the module once in the policy's factory."
        )
    dtype, shape = _dtype(target), tuple(target.shape)
    if (entry.dtype, entry.shape) != (dtype, shape):
        ours, theirs = f"{entry.dtype} of shape {entry.shape}", f"{dtype} of shape {shape}"
        problem = f"weights {name!r} are {ours}, but the policy's are {theirs}"
        raise WeightsError(problem, key=name, value=ours, fix=_SAME)


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _some(names: list[str], most: int = 5) -> str:
    shown = ", ".join(map(repr, names[:most]))
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"


def _is_extra_state(name: str) -> bool:
    return str(name).rpartition(".")[2] == _EXTRA_STATE


def _extra_state_holders(module: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """Return the submodules that define ``get_extra_state``, by the name of their entry in a state dict."""
    import torch

    return {
        (f"{name}.{_EXTRA_STATE}" if name else _EXTRA_STATE).replace(_COMPILED, ""): submodule
        for name, submodule in module.named_modules()
        if type(submodule).get_extra_state is not torch.nn.Module.get_extra_state
    }


def _apply_extra_state(extra: Mapping[str, Any], module: torch.nn.Module) -> None:
    """Set the extra state of all submodules. If a submodule rejects its state, restore all former states."""
    holders = _extra_state_holders(module)
    states = {_resolve(name, holders): state for name, state in extra.items()}
    _check_names(states.keys(), holders.keys(), set(holders))
    former = {name: copy.deepcopy(holders[name].get_extra_state()) for name in states}
    try:
        for name, state in states.items():
            holders[name].set_extra_state(state)
    except Exception as error:
        for name, state in former.items():
            holders[name].set_extra_state(state)
        raise WeightsError(f"the policy rejected the extra state of the weights: {error}", key=name) from error


def _view(buffer: npt.NDArray[np.uint8], entry: TensorEntry) -> torch.Tensor:
    import torch

    part = buffer[entry.offset : entry.offset + entry.num_bytes]
    if part.flags.writeable:
        flat = torch.from_numpy(part)  # No warning filter is set here: a trainer's threads share the filters.
    else:
        with warnings.catch_warnings():
            # Torch warns about a read-only buffer; we only read it.
            warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
            flat = torch.from_numpy(part)
    dtype: torch.dtype = getattr(torch, entry.dtype)
    return flat.view(dtype).view(entry.shape)


def weights_of(policy: Any) -> WeightsSnapshot | None:
    """Return a snapshot of the weights of a policy, or of several policies by id; None if there are no weights."""
    modules = _modules_of(policy)
    return None if modules is None else snapshot_weights(modules, 0)


def named_tensors(policy: Any) -> dict[str, torch.Tensor]:
    """Return the parameters and buffers of a policy, or of several policies by id, with their names in a snapshot."""
    modules = _modules_of(policy)
    named = () if modules is None else _flatten(modules, "")
    return {name: tensor for name, tensor in named if not _is_extra_state(name)}


def _modules_of(policy: Any) -> Any:
    """Return the module of a policy, or the modules of several policies by id; None if there is no module."""
    if isinstance(policy, Mapping):
        return {name: module for name, one in policy.items() if (module := module_of(one)) is not None} or None
    return module_of(policy)


def module_of(policy: Any) -> Any:
    """Return the ``nn.Module`` that contains the weights of a policy; None if there is no module."""
    torch = sys.modules.get("torch")
    if torch is None:
        return None
    # A module may have a submodule called `module`, as in tensordict. Then return the outer module.
    module = policy if isinstance(policy, torch.nn.Module) else getattr(policy, "module", policy)
    return module if isinstance(module, torch.nn.Module) else None


def policies_of(snapshot: WeightsSnapshot, names: Iterable[str]) -> set[str]:
    """Return the names of the policies that have weights in a snapshot.

    Raises:
        WeightsError: Some weights belong to none of the named policies.
    """
    held = [entry.name for entry in snapshot.entries] + list(pickle.loads(snapshot.extra_state))
    owners = {name: owner for name in held for owner in names if name.startswith(f"{owner}.")}
    if strangers := [name for name in held if name not in owners]:
        problem = f"weights have {_some(strangers)}, which do not belong to any of the policies {_some(sorted(names))}"
        raise WeightsError(problem, key=strangers[0], fix="Pass a mapping from policy ids to weights.")
    return set(owners.values())


def add_missing(snapshot: WeightsSnapshot, former: WeightsSnapshot | None, names: Iterable[str]) -> WeightsSnapshot:
    """Complete a snapshot of several policies.

    A policy without weights in ``snapshot`` gets its weights and its version from ``former``, unless ``former`` is
    None.
    """
    given = policies_of(snapshot, names)
    versions = dict.fromkeys(given, snapshot.version)
    if former is None:
        return replace(snapshot, versions=versions)
    prefixes = tuple(f"{owner}." for owner in given)
    kept = {name: value for name, value in _contents_of(former).items() if not name.startswith(prefixes)}
    other = {name: digest for name, digest in former.other_state.items() if not name.startswith(prefixes)}
    whole = snapshot_weights({**kept, **_contents_of(snapshot)}, snapshot.version)
    other_state = {**other, **snapshot.other_state}
    return replace(whole, other_state=other_state, versions={**former.versions, **versions})


def keep_unsent(snapshot: WeightsSnapshot, former: WeightsSnapshot) -> WeightsSnapshot:
    """Complete a snapshot with extra state by the parts of an earlier snapshot that stay in use.

    Extra state with a method ``following(former)`` is merged with the earlier extra state of its name. If the snapshot
    has no tensors, so that policies keep theirs, it gets the tensors of ``former``.
    """
    extra, earlier = (pickle.loads(one.extra_state) for one in (snapshot, former))
    merged = {name: extra[name].following(earlier[name]) for name in earlier if hasattr(extra.get(name), "following")}
    if snapshot.entries and not merged:
        return snapshot
    tensors = (snapshot if snapshot.entries else former).tensors()
    whole = snapshot_weights({**tensors, **extra, **merged}, snapshot.version)
    return replace(whole, other_state=snapshot.other_state)


def _contents_of(snapshot: WeightsSnapshot) -> dict[str, Any]:
    return {**snapshot.tensors(), **pickle.loads(snapshot.extra_state)}
