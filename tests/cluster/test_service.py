"""A named service: who reaches it, who gets which result, and what it survives."""

import os
import re
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from service_world import ROOT, echo, program
from typer.testing import CliRunner
from waiting import eventually, gone

from rl_eval import EvalConfig, EvalResult, Evaluator, EvaluatorBusy, evaluate, load
from rl_eval.cli import app
from rl_eval.errors import ClusterError, ConfigError, UsageError
from rl_eval.training.service.actor import EvalService
from rl_eval.training.service.client import end_service, list_services
from rl_eval.weights import load_weights_file
from tests.planted import leaks, secret
from tests.refused import refused
from tests.unit.cli_world import printed

pytestmark = pytest.mark.usefixtures("ray_cluster")


SECRET = secret("token")


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
def service(ray_cluster: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gate]:
    """A service named ``shared`` that no test ends; nothing that a test prints or writes may hold its secret."""
    gate = Gate(tmp_path_factory.mktemp("shared") / "gate")
    config, policy = echo(str(gate.path), runtime_env={"env_vars": {"HF_TOKEN": SECRET}})
    with Evaluator(config, policy, name="shared"):
        yield gate


@pytest.fixture
def gate(service: Gate) -> Iterator[Gate]:
    """The gate of ``shared``, closed during a test."""
    assert eventually(lambda: state("shared") == "idle")
    service.close()
    yield service
    service.open()


@contextmanager
def own_service(name: str, **options: Any) -> Iterator[Evaluator]:
    """A service for one test; nothing of it is left."""
    config, policy = echo(options.pop("gate", ""))
    evaluator = Evaluator(config, policy, name=name, **{"busy_policy": "queue", **options})
    try:
        yield evaluator
    finally:
        evaluator.shutdown()
        if status(name) is not None:
            end_service(name, "rl_eval")


def reach(client: str | None = None, **options: Any) -> Evaluator:
    return Evaluator.from_name("shared", client=client, **{"busy_policy": "queue", **options})


def weights(value: float) -> dict[str, torch.Tensor]:
    return {"weight": torch.full((1, 1), float(value))}


def status(name: str) -> dict[str, Any] | None:
    return list_services().get(("rl_eval", name))


def state(name: str) -> str:
    found = status(name)
    return "none" if found is None else str(found["state"])


def processes_of(service: str) -> set[int]:
    """Pids of the actor of a service and of its runners; other services start theirs at any time."""
    from ray._private import state as cluster

    living = [one for one in cluster.actors().values() if one["State"] == "ALIVE"]
    (home,) = (one["Address"] for one in living if one["Name"] == f"rl_eval:{service}")
    return {one["Pid"] for one in living if home in (one["Address"], one["OwnerAddress"])}


# ------------------------------------------------------------------------------ what dies

DRIVER = """
config, policy = echo(sys.argv[2])
ev = Evaluator(
    config, policy, name="survivor", detached=True, client="trainer", busy_policy="queue",
    output=sys.argv[3],
)
for step in (10, 20, 30):
    ev.submit(weights(step + 1), step)
say(ev.weights_version)
time.sleep(1000)
"""


@pytest.mark.slow
def test_every_accepted_request_is_answered_once_whoever_is_killed(tmp_path: Path) -> None:
    """The driver that started the service, and then its own process, amid the requests of four clients."""
    gate, folder, count = tmp_path / "gate", tmp_path / "service", 30
    with program(tmp_path, DRIVER, str(gate), str(folder)) as started:
        assert started.hear() == [3]
        started.kill()
    delivered: list[Any] = []
    trainer = Evaluator.from_name("survivor", client="trainer", on_result=delivered.append)
    clients = [Evaluator.from_name("survivor", client=f"c{i}", busy_policy="queue", max_queue=count) for i in range(4)]
    try:
        before = status("survivor")
        assert before is not None
        with ThreadPoolExecutor(4) as pool:
            handles = list(pool.map(lambda number: submit_many(clients[number], number, count), range(4)))
        os.kill(before["pid"], signal.SIGKILL)
        gate.touch()
        answers = [[handle.result(120) for handle in own] for own in handles]
        check_answers(handles, answers)

        resumed = [handle.result(60) for handle in trainer.resumed]
        assert [result.mean_return for result in resumed] == [11.0, 21.0, 31.0]
        assert resumed[0].fingerprint == here(str(gate), 11.0).fingerprint
        assert trainer.drain(60)
        assert [(point.step, point.weights_version) for point in delivered] == [(10, 1), (20, 2), (30, 3)]
        after = status("survivor")
        assert after is not None
        assert (after["pid"] != before["pid"], after["num_finished"]) == (True, 4 * count + 3)
        # The journal has one evaluation log for each request.
        past = trainer.history()
        assert len(past) == min(200, 4 * count + 3)
        logs = {str(path) for path in folder.glob("requests/*/log")}
        assert len(logs) == 4 * count + 3
        assert {one.output for one in past} <= logs
        assert isinstance(past[-1].outcome, EvalResult)
        assert load(past[-1].output).fingerprint == past[-1].outcome.fingerprint
        # It goes on where it was: the next step and version, and each client's last weights.
        again = trainer.submit()
        assert (again.step, again.weights_version, again.result(60).mean_return) == (31, 3, 31.0)
        assert trainer.drain(60)
        trainer.shutdown()
        with Evaluator.from_name("survivor", client="trainer") as back:
            assert back.resumed == (), "what was delivered came a second time"
    finally:
        for client in (trainer, *clients):
            client.shutdown()
        end_service("survivor", "rl_eval")


