"""Draws of torch's distributions from the episodes' own noise, whatever library's policy they are part of."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import distributions as td

from rl_eval.errors import ConfigError
from rl_eval.integrations.torch_draws import EpisodeDraws
from rl_eval.policies.noise import EpisodeNoise
from tests.refused import refused

ROWS = 4000
LOGITS = torch.tensor([[0.3, -1.0, 1.2]]).repeat(ROWS, 1)
MEAN, STD = LOGITS, torch.full_like(LOGITS, 0.7)
MADE: dict[str, Any] = {
    "categorical": lambda rows: td.Categorical(logits=LOGITS[rows]),
    "one-hot": lambda rows: td.OneHotCategorical(logits=LOGITS[rows]),
    "several categories": lambda rows: td.Categorical(logits=torch.stack([LOGITS, -LOGITS], 1)[rows]),
    "Bernoulli": lambda rows: td.Bernoulli(logits=LOGITS[rows]),
    "normal": lambda rows: td.Independent(td.Normal(MEAN[rows], STD[rows]), 1),
    "squashed": lambda rows: td.TransformedDistribution(td.Normal(MEAN[rows], STD[rows]), [td.TanhTransform()]),
    "uniform": lambda rows: td.Uniform(MEAN[rows], MEAN[rows] + STD[rows]),
    "Laplace": lambda rows: td.Laplace(MEAN[rows], STD[rows]),
    "a number per row": lambda rows: td.Normal(MEAN[rows, 0], STD[rows, 0]),
    "Beta": lambda rows: td.Beta(LOGITS[rows].exp(), STD[rows]),
    "Beta of a number": lambda rows: td.Independent(td.Beta(STD[rows, 0], 3 * STD[rows, 0]), 0),
    "Gamma": lambda rows: td.Gamma(LOGITS[rows].exp(), 2 * STD[rows]),
    "Dirichlet": lambda rows: td.Dirichlet(LOGITS[rows].exp()),
    "mixture": lambda rows: td.MixtureSameFamily(
        td.Categorical(logits=LOGITS[rows]), td.Independent(td.Normal(MEAN[rows, :, None], 0.2), 1)
    ),
}


def drawn(name: str, rows: Any = slice(None)) -> torch.Tensor:
    seeds = np.arange(ROWS)[rows]
    live, noise = np.ones(len(seeds), bool), EpisodeNoise(seeds, np.full(len(seeds), 3))
    with EpisodeDraws(live, noise):
        return MADE[name](rows).sample()


@pytest.mark.parametrize("name", MADE)
def test_samples_are_of_the_distribution_and_of_the_episode(name: str) -> None:
    """Mean and spread are those of torch's own, parts are independent, and no generator moves."""
    before = torch.random.get_rng_state()
    ours = drawn(name).double()
    assert torch.equal(torch.random.get_rng_state(), before)
    theirs = torch.cat([MADE[name](slice(None)).sample() for _ in range(5)]).double()
    error = theirs.std(0) * np.sqrt(1 / len(ours) + 1 / len(theirs))
    assert (abs(ours.mean(0) - theirs.mean(0)) < 5 * error).all()
    np.testing.assert_allclose(ours.std(0), theirs.std(0), rtol=0.1)
    if ours.ndim > 1 and ours.shape[1] > 1 and name not in ("one-hot", "Dirichlet"):
        assert abs(np.corrcoef(ours[:, 0], ours[:, 1])[0, 1]) < 0.06
    assert torch.equal(drawn(name, slice(7, 9)).double(), ours[7:9])


def test_numbers_are_those_of_the_noise() -> None:
    noise = EpisodeNoise(np.arange(ROWS), np.full(ROWS, 3))
    assert torch.equal(drawn("normal"), (MEAN.double() + STD.double() * torch.from_numpy(noise.normal(3))).float())
    uniform = EpisodeNoise(np.arange(ROWS), np.full(ROWS, 3)).uniform(1)
    assert torch.equal(drawn("categorical"), torch.from_numpy((LOGITS.softmax(1).cumsum(1).numpy() < uniform).sum(1)))


def test_without_noise_a_draw_is_the_most_likely_value() -> None:
    with EpisodeDraws(np.ones(ROWS, bool), None):
        assert (td.Categorical(logits=LOGITS).sample() == 2).all()
        assert torch.equal(td.Normal(MEAN, STD).rsample(), MEAN)
        assert torch.equal(td.Bernoulli(logits=LOGITS).sample(), (LOGITS > 0).float())
        inside = 1 + LOGITS.exp()
        for made in (td.Beta(inside, 2 + STD), td.Gamma(inside, STD), td.Dirichlet(inside)):
            torch.testing.assert_close(made.sample(), made.mode)


def test_a_mode_on_the_edge_is_refused() -> None:
    """There torch gives one, as 1.0 for Beta(0.5, 0.5). A row without an episode is not refused."""
    half = torch.full((2, 3), 0.5)
    edges = (td.Beta(half, half), td.Beta(2 * half, 3 + half), td.Gamma(2 * half, half), td.Dirichlet(half))
    for made in (*edges, td.Independent(td.Beta(half, 3 + half), 1)):
        with EpisodeDraws(np.array([True, False]), None), pytest.raises(ConfigError) as caught:
            made.sample()
        assert (caught.value.key, caught.value.value) == ("policy.deterministic", True)
        assert (type(made) if type(made) is not td.Independent else td.Beta).__name__ in caught.value.problem
    half[0] = 2.0
    with EpisodeDraws(np.array([True, False]), None):
        assert td.Beta(half, half).sample().isfinite().all()


@pytest.mark.parametrize(
    ("draw", "key", "value"),
    [
        (lambda: td.Cauchy(MEAN, STD).sample(), "policy.deterministic", False),
        (lambda: td.Weibull(STD, STD).sample(), "policy.deterministic", False),
        (lambda: torch.randint(3, (ROWS,)), "policy.deterministic", False),
        (lambda: td.Normal(MEAN[:3], STD[:3]).sample(), "policy", "(3, 3)"),
        (lambda: torch.multinomial(STD, 2), "policy", 2),
    ],
)
def test_what_cannot_be_an_episodes_own_is_refused(draw: Any, key: str, value: Any) -> None:
    noise = EpisodeNoise(np.arange(ROWS), np.zeros(ROWS, np.int64))
    with EpisodeDraws(np.ones(ROWS, bool), noise), refused(ConfigError, key, value=value):
        draw()


@pytest.mark.parametrize("noise", [None, EpisodeNoise(np.arange(ROWS), np.zeros(ROWS, np.int64))])
def test_the_error_names_the_distribution_and_does_not_advise_what_is_set(noise: Any) -> None:
    for made in (td.Exponential(STD), td.Independent(td.Cauchy(MEAN, STD), 1), td.Weibull(STD, STD)):
        named = getattr(made, "base_dist", made) if type(made) is td.Independent else made
        with EpisodeDraws(np.ones(ROWS, bool), noise), pytest.raises(ConfigError) as caught:
            made.sample()
        assert type(named).__name__ in caught.value.problem
        assert caught.value.value is (noise is None)
        assert "deterministic" not in caught.value.fix
