"""A named service: who reaches it, who gets which result, and what it survives."""

import math
import os
import re
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import ray
import torch
from machines import eventually, local_cluster
from service_world import ROOT, echo, program
from typer.testing import CliRunner

from rl_eval import EvalConfig, Evaluator, EvaluatorBusy
from rl_eval.cli import app
from rl_eval.errors import ClusterError, ConfigError, UsageError, WeightsError
from rl_eval.service import directory
from rl_eval.service.actor import EvalService
from rl_eval.service.directory import end_service, find_service, list_services
from rl_eval.service.messages import ServiceStatus
from rl_eval.weights import HeldWeights, load_weights_file, snapshot_weights


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    with local_cluster(num_cpus=16, object_store_memory=200 * 1024**2):
        yield


class Gate:
    """Without it no episode ends."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.open()

    def open(self) -> None:
        self.path.touch()

    def close(self) -> None:
        self.path.unlink()


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gate]:
    """A service named ``shared`` that no test ends."""
    gate = Gate(tmp_path_factory.mktemp("shared") / "gate")
    config, policy = echo(str(gate.path))
    with Evaluator(config, policy, name="shared", max_queue=200):
        yield gate


@pytest.fixture
def gate(service: Gate) -> Iterator[Gate]:
    """The gate of ``shared``, closed during a test."""
    assert eventually(lambda: state("shared") == "idle")
    service.close()
    yield service
    service.open()


@contextmanager
def own_service(tmp_path: Path, name: str, **options: Any) -> Iterator[tuple[Evaluator, Gate]]:
    """A service with a closed gate, for one test; nothing of it is left."""
    gate = Gate(tmp_path / "gate")
    gate.close()
    config, policy = echo(str(gate.path))
    evaluator = Evaluator(config, policy, name=name, **{"busy_policy": "queue", **options})
    try:
        yield evaluator, gate
    finally:
        evaluator.shutdown()
        if state(name) != "none":
            end_service(name, "rl_eval")


def reach(client: str | None = None, **options: Any) -> Evaluator:
    return Evaluator.from_name("shared", client=client, **{"busy_policy": "queue", **options})


def steps_of(evaluator: Evaluator, *clients: str) -> list[int]:
    """Steps of the evaluations of some clients, in the order in which they ran."""
    return [one.step for one in evaluator.history() if one.client in clients]


def weights(value: float) -> dict[str, torch.Tensor]:
    return {"value": torch.full((1,), float(value))}


def status(name: str) -> ServiceStatus | None:
    return list_services().get(("rl_eval", name))


def state(name: str) -> str:
    found = status(name)
    return "none" if found is None else found.state


def find_pid(name: str) -> int:
    found = status(name)
    assert found is not None
    return found.pid


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


def test_what_was_read_before_a_shutdown_does_not_come_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Slow(EvalService):
        """So that a goodbye which does not wait for the calls before it overtakes them."""

        def read(self, name: str, session: int, requests: list[str]) -> None:
            import time

            time.sleep(1.0)
            super().read(name, session, requests)

    monkeypatch.setattr(directory, "EvalService", Slow)
    with own_service(tmp_path, "slow") as (_, gate):
        gate.open()
        with Evaluator.from_name("slow", client="reader") as ev:
            assert ev.trigger_eval(weights(1), 1)
            point = ev.wait(60)
            assert point is not None
            assert point.step == 1
            assert ev.trigger_eval(weights(2), 2)
            assert eventually(lambda: not ev.pending)
        with Evaluator.from_name("slow", client="reader") as ev:
            point = ev.wait(60)
            assert point is not None
            assert point.step == 2, "what was not read comes, and nothing else"
            assert ev.wait(60) is None


@pytest.mark.slow
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
    with pytest.raises(ClusterError, match=r"'mortal' (is gone|cannot be reached)"):
        guest.submit(weights(1)).result(60)
    guest.shutdown()


def test_what_a_client_submitted_is_evaluated_although_it_shut_down(gate: Gate) -> None:
    guest = reach("leaving")
    handles = [guest.submit(weights(value), step=value) for value in (1, 2)]
    guest.shutdown()
    guest.shutdown(timeout_s=3600)  # Nothing is left to wait for.
    for handle in handles:
        with pytest.raises(ClusterError, match="'shared' goes on with it"):
            handle.result(10)
    gate.open()
    with reach("leaving") as back:
        points = [back.wait(60) for _ in range(2)]
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


@pytest.mark.slow
def test_four_processes_are_each_answered_once_and_none_is_crossed(service: Gate, tmp_path: Path) -> None:
    count = 100
    with ExitStack() as stack:
        clients = [stack.enter_context(program(tmp_path, CLIENT, str(number), str(count))) for number in range(4)]
        answers = []
        for client in clients:
            assert client.hear() == ["ready"]
            answers.append(client.hear()[0])
            assert client.hear() == [list(range(count))], "answered more than once, or in another order"
    check_answers(answers, count)


def test_four_clients_are_each_answered_once_and_none_is_crossed(service: Gate) -> None:
    count = 25
    clients = [reach(max_queue=count) for _ in range(4)]

    def ask(number: int) -> list[tuple[int, float, int]]:
        ev = clients[number]
        handles = [ev.submit(weights(1000 * number + step), step) for step in range(count)]
        answered: list[int | None] = []
        for handle in handles:
            handle.add_done_callback(lambda handle: answered.append(handle.step))
        results = [(handle.step or 0, handle.result(120).mean_return, handle.weights_version) for handle in handles]
        assert answered == list(range(count))
        return results

    with ThreadPoolExecutor(4) as pool:
        check_answers(list(pool.map(ask, range(4))), count)
    for client in clients:
        client.shutdown()


def check_answers(answers: list[list[tuple[int, float, int]]], count: int) -> None:
    """Each client has the returns of its own weights, and versions that grow and are nobody else's."""
    versions: list[int] = []
    for number, own in enumerate(answers):
        assert [(step, value) for step, value, _ in own] == [(step, 1000.0 * number + step) for step in range(count)]
        assert [version for _, _, version in own] == sorted({version for _, _, version in own})
        versions += [version for _, _, version in own]
    assert len(set(versions)) == len(answers) * count


