"""A service without Ray: each accepted request gets an answer, also from the process that takes its place."""

import pickle
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from evaluator_modules import Scale
from evaluator_world import Line, echo

from rl_eval import EvalConfig, load
from rl_eval.errors import ClusterError, ConfigError, EvalError, UsageError, WeightsError, redaction
from rl_eval.training.service.actor import EvalService
from rl_eval.training.service.requests import ServiceOptions, join_secrets, pickled, split_secrets, unpickled
from rl_eval.weights import snapshot_weights
from tests.planted import leaking_files, leaks, secret
from tests.refused import refused

LIMIT_S = 30.0
"""Far beyond what anything here takes; reached only by what hangs."""


def weights(value, size=1):
    return snapshot_weights({"weight": torch.full((size, 1), float(value))}, 0)


class Service(EvalService):
    """A service in this process."""

    def __init__(self, *options):
        self.ended = threading.Event()
        super().__init__(*options)

    def _end(self):
        self.ended.set()


def gated(context):
    """Return an environment, unless the gate says that it is broken; the error tells the password."""
    gate = Path(context["gate"])
    if gate.exists() and gate.read_text():
        raise ConnectionError(f"not with {context['password']}")
    return Line(until=str(gate))


class World:
    """A service, its folder, and the gate before every evaluation."""

    def __init__(self, folder, policy, config=None):
        self.folder, self.gate, self.policy = folder / "service", folder / "gate", policy
        kwargs = {"gate": str(self.gate), "password": secret("password")}
        self.config = config or EvalConfig().environment(gated, env_kwargs=kwargs, env_reuse="episode")
        self.gate.touch()
        self.begin("first")

    def begin(self, start, idle_timeout_s=600.0):
        """Start a process: in the place of the former one, if the name is the same."""
        config = self.config.evaluation(num_episodes=1, determinism_check=0).runners(num_runners=0)
        content = config.build(), self.policy
        payload, taken = split_secrets(content, redaction.secrets_in(content[0].model_dump()))
        options = ServiceOptions("one", "here", str(self.folder), True, idle_timeout_s, None, start, taken)
        self.service = Service(options)
        self.service.open(payload)

    def submit(self, name, step=0, client="me", sent=None):
        return self.service.submit(client, name, step, 0, sent)

    def result(self, name, client="me"):
        deadline = time.monotonic() + LIMIT_S
        while time.monotonic() < deadline:
            answers, _ = self.service.poll(client, (), ())
            if name in answers:
                return unpickled(answers[name])
        raise TimeoutError(name)

    def tickets(self, client="me"):
        return [(ticket.id, ticket.step) for ticket in self.service.connect(client).tickets]


@pytest.fixture(params=[None], ids=["function"])
def world(tmp_path, request):
    made = World(tmp_path, request.param or echo)
    yield made
    made.gate.touch()
    made.service.close()


scored = pytest.mark.parametrize("world", [Scale()], indirect=True, ids=["module"])


# ------------------------------------------------------------------------------ another process takes its place


@scored
@pytest.mark.parametrize("start", ["first", "second"])
def test_each_accepted_request_is_answered_by_the_next_process(world, start):
    """In order, with its own weights, also by a new service on the folder; what was answered is not evaluated again."""
    first = world.submit("first", 1, sent=weights(1))
    before = world.result("first")
    world.gate.unlink()
    others = [
        world.submit(f"{client}{number}", number, client, weights(number)) for client in "ab" for number in (2, 3)
    ]
    world.service.close()
    with refused(ClusterError, "name", value="one"):
        world.submit("late")
    world.begin(start)
    world.gate.touch()
    results = [world.result(one.id, one.client) for one in others]
    assert [result.episodes[0].weights_version for result in results] == [2, 3, 4, 5]
    again = world.result("first")
    assert (again.fingerprint, again.timing.wall_seconds) == (before.fingerprint, before.timing.wall_seconds)
    assert world.submit("first", 1, sent=weights(1)) == first, "what is sent again was accepted"
    history = world.service.history()
    assert [(ticket.client, ticket.step) for ticket, *_ in history] == [
        ("me", 1), ("a", 2), ("a", 3), ("b", 2), ("b", 3)
    ]  # fmt: skip
    for _, log_dir, answer in history:
        assert load(log_dir).fingerprint == unpickled(answer).fingerprint
    welcome = world.service.connect("a")
    assert (welcome.next_step, welcome.weights_version) == (4, 3)
    assert world.submit("later", 9, "a").weights_version == 3, "the weights that this client sent last"
    assert world.submit("newer", 10, "b", weights(1)).weights_version == 6


