"""Replacement of torch's global generator: samplers use each episode's noise, or return the most likely value."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final, NoReturn, final

import numpy as np
import numpy.typing as npt
import torch
from torch.distributions import Distribution
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from rl_eval.errors import ConfigError
from rl_eval.policies.sampling import categorical
from rl_eval.protocols import NoiseSource

_PLAIN: Final = "return the actions from the policy, such as the mean of the distribution, instead of sampling them."
_AROUND: Final = ("Independent", "MixtureSameFamily", "TransformedDistribution")
"""Distributions of distributions."""


def _refuse(name: str, deterministic: bool, *args: Any, **kwargs: Any) -> NoReturn:
    needed = "its most likely value is unknown" if deterministic else "it cannot use the episode's own noise"
    problem = f"the policy samples from {_sampled(name)}, but {needed}"
    fix = f"Use a categorical, Bernoulli, normal, uniform, Beta, Dirichlet or Gamma distribution, or {_PLAIN}"
    raise ConfigError(problem, key="policy.deterministic", value=deterministic, fix=fix)


def _sampled(function: str) -> str:
    """Return the name of the distribution that calls a function of torch, or that of the function."""
    name, frame = f"torch's {function}", inspect.currentframe()
    while frame is not None and (frame := frame.f_back) is not None:
        owner = type(frame.f_locals.get("self"))
        if issubclass(owner, Distribution) and owner.__name__ not in _AROUND:
            name = f"the distribution {owner.__name__}"
    return name


_DIRICHLET: Final[Any] = torch._sample_dirichlet  # noqa: SLF001 - called by distributions
_GAMMA: Final[Any] = torch._standard_gamma  # noqa: SLF001
_FUNCTIONS: Final = ("binomial", "poisson", "randint", "randperm")
_LIKE: Final = ("rand_like", "randint_like", "randn_like")
_IN_PLACE: Final = ("bernoulli_", "cauchy_", "exponential_", "geometric_", "log_normal_", "random_")
_REFUSED: Final[Mapping[bool, Mapping[Any, Callable[..., NoReturn]]]] = {
    deterministic: {
        **{getattr(torch, name): partial(_refuse, name, deterministic) for name in (*_FUNCTIONS, *_LIKE)},
        **{getattr(torch.Tensor, name): partial(_refuse, name, deterministic) for name in _IN_PLACE},
    }
    for deterministic in (False, True)
}
"""Replacements of functions that cannot be replaced, for sampling and for most likely values."""


@final
class EpisodeDraws(TorchFunctionMode):
    """Context in which torch's distributions draw with the noise of each episode, for a batch of episodes.

    In this thread, it replaces the functions that ``sample`` and ``rsample`` call to draw categorical, Bernoulli,
    normal, uniform, Beta, Dirichlet and Gamma numbers. Other functions that would use torch's generator, such as those
    of exponential distributions, raise an error that names the distribution.

    Args:
        live: Mask of lanes that run an episode, shape (batch,).
        noise: Randomness of each lane's episode; None for the most likely value of every draw.
    """

    def __init__(self, live: npt.NDArray[np.bool_], noise: NoiseSource | None) -> None:
        super().__init__()
        self._live = live
        self._noise = noise
        self._instead: Mapping[Any, Callable[..., torch.Tensor]] = {
            **_REFUSED[noise is None],
            _DIRICHLET: self._dirichlet,
            _GAMMA: self._gamma,
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
        numbers = self._numbers(self._noise.normal, centre)
        return (centre.double() + width.double() * numbers).to(centre.dtype)

    def _refill(self, out: torch.Tensor, mean: float = 0.0, std: float = 1.0, *, generator: Any = None) -> torch.Tensor:
        return out.copy_(self._normal(torch.full_like(out, mean), torch.full_like(out, std)))

    def _uniform(self, out: torch.Tensor, *bounds: float, generator: Any = None, **named: float) -> torch.Tensor:
        low, high = (*bounds, *(0.0, 1.0)[len(bounds) :])
        low, high = named.get("from", low), named.get("to", high)
        if self._noise is None:
            return out.fill_((low + high) / 2)
        return out.copy_(low + (high - low) * self._numbers(self._noise.uniform, out))

    def _bernoulli(self, probabilities: torch.Tensor, *, generator: Any = None) -> torch.Tensor:
        if self._noise is None:
            return (probabilities > 0.5).to(probabilities.dtype)
        return (self._numbers(self._noise.uniform, probabilities) < probabilities).to(probabilities.dtype)

    def _gamma(self, concentration: torch.Tensor, generator: Any = None) -> torch.Tensor:
        if self._noise is None:
            return self._inside(concentration > 1, concentration - 1, concentration)
        from scipy.special import gammaincinv

        return self._inverse(gammaincinv, concentration)

    def _dirichlet(self, concentration: torch.Tensor, generator: Any = None) -> torch.Tensor:
        """Draw from a Dirichlet distribution; torch's Beta distribution is one with two parts."""
        total, parts = concentration.sum(-1, keepdim=True), concentration.shape[-1]
        if self._noise is None:
            inside = (concentration > 1).all(-1, keepdim=True).expand_as(concentration)
            return self._inside(inside, (concentration - 1) / (total - parts), concentration / total)
        if parts > 2:
            drawn = self._gamma(concentration)
            return drawn / drawn.sum(-1, keepdim=True)
        from scipy.special import betaincinv

        first = self._inverse(betaincinv, concentration[..., :1], concentration[..., 1:])
        return torch.cat((first, 1 - first), -1)

    def _inverse(self, inverse: Any, *parameters: torch.Tensor) -> torch.Tensor:
        """Draw by the inverse of a cumulative distribution function."""
        assert self._noise is not None
        numbers = self._numbers(self._noise.uniform, parameters[0])
        drawn = inverse(*(one.double().numpy(force=True) for one in (*parameters, numbers)))
        return torch.from_numpy(drawn).to(parameters[0])

    def _inside(self, inside: torch.Tensor, mode: torch.Tensor, mean: torch.Tensor) -> torch.Tensor:
        """Return modes. Rows without an episode get a mean if their mode lies on the edge of the distribution.

        Raises:
            ConfigError: The mode of a row with an episode lies on the edge.
        """
        if not self._rows(inside)[torch.from_numpy(self._live).to(inside.device)].all():
            problem = (
                f"the mode of {_sampled('samplers')} is on the edge of its values, because a parameter is at most 1"
            )
            fix = f"Set policy.deterministic to False, or {_PLAIN}"
            raise ConfigError(problem, key="policy.deterministic", value=True, fix=fix)
        return torch.where(inside, mode, mean)

    def _numbers(self, draw: Callable[[int], Any], like: torch.Tensor) -> torch.Tensor:
        """Draw a number for each element of a tensor."""
        return torch.from_numpy(draw(self._rows(like)[0].numel())).reshape(like.shape).to(like.device)

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
        return numbers.reshape(batch, -1, numbers.shape[-1] if numbers.ndim > 1 else 1)
