"""Environments in another interpreter: frames without pickle, old interfaces, and faults that end one process."""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
import pickle
import re
import socket
import struct
import subprocess
import sys
import time
import venv
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from waiting import eventually

from rl_eval import EvalConfig, EvalRunnerGroup, evaluate
from rl_eval.cli.examination import check_environment
from rl_eval.errors import ConfigError
from rl_eval.recording.replay import replay
from rl_eval.recording.video import record_videos
from rl_eval.runners import foreign_worker
from rl_eval.runners.foreign_worker import dumps, loads
from rl_eval.runners.interpreter import PYTHON, FramePipe
from rl_eval.runners.subprocess_slots import SubprocessEvalRunner
from tests.refused import refused, untold

pytestmark = pytest.mark.process

WORLD = '''
import os, random, signal, sys, time
__version__ = "1"

class Space:
    def __init__(self, n): self.n = n
class Discrete(Space): pass

class Plain:
    """Environment without any package. It prints on every step, and does something odd in one episode."""
    observation_space = Discrete(1000)
    action_space = Discrete(2)
    metadata = {}
    render_mode = None

    def __init__(self, odd="", mark="", where="step"):
        print("built"); self.odd, self.mark, self.where = odd, mark, where

    def _odd(self, where):
        if self.odd and where == self.where and not os.path.exists(self.mark):
            open(self.mark, "w").close()
            frames = max(int(one) for one in os.listdir("/proc/self/fd") if os.path.exists("/proc/self/fd/" + one)
                         and os.readlink("/proc/self/fd/" + one).startswith("socket") and int(one) > 2)
            act(self.odd, frames)

    def reset(self, seed=None, options=None):
        self.random = random.Random(seed); self.left = self.random.randrange(2, 9)
        self._odd("reset")
        return self.random.randrange(1000), {"thing": object(), "left": self.left}

    def step(self, action):
        print("stepped"); sys.stdout.flush(); os.write(1, b"from C\\n")
        self.left -= 1
        if self.left == 1: self._odd("step")
        info = {"thing": {1}, "left": self.left}
        return self.random.randrange(1000), self.random.random() + int(action), self.left == 0, False, info

def act(odd, frames):
    if odd == "kill": os.kill(os.getpid(), signal.SIGKILL)
    if odd == "stop": os.kill(os.getpid(), signal.SIGSTOP)
    if odd == "exit": os._exit(3)
    if odd == "raise": raise KeyError("joint 7")
    if odd == "garbage": os.write(frames, b"\\0\\0\\0\\4abcd")
    if odd == "half": os.write(frames, b"\\0\\0\\1\\0half"); time.sleep(600)
    if odd == "huge": os.write(frames, b"\\x7f\\xff\\xff\\xff"); time.sleep(600)
    if odd == "other":
        import __main__
        data = __main__.dumps((10**6, "step", None, None, "", 0.0))
        os.write(frames, __main__.LENGTH.pack(len(data)) + data); time.sleep(600)

class Old:
    """Interface of gym before 0.26: four values, a method seed."""
    observation_space, action_space = Discrete(1000), Discrete(2)
    def seed(self, seed): self.random = random.Random(seed)
    def reset(self): self.left = 6; return self.random.randrange(1000)
    def step(self, action):
        self.left -= 1
        cut = self.left == 3 and self.random.random() < 0.5
        return self.random.randrange(1000), 1.0, cut or not self.left, {"TimeLimit.truncated": True} if cut else {}

class New(Old):
    def reset(self, seed=None, options=None): self.seed(seed); return Old.reset(self), {}
    def step(self, action):
        seen, reward, done, info = Old.step(self, action)
        return seen, reward, done and not info, bool(info), {}

class Gated(New):
    """Waits before its sixth episode until a file exists."""
    episodes = 0
    def __init__(self, gate): self.gate = gate
    def reset(self, seed=None, options=None):
        Gated.episodes += 1
        while Gated.episodes > 5 and not os.path.exists(self.gate): time.sleep(0.01)
        return New.reset(self, seed)

class Unseeded(Old):
    seed = None

class Adapter(New):
    """It is not a wrapper of its simulator."""
    def __init__(self): self.env = Unseeded()

class Rooms(Old):
    """Order of LIBERO: seed, reset, state of the episode."""
    condition_keys = ["room"]
    def __init__(self): self.env = Unseeded()
    def seed(self, seed): self.env.random = random.Random(seed)
    def reset(self, options=None):
        self.env.reset()
        self.room = 0 if options is None else options["room"]
        return self.room
    def step(self, action): return (self.room, *self.env.step(action)[1:])

class Graph: pass
class Odd(New):
    observation_space = Graph()

class Named(Discrete): pass
class Subclass(New):
    observation_space = Named(1000)

class Changes(New):
    def seed(self, seed): self.random = random.Random()

class Films(New):
    metadata = {"render_modes": ["rgb_array"], "render_fps": 5}
    def __init__(self, render_mode=None): self.render_mode = render_mode
    def render(self):
        import numpy
        return numpy.full((16, 16, 3), self.left, numpy.uint8)

class Differs(New):
    def __init__(self): global __version__; __version__ = str(os.getpid())

class Forks(New):
    """The forked process returns from step. Its files may have the descriptors of the frames."""
    def __init__(self, path): self.path = path
    def step(self, action):
        if not os.path.exists(self.path):
            if os.fork(): os.wait()
            else: self.kept = [open(self.path, "wb", buffering=0) for _ in range(8)]
        return New.step(self, action)

class Draws(New):
    def step(self, action): random.random(); return New.step(self, action)

def make(config, size=3, *, wide=False):
    assert (type(config).__name__, config["name"], config.remote) == ("EnvContext", "a", True)
    assert config.lane_index in (0, 1)
    return New()
'''


