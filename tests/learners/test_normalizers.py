"""Statistics of rsl_rl's, skrl's and rl_games' normalizers, and of their checkpoints, give the library's numbers."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

from rl_eval import EvalConfig, evaluate
from rl_eval.errors import ConfigError
from rl_eval.policies.normalization import by_path
from rl_eval.wrappers import frozen
from tests.integrations.test_normalizers import same
from tests.refused import refused
from tests.unit.test_normalized import ROWS

torch = pytest.importorskip("torch")

SEEN = torch.from_numpy(ROWS[:300].astype(np.float32)) * 1.3 + 0.2
ROWS_32 = ROWS.astype(np.float32)


def saved(path: Path, content: Any) -> Path:
    torch.save(content, path)
    return path


def test_statistics_of_rsl_rl(tmp_path: Path) -> None:
    """Of the normalizer, and of checkpoints of versions 5, 3 and 2, which also have those of the critic."""
    normalization = pytest.importorskip("rsl_rl.modules.normalization")
    actor, critic = (normalization.EmpiricalNormalization(3) for _ in range(2))
    with refused(ConfigError, "policy.normalizer"):
        frozen(actor)
    actor.update(SEEN)
    critic.update(SEEN * 2)
    of_actor, of_critic = ({f"obs_normalizer.{k}": v for k, v in one.state_dict().items()} for one in (actor, critic))
    five = {"actor_state_dict": of_actor, "critic_state_dict": of_critic}
    three = {
        f"{name}_{key}": value
        for name, one in (("actor", of_actor), ("critic", of_critic))
        for key, value in one.items()
    }
    two = {"obs_norm_state_dict": actor.state_dict(), "privileged_obs_norm_state_dict": critic.state_dict()}
    files = [saved(tmp_path / f"{at}.pt", one) for at, one in enumerate((five, {"model_state_dict": three}, two))]
    same((actor, *files), ROWS_32, actor.eval()(torch.from_numpy(ROWS_32)))
    own = normalization.EmpiricalNormalization(3, eps=0.5)
    own.update(SEEN)
    same((own,), ROWS_32, own.eval()(torch.from_numpy(ROWS_32)))


def test_statistics_of_skrl(tmp_path: Path) -> None:
    """Of the normalizer, and of checkpoints with those of a state and of the value, and of versions before 2."""
    preprocessors = pytest.importorskip("skrl.resources.preprocessors.torch")
    observation, state, value = (preprocessors.RunningStandardScaler(size) for size in (3, 3, 1))
    for at, (one, seen) in enumerate(((observation, SEEN), (state, SEEN * 2), (value, SEEN[:, :1]))):
        one(seen + at, train=True)
    agent = {"observation_preprocessor": observation, "state_preprocessor": state, "value_preprocessor": value}
    states = {name: one.state_dict() for name, one in agent.items()}
    former = {
        "state_preprocessor": states["observation_preprocessor"],
        "value_preprocessor": states["value_preprocessor"],
    }
    files = [saved(tmp_path / f"{at}.pt", one) for at, one in enumerate((states, former))]
    same((observation, *files), ROWS_32, observation(torch.from_numpy(ROWS_32)))
    own = preprocessors.RunningStandardScaler(3, epsilon=1e-3, clip_threshold=2.0)
    own(SEEN, train=True)
    same((own,), ROWS_32, own(torch.from_numpy(ROWS_32)))


@pytest.mark.filterwarnings("ignore")
def test_statistics_of_rl_games(tmp_path: Path) -> None:
    """Of the normalizer, also in TorchScript, of a checkpoint, and by key."""
    module = pytest.importorskip("rl_games.algos_torch.running_mean_std")
    plain, script, value = (
        module.RunningMeanStd((3,)),
        torch.jit.script(module.RunningMeanStd((3,))),
        module.RunningMeanStd((1,)),
    )
    plain(SEEN), script(SEEN), value(SEEN[:, :1])
    held = {"running_mean_std": plain, "value_mean_std": value}
    model = {f"{name}.{key}": tensor for name, one in held.items() for key, tensor in one.state_dict().items()}
    file = saved(tmp_path / "model.pth", {"model": model, "epoch": 3, "last_mean_rewards": np.float32(-1)})
    due = plain.eval()(torch.from_numpy(ROWS_32))
    same((plain, script, file), ROWS_32, due)
    parts = module.RunningMeanStdObs({"a": (3,), "b": (2,)})
    parts({"a": SEEN, "b": SEEN[:, :2]})
    model = {f"running_mean_std.{key}": tensor for key, tensor in parts.state_dict().items()}
    for source in (parts, saved(tmp_path / "parts.pth", {"model": model})):
        statistics = by_path(**frozen(source))
        assert statistics.keys() == {"a", "b"}
        assert statistics["a"](ROWS_32).tobytes() == due.numpy().tobytes()


@pytest.mark.filterwarnings("ignore")
def test_checkpoints_of_trainings(tmp_path: Path) -> None:
    """Their names are those of the libraries; the statistics are those of the policy's observations."""
    import test_rl_games
    import test_rsl_rl
    import test_skrl

    runner = test_rsl_rl.run(tmp_path, "model_3.pt")
    seen = torch.from_numpy(ROWS_32)
    same((tmp_path / "model_3.pt",), ROWS_32, runner.alg.actor.obs_normalizer.eval()(seen))
    agent = test_skrl.agent_of(64)
    agent.save(str(tmp_path / "agent.pt"))
    same((tmp_path / "agent.pt",), ROWS_32, agent._observation_preprocessor(seen))
    folder = test_rl_games.run(tmp_path / "games")
    player = test_rl_games.player_of(folder)
    same((test_rl_games.checkpoint(folder),), ROWS_32, player.model.running_mean_std.eval()(seen))


