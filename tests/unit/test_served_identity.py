"""What a server serves is part of an evaluation's identity, and its address is not: a number has one policy."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import gymnasium as gym
import pytest
import yaml

from rl_eval import EvalConfig, EvalRunnerGroup, evaluate
from rl_eval.cli.exits import ExitCode
from rl_eval.config.policy_sources import lasting
from rl_eval.errors import ConfigError, PolicyUnavailable
from rl_eval.log import read_log
from rl_eval.records.guarantee import is_served
from rl_eval.results.loading import load
from rl_eval.results.text import policy_name
from rl_eval.suites.suite import Suite
from tests.openpi_world import STEPS, Openpi
from tests.refused import refused, untold
from tests.served import Served
from tests.unit.cli_world import call

pytestmark = pytest.mark.process

EPISODES, STRUCK = 6, 4

Start = Callable[[str, float], Any]


STRIKES: dict[tuple[int, int], Callable[[], object]] = {}
"""What happens once, by episode and step."""


class Short(gym.Wrapper[Any, Any, Any, Any]):
    """Pendulum with short episodes, in whose steps something may happen."""

    def __init__(self) -> None:
        super().__init__(gym.make("Pendulum-v1", max_episode_steps=STEPS))
        self._index = self._steps = 0

    def begin_episode(self, index: int, seed: int, attempt: int) -> None:
        self._index, self._steps = index, 0

    def step(self, action: Any) -> Any:
        self._steps += 1
        if (self._index, self._steps + 1) in STRIKES:
            time.sleep(0.2)  # Longer than a slice, so the runner reports next.
        if strike := STRIKES.pop((self._index, self._steps), None):
            strike()
        return super().step(action)


ENV = f"{__name__}:Short"


@pytest.fixture
def start() -> Iterator[Start]:
    """Start a server of a kind. A negative gain makes another policy."""
    started: list[Any] = []

    def begin(kind: str, gain: float = 1.0) -> Any:
        started.append(Openpi("det", gain) if kind == "stock" else Served("flat" if gain > 0 else "opposite"))
        return started[-1]

    STRIKES.clear()
    yield begin
    for one in started:
        one.kill()


def replaced(server: Any, policy: str = "opposite") -> None:
    """Start another policy at the address of a server; a stock server has one other policy."""
    server.kill()
    if isinstance(server, Openpi):
        server.start(-1.0)
    else:
        server.options = (f"tests.served:{policy}", *server.options[1:])
        server.start()


def address(*servers: Any) -> str:
    return "openpi://" + ",".join(f"127.0.0.1:{one.port}" for one in servers)


def config(*servers: Any, lanes: int = 1, **policy: Any) -> EvalConfig:
    limits = {"patience_s": 0.0, "answer_timeout_s": 20.0}
    found = EvalConfig().environment(ENV).policy(address(*servers), policy_kwargs=limits, **policy)
    found.evaluation(num_episodes=EPISODES).fault_tolerance(max_runner_restarts=0)
    return found.runners(num_envs_per_runner=lanes)


def command(output: Path, *servers: Any, json_too: bool = False) -> Any:
    given = ["--env", ENV, "--policy", address(*servers), "-n", str(EPISODES), "-o", str(output)]
    given += ["--set", "policy.policy_kwargs.patience_s=0", "--set", "fault_tolerance.max_runner_restarts=0"]
    return call("run", *given, *(["--json"] if json_too else []))


def cells_of(suite: Any, folder: Path) -> Any:
    """Write a suite, run it, and return the states of its cells."""
    (folder / "suite.yaml").write_text(yaml.safe_dump(suite))
    return Suite.from_yaml(folder / "suite.yaml").run(folder / "out").cells


def finished(output: Path) -> int:
    """Return the number of episodes in a log."""
    return len(read_log(output).rows)


KINDS = pytest.mark.parametrize("kind", ["stock", "served"])


@KINDS
def test_a_complete_run_is_not_that_of_another_policy(start: Start, kind: str, tmp_path: Path) -> None:
    """The run of the same policy at another address has its number, without another episode."""
    first, moved, other = start(kind), start(kind), start(kind, -1.0)
    expected = evaluate(config(first), output=tmp_path / "run")
    with refused(ConfigError, "policy.policy", value=address(other)) as seen:
        evaluate(config(other), output=tmp_path / "run")
    assert seen.value.fix
    again = evaluate(config(moved), output=tmp_path / "run")
    assert (again.status, again.fingerprint, again.provenance["notes"]) == (
        "complete",
        expected.fingerprint,
        expected.provenance["notes"],
    )
    assert load(tmp_path / "run").fingerprint == expected.fingerprint


@KINDS
def test_the_command_line_asks_before_it_shows_a_complete_run(start: Start, kind: str, tmp_path: Path) -> None:
    first, moved, other = start(kind), start(kind), start(kind, -1.0)
    assert command(tmp_path / "run", first).exit_code == 0
    number = json.loads((tmp_path / "run/result.json").read_text())["fingerprint"]
    refusal = command(tmp_path / "run", other)
    assert refusal.exit_code == ExitCode.USAGE
    assert untold(refusal.output, number) == [number]
    assert json.loads(command(tmp_path / "run", moved, json_too=True).stdout)["fingerprint"] == number


@KINDS
def test_without_its_server_a_complete_run_is_shown_with_a_note(start: Start, kind: str, tmp_path: Path) -> None:
    """By the command, which shows results. The note is in this result alone: the next one may have asked."""
    server = start(kind)
    expected = evaluate(config(server), output=tmp_path / "run")
    server.kill()
    shown = json.loads(command(tmp_path / "run", server, json_too=True).stdout)
    assert (shown["status"], shown["fingerprint"]) == ("complete", expected.fingerprint)
    *notes, note = shown["provenance"]["notes"]
    assert (notes, untold(note, f"127.0.0.1:{server.port}")) == ([*expected.provenance["notes"]], [])
    with refused(PolicyUnavailable, "policy.policy"):
        evaluate(config(server), output=tmp_path / "run")
    server.start()
    again = evaluate(config(server), output=tmp_path / "run")
    assert (again.fingerprint, again.provenance["notes"]) == (expected.fingerprint, expected.provenance["notes"])


def test_without_its_simulator_a_complete_run_is_shown_with_a_note(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine without the GPU, licence or display of the simulator can show a result."""
    server = start("stock")
    expected = evaluate(config(server), output=tmp_path / "run").fingerprint
    monkeypatch.setattr(Short, "__init__", lambda self: 1 / 0)
    shown = json.loads(command(tmp_path / "run", server, json_too=True).stdout)
    assert (shown["status"], shown["fingerprint"]) == ("complete", expected)
    assert not untold(shown["provenance"]["notes"][-1], "ZeroDivisionError")


