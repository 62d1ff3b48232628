"""Whether published environments give the same records in every layout, or a result that says they do not.

Every environment is a subprocess, which evaluates the same short episodes in three layouts with a policy that is a
pure function of the observation. The runners of all of them come up on one local Ray cluster.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from benchmarks.contenders import base
from benchmarks.runner import Cell, Interpreters, Row, run_cell
from benchmarks.scenarios import REPO

__all__ = ["KNOWN", "Known", "measure", "verdict"]

LAYOUTS: Final = ((0, 1), (0, 8), (2, 4))
"""Runners, and environments in each."""
EPISODES: Final = 24
_QUICK: Final = ("CartPole-v1", "FrozenLake-v1", "Pendulum-v1")


@dataclass(frozen=True, slots=True)
class Known:
    """An environment that others have published."""

    id: str
    module: str = ""
    """What to import first."""
    steps: int = 100
    """Episodes are cut after so many."""
    wrap: str = ""
    """What makes its observations or rewards something that can be evaluated."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    name: str = ""

    @property
    def label(self) -> str:
        """What the table calls it."""
        return self.name or self.id


# Module to import first, steps, wrapper, ids.
_FAMILIES: Final = (
    ("", 200, "", "CartPole-v1 Acrobot-v1 MountainCar-v0 MountainCarContinuous-v0 Pendulum-v1"),
    ("", 100, "", "Blackjack-v1 CliffWalking-v1 FrozenLake-v1 Taxi-v4"),
    ("", 200, "", "BipedalWalker-v3 BipedalWalkerHardcore-v3 LunarLander-v3"),
    ("", 60, "", "CarRacing-v3"),
    ("", 100, "", "Ant-v5 HalfCheetah-v5 Hopper-v5 Humanoid-v5 HumanoidStandup-v5 InvertedDoublePendulum-v5"),
    ("", 100, "", "InvertedPendulum-v5 Pusher-v5 Reacher-v5 Swimmer-v5 Walker2d-v5"),
    ("ale_py", 60, "", "ALE/Breakout-v5 ALE/MsPacman-v5 ALE/Pong-v5 ALE/SpaceInvaders-v5"),
    ("minigrid", 100, "image only", "MiniGrid-DoorKey-5x5-v0 MiniGrid-Dynamic-Obstacles-6x6-v0"),
    ("minigrid", 100, "image only", "MiniGrid-Empty-Random-5x5-v0 MiniGrid-FourRooms-v0"),
    ("highway_env", 5, "", "highway-fast-v0 intersection-v0 merge-v0 parking-v0 racetrack-v0 roundabout-v0"),
    ("gym_pusht", 100, "", "gym_pusht/PushT-v0"),
    ("gymnasium_robotics", 60, "", "AdroitHandDoor-v1 AntMaze_UMaze-v5 FetchPush-v4 FetchReach-v4 FrankaKitchen-v1"),
    ("gymnasium_robotics", 60, "", "HandManipulateBlock-v1 HandReach-v3 PointMaze_UMaze-v3"),
    ("panda_gym", 50, "", "PandaPickAndPlace-v3 PandaPush-v3 PandaReach-v3"),
    ("mo_gymnasium", 100, "sum of rewards", "deep-sea-treasure-v0 minecart-v0 mo-mountaincar-v0"),
    ("crafter", 100, "", "crafter"),
    ("flappy_bird_gymnasium", 100, "", "FlappyBird-v0"),
    ("shimmy", 100, "", "dm_control/cartpole-swingup-v0 dm_control/cheetah-run-v0 dm_control/walker-walk-v0"),
)

# Those that take arguments, which their names stand for.
_ODD: Final = (
    Known("LunarLander-v3", steps=200, kwargs={"continuous": True}, name="LunarLander-v3, continuous"),
    *(
        Known("Meta-World/MT1", "metaworld", kwargs={"env_name": name, "seed": 0}, name=f"Meta-World {name}")
        for name in ("drawer-open-v3", "push-v3", "reach-v3")
    ),
    *(
        Known("robosuite", "robosuite", steps=20, kwargs={"task": name}, name=f"robosuite {name}")
        for name in ("Lift", "Stack")
    ),
)

KNOWN: Final = (
    *(Known(name, module, steps, wrap) for module, steps, wrap, names in _FAMILIES for name in names.split()),
    *_ODD,
)


def measure(*, only: str, quick: bool, timeout_s: float, progress: Callable[[str], None]) -> list[Row]:
    """One row per environment.

    Args:
        only: Pattern of labels.
        quick: Few environments, without Ray.
        timeout_s: Limit of one environment.
        progress: Told what was found.
    """
    chosen = [known for known in KNOWN if re.search(only, known.label) and (not quick or known.label in _QUICK)]
    if not chosen:
        raise SystemExit(f"--only {only}: no environment matches")
    if quick:
        return _rows(chosen, LAYOUTS[:2], "", timeout_s, progress)
    # The evaluations are of other processes, so Ray does not know from them where this package is.
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(REPO), os.environ.get("PYTHONPATH")]))
    with base.ray_cluster(num_cpus=2) as ray:
        address = ray.get_runtime_context().gcs_address
        return _rows(chosen, LAYOUTS, address, timeout_s, progress)


def _rows(
    chosen: Sequence[Known],
    layouts: Sequence[tuple[int, int]],
    address: str,
    timeout_s: float,
    progress: Callable[[str], None],
) -> list[Row]:
    rows = []
    for known in chosen:
        params = {
            "scenario": "environment",
            "id": known.id,
            "module": known.module,
            "wrap": known.wrap,
            "kwargs": known.kwargs,
            "steps": known.steps,
            "episodes": EPISODES,
            "layouts": layouts,
            "address": address,
        }
        row = run_cell(
            Cell(known.label, "environment", params, timeout_s=timeout_s), Interpreters(Path(sys.executable))
        )
        rows.append({"label": known.label, "params": params, **row})
        progress(f"{known.label}: {verdict(rows[-1])}")
    return rows


def verdict(row: Row) -> str:
    """Name the outcome: a mismatch is silent where two results differ and neither says so."""
    found = row if "layouts" in row else row.get("printed", {})
    if "layouts" not in found:
        return str(row["status"])
    results = [*found["layouts"], *found["fresh"]]
    if any(one["status"] != "complete" for one in results):
        return "not evaluated"
    unmarked = {one["fingerprint"] for one in results if one["passed"] is not False}
    if len(unmarked) > 1:
        return "SILENT MISMATCH"
    return "flagged" if any(one["passed"] is False for one in results) else "same"
