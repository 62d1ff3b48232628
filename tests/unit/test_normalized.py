"""Frozen statistics of normalizers: equal to the library's own numbers, part of the identity, and read without code."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.wrappers import NormalizeObservation, NormalizeReward, RecordEpisodeStatistics, TransformObservation
from gymnasium.wrappers.vector import NormalizeObservation as NormalizeObservations

from rl_eval import EvalConfig, EvalRunnerGroup, evaluate, evaluate_policy, load, replay
from rl_eval.cli import app
from rl_eval.errors import ConfigError, LogMismatch, WeightsError
from rl_eval.policies.mlp import MLPActor
from rl_eval.policies.normalization import by_path
from rl_eval.wrappers import Normalized, frozen
from tests.refused import refused

ROWS = np.random.default_rng(0).normal([0, 5, -20], [3, 0.01, 100], (1000, 3))


class Numbers(gym.Env[Any, Any]):
    """Observations of very different sizes, in a dtype."""

    action_space = gym.spaces.Discrete(2)

    def __init__(self, dtype: Any = np.float32) -> None:
        self.observation_space = gym.spaces.Box(-np.inf, np.inf, (3,), dtype)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.left = 5
        return self._seen(), {}

    def step(self, action: Any) -> Any:
        self.left -= 1
        return self._seen(), float(action), self.left == 0, False, {}

    def _seen(self) -> Any:
        return self.np_random.normal([0, 5, -20], [3, 0.01, 100]).astype(self.observation_space.dtype)


def trained(dtype: Any = np.float32) -> Any:
    """Return an environment with a normalizer that has seen 60 observations."""
    env = NormalizeObservation(Numbers(dtype))
    for seed in range(10):
        env.reset(seed=seed)
        for _ in range(5):
            env.step(0)
    env.update_running_mean = False
    return env


def lean(observations: Any) -> Any:
    return (observations.sum(1) > 0).astype(np.int64)


def net() -> torch.nn.Module:
    torch.manual_seed(3)
    return torch.nn.Linear(3, 2)


def config(**evaluation: Any) -> EvalConfig:
    return EvalConfig().environment(f"{__name__}:Numbers").evaluation(**{"num_episodes": 8, **evaluation})


def normalized(source: Any, rows: Any) -> Any:
    return by_path(**frozen(source))[""](rows)


# ------------------------------------------------------------------------------ the library's own numbers


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_statistics_of_gymnasium_give_its_own_numbers(dtype: Any, tmp_path: Path) -> None:
    """On 1,000 rows, bit for bit: of a wrapper, of the statistics, of a pickle, and of an npz file."""
    env, rows = trained(dtype), ROWS.astype(dtype)
    due = np.stack([env.observation(row) for row in rows])
    (tmp_path / "rms.pkl").write_bytes(pickle.dumps(env.obs_rms))
    np.savez(tmp_path / "all.npz", **frozen(env))
    for source in (env, NormalizeReward(env), env.obs_rms, tmp_path / "rms.pkl", str(tmp_path / "all.npz")):
        got = normalized(source, rows)
        assert got.dtype == due.dtype
        assert got.tobytes() == due.tobytes()


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_statistics_of_a_vector_environment_give_its_own_numbers(dtype: Any) -> None:
    envs = NormalizeObservations(gym.vector.SyncVectorEnv([lambda: Numbers(dtype)] * 4))
    envs.reset(seed=1)
    for _ in range(30):
        envs.step(np.zeros(4, np.int64))
    envs.update_running_mean = False
    due, got = envs.observations(ROWS.astype(dtype)), normalized(envs, ROWS.astype(dtype))
    assert (got.dtype, got.tobytes()) == (due.dtype, due.tobytes())


def test_a_policy_behind_statistics_acts_as_with_the_wrapper() -> None:
    """The statistics that are frozen are a copy, and the wrapper itself is refused with this advice."""
    env = trained()
    plain = evaluate(config(), lean)
    with refused(ConfigError, "environment.wrappers[0]"):
        evaluate(config().environment("CartPole-v1", wrappers=[NormalizeObservation]), lean)

    def with_wrapper() -> Any:
        own = NormalizeObservation(Numbers())
        own.obs_rms.mean, own.obs_rms.var, own.update_running_mean = MEAN, VAR, False
        return own

    MEAN, VAR = env.obs_rms.mean.copy(), env.obs_rms.var.copy()
    due = evaluate(config().environment(with_wrapper), lean)
    policy = Normalized(lean, **frozen(env))
    env.obs_rms.mean += 100
    result = evaluate(config(), policy)
    assert list(result.returns) == list(due.returns) != list(plain.returns)
    assert result.provenance["weights"]["digest"]
    assert evaluate_policy(policy, Numbers, n_eval_episodes=8)[0] == due.mean_return


# ------------------------------------------------------------------------------ policy.normalizer


def test_a_normalizer_in_a_config_is_part_of_what_is_evaluated(tmp_path: Path, monkeypatch: Any) -> None:
    """Its file is relative to the config; a log continues only with the same file; a replay needs it."""
    path, run = tmp_path / "norm.npz", tmp_path / "run"
    np.savez(path, **frozen(trained()))
    text = f"environment: {{env: '{__name__}:Numbers'}}\nevaluation: {{num_episodes: 8}}\n"
    (tmp_path / "eval.yaml").write_text(f"{text}policy: {{policy: '{__name__}:lean', normalizer: norm.npz}}\n")
    named = EvalConfig.from_yaml(tmp_path / "eval.yaml")
    result = evaluate(named, output=run)
    assert result.fingerprint == evaluate(config(), Normalized(lean, **frozen(path))).fingerprint
    assert "norm.npz" in " ".join(result.notes)
    assert result.provenance["identity"]["normalizer"] == str(path)
    assert "policy.normalizer" in result.provenance["weights"]["files"]
    assert replay(load(run), 3, config=named).identical
    monkeypatch.chdir(tmp_path)
    again = evaluate(config().policy(f"{__name__}:lean", normalizer="norm.npz").runners(num_envs_per_runner=1))
    assert again.fingerprint == result.fingerprint
    other = named.copy().policy(normalizer=None)
    np.savez(path, mean=np.zeros(3), var=np.ones(3))
    with refused(ConfigError, "policy.normalizer"):
        evaluate(again_built(named))
    for changed in (named, other):
        with pytest.raises(LogMismatch):
            evaluate(changed, output=run)


def again_built(config: EvalConfig) -> Any:
    """Return settings that were built before a file changed."""
    settings = config.build()
    path = Path(settings.policy.normalizer)
    np.savez(path, mean=np.ones(3), var=np.ones(3))
    return settings


def test_weights_of_a_config_are_those_of_the_inner_policy(tmp_path: Path) -> None:
    """So a file of weights, weights that a training sends, and a policy object are as without a normalizer."""
    np.savez(tmp_path / "norm.npz", **frozen(trained()))
    torch.save(net().state_dict(), tmp_path / "net.pt")
    due = evaluate(config(), Normalized(net(), **frozen(trained()))).fingerprint
    behind = config().policy(normalizer=tmp_path / "norm.npz")
    named = f"torch:{__name__}:net@{tmp_path / 'net.pt'}"
    assert evaluate(behind.copy().policy(named)).fingerprint == due
    assert evaluate(behind, net()).fingerprint == due
    with EvalRunnerGroup(behind, net(), threaded=False) as group:
        group.sync_weights(torch.nn.Linear(3, 2))
        assert group.evaluate().fingerprint != due
        group.sync_weights(net())
        assert group.evaluate().fingerprint == due
    replaced = config().policy(f"{__name__}:lean", normalizer=tmp_path / "norm.npz")
    assert evaluate(replaced, net()).fingerprint == evaluate(config(), net()).fingerprint


def test_a_normalizer_on_the_command_line(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    np.savez("norm.npz", **frozen(trained()))
    words = f"run --env {__name__}:Numbers --policy {__name__}:lean -n 8 -o out --set policy.normalizer=norm.npz -q"
    app(words.split(), standalone_mode=False)
    assert load("out").fingerprint == evaluate(config(), Normalized(lean, **frozen("norm.npz"))).fingerprint


# ------------------------------------------------------------------------------ parts of an observation


def test_statistics_by_key(tmp_path: Path) -> None:
    """In a mapping or a file, and refused with all keys if they do not fit the space."""
    env = "tests.unit.test_filters:Drift"
    policy = lambda observations: (observations["x"][:, 0] > 0).astype(np.int64)  # noqa: E731
    mean, var = {"x": [105.0, 0.0]}, {"x": [4.0, 1.0]}
    np.savez(tmp_path / "parts.npz", **{"x/mean": mean["x"], "x/var": var["x"]})
    by_key = config().environment(env)
    due = evaluate(by_key, Normalized(policy, mean, var)).fingerprint
    assert evaluate(by_key.copy().policy(normalizer=tmp_path / "parts.npz"), policy).fingerprint == due
    assert evaluate(by_key, policy).fingerprint != due
    for wrong in ([0.0, 0.0], {"y": [0.0, 0.0]}, {"x": [0.0, 0.0, 0.0]}):
        spread = {key: np.ones(len(value)) for key, value in wrong.items()} if isinstance(wrong, dict) else [1.0, 1.0]
        with pytest.raises(WeightsError, match="'x': \\(2,\\)"):
            evaluate(by_key, Normalized(policy, wrong, spread))


# ------------------------------------------------------------------------------ refused


def test_objects_without_known_statistics_are_refused() -> None:
    """Other objects, several normalizers, a wrapper outside that changes observations, and one that saw nothing."""
    env = trained()
    for unknown in (Numbers(), object(), NormalizeObservation(env), gym.vector.SyncVectorEnv([Numbers])):
        with refused(ConfigError, "policy.normalizer"):
            frozen(unknown)
    with refused(ConfigError, "policy.normalizer", value="TransformObservation"):
        frozen(TransformObservation(env, lambda seen: seen.clip(-10, 10), env.observation_space))
    with refused(ConfigError, "policy.normalizer"):
        frozen(NormalizeObservation(Numbers()))


def test_the_wrappers_of_a_script_of_cleanrl() -> None:
    """It limits normalized numbers outside of the normalizer. The advice of the errors leads to its numbers."""

    def make() -> Any:
        made = NormalizeObservation(RecordEpisodeStatistics(Numbers()))
        return NormalizeReward(TransformObservation(made, lambda seen: seen.clip(-1, 1), made.observation_space))

    envs = gym.vector.SyncVectorEnv([make])
    envs.reset(seed=1)
    for _ in range(30):
        envs.step(np.zeros(1, np.int64))
    with refused(ConfigError, "policy.normalizer") as caught:
        frozen(envs)
    assert "envs.envs[0]" in caught.value.fix
    env = envs.envs[0]
    with refused(ConfigError, "policy.normalizer", value="TransformObservation") as caught:
        frozen(env)
    assert "frozen(env.env.env)" in caught.value.fix
    limited = by_path(**{**frozen(env.env.env), "clip": 1.0})[""]
    env.env.env.update_running_mean = False
    due = np.stack([env.env.observation(env.env.env.observation(row)) for row in ROWS.astype(np.float32)])
    assert limited(ROWS.astype(np.float32)).tobytes() == due.tobytes()


class Evil:
    """Creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def test_files_without_statistics_are_refused_and_run_nothing(tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    (tmp_path / "evil.pkl").write_bytes(pickle.dumps({"mean": Evil(ran), "var": Evil(ran)}))
    torch.save({"mean": Evil(ran)}, tmp_path / "evil.pt")
    np.savez(tmp_path / "evil.npz", mean=np.array([Evil(ran)]), var=np.ones(1))
    np.savez(tmp_path / "none.npz", std=np.ones(3))
    (tmp_path / "text.npz").write_text("mean")
    (tmp_path / "text.pkl").write_text("mean")
    torch.save(torch.nn.BatchNorm1d(3).state_dict(), tmp_path / "layer.pt")
    torch.save({name: {"mean": torch.ones(3), "var": torch.ones(3)} for name in "ab"}, tmp_path / "two.pt")
    for path in [*sorted(tmp_path.iterdir()), tmp_path / "absent.npz"]:
        with refused(ConfigError, "policy.normalizer", value=str(path)):
            frozen(path)
    assert not ran.exists()


def test_one_of_several_statistics_is_chosen_in_python(tmp_path: Path) -> None:
    held = {"a": torch.ones(3), "b": torch.full((3,), 2.0)}
    torch.save({name: {"mean": mean, "var": torch.ones(3)} for name, mean in held.items()}, tmp_path / "two.pt")
    chosen = frozen(torch.load(tmp_path / "two.pt", weights_only=True)["b"])
    assert (chosen["mean"] == 2).all()
    assert evaluate(config(), Normalized(MLPActor(3, 2), **chosen)).status == "complete"


def test_a_file_that_does_not_fit_names_the_key(tmp_path: Path) -> None:
    """Before an episode: it is missing, has other shapes, or is of another kind."""
    np.savez(tmp_path / "shape.npz", mean=np.zeros(2), var=np.ones(2))
    torch.save(net().state_dict(), tmp_path / "weights.pt")
    (tmp_path / "text.bin").write_text("text")
    for name in ("absent.npz", "shape.npz", "weights.pt", "text.bin"):
        with refused(ConfigError, "policy.normalizer", value=str(tmp_path / name)) as caught:
            evaluate(config().policy(f"{__name__}:lean", normalizer=tmp_path / name))
        assert caught.value.fix
        assert {"policy.normalizer", name} <= {word.strip("':,") for word in caught.value.problem.split()}
        assert "arbitrary" not in caught.value.problem


def normalizing() -> Normalized:
    """Return a policy with its own statistics."""
    return Normalized(lean, **frozen(trained()))


def test_a_policy_is_not_normalized_twice_without_being_asked(tmp_path: Path) -> None:
    """Of a factory, and as an object. In Python, two normalizers can be nested."""
    np.savez(path := tmp_path / "norm.npz", **frozen(trained()))
    for named, policy in ((f"{__name__}:normalizing", None), (None, normalizing())):
        with refused(ConfigError, "policy.normalizer", value=str(path)) as caught:
            evaluate(config().policy(named, normalizer=path), policy)
        assert caught.value.fix
    assert evaluate(config(), Normalized(normalizing(), **frozen(path))).status == "complete"