def of_d3rlpy() -> str:
    from d3rlpy.algos import DQNConfig
    from d3rlpy.preprocessing import StandardObservationScaler

    algo = DQNConfig(observation_scaler=StandardObservationScaler(mean=np.zeros(4), std=np.ones(4))).create()
    algo.build_with_env(gym.make("CartPole-v1"))
    algo.save("scaled.d3")
    return "scaled.d3"


def of_sb3() -> str:
    vec_env = pytest.importorskip("stable_baselines3.common.vec_env")
    venv = vec_env.VecNormalize(vec_env.DummyVecEnv([lambda: gym.make("CartPole-v1")]))
    model = import_module("stable_baselines3").PPO("MlpPolicy", venv, n_steps=16, batch_size=16).learn(16)
    model.save("model.zip")
    venv.save("vecnormalize.pkl")
    return "model.zip"


def of_run_folder(make: str, policy: str) -> str:
    getattr(import_module("lines_run_folders"), make)()
    return policy


OWN = {
    "rsl_rl": ("Pendulum-v1", lambda: of_run_folder("rsl_rl", "run/model_1000.pt")),
    "skrl": ("Pendulum-v1", lambda: of_run_folder("skrl_agent", "skrl:skrl_models:Actor@agent.pt")),
    "rl_games": ("Pendulum-v1", lambda: of_run_folder("rl_games", "rl_games:agent.yaml@last.pth")),
    "d3rlpy": ("CartPole-v1", of_d3rlpy),
    "stable_baselines3": ("CartPole-v1", of_sb3),
}
"""Policies of libraries that normalize observations themselves: the environment, and what makes the file."""


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("library", OWN)
def test_a_checkpoint_with_a_normalizer_takes_no_second_one(reader: Any, library: str) -> None:
    """And without the second one, it is evaluated."""
    pytest.importorskip(library)
    env, make = OWN[library]
    size = gym.make(env).observation_space.shape
    np.savez("norm.npz", mean=np.full(size, 0.5), var=np.full(size, 4.0))
    made = EvalConfig().environment(env).policy(make()).evaluation(num_episodes=2)
    assert evaluate(made).status == "complete"
    with refused(ConfigError, "policy.normalizer", value=str(Path("norm.npz").resolve())) as caught:
        evaluate(made.policy(normalizer="norm.npz"))
    assert "policy.normalizer" in caught.value.fix
