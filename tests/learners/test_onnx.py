"""ONNX models: real exports, with and without memory, from files and as sessions of onnxruntime."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from torch import nn
from typer.testing import CliRunner

pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")

from onnx_worlds import STEPS, exported, loop, mlp, model, session_of

from rl_eval import EvalConfig, evaluate, load
from rl_eval.cli import app
from rl_eval.config.settings import PolicySection
from rl_eval.errors import ConfigError
from rl_eval.integrations.onnx import load_policy
from rl_eval.policies import adapt_policy
from tests.chunk_world import by_hand_of, make_net, played
from tests.chunk_world import config as chunks
from tests.refused import refused, untold

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore:.*:UserWarning")
KINDS = ["mlp free", "lstm free", "lstm fixed"]


def config(env: str = "Pendulum-v1", episodes: int = 20) -> EvalConfig:
    return EvalConfig().environment(env).evaluation(num_episodes=episodes, seed=3, max_episode_steps=STEPS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


def rows(result: Any) -> list[Any]:
    assert result.status == "complete"
    return [(one.episode_return, one.length) for one in result.episodes]


@pytest.mark.parametrize(
    ("kind", "env"),
    [*((kind, "Pendulum-v1") for kind in KINDS), ("mlp free", "CartPole-v1"), ("lstm fixed", "CartPole-v1")],
)
def test_episodes_are_those_of_a_plain_loop(folder: Path, kind: str, env: str) -> None:
    """With 1 and 8 slots, from the file and from a session."""
    path, made = model(folder, kind, env), config(env)
    first = evaluate(made, str(path))
    assert rows(first) == loop(gym.make(env), path, [one.seed for one in first.episodes])
    of_one = evaluate(made.copy().runners(num_envs_per_runner=1), f"onnx:{path}")
    assert {of_one.fingerprint, evaluate(made, session_of(path)).fingerprint} == {first.fingerprint}
    fixed = kind.endswith("fixed")
    assert len(first.notes) == fixed
    assert not fixed or untold(first.notes[0], path.name, "dimension", "'obs'", "dynamic_axes") == []


@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.parametrize("kind", KINDS)
def test_runners_open_their_own_sessions(folder: Path, kind: str) -> None:
    path, made = model(folder, kind, "Pendulum-v1"), config()
    on_ray = made.copy().runners(num_runners=2, num_envs_per_runner=1)
    named = evaluate(on_ray, f"onnx:{path}")
    assert named.fingerprint == evaluate(made, f"onnx:{path}").fingerprint
    assert evaluate(on_ray, load_policy(str(path))).fingerprint == named.fingerprint
    with refused(ConfigError) as seen:
        evaluate(on_ray, session_of(path))
    assert untold(str(seen.value), "onnx:PATH") == []


def test_a_file_on_the_command_line(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It needs no consent, and the result has the digest of the file and of its weights beside it."""
    path = model(folder, "mlp free", "CartPole-v1")
    assert (path.parent / f"{path.name}.data").exists()
    monkeypatch.chdir(tmp_path)
    for name in (path.name, f"{path.name}.data"):
        shutil.copy(folder / name, name)
    arguments = ["run", "--env", "CartPole-v1", "-n", "2", "--policy", path.name, "--output", "out", "--force"]
    digests = []
    for last in (b"", b"\0"):
        with Path(f"{path.name}.data").open("ab") as file:
            file.write(last)
        done = CliRunner().invoke(app, arguments)
        assert done.exit_code == 0, done.output
        assert untold(done.output, "ONNX", path.name) == []
        digests.append(load("out").provenance["weights"]["files"]["path"])
    assert len(set(digests)) == 2
    Path(f"{path.name}.data").unlink()
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 2
    assert untold(done.output, f"{path.name}.data") == []


