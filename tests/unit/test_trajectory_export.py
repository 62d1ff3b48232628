"""Trajectories of a finished run: its episodes run again, are proved to be the same, and can be read by others."""

from __future__ import annotations

import errno
import re
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from tensordict import TensorDict

from rl_eval import EvalConfig, EvalResult, EvalRunnerGroup, evaluate
from rl_eval.cli.exits import ExitCode
from rl_eval.errors import ConfigError, EvalError, UsageError
from rl_eval.recording.export import NpzWriter, export_trajectories
from tests.refused import refused
from tests.unit.cli_world import call
from tests.unit.test_runners import steer, walk
from tests.unit.test_texts import TASKS, Alone, InTuple, Obeys, obey

minari = pytest.importorskip("minari", "0.5.4")


def config(env: Any = walk, lanes: int = 2, **evaluation: Any) -> EvalConfig:
    made = EvalConfig().environment(env).policy(steer).runners(num_envs_per_runner=lanes)
    return made.evaluation(**{"num_episodes": 9, "info_keys": ["speed"], "seed": 5, **evaluation})


@pytest.fixture(scope="module")
def ran() -> tuple[EvalConfig, EvalResult, dict[str, Any]]:
    """Return a configuration, its result, and all its steps."""
    made = config()
    with EvalRunnerGroup(made, threaded=False) as group:
        return made, group.evaluate(), group.sample(9, as_arrays=True)


@pytest.fixture(autouse=True)
def _own_data_sets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "minari"))


