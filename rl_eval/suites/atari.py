"""Human-normalized Atari scores: the published reference scores of 57 games."""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping
from importlib.resources import files
from typing import Final

from rl_eval.errors import ConfigError, nearest
from rl_eval.suites.normalization import Scale

HUMAN_SCALES: Final[Mapping[str, Scale]] = {
    game: Scale(float(low), float(high))
    for game, low, high in csv.reader((files(__package__) / "atari.csv").read_text().splitlines()[1:])
}
"""Scores of a random policy and of a human tester on the 57 Atari games, with up to 30 no-ops at the start.

The scores are those of Wang et al., "Dueling network architectures for deep reinforcement learning" (2016), as listed
in ``dqn_zoo/atari_data.py`` of google-deepmind/dqn_zoo (Apache 2.0)."""


def human_scale(game: str) -> Scale:
    """Return the scale of an Atari game, on which a random policy has 0 and a human has 1.

    Args:
        game: Name of the game: ``"Pong"``, ``"ALE/Pong-v5"`` or ``"PongNoFrameskip-v4"``; ``"road_runner"`` for
            ``"RoadRunner"``.

    Raises:
        ConfigError: The game is not in :data:`HUMAN_SCALES`.
    """
    name = re.sub(r"^ALE/|(NoFrameskip)?-v\d$", "", game)
    known = {other.casefold(): scale for other, scale in HUMAN_SCALES.items()}
    scale = known.get(name.replace("_", "").casefold())
    if scale is None:
        problem = f"{game!r} has no human score; {nearest(name, HUMAN_SCALES)}"
        raise ConfigError(problem, key="game", value=game)
    return scale
