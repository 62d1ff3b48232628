"""Replacement of torch's global generator: samplers use each episode's noise, or return the most likely value."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final, NoReturn, final

import numpy as np
import numpy.typing as npt
import torch
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from rl_eval.errors import ConfigError
from rl_eval.policies.sampling import categorical
from rl_eval.protocols import NoiseSource


def _refuse(name: str, *args: Any, **kwargs: Any) -> NoReturn:
    problem = f"the policy samples with torch's {name}, which cannot use the episode's own noise"
    fix = "Sample from categorical, Bernoulli, normal or uniform distributions, or set policy.deterministic to True."
    raise ConfigError(problem, key="policy.deterministic", value=False, fix=fix)


_FUNCTIONS: Final = ("_sample_dirichlet", "_standard_gamma", "binomial", "poisson", "randint", "randperm")
_LIKE: Final = ("rand_like", "randint_like", "randn_like")
_IN_PLACE: Final = ("bernoulli_", "cauchy_", "exponential_", "geometric_", "log_normal_", "random_")
_REFUSED: Final[Mapping[Any, Callable[..., NoReturn]]] = {
    **{getattr(torch, name): partial(_refuse, name) for name in (*_FUNCTIONS, *_LIKE)},
    **{getattr(torch.Tensor, name): partial(_refuse, name) for name in _IN_PLACE},
}


@final
class EpisodeDraws(TorchFunctionMode):
    """Context in which torch's distributions draw with the noise of each episode, for a batch of episodes.

    In this thread, it replaces the functions that ``sample`` and ``rsample`` call to draw categorical, Bernoulli,
    normal and uniform numbers. Other functions that would use torch's generator, such as those of gamma distributions,
    raise an error.

    Args:
        live: Mask of lanes that run an episode, shape (batch,).
        noise: Randomness of each lane's episode; None for the most likely value of every draw.
    """

    def __init__(self, live: npt.NDArray[np.bool_], noise: NoiseSource | None) -> None:
        super().__init__()
        self._live = live
        self._noise = noise
        self._instead: Mapping[Any, Callable[..., torch.Tensor]] = {
            **_REFUSED,
            torch.multinomial: self._multinomial,
            torch.normal: self._normal,
            torch.Tensor.normal_: self._refill,
            torch.randn: partial(self._new, self._refill),
            torch.bernoulli: self._bernoulli,
            torch.Tensor.uniform_: self._uniform,
            torch.rand: partial(self._new, self._uniform),
        }

    @override
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call the replacement of a torch function if there is one, otherwise the function itself."""
        return self._instead.get(func, func)(*args, **(kwargs or {}))

    @staticmethod
    def _new(fill: Callable[..., torch.Tensor], *size: Any, **kwargs: Any) -> torch.Tensor:
        kwargs.pop("generator", None)
        return fill(torch.empty(*size, **kwargs))

    def _multinomial(
        self, probabilities: torch.Tensor, num_samples: int, replacement: bool = False, *, generator: Any = None
    ) -> torch.Tensor:
        if num_samples != 1:
            problem = f"the policy draws {num_samples} categories per row"
            raise ConfigError(problem, key="policy", value=num_samples, fix="Draw one category per episode.")
        if self._noise is None:
            return probabilities.argmax(-1, keepdim=True)
        parts = self._rows(probabilities).numpy(force=True).astype(np.float64)
        with np.errstate(divide="ignore"):
            chosen = [categorical(np.log(parts[:, part]), self._live, self._noise) for part in range(parts.shape[1])]
        return torch.from_numpy(np.stack(chosen, 1)).reshape(-1, 1).to(probabilities.device)

    def _normal(
        self, mean: Any, std: Any = 1.0, size: Any = None, *, generator: Any = None, **kwargs: Any
    ) -> torch.Tensor:
        if size is not None:
            mean = torch.full(size, float(mean), **kwargs)
        centre: torch.Tensor = mean if isinstance(mean, torch.Tensor) else torch.full_like(std, mean)
        width = torch.as_tensor(std, dtype=centre.dtype, device=centre.device)
        centre = centre.expand(np.broadcast_shapes(centre.shape, width.shape))
        if self._noise is None:
            return centre.clone()
        flat = self._rows(centre)
        numbers = torch.from_numpy(self._noise.normal(flat[0].numel())).reshape(centre.shape)
        return (centre.double() + width.double() * numbers.to(centre.device)).to(centre.dtype)

    def _refill(self, out: torch.Tensor, mean: float = 0.0, std: float = 1.0, *, generator: Any = None) -> torch.Tensor:
        return out.copy_(self._normal(torch.full_like(out, mean), torch.full_like(out, std)))

    def _uniform(self, out: torch.Tensor, *bounds: float, generator: Any = None, **named: float) -> torch.Tensor:
        low, high = (*bounds, *(0.0, 1.0)[len(bounds) :])
        low, high = named.get("from", low), named.get("to", high)
        if self._noise is None:
            return out.fill_((low + high) / 2)
        numbers = torch.from_numpy(self._noise.uniform(self._rows(out)[0].numel())).reshape(out.shape)
        return out.copy_(low + (high - low) * numbers)

    def _bernoulli(self, probabilities: torch.Tensor, *, generator: Any = None) -> torch.Tensor:
        if self._noise is None:
            return (probabilities > 0.5).to(probabilities.dtype)
        numbers = torch.from_numpy(self._noise.uniform(self._rows(probabilities)[0].numel()))
        return (numbers.reshape(probabilities.shape).to(probabilities.device) < probabilities).to(probabilities.dtype)

    def _rows(self, numbers: torch.Tensor) -> torch.Tensor:
        """Return numbers reshaped to (batch, parts, last dimension), with one row per episode."""
        batch = len(self._live)
        if not numbers.ndim or numbers.shape[0] % batch:
            problem = (
                f"the policy draws numbers of shape {tuple(numbers.shape)} for a batch of {batch}, but the first "
                "dimension must be a multiple of the batch size"
            )
            raise ConfigError(
                problem, key="policy", value=tuple(numbers.shape), fix="Draw separate numbers for each row."
            )
        return numbers.reshape(batch, -1, numbers.shape[-1])