def test_clients_take_turns(gate: Gate) -> None:
    with reach("hasty") as hasty, reach("modest") as modest:
        running = hasty.submit(weights(0), step=0)
        for step in range(1, 5):
            hasty.submit(weights(step), step)
        last = modest.submit(weights(100), step=100)
        final = hasty.submit(weights(5), step=5)
        gate.open()
        assert last.result(60).mean_return == 100.0
        final.result(60)
        assert running.done()
        assert steps_of(modest, "hasty", "modest") == [0, 1, 100, 2, 3, 4, 5]


def test_no_weights_are_those_of_the_same_client(service: Gate) -> None:
    with reach() as one, reach() as two:
        assert one.evaluate(weights(11)).mean_return == 11.0
        assert two.evaluate().mean_return == 0.0, "a client that sent none evaluates the policy as it was given"
        assert two.evaluate(weights(22)).mean_return == 22.0
        assert one.evaluate().mean_return == 11.0


def test_weights_that_do_not_fit_are_their_clients_error_alone(service: Gate) -> None:
    with reach() as one, reach() as two:
        one.evaluate(weights(3))
        with pytest.raises(WeightsError, match="shape"):
            one.evaluate({"value": torch.zeros(2)})
        assert two.evaluate(weights(4)).mean_return == 4.0
        assert one.evaluate().mean_return == 3.0, "it falls back to the weights before"


def test_weights_that_do_not_fit_twice_in_a_row_fall_back_to_the_last_that_did(gate: Gate) -> None:
    misfits = {"value": torch.zeros(2)}
    with reach() as one:
        good = one.submit(weights(3))
        bad = [one.submit(misfits) for _ in range(2)]
        gate.open()
        assert good.result(60).mean_return == 3.0
        for handle in bad:
            with pytest.raises(WeightsError, match="shape"):
                handle.result(60)
        assert one.evaluate().mean_return == 3.0


def test_weights_that_do_not_fit_and_were_cancelled_fail_once_when_they_are_asked_for_again(gate: Gate) -> None:
    with reach() as one:
        good = one.submit(weights(4))
        bad = one.submit({"value": torch.zeros(2)})
        bad.cancel("not needed")
        gate.open()
        assert (good.result(60).mean_return, len(bad.result(60).episodes)) == (4.0, 0)
        with pytest.raises(WeightsError, match="shape"):
            one.evaluate()
        assert one.evaluate().mean_return == 4.0


def test_a_name_belongs_to_who_connected_last(gate: Gate) -> None:
    with reach("twin") as first:
        handle = first.submit(weights(8), step=8)
        with reach("twin") as second:
            with pytest.raises(UsageError, match="'twin' has connected once more"):
                handle.result(60)
            with pytest.raises(UsageError, match="'twin' has connected once more"):
                first.submit(weights(9))
            gate.open()
            point = second.wait(60)
            assert point is not None
            assert (point.step, point.result.mean_return) == (8, 8.0)


