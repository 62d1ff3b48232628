"""Policies on a server of openpi's protocol: results, probes, faults of the server, mappings."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

from rl_eval import EvalConfig, EvalRunnerGroup, evaluate
from rl_eval.cli.checks import check_policy
from rl_eval.errors import ConfigError, PolicyError, PolicyUnavailable
from rl_eval.execution.group import GroupCallbacks
from rl_eval.integrations.openpi import load_policy
from rl_eval.integrations.openpi.mapping import Requests
from tests.openpi_world import Openpi
from tests.refused import refused, untold
from tests.unit.pages_world import DOCS, blocks

pytestmark = pytest.mark.process

AT = "150"
"""Request at which a server fails: after the probe, before the last episode."""


@pytest.fixture
def servers() -> Iterator[list[Openpi]]:
    started: list[Openpi] = []
    yield started
    for one in started:
        one.kill()


@pytest.fixture
def start(servers: list[Openpi]) -> Any:
    def started(*args: Any, **variables: str) -> Openpi:
        servers.append(Openpi(*args, **variables))
        return servers[-1]

    return started


def stock(observations: Any) -> Any:
    """Return what the server answers."""
    seen = observations.astype(np.float64)
    return (seen[:, 1] + 0.5 * seen[:, -1]).astype(np.float32)[:, None]


def test_layouts_give_the_records_of_the_policy_in_this_process(start: Any) -> None:
    server = start()
    local = server.config()
    expected = evaluate(local.policy(stock, policy_kwargs={})).fingerprint
    for layout in ({"lanes": 1}, {"lanes": 8}, {"runner": "subprocess", "lanes": 3}):
        result = evaluate(server.config(**layout))
        assert (result.status, result.fingerprint) == ("complete", expected)
        assert result.determinism.checked > 0 == len(result.determinism.mismatched)


def test_a_chunk_is_executed_by_the_runner(start: Any) -> None:
    server = start("chunks")
    found = {evaluate(server.config(lanes=lanes).policy(chunk={"execute": 2})).fingerprint for lanes in (1, 5)}
    assert len(found) == 1


def test_a_server_with_one_generator_for_all_clients_is_rejected(start: Any) -> None:
    server = start("random")
    with refused(ConfigError, "policy.allow_nondeterministic", value=False) as seen:
        evaluate(server.config())
    assert f"the server at 127.0.0.1:{server.port}" in str(seen.value)
    result = evaluate(server.config().policy(allow_nondeterministic=True))
    assert result.guarantee.startswith("none") or any("reproduced" in note for note in result.notes)


def test_a_stock_server_takes_no_random_numbers(start: Any) -> None:
    with refused(ConfigError, "policy.deterministic", value=False):
        evaluate(start().config().policy(deterministic=False))


def test_the_address_and_the_key_are_not_part_of_the_identity(start: Any) -> None:
    one, other = (
        EvalConfig().environment("Pendulum-v1").policy(f"openpi:{address}", policy_kwargs=kwargs).build().identity()
        for address, kwargs in (("a:1", {"key_variable": "ONE"}), ("b:2,c:3", {"patience_s": 1.0}))
    )
    assert one == other
    third = EvalConfig().environment("Pendulum-v1").policy("openpi:a:1", policy_kwargs={"prompt": "go"}).build()
    assert third.identity() != one


def test_a_run_continues_at_another_address(start: Any, tmp_path: Path) -> None:
    first, second = start("dies", FAULT_AT=AT, SECONDS_OF_ROW="0.004"), start()
    expected = evaluate(second.config()).fingerprint
    config = first.config(patience_s=0.0).fault_tolerance(max_runner_restarts=0)
    with suppress(PolicyUnavailable):  # If it ends before the first segment of the log.
        evaluate(config, output=tmp_path / "run")
    result = evaluate(second.config(), output=tmp_path / "run")
    assert (result.status, result.fingerprint) == ("complete", expected)


# ------------------------------------------------------------------------------ faults of the server


@pytest.mark.parametrize("runner", ["vector", "subprocess"])
def test_an_error_is_that_of_its_row(start: Any, runner: str) -> None:
    """The server fails on the first observation of one episode, in every attempt."""
    whole = evaluate(start().config())
    first, _ = gym.make("Pendulum-v1").reset(seed=whole.episodes[5].seed)
    result = evaluate(start("det", FAULT_ROW=first.tobytes().hex()).config(runner=runner))
    returns = [record.episode_return for record in result.episodes]
    assert [index for index, one in enumerate(returns) if one != whole.episodes[index].episode_return] == [5]
    faults = [one for record in result.episodes for one in record.faults]
    assert [(one.index, one.step, one.cause, one.error_type) for one in faults] == [(5, 0, "policy", "PolicyError")] * 3
    assert "KeyError: 'observation/state'" in faults[0].message


@pytest.mark.parametrize("runner", ["vector", "subprocess"])
@pytest.mark.parametrize("fault", ["error", "shape", "nan", "garbage", "key"])
def test_a_wrong_answer_is_counted_in_no_episode(start: Any, fault: str, runner: str) -> None:
    expected = evaluate(start().config()).fingerprint
    result = evaluate(start(fault, FAULT_AT=AT).config(runner=runner))
    assert (result.status, result.fingerprint) == ("complete", expected)


@pytest.mark.parametrize("fault", ["noise", "half", "never"])
def test_a_lost_connection_changes_nothing(start: Any, fault: str) -> None:
    server = start(fault, FAULT_AT=AT)
    expected = evaluate(start().config()).fingerprint
    result = evaluate(server.config(answer_timeout_s=1.0))
    assert (result.status, result.fingerprint) == ("complete", expected)
    assert not any(record.faults for record in result.episodes)


@pytest.mark.parametrize("layout", [{"lanes": 1}, {"lanes": 3}, {"lanes": 3, "runner": "subprocess"}])
def test_after_a_second_answer_no_shifted_answer_counts(start: Any, layout: Any, tmp_path: Path) -> None:
    """Answers are shifted from then on. The episodes in doubt run again when the run is continued."""
    server = start("twice", FAULT_AT="220")
    first = evaluate(server.config(**layout), output=tmp_path)
    assert (first.status, len(first.episodes)) == ("partial", 0)
    if layout == {"lanes": 1}:  # Otherwise, an answer may be awaited at any time.
        assert not untold(first.reason, f"127.0.0.1:{server.port}")
    result = evaluate(server.config(**layout), output=tmp_path)
    assert (result.status, result.fingerprint) == ("complete", evaluate(start().config()).fingerprint)


def test_a_second_answer_in_the_first_episode_is_not_another_policy(start: Any, tmp_path: Path) -> None:
    """No record is in doubt then, but the running episodes are."""
    server = start("twice", FAULT_AT="60")
    first = evaluate(server.config(), output=tmp_path)
    assert (first.status, len(first.episodes)) == ("failed", 0)
    assert not untold(first.reason, f"127.0.0.1:{server.port}", "changed")
    result = evaluate(server.config(), output=tmp_path)
    assert (result.status, result.fingerprint) == ("complete", evaluate(start().config()).fingerprint)


def test_another_address_takes_over(start: Any) -> None:
    dies, stays = start("dies", FAULT_AT=AT), start()
    expected = evaluate(stays.config()).fingerprint
    config = dies.config().policy(f"openpi://127.0.0.1:{dies.port},127.0.0.1:{stays.port}")
    result = evaluate(config)
    assert (result.status, result.fingerprint) == ("complete", expected)


def test_a_policy_that_changes_its_weights_is_noticed(start: Any) -> None:
    server = start("drifts")
    result = evaluate(server.config().evaluation(num_episodes=40))
    assert result.status == "partial"


class Restarts(GroupCallbacks):
    """Callbacks that keep the positions of replaced runners."""

    def __init__(self) -> None:
        self.positions: list[int] = []

    def on_runner_restart(self, runner_index: int) -> None:
        self.positions.append(runner_index)


def test_a_server_that_was_never_there(start: Any) -> None:
    """No runner is replaced, and the error has the address."""
    server, restarts = start(), Restarts()
    server.kill()
    with (
        refused(PolicyUnavailable, "policy.policy", value=f"127.0.0.1:{server.port}") as seen,
        EvalRunnerGroup(server.config(patience_s=0.0), callbacks=restarts) as group,
    ):
        group.evaluate()
    assert seen.value.fix
    assert not restarts.positions
    server.start()


def test_a_wrong_key_is_rejected(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names the variable, and says whether a key was sent."""
    server = start("det", SERVER_TOKEN="right-" + "k3y5" * 4)
    told = set()
    for key in ("", "wrong-" + "k3y5" * 4):
        monkeypatch.setenv("OPENPI_API_KEY", key)
        with refused(ConfigError, "policy.policy_kwargs.key_variable", value="OPENPI_API_KEY") as seen:
            evaluate(server.config())
        assert not untold(seen.value.problem, "OPENPI_API_KEY", f"127.0.0.1:{server.port}")
        assert not untold(seen.value.fix, "OPENPI_API_KEY")
        told.add(seen.value.problem)
    assert len(told) == 2
    monkeypatch.setenv("OPENPI_API_KEY", "right-" + "k3y5" * 4)
    assert evaluate(server.config()).status == "complete"


