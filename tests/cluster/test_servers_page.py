"""The page of policy servers as a user follows it: its commands in shells, its files, and what it says about kills."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from launched import Machine, machine
from machines import many_nodes
from waiting import eventually

from rl_eval import EvalConfig, evaluate
from rl_eval.errors import ConfigError, PolicyUnavailable
from tests.openpi_world import Openpi
from tests.refused import refused
from tests.served import Struck
from tests.unit.pages_world import DOCS, Block, blocks

pytestmark = [pytest.mark.process, pytest.mark.slow]

BLOCKS = blocks(DOCS / "servers.md")
PORT = "8000"
OWN = f"{sys.version_info.major}.{sys.version_info.minor}"


def free_ports(count: int) -> int:
    """Return the first of so many ports in a row that are free."""
    while True:
        with socket.create_server(("127.0.0.1", 0)) as first:
            port: int = first.getsockname()[1]
            try:
                for other in range(1, count):
                    socket.create_server(("127.0.0.1", port + other)).close()
            except OSError:
                continue
            return port


class Shell:
    """Terminals in one folder. Each block of commands is typed in a new one, where a server goes on."""

    def __init__(self, made: Machine, ports: int = 1) -> None:
        self.folder = made.folder / "work"
        self.folder.mkdir()
        self.environment = made.environment | {"PYTHONPATH": f"{made.environment['PYTHONPATH']}:{self.folder}"}
        self.replaced = {PORT: str(free_ports(ports))}
        self.server: subprocess.Popen[str] | None = None
        self.command = ""

    def text(self, block: Block) -> str:
        text = block.text
        for old, new in self.replaced.items():
            text = text.replace(old, new)
        return text

    def save(self, *titles: str) -> None:
        for block in BLOCKS:
            if block.title in titles:
                path = self.folder / block.title
                path.parent.mkdir(exist_ok=True)
                path.write_text(self.text(block))

    def start(self, command: str) -> subprocess.Popen[str]:
        """Start a command in the background, with its output in ``NAME.log``."""
        with (self.folder / f"{command.split()[1]}.log").open("a") as log:
            return subprocess.Popen(
                ["bash", "-ec", command], cwd=self.folder, env=self.environment, stdout=log, stderr=log, text=True
            )

    def type(self, lines: list[str]) -> None:
        command = ["bash", "-ec", "\n".join(lines)]
        ended = subprocess.run(
            command, check=False, cwd=self.folder, env=self.environment, capture_output=True, text=True
        )
        assert ended.returncode == 0, ended.stdout + ended.stderr

    def serve(self, command: str) -> None:
        """Start a server, and wait until it prints its address."""
        log, self.command = self.folder / "rl-eval.log", command
        log.unlink(missing_ok=True)
        self.server = self.start(f"exec {command}")
        assert eventually(lambda: log.exists() and "openpi://" in log.read_text(), process=self.server), log.read_text()
        if printed := re.search(r"export \w+=\$\(cat /.*\)", log.read_text()):
            self.replaced["export OPENPI_API_KEY=$(cat /tmp/rl_eval-1a2b/token)"] = printed[0]

    def follow(self, block: Block) -> None:
        waiting: list[str] = []
        for line in block.text.splitlines():
            if line.startswith("rl-eval serve"):
                self.type(waiting)
                waiting = []
                self.serve(self.text(Block("bash", "", line)))
            else:
                waiting.append(line)
        self.type([self.text(Block("bash", "", line)) for line in waiting])


@pytest.fixture
def shell() -> Iterator[Shell]:
    with machine() as made:
        yield Shell(made)


def shells() -> list[Block]:
    return [block for block in BLOCKS if block.language == "bash"]


PACKAGE = """
import gymnasium as gym

def make_env():
    return gym.make("Pendulum-v1", max_episode_steps=20)
"""
NETS = """
from torch import nn

def make_policy():
    return nn.Linear(3, 1)
