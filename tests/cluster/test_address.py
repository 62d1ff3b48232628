"""Where the cluster is, and who may shut it down."""

import json
import os
import re
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray
from launched import Machine, free_ports, machine, start_options
from numpy_world import lean
from waiting import eventually

from rl_eval import EvalConfig, EvalRunnerGroup, evaluate
from rl_eval.backends import connection
from rl_eval.config.settings import RunnersSection
from rl_eval.errors import RunnerStartError
from rl_eval.supervision.process_environment import reproducible_environment, runner_environment
from tests.refused import refused

pytestmark = pytest.mark.ray


@pytest.fixture(autouse=True)
def _no_cluster() -> None:
    assert not ray.is_initialized()


def test_unreachable_address(monkeypatch: pytest.MonkeyPatch) -> None:
    """An address where no cluster answers is named."""
    config = EvalConfig().environment("CartPole-v1").runners(num_runners=1, address="127.0.0.1:9")
    with refused(RunnerStartError, "runners.address", value="127.0.0.1:9"):
        evaluate(config, policy=lean())
    assert not ray.is_initialized()


@pytest.mark.slow
def test_a_local_cluster_ends_with_the_group_that_started_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without an address a cluster is started, and shut down; runners are told the variables that we lack."""
    needed = reproducible_environment()
    monkeypatch.delenv("PYTHONHASHSEED")
    before = dict(os.environ)
    config = EvalConfig().environment("CartPole-v1").runners(num_runners=1).evaluation(num_episodes=4)
    with EvalRunnerGroup(config, lean()) as group:
        assert dict(os.environ) == before
        assert group.evaluate().status == "complete"
        assert group.foreach_runner(lambda runner: {name: os.environ.get(name) for name in needed}) == [needed]
        told = group.foreach_runner(lambda runner: ray.get_runtime_context().runtime_env["env_vars"])
        assert told == [{"PYTHONHASHSEED": needed["PYTHONHASHSEED"]}]
    assert not ray.is_initialized()


def test_a_local_cluster_whose_variables_we_have_needs_no_other_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """No runtime environment at all, unless the user gives one."""
    monkeypatch.setattr(connection, "_connect", lambda section, address: None)
    monkeypatch.setattr(connection, "_identity", lambda: ("", ""))
    monkeypatch.setattr(connection, "ClusterWatch", lambda *arguments: None)
    local = connection.Connection(RunnersSection(num_runners=1))
    mine = RunnersSection(num_runners=1, runtime_env={"env_vars": {"MUJOCO_GL": "egl"}})
    assert (local.runtime_env(RunnersSection(num_runners=1)), local.runtime_env(mine)) == ({}, mine.runtime_env)
    elsewhere = connection.Connection(RunnersSection(num_runners=1, address="10.0.0.1:6379"))
    assert elsewhere.runtime_env(mine) == {"env_vars": {**runner_environment(), "MUJOCO_GL": "egl"}}
    monkeypatch.delenv("MKL_CBWR")
    assert elsewhere.runtime_env(mine)["env_vars"]["MKL_CBWR"] == ""
    assert local.runtime_env(RunnersSection(num_runners=1)) == {}


_ONE_DRIVER = """
import json
import sys

import torch
from rl_eval import EvalConfig, evaluate

torch.manual_seed(0)
layers = [torch.nn.Linear(3, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1), torch.nn.Tanh()]
found = []
for runners in (0, 1):
    config = EvalConfig().environment("Pendulum-v1").policy(actions="unsquash").runners(num_runners=runners)
    result = evaluate(config.evaluation(num_episodes=6, seed=0), torch.nn.Sequential(*layers))
    found.append((result.fingerprint, result.provenance["numerics"]))
print(json.dumps(found))
"""


@pytest.mark.slow
def test_runners_compute_as_a_driver_without_an_mkl_mode() -> None:
    """A script that leaves the variable unset has one fingerprint and one numerics key; torch has read it by then."""
    unset = {name: value for name, value in os.environ.items() if name not in reproducible_environment()}
    done = subprocess.run([sys.executable, "-c", _ONE_DRIVER], env=unset, capture_output=True, text=True, check=True)
    here, there = json.loads(done.stdout.splitlines()[-1])
    assert here == there
    assert (here[1]["mkl_cbwr"], here[1]["num_threads"]) == ("", 1)


_FORGETFUL = """
import time
from rl_eval import EvalConfig, EvalRunnerGroup
config = EvalConfig().environment("CartPole-v1").evaluation(num_episodes=1_000_000).runners(num_runners=1)
handle = EvalRunnerGroup(config, lambda observations: (observations[:, 2] > 0).astype(int)).submit()
while not handle.progress().num_finished:
    time.sleep(0.05)
print("working", flush=True)
if {waits}:
    handle.result()