def here(gate: str, value: float) -> EvalResult:
    """What the same evaluation comes to in this process."""
    config, policy = echo(gate, num_runners=0)
    return evaluate(config, policy=policy.become(value))


def submit_many(client: Evaluator, number: int, count: int) -> list[Any]:
    return [client.submit(weights(1000 * number + step), step) for step in range(count)]


def check_answers(handles: list[list[Any]], answers: list[list[Any]]) -> None:
    """Each client has the returns of its own weights, and versions that grow and are nobody else's."""
    versions, count = [], len(handles[0])
    for number, (own, results) in enumerate(zip(handles, answers, strict=True)):
        assert [result.mean_return for result in results] == [1000.0 * number + step for step in range(count)]
        assert [{one.weights_version for one in result.episodes} for result in results] == [
            {handle.weights_version} for handle in own
        ]
        versions += [handle.weights_version for handle in own]
        assert versions[-count:] == sorted(versions[-count:])
    assert len(set(versions)) == len(versions)


@pytest.mark.slow
def test_a_service_on_the_same_folder_goes_on_and_one_that_is_stopped_ends_its_processes(tmp_path: Path) -> None:
    """``stop`` keeps what was accepted; the next service on the folder answers it, to a client of the same name."""
    gate = tmp_path / "gate"
    with own_service("first", client="trainer", output=tmp_path / "service", detached=True, gate=str(gate)) as ev:
        handles = [ev.submit(weights(value), step=value) for value in (1, 2)]
        assert eventually(lambda: handles[0].progress().num_runners == 1)
        pids = processes_of("first")
        assert len(pids) == 2
        stopped = CliRunner().invoke(app, ["service", "stop", "first", "--json"])
        assert (stopped.exit_code, printed("service stop", stopped.stdout)["state"]) == (0, "ended")
        for handle in handles:
            with refused(ClusterError, "name", value="first"):
                handle.result(60)
        with refused(ClusterError, "name", value="first"):
            ev.submit(weights(3))
        handles[0].cancel()
        assert eventually(lambda: all(map(gone, pids)))
        assert CliRunner().invoke(app, ["service", "stop", "first"]).exit_code == 2
    gate.touch()
    second = {"client": "trainer", "output": tmp_path / "service", "idle_timeout_s": 1.0, "detached": True}
    with own_service("second", gate=str(gate), **second) as ev:
        assert [(handle.step, handle.result(60).mean_return) for handle in ev.resumed] == [(1, 1.0), (2, 2.0)]
        ev.shutdown()
        assert eventually(lambda: status("second") is None), "an idle service did not end"


@pytest.mark.slow
def test_a_service_that_is_not_detached_ends_with_its_driver(tmp_path: Path) -> None:
    loop = """
config, policy = echo()
ev = Evaluator(config, policy, name="mortal")
say(ev.evaluate(weights(5)).mean_return)
time.sleep(1000)
"""
    with program(tmp_path, loop) as started:
        assert started.hear() == [5.0]
        guest = Evaluator.from_name("mortal")
        assert guest.evaluate(weights(6)).mean_return == 6.0
        found = status("mortal")
        assert found is not None
        started.kill()
    assert eventually(lambda: status("mortal") is None and gone(found["pid"]))
    with refused(ClusterError, "name", value="mortal"):
        guest.submit(weights(1)).result(60)
    guest.shutdown()