# ------------------------------------------------------------------------------ mappings

IMAGE = gym.spaces.Box(0, 255, (48, 64, 3), np.uint8)
SPACE = gym.spaces.Dict({"image": IMAGE, "wrist_image": IMAGE, "state": gym.spaces.Box(-1, 1, (8,), np.float32)})


def batch(space: gym.Space[Any]) -> Any:
    return {name: np.stack([part.sample() for _ in range(2)]) for name, part in space.items()}


def test_a_robot_has_a_mapping() -> None:
    request = Requests("libero", "pick up the cup", SPACE).of(batch(SPACE))[1]
    assert sorted(request) == ["observation/image", "observation/state", "observation/wrist_image", "prompt"]
    assert request["observation/image"].shape == (224, 224, 3)
    assert not request["observation/image"][:28].any()
    assert request["observation/image"][28:196].any(axis=(1, 2)).all()


def test_images_are_nested_and_their_layout_changes() -> None:
    chw = gym.spaces.Dict({"cam_high": gym.spaces.Box(0, 1, (3, 224, 224), np.float32), "state": SPACE["state"]})
    seen = batch(chw)
    request = Requests("aloha", None, chw).of(seen)[0]
    assert request["images"]["cam_high"].dtype == np.uint8
    assert np.array_equal(request["images"]["cam_high"], (255 * seen["cam_high"][0]).astype(np.uint8))


