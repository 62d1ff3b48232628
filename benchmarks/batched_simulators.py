"""Throughput of batched simulators: ours against the simulator's own loop with the same policy, in turns, by CPU time.

``python -m benchmarks.batched_simulators --simulator jumanji``
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch

from rl_eval import EvalConfig, EvalRunnerGroup


@dataclass(frozen=True)
class Contest:
    """A simulator, driven by its own loop and by ours."""

    env: Any
    """``environment.env``."""
    slots: int
    make_policy: Callable[[], Callable[[Any], Any]]
    make_loop: Callable[[int, Callable[[Any], Any]], Callable[[], None]]
    """Returns a function that takes one step of all slots, whose episodes restart by themselves."""


def network(inputs: int, actions: int) -> torch.nn.Module:
    """Return a policy network of two hidden layers of 64."""
    torch.manual_seed(0)
    layers = (torch.nn.Linear(inputs, 64), torch.nn.Tanh(), torch.nn.Linear(64, 64), torch.nn.Tanh())
    return torch.nn.Sequential(*layers, torch.nn.Linear(64, actions))


def snake_policy() -> Callable[[Any], Any]:
    """Return a policy that takes the best allowed action."""
    module = network(12 * 12 * 5, 4)

    @torch.no_grad()
    def act(observations: Any) -> Any:
        grid, mask = (torch.from_numpy(np.array(observations[name])) for name in ("grid", "action_mask"))
        return module(grid.flatten(1)).masked_fill(~mask, -torch.inf).argmax(1).numpy()

    return act


def snake_loop(slots: int, policy: Callable[[Any], Any]) -> Callable[[], None]:
    """Return Jumanji's own loop, with its wrapper that restarts episodes."""
    import jax
    import jumanji
    from jumanji.wrappers import AutoResetWrapper, VmapWrapper

    env = VmapWrapper(AutoResetWrapper(jumanji.make("Snake-v1")))  # Faster on a CPU than VmapAutoResetWrapper.
    step = jax.jit(env.step)
    state, now = jax.jit(env.reset)(jax.random.split(jax.random.PRNGKey(0), slots))

    def sweep() -> None:
        nonlocal state, now
        state, now = step(state, policy(now.observation._asdict()).astype(np.int32))
        np.asarray(now.reward), np.asarray(now.last())

    return sweep


CONTESTS: Final = {"jumanji": Contest("jumanji:Snake-v1", 256, snake_policy, snake_loop)}


def main() -> None:
    """Measure one simulator, and print the medians of the turns."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--simulator", choices=CONTESTS, required=True)
    parser.add_argument("--steps", type=int, default=2_000, help="steps of all slots in a turn of the own loop")
    parser.add_argument("--episodes", type=int, default=4_000, help="episodes in a turn of ours")
    parser.add_argument("--turns", type=int, default=5)
    args = parser.parse_args()
    contest = CONTESTS[args.simulator]
    policy = contest.make_policy()
    sweep = contest.make_loop(contest.slots, policy)
    config = EvalConfig().environment(contest.env).policy(policy, inference="batched")
    config.runners(runner="batched", num_envs_per_runner=contest.slots, num_runners=0)
    config.evaluation(num_episodes=args.episodes, max_episode_steps=1_000, determinism_check=0)
    rates: dict[str, list[float]] = {"own": [], "ours": []}
    with EvalRunnerGroup(config, threaded=False) as group:
        group.evaluate()
        sweep()
        for _ in range(args.turns):
            started = time.process_time()
            for _ in range(args.steps):
                sweep()
            rates["own"].append(args.steps * contest.slots / (time.process_time() - started))
            started = time.process_time()
            steps = sum(record.length for record in group.evaluate().episodes)
            rates["ours"].append(steps / (time.process_time() - started))
    own, ours = (statistics.median(rates[name]) for name in ("own", "ours"))
    print(f"{contest.env}, {contest.slots} slots: own {own:,.0f} and ours {ours:,.0f} steps per CPU second")
    print(f"ratio {statistics.median(b / a for a, b in zip(*rates.values(), strict=True)):.2f}")


if __name__ == "__main__":
    main()