def test_what_a_client_submitted_is_evaluated_although_it_shut_down(gate: Gate) -> None:
    guest = reach("leaving")
    handles = [guest.submit(weights(value), step=value) for value in (1, 2)]
    guest.shutdown()
    for handle in handles:
        with refused(ClusterError, "name", value="shared"):
            handle.result(10)
    gate.open()
    with reach("leaving") as back:
        assert [handle.result(60).mean_return for handle in back.resumed] == [1.0, 2.0]
    with reach("stranger") as stranger:
        assert stranger.resumed == ()


# ------------------------------------------------------------------------------ many clients


@pytest.mark.slow
def test_clients_take_turns_and_have_room_of_their_own(gate: Gate) -> None:
    with reach("hasty", max_queue=3) as hasty, reach("modest", max_queue=1) as modest:
        handles = [hasty.submit(weights(step), step) for step in range(4)]
        with pytest.raises(EvaluatorBusy):
            hasty.submit(weights(4), 4)
        handles.append(modest.submit(weights(100), step=100))
        listed = CliRunner().invoke(app, ["service", "list", "--namespace", "rl_eval"])
        assert listed.exit_code == 0
        as_json = CliRunner().invoke(app, ["service", "list", "--namespace", "rl_eval", "--json"])
        (shared,) = printed("service list", as_json.stdout)
        assert (shared["state"], shared["running"], shared["num_waiting"]) == ("running", "hasty, step 0", 4)
        assert {"hasty", "modest"} <= set(shared["clients"])
        assert re.search("running +hasty, step 0", listed.output), listed.output
        gate.open()
        assert [handle.result(60).mean_return for handle in handles] == [0.0, 1.0, 2.0, 3.0, 100.0]
        assert not leaks(listed.output + repr(modest.history()) + repr(handles[0].result().provenance))
        steps = [one.step for one in modest.history() if one.client in ("hasty", "modest")]
        assert steps == [0, 1, 2, 3, 100], "in the order of acceptance"
        ends = sorted((Path(one.output).with_name("answer").stat().st_mtime_ns, one.step) for one in modest.history())
        assert [step for _, step in ends if step in steps][-5:] == [0, 100, 1, 2, 3], "in turns"


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
def test_a_client_whose_ray_shuts_down_does_not_wait_for_ever(gate: Gate, tmp_path: Path) -> None:
    client = """
import ray
from rl_eval.errors import ClusterError
ev = Evaluator.from_name("shared", address=sys.argv[1])
handle = ev.submit(weights(17))
ray.shutdown()
try:
    handle.result(60)
except ClusterError as error:
    say(error.value == "shared")
"""
    with program(tmp_path, client) as running:
        assert running.hear() == [True]
        assert running.process.wait(60) == 0, running.errors.read_text()


@pytest.mark.slow
def test_a_client_without_weights_gets_those_that_the_factory_made() -> None:
    """Also after another client has sent weights."""
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
        original = other.evaluate()
        ev.evaluate()
        assert other.evaluate().fingerprint == original.fingerprint
        assert original.episodes[0].weights_version == 0
        assert ev.evaluate().episodes[0].weights_version == 1


@pytest.mark.slow
def test_videos_are_made_by_the_service(tmp_path: Path) -> None:
    from rl_eval.recording.video import VideoSettings

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


# ------------------------------------------------------------------------------ names and settings


def test_names_that_are_taken_or_unknown(service: Gate) -> None:
    config, policy = echo()
    with refused(ConfigError, "name", value="shared"):
        Evaluator(config, policy, name="shared")
    for name, namespace in (("chared", "rl_eval"), ("shared", "elsewhere")):
        with refused(UsageError, "name", value=name) as caught:
            Evaluator.from_name(name, namespace=namespace)
        assert {"'shared'", "'rl_eval'"} <= {*re.findall(r"'\w+'", str(caught.value))}
    empty = CliRunner().invoke(app, ["service", "list", "--namespace", "elsewhere"])
    assert (empty.exit_code, empty.output) == (0, "no evaluation service in namespace elsewhere\n")


class Foreign:
    """An actor that is not a service."""

    def connect(self, client: str) -> Any:
        return None


class Broken:
    """A service whose answers are wrong in some way."""

    def __init__(self, how: str) -> None:
        self.how = how

    def connect(self, client: str) -> Any:
        if self.how == "raises":
            raise KeyError("x")
        if self.how == "hangs":
            time.sleep(1000)
        return Unreadable() if self.how == "cannot be read" else None

    def status(self) -> Any:
        return None