@pytest.mark.slow
def test_a_process_without_a_connection_reaches_a_service_and_may_end_without_a_goodbye(
    service: Gate, tmp_path: Path
) -> None:
    client = """
import ray
ray.shutdown()
ev = Evaluator.from_name("shared", address=sys.argv[1])
say(ray.is_initialized(), ev.evaluate(weights(17)).mean_return)
other = Evaluator.from_name("shared")
other.shutdown()
say(ray.is_initialized())
ev.submit()
"""
    with program(tmp_path, client) as running:
        assert running.hear() == [True, 17.0]
        assert running.hear() == [True], "the connection was not that of the one that shut down"
        assert running.process.wait(60) == 0, running.errors.read_text()
        assert "Traceback" not in running.errors.read_text()


@pytest.mark.slow
def test_weights_that_a_factory_made_cannot_be_had_back(service: Gate) -> None:
    config = (
        EvalConfig()
        .environment("CartPole-v1")
        .policy("rl_eval.policies.mlp:make_mlp")
        .runners(num_runners=1)
        .evaluation(num_episodes=2)
    )
    weights_file = ROOT / "configs" / "weights" / "cartpole_ppo_early.safetensors"
    with Evaluator(config, name="factory") as ev, Evaluator.from_name("factory") as other:
        ev.evaluate(load_weights_file(weights_file))
        with pytest.raises(UsageError, match="has sent no weights, and the runners have those of another client"):
            other.evaluate()
        assert ev.evaluate().episodes[0].weights_version == 1


@pytest.mark.slow
def test_videos_are_made_by_the_service(tmp_path: Path) -> None:
    from rl_eval.video import VideoSettings

    config = (
        EvalConfig()
        .environment("CartPole-v1", env_kwargs={"render_mode": "rgb_array"})
        .policy("rl_eval.policies.mlp:make_mlp", weights=ROOT / "configs/weights/cartpole_ppo_early.safetensors")
        .runners(num_runners=1, runtime_env={"env_vars": {"SDL_VIDEODRIVER": "dummy"}})
        .evaluation(num_episodes=4)
    )
    with (
        Evaluator(config, name="cinema", client="a", videos=VideoSettings("first:2", tmp_path)) as ev,
        Evaluator.from_name("cinema", client="../b") as other,
    ):
        for one in (ev, other):
            assert one.evaluate(step=3).status == "complete"
        folders = [tmp_path / client / "step_3" for client in ("client_a", "client_..%2Fb")]
        assert eventually(lambda: [len(list(folder.glob("*.mp4"))) for folder in folders] == [2, 2])
        assert len(list(tmp_path.rglob("*.mp4"))) == 4


def test_callbacks_and_metrics_are_the_clients(service: Gate) -> None:
    points: list[Any] = []
    with reach(on_result=points.append, metrics_fn=lambda records: {"count": len(records)}, log_prefix="mine") as ev:
        ev.evaluate(weights(2), step=4)
    (point,) = points
    assert (point.step, point.metrics["mine/episode_return_mean"], point.metrics["mine/count"]) == (4, 2.0, 2)


# ------------------------------------------------------------------------------ handles


def test_progress_and_cancel_reach_the_service(gate: Gate) -> None:
    with reach() as ev:
        running, waiting, after = (ev.submit(weights(value)) for value in (1, 2, 3))
        assert eventually(lambda: running.progress().num_runners == 1)
        assert (running.progress().num_episodes, running.progress().num_finished) == (2, 0)
        assert waiting.progress().num_runners == 0
        waiting.cancel("not needed")
        result = waiting.result(60)
        assert (result.status, len(result.episodes)) == ("failed", 0)
        assert "not needed" in result.reason
        assert not running.done()
        running.cancel("started", unless_started=True)
        gate.open()
        assert running.result(60).status == "complete"
        assert after.result(60).mean_return == 3.0

        gate.close()
        running = ev.submit(weights(4))
        assert eventually(lambda: running.progress().num_runners == 1)
        running.cancel("enough")
        assert "enough" in running.result(60).reason
        gate.open()
        assert ev.evaluate(weights(5)).mean_return == 5.0


def test_the_latest_request_replaces_the_one_that_waits(gate: Gate) -> None:
    points: list[Any] = []
    with reach(busy_policy="latest", max_queue=1, on_result=points.append) as ev:
        for step in range(5):
            assert ev.trigger_eval(weights(step), step)
        gate.open()
        assert eventually(lambda: not ev.pending)
    assert [(point.step, point.result.mean_return) for point in points] == [(0, 0.0), (4, 4.0)]