def test_a_request_that_was_being_written_when_the_process_died_was_not_accepted(world):
    (world.folder / "requests" / "00000007_me_step_3").mkdir(parents=True)
    world.service.close()
    world.begin("first")
    assert world.tickets() == []
    world.submit("next", 3)
    assert world.result("next").status == "complete"


def cut(file):
    """Spoil a file as a full disk does."""

    def spoil(service, request):
        path = next(service.glob(file.format(request=request)))
        path.write_bytes(path.read_bytes()[:20])

    return spoil


def put(content):
    return lambda service, request: (service / "requests" / request / "request.json").write_bytes(content)


def folder(service, request):
    file = service / "requests" / request / "request.json"
    file.unlink()
    file.mkdir()


DAMAGED = {
    "truncated": cut("requests/{request}/request.json"),
    "empty": put(b""),
    "garbage": put(b"\xff\x00{"),
    "another type": put(b"[1]"),
    "another format": put(b'{"id": "b", "client": "a_step_1_b"}'),
    "values of other types": put(b'{"number": "x", "id": "b", "client": "a", "step": {}, "weights_version": []}'),
    "folder": folder,
}


@scored
@pytest.mark.parametrize("how", DAMAGED)
def test_a_damaged_request_is_answered_and_the_others_are_evaluated(world, how):
    """Under the name of its folder, to the client and for the step in this name."""
    world.gate.unlink()
    for name, client in (("a", "me"), ("b", "a_step_1_b"), ("c", "me")):
        world.submit(name, 7, client, weights(3))
    world.service.close()
    DAMAGED[how](world.folder, "00000001_a_step_1_b_step_7")
    world.begin("first")
    world.gate.touch()
    assert [world.result(name).mean_return for name in "ac"] == [3, 3]
    [(name, step)] = world.tickets("a_step_1_b")
    assert (name, step) == ("00000001_a_step_1_b_step_7", 7)
    lost = world.result(name, "a_step_1_b")
    assert isinstance(lost, UsageError)
    assert name in str(lost)
    world.service.poll("a_step_1_b", [name], ["b", name], False)
    assert world.tickets("a_step_1_b") == []
    assert world.submit("d", 8, "a_step_1_b").number == 3
    assert world.result("d", "a_step_1_b").status == "complete"
    assert len(world.service.history()) == 4


@scored
def test_damaged_weights_fail_one_request_and_are_forgotten(world):
    world.submit("first", sent=weights(1))
    world.result("first")
    world.gate.unlink()
    world.submit("bad", sent=weights(2))
    world.service.close()
    cut("weights/2.pkl")(world.folder, "")
    world.begin("first")
    world.gate.touch()
    lost = world.result("bad")
    assert isinstance(lost, WeightsError)
    assert "2.pkl" in str(lost)
    world.submit("next")
    assert world.result("next").mean_return == 1


@pytest.mark.parametrize("damaged", ["answer", "log"])
def test_a_damaged_answer_is_an_error_of_its_request_alone(world, damaged):
    for name in ("first", "second"):
        world.submit(name)
        world.result(name)
    world.service.close()
    first = world.folder / "requests" / "00000000_me_step_0"
    if damaged == "answer":
        (first / "answer").write_bytes(b"garbage")
    else:
        (first / "log").rename(world.folder / "elsewhere")
    world.begin("first")
    assert isinstance(world.result("first"), EvalError)
    assert world.result("second").status == "complete"
    assert len(world.service.history()) == 2


