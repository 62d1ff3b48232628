"""A named service: who reaches it, who gets which result, and what it survives."""

import math
import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from machines import eventually, local_cluster
from service_world import echo, program
from typer.testing import CliRunner

from rl_eval import EvalConfig, Evaluator, EvaluatorBusy
from rl_eval.cli import app
from rl_eval.errors import ClusterError, ConfigError, UsageError, WeightsError
from rl_eval.service.directory import end_service, find_service, list_services
from rl_eval.service.messages import ServiceStatus


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    with local_cluster(num_cpus=16, object_store_memory=200 * 1024**2):
        yield


@pytest.fixture(scope="module")
def shared() -> Iterator[str]:
    """A service that no test ends."""
    config, policy = echo()
    with Evaluator(config, policy, name="shared", max_queue=200):
        yield "shared"


@contextmanager
def gated(tmp_path: Path, name: str, **options: Any) -> Iterator[tuple[Evaluator, Path]]:
    """A service whose evaluations end when a file is there; nothing of it is left."""
    gate = tmp_path / "gate"
    config, policy = echo(str(gate))
    evaluator = Evaluator(config, policy, name=name, **{"busy_policy": "queue", **options})
    try:
        yield evaluator, gate
    finally:
        evaluator.shutdown()
        if ("rl_eval", name) in list_services():
            end_service(name, "rl_eval")


def weights(value: float) -> dict[str, torch.Tensor]:
    return {"value": torch.full((1,), float(value))}


def status(name: str) -> ServiceStatus | None:
    return list_services().get(("rl_eval", name))


def state(name: str) -> str:
    found = status(name)
    return "none" if found is None else found.state


def actors() -> set[int]:
    """Pids of all actors of the cluster."""
    from ray._private import state as cluster

    return {one["Pid"] for one in cluster.actors().values() if one["State"] == "ALIVE" and one["Pid"]}


