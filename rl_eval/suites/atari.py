"""Human-normalized Atari scores: the published references of 57 games."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from rl_eval.errors import ConfigError, nearest
from rl_eval.suites.normalization import Scale

HUMAN_SCALES: Final[Mapping[str, Scale]] = {
    "Alien": Scale(227.8, 7127.7),
    "Amidar": Scale(5.8, 1719.5),
    "Assault": Scale(222.4, 742.0),
    "Asterix": Scale(210.0, 8503.3),
    "Asteroids": Scale(719.1, 47388.7),
    "Atlantis": Scale(12850.0, 29028.1),
    "BankHeist": Scale(14.2, 753.1),
    "BattleZone": Scale(2360.0, 37187.5),
    "BeamRider": Scale(363.9, 16926.5),
    "Berzerk": Scale(123.7, 2630.4),
    "Bowling": Scale(23.1, 160.7),
    "Boxing": Scale(0.1, 12.1),
    "Breakout": Scale(1.7, 30.5),
    "Centipede": Scale(2090.9, 12017.0),
    "ChopperCommand": Scale(811.0, 7387.8),
    "CrazyClimber": Scale(10780.5, 35829.4),
    "Defender": Scale(2874.5, 18688.9),
    "DemonAttack": Scale(152.1, 1971.0),
    "DoubleDunk": Scale(-18.6, -16.4),
    "Enduro": Scale(0.0, 860.5),
    "FishingDerby": Scale(-91.7, -38.7),
    "Freeway": Scale(0.0, 29.6),
    "Frostbite": Scale(65.2, 4334.7),
    "Gopher": Scale(257.6, 2412.5),
    "Gravitar": Scale(173.0, 3351.4),
    "Hero": Scale(1027.0, 30826.4),
    "IceHockey": Scale(-11.2, 0.9),
    "Jamesbond": Scale(29.0, 302.8),
    "Kangaroo": Scale(52.0, 3035.0),
    "Krull": Scale(1598.0, 2665.5),
    "KungFuMaster": Scale(258.5, 22736.3),
    "MontezumaRevenge": Scale(0.0, 4753.3),
    "MsPacman": Scale(307.3, 6951.6),
    "NameThisGame": Scale(2292.3, 8049.0),
    "Phoenix": Scale(761.4, 7242.6),
    "Pitfall": Scale(-229.4, 6463.7),
    "Pong": Scale(-20.7, 14.6),
    "PrivateEye": Scale(24.9, 69571.3),
    "Qbert": Scale(163.9, 13455.0),
    "Riverraid": Scale(1338.5, 17118.0),
    "RoadRunner": Scale(11.5, 7845.0),
    "Robotank": Scale(2.2, 11.9),
    "Seaquest": Scale(68.4, 42054.7),
    "Skiing": Scale(-17098.1, -4336.9),
    "Solaris": Scale(1236.3, 12326.7),
    "SpaceInvaders": Scale(148.0, 1668.7),
    "StarGunner": Scale(664.0, 10250.0),
    "Surround": Scale(-10.0, 6.5),
    "Tennis": Scale(-23.8, -8.3),
    "TimePilot": Scale(3568.0, 5229.2),
    "Tutankham": Scale(11.4, 167.6),
    "UpNDown": Scale(533.4, 11693.2),
    "Venture": Scale(0.0, 1187.5),
    "VideoPinball": Scale(16256.9, 17667.9),
    "WizardOfWor": Scale(563.5, 4756.5),
    "YarsRevenge": Scale(3092.9, 54576.9),
    "Zaxxon": Scale(32.5, 9173.3),
}
"""Scores of a random policy and of a human tester on the 57 Atari games, with up to 30 no-ops at the start.

They are the scores of Wang et al., "Dueling network architectures for deep reinforcement learning" (2016), as
``dqn_zoo/atari_data.py`` of google-deepmind/dqn_zoo (Apache 2.0) lists them.
"""


def human_scale(game: str) -> Scale:
    """Return the scale of an Atari game from a random policy (0) to a human (1).

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