def leftovers(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*") if path.is_file())


@pytest.mark.parametrize("to", ["npz", "tensordict"])
def test_a_file_has_the_steps(ran: Any, tmp_path: Path, to: str) -> None:
    made, result, expected = ran
    done = export_trajectories(result, to, tmp_path / "steps", config=made)
    assert (done.episodes, done.frames) == (9, len(expected["action"]))
    if to == "npz":
        assert leftovers(tmp_path) == ["steps"]
        with np.load(done.path) as data:
            found = dict(data)
    else:
        data = TensorDict.load_memmap(done.path)
        assert data["next", "reward"].shape == (len(expected["action"]), 1)
        found = {key: value.numpy() for key, value in data.flatten_keys(".").items()}
    assert found.keys() == expected.keys()
    for key, array in expected.items():
        np.testing.assert_array_equal(found[key].reshape(array.shape), array, err_msg=key)
        assert found[key].dtype == array.dtype


def test_minari_reads_the_episodes_that_were_chosen(ran: Any) -> None:
    """Seeds, observations, actions, every bit of a reward, ends, infos and labels."""
    made, result, expected = ran
    done = export_trajectories(result, "minari", "walk/steer-v0", [7, 2, 3], config=made)
    data = minari.load_dataset("walk/steer-v0")
    assert data.total_episodes == done.episodes == 3
    assert data.total_steps == done.frames
    assert "walk/steer-v0" in minari.list_local_datasets()
    for episode, index in zip(data.iterate_episodes(), [7, 2, 3], strict=True):
        record = result.episodes[index]
        mine = expected["collector.index"] == index
        (labels,) = data.storage.get_episode_metadata([episode.id])
        assert (labels["seed"], labels["index"], labels["attempt"]) == (record.seed, index, 1)
        np.testing.assert_array_equal(episode.rewards, expected["next.reward"][mine])
        assert np.cumsum(episode.rewards)[-1] == record.episode_return
        np.testing.assert_array_equal(episode.observations[:-1], expected["observation"][mine])
        np.testing.assert_array_equal(episode.observations[1:], expected["next.observation"][mine])
        np.testing.assert_array_equal(episode.actions, expected["action"][mine])
        np.testing.assert_array_equal(episode.terminations, expected["next.terminated"][mine])
        np.testing.assert_array_equal(episode.truncations, expected["next.truncated"][mine])
        np.testing.assert_array_equal(episode.infos["speed"][1:], expected["next.info.speed"][mine])


def test_a_minari_that_would_lose_bits_of_images_is_refused(ran: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Minari 0.5.3, the last one for Python 3.10, knows nothing but JPEG."""
    storage = "minari.dataset.minari_storage.MinariStorage"
    monkeypatch.setattr(f"{storage}.new", lambda data_path, observation_space, action_space, env_spec: None)
    with refused(ConfigError, "to", value="minari"):
        export_trajectories(ran[1], "minari", "lost-v0", config=ran[0])


def test_images_and_nested_observations_survive_minari() -> None:
    """No image is turned into JPEG, and a Dict space with a Tuple in it keeps its structure."""
    made = EvalConfig().environment("rl_eval.testing:dict_observation").policy("rl_eval.testing:make_dict_policy")
    made.evaluation(num_episodes=3)
    with EvalRunnerGroup(made, threaded=False) as group:
        result, expected = group.evaluate(), group.sample(3, as_arrays=True)
    export_trajectories(result, "minari", "dict-v0", config=made)
    episodes = list(minari.load_dataset("dict-v0").iterate_episodes())
    seen = [episode.observations for episode in episodes]
    for key, parts in {
        "camera": [one["camera"] for one in seen],
        "body.1": [one["body"][1] for one in seen],
        "side": [one["side"] for one in seen],
    }.items():
        np.testing.assert_array_equal(np.concatenate([part[:-1] for part in parts]), expected[key], err_msg=key)
        assert parts[0].dtype == expected[key].dtype


class Named(gym.Env[Any, Any]):
    """Its observations have a name that no file can have."""

    observation_space = gym.spaces.Dict({"camera/left": gym.spaces.Box(-1, 1, (2,), np.float32)})
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return {"camera/left": np.zeros(2, np.float32)}, {}

    def step(self, action: Any) -> Any:
        return {"camera/left": np.ones(2, np.float32)}, 1.0, True, False, {}


def test_keys_are_no_paths(tmp_path: Path) -> None:
    made = EvalConfig().environment(Named).policy(lambda seen: np.zeros(len(seen["camera/left"]), np.int64))
    result = evaluate(made.evaluation(num_episodes=2))
    export_trajectories(result, "npz", tmp_path / "steps.npz", config=made)
    with np.load(tmp_path / "steps.npz") as data:
        assert data["next.camera/left"].tolist() == [[1.0, 1.0]] * 2
    assert leftovers(tmp_path) == ["steps.npz"]


# ------------------------------------------------------------------------------ what goes wrong


@pytest.mark.parametrize("to", ["minari", "npz", "tensordict"])
def test_an_episode_that_comes_out_otherwise_is_named_and_nothing_is_left(ran: Any, tmp_path: Path, to: str) -> None:
    made, result, _ = ran
    table = result.table.copy()
    table.rows["episode_return"][6] = np.nextafter(table.rows["episode_return"][6], 9)
    forged = EvalResult(
        table=table,
        plan=result.plan,
        status=result.status,
        reason="",
        timing=result.timing,
        provenance=result.provenance,
        determinism=result.determinism,
    )
    target = "odd-v0" if to == "minari" else tmp_path / "odd"
    with refused(EvalError, "episode_return", episode=6):
        export_trajectories(forged, to, target, config=made)
    assert not leftovers(tmp_path)
    export_trajectories(forged, to, target, [5, 7], config=made)


@pytest.mark.parametrize("to", ["minari", "npz", "tensordict"])
def test_nothing_is_overwritten(ran: Any, tmp_path: Path, to: str) -> None:
    made, result, _ = ran
    target = "twice-v0" if to == "minari" else tmp_path / "twice"
    done = export_trajectories(result, to, target, [0], config=made)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with refused(ConfigError, "output"):
        export_trajectories(result, to, target, [1], config=made)
    assert before == {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert done.path.exists()


@pytest.mark.parametrize(
    ("to", "name", "call"),
    [
        ("npz", "os.posix_fallocate", "a"),
        ("tensordict", "os.posix_fallocate", "a"),
        ("minari", "minari.dataset._storages.hdf5_storage.HDF5Storage.update_episodes", "a-v0"),
    ],
)
def test_a_full_disk_is_said_and_leaves_nothing(
    ran: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, to: str, name: str, call: str
) -> None:
    def full(*args: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    made, result, _ = ran
    monkeypatch.setattr(name, full)
    with refused(ConfigError, "output"):
        export_trajectories(result, to, call if to == "minari" else tmp_path / call, config=made)
    assert not leftovers(tmp_path)


def test_who_comes_first_keeps_the_place(ran: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that appears while episodes run is not replaced."""
    made, result, _ = ran
    finish = NpzWriter.finish

    def late(writer: NpzWriter) -> Path:
        (tmp_path / "mine").write_text("theirs")
        return finish(writer)

    monkeypatch.setattr(NpzWriter, "finish", late)
    with refused(ConfigError, "output"):
        export_trajectories(result, "npz", tmp_path / "mine", config=made)
    assert (tmp_path / "mine").read_text() == "theirs"


def test_episodes_that_cannot_be_had_are_named(ran: Any, tmp_path: Path) -> None:
    made, result, _ = ran
    with refused(UsageError, "episode", value=9):
        export_trajectories(result, "npz", tmp_path / "a", [9], config=made)
    with refused(ConfigError, "to", value="hdf5"):
        export_trajectories(result, "hdf5", tmp_path / "a", config=made)
    with refused(ConfigError, "output", value="no id"):
        export_trajectories(result, "minari", "no id", config=made)


# ------------------------------------------------------------------------------ the command


def test_the_command_exports_chosen_episodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    made = EvalConfig().environment("rl_eval.testing:dict_observation").policy("rl_eval.testing:make_dict_policy")
    evaluate(made.evaluation(num_episodes=5), output="run")
    options = ["export", "run", "--to", "npz", "-o", "steps.npz"]
    ran = call(*options, "--episodes", "3,0-1")
    assert ran.exit_code == 0, ran.output
    assert {"3", "5"} <= {*re.findall(r"\d+", ran.output)}
    with np.load("steps.npz") as data:
        assert list(dict.fromkeys(data["collector.index"].tolist())) == [3, 0, 1]
    before = Path("steps.npz").read_bytes()
    assert call(*options).exit_code == ExitCode.USAGE
    assert Path("steps.npz").read_bytes() == before


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--to", "npz"], "--output"),
        (["--to", "npz", "-o", "a", "--force"], "--force"),
        (["--to", "csv", "--trust"], "--trust"),
        ([], "--to"),
    ],
)
def test_options_that_do_not_fit_are_refused(options: list[str], named: str) -> None:
    ran = call("export", "nowhere", *options)
    assert ran.exit_code == ExitCode.USAGE
    assert named in " ".join(ran.output.split())


