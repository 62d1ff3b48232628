"""Which cells a scenario consists of: contenders, their layouts, and how many episodes each gets.

Peers get the layouts that their documentation offers for one machine, rl_eval the same and larger
ones. In ``throughput`` every episode lasts 500 steps, so the number of episodes decides how long a
measurement takes and nothing else; it is a multiple of the environment slots, which leaves none idle.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from benchmarks.runner import Cell
from benchmarks.worlds import WORLDS

__all__ = ["Sizes", "broadcast", "correctness", "multi_agent", "scaling", "simulators", "throughput"]

_LANES: Final = (1, 8, 16, 32, 64, 128)
_SHORT_LANES: Final = (16, 64, 128)
_PEERS_LANES: Final = 64
_RLLIB_ENVS: Final = (1, 8, 32, 64, 128)
_RLLIB_BEST_ENVS: Final = 32
_FAULT_RATE: Final = 0.001


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much work a measurement is."""

    runners: int = 2
    rounds_per_slot: int = 8
    least_episodes: int = 64
    bare_episodes: int = 1000
    short_episodes: int = 20_000

    @classmethod
    def quick(cls, runners: int) -> Sizes:
        """Enough to see that everything runs."""
        return cls(runners, rounds_per_slot=2, least_episodes=8, bare_episodes=100, short_episodes=2_000)

    def episodes(self, slots: int) -> int:
        """Episodes for a contender with this many environment slots: a multiple of them."""
        rounds = max(self.rounds_per_slot, -(-self.least_episodes // slots))
        return rounds * slots


def throughput(sizes: Sizes, episode_steps: int) -> list[Cell]:
    """500-step episodes for everybody; ``episode_steps``-step ones for rl_eval and the bare loop."""
    cells = [_bare(sizes, peers=False), _bare(sizes, peers=True)]
    cells += [_rl_eval(sizes, lanes) for lanes in _LANES]
    cells.append(_rl_eval(sizes, _PEERS_LANES, peers=True))
    cells += [_rllib(sizes, envs) for envs in _RLLIB_ENVS]
    cells.append(_rllib(sizes, _RLLIB_BEST_ENVS, module="actions"))
    cells += [_worker(sizes), _drop_in(sizes, 64), _drop_in(sizes, 128)]
    cells += [_evaluator(sizes, 1), _evaluator(sizes, 8), _evaluator(sizes, 16), _evaluator(sizes, 16, "gym")]
    cells += [_sb3(sizes, 16), _sb3(sizes, 64)]
    cells += [_sb3(sizes, envs, processes=True) for envs in (sizes.runners, 16)]
    cells += [_tianshou(sizes, 16), _tianshou(sizes, 64), _tianshou(sizes, sizes.runners, processes=True)]
    if episode_steps:
        cells.append(_bare(sizes, peers=False, episode_steps=episode_steps))
        cells += [_rl_eval(sizes, lanes, episode_steps=episode_steps) for lanes in _SHORT_LANES]
    return cells


def _params(episodes: int, **rest: Any) -> dict[str, Any]:
    return {"scenario": "throughput", "episodes": episodes, **rest}


def _column(episode_steps: int | None) -> str:
    return f"{episode_steps or 500}-step episodes"


def _bare(sizes: Sizes, *, peers: bool, episode_steps: int | None = None) -> Cell:
    episodes = sizes.short_episodes if episode_steps else sizes.bare_episodes
    params = _params(episodes, runners=sizes.runners, episode_steps=episode_steps)
    label = f"bare env.step loop, {sizes.runners} processes" + (", peers' gymnasium" if peers else "")
    return Cell(label, "bare_loop", params, _column(episode_steps), peers)


def _rl_eval(sizes: Sizes, lanes: int, *, peers: bool = False, episode_steps: int | None = None) -> Cell:
    slots = sizes.runners * lanes
    episodes = sizes.short_episodes // slots * slots if episode_steps else sizes.episodes(slots)
    params = _params(episodes, runners=sizes.runners, envs=lanes, episode_steps=episode_steps)
    label = f"rl_eval, {sizes.runners} runners x {lanes}" + (", peers' gymnasium" if peers else "")
    return Cell(label, "rl_eval_", params, _column(episode_steps), peers)


def _rllib(sizes: Sizes, envs: int, module: str = "default") -> Cell:
    params = _params(sizes.episodes(sizes.runners * envs), runners=sizes.runners, envs=envs, module=module)
    label = f"RLlib Algorithm.evaluate, {sizes.runners} runners x {envs}"
    label += ", RLModule that returns actions" if module == "actions" else ""
    return Cell(label, "rllib", params, _column(None), peers=True)


def _worker(sizes: Sizes) -> Cell:
    params = _params(sizes.episodes(sizes.runners), runners=sizes.runners)
    return Cell(f"TorchRL RayEvalWorker, {sizes.runners} workers", "torchrl_worker", params, _column(None), peers=True)


def _drop_in(sizes: Sizes, lanes: int) -> Cell:
    episodes = sizes.episodes(sizes.runners * lanes)
    params = {**_params(episodes, runners=sizes.runners, envs=lanes), "scenario": "drop_in"}
    label = f"rl_eval's RayEvalWorker, {sizes.runners} runners x {lanes}"
    return Cell(label, "torchrl_worker", params, _column(None), peers=True)


def _evaluator(sizes: Sizes, envs: int, batching: str = "serial") -> Cell:
    kind = {"serial": f"SerialEnv({envs})", "gym": f"GymEnv(num_envs={envs})"}[batching] if envs > 1 else "1 env"
    params = _params(sizes.episodes(envs), envs=envs, batching=batching)
    return Cell(f"TorchRL Evaluator, {kind}", "torchrl_evaluator", params, _column(None), peers=True)


def _sb3(sizes: Sizes, envs: int, *, processes: bool = False) -> Cell:
    params = _params(sizes.episodes(envs), envs=envs, processes=processes)
    kind = "SubprocVecEnv" if processes else "DummyVecEnv"
    return Cell(f"SB3 evaluate_policy, {kind}({envs})", "sb3", params, _column(None), peers=True)


def _tianshou(sizes: Sizes, envs: int, *, processes: bool = False) -> Cell:
    params = _params(sizes.episodes(envs), envs=envs, processes=processes)
    kind = "SubprocVectorEnv" if processes else "DummyVectorEnv"
    return Cell(f"Tianshou Collector, {kind}({envs})", "tianshou", params, _column(None), peers=True)


def correctness(runners: int, episodes: int, evaluations: int) -> list[Cell]:
    """The two-length environment at three layouts, and at one of them with faults."""
    settings: list[tuple[str, dict[str, Any]]] = [
        ("1 env", {"envs": 1}),
        ("8 envs", {"envs": 8}),
        ("32 envs", {"envs": 32}),
        (f"8 envs, {_FAULT_RATE:.1%} of steps raise", {"envs": 8, "fault_rate": _FAULT_RATE}),
    ]
    contenders = [
        (f"rl_eval, {runners} runners", "rl_eval_", False),
        (f"RLlib Algorithm.evaluate, {runners} runners, duration in episodes", "rllib", True),
        ("TorchRL Evaluator, default (first_done)", "torchrl_evaluator", True),
        ("SB3 evaluate_policy, default", "sb3", True),
    ]
    work = {"scenario": "correctness", "runners": runners, "episodes": episodes, "evaluations": evaluations}
    return [
        Cell(label, contender, {**work, **setting}, column, peers, timeout_s=600.0)
        for label, contender, peers in contenders
        for column, setting in settings
    ]


def multi_agent(episodes: int) -> list[Cell]:
    """Both runners of several agents in turn, in one process: 16 environments of 4 agents."""
    params = {"scenario": "throughput", "slots": 16, "agents": 4, "episodes": episodes, "rounds": 3}
    return [Cell("several agents", "multi_agent", params, peers=True, timeout_s=600.0)]


def simulators(runners: int, *, quick: bool) -> list[Cell]:
    """Every world, in the layouts that suit it: many environments in a process, or a process for each."""
    return [cell for name in WORLDS for cell in _world(name, runners, 1 if quick else WORLDS[name].rounds)]


def _world(name: str, runners: int, rounds: int) -> list[Cell]:
    slow, envs = name == "slow", WORLDS[name].envs

    def cell(label: str, contender: str, slots: int, *, peers: bool, runners: int = 1, processes: bool = False) -> Cell:
        params = {"scenario": "simulators", "world": name, "runners": runners, "envs": slots, "processes": processes}
        # One step at a time, 512 episodes of the slow world would take minutes.
        params["episodes"] = envs * (max(1, rounds // 8) if slow and slots * runners * processes < envs else rounds)
        return Cell(label, contender, params, WORLDS[name].title, peers)

    each, shared = f"{runners} runners x {envs // runners}", envs // runners
    cells = [
        cell(f"bare env.step loop, {runners} processes", "bare_loop", 1, peers=False, runners=runners),
        cell(f"bare env.step loop, {runners} processes, peers' gymnasium", "bare_loop", 1, peers=True, runners=runners),
        cell(f"rl_eval, {each}", "rl_eval_", shared, peers=False, runners=runners),
        cell(f"RLlib Algorithm.evaluate, {each}", "rllib", shared, peers=True, runners=runners),
        cell(f"SB3 evaluate_policy, DummyVecEnv({envs})", "sb3", envs, peers=True),
        cell(f"SB3 evaluate_policy, SubprocVecEnv({runners})", "sb3", runners, peers=True, processes=True),
        cell(f"gymnasium SyncVectorEnv({envs})", "async_vector", envs, peers=True),
        cell(f"gymnasium AsyncVectorEnv({runners})", "async_vector", runners, peers=True, processes=True),
    ]
    if slow:
        cells += [
            cell(f"rl_eval, {each}, subprocess", "rl_eval_", shared, peers=False, runners=runners, processes=True),
            cell(
                f"RLlib Algorithm.evaluate, {each}, ASYNC", "rllib", shared, peers=True, runners=runners, processes=True
            ),
            cell(f"SB3 evaluate_policy, SubprocVecEnv({envs})", "sb3", envs, peers=True, processes=True),
            cell(f"gymnasium AsyncVectorEnv({envs})", "async_vector", envs, peers=True, processes=True),
        ]
    return cells


def scaling(*, quick: bool) -> list[Cell]:
    """rl_eval with more and more runners: one environment for each that waits for its simulator, or 64 that compute."""
    counts, rounds = (1, 2, 4, 8), 1 if quick else 8
    waiting = [_runners("slow", count, 1, 8 * rounds) for count in counts]
    return waiting + [_runners("hopper", count, 64 // count, 64 * rounds) for count in counts]


def _runners(world: str, count: int, envs: int, episodes: int) -> Cell:
    params = {"scenario": "simulators", "world": world, "runners": count, "envs": envs, "episodes": episodes}
    return Cell(f"{count} x {envs}", "rl_eval_", params, WORLDS[world].title)


def broadcast(runners: int, num_params: int, rounds: int, object_store_gb: float) -> list[Cell]:
    """rl_eval's weight broadcast and the obvious one."""
    params = {
        "scenario": "broadcast",
        "runners": runners,
        "num_params": num_params,
        "rounds": rounds,
        "object_store_gb": object_store_gb,
    }
    return [
        Cell(f"rl_eval sync_weights, {runners} runners", "rl_eval_", params),
        Cell(f"ray.put(state_dict), {runners} actors", "naive_put", params),
    ]