@functools.cache
def interpreter() -> str:
    """Return the Python of an environment without any package."""
    folder = Path(os.environ.get("PYTEST_DEBUG_TEMPROOT", "/tmp")) / f"rl_eval_plain_{os.getpid()}"
    venv.create(folder, symlinks=True)
    return str(folder / "bin" / "python")


@pytest.fixture
def world(tmp_path: Path) -> Path:
    (tmp_path / "plain_world.py").write_text(WORLD)
    return tmp_path


def policy(observations: Any) -> Any:
    return observations % 2


def by_reward(observations: Any) -> Any:
    return (observations["last_reward"][:, 0] * 1000).astype(np.int64) % 2


def config(world: Path, kind: str = "Plain", lanes: int = 2, python: Any = None, **env_kwargs: Any) -> EvalConfig:
    made = EvalConfig().environment(
        f"plain_world:{kind}", python=python or interpreter(), python_path=[str(world)], env_kwargs=env_kwargs
    )
    made.policy(policy).runners(num_envs_per_runner=lanes)
    return made.evaluation(num_episodes=8, determinism_check=0.3).fault_tolerance(
        step_timeout_s=3.0, reset_timeout_s=3.0
    )


@functools.cache
def reference(world: Path, name: str = "Plain") -> str:
    return evaluate(config(world, name)).fingerprint


# ------------------------------------------------------------------------------ whole evaluations


def test_an_environment_without_packages_that_prints_is_complete(world: Path, capfd: Any) -> None:
    """The same records with any number of slots; what it prints goes to the standard error stream."""
    one, many = evaluate(config(world, lanes=1)), evaluate(config(world, lanes=3))
    assert one.fingerprint == many.fingerprint
    assert (many.status, many.faults) == ("complete", [])
    assert many.determinism.checked > 0 == len(many.determinism.mismatched)
    out, err = capfd.readouterr()
    assert "stepped" not in out
    assert {"built", "stepped", "from C"} <= set(err.split("\n"))


@pytest.mark.parametrize("env", ["CartPole-v1", "gymnasium.envs.classic_control:PendulumEnv"])
def test_records_are_those_of_this_interpreter(env: str) -> None:
    """Here the other interpreter is this one, once more."""
    made = EvalConfig().environment(env).policy("random", deterministic=False)
    made.evaluation(num_episodes=6, max_episode_steps=40, determinism_check=0.3).runners(num_envs_per_runner=2)
    there = evaluate(made.copy().environment(env, python=[sys.executable]))
    here = evaluate(made)
    assert there.fingerprint == here.fingerprint
    assert there.determinism.checked > 0 == len(there.determinism.mismatched)


def test_a_command_may_start_the_interpreter(world: Path) -> None:
    """As ``conda run`` and ``docker run`` do."""
    banner = ["sh", "-c", 'echo "a banner"; "$0" "$@"; true', interpreter()]
    assert evaluate(config(world, python=banner)).fingerprint == reference(world)