"""


def test_a_server_of_openpi_acts(shell: Shell) -> None:
    (shell.folder / "my_pkg.py").write_text(PACKAGE)
    server = Openpi("chunks")
    shell.replaced[PORT] = str(server.port)
    shell.follow(shells()[0])
    server.kill()


def test_a_module_is_served(shell: Shell) -> None:
    torch, safetensors = pytest.importorskip("torch"), pytest.importorskip("safetensors.torch")
    (shell.folder / "my_pkg").mkdir()
    (shell.folder / "my_pkg/__init__.py").write_text(PACKAGE)
    (shell.folder / "my_pkg/nets.py").write_text(NETS)
    safetensors.save_file(torch.nn.Linear(3, 1).state_dict(), shell.folder / "policy.safetensors")
    shell.follow(shells()[1])


# ------------------------------------------------------------------------------ from simulators to a restart

KILLS = """
import os, signal

HERE = os.path.dirname(__file__)

class Swing(Swing):
    def step(self, action):
        '''Kill a process after so many steps of all simulators, once each.'''
        with open(f"{HERE}/steps", "a") as file:
            file.write(".")
        own = {"simulator": os.getpid, "runner": os.getppid}
        for name, steps in (("server", 300), ("simulator", 600), ("runner", 900), ("run", 1200)):
            if os.path.getsize(f"{HERE}/steps") >= steps and (name in own or os.path.exists(f"{HERE}/{name}.pid")):
                try:
                    os.close(os.open(f"{HERE}/{name}.killed", os.O_CREAT | os.O_EXCL))
                except FileExistsError:
                    continue
                os.kill(own[name]() if name in own else int(open(f"{HERE}/{name}.pid").read()), signal.SIGKILL)
        return super().step(action)
"""


def test_whatever_is_killed_the_same_commands_continue(
    shell: Shell, interpreter: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server, a simulator, a runner and the run; the records are those of everything in this process."""
    shell.replaced["/envs/simulator/bin/python"] = interpreter("3.10", "numpy", "gymnasium")
    shell.save("simulators/swing.py", "vla.py", "swing.yaml")
    simulators = shell.folder / "simulators"
    monkeypatch.syspath_prepend(str(shell.folder))
    monkeypatch.syspath_prepend(str(simulators))
    here = EvalConfig.from_yaml(shell.folder / "swing.yaml").environment(python=None, python_path=[])
    here.policy("vla:plan", policy_kwargs={}).runners(num_runners=0)
    expected = evaluate(here)
    with (simulators / "swing.py").open("a") as file:
        file.write(KILLS)
    *_, starting, running = shells()
    shell.follow(starting)
    assert shell.server is not None
    ends = threading.Event()

    def serve_again() -> None:
        """Start the server again, as the page says, when it has been killed."""
        while not ends.is_set():
            assert shell.server is not None
            (simulators / "server.pid").write_text(str(shell.server.pid))
            if shell.server.wait() == -signal.SIGKILL and not ends.is_set():
                shell.serve(shell.command)

    again = threading.Thread(target=serve_again)
    again.start()
    try:
        *lines, command = shell.text(running).splitlines()
        run = shell.start("\n".join([*lines, f"exec {command}"]))
        (simulators / "run.pid").write_text(str(run.pid))
        assert run.wait(300) == -signal.SIGKILL, (shell.folder / "OPENPI_API_KEY.log").read_text()
        shell.follow(running)
    finally:
        ends.set()
        shell.server.kill()
        again.join()
    result = json.loads((shell.folder / "runs/swing/result.json").read_text())
    assert (result["status"], result["fingerprint"]) == ("complete", expected.fingerprint)
    assert sorted(path.stem for path in simulators.glob("*.killed")) == ["run", "runner", "server", "simulator"]
    shell.type(re.findall(r"rl-eval run swing.yaml --policy .*?(?=`)", (DOCS / "servers.md").read_text()))


# ------------------------------------------------------------------------------ other servers


def commands_of(port: int) -> list[int]:
    """Return the processes with a port in their command."""
    found = subprocess.run(["ps", "-ww", "-eo", "pid,args"], capture_output=True, text=True, check=True).stdout
    return [int(line.split()[0]) for line in found.splitlines() if re.search(rf"serve .*--port {port}\b", line)]


