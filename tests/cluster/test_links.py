"""Evaluations on three machines whose links are cut and whose nodes come and go: the result is always the same."""

import logging
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from launched import machine, wait_until
from linked import Links, linked, missing

import rl_eval
from tests.unit.cli_world import CONFIG, TOYS

pytestmark = [
    pytest.mark.ray,
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(bool(missing()), reason=missing()),
]

EPISODES = 600


def prepare(folder: Path) -> list[str]:
    """Write the project into a folder, and return the command without its cluster."""
    (folder / "cli_toys.py").write_text(TOYS)
    (folder / "toy.yaml").write_text(yaml.safe_dump(CONFIG))
    slow = f"environment.env_kwargs={{pause_s: 0.2, slow: {folder}/slow}}"
    return ["rl-eval", "run", "toy.yaml", "--num-episodes", str(EPISODES), "--output", "runs", "--set", slow]


@pytest.fixture(scope="module")
def expected() -> str:
    """The fingerprint of a run in one process."""
    with machine() as alone:
        done = alone.run(*prepare(alone.folder), cwd=alone.folder, PYTHONPATH=f"{alone.folder}")
        assert done.returncode == 0, done.stdout
        return rl_eval.load(alone.folder / "runs").fingerprint


class Run:
    """A run with four runners on the machines, whose steps are slow until :meth:`hurry`."""

    def __init__(self, links: Links) -> None:
        self.links, self.folder = links, links.host.folder
        self._words = [*prepare(self.folder), f"--address={links.ADDRESS}", "--num-runners=4", "--envs-per-runner=2"]
        self._slow = self.folder / "slow"

    def begin(self, place: str, *options: str) -> None:
        """Start the driver on a machine, and wait for the first episodes."""
        self._slow.touch()
        self._process = subprocess.Popen(
            [*self.links.inside(place), *self._words, *options],
            cwd=self.folder,
            env={**self.links.host.environment, "PYTHONPATH": str(self.folder)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        wait_until(lambda: list((self.folder / "runs" / "segments").glob("[0-9]*-episodes-*")), "the first episodes")

    def hurry(self) -> None:
        """Let the remaining episodes take no time."""
        self._slow.unlink()

    def end(self, limit_s: float) -> tuple[int, str]:
        """Wait for the end; return the exit code and what was printed on standard error."""
        begun = time.monotonic()
        _, told = self._process.communicate(timeout=limit_s)
        seconds = time.monotonic() - begun
        logging.getLogger(__name__).info("exit code %s after another %.0f s", self._process.returncode, seconds)
        return self._process.returncode, told

    def completes(self, expected: str) -> None:
        """Check that the run ends by itself, with all episodes and the right fingerprint."""
        code, told = self.end(limit_s=240)
        assert code == 0, told
        result = rl_eval.load(self.folder / "runs")
        assert (result.status, result.fingerprint) == ("complete", expected)
        assert result.determinism.passed is not False


@pytest.fixture
def run() -> Iterator[Run]:
    """A run that can begin on a head without CPUs, or on the node ``a`` with two."""
    with linked() as links:
        links.start_node("a", cpus=2)
        yield Run(links)


@pytest.mark.parametrize("seconds", [5, 60, 90, None])
def test_a_node_that_is_cut_off_costs_nothing(run: Run, expected: str, seconds: int | None) -> None:
    """For a while, or for ever: then its episodes run elsewhere."""
    run.links.start_node("b", cpus=2)
    run.begin("head")
    run.links.link("b", up=False)
    if seconds is not None:
        time.sleep(seconds)
        run.links.link("b", up=True)
    run.hurry()
    run.completes(expected)


def test_a_node_is_added_and_another_one_killed(run: Run, expected: str) -> None:
    """The waiting runners start on the new node."""
    run.begin("head")
    run.links.start_node("b", cpus=2)
    time.sleep(10)
    run.links.kill_node("a")
    run.hurry()
    run.completes(expected)


@pytest.mark.parametrize("seconds", [5, 60, 90])
def test_the_driver_is_cut_off_for_a_while(run: Run, expected: str, seconds: int) -> None:
    """It goes on with the runners of its own node.

    If the cluster took that node for dead, it killed the runners elsewhere, and Ray's client may never report this.
    """
    run.links.start_node("b", cpus=2)
    run.begin("a", "--set", "fault_tolerance.runner_timeout_s=20")
    run.links.link("a", up=False)
    time.sleep(seconds)
    run.links.link("a", up=True)
    run.hurry()
    run.completes(expected)


@pytest.mark.parametrize("runner_dies", [False, True])
def test_the_driver_is_cut_off_for_ever(run: Run, expected: str, runner_dies: bool) -> None:
    """Ray would end the process with 1, which is a partial result. A loss meanwhile blocks the control loop."""
    run.links.start_node("b", cpus=2)
    run.begin("a")
    run.links.link("a", up=False)
    if runner_dies:
        time.sleep(3)
        run.links.kill_runner("a")
    code, told = run.end(limit_s=240)
    assert code == 4, told
    assert "--output runs" in told.splitlines()[-1]
    run.links.link("a", up=True)
    run.links.kill_node("a")
    run.links.start_node("a", cpus=2)
    before = len(rl_eval.log.read_log(run.folder / "runs").rows)
    assert 0 < before < EPISODES
    run.begin("a")
    run.hurry()
    run.completes(expected)