def test_an_old_interface_has_the_records_of_the_new_one(world: Path) -> None:
    """Four values, ``seed()``, and a reset without an info."""
    old, new = evaluate(config(world, "Old")), evaluate(config(world, "New"))
    assert old.fingerprint == new.fingerprint
    assert {record.truncated for record in old.episodes} == {True, False}


@pytest.mark.parametrize("kind", ["Adapter", "Subclass"])
def test_an_attribute_env_does_not_make_a_wrapper_nor_a_base_class_another_space(world: Path, kind: str) -> None:
    assert evaluate(config(world, kind)).fingerprint == reference(world, "New")


def test_conditions_reach_an_old_interface(world: Path) -> None:
    made = config(world, "Rooms").evaluation(num_episodes=6, conditions={"axes": {"room": [3, 5]}})
    made.policy(by_room)
    result = evaluate(made)
    assert (result.status, result.faults) == ("complete", [])
    assert result.provenance["numerics"]["environment/seeded_by"] == "seed"


def by_room(observations: Any) -> Any:
    assert set(np.asarray(observations).ravel()) <= {0, 3, 5}
    return observations % 2


def test_slots_with_different_versions_are_an_error(world: Path) -> None:
    """Of packages, here of the environment's own module."""
    with refused(ConfigError, "environment.python"):
        evaluate(config(world, "Differs"))


def test_a_factory_receives_the_context(world: Path) -> None:
    assert evaluate(config(world, "make", name="a")).fingerprint == reference(world, "New")


def test_a_run_continues_with_the_same_versions(world: Path) -> None:
    """The interpreter may have moved. Another version is refused, with its name."""
    made = config(world, "Gated", lanes=1, gate=str(world / "gate")).evaluation(num_episodes=20, determinism_check=0)
    with EvalRunnerGroup(made) as group:
        handle = group.submit(output=str(world / "run"))
        while not handle.progress().num_finished:
            assert not handle.done()
            time.sleep(0.01)
        handle.cancel()
        first = handle.result()
    (world / "gate").touch()
    found = {key: value for key, value in first.provenance["numerics"].items() if key.startswith("environment/")}
    python = sys.version.split()[0]
    assert found == {
        f"environment/{key}": value
        for key, value in {"python": python, "plain_world": "1", "seeded_by": "reset"}.items()
    }
    (world / "moved").symlink_to(Path(interpreter()).parent)
    moved = made.copy().environment(python=str(world / "moved" / "python"))
    (world / "plain_world.py").write_text(WORLD.replace('__version__ = "1"', '__version__ = "2.0"'))
    other = evaluate(moved, output=str(world / "run"))
    assert other.status != "complete"
    assert not untold(other.reason, "environment/plain_world", "'1'", "'2.0'")
    (world / "plain_world.py").write_text(WORLD)
    assert evaluate(moved, output=str(world / "run")).fingerprint == evaluate(made).fingerprint


def test_wrappers_of_rl_eval_work_in_the_runner(world: Path) -> None:
    """After those that work with the environment."""
    made = config(world).policy(by_reward).environment(wrappers=["rl_eval.wrappers:LastReward"])
    found = {evaluate(made.runners(num_envs_per_runner=lanes)).fingerprint for lanes in (1, 3)}
    assert len(found) == 1
    assert reference(world) not in found
    made.environment(wrappers=["rl_eval.wrappers:LastReward", "plain_world:Outer"])
    with refused(ConfigError, "environment.wrappers", value="rl_eval.wrappers:LastReward"):
        evaluate(made)


def test_a_draw_from_a_global_generator_is_noted(world: Path) -> None:
    result = evaluate(config(world, "Draws"))
    assert any("Python's global generator" in note for note in result.notes)


# ------------------------------------------------------------------------------ doctor, replays and videos


def test_doctor_examines_the_environment_there(world: Path) -> None:
    """With its versions, the cost of a step, and first observations of seeds, in new and in reused environments."""
    findings = list(check_environment(config(world, "New").build()))
    text = " ".join(one.text for one in findings)
    assert {one.level for one in findings} == {"ok", "note"}
    assert not untold(text, PYTHON, sys.version.split()[0], "plain_world", "ms")
    starts = re.findall(r"seed \d+: (\w+), (\w+)", text)
    assert len(starts) == 2
    assert all(new == reused for new, reused in starts)
    assert starts[0] != starts[1]
    findings = list(check_environment(config(world, "Changes").build()))
    assert [one.level for one in findings if "equal seeds" in one.text] == ["problem"]