"""


@pytest.mark.parametrize("told", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["SIGTERM", "forgotten"])
@pytest.mark.slow
def test_a_process_that_ends_without_stopping_its_group_leaves_nothing(told: bool) -> None:
    """Neither runners nor Ray's daemons, whether it is told to end or just ends."""
    mark = uuid.uuid4().hex
    command = [sys.executable, "-c", _FORGETFUL.format(waits=told)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env={**os.environ, "RL_EVAL_TEST": mark}
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"working\n"
        if told:
            process.send_signal(signal.SIGTERM)
        process.wait(60)
    assert eventually(lambda: not _marked(mark))


def _marked(mark: str) -> list[str]:
    """Processes that inherited a mark."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if mark.encode() in path.read_bytes():
                found.append(path.parent.name)
        except OSError:
            continue
    return found


_SECRET = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0123456789abcdef" * 4}


@pytest.fixture(scope="module")
def guarded() -> Iterator[tuple[Machine, str]]:
    """A cluster that asks for a token, on a machine whose clients know of none, and its address."""
    with machine() as made:
        ports = free_ports(4)
        command = ("ray", "start", "--head", *start_options(ports), "--include-dashboard=false")
        started = made.run(*command, "--temp-dir", made.folder / "ray", HOME=str(made.folder), **_SECRET)
        assert started.returncode == 0, started.stdout
        yield made, f"127.0.0.1:{ports[0]}"


@pytest.mark.parametrize(
    ("variables", "hint"),
    [
        ({}, "Set RAY_AUTH_MODE=token"),
        ({"RAY_AUTH_MODE": "disabled"}, "Set RAY_AUTH_MODE=token"),
        ({"RAY_AUTH_MODE": "token"}, "RAY_AUTH_MODE=token is set"),
        ({"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "fedcba9876543210" * 4}, "RAY_AUTH_TOKEN_PATH"),
    ],
    ids=["nothing", "disabled", "no token", "another token"],
)
@pytest.mark.slow
def test_a_cluster_that_asks_for_a_token_is_said_to(
    guarded: tuple[Machine, str], variables: dict[str, str], hint: str
) -> None:
    """The message says that it answered and what it wants, and nothing of Ray's own tries is on the terminal."""
    machine, address = guarded
    done = machine.run("rl-eval", "service", "list", "--address", address, HOME=str(machine.folder), **variables)
    assert done.returncode == 4
    (line,) = done.stdout.splitlines()
    assert re.match(r"error: the cluster at \S+ .*RAY_AUTH_MODE=", line)
    assert hint in line


@pytest.mark.slow
def test_python_is_told_of_the_token_too(guarded: tuple[Machine, str]) -> None:
    """The error of a group; the process that got it is not connected."""
    machine, address = guarded
    done = machine.run(sys.executable, "-c", _REFUSED.format(address=address), HOME=str(machine.folder))
    assert done.stdout.splitlines() == ["True", "False"]


_REFUSED = """
import ray
import torch
from rl_eval import EvalConfig, evaluate
from rl_eval.errors import RunnerStartError
config = EvalConfig().environment("CartPole-v1").runners(num_runners=1, address="{address}")
try:
    evaluate(config, policy=torch.nn.Linear(4, 2))
except RunnerStartError as error:
    print(error.key == "runners.address")
print(ray.is_initialized())
"""


@pytest.mark.slow
def test_to_connect_starts_no_other_interpreter(guarded: tuple[Machine, str]) -> None:
    """A process that has the token is let in at once, without another one that tries first."""
    machine, address = guarded
    quiet = {"PYTHONWARNINGS": "ignore::FutureWarning"}  # Tips of older versions of Ray.
    code = _LET_IN.format(address=address)
    done = machine.run(sys.executable, "-c", code, HOME=str(machine.folder), **_SECRET, **quiet)
    assert done.stdout.splitlines() == ["True", "[]"]


_LET_IN = """
import sys
started = []
sys.addaudithook(lambda event, args: started.append(args[0]) if event == "subprocess.Popen" else None)
import ray
from rl_eval.backends.connection import Connection
from rl_eval.config.settings import RunnersSection
Connection(RunnersSection(num_runners=1, address="{address}"))
print(ray.is_initialized())
print([program for program in started if program == sys.executable])
ray.shutdown()
"""


@pytest.mark.parametrize("name", ["x" * 120, "größe"])
def test_a_temporary_folder_that_ray_cannot_use_is_named(tmp_path: Path, name: str) -> None:
    """Its sockets have paths of at most 107 ASCII characters. The remedy helps."""
    folder = tmp_path / name
    folder.mkdir()
    options = ["--env", "CartPole-v1", "--policy", "random", "-n", "2", "--num-runners", "1", "--output", "log"]
    run = [sys.executable, "-m", "rl_eval", "run", *options]
    outside = {key: value for key, value in os.environ.items() if key not in ("RAY_ADDRESS", "RAY_TMPDIR")}
    failed, done = (
        subprocess.run(
            run,
            check=False,
            env={**outside, "TMPDIR": place},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=300,
        )
        for place in (str(folder), "/tmp")
    )
    assert failed.returncode == 4
    assert "TMPDIR=/tmp" in failed.stderr
    assert done.returncode == 0, done.stderr
