"""Throughput of batched simulators: ours against the simulator's own loop with the same policy, in turns, by CPU time.

``python -m benchmarks.batched_simulators --simulator cartpole``
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from typing import Any, Final

import gymnasium as gym
import numpy as np
import torch

from rl_eval import EvalConfig, EvalRunnerGroup
from rl_eval.runners import layout_of

Policy = Callable[[Any], Any]
Sweep = Callable[[], tuple[Any, Any]]
"""Takes one step of all slots; returns the rewards, and the mask of the slots that ended."""


@dataclass(frozen=True)
class Contest:
    """A simulator, driven by its own loop and by ours."""

    env: Any
    """``environment.env``."""
    slots: int
    make_policy: Callable[[], Policy]
    make_loop: Callable[[int, Policy], Sweep]
    """Returns the own loop; its episodes restart by themselves."""
    env_kwargs: Mapping[str, Any] = field(default_factory=dict)
    block: int | None = None
    episodes: int = 4_000
    """Episodes in a turn of ours."""
    steps: int = 2_000
    """Steps of all slots in a turn of the own loop."""
    max_episode_steps: int | None = None
    single: Callable[[], Any] | None = None
    """Builds a single environment with the same preprocessing, for our lanes."""
    rllib: bool = False
    """Whether RLlib's environment runner can step it. TorchRL rejects environments that restart in the next step."""


def network(inputs: int, actions: int) -> torch.nn.Sequential:
    """Return a policy network of two hidden layers of 64."""
    torch.manual_seed(0)
    layers = (torch.nn.Linear(inputs, 64), torch.nn.Tanh(), torch.nn.Linear(64, 64), torch.nn.Tanh())
    return torch.nn.Sequential(*layers, torch.nn.Linear(64, actions))


def best_action(inputs: int, actions: int, scale: float = 1.0) -> Policy:
    """Return a policy that takes the action with the greatest output."""
    module = network(inputs, actions)

    @torch.no_grad()
    def act(observations: Any) -> Any:
        return module(torch.as_tensor(observations, dtype=torch.float32).flatten(1) * scale).argmax(1).numpy()

    return act


def balancing() -> Policy:
    """Return a network that balances the pole of CartPole for 500 steps."""
    module = network(4, 2)
    with torch.no_grad():
        for layer in (module[0], module[2], module[4]):
            layer.weight.mul_(1e-4)
            layer.bias.zero_()
        module[0].weight[0] = torch.tensor([0.05, 0.1, 1.0, 0.5])
        module[2].weight[0, 0] = 1
        module[4].weight[:, 0] = torch.tensor([-1.0, 1.0])

    @torch.no_grad()
    def act(observations: Any) -> Any:
        return module(torch.as_tensor(observations)).argmax(1).numpy()

    return act


def torques(inputs: int, actions: int) -> Policy:
    """Return a policy of continuous actions."""
    module = network(inputs, actions)

    @torch.no_grad()
    def act(observations: Any) -> Any:
        return module(torch.as_tensor(observations, dtype=torch.float32)).clamp(-1, 1).numpy()

    return act


def snake_policy() -> Policy:
    """Return a policy that takes the best allowed action."""
    module = network(12 * 12 * 5, 4)

    @torch.no_grad()
    def act(observations: Any) -> Any:
        grid, mask = (torch.from_numpy(np.array(observations[name])) for name in ("grid", "action_mask"))
        return module(grid.flatten(1)).masked_fill(~mask, -torch.inf).argmax(1).numpy()

    return act


def snake_loop(slots: int, policy: Policy) -> Sweep:
    """Return Jumanji's own loop, with its wrapper that restarts episodes."""
    import jax
    import jumanji
    from jumanji.wrappers import AutoResetWrapper, VmapWrapper

    env = VmapWrapper(AutoResetWrapper(jumanji.make("Snake-v1")))  # Faster on a CPU than VmapAutoResetWrapper.
    step = jax.jit(env.step)
    state, now = jax.jit(env.reset)(jax.random.split(jax.random.PRNGKey(0), slots))

    def sweep() -> tuple[Any, Any]:
        nonlocal state, now
        state, now = step(state, policy(now.observation._asdict()).astype(np.int32))
        return np.asarray(now.reward), np.asarray(now.last())

    return sweep


def stepped(env: Any, policy: Policy, **reset: Any) -> Sweep:
    """Return the plain loop of a vector environment of gymnasium's interface."""
    seen, _ = env.reset(**reset)

    def sweep() -> tuple[Any, Any]:
        nonlocal seen
        seen, rewards, terminated, truncated, _ = env.step(policy(seen))
        return rewards, terminated | truncated

    return sweep


def summed(sweep: Sweep, slots: int) -> Sweep:
    """Return a loop that also sums rewards and collects the returns, as every evaluation must."""
    sums, returns = np.zeros(slots), list[float]()

    def step() -> tuple[Any, Any]:
        rewards, ended = sweep()
        np.add(sums, rewards, sums)
        if ended.any():
            returns.extend(sums[ended].tolist())
            sums[ended] = 0
        return rewards, ended

    return step


def gymnasium_loop(name: str, **kwargs: Any) -> Callable[[int, Policy], Sweep]:
    """Return a maker of the loop of ``gymnasium.make_vec``."""
    return lambda slots, policy: stepped(gym.make_vec(name, num_envs=slots, **kwargs), policy, seed=0)


def envpool_loop(task: str, **kwargs: Any) -> Callable[[int, Policy], Sweep]:
    """Return a maker of EnvPool's loop."""

    def make(slots: int, policy: Policy) -> Sweep:
        import envpool

        return stepped(envpool.make_gymnasium(task, num_envs=slots, seed=list(range(slots)), **kwargs), policy)

    return make


