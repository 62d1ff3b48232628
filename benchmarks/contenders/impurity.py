"""rl_eval on environments that are not a function of their seed, or that share something: a process for each.

Every environment moves a number for some steps. What it takes its chance from, and what it keeps, is its kind.
"""

from __future__ import annotations

import fcntl
import importlib
import os
import shutil
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar, Final

import gymnasium as gym
import numpy as np

from benchmarks.contenders import base
from rl_eval import EnvContext, EvalConfig, EvalResult, evaluate
from rl_eval.errors import ConfigError

_ADVICE: Final = {
    "episode": [("environment", "env_reuse", "episode")],
    "process": [("runners", "runner", "subprocess"), ("runners", "num_envs_per_runner", 1)],
}
"""Settings that a result advises, by remedy; each is tried by itself."""
_NOTED: Final = ("global generator", "1 distinct episode")


class Moves(gym.Env[Any, Any]):
    """A function of its seed."""

    observation_space = gym.spaces.Box(-np.inf, np.inf, (1,), np.float64)
    action_space = gym.spaces.Discrete(2)

    def __init__(self, context: Any) -> None:
        self.context = context

    def normal(self) -> float:
        return float(self.np_random.normal())

    def start(self, seed: int | None) -> float:
        return self.normal()

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.x, self.t = self.start(seed), 0
        self.length = 5 + int(20 * abs(np.sin(1 + self.x)))
        return np.array([self.x]), {}

    def noise(self) -> float:
        return 0.3 * self.normal()

    def step(self, action: Any) -> Any:
        self.t += 1
        self.x += (0.2 if action else -0.2) + self.noise()
        return np.array([self.x]), -abs(self.x), self.t >= self.length, False, {}


class GlobalGenerator(Moves):
    def normal(self) -> float:
        return float(np.random.normal())  # noqa: NPY002

    def start(self, seed: int | None) -> float:
        np.random.seed(seed)  # noqa: NPY002
        return super().start(seed)


class RareDraws(GlobalGenerator):
    def noise(self) -> float:
        return super().noise() if self.t == self.length - 1 and self.t % 7 == 0 else 0.0


class FewEpisodesDraw(Moves):
    def noise(self) -> float:
        last, few = self.t == self.length - 1, int(abs(self.x) * 1e6) % 10 == 0
        return float(np.random.normal()) if last and few else 0.0  # noqa: NPY002


class TorchGenerator(Moves):
    def normal(self) -> float:
        return float(importlib.import_module("torch").randn(()))

    def start(self, seed: int | None) -> float:
        importlib.import_module("torch").manual_seed(seed)
        return super().start(seed)


class Counter(Moves):
    """Takes the next of its stored starts at each reset."""

    resets = 0

    def start(self, seed: int | None) -> float:
        self.resets += 1
        return float(self.resets % 50) / 10

    def noise(self) -> float:
        return 0.0


class SharedCursor(Counter):
    """Takes the next start of all environments of the process."""

    def start(self, seed: int | None) -> float:
        SharedCursor.resets += 1
        return float(SharedCursor.resets % 50) / 10


class KeptModel(Moves):
    """Changes its model for an episode, and does not restore it."""

    friction = 1.0

    def start(self, seed: int | None) -> float:
        self.friction *= 1 + 0.1 * self.normal()
        return self.friction * super().start(seed)


class Clock(Moves):
    def noise(self) -> float:
        return float(time.perf_counter_ns() % 1000) / 1000


class Unordered(Moves):
    """Acts on the first of a set, whose order depends on addresses."""

    def start(self, seed: int | None) -> float:
        class Thing:
            def __init__(self, value: float) -> None:
                self.value = value

        self.things = {Thing(self.normal()) for _ in range(16)}
        return next(iter(self.things)).value


class Port(Moves):
    """Listens at the port of its slot while it is open."""

    def __init__(self, context: Any) -> None:
        super().__init__(context)
        self.listening = socket.socket()
        self.listening.bind(("127.0.0.1", context["port"] + context.lane_index))
        self.listening.listen()

    def close(self) -> None:
        self.listening.close()


class Licence(Moves):
    """Takes one of as many licences as there are slots."""

    def __init__(self, context: Any) -> None:
        super().__init__(context)
        self.file = next(self.free(), None)
        if self.file is None:
            raise RuntimeError("no licence is free")

    def free(self) -> Iterator[int]:
        for number in range(self.context["lanes"]):
            file = os.open(Path(self.context["folder"], f"licence{number}"), os.O_CREAT | os.O_RDWR)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                yield file
            except OSError:
                os.close(file)

    def close(self) -> None:
        if self.file is not None:
            os.close(self.file)


class Folder(Moves):
    """Reads its model from the folder of its slot, which it makes and removes."""

    def __init__(self, context: Any) -> None:
        super().__init__(context)
        self.place = Path(context["folder"], f"slot{context.lane_index}")
        self.place.mkdir(exist_ok=True)
        (self.place / "model").write_text("1.5")

    def start(self, seed: int | None) -> float:
        return float((self.place / "model").read_text()) * super().start(seed)

    def close(self) -> None:
        shutil.rmtree(self.place, ignore_errors=True)


class Learning(gym.wrappers.NormalizeObservation[Any, Any, Any]):
    """Statistics of observations that change with every step."""

    def __init__(self, context: Any) -> None:
        super().__init__(Moves(context))