class Searches:
    """A policy with an output in every step, one in some steps, and one in some episodes."""

    def __init__(self) -> None:
        self.outputs: Any = None

    def act(self, observations: Any, state: Any, live: Any, noise: Any) -> tuple[Any, None]:
        first = np.asarray(observations).reshape(len(live), -1)[:, 0].astype(np.float64)
        self.outputs = {"value": first, "never": None}
        if (first[live] > 0).all():
            self.outputs |= {"searched": first}
        return steer(observations), None


@pytest.mark.parametrize("info_keys", [[], ["speed"]])
@pytest.mark.parametrize("to", ["npz", "tensordict"])
def test_an_output_that_some_steps_lack_is_left_out(tmp_path: Path, to: str, info_keys: list[str]) -> None:
    """Zeros in its place would be taken for outputs."""
    made = config(lanes=1, info_keys=info_keys, num_episodes=30)
    made.policy(Searches())
    result = evaluate(made)
    done = export_trajectories(result, to, tmp_path / "steps", config=made, policy=Searches())
    if to == "npz":
        with np.load(done.path) as data:
            found = dict(data)
    else:
        found = {key: value.numpy() for key, value in TensorDict.load_memmap(done.path).flatten_keys(".").items()}
    assert "searched" not in found
    assert "never" not in found
    np.testing.assert_array_equal(found["value"].ravel(), found["observation"][:, 0])
    assert len(found["value"]) == done.frames


def test_no_episode_is_refused(ran: Any, tmp_path: Path) -> None:
    made, result, _ = ran
    with refused(UsageError, key="episodes"):
        export_trajectories(result, "npz", tmp_path / "steps", [], config=made)


@pytest.mark.parametrize("name", ["walk", "walk/steer", "-v0"])
def test_an_id_without_a_version_is_refused(ran: Any, name: str) -> None:
    made, result, _ = ran
    with refused(ConfigError, key="output", value=name):
        export_trajectories(result, "minari", name, config=made)


@pytest.mark.parametrize("env", [Obeys, Alone, InTuple])
def test_texts_are_exported_to_npz_and_minari(env: Any, tmp_path: Path) -> None:
    """Minari gives them back in the structure of the space. A TensorDict has no place for them."""
    made = EvalConfig().environment(env).policy(obey).evaluation(num_episodes=3)
    result = evaluate(made)
    export_trajectories(result, "npz", tmp_path / "steps", config=made)
    with np.load(tmp_path / "steps") as data:
        (key,) = (key for key, array in data.items() if array.dtype.kind == "U" and not key.startswith("next"))
        texts, actions = data[key].tolist(), data["action"].tolist()
    assert [TASKS[text] for text in texts] == actions
    export_trajectories(result, "minari", "texts/obey-v0", config=made)
    read = minari.load_dataset("texts/obey-v0")
    assert read.observation_space == env.observation_space
    episodes = list(read.iterate_episodes())
    assert np.concatenate([one.actions for one in episodes]).tolist() == actions
    for one in episodes:
        assert obey(one.observations)[:-1].tolist() == one.actions.tolist()
    with refused(ConfigError, key):
        export_trajectories(result, "tensordict", tmp_path / "tensors", config=made)
