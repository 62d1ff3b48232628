"""Evaluation beside the training of Stable-Baselines3."""

import csv
import io
import json
import logging
import os
import shutil
import signal
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("stable_baselines3")

import gymnasium as gym
import numpy as np
import torch
import trainer_state
from acting_world import Rewards
from stable_baselines3 import DQN, PPO, SAC
from stable_baselines3.common.callbacks import (
    BaseCallback,
    CallbackList,
    EveryNTimesteps,
    StopTrainingOnNoModelImprovement,
    StopTrainingOnRewardThreshold,
)
from stable_baselines3.common.callbacks import EvalCallback as Theirs
from stable_baselines3.common.logger import configure
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize

from rl_eval import EvalConfig, EvalResult, evaluate
from rl_eval.errors import ConfigError
from rl_eval.integrations.sb3 import EvalCallback, load_policy
from rl_eval.integrations.sb3.best_model import BestModel
from rl_eval.results.text import BIASED_BEST
from rl_eval.training.evaluator import Evaluator
from tests.refused import refused


def make_ppo(envs=2, action="box", normalize=False):
    venv = DummyVecEnv([lambda: Rewards("vector", action)] * envs)
    if normalize:
        venv = VecNormalize(venv)
    return PPO("MlpPolicy", venv, n_steps=32, batch_size=32, n_epochs=2, seed=1, device="cpu", learning_rate=0.01)


def make_config(action="box", env=Rewards, **kwargs):
    return (
        EvalConfig()
        .environment(env, env_kwargs={"action": action, **kwargs})
        .evaluation(num_episodes=6, seed=8)
        .runners(num_envs_per_runner=3)
    )


def trained(steps, config=None, beside=(), model=None, **options):
    """Train a model with evaluations beside it, by default at every 64th step; return the callback."""
    callback = EvalCallback(make_config() if config is None else config, **{"every_steps": 64, "verbose": 0, **options})
    (model or make_ppo()).learn(steps, callback=CallbackList([callback, *beside]))
    return callback


class Saved(BaseCallback):
    """Saves the model at every step at which an evaluation was submitted, in memory; stands after the evaluation."""

    def __init__(self, callback: EvalCallback) -> None:
        super().__init__()
        self._callback, self.models = callback, {}

    def _on_step(self) -> bool:
        if any(waiting.step == self.num_timesteps for waiting in self._callback._open):
            file = self.models[self.num_timesteps] = io.BytesIO()
            self.model.save(file)
        return True


def test_every_evaluation_has_the_weights_of_its_step():
    """Those of the last due step, too, although the model is updated once more."""
    model = make_ppo()
    callback = EvalCallback(make_config(), every_steps=64, verbose=0)
    saved = Saved(callback)
    model.learn(320, callback=[callback, saved])
    assert [step for step, _ in callback.results] == [64, 128, 192, 256, 320]
    for step, result in callback.results:
        saved.models[step].seek(0)
        frozen = PPO.load(saved.models[step], device="cpu")
        assert result.fingerprint == evaluate(make_config(), frozen).fingerprint
    assert len({result.fingerprint for _, result in callback.results}) == 5
    assert callback.evaluator is None


@pytest.mark.parametrize("algorithm", ["PPO", "SAC"])
def test_the_steps_are_those_of_sb3_in_every_run(tmp_path, algorithm):
    """The first multiple of ``eval_freq`` calls to the last, in a training that exceeds what was asked for."""

    def steps_of(callback):
        if algorithm == "PPO":
            model = make_ppo(envs=3)
        else:
            model = SAC("MlpPolicy", Rewards("vector", "box"), learning_starts=40, seed=1, device="cpu")
        model.learn(200, callback=callback)
        return callback

    env = Monitor(Rewards("vector", "box"))
    theirs = steps_of(Theirs(env, eval_freq=10, n_eval_episodes=1, log_path=str(tmp_path), verbose=0, warn=False))
    ours = [steps_of(EvalCallback(make_config(), eval_freq=10, verbose=0)).results for _ in range(3)]
    for results in ours:
        assert [step for step, _ in results] == theirs.evaluations_timesteps
    assert len({tuple(result.fingerprint for _, result in results) for results in ours}) == 1


