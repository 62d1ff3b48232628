"""Pickles for runners: settings, functions, and a policy without its weights, which are sent in a snapshot.

To pickle a policy of 2 GB together with its weights would need another 4 GB of memory: for the bytes, and for a copy of
them during the pickling.
"""

from __future__ import annotations

import copy
import functools
import io
import pickle
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, final

import cloudpickle

from rl_eval.adapters import library_of
from rl_eval.config.policy_sources import schemes
from rl_eval.config.settings import SECTIONS, EvalSettings
from rl_eval.errors import ConfigError
from rl_eval.policies.inference.spaces import no_grad
from rl_eval.weights import WeightsSnapshot, module_of, named_tensors

if TYPE_CHECKING:
    import torch


def pickled(value: Any, what: str, without_weights_of: Any = None) -> bytes:
    """Pickle a value for a runner.

    Args:
        value: The value.
        what: Name of the value, for the error.
        without_weights_of: Policy, or several policies by id, to pickle without weights. Then unpickle the bytes with
            :func:`unpickle_with_weights`.

    Raises:
        ConfigError: The value cannot be pickled.
    """
    try:
        return pickle_without_weights(value, without_weights_of)
    except Exception as error:
        problem = f"{what} cannot be sent to a runner, because pickling failed: {error}"
        fix = 'Pass its name as "module:attr", or remove open files, locks and generators from the object.'
        if (library := library_of(value)) is not None and library.name in schemes():
            fix = f"Save it to a file, and pass the file as the policy, as {schemes()[library.name].form}."
        raise ConfigError(problem, key=what, fix=fix) from error


def pickled_settings(settings: EvalSettings, policy: Any, *more: Any, without_weights: bool = False) -> bytes:
    """Pickle settings, a policy object, and other values.

    Raises:
        ConfigError: A value cannot be pickled; the message names its config key, if it has one.
    """
    try:
        return pickled((settings, policy, *more), "the configuration", policy if without_weights else None)
    except ConfigError:
        for section in SECTIONS:
            for key, value in dict(getattr(settings, section)).items():
                pickled(value, f"{section}.{key}")
        pickled(policy, "the policy")
        raise


def in_this_process(policy: Any, *, with_weights: bool = False) -> Callable[[WeightsSnapshot | None], Any]:
    """Return a function that returns the policy for a runner in this process, from the weights of its first episode.

    Each call returns a copy, so the caller's object does not change. A policy that cannot be pickled, such as a
    TorchScript module, is copied by ``copy.deepcopy``. An object without a module that cannot be copied either, such as
    a session of onnxruntime, is used itself: a runner only calls it.

    Args:
        policy: The policy, or several policies by id.
        with_weights: Whether the function returns the present weights, because there is no snapshot of them.

    Raises:
        ConfigError: A module cannot be copied.
    """
    try:
        data = pickled(policy, "the policy", None if with_weights else policy)
    except ConfigError as error:
        return functools.partial(_copied_or_used, _copied_or_used(policy, error), error)
    return functools.partial(unpickle_with_weights, data)


def _copied_or_used(policy: Any, error: ConfigError, weights: WeightsSnapshot | None = None) -> Any:
    if isinstance(policy, Mapping):
        return {name: _copied_or_used(one, error) for name, one in policy.items()}
    try:
        with no_grad():  # Otherwise parameters of TorchScript become results of a copy, which are no leaf tensors.
            return copy.deepcopy(policy)
    except Exception:
        if module_of(policy) is not None:  # A runner sets the mode and the weights of a module.
            raise error from None
        return policy


class _Place(NamedTuple):
    """Reference from a pickle to a tensor of the snapshot."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    is_parameter: bool
    requires_grad: bool


def pickle_without_weights(value: Any, policy: Any) -> bytes:
    """Pickle a value that contains a policy.

    Args:
        value: The value.
        policy: The policy, or several policies by id. Their parameters and buffers are left out.
    """
    file = io.BytesIO()
    _Pickler(
        file, {id(tensor): place for name, tensor in named_tensors(policy).items() if (place := _place(name, tensor))}
    ).dump(value)
    return file.getvalue()


def unpickle_with_weights(data: bytes, weights: WeightsSnapshot | None) -> Any:
    """Return the value that :func:`pickle_without_weights` pickled, with new tensors.

    Args:
        data: The pickle.
        weights: Weights that the runner gets before its first episode. A tensor becomes zero if the weights lack it,
            or contain it with another shape or dtype.
    """
    return _Unpickler(data, weights).load()


@final
class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    def __init__(self, file: io.BytesIO, places: dict[int, _Place]) -> None:
        super().__init__(file)
        self._places = places

    def persistent_id(self, value: Any) -> _Place | None:
        return self._places.get(id(value))


@final
class _Unpickler(pickle.Unpickler):
    def __init__(self, data: bytes, weights: WeightsSnapshot | None) -> None:
        super().__init__(io.BytesIO(data))
        self._weights = weights
        self._views: dict[str, torch.Tensor] | None = None
        self._loaded: dict[str, torch.Tensor] = {}

    def persistent_load(self, place: _Place) -> torch.Tensor:
        if place.name not in self._loaded:  # Modules may share a tensor.
            self._loaded[place.name] = self._copy(place)
        return self._loaded[place.name]

    def _copy(self, place: _Place) -> torch.Tensor:
        import torch

        if self._views is None:
            self._views = {} if self._weights is None else self._weights.tensors()
        view = self._views.get(place.name)
        dtype: torch.dtype = getattr(torch, place.dtype)
        if view is None or view.dtype != dtype or view.shape != place.shape:
            tensor = torch.zeros(place.shape, dtype=dtype)
        else:
            tensor = view.clone()
        return (
            torch.nn.Parameter(tensor, place.requires_grad)
            if place.is_parameter
            else tensor.requires_grad_(place.requires_grad)
        )


def _place(name: str, tensor: torch.Tensor) -> _Place | None:
    """Return the reference to a plain tensor; None for any other tensor, such as an instance of a subclass."""
    import torch

    plain = type(tensor) in {torch.Tensor, torch.nn.Parameter} and tensor.layout is torch.strided
    if not plain or vars(tensor) or tensor.device.type != "cpu" or not tensor.is_contiguous():
        return None
    dtype = str(tensor.dtype).removeprefix("torch.")
    return _Place(name, dtype, tuple(tensor.shape), isinstance(tensor, torch.nn.Parameter), tensor.requires_grad)
