"""Three machines in this one: network namespaces with a node of Ray each, and a bridge whose links can be cut."""

import os
import shutil
import signal
import subprocess
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from launched import Machine, machine


def missing() -> str:
    """Return why there can be no namespaces here; empty if there can."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        return "namespaces need root and ip (Debian: iproute2)"
    made = subprocess.run(["unshare", "--net", "true"], check=False, capture_output=True)
    return "" if made.returncode == 0 else "this kernel or container allows no network namespaces"


class Links:
    """Namespaces ``head``, ``a`` and ``b``, which a bridge in a fourth one joins.

    Args:
        host: Has the variables, the folder and the processes of all of them.
    """

    ADDRESS = "10.77.0.1:6379"

    def __init__(self, host: Machine) -> None:
        self.host = host
        self._key = uuid.uuid4().hex[:6]
        self._addresses = {name: f"10.77.0.{last}" for last, name in enumerate(("head", "a", "b"), 1)}

    def make(self) -> None:
        """Make the namespaces and their links."""
        bridge = self._name("bridge")
        _ip("netns", "add", bridge)
        _ip("-n", bridge, "link", "add", "bridge", "type", "bridge")
        _ip("-n", bridge, "link", "set", "bridge", "up")
        for name, address in self._addresses.items():
            space = self._name(name)
            _ip("netns", "add", space)
            _ip("-n", space, "link", "set", "lo", "up")
            # Both ends are born in their namespaces, where no other interface has their names.
            ends = ("link", "add", "net", "type", "veth", "peer", "name", name, "netns", bridge)
            _ip("-n", space, *ends)
            _ip("-n", space, "addr", "add", f"{address}/24", "dev", "net")
            _ip("-n", space, "link", "set", "net", "up")
            _ip("-n", bridge, "link", "set", "dev", name, "master", "bridge")
            self.link(name, up=True)

    def remove(self) -> None:
        """Remove the namespaces; their links go with them."""
        for name in (*self._addresses, "bridge"):
            subprocess.run(["ip", "netns", "del", self._name(name)], check=False, capture_output=True)

    def link(self, name: str, *, up: bool) -> None:
        """Cut or join the link of a machine. Its own end stays up, as behind a switch that lost its power."""
        _ip("-n", self._name("bridge"), "link", "set", "dev", name, "up" if up else "down")

    def start_node(self, name: str, cpus: int) -> None:
        """Start Ray on a machine."""
        first = ["--head", "--include-dashboard=false"] if name == "head" else [f"--address={self.ADDRESS}"]
        ports = ["--port=6379"] if name == "head" else []
        size = [f"--num-cpus={cpus}", "--num-gpus=0", "--object-store-memory=80000000", "--disable-usage-stats"]
        place = [f"--node-ip-address={self._addresses[name]}", f"--temp-dir={self.host.folder / name}"]
        done = self.host.run(*self.inside(name), "ray", "start", *first, *ports, *size, *place)
        assert done.returncode == 0, done.stdout

    def kill_node(self, name: str) -> None:
        """Kill all processes of a machine."""
        for pid in _ip("netns", "pids", self._name(name)).split():
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)

    def kill_runner(self, name: str) -> None:
        """Kill one runner of a machine."""
        pids = _ip("netns", "pids", self._name(name)).split()
        runners = [pid for pid in pids if b"RunnerActor" in Path(f"/proc/{pid}/cmdline").read_bytes()]
        os.kill(int(runners[0]), signal.SIGKILL)

    def inside(self, name: str) -> list[str]:
        """Return the words before a command that runs it on a machine."""
        return ["ip", "netns", "exec", self._name(name)]

    def _name(self, machine: str) -> str:
        return f"rl-eval-{self._key}-{machine}"


@contextmanager
def linked(**variables: str) -> Iterator[Links]:
    """Have three machines with a head and two nodes; nothing of them is left."""
    with machine(RAY_AUTH_MODE="disabled", **variables) as host:
        links = Links(host)
        try:
            links.make()
            links.start_node("head", cpus=0)
            yield links
        finally:
            host.end()
            links.remove()


def _ip(*words: str) -> str:
    return subprocess.run(["ip", *words], check=True, capture_output=True, text=True).stdout
