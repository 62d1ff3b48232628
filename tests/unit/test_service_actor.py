"""A service without Ray: whatever it has accepted gets an answer, also from the process that takes its place."""

import asyncio
import pickle
import threading
from pathlib import Path

import cloudpickle
import gymnasium as gym
import numpy as np
import pytest
import torch
from cryptography.fernet import Fernet, InvalidToken
from torch import nn

from rl_eval import EvalConfig, load
from rl_eval.errors import ClusterError, ConfigError, EvalError, EvaluatorBusy, UsageError, WeightsError
from rl_eval.execution.handle import EvalHandle
from rl_eval.training.service.actor import EvalService
from rl_eval.training.service.sealed import new_key
from rl_eval.weights import snapshot_weights
from tests.planted import leaking_files, secret

KEY, OTHER_KEY = new_key(), new_key()
LIMIT_S = 30.0
"""Far beyond what anything here takes; reached only by what hangs."""


class Scores(nn.Module):
    """Pushes the cart to the side of its one weight."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, observations):
        return torch.cat([torch.zeros(len(observations), 1), self.weight.expand(len(observations), 1)], -1)


def weights(value, size=1):
    return snapshot_weights({"weight": torch.full((size,), float(value))}, 0)


def always_left(observations):
    return np.zeros(len(observations), np.int64)


class World:
    """A service, and the folder that outlives it."""

    def __init__(self, folder, policy=always_left, env="CartPole-v1", **env_kwargs):
        self.folder, self.policy, self.now = folder, policy, 0.0
        self.env, self.env_kwargs = env, env_kwargs
        self.ended = threading.Event()
        self.service = None
        self.begin()

    def begin(self, key=KEY):
        """Start a process, or the one that takes its place; the former one has no chance to say goodbye."""
        if self.service is not None:
            self.service._closed.set()
            self.service._journal.close()
            self.service._group.stop()
        self.service = EvalService("one", "here", str(self.folder), key, True, 600.0, lambda: self.now, self.ended.set)
        if not self.service._opened.is_set():
            config = EvalConfig().environment(self.env, env_kwargs=self.env_kwargs)
            config = config.evaluation(num_episodes=1, determinism_check=0).runners(num_runners=0)
            settings = config.policy(None if isinstance(self.policy, nn.Module) else self.policy).build()
            variables = {"env_vars": {"DATABASE": secret("database")}}
            runners = settings.runners.model_copy(update={"runtime_env": variables})  # What a group in here refuses.
            settings = settings.model_copy(update={"runners": runners})
            live = self.policy if isinstance(self.policy, nn.Module) else None
            self.call("open", cloudpickle.dumps((settings, live, None, 2)))

    def hold(self):
        """Have requests wait."""
        self.service._run_next = lambda: None

    def go_on(self):
        del self.service._run_next
        self.service._post(self.service._run_next)

    def call(self, method, *args):
        return asyncio.run(getattr(self.service, method)(*args))

    def submit(self, name, step=0, client="me", sent=None):
        return self.call("submit", client, name, step, 0, sent)

    def result(self, name):
        async def wait():
            return await asyncio.wait_for(self.service.result(name), LIMIT_S)

        return pickle.loads(asyncio.run(wait()))

    def tickets(self, client="me"):
        return [(one.request, one.step) for one in self.call("connect", client).tickets]


@pytest.fixture
def world(tmp_path):
    made = World(tmp_path / "service")
    yield made
    made.call("close")


@pytest.fixture
def scored(tmp_path):
    made = World(tmp_path / "service", Scores())
    yield made
    made.call("close")


# ------------------------------------------------------------------------------ another process takes its place


def test_every_accepted_request_is_answered_by_the_next_process(scored):
    """In order, with its own weights; what was answered is not evaluated again, and the answer is what it was."""
    first = scored.submit("first", 1, sent=weights(1))
    before = scored.result("first")
    scored.hold()
    others = [
        scored.submit(f"{client}{number}", number, client, weights(number)) for client in "ab" for number in (2, 3)
    ]
    scored.begin()
    assert [scored.result(one.request).episodes[0].weights_version for one in others] == [2, 3, 4, 5]
    again = scored.result("first")
    assert (again.fingerprint, again.timing) == (before.fingerprint, before.timing)
    assert scored.submit("first", 1, sent=weights(1)) == first, "what is sent again was accepted"
    assert [(one.client, one.step) for one in scored.call("history")] == [
        ("me", 1), ("a", 2), ("b", 2), ("a", 3), ("b", 3)
    ]  # fmt: skip
    for one in scored.call("history"):
        assert load(one.run_dir).fingerprint == one.result.fingerprint
    welcome = scored.call("connect", "a")
    assert (welcome.next_step, welcome.weights_version) == (4, 3)
    assert scored.submit("later", 9, "a").weights_version == 3, "the weights that this client sent last"
    assert scored.result("later").episodes[0].weights_version == 3
    assert scored.submit("newer", 10, "b", weights(1)).weights_version == 6


def test_a_request_that_was_being_written_when_the_process_died_was_not_accepted(world):
    torn = world.folder / "requests" / "00000007_me_step_3"
    torn.mkdir()
    (torn / "weights.pkl").write_bytes(b"half")
    world.begin()
    assert world.tickets() == []
    world.submit("next", 3)
    assert world.result("next").status == "complete"


def test_a_request_that_ends_every_process_is_answered_at_last(world):
    """With an error, after some attempts, so that the others have their turn."""
    world.hold()
    world.submit("deadly")
    world.submit("harmless")
    folder = world.service._journal.requests["deadly"].folder
    (folder / "starts").write_bytes(b"." * 8)
    world.go_on()
    assert "the service ended 8 times" in str(world.result("deadly"))
    assert world.result("harmless").status == "complete"


def test_what_was_delivered_does_not_come_again(world):
    for number in range(3):
        world.submit(str(number), number)
        world.result(str(number))
    world.call("acknowledge", "1")
    world.call("acknowledge", "unknown")
    assert world.tickets() == [("0", 0), ("2", 2)]
    world.begin()
    assert world.tickets() == [("0", 0), ("2", 2)]
    assert world.tickets("somebody else") == []


def connected(context):
    """Return an environment, unless its file is gone; the error tells the password."""
    if not Path(context["file"]).exists():
        raise ConnectionError(f"not with {context['password']}")
    return gym.make("CartPole-v1")


def test_secrets_in_the_settings_are_in_no_file(tmp_path):
    """Variables, arguments and what a policy closes over; also after an error that tells them, and a new process."""
    there = tmp_path / "there"
    there.touch()
    token = secret("token")

    def authorized(observations):
        assert token
        return always_left(observations)

    world = World(tmp_path / "service", authorized, connected, file=str(there), password=secret("password"))
    world.submit("good")
    assert world.result("good").status == "complete"
    world.hold()
    world.submit("bad")
    there.unlink()
    world.begin()
    assert "ConnectionError: not with ***" in str(world.result("bad"))
    world.call("close")
    files = [path for path in world.folder.rglob("*") if path.is_file()]
    assert len(files) > 10
    assert list(leaking_files(tmp_path)) == []


def test_the_settings_are_read_with_the_key_alone(world):
    """Another process that knows the folder, and not the key, waits for settings of its own."""
    stranger = EvalService("two", "here", str(world.folder), OTHER_KEY, True, 600.0)
    assert not stranger._opened.is_set()
    asyncio.run(stranger.close())
    [file] = world.folder.glob("settings_*")
    assert file.stat().st_mode & 0o077 == world.folder.stat().st_mode & 0o077 == 0
    with pytest.raises(InvalidToken):
        Fernet(OTHER_KEY).decrypt(file.read_bytes())


def test_a_folder_has_one_service(world):
    other = EvalService("two", "here", str(world.folder), OTHER_KEY, True, 600.0)
    with pytest.raises(ConfigError, match="another evaluation service uses"):
        asyncio.run(other.open(cloudpickle.dumps((EvalConfig().environment("CartPole-v1").build(), None, None, 2))))
    asyncio.run(other.close())


def test_what_a_stopped_service_has_not_done_is_done_by_the_next_on_its_folder(world):
    world.hold()
    world.submit("waiting", 4)
    world.call("close")
    assert isinstance(world.result("waiting"), ClusterError)
    world.call("acknowledge", "waiting")
    with pytest.raises(ClusterError, match="was stopped"):
        world.submit("late")
    world.begin(OTHER_KEY)
    assert world.tickets() == [("waiting", 4)]
    assert world.result("waiting").status == "complete"


# ------------------------------------------------------------------------------ accepting


def test_a_request_that_is_sent_twice_runs_once(world):
    world.hold()
    tickets = {world.submit("a", 1) for _ in range(5)}
    assert len(tickets) == 1
    world.go_on()
    world.result("a")
    assert {world.submit("a", 1)} == tickets
    assert len(world.call("history")) == 1
    with pytest.raises(UsageError, match="knows no request 'b'"):
        world.result("b")


def test_a_client_has_room_for_so_many(world):
    """Two more than ``max_queue``, whatever others have."""
    world.hold()
    for number in range(4):
        world.submit(f"a{number}", client="a")
    with pytest.raises(EvaluatorBusy, match=r"holds 4 requests of client 'a' .* max_queue=2"):
        world.submit("more", client="a")
    world.submit("b", client="b")
    world.call("cancel", "a3", "replaced", True)
    result = world.result("a3")
    assert (len(result.episodes), result.status) == (0, "failed")
    world.submit("more", client="a")
    world.go_on()
    assert world.result("more").status == "complete"


def test_names_of_clients_need_not_be_those_of_folders(world):
    for name in ("../b", "x" * 400, ""):
        world.submit(f"of {name}", client=name)
        assert world.result(f"of {name}").status == "complete"
        assert world.tickets(name) == [(f"of {name}", 0)]


def test_weights_that_do_not_fit_fail_alone_and_are_forgotten(scored, monkeypatch):
    """Also twice in a row, and if a request without weights of its own waits behind them; none waits for its log."""
    monkeypatch.setattr("rl_eval.execution.opening._LAST_READ_S", 2 * LIMIT_S)
    scored.submit("good", sent=weights(3))
    scored.result("good")
    scored.hold()
    for name in ("bad", "worse"):
        scored.submit(name, sent=weights(1, size=2))
    scored.submit("behind")
    scored.go_on()
    for name in ("bad", "worse", "behind"):
        assert isinstance(scored.result(name), WeightsError)
    scored.begin()
    assert scored.submit("again").weights_version == 1
    assert scored.result("again").status == "complete"


def test_weights_that_no_request_can_need_are_removed(scored):
    for number in range(3):
        scored.submit(str(number), number, sent=weights(number))
        scored.result(str(number))
    assert len(list(scored.folder.glob("requests/*/weights.pkl"))) == 1


# ------------------------------------------------------------------------------ whatever goes wrong


class Strange(Exception):
    """Can be pickled, and not be unpickled."""

    def __init__(self, first, second):
        super().__init__(f"{first} and {second}")


class Mute(Exception):
    """Has neither a text nor a pickle."""

    def __init__(self):
        super().__init__()
        self.lock = threading.Lock()

    def __str__(self):
        raise ValueError("no text")


@pytest.mark.parametrize(
    ("error", "arrives"),
    [
        (OSError(28, "No space left on device"), (OSError, "No space left")),
        (Strange(1, 2), (EvalError, "Strange: 1 and 2")),
        (Mute(), (EvalError, "Mute: Mute, whose text cannot be read")),
    ],
)
def test_a_request_that_cannot_begin_is_answered_with_its_error(world, monkeypatch, error, arrives):
    """Whatever its kind, and the next request runs."""

    def refuse(**given):
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(world.service._group, "submit", refuse)
        for name in ("first", "second"):
            world.submit(name)
            outcome = world.result(name)
            assert type(outcome) is arrives[0]
            assert arrives[1] in str(outcome)
    world.submit("third")
    assert world.result("third").status == "complete"


def refuse_once(function, error):
    """Return a function that raises the first time it is called."""
    calls = []

    def call(*args, **given):
        calls.append(args)
        if len(calls) == 1:
            raise error
        return function(*args, **given)

    return call


@pytest.mark.parametrize("where", ["result", "write", "books"])
def test_a_request_is_answered_and_the_next_runs_although_its_result_cannot_be_kept(world, monkeypatch, where):
    full = OSError(28, "No space left on device")
    if where == "result":
        monkeypatch.setattr(EvalHandle, "exception", refuse_once(EvalHandle.exception, full))
    elif where == "write":
        write = pytest.importorskip("rl_eval.training.service.journal").write_bytes
        monkeypatch.setattr("rl_eval.training.service.journal.write_bytes", refuse_once(write, full))
    else:
        journal = world.service._journal
        monkeypatch.setattr(journal, "conclude", refuse_once(journal.conclude, MemoryError("no room")))
    for name in ("first", "second"):
        world.submit(name)
    first, second = world.result("first"), world.result("second")
    assert isinstance(first, OSError) if where == "result" else first.status == "complete"
    assert second.status == "complete"


def test_a_cancelled_request_is_answered_although_its_empty_result_cannot_be_made(world, monkeypatch):
    """It was taken out of the queue, so nobody else will answer."""
    world.hold()
    world.submit("waiting")

    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("rl_eval.execution.outcome.EvalOutcome", full)
    world.call("cancel", "waiting", "not needed", True)
    assert isinstance(world.result("waiting"), OSError)


# ------------------------------------------------------------------------------ nobody there


def test_it_ends_when_nobody_is_there_and_nothing_to_do(world):
    """A client that lives, or a request that waits, keeps it."""
    service = world.service
    world.call("connect", "me")
    world.now = 500.0
    world.call("beat", "me")
    world.now = 1000.0
    assert not service._idle()
    world.hold()
    world.submit("waiting")
    world.call("leave", "me")
    world.now = 2000.0
    assert not service._idle()
    world.go_on()
    world.result("waiting")
    assert not service._idle(), "its time begins when the work is done"
    world.now = 2601.0
    assert service._idle()
    assert world.ended.wait(LIMIT_S)
    assert service._closed.is_set()