def test_what_was_delivered_does_not_come_again(world):
    for number in range(3):
        world.submit(str(number), number)
        world.result(str(number))
    answers, _ = world.service.poll("me", ["0"], ["1"], False)
    assert set(answers) == {"2"}
    for _ in range(2):
        assert world.tickets() == [("0", 0), ("2", 2)]
        world.service.close()
        world.begin("first")
    assert world.tickets("somebody else") == []


def test_secrets_of_the_settings_are_in_no_file(world, tmp_path):
    """Not where they are given, not where a policy closes over them, and not after an error that tells them."""
    world.submit("good")
    assert world.result("good").status == "complete"
    world.gate.write_text("broken")
    world.submit("bad")
    assert "ConnectionError: not with ***" in str(world.result("bad"))
    world.service.close()
    [file] = world.folder.glob("settings_*")
    assert (file.stat().st_mode & 0o077, world.folder.stat().st_mode & 0o077) == (0, 0)
    assert len([path for path in world.folder.rglob("*") if path.is_file()]) > 8
    assert list(leaking_files(tmp_path)) == []


@pytest.mark.parametrize("given", [secret("a"), "hunter", b"\xffbytes", 90125, f"db://me:{secret('b')}@there/x"])
def test_a_secret_is_split_from_what_is_pickled(given):
    """Also a plain word, which is recognized where it stands, and what a function closes over."""

    def told():
        return given, "other"

    settings = EvalConfig().environment("CartPole-v1", env_kwargs={"password": given, "words": 3}).build()
    data, taken = split_secrets((settings, told), redaction.secrets_in(settings.model_dump()))
    assert not leaks(data)
    assert (given if isinstance(given, bytes) else str(given).encode()) not in data
    assert any(one is given or (isinstance(given, str) and given in str(one)) for one in taken)
    found, function = join_secrets(data, taken)
    assert (found.environment.env_kwargs, function()) == (settings.environment.env_kwargs, (given, "other"))


def test_a_folder_has_one_service(world):
    with refused(ConfigError, "output"):
        world.begin("second")


# ------------------------------------------------------------------------------ accepting


def test_a_request_that_is_sent_twice_runs_once(world):
    tickets = {world.submit("a", 1) for _ in range(5)}
    world.result("a")
    assert {world.submit("a", 1)} == tickets
    assert len(tickets) == len(world.service.history()) == 1


def test_names_of_clients_need_not_be_those_of_folders(world):
    for name in ("../b", "x" * 400, ""):
        world.submit(f"of {name}", client=name)
        assert world.result(f"of {name}", name).status == "complete"
        assert world.tickets(name) == [(f"of {name}", 0)]


def test_a_delivery_that_cannot_be_noted_costs_only_a_repetition(world, monkeypatch):
    """The disk is full for a moment."""

    def full(*args):
        raise OSError("No space left on device")

    world.submit("0")
    world.result("0")
    with monkeypatch.context() as patch:
        patch.setattr(Path, "touch", full)
        assert world.service.poll("me", ["0"], ["0"], False)[0] == {}
    assert world.tickets() == []
    world.service.close()
    world.begin("first")
    assert world.tickets() == [("0", 0)]


@scored
def test_weights_that_do_not_fit_fail_alone_and_are_forgotten(world):
    """Also twice in a row. A request without weights that waits behind them gets the last weights that fitted."""
    world.submit("good", sent=weights(3))
    world.result("good")
    world.gate.unlink()
    for name in ("bad", "worse"):
        world.submit(name, sent=weights(1, size=2))
    world.submit("behind")
    world.gate.touch()
    for name in ("bad", "worse"):
        assert isinstance(world.result(name), WeightsError)
    assert world.result("behind").mean_return == 3
    assert world.service.history()[-1][0].weights_version == 1
    world.service.close()
    world.begin("first")
    assert world.submit("again").weights_version == 1, "the last ones of this client that fitted"
    assert world.submit("other", client="stranger").weights_version == 0, "the policy as it was given"
    assert world.result("other", "stranger").episodes[0].weights_version == 0
    assert world.result("again").status == "complete"