def test_a_watch_copies_external_data(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = model(folder, "mlp free", "CartPole-v1")
    monkeypatch.chdir(tmp_path)
    Path("runs").mkdir()
    for name in (path.name, f"{path.name}.data"):
        shutil.copy(folder / name, Path("runs", name))
    options = ["--env", "CartPole-v1", "-n", "2", "--once", "--poll-s", "0.02", "--held-out", "0", "--json"]
    done = CliRunner().invoke(app, ["watch", "runs/*.onnx", *options])
    assert done.exit_code == 0, done.output
    assert list(Path("runs/eval").rglob(f"{path.name}.data"))


# ------------------------------------------------------------------------------ outputs


class Heads(nn.Module):
    """Network with several outputs."""

    def __init__(self, head: Any) -> None:
        super().__init__()
        self.body, self.head = mlp(3, 2), head

    def forward(self, obs: Any) -> Any:
        return self.head(self.body(obs))


def many(folder: Path, name: str, head: Any, gives: list[str]) -> str:
    return str(exported(folder / f"{name}.onnx", Heads(head), (torch.zeros(4, 3),), ["obs"], gives, {"obs": 0}))


def test_a_distribution_is_sampled(folder: Path) -> None:
    path = many(folder, "gauss", lambda x: (x[:, :1], x[:, 1:] - 1, x[:, :1] * 3), ["mu", "log_std", "value"])
    sampled = config(episodes=3).policy(f"onnx:{path}", deterministic=False)
    result = evaluate(sampled)
    assert evaluate(sampled.copy().runners(num_envs_per_runner=1)).fingerprint == result.fingerprint
    assert evaluate(config(episodes=3), path).fingerprint != result.fingerprint
    assert untold(result.notes[0], "'value'") == []
    named = sampled.copy().policy(f"onnx:{path}", deterministic=False, policy_kwargs={"outputs": ["mu"]})
    with refused(ConfigError, "policy.deterministic"):
        evaluate(named)


def test_integers_are_actions(folder: Path) -> None:
    """As d3rlpy exports them for discrete actions."""
    env = "Acrobot-v1"
    arguments = (torch.zeros(4, 6),), ["obs"], ["actions"], {"obs": 0}
    torch.manual_seed(1)
    body = mlp(6, 3)

    class Greedy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = body

        def forward(self, obs: Any) -> Any:
            return self.body(obs).argmax(1)

    greedy = exported(folder / "greedy.onnx", Greedy(), *arguments)
    logits = exported(folder / "logits.onnx", body, *arguments)
    result = evaluate(config(env, 4), str(greedy))
    assert rows(result) == rows(evaluate(config(env, 4), str(logits)))
    assert rows(result) == loop(
        gym.make(env), greedy, [one.seed for one in result.episodes], lambda found: int(found[0])
    )
    with refused(ConfigError, "policy.deterministic"):
        evaluate(config(env, 4).policy(f"onnx:{greedy}", deterministic=False))


# ------------------------------------------------------------------------------ inputs


class Parts(gym.ObservationWrapper[Any, Any, Any]):
    """The observation in two parts."""

    def __init__(self, env: Any) -> None:
        super().__init__(env)
        box = gym.spaces.Box(-10, 10, (2,), np.float64)
        self.observation_space = gym.spaces.Dict({"angle": box, "side": gym.spaces.Discrete(2)})

    def observation(self, observation: Any) -> Any:
        return {"angle": observation[:2].astype(np.float64), "side": int(observation[2] > 0)}


class Both(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(2, 2), nn.Linear(4, 1)

    def forward(self, side: Any, angle: Any) -> Any:
        return torch.tanh(5 * self.head(torch.cat([self.embedding(side), angle], 1)))


def parts() -> Any:
    return Parts(gym.make("Pendulum-v1"))


def test_parts_go_to_the_inputs_of_their_names(folder: Path) -> None:
    given, takes = (torch.zeros(4, dtype=torch.int64), torch.zeros(4, 2)), ["side", "angle"]
    path = exported(folder / "parts.onnx", Both(), given, takes, ["actions"], dict.fromkeys(takes, 0))
    made = config(episodes=3).environment(parts)
    session, env = session_of(path), parts()
    result = evaluate(made, str(path))
    assert evaluate(made.copy().runners(num_envs_per_runner=1), str(path)).fingerprint == result.fingerprint
    for record in result.episodes:
        seen, _ = env.reset(seed=record.seed)
        total = 0.0
        for _ in range(STEPS):
            feeds = {"side": np.array([seen["side"]]), "angle": seen["angle"][None].astype(np.float32)}
            seen, reward, *_ = env.step(session.run(None, feeds)[0][0])
            total += float(reward)
        assert total == record.episode_return


def test_memory_without_matching_names_needs_a_mapping(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, state = nn.LSTM(3, 1), torch.zeros(1, 4, 1)

    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = module

        def forward(self, obs: Any, first: Any, second: Any) -> Any:
            features, (h, c) = self.lstm(obs[None], (first, second))
            return features[0], h, c

    takes = {"obs": 0, "first": 1, "second": 1}
    given = (torch.zeros(4, 3), state, state)
    path = exported(folder / "named.onnx", Named(), given, list(takes), ["action", "third", "fourth"], takes)
    with refused(ConfigError, "policy.policy_kwargs.states") as seen:
        evaluate(config(episodes=2), str(path))
    assert untold(str(seen.value), "first: third", "second: fourth") == []
    states = {"first": "third", "second": "fourth"}
    result = evaluate(config(episodes=2).policy(f"onnx:{path}", policy_kwargs={"states": states}))
    swapped = {"first": "fourth", "second": "third"}
    other = evaluate(config(episodes=2).policy(f"onnx:{path}", policy_kwargs={"states": swapped}))
    assert result.fingerprint != other.fingerprint
    arguments = ["run", "--env", "Pendulum-v1", "-n", "2", "--seed", "3", "--policy", str(path), "--output", "out"]
    more = ["--set", "policy.policy_kwargs={states: {first: third, second: fourth}}", "--set"]  # The path stays.
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, [*arguments, *more, f"evaluation.max_episode_steps={STEPS}"])
    assert done.exit_code == 0, done.output
    assert load("out").fingerprint == result.fingerprint


@pytest.mark.skipif(sys.platform != "linux", reason="counts threads in /proc")
def test_a_session_has_no_threads_of_its_own(folder: Path) -> None:
    path, made = model(folder, "mlp free", "Pendulum-v1"), gym.make("Pendulum-v1")
    before = len([*Path("/proc/self/task").iterdir()])
    policy = adapt_policy(PolicySection(), made.observation_space, made.action_space, load_policy(str(path)))
    assert len([*Path("/proc/self/task").iterdir()]) <= before  # A thread of an earlier test may end.
    assert policy is not None


def test_only_the_cpu_is_used(folder: Path) -> None:
    path = model(folder, "mlp free", "Pendulum-v1")
    with refused(ConfigError, "policy.device", value="cuda"):
        evaluate(config(episodes=2).policy(f"onnx:{path}", device="cuda"))


def test_a_model_may_return_chunks_of_actions(folder: Path) -> None:
    path = exported(folder / "chunks.onnx", make_net(), (torch.zeros(4, 4),), ["obs"], ["chunk"], {"obs": 0})
    session = session_of(path)
    result = evaluate(chunks(4, 3), str(path))
    assert played(result) == by_hand_of(
        result, 4, 3, lambda observations, _: session.run(None, {"obs": observations})[0]
    )


@pytest.mark.parametrize(("key", "value"), [("outputs", ["logit"]), ("states", {"h_inn": "h_out"})])
def test_a_wrong_name_is_named(folder: Path, key: str, value: Any) -> None:
    path = model(folder, "mlp free", "CartPole-v1")
    wrong = value[0] if key == "outputs" else "h_inn"
    with refused(ConfigError, f"policy.policy_kwargs.{key}", value=wrong):
        evaluate(config("CartPole-v1", episodes=1).policy(f"onnx:{path}", policy_kwargs={key: value}))