def test_episodes_run_again_and_have_videos(world: Path) -> None:
    """Without a part of the environment in this process."""
    made = config(world, "Films", python=sys.executable).policy("random", deterministic=False)
    result = evaluate(made, output=str(world / "run"))
    assert "plain_world" not in sys.modules
    assert replay(result, 3, trust=True).identical
    (film,) = record_videos(result, "first", world / "films", trust=True)
    assert film.identical
    assert film.frames == result.table.record(film.index).length + 1
    assert not workers()


# ------------------------------------------------------------------------------ faults


@pytest.mark.parametrize("where", ["step", "reset"])
@pytest.mark.parametrize("odd", ["kill", "exit", "raise", "garbage", "huge", "other", "half", "stop"])
def test_a_fault_costs_its_episode_one_attempt(world: Path, odd: str, where: str) -> None:
    """A process that dies, hangs, or answers with something else."""
    made = config(world, odd=odd, where=where, mark=str(world / "mark"))
    result = evaluate(made)
    assert (world / "mark").exists()
    assert [(fault.phase, fault.attempt) for fault in result.faults] == [(where, 1)]
    assert (result.status, result.fingerprint) == ("complete", reference(world))
    assert not workers()


def test_a_forked_process_answers_nobody(world: Path) -> None:
    path = world / "forked"
    result = evaluate(config(world, "Forks", path=str(path)))
    assert (result.status, path.read_bytes()) == ("complete", b"")
    assert not workers()


def workers() -> list[str]:
    """Return the processes of workers that are alive."""
    found = subprocess.run(["ps", "-eo", "pid,stat,args"], capture_output=True, text=True, check=True).stdout
    return [line for line in found.splitlines() if f"rl_eval_plain_{os.getpid()}" in line and " Z" not in line]


@pytest.mark.parametrize("wrapper", [[], ["sh", "-c", '"$0" "$@"; true']])
def test_the_death_of_the_runner_ends_its_workers(world: Path, wrapper: list[str]) -> None:
    """Also while the simulator is in a call."""
    made = config(world, python=[*wrapper, interpreter()], odd="half", mark=str(world / "mark"))
    made.fault_tolerance(step_timeout_s=600.0, reset_timeout_s=600.0)
    made.policy("random", deterministic=False)
    (world / "run.yaml").write_text(made.to_yaml())
    command = [sys.executable, "-m", "rl_eval", "run", str(world / "run.yaml")]
    driver = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    assert eventually((world / "mark").exists)
    assert workers()
    driver.kill()
    driver.wait()
    assert eventually(lambda: not workers())


# ------------------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"environment.python": "/no/python"}, "environment.python"),
        ({"environment.python": ""}, "environment.python"),
        ({"environment.python": []}, "environment.python"),
        ({"environment.python": None, "environment.python_path": ["src"]}, "environment.python_path"),
        ({"environment.env": dict}, "environment.env"),
        ({"environment.wrappers": [dict]}, "environment.wrappers"),
        ({"environment.env_kwargs": {"a": object()}}, "environment.env_kwargs"),
        ({"environment.agents": ["a"]}, "environment.agents"),
        ({"environment.action_masks": True}, "environment.action_masks"),
        ({"runners.runner": "vector"}, "environment.python"),
        ({"environment.env": "plain_world:Unseeded"}, "environment.env"),
        ({"environment.env": "plain_world:Odd"}, "environment.env"),
    ],
)
def test_what_another_interpreter_cannot_do_is_refused(world: Path, changes: dict[str, Any], key: str) -> None:
    made = config(world)
    for name, value in changes.items():
        made.set(name, value)
    with refused(ConfigError, key):
        evaluate(made)


@pytest.mark.parametrize(
    "python",
    ["/bin/ls", "/bin/true", ["echo", "hello"], ["env", "no_such_python"], ["yes"], [sys.executable, "-c", "print(1)"]],
)
def test_a_command_that_is_no_python_is_refused(world: Path, python: Any) -> None:
    """It exits, with or without an output, or prints on and on."""
    value = python if isinstance(python, str) else " ".join(python)
    with refused(ConfigError, "environment.python", value=value) as caught:
        evaluate(config(world, python=python))
    assert caught.value.fix


