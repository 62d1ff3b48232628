"""Policy on a server of openpi's protocol. Each row is a request, and its answer may come later."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from typing import TYPE_CHECKING, Any, Final, final

import gymnasium as gym
import numpy as np
import numpy.typing as npt
import tree

from rl_eval.config.settings import PolicySection
from rl_eval.errors import ConfigError, PolicyError, PolicyUnavailable
from rl_eval.errors.redaction import learn
from rl_eval.integrations.openpi.connection import Connection, LostError, RejectedError
from rl_eval.integrations.openpi.greeting import EXTENSION, greeting
from rl_eval.integrations.openpi.mapping import Requests
from rl_eval.integrations.openpi.wire import pack, unpack
from rl_eval.policies.chunks import steps_of
from rl_eval.policies.inference.spaces import ActionReader
from rl_eval.protocols import Answer, NoiseSource
from rl_eval.supervision.processes import RUNNER_MARK

if TYPE_CHECKING:
    from rl_eval.integrations.openpi import Server

Array = npt.NDArray[Any]

_TRIES: Final = 2
"""Connections that may be lost while the server computes the same row."""
_PAUSE_S: Final = 0.1
_AWAY: Final = (
    "Start the server, or correct the address. To wait longer for a server, set policy.policy_kwargs.patience_s."
)
_EPISODES: Final = 2**32
"""The number of an episode is that of its connection times this number, plus that of the episode there."""


class _SilentError(LostError):
    """The server did not answer in time."""


@dataclass
class _Row:
    """Row of a request."""

    request: int
    place: int
    """Position in the batch."""
    message: dict[str, Any]
    episode: int = 0
    """Number of the episode at the server; 0 before its first request."""
    asked: int = 0
    """Number of requests of the episode before this one."""
    step: int = 0
    """Number by which the server names its answer."""
    begins: bool = False
    tries: int = 0
    found: Any = field(default=None)
    """Action, or the error of the row; None without an answer."""


@final
class PolicyClient:
    """Client of one or more servers of the same policy.

    It connects with the first call, in the process of its runner. If the connection is lost, it connects again, also to
    the next address, and sends the rows without an answer again.

    Args:
        server: Addresses and time limits.
        section: Settings of the policy.
        observation_space: Space of one observation.
        action_space: Space of one action.

    Raises:
        ConfigError: The mapping does not fit the observations.
    """

    def __init__(
        self, server: Server, section: PolicySection, observation_space: gym.Space[Any], action_space: gym.Space[Any]
    ) -> None:
        self._server = server
        self._requests = Requests(server.mapping, server.prompt, observation_space)
        self._section = section
        self._structure = ActionReader(action_space, section.actions).structure
        self._agreed = greeting(section, observation_space, action_space)
        mark = os.environ.get(RUNNER_MARK, f"-{os.getpid()}")
        self._place = int(mark.rpartition("-")[2]) % len(server.addresses)
        """Position of the address in use. The first one is that of the runner's number, or else of the process."""
        self._link: Connection | None = None
        self._waiting: deque[_Row] = deque()
        """Rows without an answer, in the order of their requests."""
        self._open: dict[int, list[_Row]] = {}
        """Rows of each request that has not been returned."""
        self._heard = 0.0
        """Time of the last answer, or of the first request after it."""
        self._episodes = self._sent = self.connections = 0
        self.numerics: dict[str, Any] = {}
        """Facts about the server, for the numerics key."""
        self.doubt = ""
        """Reason why former answers may have been those of other rows; empty if there is none."""

    @property
    def speed_notes(self) -> tuple[str, ...]:
        """Notes for ``rl-eval doctor`` about slow requests."""
        try:
            import websockets.speedups  # noqa: F401
        except ImportError:
            return ("websockets is installed without its C extension, so each megabyte of images costs 1 ms of CPU",)
        return ()

    @property
    def server(self) -> str:
        """Name of the server, for messages."""
        return f"the server at {self._server.addresses[self._place]}"

    # ------------------------------------------------------------------ the protocol of policies

    def initial_state(self, batch_size: int) -> Array | None:
        """Return a number of each episode, 0 before it begins, and of its requests; None without episodes there."""
        return np.zeros((batch_size, 2), np.int64) if "rl_eval" in self._connected().metadata else None

    def act(
        self, observations: Any, state: Any, live: npt.NDArray[np.bool_], noise: NoiseSource | None
    ) -> tuple[Any, Any]:
        """Choose actions; see :class:`rl_eval.Policy`. It waits for the answers."""
        rows = np.flatnonzero(live) if live.any() else np.zeros(1, np.int64)
        number = self._send(observations, state, noise, rows)
        while any(one.found is None for one in self._open[number]):
            wait([self._connected().fileno()], min(1.0, self._server.answer_timeout_s))
            self._receive()
        answer, *more = self._answers(number, sent := self._open.pop(number))
        if answer.error is not None or more:
            self._end_begun(sent)  # The new state of no row is kept.
            problem = f"{self.server} sent actions of different shapes"
            raise next((one.error for one in (answer, *more) if one.error), PolicyError(problem, key="policy.policy"))
        if not live.any():
            self.ended(answer.state)
        actions = tree.map_structure(lambda some: _spread(some, rows, len(live)), answer.actions)
        return actions, None if answer.state is None else _spread(answer.state, rows, len(live))

    def send(self, observations: Any, state: Any, noise: NoiseSource | None) -> int:
        """Send the rows; see :class:`rl_eval.protocols.Deferred`."""
        return self._send(observations, state, noise, np.arange(len(tree.flatten(observations)[0])))

    def received(self) -> list[Answer]:
        """Return the answers that have come, and an own answer for each row with an error."""
        if self._waiting:
            self._receive()
        answers = []
        for number, rows in list(self._open.items()):
            done = [row for row in rows if row.found is not None]
            answers += self._answers(number, done)
            self._open[number] = [row for row in rows if row.found is None]
            if not self._open[number]:
                del self._open[number]
        return answers

    def fileno(self) -> int:
        """Return the descriptor of the connection."""
        return self._connected().fileno()

    def ended(self, state: Any) -> None:
        """Report the end of these episodes to the server."""
        for episode in () if state is None else np.reshape(state, (-1, 2))[:, 0].tolist():
            self._end(episode)

    def reconnect(self) -> None:
        """Replace the connection by a new one."""
        self.doubt = ""
        self._drop()
        self._connected()

    def others(self) -> Iterator[str]:
        """Yield the name of the server at each other address, while it is in use."""
        own, count = self._place, len(self._server.addresses)
        for place in range(own + 1, own + count):
            self._place = place % count
            self.reconnect()
            yield self.server
        if count > 1:
            self._place = own
            self.reconnect()

    # ------------------------------------------------------------------ requests and answers

    def _send(self, observations: Any, state: Any, noise: Any, wanted: Array) -> int:
        link, number = self._in_step(), self._sent
        self._sent += 1
        requests = self._requests.of(tree.map_structure(lambda leaf: leaf[wanted], observations))
        rows = [_Row(number, place, one) for place, one in enumerate(requests)]
        if state is not None:
            for row, place in zip(rows, wanted.tolist(), strict=True):
                row.episode, row.asked = map(int, state[place])
                row.begins = not row.episode
                # The step grows with each request: the server answers a repeated request without a new step.
                drawn = (0, row.asked) if noise is None else (int(noise.seeds[place]), int(noise.steps[place]))
                row.step = drawn[1]
                row.message[EXTENSION] = {"seed": drawn[0], "step": drawn[1], "begin": row.begins}
        self._open[number] = rows
        if not self._waiting:
            self._heard = time.monotonic()
        self._waiting.extend(rows)
        try:
            for row in rows:
                self._transmit(link, row)
        except LostError as error:
            self._again(error)
        return number

    def _in_step(self) -> Connection:
        """Return the connection. Replace it if an answer has come that no row waits for.

        Answers of a server without numbers are in the order of the requests, so former answers may have been shifted.
        """
        link, is_lost = self._connected(), False
        if self._waiting or "rl_eval" in link.metadata:
            return link
        try:
            if wait([link.fileno()], 0):
                link.read()
        except LostError:
            is_lost = True
        if link.messages:
            self.doubt = f"unknown, because {self.server} sent an answer that no request waited for"
        if link.messages or is_lost:
            self._drop()
        return self._connected()

    def _transmit(self, link: Connection, row: _Row) -> None:
        if (extension := row.message.get(EXTENSION)) is not None:
            if not row.begins and not self._is_current(row.episode):
                if link.metadata.get("memory", True):
                    raise self._unavailable("has lost the state of an episode with the former connection")
                row.begins = extension["begin"] = True
            if row.begins:
                self._episodes += 1
                row.episode = self.connections * _EPISODES + self._episodes
            extension["id"] = row.episode
        link.send(pack(row.message))

    def _end(self, episode: int) -> None:
        if self._link is not None and self._is_current(episode):
            with suppress(LostError):  # Then the server ends its episodes itself.
                self._link.send(pack({EXTENSION: {"id": episode, "end": True}}))

    def _end_begun(self, rows: list[_Row]) -> None:
        """End the episodes that began with these rows, because their states are not kept."""
        for row in rows:
            if row.begins:
                self._end(row.episode)

    def _is_current(self, episode: int) -> bool:
        return episode // _EPISODES == self.connections

    def _receive(self) -> None:
        """Read answers without waiting; connect again if the connection is lost."""
        link = self._connected()
        lost: LostError | None = None
        try:
            if wait([link.fileno()], 0):
                link.read()
            elif time.monotonic() - self._heard > self._server.answer_timeout_s:
                lost = _SilentError(f"no answer within {self._server.answer_timeout_s:g} s")
        except LostError as error:
            lost = error
        while link.messages and self._waiting:
            self._take(link.messages.popleft())
            self._heard = time.monotonic()
        if lost is not None:
            self._again(lost)

    def _take(self, message: str | bytes) -> None:
        """Store an answer. It is for the episode that it names, or for the row that waits longest."""
        sent, failed = f"The request has the keys {', '.join(self._requests.keys)}", ""
        try:
            answer: Any = {} if isinstance(message, str) else unpack(message)
        except ValueError as error:
            answer, failed = {}, f"sent no answer: {error}"
        if isinstance(message, str):
            failed = f"failed. {sent}. Its traceback:\n{message.strip()}"
        known = answer if isinstance(answer, dict) else {}
        named = known.get(EXTENSION)
        if not isinstance(named, dict) or not isinstance(named.get("id"), int):
            row = self._waiting.popleft()
        else:
            rows = [one for one in self._waiting if one.episode == named["id"] and one.step == named.get("step")]
            if not rows:
                return  # A second answer.
            row = rows[0]
            self._waiting.remove(row)
            if named.get("unavailable"):
                raise self._unavailable(f"cannot answer: {named.get('error')}")
            failed = str(named.get("error", ""))
        row.found = known.get(self._requests.action)
        if failed:
            row.found = PolicyError(f"{self.server} {failed}", key="policy.policy")
        elif row.found is None:
            keys = ", ".join(map(str, known)) or type(answer).__name__
            problem = f"the answer of {self.server} has no {self._requests.action}, but {keys}. {sent}"
            fix = "Set action in the mapping to the key of the actions."
            row.found = PolicyError(problem, key="policy.policy_kwargs.mapping", fix=fix)

    def _answers(self, number: int, rows: list[_Row]) -> list[Answer]:
        """Return the answers for some rows of a request."""
        errors = [Answer(number, error=one.found, rows=[one.place]) for one in rows if _failed(one)]
        self._end_begun([one for one in rows if _failed(one)])
        good = [one for one in rows if not _failed(one)]
        if not good:
            return errors
        try:
            found = [tree.map_structure_up_to(self._structure, np.asarray, one.found) for one in good]
            actions = tree.map_structure(lambda *parts: np.stack(parts), *found)
        except (ValueError, TypeError) as error:
            if len(good) > 1:  # A bad action is that of its row alone.
                return [*errors, *(answer for one in good for answer in self._answers(number, [one]))]
            self._end_begun(good)
            bad = PolicyError(f"{self.server} sent no action of the action space: {error}", key="policy.policy")
            return [*errors, Answer(number, error=bad, rows=[good[0].place])]
        episodes = np.array([(one.episode, one.asked + 1) for one in good], np.int64)
        state = episodes if EXTENSION in good[0].message else None
        return [*errors, Answer(number, actions, state, rows=[one.place for one in good])]

    # ------------------------------------------------------------------ connections

    def _connected(self) -> Connection:
        if self._link is None:
            self._again(LostError("there is no connection"))
        assert self._link is not None
        return self._link

    def _again(self, lost: LostError) -> None:
        """Connect, to the next address if there was a connection. Send all rows without an answer.

        Raises:
            PolicyUnavailable: No server answers, or servers were lost several times at the same row.
        """
        count, ends = len(self._server.addresses), time.monotonic() + self._server.patience_s
        if self._link is not None:
            self._place = (self._place + 1) % count
            if self._waiting:
                self._waiting[0].tries += _TRIES if isinstance(lost, _SilentError) else 1
                if self._waiting[0].tries >= _TRIES * count:
                    raise self._unavailable(f"does not answer: {lost}")
        self._drop()
        while True:
            for _ in range(count):
                if (failed := self._open_and_send()) is None:
                    return
                self._place = (self._place + 1) % count
            if time.monotonic() > ends:
                raise self._unavailable(f"does not answer: {failed}", _AWAY)
            time.sleep(_PAUSE_S)

    def _open_and_send(self) -> LostError | None:
        """Connect to the address in use, and send all rows without an answer; return the error."""
        try:
            self._link = self._greeted()
            for row in self._waiting:
                self._transmit(self._link, row)
        except LostError as error:
            self._drop()
            return error
        self._heard = time.monotonic()
        return None

    def _greeted(self) -> Connection:
        """Return a new connection to a server that serves what the settings say.

        Raises:
            ConfigError: The server rejects the key, or serves something else.
        """
        options, headers = self._server, {}
        if token := os.environ.get(options.key_variable):
            learn({"api_key": token})
            headers["Authorization"] = f"Api-Key {token}"
        address = options.addresses[self._place]
        try:
            link = Connection(address, headers, options.connect_timeout_s, options.answer_timeout_s)
        except RejectedError as error:
            name = options.key_variable
            sent = f"rejects the key in {name}" if token else f"needs a key, and {name} is not set in the runner"
            fix = f"Set {name} to the key of the server before the runners start. rl-eval serve prints the command."
            problem = f"{self.server} {sent} ({error})"
            raise ConfigError(problem, key="policy.policy_kwargs.key_variable", value=name, fix=fix) from error
        self.connections += 1
        try:
            self._check(link.metadata)
        except BaseException:
            link.close()
            raise
        return link

    def _check(self, metadata: dict[str, Any]) -> None:
        """Check that the server serves what the settings say.

        Raises:
            ConfigError: They differ, or ``policy.chunk`` does not fit the server's chunks.
        """
        if "rl_eval" not in metadata:
            if not self._section.deterministic:
                problem = f"policy.deterministic is False, but {self.server} takes no random numbers"
                fix = "Set policy.deterministic: true. If the server samples, also set policy.allow_nondeterministic."
                raise ConfigError(problem, key="policy.deterministic", value=False, fix=fix)
            self.numerics = {"protocol": "openpi"}
            return
        chunk, horizon = self._section.chunk, metadata.get("horizon")
        if chunk is not None and isinstance(horizon, int):
            steps_of(chunk, horizon)
        for name, ours in self._agreed.items():
            if pack(theirs := metadata.get(name)) != pack(ours):
                problem = f"{self.server} has {name}={theirs!r}, but the configuration has {ours!r}"
                key = f"policy.{name}" if name in {"deterministic", "actions", "chunk"} else "environment.env"
                raise ConfigError(problem, key=key, value=ours, fix="Start the server for this configuration.")
        self.numerics = {"weights": metadata.get("weights", ""), **metadata.get("numerics", {})}

    def _unavailable(self, why: str, fix: str = "") -> PolicyUnavailable:
        """Return the error for a server that does not answer, and forget all requests."""
        self._drop()
        self._waiting.clear()
        self._open.clear()
        addresses = " and ".join(self._server.addresses)
        text = f"the server of the policy at {addresses} {why}"
        return PolicyUnavailable(text, key="policy.policy", value=addresses, fix=fix)

    def _drop(self) -> None:
        if self._link is not None:
            self._link.close()
        self._link = None


def _failed(row: _Row) -> bool:
    return isinstance(row.found, PolicyError)


def _spread(some: Array, rows: Array, size: int) -> Array:
    """Return a batch with these rows; the others are zero."""
    whole = np.zeros((size, *some.shape[1:]), some.dtype)
    whole[rows] = some
    return whole