class _Kind:
    """An environment class, and what its episodes should be."""

    def __init__(self, cls: Any, truth: str = "") -> None:
        self.cls, self.truth = cls, truth

    OF_SEED: ClassVar = "one environment"
    OF_NEW: ClassVar = "new environments"


KINDS: Final[dict[str, _Kind]] = {
    "numpy's generator, seeded in reset": _Kind(GlobalGenerator, _Kind.OF_SEED),
    "the same, drawn from rarely": _Kind(RareDraws, _Kind.OF_SEED),
    "torch's generator, seeded in reset": _Kind(TorchGenerator, _Kind.OF_SEED),
    "counter over stored starts": _Kind(Counter),
    "the same, shared by the class": _Kind(SharedCursor),
    "model that stays changed": _Kind(KeptModel, _Kind.OF_NEW),
    "wrapper with running statistics": _Kind(Learning),
    "wall clock": _Kind(Clock),
    "set ordered by address": _Kind(Unordered),
    "port of the slot": _Kind(Port, _Kind.OF_SEED),
    "one licence per slot": _Kind(Licence, _Kind.OF_SEED),
    "folder of the slot": _Kind(Folder, _Kind.OF_SEED),
    "numpy's generator, in a tenth of the episodes": _Kind(FewEpisodesDraw),
}


def make(context: EnvContext) -> gym.Env[Any, Any]:
    """Build the environment of a kind."""
    return KINDS[context["kind"]].cls(context)  # type: ignore[no-any-return]


def act(observations: Any) -> Any:
    """Push towards zero."""
    return (observations[:, 0] < 0).astype(np.int64)


def kind(params: base.Params) -> dict[str, Any]:
    """Evaluate one kind in one layout, and compare with a plain loop."""
    made = {name: params[name] for name in ("kind", "folder", "port")} | {"lanes": params["lanes"]}
    config = EvalConfig().environment(make, env_kwargs=made).policy(act).runners(num_envs_per_runner=params["lanes"])
    for section, key, value in params["advised"]:
        getattr(config, section)(**{key: value})
    try:
        result = evaluate(config.evaluation(num_episodes=params["episodes"]))
    except ConfigError as error:
        return {"refused": str(error), "said": str(error), "advised": []}
    truth = KINDS[params["kind"]].truth
    returns = result.table.rows["episode_return"].tolist()
    right = bool(truth) and returns == _loop(EnvContext(made, 0, 0, 0, False), result, truth == _Kind.OF_NEW)
    return {
        "right": right,
        "passed": result.determinism.passed,
        "noted": any(part in note for part in _NOTED for note in result.notes),
        "status": result.status,
        "faults": len(result.faults),
        "mean": result.mean_return,
        "said": " | ".join(result.notes) or str(result.determinism),
        "advised": _ADVICE.get(result.determinism.remedy, []),
    }


def _loop(context: EnvContext, result: EvalResult, anew: bool) -> list[float]:
    """Play the episodes of a plan one after the other, in one environment or in a new one each."""
    env, returns = None, []
    for seed in result.plan.seeds.tolist():
        if env is None or anew:
            env = make(context)
        observation, _ = env.reset(seed=seed)
        total, ended = 0.0, False
        while not ended:
            observation, reward, ended, _, _ = env.step(act(observation[None])[0])
            total += float(reward)
        returns.append(total)
        if anew:
            env.close()
    if env is not None:
        env.close()
    return returns


_AGENTS: Final = {
    "classic": "chess_v6 connect_four_v3 go_v5 rps_v2 tictactoe_v3",
    "butterfly": "cooperative_pong_v6 pistonball_v6",
}
_KNOWN: Final = {"BipedalWalker-v3", "BipedalWalkerHardcore-v3"}
"""Not functions of their seed, and so flagged rightly."""


def pure(params: base.Params) -> dict[str, Any]:
    """Evaluate the environments of a family that are installed, and list what their results say."""
    alarms, evaluated, missing = dict[str, list[str]](), list[str](), list[str]()
    for name in _members(params["family"]):
        config = EvalConfig().environment(name, env_kwargs={}).policy("random").runners(num_envs_per_runner=4)
        if params["family"] == "PettingZoo":
            config.runners(runner="multi_agent")
        try:
            result = evaluate(config.evaluation(num_episodes=8, max_episode_steps=params["steps"]))
        except Exception:
            missing.append(name)
            continue
        evaluated.append(name)
        said = [note for note in result.notes if any(part in note for part in _NOTED)]
        if said or (result.determinism.passed is False and name not in _KNOWN):
            alarms[name] = [str(result.determinism), *said]
    return {"evaluated": evaluated, "missing": missing, "alarms": alarms}


def _members(family: str) -> list[str]:
    if family == "PettingZoo":
        return [f"pettingzoo.{group}.{name}:env" for group, names in _AGENTS.items() for name in names.split()]
    if family == "ALE":
        importlib.import_module("ale_py")
        return [f"ale_py:{name}" for name in gym.registry if name.startswith("ALE/")][:25]
    return [name for name, spec in gym.registry.items() if str(spec.entry_point).startswith("gymnasium.")]


if __name__ == "__main__":
    base.run({"kind": kind, "pure": pure})