class Unreadable:
    """Raises an error when it is unpickled."""

    def __reduce__(self) -> Any:
        return exec, ("raise ValueError('no such object')",)


@contextmanager
def actor(kind: type, name: str, *arguments: Any) -> Iterator[Any]:
    options = {"name": f"rl_eval:{name}", "namespace": "rl_eval", "num_cpus": 0, "max_concurrency": 4}
    made = ray.remote(kind).options(**options).remote(*arguments)
    try:
        yield made
    finally:
        ray.kill(made)
        assert eventually(lambda: ("rl_eval", name) not in list_services())


def test_an_actor_that_is_no_service_is_named_and_lives(service: Gate) -> None:
    """Under the name of a service; the others are listed."""
    with actor(Foreign, "foreign") as foreign:
        for call in (lambda: Evaluator.from_name("foreign"), lambda: end_service("foreign", "rl_eval")):
            with refused(UsageError, "name", value="foreign") as caught:
                call()
            assert "Foreign" in str(caught.value)
        assert ray.get(foreign.connect.remote("me")) is None
        assert (status("foreign"), state("shared")) == (None, "idle")


@pytest.mark.parametrize("how", ["raises", "hangs", "cannot be read", "another type"])
def test_a_wrong_answer_is_an_error_that_names_the_service(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Within the time limit of an answer."""
    monkeypatch.setattr("rl_eval.training.service.client._OPENING_S", 5.0)
    kind = type("EvalService", (Broken,), {})
    with actor(kind, "broken", how), refused(ClusterError, "name", value="broken"):
        Evaluator.from_name("broken")


LIMIT = "rl_eval.training.service.client._OPENING_S"


def test_a_service_that_falls_silent_fails_the_handles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A later client of the name gets the results. The same client goes on as soon as the service answers."""
    with own_service("silent", client="one", gate=str(tmp_path / "gate")) as evaluator:
        handle, process = evaluator.submit(weights(4)), status("silent")["pid"]
        os.kill(process, signal.SIGSTOP)
        try:
            with monkeypatch.context() as patch, refused(ClusterError, "name", value="silent"):
                patch.setattr(LIMIT, 1.0)
                handle.result(60)
        finally:
            os.kill(process, signal.SIGCONT)
        (tmp_path / "gate").touch()
        assert evaluator.submit(weights(5)).result(60).mean_return == 5
        with Evaluator.from_name("silent", client="one") as later:
            assert 4 in [one.result(60).mean_return for one in later.resumed]


def test_clients_wait_while_a_service_starts_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Longer than for an answer, with warnings."""
    from ray._private import state as cluster

    start, gate = tmp_path / "start", tmp_path / "gate"
    start.touch()

    def init(service: Any, options: Any) -> None:
        while not start.exists():
            time.sleep(0.05)
        EvalService.__init__(service, options)

    kind = type("EvalService", (EvalService,), {"__init__": init})
    monkeypatch.setattr("rl_eval.training.service.client.EvalService", kind)
    with own_service("slow", gate=str(gate)) as evaluator:
        handle, process = evaluator.submit(weights(4)), status("slow")["pid"]
        start.unlink()
        os.kill(process, signal.SIGKILL)
        assert eventually(lambda: any(one["State"] == "RESTARTING" for one in cluster.actors().values()))
        with monkeypatch.context() as patch:
            patch.setattr(LIMIT, 1.0)
            assert eventually(lambda: handle.done() or sum("RESTARTING" in one for one in caplog.messages) >= 2)
        assert not handle.done()
        start.touch()
        gate.touch()
        assert handle.result(60).mean_return == 4


def test_a_service_whose_folder_cannot_be_written_is_named() -> None:
    config, policy = echo()
    with refused(ClusterError, "name", value="unwritable") as caught:
        Evaluator(config, policy, name="unwritable", output="/proc/nowhere")
    assert "/proc/nowhere" in str(caught.value)
    assert eventually(lambda: status("unwritable") is None)


def test_a_service_that_cannot_start_says_why_and_is_gone() -> None:
    config, _ = echo()
    with refused(ConfigError, "policy.weights", value="missing.pt"):
        Evaluator(config.policy("a:b", weights="missing.pt"), name="broken", detached=True)
    assert eventually(lambda: status("broken") is None)