def test_what_is_printed_is_what_sb3_prints(capsys):
    """The standard deviations divide by n."""
    make_ppo().learn(64, callback=(callback := EvalCallback(make_config(), every_steps=64)))
    [(_, result)] = callback.results
    rows = result.table.rows
    returns, lengths = rows["episode_return"], rows["length"]
    assert capsys.readouterr().out.splitlines()[:2] == [
        f"Eval num_timesteps=64, episode_reward={returns.mean():.2f} +/- {returns.std():.2f}",
        f"Episode length: {lengths.mean():.2f} +/- {lengths.std():.2f}",
    ]


def test_the_arguments_are_those_of_sb3():
    """In its order, of an environment; what would be ignored is an error."""
    env = gym.make("CartPole-v1")
    callback = EvalCallback(env, None, None, 5, 64, None, None, True, False, 0, False)
    by_name = EvalCallback(eval_env=env, eval_freq=64, render=False, verbose=0, warn=True)
    results = []
    for one in (callback, by_name):
        PPO("MlpPolicy", "CartPole-v1", n_steps=64, seed=0, device="cpu").learn(64, callback=one)
        results += one.results
    assert [(step, result.metrics["num_episodes"]) for step, result in results] == [(64, 5), (64, 5)]
    assert results[0][1].fingerprint == results[1][1].fingerprint
    for wrong, key, value in (
        ({"render": True}, "render", True),
        ({"eval_freq": 20, "every_steps": 10}, "every_steps", 10),
        ({"eval_freq": 0}, "eval_freq", 0),
        ({"every_steps": 0}, "every_steps", 0),
    ):
        with refused(ConfigError, key, value=value):
            EvalCallback(env, **wrong)


@pytest.mark.parametrize("when", ["construct", "step"])
def test_files_lie_where_the_callback_was_made(tmp_path, monkeypatch, when):
    """Although the environment of the evaluation moves the process to another folder."""
    for name in ("home", "assets"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "home")

    class Wanderer(Rewards):
        def __init__(self, **kwargs):
            super().__init__(**kwargs)
            self.wander("construct")

        def wander(self, now):
            if when == now:
                os.chdir(tmp_path / "assets")

        def step(self, action):
            self.wander("step")
            return super().step(action)

    trained(128, make_config(env=Wanderer), log_path="logs", best_model_save_path="best")
    assert list((tmp_path / "assets").iterdir()) == []
    assert (tmp_path / "home" / "logs" / "evaluations.npz").is_file()
    assert (tmp_path / "home" / "best" / "best_model.zip").is_file()


def test_the_best_model_is_saved_as_it_was_evaluated(tmp_path):
    model = make_ppo(normalize=True)
    callback = trained(384, model=model, best_model_save_path=tmp_path)
    best = max((result for _, result in callback.results), key=lambda result: result.mean_return)
    assert callback.best_mean_reward == best.mean_return
    frozen = load_policy(tmp_path / "best_model", tmp_path / "best_model_vecnormalize.pkl")
    assert evaluate(make_config(), frozen).fingerprint == best.fingerprint
    (pair,) = (path for path in tmp_path.iterdir() if not path.is_symlink())
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "best_model.d", pair.name, "best_model.zip", "best_model_vecnormalize.pkl",
    ]  # fmt: skip
    assert sorted(path.name for path in pair.iterdir()) == [
        "best_model.json", "best_model.zip", "best_model_vecnormalize.pkl",
    ]  # fmt: skip
    step = next(step for step, result in callback.results if result is best)
    assert json.loads((tmp_path / "best_model.d" / "best_model.json").read_text()) == {
        "step": step,
        "mean_reward": best.mean_return,
        "meaning": BIASED_BEST,
        "fingerprint": best.fingerprint,
    }
    PPO.load(tmp_path / "best_model.zip", env=model.get_env()).learn(64)


