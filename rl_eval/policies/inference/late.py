"""Requests to a policy that answers later."""

from __future__ import annotations

from collections.abc import Iterator
from time import perf_counter
from typing import Any, NamedTuple, final

import numpy as np
import numpy.typing as npt

from rl_eval.errors import PolicyUnavailable
from rl_eval.policies.inference.spaces import copy_batch, take_rows
from rl_eval.policies.noise import EpisodeNoise
from rl_eval.protocols import Answer, Deferred
from rl_eval.supervision.caller import survivable

Lanes = npt.NDArray[np.int64]


class Request(NamedTuple):
    """Rows that were sent together."""

    lanes: Lanes
    numbers: Lanes
    """For each lane, the number of its requests when this one was sent."""
    observations: Any
    state: Any
    noise: EpisodeNoise | None

    def row(self, row: int) -> Request:
        """Return a request of one row."""
        one = slice(row, row + 1)
        rows = take_rows(self.observations, one), take_rows(self.state, one)
        return Request(self.lanes[one], self.numbers[one], *rows, self.noise and self.noise.take(one))


class Received(NamedTuple):
    """Answer to some rows of a request."""

    answer: Answer
    request: Request
    rows: Lanes
    """Places of these rows in the request."""
    still: npt.NDArray[np.bool_]
    """Whether each of these rows waits for this answer: its episode may have ended, or begun again."""
    gone: npt.NDArray[np.bool_]
    """Whether each of these rows has its first answer, for which no episode waits."""

    @property
    def lanes(self) -> Lanes:
        """Lanes that wait for this answer."""
        return self.request.lanes[self.rows[self.still]]


@final
class Requests:
    """Requests that wait for answers. An answer holds only for the lanes that wait for this answer.

    Args:
        policy: Policy that answers later.
        lanes: Number of lanes.
    """

    def __init__(self, policy: Deferred, lanes: int) -> None:
        self.policy = policy
        self.waiting = np.zeros(lanes, bool)
        """Mask of the lanes that wait for an answer."""
        self._numbers = np.zeros(lanes, np.int64)
        self._sent: dict[int, tuple[Request, npt.NDArray[np.bool_]]] = {}
        """Requests, and masks of their rows without an answer, by number."""
        self._answers: list[Answer] = []
        """Answers to look at, and errors of requests that the policy failed to send."""
        self._seconds, self._counted = 0.0, perf_counter()
        """Seconds for which a lane has waited, and the time up to which they are counted."""

    @property
    def awaited(self) -> int:
        """Number of lanes that wait for an answer."""
        return int(np.count_nonzero(self.waiting))

    def _count(self) -> None:
        now = perf_counter()
        self._seconds += now - self._counted if self.awaited else 0.0
        self._counted = now

    def seconds(self) -> float:
        """Return the seconds for which a lane has waited since the last call."""
        self._count()
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def ask(self, lanes: Lanes, observations: Any, state: Any, noise: EpisodeNoise | None) -> None:
        """Send the rows of some lanes in one request."""
        self._count()
        self._numbers[lanes] += 1
        self.waiting[lanes] = True
        self._send(Request(lanes, self._numbers[lanes], observations, state, noise))

    def ask_alone(self, received: Received) -> None:
        """Send each row that waits for this answer again, in a request of its own."""
        for row in received.rows[received.still]:
            self._send(received.request.row(row))

    def _send(self, request: Request) -> None:
        try:
            number = self.policy.send(copy_batch(request.observations), copy_batch(request.state), request.noise)
        except PolicyUnavailable:
            raise
        except survivable() as error:
            number = min((0, *self._sent)) - 1
            self._answers.append(Answer(number, error=error))
        self._sent[number] = request, np.ones(len(request.lanes), bool)

    def received(self) -> Iterator[Received]:
        """Yield the answers since the last call. An answer to rows that have been answered holds for no lane."""
        self._count()
        self._answers += self.policy.received()
        while self._answers:
            answer = self._answers.pop(0)
            if answer.request not in self._sent:
                continue
            request, left = self._sent[answer.request]
            rows = np.arange(len(left)) if answer.rows is None else np.asarray(answer.rows, np.int64)
            lanes, first = request.lanes[rows], left[rows]
            still = first & self.waiting[lanes] & (self._numbers[lanes] == request.numbers[rows])
            left[rows] = False
            if not left.any():
                del self._sent[answer.request]
            yield Received(answer, request, rows, still, first & ~still)