@scored
def test_weights_that_no_request_can_need_are_removed(world):
    for number in range(3):
        world.submit(str(number), number, sent=weights(number))
        world.result(str(number))
    assert len(list(world.folder.glob("weights/*"))) == 1


class Two:
    """Parallel environment of two agents and one step; the reward of an agent is its action."""

    possible_agents = ("a", "b")

    def __init__(self, until):
        self.until = Path(until)

    def observation_space(self, agent):
        return Line.observation_space

    def action_space(self, agent):
        return Line.action_space

    def reset(self, seed=None, options=None):
        self.agents = ["a", "b"]
        return {agent: np.ones(1, np.float32) for agent in "ab"}, {}

    def step(self, actions):
        while not self.until.exists():
            time.sleep(0.01)
        self.agents = []
        rewards = {agent: float(actions[agent][0]) for agent in "ab"}
        seen = {agent: np.ones(1, np.float32) for agent in "ab"}
        return seen, rewards, dict.fromkeys("ab", True), dict.fromkeys("ab", False), {}

    def close(self):
        pass


def test_weights_of_one_policy_join_the_other_weights_of_the_same_client(tmp_path):
    """Whatever other clients sent, and whether another process takes the place of the first."""

    def send(name, client, **sent):
        parts = {f"{part}.weight": torch.tensor([[float(value)]]) for part, value in sent.items()}
        world.submit(name, client=client, sent=snapshot_weights(parts, 0) if sent else None)

    def submit(name, client, **sent):
        send(name, client, **sent)
        result = world.result(name, client)
        return result.mean_return, result.agents["weights_version"].tolist()

    policies = {"a": Scale(), "b": Scale(7.0)}
    config = EvalConfig().environment(Two, env_kwargs={"until": str(tmp_path / "gate")}).policy(policies=policies)
    world = World(tmp_path, None, config)
    assert submit("1", "me", a=1) == (8, [1, 0])
    assert submit("2", "me", a=1, b=10) == (11, [2, 2])
    assert submit("3", "other", a=100, b=1000) == (1100, [3, 3])
    assert submit("4", "me", a=2) == (12, [4, 2])
    world.service.close()
    world.begin("first")
    assert submit("5", "me", a=3) == (13, [5, 2])
    world.gate.unlink()
    send("running", "me")
    send("cancelled", "me", b=20)
    world.service.cancel("cancelled", "replaced", unless_started=True)
    world.gate.touch()
    assert submit("6", "other", b=2000) == (2100, [3, 7])
    assert submit("7", "me", a=4) == (24, [8, 6])
    world.service.close()


# ------------------------------------------------------------------------------ what goes wrong


class Strange(Exception):
    """Can be pickled, and not be unpickled."""

    def __init__(self, first, second):
        super().__init__(f"{first} and {second}")


def test_an_outcome_that_cannot_travel_arrives_as_an_error():
    assert isinstance(unpickled(pickled(OSError(28, "No space left on device"))), OSError)
    assert isinstance(unpickled(pickled(Strange(1, 2))), EvalError)
    assert isinstance(unpickled(pickle.dumps(gated).replace(b"gated", b"lost!")), UsageError)


def test_a_request_is_answered_and_the_next_runs_although_its_answer_cannot_be_kept(world, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("rl_eval.training.service.requests.write_bytes", full)
    for name in ("first", "second"):
        world.submit(name)
        assert world.result(name).status == "complete"


# ------------------------------------------------------------------------------ the end


def test_it_ends_when_no_client_calls_and_nothing_runs(world):
    """A request that waits, and a client that asks, keep it."""
    world.service.close()
    world.begin("second", idle_timeout_s=0.5)
    world.gate.unlink()
    world.submit("running")
    assert not world.service.ended.wait(1.0)
    world.gate.touch()
    deadline = time.monotonic() + 1.0
    while time.monotonic() < deadline:
        world.service.poll("me", ["running"], ())
    assert not world.service.ended.is_set()
    assert world.service.ended.wait(LIMIT_S)
    with refused(ClusterError, "name", value="one"):
        world.submit("late")