@pytest.mark.parametrize(
    ("key", "served"),
    [("server/weights", True), ("a/server/protocol", True), ("server/outputs", False), ("outputs", False)],
)
def test_a_policy_with_the_name_server_is_not_on_a_server(key: str, served: bool) -> None:
    """Keys of one policy of several begin with its name."""
    assert is_served({key: ""}) == served


@pytest.mark.parametrize("policy", ["openpi://127.0.0.1:{}", "rl_eval.integrations.openpi:load_policy"])
def test_the_address_is_not_in_the_definition_of_a_cell(policy: str) -> None:
    """Nor are the time limits."""
    one, other = (
        lasting(
            {
                "policy": policy.format(port),
                "policy_kwargs": {"addresses": f"127.0.0.1:{port}", "patience_s": port, "prompt": "lift"},
            }
        )
        for port in (8001, 8002)
    )
    assert one == other
    assert one["policy_kwargs"] == {"prompt": "lift"}


def test_a_wrong_address_is_the_error_of_its_cell_alone(tmp_path: Path) -> None:
    values = {
        "suite": "served",
        "shared": {"evaluation": {"num_episodes": 1}},
        "tasks": {"swing": {"environment": {"env": ENV}}},
        "policies": {"served": {"policy": "openpi://127.0.0.1"}, "random": {"policy": "random"}},
    }
    cells = cells_of(values, tmp_path)
    assert {state.planned.cell.policy: state.status for state in cells} == {"served": "error", "random": "complete"}


@KINDS
@pytest.mark.parametrize("struck", [0, STRUCK])
def test_an_unfinished_run_is_continued_by_its_policy_alone(
    start: Start, kind: str, struck: int, tmp_path: Path
) -> None:
    """Also if no episode had finished."""
    first, moved, other = start(kind), start(kind), start(kind, -1.0)
    expected = evaluate(config(moved)).fingerprint
    STRIKES[struck, 3] = first.kill
    with suppress(PolicyUnavailable):  # If it ends before the first segment of the log.
        evaluate(config(first), output=tmp_path / "run")
    assert finished(tmp_path / "run") == struck
    with refused(ConfigError, "policy.policy", value=address(other)):
        evaluate(config(other), output=tmp_path / "run")
    assert finished(tmp_path / "run") == struck
    result = evaluate(config(moved), output=tmp_path / "run")
    assert (result.status, result.fingerprint) == ("complete", expected)
    first.start()