def test_ray_places_a_server_on_each_node_and_starts_it_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENPI_API_KEY", "key-of-two-nodes")
    nets = (
        "import numpy as np\n\ndef make_policy():\n    return act\n\ndef act(seen):\n    return np.tanh(seen[:, :1])\n"
    )
    with machine() as made:
        shell = Shell(made, ports=2)
        (shell.folder / "my_pkg").mkdir()
        (shell.folder / "my_pkg/nets.py").write_text(nets)
        shell.save("policy_servers.py")
        paths = [str(shell.folder), str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
        monkeypatch.setenv("PATH", made.environment["PATH"])
        monkeypatch.syspath_prepend(str(shell.folder))
        config = EvalConfig().environment(Struck).policy("my_pkg.nets:make_policy").evaluation(num_episodes=20)
        expected = evaluate(config).fingerprint
        with many_nodes(0) as cluster:
            for _ in range(2):
                cluster.add_node(num_cpus=2, num_gpus=1, object_store_memory=80 * 1024**2)
            shell.environment["RAY_ADDRESS"] = cluster.address
            script = shell.start("exec python policy_servers.py")
            log = shell.folder / "python.log"
            assert eventually(lambda: "openpi://" in log.read_text(), process=script), log.read_text()
            (address,) = re.findall(r"^openpi://\S+$", log.read_text(), re.MULTILINE)
            ports = [int(one.rpartition(":")[2]) for one in address.split(",")]
            assert eventually(lambda: all(commands_of(port) for port in ports)), log.read_text()
            (struck,) = commands_of(ports[0])
            config.environment(env_kwargs={"pid": struck, "struck": 5}).policy(
                address, policy_kwargs={"patience_s": 60.0}
            )
            result = evaluate(config.runners(num_runners=2, num_envs_per_runner=4))
            assert (result.status, result.fingerprint) == ("complete", expected)
            assert eventually(lambda: commands_of(ports[0]) not in ([], [struck]))
            script.send_signal(signal.SIGINT)
            assert eventually(lambda: not any(commands_of(port) for port in ports))
            script.wait(60)


class Arm(gym.Env[Any, Any]):
    """Robot with a camera and an instruction."""

    observation_space = gym.spaces.Dict(
        {
            "front": gym.spaces.Box(0, 255, (6, 6, 3), np.uint8),
            "arm": gym.spaces.Box(-9, 9, (3,), np.float32),
            "task": gym.spaces.Text(9),
        }
    )
    action_space = gym.spaces.Box(-1, 1, (2,), np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.steps, self.task = 0, ("lift", "put")[int(self.np_random.integers(2))]
        return self.seen(), {}

    def seen(self) -> Any:
        front = self.np_random.integers(0, 256, (6, 6, 3)).astype(np.uint8)
        return {"front": front, "arm": self.np_random.normal(size=3).astype(np.float32), "task": self.task}

    def step(self, action: Any) -> Any:
        self.steps += 1
        return self.seen(), float(action.sum()), self.steps == 20, False, {}


def test_the_server_of_groot_acts(
    tmp_path: Path, interpreter: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It gives equal records in two layouts; if it samples, it is rejected; if it is away, that is said."""
    python = interpreter(OWN, "pyzmq", "msgpack", "numpy")
    (site,) = Path(python).parents[1].glob("lib/python*/site-packages")
    (page,) = (block for block in BLOCKS if block.title == "groot.py")
    monkeypatch.setattr(sys, "path", [*sys.path, str(site)])
    names: dict[str, Any] = {}
    exec(compile(page.text, "groot.py", "exec"), names)

    def found(address: str, lanes: int) -> Any:
        made = EvalConfig().environment(Arm).policy(names["Groot"](address), chunk={"execute": 4})
        return evaluate(made.runners(num_envs_per_runner=lanes).evaluation(num_episodes=12))

    for mode in ("fixed", "random"):
        command = [python, Path(__file__).parents[1] / "groot_server.py", mode]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
            assert server.stdout is not None
            address = f"tcp://127.0.0.1:{int(server.stdout.readline())}"
            if mode == "fixed":
                results = [found(address, lanes) for lanes in (1, 8)]
                assert {result.status for result in results} == {"complete"}
                assert results[0].fingerprint == results[1].fingerprint
                assert results[0].determinism.mismatched == ()
            else:
                with refused(ConfigError, "policy.allow_nondeterministic"):
                    found(address, 8)
            server.kill()
    page_text = page.text.replace("60_000", "100")
    exec(compile(page_text, "groot.py", "exec"), names)
    observations = {"front": np.zeros((1, 6, 6, 3), np.uint8), "arm": np.zeros((1, 3)), "task": np.array(["lift"])}
    with pytest.raises(PolicyUnavailable):
        names["Groot"](address).act(observations, None, np.ones(1, bool), None)
