"""Several policies as one object, whose weights are sent and compared together."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import Any, final

import numpy as np
import numpy.typing as npt

from rl_eval.errors import WeightsError
from rl_eval.protocols import NoiseSource, Policy
from rl_eval.weights import module_of

__all__ = ["SeveralPolicies"]


@final
class SeveralPolicies:
    """Policies by id."""

    def __init__(self, by_name: Mapping[str, Policy]) -> None:
        self.by_name = by_name

    @cached_property
    def module(self) -> Any:
        """A module whose parts are those of the policies that have one; None if none has."""
        having = [name for name, policy in self.by_name.items() if module_of(policy) is not None]
        return self.modules(having) if having else None

    def modules(self, names: Iterable[str]) -> Any:
        """Return a module whose parts are those of some policies, by id.

        Raises:
            WeightsError: One has none.
        """
        import torch

        whole = torch.nn.Module()
        for name in names:
            module = module_of(self.by_name[name])
            if module is None:
                raise WeightsError(
                    f"policy {name!r} is a {type(self.by_name[name]).__name__}, not an nn.Module, and has no "
                    "weights to set: give it as an nn.Module, or as a Policy with an attribute `module`"
                )
            whole._modules[name] = module  # An id may have a dot, or be the name of a method.
        return whole

    def act(
        self, observations: Any, state: Any, live: npt.NDArray[np.bool_], noise: NoiseSource | None
    ) -> tuple[Any, Any]:
        """Refuse: each policy acts for its own agents."""
        raise NotImplementedError("several policies have no action in common")