@pytest.mark.parametrize("kind", ["stock", "served", "sampled"])
@pytest.mark.parametrize("lanes", [1, 3])
def test_a_policy_without_memory_goes_on_after_a_restart(lanes: int, kind: str) -> None:
    """Its server has no state to lose, so no step is repeated, and no attempt is used up."""
    server: Any = Openpi("det") if kind == "stock" else Served("flat", *["--stochastic"] * (kind == "sampled"))

    def again() -> None:
        server.kill()
        server.start()

    try:
        plain = config(server, lanes=lanes, deterministic=kind != "sampled")
        plain.fault_tolerance(max_attempts_per_episode=1)
        expected = evaluate(plain)
        STRIKES[STRUCK, 3] = STRIKES[1, 1] = again
        result = evaluate(plain)
        assert not STRIKES
    finally:
        STRIKES.clear()
        server.kill()
    assert (result.status, result.fingerprint) == ("complete", expected.fingerprint)
    assert result.timing.env_steps == expected.timing.env_steps


@KINDS
def test_a_group_that_has_asked_asks_again(start: Start, kind: str, tmp_path: Path) -> None:
    """Its server may have been replaced since then."""
    server = start(kind)
    with EvalRunnerGroup(config(server).policy(policy_kwargs={"patience_s": 20.0})) as group:
        expected = group.evaluate(output=tmp_path / "run").fingerprint
        assert group.evaluate(output=tmp_path / "run").fingerprint == expected
        replaced(server)
        with refused(ConfigError, "policy.policy"):
            group.evaluate(output=tmp_path / "run")


@KINDS
def test_a_cell_of_a_suite_is_continued_by_its_policy_alone(start: Start, kind: str, tmp_path: Path) -> None:
    server = start(kind)
    values = {
        "suite": "served",
        "shared": {
            "evaluation": {"num_episodes": EPISODES},
            "fault_tolerance": {"max_runner_restarts": 0},
            "runners": {"num_envs_per_runner": 1},
        },
        "tasks": {"swing": {"environment": {"env": ENV}}},
        "policies": {"served": {"policy": address(server), "policy_kwargs": {"patience_s": 0.0}}},
    }

    STRIKES[STRUCK, 3] = server.kill
    (state,) = cells_of(values, tmp_path)
    assert state.status != "complete"
    replaced(server)
    (state,) = cells_of(values, tmp_path)
    assert state.status == "error"
    assert address(server) in state.reason
    moved = start(kind)
    values["policies"] = {"served": {"policy": address(moved), "policy_kwargs": {"patience_s": 1.0}}}
    for _ in range(2):
        (state,) = cells_of(values, tmp_path)
        assert state.status == "complete"
        assert state.score.fingerprint == evaluate(config(moved)).fingerprint


def test_a_suite_does_not_mix_policies_of_a_server(start: Start, tmp_path: Path) -> None:
    """A cell whose server was replaced after other tasks is an error, until it is evaluated again."""
    server = start("served")
    tasks = {"one": {"environment": {"env": ENV}}}
    values = {
        "suite": "served",
        "shared": {"evaluation": {"num_episodes": EPISODES}, "runners": {"num_envs_per_runner": 1}},
        "tasks": tasks,
        "policies": {"served": {"policy": address(server)}},
    }

    def statuses() -> list[str]:
        return [state.status for state in cells_of(values, tmp_path)]

    assert statuses() == ["complete"]
    replaced(server)
    tasks["two"] = {"environment": {"env": ENV}, "evaluation": {"seed": 9}}
    for _ in range(2):
        assert statuses() == ["complete", "error"]
    assert not untold(cells_of(values, tmp_path)[1].reason, "one/served")
    replaced(server, "flat")
    assert statuses() == ["complete", "error"]
    (folder,) = (path for path in (tmp_path / "out/cells").iterdir() if path.name.startswith("two"))
    shutil.rmtree(folder)
    assert statuses() == ["complete", "complete"]


@KINDS
def test_addresses_with_different_policies_are_rejected_at_the_start(start: Start, kind: str) -> None:
    """All of them are asked, and the error names both."""
    first, same, other = start(kind), start(kind), start(kind, -1.0)
    for servers in ((first, other), (first, same, other), (other, first)):
        with refused(ConfigError, "policy.policy_kwargs.addresses") as seen:
            evaluate(config(*servers))
        named = [one for one in servers if not untold(str(seen.value), f"127.0.0.1:{one.port}")]
        assert len(named) == 2
        assert other in named
    assert evaluate(config(first, same)).fingerprint == evaluate(config(first)).fingerprint


def test_an_address_without_a_server_is_passed_over(start: Start) -> None:
    first, gone = start("stock"), start("stock")
    expected = evaluate(config(first)).fingerprint
    gone.kill()
    for servers in ((first, gone), (gone, first)):
        assert evaluate(config(*servers)).fingerprint == expected
    gone.start()


def test_a_result_names_the_address(start: Start, tmp_path: Path) -> None:
    server = start("stock")
    evaluate(config(server), output=tmp_path / "run")
    assert policy_name(load(tmp_path / "run").provenance) == address(server)
    assert address(server) in call("show", str(tmp_path / "run")).output