def rllib_runner(env: str, slots: int) -> Callable[[int], int]:
    """Return a function that samples steps of each slot with RLlib's environment runner, and returns their number.

    Its module has the layers of our policy, and a head for values.
    """
    from ray.rllib.algorithms.ppo import PPOConfig
    from ray.rllib.env.single_agent_env_runner import SingleAgentEnvRunner

    config = PPOConfig().environment(env).rl_module(model_config={"fcnet_hiddens": [64, 64]})
    config.env_runners(num_envs_per_env_runner=slots, gym_env_vectorize_mode="vector_entry_point")
    runner = SingleAgentEnvRunner(config=config)

    def sample(steps: int) -> int:
        runner.sample(num_timesteps=steps * slots, explore=False)
        return steps * slots

    return sample


def single_pong() -> Any:
    """Return Pong with the preprocessing of ALE's vector environment."""
    env = gym.make("ale_py:ALE/Pong-v5", frameskip=1)
    preprocessed = gym.wrappers.AtariPreprocessing(env, noop_max=0)
    return gym.wrappers.FrameStackObservation(preprocessed, 4, padding_type="zero")


_ONE: Final = {"num_threads": 1}
_UPRIGHT: Final = {**_ONE, "terminate_when_unhealthy": False}
_ALE: Final = {**_ONE, "noop_max": 0, "use_fire_reset": False}
CONTESTS: Final = {
    "cartpole": Contest(
        "CartPole-v1", 1024, balancing, gymnasium_loop("CartPole-v1"), block=4, episodes=4096, steps=800, rllib=True
    ),
    "jumanji": Contest("jumanji:Snake-v1", 256, snake_policy, snake_loop, max_episode_steps=1_000),
    "envpool_cartpole": Contest(
        *("envpool:CartPole-v1", 256, balancing, envpool_loop("CartPole-v1", **_ONE), _ONE), episodes=512
    ),
    "envpool_hopper": Contest(
        *("envpool:Hopper-v4", 64, lambda: torques(11, 3), envpool_loop("Hopper-v4", **_UPRIGHT), _UPRIGHT),
        episodes=64,
        steps=500,
    ),
    "ale": Contest(
        *("ale_py:ALE/Pong-v5", 64, lambda: best_action(28_224, 6, 1 / 255)),
        *(gymnasium_loop("ale_py:ALE/Pong-v5", reward_clipping=False, **_ALE), _ALE),
        episodes=64,
        steps=200,
        max_episode_steps=1_000,
        single=single_pong,
    ),
}
"""Simulators by name. Each is stepped by one thread."""


def main() -> None:
    """Measure one simulator, and print the medians of the turns as a line and as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--simulator", choices=CONTESTS, required=True)
    parser.add_argument("--turns", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(1)
    measured = measure(CONTESTS[args.simulator], args.turns)
    rates = {name: statistics.median(turns) for name, turns in measured.items()}
    ratios = {
        f"ours / {name}": statistics.median(ours / other for ours, other in zip(measured["ours"], turns, strict=True))
        for name, turns in measured.items()
        if name != "ours"
    }
    contest = CONTESTS[args.simulator]
    shown = ", ".join(f"{name} {rate:,.0f}" for name, rate in rates.items())
    print(f"{contest.env}, {contest.slots} slots: {shown} steps per CPU second")
    print(json.dumps({"simulator": args.simulator, "slots": contest.slots, "rates": rates, "ratios": ratios}))


def measure(contest: Contest, turns: int) -> dict[str, list[float]]:
    """Return the steps per CPU second of each turn, by contender."""
    rates: dict[str, list[float]] = {}
    with ExitStack() as stack:
        contenders = _contenders(contest, stack)
        for _ in range(turns):
            for name, turn in contenders.items():
                started = time.process_time()
                steps = turn()
                rates.setdefault(name, []).append(steps / (time.process_time() - started))
    return rates


def _contenders(contest: Contest, stack: ExitStack) -> dict[str, Callable[[], int]]:
    """Return a function of each contender that takes the steps of a turn, and returns their number."""
    policy = contest.make_policy()
    own = contest.make_loop(contest.slots, policy)
    own()  # It may compile.
    found = {"own": _turn(own, contest), "own with returns": _turn(summed(own, contest.slots), contest)}
    if contest.rllib and find_spec("ormsgpack"):  # Of RLlib's own requirements.
        found["RLlib"] = partial(rllib_runner(contest.env, contest.slots), contest.steps // 20)
    found["ours"] = _evaluations(_config(contest, policy), stack)
    if contest.single is not None:
        found["lanes"] = _evaluations(_lanes(contest, policy), stack)
    return found


def _turn(sweep: Sweep, contest: Contest) -> Callable[[], int]:
    def turn() -> int:
        for _ in range(contest.steps):
            sweep()
        return contest.steps * contest.slots

    return turn


def _evaluations(config: EvalConfig, stack: ExitStack) -> Callable[[], int]:
    group = stack.enter_context(EvalRunnerGroup(config, threaded=False))
    group.evaluate(num_episodes=layout_of(group.settings).lanes)
    return lambda: int(group.evaluate().table.rows["length"].sum())


def _config(contest: Contest, policy: Policy) -> EvalConfig:
    config = EvalConfig().environment(contest.env, env_kwargs=dict(contest.env_kwargs))
    config.policy(policy, inference="batched")
    config.runners(runner="batched", num_envs_per_runner=contest.slots, block=contest.block)
    limit = contest.max_episode_steps
    return config.evaluation(num_episodes=contest.episodes, max_episode_steps=limit, determinism_check=0)


def _lanes(contest: Contest, policy: Policy) -> EvalConfig:
    return _config(contest, policy).environment(contest.single, env_kwargs={}).runners(runner="vector", block=None)


if __name__ == "__main__":
    main()
