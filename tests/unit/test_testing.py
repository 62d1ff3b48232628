"""Faults strike where they were placed, do what they are named after, and leave everything else alone."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from inspect import cleandoc
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces

from rl_eval import EnvContext, EvalConfig, EvalResult, evaluate
from rl_eval.testing import FaultyEnv, InjectedFault, TwoLengthEnv, faulty, impure, two_length
from rl_eval.testing.faulty_env import PHASES, SPOILS, STRIKES

ROOT = Path(__file__).parents[2]
EPISODES = 6
SHORT_S = 0.2
HANGS = ("loop", "sleep", "gil_sleep")
DEADLY = {
    "os_exit": 13,
    "exit": 13,
    "segfault": -signal.SIGSEGV,
    "abort": -signal.SIGABRT,
    "sigkill": -signal.SIGKILL,
}
"""How a process ends; negative for signals."""


def push(observations: Any) -> Any:
    """Push the cart towards where the pole leans."""
    return (observations[:, 2] > 0).astype(np.int64)


def push_nested(observations: Any) -> Any:
    return (observations["body"][1][:, 1] > 0).astype(np.int64)


def run(env: str = "CartPole-v1", lanes: int = 2, policy: Any = push, **fault: Any) -> EvalResult:
    """Evaluate in this process, with one fault."""
    config = (
        EvalConfig()
        .environment("rl_eval.testing:faulty", env_kwargs={"env": env, **fault})
        .policy(policy)
        .runners(num_envs_per_runner=lanes)
        .evaluation(num_episodes=EPISODES, max_episode_steps=40)
    )
    return evaluate(config)


def make(env: gym.Env[Any, Any] | None = None, **fault: Any) -> FaultyEnv:
    return FaultyEnv(TwoLengthEnv() if env is None else env, **fault)


def play(env: gym.Env[Any, Any], index: int = 0, attempt: int = 1, seed: int = 0) -> list[Any]:
    """Run an episode of at most five steps; return what the environment returned."""
    env.get_wrapper_attr("begin_episode")(index, seed, attempt)
    results: list[Any] = [env.reset(seed=seed)]
    while len(results) < 6 and not (len(results) > 1 and results[-1][2]):
        results.append(env.step(np.int64(0)))
    return results


def same(ours: list[Any], others: list[Any]) -> bool:
    return repr(ours) == repr(others)


@pytest.fixture(scope="module")
def plain() -> str:
    """The fingerprint without any wrapper."""
    config = EvalConfig().environment("CartPole-v1").policy(push)
    return evaluate(config.evaluation(num_episodes=EPISODES, max_episode_steps=40)).fingerprint


# ------------------------------------------------------------------------------ everything else is undisturbed


def test_the_twin_is_the_plain_environment(plain: str) -> None:
    """Without guilty episodes, and with kind none, the table is that of the environment alone."""
    assert run().fingerprint == plain
    assert run(kind="raise").fingerprint == plain
    assert run(kind="none", phase="reset", episodes=[0, 1]).fingerprint == plain


RECOVERABLE = {
    "raise": "InjectedFault",
    "exit": "SystemExit",
    "nan_observation": "EnvError",
    "bad_shape": "EnvError",
    "bad_dtype": "EnvError",
    "not_a_tuple": "EnvError",
    "nan_reward": "EnvError",
}


@pytest.mark.parametrize(("kind", "phase"), [(k, p) for k in RECOVERABLE for p in PHASES[k] if p in ("step", "reset")])
def test_a_fault_strikes_its_episodes_and_attempts_alone(kind: str, phase: str, plain: str) -> None:
    """Guilty attempts fail where they should, innocent ones do not, and the retried table is the same."""
    result = run(kind=kind, phase=phase, episodes=[1, 4], attempts=[1, 2], step=3)
    assert result.fingerprint == plain
    assert {record.index: record.attempts for record in result.episodes} == {0: 1, 1: 3, 2: 1, 3: 1, 4: 3, 5: 1}
    for record in (result.episodes[1], result.episodes[4]):
        assert [fault.attempt for fault in record.faults] == [1, 2]
        assert {(fault.phase, fault.error_type) for fault in record.faults} == {(phase, RECOVERABLE[kind])}
        # A NaN is seen one step later, by the policy's side.
        assert {fault.step for fault in record.faults} <= ({2, 3} if phase == "step" else {0})


def test_a_missing_key_is_found() -> None:
    """The fault can be put around any environment that a config can name, nested observations included."""
    nested = "rl_eval.testing:dict_observation"
    result = run(nested, policy=push_nested, kind="missing_key", episodes=[2], attempts=[1])
    assert result.fingerprint == run(nested, policy=push_nested).fingerprint
    assert "['body']" in result.episodes[2].faults[0].message


def test_the_message_says_where() -> None:
    """Phase, episode, attempt and step are named; ``attempts`` left out means every attempt."""
    env = make(kind="raise", episodes=[7], step=2)
    assert same(play(env, index=1), play(make()))
    late = make(kind="raise", episodes=[0], step=10)
    assert len(play(late)) == 6, "an episode that ends before its step is spared"
    assert same(play(late, index=1), play(make()))
    with pytest.raises(InjectedFault) as caught:
        play(env, index=7, attempt=3)
    assert re.findall(r"construct|reset|close|\d+", str(caught.value)) == ["7", "3", "2"]


@pytest.mark.parametrize("kind", HANGS)
@pytest.mark.parametrize("phase", ["construct", "reset", "step", "close"])
def test_a_hang_passes_and_leaves_no_trace(kind: str, phase: str) -> None:
    """It lasts as long as it should at least; after it the environment is the plain one."""
    started = time.perf_counter()
    env = make(kind=kind, phase=phase, episodes=[0], seconds=SHORT_S)
    results = play(env)
    env.close()
    assert time.perf_counter() - started >= SHORT_S
    assert same(results, play(make()))


# ------------------------------------------------------------------------------ when


@pytest.mark.parametrize("phase", ["reset", "step"])
def test_with_a_folder_each_episode_is_struck_once(tmp_path: Path, phase: str) -> None:
    """The marker names kind, phase and episode, holds the process, and stops other environments too."""
    folder = tmp_path / "new"
    first, second = (make(kind="raise", phase=phase, episodes=[1, 2], folder=str(folder)) for _ in range(2))
    for index in (1, 2):
        with pytest.raises(InjectedFault):
            play(first, index=index)
        play(first, index=index)
        play(second, index=index)
    assert sorted(path.name for path in folder.iterdir()) == [f"raise-{phase}-1", f"raise-{phase}-2"]
    assert {path.read_text() for path in folder.iterdir()} == {str(os.getpid())}


def test_every_episode_can_be_faulty_and_only_the_first_after_some_fails(tmp_path: Path) -> None:
    """``episodes=None`` needs no announced episode, ``after`` lets some pass, and a folder makes it once over all."""
    env, other = (make(kind="raise", phase="reset", episodes=None, after=2, folder=str(tmp_path)) for _ in range(2))
    env.reset(seed=0)
    play(env, index=4)
    with pytest.raises(InjectedFault):
        env.reset(seed=1)
    for seed in range(5):
        other.reset(seed=seed)
    assert [path.name for path in tmp_path.iterdir()] == ["raise-reset"]


def test_drawn_faults_come_at_the_same_places_anywhere_and_at_the_given_rate() -> None:
    """A draw depends on episode and attempt alone; an evaluator that announces nothing gets other draws each time."""

    def fails(env: gym.Env[Any, Any], index: int, attempt: int) -> bool:
        try:
            play(env, index, attempt)
        except InjectedFault:
            return True
        return False

    first, second = (make(attempt_rates=[0.5, 0.25], within_steps=5) for _ in range(2))
    places = [[fails(first, index, attempt) for index in range(200)] for attempt in (1, 2, 3)]
    assert [fails(second, index, 1) for index in reversed(range(200))] == places[0][::-1]
    assert 70 < sum(places[0]) < 130
    assert 25 < sum(places[1]) < 80
    assert not any(places[2])
    silent = make(step_rate=1.0)
    silent.reset(seed=0)
    with pytest.raises(InjectedFault):
        silent.step(np.int64(0))


def test_a_constructor_fails_always_or_once(tmp_path: Path) -> None:
    """It does not know its episode, so only the folder limits it."""
    for _ in range(2):
        with pytest.raises(InjectedFault) as caught:
            make(kind="raise", phase="construct")
        assert re.findall(r"construct|reset|step|close|\d+", str(caught.value)) == ["construct"]
    with pytest.raises(InjectedFault):
        make(kind="raise", phase="construct", folder=str(tmp_path))
    assert len(play(make(kind="raise", phase="construct", folder=str(tmp_path)))) == 6
    assert [path.name for path in tmp_path.iterdir()] == ["raise-construct"]


class Closing(TwoLengthEnv):
    """Notes that it was closed."""

    closed = False

    def close(self) -> None:
        self.closed = True


def test_close_fails_after_a_guilty_episode() -> None:
    """Or always, if no episode is listed; the wrapped environment is closed all the same."""
    inner = Closing()
    env = make(inner, kind="raise", phase="close", episodes=[1], attempts=[2])
    play(env, index=0)
    play(env, index=1)
    env.close()
    play(env, index=1, attempt=2)
    play(env, index=0)
    inner.closed = False
    with pytest.raises(InjectedFault) as caught:
        env.close()
    assert "close" in str(caught.value)
    assert inner.closed
    with pytest.raises(InjectedFault):
        make(kind="raise", phase="close").close()


def test_close_fails_once_per_folder(tmp_path: Path) -> None:
    """The marker names the guilty episode, if one is listed."""
    for episodes, name in (([], "raise-close"), ([1], "raise-close-1")):
        envs = [make(kind="raise", phase="close", episodes=episodes, folder=str(tmp_path)) for _ in range(2)]
        for env in envs:
            play(env, index=1)
        with pytest.raises(InjectedFault):
            envs[0].close()
        envs[1].close()
        assert (tmp_path / name).exists()


# ------------------------------------------------------------------------------ what


SCRIPT = """
import atexit, resource
atexit.register(print, "cleaned up")
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
from rl_eval import EnvContext
from rl_eval.testing import faulty
def peak():
    with open("/proc/self/status") as status:
        return next(line.split()[1] for line in status if line.startswith("VmHWM"))