def test_results_are_logged_under_their_own_step_and_nothing_else_is(tmp_path):
    def logged(name, callback):
        model = make_ppo()
        model.set_logger(configure(str(tmp_path / name), ["csv"]))
        model.learn(320, callback=callback, log_interval=2)
        model.logger.close()
        with (tmp_path / name / "progress.csv").open() as file:
            return list(csv.DictReader(file))

    callback = EvalCallback(make_config(), every_steps=64, verbose=0)
    rows, plain = logged("with", callback), logged("without", None)
    ours = [row for row in rows if row["eval/mean_reward"]]
    assert [(int(row["time/total_timesteps"]), float(row["eval/mean_reward"])) for row in ours] == [
        (step, pytest.approx(result.mean_return)) for step, result in callback.results
    ]
    assert [float(row["eval/mean_ep_length"]) for row in ours] == [
        pytest.approx(result.metrics["episode_len_mean"]) for _, result in callback.results
    ]
    theirs = [row for row in rows if not row["eval/mean_reward"]]
    keys = [key for key in plain[0] if key not in {"time/fps", "time/time_elapsed"}]
    assert [[row[key] for key in keys] for row in theirs] == [[row[key] for key in keys] for row in plain]


@pytest.mark.parametrize("algorithm", ["PPO", "SAC", "DQN"])
def test_the_training_is_the_same_to_the_last_bit(algorithm):
    def weights(callback):
        torch.manual_seed(0)
        if algorithm == "PPO":
            model = make_ppo(normalize=True)
        else:
            build, action = (SAC, "box") if algorithm == "SAC" else (DQN, "discrete")
            venv = VecNormalize(DummyVecEnv([lambda: Rewards("vector", action)]))
            model = build("MlpPolicy", venv, buffer_size=300, learning_starts=40, seed=1, device="cpu")
        model.learn(256, callback=callback)
        return model.policy.state_dict()

    config = make_config("discrete" if algorithm == "DQN" else "box")
    callback = EvalCallback(config, every_steps=50, verbose=0)
    plain = weights(None)
    # Afterwards: the first step of an optimizer imports parts of torch that set variables.
    before = trainer_state.observe(torch.nn.Identity())
    beside = weights(callback)
    trainer_state.compare(before, trainer_state.observe(torch.nn.Identity()))
    assert len(callback.results) >= 2
    assert all(torch.equal(plain[name], beside[name]) for name in plain)


GATE = threading.Event()


class Gated(Rewards):
    """Does not begin an episode before the gate is open."""

    def reset(self, *, seed=None, options=None):
        assert GATE.wait(120)
        return super().reset(seed=seed)