def test_the_latest_request_of_a_client_replaces_although_that_of_another_runs(tmp_path: Path) -> None:
    with (
        own_service(tmp_path, "narrow", max_queue=1) as (ev, gate),
        Evaluator.from_name("narrow", busy_policy="latest") as other,
    ):
        first = ev.submit(weights(9))
        assert all(other.trigger_eval(weights(step), step) for step in range(6))
        gate.open()
        assert first.result(60).mean_return == 9.0
        points = [other.wait(60) for _ in range(2)]
        assert [point and (point.step, point.result.mean_return) for point in points] == [(0, 0.0), (5, 5.0)]
        assert other.wait(60) is None


def test_answers_that_a_client_has_not_fetched_take_no_room_until_they_are_very_many(tmp_path: Path) -> None:
    with own_service(tmp_path, "narrow", max_queue=1) as (ev, _):
        ev.submit(weights(9))
        actor = find_service("narrow", "rl_eval")
        me = "hasty", ray.get(actor.connect.remote("hasty", True)).session
        for number in range(257):
            ray.get(actor.submit.remote(*me, str(number), number, 0, None))
            ray.get(actor.cancel.remote(*me, str(number), "replaced", True))
        with pytest.raises(EvaluatorBusy, match="holds 257 results that client 'hasty' has not fetched"):
            ray.get(actor.submit.remote(*me, "more", 0, 0, None))
        answers = ray.get(actor.collect.remote(*me, [], 10.0))
        assert len(answers) == 257
        ray.get(actor.collect.remote(*me, [answer.request for answer in answers], 0.0))
        assert ray.get(actor.submit.remote(*me, "more", 0, 0, None)).request == "more"


def test_a_handle_can_be_awaited(service: Gate) -> None:
    import asyncio

    async def evaluate(ev: Evaluator) -> float:
        return float((await ev.submit(weights(13))).mean_return)

    with reach() as ev:
        assert asyncio.run(evaluate(ev)) == 13.0


# ------------------------------------------------------------------------------ accepting


def test_a_request_that_is_sent_twice_runs_once(gate: Gate) -> None:
    actor = find_service("shared", "rl_eval")
    me = "careful", ray.get(actor.connect.remote("careful", True)).session
    sent = snapshot_weights(weights(6), 0)
    tickets = ray.get([actor.submit.remote(*me, "a", 1, 0, sent) for _ in range(5)])
    assert len(set(tickets)) == 1
    gate.open()
    (answer,) = ray.get(actor.collect.remote(*me, [], 60.0))
    assert answer.request == "a"
    # Until the client says that it has it, it is sent again; and a late repetition finds it done.
    assert ray.get(actor.collect.remote(*me, [], 60.0)) == [answer]
    assert ray.get(actor.collect.remote(*me, ["a"], 0.1)) == []
    ray.get(actor.read.remote(*me, ["a"]))
    assert ray.get(actor.submit.remote(*me, "a", 1, 0, sent)) == tickets[0]
    with reach() as other:
        assert other.evaluate(weights(1)).mean_return == 1.0
        assert steps_of(other, "careful") == [1]


def test_a_full_service_refuses_and_is_listed_and_stopped_by_command(tmp_path: Path) -> None:
    with (
        own_service(tmp_path, "full", max_queue=1, client="trainer", detached=True) as (ev, gate),
        Evaluator.from_name("full") as other,
    ):
        handles = [ev.submit(weights(value), step=12 + value) for value in (0, 1)]
        with pytest.raises(EvaluatorBusy):
            ev.submit(weights(2))
        mine = other.submit(weights(50))  # The other client has room of its own.
        found: list[float] = []
        waiting = [Thread(target=lambda: found.append(ev.evaluate(weights(4)).mean_return)) for _ in range(3)]
        for one in waiting:
            one.start()
        assert eventually(lambda: len(ev._delivery.open) == 4)
        with pytest.raises(EvaluatorBusy, match=r"holds 3 requests of client 'trainer' .* max_queue=1"):
            ev._engine.submit(weights=weights(3), version=None, step=3, follow_up=None, held=HeldWeights())

        listed = CliRunner().invoke(app, ["service", "list", "--namespace", "rl_eval"])
        assert listed.exit_code == 0
        pid = find_pid("full")
        for pattern in (
            "service full +running",
            f"process {pid} on",
            "running +trainer, step 12",
            "queue +4 +waiting, 0 finished",
            "client +trainer +3 waiting, 0 unread",
        ):
            assert re.search(pattern, listed.output), listed.output
        assert max(map(len, listed.output.splitlines())) <= 80

        gate.open()
        for one in waiting:
            one.join(60)
        assert found == [4.0, 4.0, 4.0], "evaluate waits for room"
        assert [handle.result(60).mean_return for handle in (*handles, mine)] == [0.0, 1.0, 50.0]
        assert ev.weights_version == max(one.weights_version for one in ev.history())
        with pytest.raises(ConfigError, match="max_queue is 3, but the service was started with 1"):
            Evaluator.from_name("full", max_queue=3)
        with pytest.raises(ConfigError, match="max_queue is 0"):
            Evaluator.from_name("full", max_queue=0)

        gate.close()
        handle = ev.submit(weights(1))
        stopped = CliRunner().invoke(app, ["service", "stop", "full"])
        assert (stopped.exit_code, stopped.output) == (0, "service full has ended\n")
        with pytest.raises(ClusterError):
            handle.result(60)
        assert eventually(lambda: not alive(pid))
        assert CliRunner().invoke(app, ["service", "stop", "full"]).exit_code == 2
    empty = CliRunner().invoke(app, ["service", "list", "--namespace", "nothing"])
    assert (empty.exit_code, empty.output) == (0, "no evaluation service in namespace nothing\n")