def alive(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


# ------------------------------------------------------------------------------ the driver dies


def test_a_service_survives_the_kill_of_its_driver_and_keeps_its_results(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    driver = """
config, policy = echo(sys.argv[2])
ev = Evaluator(config, policy, name="survivor", detached=True, client="trainer", busy_policy="queue")
for step in (10, 20, 30):
    assert ev.trigger_eval(weights(step + 1), step)
say(ev.weights_version)
time.sleep(1000)
"""
    with program(tmp_path, driver, str(gate)) as started:
        assert started.hear() == [3]
        before = status("survivor")
        started.kill()
    gate.touch()
    try:
        with Evaluator.from_name("survivor", client="trainer") as ev:
            assert ev.pending or len(ev.history()) == 3
            points = [ev.wait(60) for _ in range(3)]
            assert [(point.step, point.weights_version, point.result.mean_return) for point in points if point] == [
                (10, 1, 11.0),
                (20, 2, 21.0),
                (30, 3, 31.0),
            ]
            assert [(one.client, one.step, one.weights_version) for one in ev.history()] == [
                ("trainer", step, version) for step, version in ((10, 1), (20, 2), (30, 3))
            ]
            assert [one.result.fingerprint for one in ev.history() if one.result] == [
                point.result.fingerprint for point in points if point
            ]
            # It goes on where the dead driver was: the same runners, the next step and version, its last weights.
            handle = ev.submit()
            assert handle.result(60).mean_return == 31.0
            assert (handle.step, handle.weights_version) == (31, 3)
            assert ev.submit(weights(7)).weights_version == 4
            assert ev.evaluate().mean_return == 7.0
        after = status("survivor")
        assert before is not None
        assert after is not None
        assert (after.pid, after.num_finished) == (before.pid, 6)
        with Evaluator.from_name("survivor", client="trainer") as again:
            assert again.poll(0.5) is None, "what was read came a second time"
        with Evaluator.from_name("survivor") as stranger:
            assert stranger.poll(0.5) is None, "another client's results"
            assert len(stranger.history()) == 6
    finally:
        end_service("survivor", "rl_eval")


def test_a_service_that_is_not_detached_ends_with_its_driver(tmp_path: Path) -> None:
    driver = """
config, policy = echo()
ev = Evaluator(config, policy, name="mortal")
say(ev.evaluate(weights(5)).mean_return)
time.sleep(1000)
"""
    with program(tmp_path, driver) as started:
        assert started.hear() == [5.0]
        guest = Evaluator.from_name("mortal")
        assert guest.evaluate(weights(6)).mean_return == 6.0
        pid = find_pid("mortal")
        started.kill()
    assert eventually(lambda: state("mortal") == "none" and not Path(f"/proc/{pid}").exists())
    with pytest.raises(ClusterError, match="'mortal' (is gone|cannot be reached)"):
        guest.submit(weights(1)).result(60)
    guest.shutdown()


def find_pid(name: str) -> int:
    found = status(name)
    assert found is not None
    return found.pid


def test_what_a_client_submitted_is_evaluated_although_it_shut_down(tmp_path: Path) -> None:
    with gated(tmp_path, "leaving", detached=True) as (owner, gate):
        guest = Evaluator.from_name("leaving", client="guest", busy_policy="queue")
        handles = [guest.submit(weights(value), step=value) for value in (1, 2)]
        guest.shutdown()
        for handle in handles:
            with pytest.raises(ClusterError, match="'leaving' goes on with it"):
                handle.result(10)
        gate.touch()
        assert eventually(lambda: len(owner.history()) == 2)
        with Evaluator.from_name("leaving", client="guest") as back:
            points = [back.wait(30) for _ in range(2)]
        assert [point.result.mean_return for point in points if point] == [1.0, 2.0]


# ------------------------------------------------------------------------------ many clients

CLIENT = """
number, count = int(sys.argv[2]), int(sys.argv[3])
answered = []
with Evaluator.from_name("shared", busy_policy="queue", max_queue=count) as ev:
    say("ready")
    handles = []
    for step in range(count):
        handle = ev.submit(weights(1000 * number + step), step)
        handle.add_done_callback(lambda handle: answered.append(handle.step))
        handles.append(handle)
    say([[handle.step, handle.result(120).mean_return, handle.weights_version] for handle in handles])
    say(answered)
"""


@pytest.mark.parametrize("count", [10, pytest.param(100, marks=pytest.mark.slow)])
def test_four_clients_are_each_answered_once_and_none_is_crossed(shared: str, tmp_path: Path, count: int) -> None:
    versions: list[int] = []
    with (
        program(tmp_path, CLIENT, "1", str(count)) as one,
        program(tmp_path, CLIENT, "2", str(count)) as two,
        program(tmp_path, CLIENT, "3", str(count)) as three,
        program(tmp_path, CLIENT, "4", str(count)) as four,
    ):
        for number, client in enumerate((one, two, three, four), start=1):
            assert client.hear() == ["ready"]
            (answers,) = client.hear()
            assert [(step, value) for step, value, _ in answers] == [
                (step, 1000.0 * number + step) for step in range(count)
            ]
            own = [version for _, _, version in answers]
            assert own == sorted(set(own)), "versions of one client do not grow"
            versions += own
            assert client.hear() == [list(range(count))], "answered more than once, or in another order"
    assert len(set(versions)) == 4 * count, "two requests have the same version"


def test_clients_take_turns(tmp_path: Path) -> None:
    with gated(tmp_path, "turns") as (hasty, gate), Evaluator.from_name("turns", busy_policy="queue") as modest:
        running = hasty.submit(weights(0), step=0)
        for step in range(1, 5):
            hasty.submit(weights(step), step)
        last = modest.submit(weights(100), step=100)
        final = hasty.submit(weights(5), step=5)
        gate.touch()
        assert last.result(60).mean_return == 100.0
        final.result(60)
        assert running.done()
        order = [one.step for one in modest.history()]
        assert order == [0, 1, 100, 2, 3, 4, 5], "a client waits for more than one request of another"


def test_no_weights_are_those_of_the_same_client(shared: str) -> None:
    with Evaluator.from_name(shared) as one, Evaluator.from_name(shared) as two:
        assert one.evaluate(weights(11)).mean_return == 11.0
        assert two.evaluate().mean_return == 0.0, "a client that sent none evaluates the policy as it was given"
        assert two.evaluate(weights(22)).mean_return == 22.0
        assert one.evaluate().mean_return == 11.0


def test_weights_that_do_not_fit_are_their_clients_error_alone(shared: str) -> None:
    with Evaluator.from_name(shared) as one, Evaluator.from_name(shared) as two:
        one.evaluate(weights(3))
        with pytest.raises(WeightsError, match="shape"):
            one.evaluate({"value": torch.zeros(2)})
        assert two.evaluate(weights(4)).mean_return == 4.0
        assert one.evaluate().mean_return == 3.0, "it falls back to the weights before"


def test_a_name_belongs_to_who_connected_last(tmp_path: Path) -> None:
    with gated(tmp_path, "twins", client="twin") as (first, gate):
        handle = first.submit(weights(8), step=8)
        with Evaluator.from_name("twins", client="twin") as second:
            with pytest.raises(UsageError, match="'twin' has connected once more"):
                handle.result(60)
            with pytest.raises(UsageError, match="'twin' has connected once more"):
                first.submit(weights(9))
            gate.touch()
            point = second.wait(60)
            assert point is not None
            assert (point.step, point.result.mean_return) == (8, 8.0)


def test_callbacks_and_metrics_are_the_clients(shared: str) -> None:
    points: list[Any] = []
    with Evaluator.from_name(
        shared, on_result=points.append, metrics_fn=lambda records: {"count": len(records)}, log_prefix="mine"
    ) as ev:
        ev.evaluate(weights(2), step=4)
    (point,) = points
    assert (point.step, point.metrics["mine/episode_return_mean"], point.metrics["mine/count"]) == (4, 2.0, 2)


# ------------------------------------------------------------------------------ handles


def test_progress_and_cancel_reach_the_service(tmp_path: Path) -> None:
    with gated(tmp_path, "handles") as (ev, gate):
        running, waiting, after = (ev.submit(weights(value)) for value in (1, 2, 3))
        assert eventually(lambda: running.progress().num_runners == 1)
        assert (running.progress().num_episodes, running.progress().num_finished) == (2, 0)
        assert waiting.progress().num_runners == 0
        waiting.cancel("not needed")
        result = waiting.result(60)
        assert (result.status, len(result.records)) == ("failed", 0)
        assert "not needed" in result.reason
        assert not running.done()
        running.cancel("started", unless_started=True)
        gate.touch()
        assert running.result(60).status == "complete"
        assert after.result(60).mean_return == 3.0

        gate.unlink()
        running = ev.submit(weights(4))
        assert eventually(lambda: state("handles") == "running" and running.progress().num_runners == 1)
        running.cancel("enough")
        assert "enough" in running.result(60).reason
        gate.touch()
        assert ev.evaluate(weights(5)).mean_return == 5.0


def test_the_latest_request_replaces_the_one_that_waits(tmp_path: Path) -> None:
    points: list[Any] = []
    with gated(tmp_path, "latest", busy_policy="latest", max_queue=1, on_result=points.append) as (ev, gate):
        for step in range(5):
            assert ev.trigger_eval(weights(step), step)
        gate.touch()
        assert eventually(lambda: not ev.pending)
    assert [(point.step, point.result.mean_return) for point in points] == [(0, 0.0), (4, 4.0)]


def test_a_handle_can_be_awaited(shared: str) -> None:
    import asyncio

    async def evaluate(ev: Evaluator) -> float:
        return float((await ev.submit(weights(13))).mean_return)

    with Evaluator.from_name(shared) as ev:
        assert asyncio.run(evaluate(ev)) == 13.0


# ------------------------------------------------------------------------------ accepting


def test_a_request_that_is_sent_twice_runs_once(tmp_path: Path) -> None:
    with gated(tmp_path, "twice", detached=True, client="owner") as (ev, gate):
        actor = find_service("twice", "rl_eval")
        from rl_eval.weights import snapshot_weights

        welcome = ray.get(actor.connect.remote("careful", True))
        send = lambda: actor.submit.remote(  # noqa: E731
            "careful", welcome.session, "a", 1, 0, snapshot_weights(weights(6), 0)
        )
        tickets = ray.get([send() for _ in range(5)])
        assert len(set(tickets)) == 1
        gate.touch()
        (answer,) = ray.get(actor.collect.remote("careful", welcome.session, [], 60.0))
        assert answer.request == "a"
        # Until it says that it has it, it is sent again; and a late repetition finds it done.
        assert ray.get(actor.collect.remote("careful", welcome.session, [], 60.0)) == [answer]
        assert ray.get(actor.collect.remote("careful", welcome.session, ["a"], 0.1)) == []
        ray.get(actor.read.remote("careful", welcome.session, ["a"]))
        assert ray.get(send()) == tickets[0]
        assert ev.evaluate(weights(1)).mean_return == 1.0
        assert [one.client for one in ev.history()] == ["careful", "owner"]


def test_a_service_refuses_more_than_its_queue_and_evaluate_waits_for_room(tmp_path: Path) -> None:
    with gated(tmp_path, "full", max_queue=2) as (ev, gate), Evaluator.from_name("full") as other:
        first = ev.submit(weights(0))
        assert eventually(lambda: state("full") == "running")
        second = [ev.submit(weights(value)) for value in (1, 2)]
        with pytest.raises(EvaluatorBusy):
            ev.submit(weights(3))
        with pytest.raises(EvaluatorBusy, match=r"holds 2 requests .* max_queue=2"):
            ev._engine.submit(weights=weights(3), version=None, step=3, follow_up=None)
        mine = other.submit(weights(50))  # The other client has a queue of its own.
        found: list[float] = []
        waiting = threading.Thread(target=lambda: found.append(ev.evaluate(weights(4)).mean_return))
        waiting.start()
        assert not found
        gate.touch()
        waiting.join(60)
        assert found == [4.0]
        assert [handle.result(60).mean_return for handle in (first, *second, mine)] == [0.0, 1.0, 2.0, 50.0]
        assert ev.weights_version == max(one.weights_version for one in ev.history())
        with pytest.raises(ConfigError, match="max_queue is 3, but the service was started with 2"):
            Evaluator.from_name("full", max_queue=3)


def test_names_that_are_taken_or_unknown(shared: str) -> None:
    config, policy = echo()
    with pytest.raises(ConfigError, match=r"a.* service 'shared' .*already.*from_name\('shared'\)"):
        Evaluator(config, policy, name="shared")
    with pytest.raises(UsageError, match=r"no evaluation service 'chared' .*; there is: .*'shared'"):
        Evaluator.from_name("chared")
    with pytest.raises(UsageError, match=r"'shared' \(namespace 'rl_eval'\)"):
        Evaluator.from_name("shared", namespace="elsewhere")
    with Evaluator(config, policy, name="shared", namespace="elsewhere") as other:
        assert other.evaluate(weights(1)).mean_return == 1.0
        assert Evaluator.from_name(shared).evaluate(weights(2)).mean_return == 2.0


@pytest.mark.parametrize("options", [{"detached": True}, {"client": "a"}, {"namespace": "a"}, {"idle_timeout_s": 3.0}])
def test_what_needs_a_name_is_not_ignored_without(options: dict[str, Any]) -> None:
    config, policy = echo()
    with pytest.raises(ConfigError, match=f"{next(iter(options))} is given, but there is no service without a name"):
        Evaluator(config, policy, **options)
    with pytest.raises(ConfigError, match="backend is 'thread'"):
        Evaluator(config, policy, name="nobody", backend="thread")


def test_a_service_that_cannot_start_says_why_and_is_gone() -> None:
    config, _ = echo()
    with pytest.raises(ConfigError, match="no file 'missing.pt'"):
        Evaluator(config.policy("a:b", weights="missing.pt"), name="broken", detached=True)
    assert eventually(lambda: state("broken") == "none")


def test_an_environment_that_cannot_be_built_is_an_error_of_the_handle() -> None:
    config = EvalConfig().environment("Nowhere-v0").policy(lambda observations: observations).runners(num_runners=1)
    with Evaluator(config, name="nowhere") as ev, pytest.raises(ConfigError, match="Nowhere"):
        ev.evaluate()


def test_the_end_of_a_client_that_owns_no_service() -> None:
    config, policy = echo()
    with pytest.raises(UsageError, match="only a service keeps a history"), Evaluator(config, policy) as ev:
        ev.history()


# ------------------------------------------------------------------------------ the service ends


def test_handles_of_a_killed_service_fail_and_its_processes_end(tmp_path: Path) -> None:
    before = actors()
    with gated(tmp_path, "killed", detached=True) as (ev, _), Evaluator.from_name("killed") as guest:
        handles = [ev.submit(weights(1)), ev.submit(weights(2)), guest.submit(weights(3))]
        assert eventually(lambda: handles[0].progress().num_runners == 1)
        found = status("killed")
        assert found is not None
        pids = actors() - before
        assert len(pids) >= 3
        os.kill(found.pid, signal.SIGKILL)
        for handle in handles:
            with pytest.raises(ClusterError, match="'killed' is gone"):
                handle.result(60)
        with pytest.raises(ClusterError, match="'killed' is gone"):
            ev.submit(weights(4))
        with pytest.raises(ClusterError):
            ev.history()
        assert math.isnan(handles[0].progress().mean_return)
        handles[0].cancel()
        assert eventually(lambda: state("killed") == "none" and not any(map(alive, pids)))


def test_an_orphan_ends_after_its_time_and_leaves_no_process() -> None:
    config, policy = echo()
    before = actors()
    ev = Evaluator(config, policy, name="orphan", detached=True, idle_timeout_s=1.0)
    ev.evaluate(weights(1))
    time.sleep(3.0)
    assert ev.evaluate(weights(2)).mean_return == 2.0, "a client that lives is no orphan's"
    pids = actors() - before
    assert len(pids) >= 3  # The service, its runner, and the agent of the runner's node.
    ev.shutdown()
    assert eventually(lambda: state("orphan") == "none" and not any(map(alive, pids)), 60)


def test_an_orphan_with_work_goes_on(tmp_path: Path) -> None:
    with gated(tmp_path, "busy", detached=True, idle_timeout_s=1.0) as (ev, gate):
        ev.submit(weights(1))
        ev.shutdown()
        time.sleep(3.0)
        assert state("busy") == "running"
        gate.touch()
        assert eventually(lambda: state("busy") == "none", 60)


# ------------------------------------------------------------------------------ the command line


def test_services_are_listed_and_stopped_by_command(tmp_path: Path) -> None:
    with gated(tmp_path, "listed", detached=True, client="trainer") as (ev, _):
        handle = ev.submit(weights(1), step=12)
        ev.submit(weights(2))
        pid = find_pid("listed")
        listed = CliRunner().invoke(app, ["service", "list", "--namespace", "rl_eval"])
        assert listed.exit_code == 0
        for pattern in (
            "service listed +running",
            f"process {pid} on",
            "running +trainer, step 12",
            "queue +1 +waiting, 0 finished",
            "client +trainer +1 waiting, 0 unread",
        ):
            assert re.search(pattern, listed.output), listed.output
        assert max(map(len, listed.output.splitlines())) <= 80
        stopped = CliRunner().invoke(app, ["service", "stop", "listed"])
        assert (stopped.exit_code, stopped.output) == (0, "service listed has ended\n")
        with pytest.raises(ClusterError):
            handle.result(60)
        assert eventually(lambda: not alive(pid))
        assert CliRunner().invoke(app, ["service", "stop", "listed"]).exit_code == 2
    empty = CliRunner().invoke(app, ["service", "list", "--namespace", "nothing"])
    assert (empty.exit_code, empty.output) == (0, "no evaluation service in namespace nothing\n")