def test_a_file_maps_leaves(tmp_path: Path) -> None:
    file = tmp_path / "mapping.yaml"
    file.write_text("observation: {image: {key: [rgb, front], layout: chw}, wrist_image: null, state: s}\nprompt: go\n")
    seen = batch(SPACE)
    request = Requests(str(file), None, SPACE).of(seen)[0]
    assert np.array_equal(request["rgb"]["front"], seen["image"][0].transpose(2, 0, 1))
    assert (request["prompt"], sorted(request)) == ("go", ["prompt", "rgb", "s"])


def test_the_page_shows_a_mapping(tmp_path: Path) -> None:
    file = tmp_path / "mapping.yaml"
    (file_block,) = (block for block in blocks(DOCS / "servers.md") if block.title == file.name)
    file.write_text(file_block.text)
    names = {"agentview": IMAGE, "wrist": IMAGE, "robot_state": SPACE["state"], "timer": SPACE["state"]}
    space = gym.spaces.Dict(names)
    request = Requests(str(file), None, space).of(batch(space))[0]
    assert sorted(request) == ["images", "observation/image", "observation/state", "prompt"]
    assert request["images"]["wrist"].shape == (3, 48, 64)


def test_doctor_says_that_requests_are_slow(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = start().config().build()
    assert not [one for one in check_policy(settings) if "websockets" in one.text]
    monkeypatch.setitem(sys.modules, "websockets.speedups", None)
    assert [one.level for one in check_policy(settings) if "websockets" in one.text] == ["note"]


@pytest.mark.parametrize(
    "text",
    [
        "observation: {image: a, state: b}",
        "observation: {image: a, wrist_image: b, state: c, other: d}",
        "observation: {image: {layout: hwc}, wrist_image: null, state: c}",
        "observation: {image: {key: a, form: 1}, wrist_image: null, state: c}",
        "observation: {image: a, wrist_image: b, state: {key: c, size: [4, 4]}}",
        "actions: a",
        "[1",
    ],
)
def test_a_wrong_mapping_is_rejected(tmp_path: Path, text: str) -> None:
    file = tmp_path / "mapping.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError) as seen:
        Requests(str(file), None, SPACE)
    assert seen.value.key == "policy.policy_kwargs.mapping"


@pytest.mark.parametrize("address", ["here", "here:x", ":1", "ws://here:1"])
def test_a_wrong_address_is_rejected(address: str) -> None:
    with refused(ConfigError, "policy.policy_kwargs.addresses", value=address):
        load_policy(address)


@pytest.mark.parametrize("address", ["openpi://127.0.0.1", "openpi:127.0.0.1", "openpi://127.0.0.1@mapping.yaml"])
def test_an_address_without_a_port_is_rejected_before_anything_runs(tmp_path: Path, address: str) -> None:
    """It is no file."""
    (tmp_path / "mapping.yaml").write_text("action: actions")
    address = address.replace("mapping", str(tmp_path / "mapping"))
    with refused(ConfigError, "policy.policy_kwargs.addresses", value="127.0.0.1") as seen:
        EvalConfig().environment("Pendulum-v1").policy(address).build()
    assert "port" in seen.value.problem


def test_an_answer_without_the_action_names_both_sides(start: Any) -> None:
    server = start("key", FAULT_AT="1")
    with pytest.raises(PolicyError) as seen:
        evaluate(server.config())
    assert seen.value.key == "policy.policy_kwargs.mapping"
    assert "observation" in str(seen.value)
    assert "server_timing, act" in str(seen.value)