def test_names_that_are_taken_or_unknown(service: Gate) -> None:
    config, policy = echo()
    with pytest.raises(ConfigError, match=r"a.* service 'shared' .*already.*from_name\('shared'\)"):
        Evaluator(config, policy, name="shared")
    with pytest.raises(UsageError, match=r"no evaluation service 'chared' .*; there is: .*'shared'"):
        Evaluator.from_name("chared")
    with pytest.raises(UsageError, match=r"'shared' \(namespace 'rl_eval'\)"):
        Evaluator.from_name("shared", namespace="elsewhere")
    with Evaluator(config, policy, name="shared", namespace="elsewhere") as other:
        assert other.evaluate(weights(1)).mean_return == 1.0
        with reach() as first:
            assert first.evaluate(weights(2)).mean_return == 2.0


@pytest.mark.parametrize("options", [{"detached": True}, {"client": "a"}, {"namespace": "a"}, {"idle_timeout_s": 3.0}])
def test_what_needs_a_name_is_not_ignored_without(options: dict[str, Any]) -> None:
    config, policy = echo()
    with pytest.raises(ConfigError, match=f"{next(iter(options))} is given, but there is no service without a name"):
        Evaluator(config, policy, **options)
    with pytest.raises(ConfigError, match="backend is 'thread'"):
        Evaluator(config, policy, name="nobody", backend="thread")


def test_a_service_that_cannot_start_says_why_and_is_gone() -> None:
    config, _ = echo()
    with pytest.raises(ConfigError, match=r"no file 'missing\.pt'"):
        Evaluator(config.policy("a:b", weights="missing.pt"), name="broken", detached=True)
    assert eventually(lambda: state("broken") == "none")


@pytest.mark.slow
def test_an_environment_that_cannot_be_built_is_an_error_of_the_handle() -> None:
    config = EvalConfig().environment("Nowhere-v0").policy(lambda observations: observations).runners(num_runners=1)
    with Evaluator(config, name="nowhere") as ev, pytest.raises(ConfigError, match="Nowhere"):
        ev.evaluate()


def test_an_evaluator_without_a_service_has_no_history() -> None:
    config, policy = echo()
    with pytest.raises(UsageError, match="only a service keeps a history"), Evaluator(config, policy) as ev:
        ev.history()


# ------------------------------------------------------------------------------ the service ends


def test_handles_of_a_killed_service_fail_and_its_processes_end(tmp_path: Path) -> None:
    before = actors()
    with own_service(tmp_path, "killed", detached=True) as (ev, _), Evaluator.from_name("killed") as guest:
        handles = [ev.submit(weights(1)), ev.submit(weights(2)), guest.submit(weights(3))]
        assert eventually(lambda: handles[0].progress().num_runners == 1)
        found = status("killed")
        assert found is not None
        assert eventually(lambda: len(actors() - before) == 3)
        pids = actors() - before
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


def test_an_orphan_ends_after_its_work_and_its_time_and_leaves_no_process(tmp_path: Path) -> None:
    before = actors()
    with own_service(tmp_path, "orphan", detached=True, idle_timeout_s=3.0) as (ev, gate):
        time.sleep(4.0)
        handle = ev.submit(weights(1))  # A service with a client is no orphan.
        assert eventually(lambda: handle.progress().num_runners == 1)
        # The service, its runner, and the agent of the runner's node.
        assert eventually(lambda: len(actors() - before) == 3)
        pids = actors() - before
        ev.shutdown()
        time.sleep(4.0)
        assert state("orphan") == "running"
        gate.open()
        assert eventually(lambda: state("orphan") == "none" and not any(map(alive, pids)), 60)