class Opens(BaseCallback):
    """Opens the gate at a step of the training."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self._at = at

    def _on_step(self) -> bool:
        if self.num_timesteps >= self._at:
            GATE.set()
        return True


def test_training_continues_while_an_evaluation_runs_and_two_wait(capsys):
    GATE.clear()
    # The gate would stay closed if learn() waited for the evaluations of steps 20, 40 and 60.
    callback = trained(256, make_config(env=Gated), [Opens(70)], every_steps=20, verbose=1)
    assert [step for step, _ in callback.results] == list(range(20, 256, 20))
    told = capsys.readouterr().out
    assert "Eval num_timesteps=20, episode_reward=" in told
    assert "New best mean reward!" in told


def test_training_waits_while_two_evaluations_wait(monkeypatch):
    """The gate opens when it does, so the first three evaluations are not done by then."""
    GATE.clear()
    model, waits = make_ppo(), []

    def sleep(seconds):
        waits.append((model.num_timesteps, len(callback._open)))
        GATE.set()
        time.sleep(seconds)

    monkeypatch.setattr(
        "rl_eval.integrations.sb3.callback.time", SimpleNamespace(sleep=sleep, monotonic=time.monotonic)
    )
    callback = EvalCallback(make_config(env=Gated), every_steps=20, verbose=0)
    model.learn(256, callback=callback)
    assert waits[0] == (80, 3)
    assert [step for step, _ in callback.results] == list(range(20, 256, 20))


def test_callbacks_of_sb3_stop_the_training():
    stop = StopTrainingOnRewardThreshold(reward_threshold=-1e9)
    model = make_ppo()
    callback = trained(100_000, model=model, callback_on_new_best=stop, every_steps=20)
    assert model.num_timesteps < 100_000
    assert model.num_timesteps - callback.results[-1][0] < 20  # The last due step, wherever the training stopped.
    patience = StopTrainingOnNoModelImprovement(max_no_improvement_evals=1)
    model = make_ppo()
    trained(100_000, model=model, callback_after_eval=patience, every_steps=20)
    assert model.num_timesteps < 100_000


def test_training_again_evaluates_again():
    model = make_ppo()
    callback = EvalCallback(make_config(), every_steps=64, verbose=0)
    model.learn(128, callback=callback)
    first = len(callback.results)
    model.learn(128, callback=callback, reset_num_timesteps=False)
    assert callback.results[first - 1][0] == 128
    assert callback.results[first][0] > 128
    assert callback.results[-1][0] == 256


class Broken(Rewards):
    def reset(self, *, seed=None, options=None):
        raise RuntimeError("no power")


def test_episodes_that_fail_are_no_record_to_beat(tmp_path):
    callback = trained(128, make_config(env=Broken), best_model_save_path=tmp_path)
    assert [result.status for _, result in callback.results] == ["failed"] * len(callback.results)
    assert callback.best_mean_reward == -np.inf
    assert list(tmp_path.iterdir()) == []


def test_an_evaluation_that_cannot_run_ends_the_training_unless_somebody_takes_its_error():
    config = make_config(observation="matrix")
    with refused(ConfigError, "environment.env"):
        trained(10_000, config)
    errors: list[BaseException] = []
    model = make_ppo()
    trained(128, config, model=model, on_error=errors.append)
    assert model.num_timesteps == 128
    assert errors
    assert {type(error) for error in errors} == {ConfigError}


def test_an_evaluator_that_is_given_stays_open_and_hears_of_everything():
    points = []
    model = make_ppo()
    with Evaluator(make_config(), model, on_result=points.append) as evaluator:
        callback = trained(192, evaluator, model=model)
        evaluator.evaluate(model, step=999)
        assert [point.step for point in points] == [64, 128, 192, 999]
        assert [step for step, _ in callback.results] == [64, 128, 192]
    for key, value in (("n_eval_episodes", 3), ("deterministic", False)):
        with refused(ConfigError, key, value=value):
            EvalCallback(evaluator, **{key: value})


def test_a_request_that_a_later_one_replaced_is_no_result():
    GATE.clear()
    model = make_ppo()
    with Evaluator(make_config(env=Gated), model, busy_policy="latest") as evaluator:
        callback = trained(256, evaluator, [Opens(200)], model, every_steps=20)
    steps = [step for step, _ in callback.results]
    assert steps[0] == 20
    assert steps[-1] == 240
    assert all(result.status == "complete" for _, result in callback.results)
    assert len(steps) <= 5


def test_episodes_and_mode_can_be_said_as_in_sb3():
    model = make_ppo()
    config = make_config().policy(deterministic=False).evaluation(num_episodes=4)
    expected = evaluate(config, model)
    # It is updated after the 64 steps for the first time.
    [(_, result)] = trained(64, model=model, n_eval_episodes=4, deterministic=False).results
    assert result.fingerprint == expected.fingerprint
    assert result.metrics["num_episodes"] == 4


def test_runners_in_other_processes_have_the_same_results(ray_cluster):
    def evaluated(num_runners):
        venv = VecNormalize(DummyVecEnv([lambda: gym.make("CartPole-v1")]))
        model = PPO("MlpPolicy", venv, n_steps=64, batch_size=32, n_epochs=2, seed=1, device="cpu")
        config = EvalConfig().environment("CartPole-v1").evaluation(num_episodes=6, seed=8)
        callback = trained(256, config.runners(num_runners=num_runners), model=model, every_steps=128)
        assert [step for step, _ in callback.results] == [128, 256]
        return callback.results[-1][1]

    here, there = evaluated(0), evaluated(1)
    assert there.provenance["numerics"] == here.provenance["numerics"]
    assert there.fingerprint == here.fingerprint


# ------------------------------------------------------------------------------ the best model, and kills


def numbered(number: int) -> PPO:
    """Return a model whose statistics and weights both say which one it is."""
    model = make_ppo(normalize=True)
    model.get_vec_normalize_env().obs_rms.count = float(number)
    with torch.no_grad():
        model.policy.action_net.bias.fill_(number)
    return model


def kept(folder: Path) -> tuple[float, float] | None:
    """Return which model and which statistics are there under SB3's names; None if there is no model."""
    if not (folder / "best_model.zip").exists():
        return None
    model = PPO.load(folder / "best_model", device="cpu")
    statistics = VecNormalize.load(
        str(folder / "best_model_vecnormalize.pkl"), DummyVecEnv([lambda: Rewards("vector")])
    )
    return model.policy.action_net.bias[0].item(), statistics.obs_rms.count