@pytest.mark.parametrize("end", [1, 15])
def test_a_command_whose_output_ends_as_the_mark_begins_is_refused(end: int) -> None:
    """The mark is random."""
    ours, theirs = socket.socketpair()
    mark = bytes(range(16))
    pipe = FramePipe(ours, mark, "conda run")
    theirs.sendall(b"no such environment" + mark[:end])
    assert pipe.take() is None
    theirs.close()
    with refused(ConfigError, PYTHON, value="conda run"):
        pipe.take()
    ours.close()


def test_a_command_that_fails_later_is_a_fault(world: Path) -> None:
    """As an engine of containers that does not start a second one at once: the attempt runs again."""
    mark, failed = world / "mark", world / "failed"
    command = f'test -e {mark} && ! test -e {failed} && touch {failed} && exit 5; exec {interpreter()} "$@"'
    made = config(world, python=["sh", "-c", command, "sh"], odd="kill", mark=str(mark), lanes=1)
    result = evaluate(made)
    assert failed.exists()
    assert (result.status, result.fingerprint) == ("complete", reference(world))


def test_a_function_is_not_sent_but_the_name_of_an_attribute_is(world: Path) -> None:
    runner = SubprocessEvalRunner(config(world).build(), 0)
    try:
        assert runner.foreach_env("where") == ["step"]
        with refused(ConfigError, "environment.python"):
            runner.foreach_env(lambda env: env.where)
    finally:
        runner.stop()


def test_paths_of_a_config_file_are_relative_to_it(tmp_path: Path) -> None:
    section = {"env": "a:B", "python": "bin/python", "python_path": ["src"]}
    (tmp_path / "run.yaml").write_text(json.dumps({"environment": section, "policy": {"policy": "random"}}))
    settings = EvalConfig.from_yaml(tmp_path / "run.yaml").build()
    assert settings.environment.python == str(tmp_path / "bin/python")
    assert settings.environment.python_path == (str(tmp_path / "src"),)
    assert settings.runners.runner == "subprocess"
    assert "python" not in settings.identity()["environment"]


# ------------------------------------------------------------------------------ frames

PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(st.text() | st.integers(), inner),
    max_leaves=20,
)


def same(one: Any, other: Any) -> bool:
    if isinstance(one, (np.ndarray, np.generic)):
        return type(one) is type(other) and one.dtype == other.dtype and one.tobytes() == other.tobytes()
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return type(one) is type(other) and len(one) == len(other) and all(map(same, one, other))
    return type(one) is type(other) and (one == other or (math.isnan(one) and math.isnan(other)))


@given(PLAIN)
def test_plain_values_travel(value: Any) -> None:
    assert same(value, loads(dumps(value)))


@pytest.mark.parametrize("kind", ["?", "i1", ">i8", "f2", "f4", ">f8", "c8", "S3", "U4"])
def test_arrays_and_scalars_keep_their_type(kind: str) -> None:
    array = np.zeros((2, 3), kind)
    for value in (array, array[0, 0], array.T, array[:0], np.asfortranarray(array)):
        assert same(np.ascontiguousarray(value) if isinstance(value, np.ndarray) else value, loads(dumps(value)))


@pytest.mark.parametrize("value", [object(), {1}, np.array([object()]), np.zeros(1, "V3"), [lambda: 0]])
def test_what_is_no_data_does_not_travel(value: Any) -> None:
    with pytest.raises(TypeError):
        dumps({"a": value})


@given(st.binary(max_size=200))
def test_bytes_that_are_no_frame_are_a_value_error(data: bytes) -> None:
    with contextlib.suppress(ValueError):
        loads(data)


@given(PLAIN, st.data())
def test_a_cut_frame_is_a_value_error(value: Any, data: Any) -> None:
    frame = dumps(value)
    with pytest.raises(ValueError):
        loads(frame[: data.draw(st.integers(0, len(frame) - 1))])


def test_a_pickle_in_a_frame_is_refused() -> None:
    """As the bytes of an array of objects, and as a whole."""
    head = json.dumps({"a": ["|O", [1], 8, True]}).encode()
    for frame in (struct.pack("<I", len(head)) + head + bytes(8), pickle.dumps({"a": 1})):
        with pytest.raises(ValueError):
            loads(frame)


def test_the_worker_and_its_frames_do_not_pickle() -> None:
    assert "pickle" not in Path(foreign_worker.__file__).read_text()
