"""``ray submit`` with the shipped cluster file, against this machine, reached by ssh with an sshd of the test's own."""

import getpass
import hashlib
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml
from launched import ROOT, Machine, free_ports, machine, start_options, wait_until, write_command

SBIN = "/usr/sbin:/usr/bin:/bin"
MISSING = [name for name in ("sshd", "ssh", "ssh-keygen", "rsync") if shutil.which(name, path=SBIN) is None]

pytestmark = [
    pytest.mark.ray,
    pytest.mark.slow,
    pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)} (Debian: openssh-server, rsync)"),
    pytest.mark.skipif(os.geteuid() != 0, reason="sshd lets only root log in to a home folder of the test's own"),
]

ENVS = '''
import gymnasium as gym


def short(context):
    """CartPole of this project, cut after some steps."""
    return gym.make("CartPole-v1", max_episode_steps=context["steps"])
'''

POLICIES = '''
import numpy as np


def lean():
    """Push to where the pole leans."""
    return lambda observations: (observations[:, 2] > 0).astype(np.int64)
'''

CONFIG = {
    "environment": {"env": "my_envs:short", "env_kwargs": {"steps": 30}},
    "policy": {"policy": "my_policies:lean"},
    "runners": {"num_runners": 2, "num_envs_per_runner": 4},
    "evaluation": {"num_episodes": 40},
}


@dataclass(frozen=True)
class Loopback:
    """The caller's side, and the home folder that an ssh session finds."""

    caller: Machine
    home: Path
    cluster: Path
    project: Path

    def submit(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Call ``ray submit`` in the project."""
        script = ROOT / "configs" / "cluster" / "on_head.py"
        return self.caller.run(
            "ray", "submit", self.cluster, *words[:-1], script, "--", *words[-1].split(), cwd=self.project
        )


@pytest.fixture(scope="module")
def loopback() -> Iterator[Loopback]:
    """Have an sshd on a free port; the shipped file with free ports for Ray; a project with code of its own."""
    with machine(RAY_AUTH_MODE="disabled") as caller:
        home, project = caller.folder / "home", caller.folder / "project"
        _write_home(home)
        _write_project(project)
        cluster = caller.folder / "cluster.yaml"
        cluster.write_text(yaml.safe_dump(_cluster(caller)))
        _start_sshd(caller, home)
        yield Loopback(caller, home, cluster, project)
    for sockets in Path("/tmp").glob(f"ray_ssh_*/{hashlib.sha256(caller.name.encode()).hexdigest()[:10]}"):
        shutil.rmtree(sockets)


def _write_home(home: Path) -> None:
    """A login shell must find the environment's python; Debian's /etc/profile sets PATH anew."""
    home.mkdir()
    (home / ".profile").write_text('export PATH="$RL_EVAL_TEST_PATH"\n')
    (home / ".bashrc").touch()


def _write_project(project: Path) -> None:
    project.mkdir()
    (project / "my_envs.py").write_text(ENVS)
    (project / "my_policies.py").write_text(POLICIES)
    (project / "config.yaml").write_text(yaml.safe_dump(CONFIG))


def _cluster(caller: Machine) -> dict[str, object]:
    """The shipped file, with this account, a name and ports of its own."""
    content = yaml.safe_load((ROOT / "configs" / "cluster" / "loopback.yaml").read_text())
    (start,) = content["head_start_ray_commands"]
    assert "--port=6379 --" in start
    content["cluster_name"] = caller.name
    content["auth"]["ssh_user"] = getpass.getuser()
    content["head_start_ray_commands"] = [start.replace("--port=6379", " ".join(start_options(free_ports(4))))]
    return content


def _start_sshd(caller: Machine, home: Path) -> None:
    (port,) = free_ports(1)
    folder = caller.folder
    for key in ("host_key", "user_key"):
        assert caller.run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / key).returncode == 0
    names = ("PYTHONPATH", "RAY_AUTH_MODE", "RAY_TMPDIR", "RL_EVAL_TEST_PROCESSES")
    session = {name: caller.environment[name] for name in names}
    session |= {"HOME": str(home), "RL_EVAL_TEST_PATH": caller.environment["PATH"]}
    (folder / "sshd_config").write_text(
        f"""
ListenAddress 127.0.0.1:{port}
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/user_key.pub
PermitRootLogin prohibit-password
PasswordAuthentication no
StrictModes no
UsePAM no
PidFile none
SetEnv {" ".join(f'"{name}={value}"' for name, value in session.items())}
"""
    )
    (folder / "ssh_config").write_text(f"Host 127.0.0.1\n  Port {port}\n  IdentityFile {folder}/user_key\n")
    # ssh takes the home folder from the account, not from HOME: this stands for the user's ~/.ssh/config.
    write_command(folder / "bin" / "ssh", f'exec {shutil.which("ssh", path=SBIN)} -F {folder}/ssh_config "$@"')
    Path("/run/sshd").mkdir(exist_ok=True)
    sshd = str(shutil.which("sshd", path=SBIN))
    caller.start(sshd, "-D", "-e", "-f", folder / "sshd_config", log=folder / "sshd.log")
    target = f"{getpass.getuser()}@127.0.0.1"
    options = ("-o", "StrictHostKeyChecking=no", "-o", "UserKnownHostsFile=/dev/null")
    wait_until(lambda: caller.run("ssh", *options, target, "true").returncode == 0, "ssh to this machine")


def test_ray_submit(loopback: Loopback) -> None:
    """It starts the cluster, copies the project there and runs it; called again, it finds the log complete."""
    words = "run config.yaml --output ../log"
    first = loopback.submit("--start", "--no-config-cache", words)
    assert first.returncode == 0, first.stdout
    assert (loopback.home / "rl_eval_project" / "my_envs.py").is_file()
    here = loopback.caller.run("rl-eval", "run", "config.yaml", "--num-runners=0", "-o", "here", cwd=loopback.project)
    assert here.returncode == 0, here.stdout
    expected = json.loads((loopback.project / "here" / "result.json").read_text())
    log = loopback.home / "log"
    result = json.loads((log / "result.json").read_text())
    assert (result["status"], result["fingerprint"]) == ("complete", expected["fingerprint"])

    files = {path: path.stat().st_mtime_ns for path in log.rglob("*.parquet")}
    second = loopback.submit("--no-config-cache", words)
    assert second.returncode == 0, second.stdout
    assert result["fingerprint"][:16] in second.stdout
    assert {path: path.stat().st_mtime_ns for path in log.rglob("*.parquet")} == files