CHANGES = [(shutil, "rmtree"), *((Path, name) for name in ("rename", "replace", "symlink_to", "unlink", "mkdir"))]


def die_at(number: int) -> None:
    """End this process, without a last word, before its n-th change of a folder."""
    count = 0

    def deadly(operation):
        def run(*args, **kwargs):
            nonlocal count
            count += 1
            if count == number:
                os.kill(os.getpid(), signal.SIGKILL)
            return operation(*args, **kwargs)

        return run

    for owner, name in CHANGES:
        setattr(owner, name, deadly(getattr(owner, name)))


@pytest.mark.process
@pytest.mark.parametrize("former", ["none", "ours", "SB3's"])
def test_a_kill_at_any_moment_leaves_a_model_with_its_own_statistics(tmp_path, former):
    """Before every single change of the folder; the next training cleans up, and goes on."""
    models = [numbered(number) for number in (1, 2)]
    for number in range(1, 100):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "best_model.mine").mkdir()
        if former == "ours":
            best = BestModel(folder)
            best.prepare()
            best.keep(best.save(models[0], 64), {})
        elif former == "SB3's":
            models[0].save(folder / "best_model.zip")
            models[0].get_vec_normalize_env().save(str(folder / "best_model_vecnormalize.pkl"))
        child = os.fork()
        if not child:
            die_at(number)
            best = BestModel(folder)
            best.prepare()
            waiting = best.save(models[0], 128)
            best.keep(best.save(models[1], 192), {})
            waiting.discard()
            os._exit(0)
        died = os.waitpid(child, 0)[1] == signal.SIGKILL
        allowed = {(2.0, 2.0)} if not died else {(1.0, 1.0), (2.0, 2.0)} | ({None} if former != "ours" else set())
        assert kept(folder) in allowed, number
        before = kept(folder)
        BestModel(folder).prepare()
        assert kept(folder) == before, number
        pairs = [path for path in folder.iterdir() if path.is_dir() and not path.is_symlink()]
        assert len(pairs) == 1 + (folder / "best_model.d").exists(), number
        assert (folder / "best_model.mine") in pairs
        if not died:
            break
    assert number > 10


# ------------------------------------------------------------------------------ what must not end a training


def disk_full(*args):
    raise OSError(28, "No space left on device")


class Breaks(BaseCallback):
    _on_step = disk_full


def failures(caplog):
    """Return the name and the type of each error that was logged."""
    return [(record.args[0], record.exc_info[0]) for record in caplog.records if record.exc_info]


def test_what_a_callback_or_a_writer_raises_does_not_end_the_training(tmp_path, caplog, monkeypatch):
    """It is logged by name; the best model is kept, and the next evaluation runs."""
    model = make_ppo()
    model.set_logger(configure(str(tmp_path / "log"), ["csv"]))

    monkeypatch.setattr(model.logger.output_formats[0], "write", disk_full)
    monkeypatch.setattr(model.logger, "dump", lambda step=0: None)  # That of the training itself would end it.
    callback = EvalCallback(make_config(), Breaks(), Breaks(), every_steps=64, best_model_save_path=tmp_path, verbose=0)
    with caplog.at_level(logging.ERROR):
        model.learn(192, callback=callback)
    model.logger.close()
    assert callback.results[-1][0] == model.num_timesteps == 192
    for what in ("callback_on_new_best", "callback_after_eval", "CSVOutputFormat"):
        assert (what, OSError) in failures(caplog)
    assert (tmp_path / "best_model.zip").exists()

    trained(128, make_config(observation="matrix"), on_error=disk_full)
    assert ("on_error", OSError) in failures(caplog)


