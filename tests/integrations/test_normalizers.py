"""Statistics of Tianshou's, TorchRL's and Stable-Baselines3's normalizers give the numbers of their library."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rl_eval import EvalConfig, evaluate
from rl_eval.errors import ConfigError
from rl_eval.policies.normalization import by_path
from rl_eval.wrappers import Normalized, frozen
from tests.refused import refused
from tests.unit.test_normalized import ROWS, Numbers

torch = pytest.importorskip("torch")


def same(sources: tuple[Any, ...], rows: Any, due: Any) -> None:
    """Check that the frozen statistics of each source give the library's numbers, bit for bit."""
    due = np.asarray(due)
    for source in sources:
        got = by_path(**frozen(source))[""](rows)
        assert (got.dtype, got.shape, got.tobytes()) == (due.dtype, due.shape, due.tobytes())


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_statistics_of_tianshou(dtype: Any, tmp_path: Path) -> None:
    env = pytest.importorskip("tianshou.env")
    venv = env.VectorEnvNormObs(env.DummyVectorEnv([lambda: Numbers(dtype)] * 4))
    venv.reset(seed=1)
    for _ in range(4):
        venv.step(np.zeros(4, np.int64))
    np.savez(tmp_path / "norm.npz", **frozen(venv))
    rows = ROWS.astype(dtype)
    same((venv, venv.get_obs_rms(), tmp_path / "norm.npz"), rows, venv._norm_obs(rows))
    venv.get_obs_rms().clip_max = None
    np.savez(tmp_path / "norm.npz", **frozen(venv))
    same((venv, tmp_path / "norm.npz"), rows, venv._norm_obs(rows))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_statistics_of_sb3(dtype: Any, tmp_path: Path) -> None:
    vec_env = pytest.importorskip("stable_baselines3.common.vec_env")
    venv = vec_env.VecNormalize(vec_env.DummyVecEnv([lambda: Numbers(dtype)] * 4), clip_obs=1.5)
    venv.reset()
    for _ in range(30):
        venv.step(np.zeros(4, np.int64))
    venv.save(str(tmp_path / "vecnormalize.pkl"))
    rows = ROWS.astype(dtype)
    same((venv, tmp_path / "vecnormalize.pkl"), rows, venv.normalize_obs(rows))
    with refused(ConfigError, "policy.normalizer", value="VecFrameStack"):
        frozen(vec_env.VecFrameStack(venv, 2))
    for unknown in (venv.obs_rms, vec_env.VecNormalize(venv.venv, norm_obs=False)):
        with refused(ConfigError, "policy.normalizer"):
            frozen(unknown)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("standard", [False, True])
def test_statistics_of_observation_norm(dtype: Any, standard: bool, tmp_path: Path) -> None:
    envs = pytest.importorskip("torchrl.envs")
    norm = envs.ObservationNorm(in_keys=["observation"], standard_normal=standard)
    with refused(ConfigError, "policy.normalizer"):
        frozen(norm)
    env = envs.TransformedEnv(envs.GymWrapper(Numbers(dtype)), norm)
    env.transform.init_stats(100)
    torch.save(env.state_dict(), tmp_path / "env.pt")
    rows = ROWS.astype(dtype)
    same((norm, norm.state_dict(), tmp_path / "env.pt"), rows, norm._apply_transform(torch.from_numpy(rows)))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("kind", ["VecNorm", "VecNormV2"])
@pytest.mark.filterwarnings("ignore")
def test_statistics_of_vec_norm(dtype: Any, kind: str) -> None:
    transforms = pytest.importorskip("torchrl.envs.transforms")
    from tensordict import TensorDict
    from torchrl.envs import GymWrapper, TransformedEnv

    norm = getattr(transforms, kind)(in_keys=["observation", "reward"])
    with refused(ConfigError, "policy.normalizer"):
        frozen(norm)
    env = TransformedEnv(GymWrapper(Numbers(dtype)), norm)
    env.rollout(50, break_when_any_done=False)
    norm.freeze()
    rows = ROWS.astype(dtype)
    single = [TensorDict({"observation": torch.from_numpy(row), "reward": torch.zeros(1)}, []) for row in rows]
    due = torch.stack([env.transform._step(one, one)["observation"] for one in single])
    same((norm,), rows, due)


def test_a_policy_of_torchrl_without_its_environment() -> None:
    """It acts behind its statistics as in the environment with the transform."""
    envs = pytest.importorskip("torchrl.envs")
    from tensordict.nn import TensorDictModule

    norm = envs.ObservationNorm(
        loc=torch.tensor([0.0, 5.0, -20.0]),
        scale=torch.tensor([3.0, 0.01, 100.0]),
        in_keys=["observation"],
        standard_normal=True,
    )
    torch.manual_seed(0)
    policy = TensorDictModule(torch.nn.Sequential(torch.nn.Linear(3, 1), torch.nn.Tanh()), ["observation"], ["action"])
    config = EvalConfig().environment("Pendulum-v1").evaluation(num_episodes=2)

    def own(observations: Any) -> Any:
        with torch.no_grad():
            return policy.module((torch.from_numpy(observations) - norm.loc) / norm.scale).numpy()

    assert evaluate(config, Normalized(policy, **frozen(norm))).fingerprint == evaluate(config, own).fingerprint
    assert evaluate(config, policy).fingerprint != evaluate(config, own).fingerprint


def test_a_model_behind_statistics_is_copied_without_its_training() -> None:
    """An algorithm of Stable-Baselines3 with its environment acts as its policy does."""
    sb3 = pytest.importorskip("stable_baselines3")
    model = sb3.PPO("MlpPolicy", "Pendulum-v1", n_steps=64, seed=0)
    config = EvalConfig().environment("Pendulum-v1").evaluation(num_episodes=2)
    statistics = {"mean": [0.1, 0.0, 0.5], "var": [0.4, 0.4, 9.0]}

    def own(observations: Any) -> Any:
        scaled = (observations.astype(np.float64) - statistics["mean"]) / np.sqrt(np.add(statistics["var"], 1e-8))
        return model.predict(scaled.astype(np.float32), deterministic=True)[0]

    behind = Normalized(model, **statistics)
    model.policy.train()
    assert evaluate(config, behind).fingerprint == evaluate(config, own).fingerprint
