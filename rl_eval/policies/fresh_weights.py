"""Detection of weights that come from torch's global generator, not from a file or a seed."""

from __future__ import annotations

from typing import Any, Final, final

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _get_current_dispatch_mode
from torch.utils._pytree import tree_leaves
from typing_extensions import override

_REPLACE: Final = {"copy_", "fill_", "zero_", "zeros_", "ones_", "constant_", "eye_", "dirac_", "__setitem__"}
"""Functions that overwrite the values of their first argument."""


@final
class FreshWeights(TorchFunctionMode):
    """Context that follows values from torch's global generator, until the generator is seeded."""

    def __init__(self) -> None:
        super().__init__()
        self._seed = torch.initial_seed()
        self._drawn: dict[int, torch.Tensor] = {}  # A tensor that exists keeps its address.

    def in_module(self, module: torch.nn.Module) -> bool:
        """Return whether a parameter or a buffer of a module has such values."""
        return any(map(self._has, (*module.parameters(), *module.buffers())))

    @override
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function, and note whether its result was drawn, or was computed from drawn values."""
        if _get_current_dispatch_mode() is not None:  # Such as that of torch.export, whose tensors have no values.
            return func(*args, **(kwargs or {}))
        before = torch.random.get_rng_state()
        result = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "")
        sources = tree_leaves(_used(name, args, kwargs))
        drawn = torch.initial_seed() == self._seed and not torch.equal(before, torch.random.get_rng_state())
        drawn = drawn or any(map(self._has, sources))
        for tensor in args[:1] if name == "__setitem__" else tree_leaves(result):
            if (place := _address(tensor)) and drawn:
                self._drawn[place] = tensor.detach()
            elif place:
                self._drawn.pop(place, None)
        return result

    def _has(self, value: Any) -> bool:
        return _address(value) in self._drawn


def _used(name: str, args: Any, kwargs: Any) -> Any:
    """Return the arguments of a function whose values, not only shapes, are in its result."""
    if name.endswith("_like"):
        return ()
    if name.endswith("_as"):
        return args[:1]
    return args[1:] if name in _REPLACE else (args, kwargs)


def _address(value: Any) -> int:
    """Return the address of a tensor's values; 0 for other objects, and for tensors without values."""
    plain = type(value) in (torch.Tensor, torch.nn.Parameter) and value.layout is torch.strided
    return value.data_ptr() if plain else 0