def test_a_model_that_cannot_be_saved_does_not_end_the_training(tmp_path, caplog, monkeypatch):
    """The disk is full; nothing half is left."""
    model = make_ppo()
    monkeypatch.setattr(model, "save", disk_full)
    trained(128, model=model, best_model_save_path=tmp_path)
    assert {kind for _, kind in failures(caplog)} == {OSError}
    assert list(tmp_path.iterdir()) == []


# ------------------------------------------------------------------------------ what must not grow


def test_results_are_kept_within_limits_and_their_numbers_all(tmp_path, monkeypatch):
    """As in SB3's file, which has every evaluation when the training ends."""
    monkeypatch.setattr("rl_eval.integrations.sb3.callback._KEPT", 1)
    callback = EvalCallback(make_config(), every_steps=40, log_path=tmp_path, verbose=0)
    seen: list[tuple[int, EvalResult]] = []
    log = callback._log
    monkeypatch.setattr(callback, "_log", lambda step, result: (seen.append((step, result)), log(step, result)))
    make_ppo().learn(320, callback=callback)
    assert len(seen) == 8
    assert callback.results == seen[-1:]
    with np.load(tmp_path / "evaluations.npz") as arrays:
        assert arrays["timesteps"].tolist() == [step for step, _ in seen]
        assert arrays["results"].shape == arrays["ep_lengths"].shape == (8, 6)
        assert arrays["results"].mean(1) == pytest.approx([result.mean_return for _, result in seen])


# ------------------------------------------------------------------------------ inside another callback, and failures


def test_the_last_evaluations_are_kept_inside_an_event_callback(tmp_path):
    """Such a callback does not tell its child that the training has ended."""
    callback = EvalCallback(make_config(), eval_freq=1, verbose=0, log_path=tmp_path, best_model_save_path=tmp_path)
    make_ppo(envs=1).learn(96, callback=EveryNTimesteps(32, callback))
    assert np.load(tmp_path / "evaluations.npz")["timesteps"].tolist() == [32, 64, 96]
    assert callback.evaluator is None


class Repeats(EveryNTimesteps):
    ends = 0

    def _on_training_end(self):
        self.ends += 1


def test_the_end_of_a_training_reaches_the_parent_too():
    callback = EvalCallback(make_config(), eval_freq=1, verbose=0)
    parent = Repeats(32, callback)
    model = make_ppo(envs=1)
    for ends in (1, 2):
        model.learn(96, callback=parent)
        assert parent.ends == ends
        assert callback.evaluator is None


def test_a_callback_evaluates_after_each_evaluation_of_its_parent():
    inner = EvalCallback(make_config(), eval_freq=1, verbose=0)
    outer = EvalCallback(make_config(), eval_freq=32, verbose=0, callback_after_eval=inner)
    make_ppo(envs=1).learn(96, callback=outer)
    assert len(outer.results) == len(inner.results) == 3
    assert outer.evaluator is inner.evaluator is None


def test_a_failed_episode_is_no_lack_of_success(tmp_path):
    """It is NaN in each column."""
    config = EvalConfig().environment(
        "rl_eval.testing:faulty", env_kwargs={"env": Sure, "kind": "raise", "episodes": [1, 2], "attempts": None}
    )
    config.evaluation(num_episodes=4).fault_tolerance(max_attempts_per_episode=1)
    callback = EvalCallback(config, eval_freq=32, verbose=0, log_path=tmp_path)
    PPO("MlpPolicy", Sure(), n_steps=32, batch_size=32, n_epochs=1, device="cpu").learn(32, callback=callback)
    columns = np.load(tmp_path / "evaluations.npz")
    for name in ("results", "ep_lengths", "successes"):
        assert np.isnan(columns[name][0]).tolist() == [False, True, True, False]
    assert columns["successes"][0][[0, 3]].tolist() == [1.0, 1.0]


class Sure(gym.Env):
    """Each episode takes three steps and succeeds."""

    observation_space = gym.spaces.Box(-1, 1, (2,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.left = 3
        return np.zeros(2, np.float32), {}

    def step(self, action):
        self.left -= 1
        return np.zeros(2, np.float32), 1.0, self.left == 0, False, {"is_success": True}