env = faulty(EnvContext({fault!r}, 0, 0, 1))
env.begin_episode(0, 0, 1)
env.reset(seed=0)
print("stepping", peak(), flush=True)
try:
    env.step(0)
    print("went on")
except MemoryError:
    print("MemoryError")
print(peak(), resource.getrlimit(resource.RLIMIT_AS))
"""


def child(**fault: Any) -> subprocess.Popen[str]:
    """Start a process that steps into a fault."""
    script = SCRIPT.format(fault={"env": "two_length", "episodes": [0], **fault})
    return subprocess.Popen(
        [sys.executable, "-c", script], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


@pytest.mark.process
@pytest.mark.parametrize("kind", DEADLY)
def test_a_deadly_fault_ends_the_process(kind: str, tmp_path: Path) -> None:
    """With the status or by the signal that it is named after, and not before its step; once, given a folder."""
    with child(kind=kind, folder=str(tmp_path)) as process:
        output, _ = process.communicate(timeout=60)
        assert process.returncode == DEADLY[kind]
    assert output.startswith("stepping")
    assert "went on" not in output
    assert ("cleaned up" in output) == (kind == "exit")
    assert (tmp_path / f"{kind}-step-0").read_text() == str(process.pid)
    if kind == "exit":  # The note that a strike leaves is the same for all kinds.
        with child(kind=kind, folder=str(tmp_path)) as process:
            assert "went on" in process.communicate(timeout=60)[0]


@pytest.mark.process
def test_a_stopped_process_is_stopped_and_can_go_on() -> None:
    """SIGSTOP leaves the process there, without an end; SIGCONT wakes it."""
    with child(kind="sigstop") as process:
        try:
            _, status = os.waitpid(process.pid, os.WUNTRACED)
            assert os.WIFSTOPPED(status)
            assert os.WSTOPSIG(status) == signal.SIGSTOP
            process.send_signal(signal.SIGCONT)
            assert "went on" in process.communicate(timeout=60)[0]
        finally:
            process.kill()


@pytest.mark.process
def test_a_balloon_bursts_within_its_limit() -> None:
    """Most of the limit is really taken, no more, and the process's own limit is back afterwards."""
    with child(kind="balloon", limit_mib=128) as process:
        output, errors = process.communicate(timeout=60)
    if process.returncode:
        # No memory at all was left, for anybody in the process.
        assert process.returncode < 0, errors
        return
    (_, before), (what,), (after, *limit) = (line.split(maxsplit=2) for line in output.splitlines()[:3])
    assert what == "MemoryError"
    assert 64 * 1024 < int(after) - int(before) <= 129 * 1024
    assert limit == ["(-1,", "-1)"]


@pytest.fixture
def ticks() -> Iterator[list[int]]:
    """Counts how often another thread got to run."""
    counted, over = [0], threading.Event()

    def tick() -> None:
        while not over.wait(0.001):
            counted[0] += 1

    thread = threading.Thread(target=tick)
    thread.start()
    yield counted
    over.set()
    thread.join()


def test_only_one_sleep_holds_the_gil(ticks: list[int]) -> None:
    """During ``gil_sleep`` no other thread runs; during ``sleep`` they do."""

    def seen(kind: str) -> int:
        env = make(kind=kind, episodes=[0], seconds=SHORT_S)
        env.begin_episode(0, 0, 1)
        env.reset(seed=0)
        before = ticks[0]
        env.step(np.int64(0))
        return ticks[0] - before

    # On a busy machine the other thread may run around the sleep, or hardly at all: not each time.
    assert any(seen("gil_sleep") <= 2 for _ in range(20))
    assert any(seen("sleep") > 10 for _ in range(20))


def test_a_loop_keeps_a_core_busy() -> None:
    """It takes processor time, which a sleep does not."""

    def spent(kind: str) -> float:
        before = time.thread_time()
        play(make(kind=kind, episodes=[0], seconds=SHORT_S))
        return time.thread_time() - before

    assert any(spent("loop") > 5 * spent("sleep") for _ in range(20))


def alive(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    status = Path(f"/proc/{pid}/stat")
    return status.exists() and status.read_text().rpartition(")")[2].split()[0] != "Z"


@pytest.mark.process
@pytest.mark.parametrize("new_session", [False, True])
def test_a_child_lives_as_long_as_its_environment(tmp_path: Path, new_session: bool) -> None:
    """One per environment, in the session asked for; ``close`` ends it, twice if need be."""
    envs = [make(kind="spawn", seconds=60, folder=str(tmp_path), new_session=new_session) for _ in range(2)]
    pids = [int(path.name.removeprefix("spawn-")) for path in tmp_path.iterdir()]
    assert len(pids) == 2
    assert all(alive(pid) and (os.getsid(pid) == pid) == new_session for pid in pids)
    assert same(play(envs[0]), play(make()))
    envs[0].close()
    assert sum(map(alive, pids)) == 1
    for env in envs:
        env.close()
    assert not any(map(alive, pids))


@pytest.mark.process
def test_a_child_outlives_a_process_that_dies(tmp_path: Path) -> None:
    """As simulators' servers do: whoever cleans up after the dead must find it."""
    with child(kind="spawn", seconds=60, folder=str(tmp_path)) as process:
        process.communicate(timeout=60)
    (pid,) = (int(path.name.removeprefix("spawn-")) for path in tmp_path.iterdir())
    assert alive(pid)
    os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("phase", ["reset", "step"])
def test_a_leak_shows_in_later_episodes_of_the_same_object(phase: str) -> None:
    """The guilty episode itself is clean, and so is a fresh environment."""
    env = make(kind="leak", phase=phase, episodes=[1])
    clean = play(make())
    assert same(play(env, index=0), clean)
    assert same(play(env, index=1), clean)
    for index, leaks in ((0, 1), (1, 1), (0, 2)):
        rewards = [result[1] for result in play(env, index=index)[1:]]
        assert rewards == pytest.approx([result[1] + 0.001 * leaks for result in clean[1:]])
    assert same(play(make(kind="leak", phase=phase, episodes=[1]), index=1), clean)


def test_a_leak_makes_the_table_depend_on_the_layout(plain: str) -> None:
    """Which is why there is a determinism check."""
    fingerprints = {run(lanes=lanes, kind="leak", episodes=[0, 2]).fingerprint for lanes in (1, 3)}
    assert len(fingerprints | {plain}) == 3


# ------------------------------------------------------------------------------ arguments


@pytest.mark.parametrize(
    ("fault", "name"),
    [
        ({"kind": "segfalt"}, "'segfault'"),
        ({"kind": "raise", "phase": "rest"}, "'reset'"),
        ({"kind": "nan_reward", "phase": "reset"}, "'step'"),
        ({"kind": "bad_shape", "phase": "close"}, "'reset'"),
        ({"kind": "spawn", "phase": "step"}, "'construct'"),
        ({"kind": "missing_key"}, "missing_key"),
        ({"kind": "nan_observation", "env": spaces.Box(0, 9, (2,), np.int64)}, "nan_observation"),
    ],
)
def test_a_fault_that_cannot_be_is_refused(fault: dict[str, Any], name: str) -> None:
    """The error names what would do."""
    env = TwoLengthEnv()
    env.observation_space = fault.pop("env", env.observation_space)
    with pytest.raises(ValueError) as caught:
        make(env, **fault)
    assert name in str(caught.value)
    env.observation_space = spaces.Dict({"a": spaces.Discrete(2), "b": spaces.Box(0, 9, (2,))})  # type: ignore[assignment]
    make(env, kind="nan_observation")


def test_every_kind_is_documented_and_has_phases() -> None:
    """The table in the docstring, the implementations and the phases name the same kinds."""
    documented = [line.partition("  ")[0] for line in cleandoc(str(FaultyEnv.__doc__)).splitlines()]
    named = {name for cell in documented for name in cell.split(", ")}
    assert set(PHASES) == set(STRIKES) | set(SPOILS) | {"leak", "spawn"}
    assert set(PHASES) <= named


def test_an_environment_inside_is_told_its_episode_too() -> None:
    """Test environments can be put into one another."""
    context = EnvContext(
        {"env": "rl_eval.testing:faulty", "env_kwargs": {"attempt_rates": [1.0], "within_steps": 3}}, 0, 0, 1
    )
    env = faulty(context)
    with pytest.raises(InjectedFault) as caught:
        play(env, index=5)
    assert re.findall(r"\d+", str(caught.value))[:2] == ["5", "1"]


@pytest.mark.parametrize("factory", [faulty, impure, two_length])
def test_a_factory_takes_a_context(factory: Any) -> None:
    """With nothing in it, too."""
    env = factory(EnvContext({}, 0, 0, 1))
    observation, _ = env.reset(seed=0)
    assert env.observation_space.contains(observation)
    env.close()


@pytest.mark.process
def test_importing_it_brings_no_test_framework() -> None:
    """Environments are built in runners, where neither pytest nor torch need be there at once."""
    script = "import sys, rl_eval.testing; print([m for m in ('pytest', 'torch', 'ray') if m in sys.modules])"
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=ROOT)
    assert ran.stdout.strip() == "[]"
