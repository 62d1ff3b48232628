"""Action chunks of a policy that answers later: with a delay, an episode goes on while its next chunk is computed."""

from __future__ import annotations

from typing import Any, NamedTuple, final

import numpy as np
import numpy.typing as npt
import tree
from typing_extensions import override

from rl_eval.errors import PolicyError, PolicyUnavailable
from rl_eval.policies.chunks import ChunkedPolicy
from rl_eval.policies.inference.spaces import assign_rows, take_rows
from rl_eval.protocols import Answer
from rl_eval.supervision.caller import survivable


class _Row(NamedTuple):
    """Row of a request that needs a chunk."""

    request: int
    place: int
    observation: Any
    state: dict[str, Any]
    noise: Any
    asked: bool = False
    """Whether the chunk of this step has been asked for."""


@final
class LateChunks(ChunkedPolicy):
    """Policy that executes the chunks of an inner policy that answers later.

    A row that needs no chunk is answered at once. The chunk that is asked for at step t is needed at step t plus the
    delay; until then, the state of the episode has the number (``chunk``) under which the chunk is kept.
    """

    _policy: Any

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._requests = self._chunks = 0
        """Number of requests so far, and number of chunks that were asked for."""
        self._chunk_of: dict[int, int] = {}
        """Numbers of the chunks that have not come, by request to the inner policy."""
        self._kept: dict[int, Answer | None] = {}
        """Answer with each chunk that an episode will need; None until it has come."""
        self._held: dict[int, _Row] = {}
        """Rows that wait for a chunk, by its number."""
        self._answers: list[Answer] = []

    @override
    def initial_state(self, batch_size: int) -> dict[str, Any]:
        return {**super().initial_state(batch_size), "chunk": np.zeros(batch_size, np.int64)}

    def fileno(self) -> int:
        """Return the file descriptor of the inner policy."""
        return self._policy.fileno()  # type: ignore[no-any-return]

    def send(self, observations: Any, state: dict[str, Any], noise: Any) -> int:
        """Answer the rows that need no chunk, and send the rows that are due to the inner policy."""
        self._requests += 1
        place = state["step"] % self.execute
        needs = (place == 0) | ((state["chunk"] > 0) & (place == self.delay))
        if not needs.all():
            self._answer(self._requests, np.flatnonzero(~needs), take_rows(state, ~needs))
        for row in np.flatnonzero(needs).tolist():
            one = slice(row, row + 1)
            drawn = noise and noise.take(one)
            self._go_on(_Row(self._requests, row, take_rows(observations, one), take_rows(state, one), drawn))
        return self._requests

    def received(self) -> list[Answer]:
        """Return the answers since the last call."""
        for answer in self._policy.received():
            chunk = self._chunk_of.pop(answer.request, 0)
            if chunk in self._kept:
                self._kept[chunk] = answer
                if chunk in self._held:
                    self._go_on(self._held.pop(chunk))
            elif chunk and answer.error is None:
                self._end_inner(answer.state)
        answers, self._answers = self._answers, []
        return answers

    def ended(self, state: dict[str, Any]) -> None:
        """Drop the chunk for which an episode that has ended would wait."""
        chunk = int(state["chunk"][0])
        self._kept.pop(chunk, None)
        if (row := self._held.pop(chunk, None)) is not None:
            self._fail(row, PolicyError("the episode has ended", key="act"))
        self._end_inner(state.get("inner"))

    def _end_inner(self, state: Any) -> None:
        if (ended := getattr(self._policy, "ended", None)) is not None:
            ended(state)

    def _go_on(self, row: _Row) -> None:
        """Use the chunk that has come, ask for the next one if it is due, and answer the row or hold it."""
        state, step = row.state, int(row.state["step"][0])
        try:
            if chunk := int(state["chunk"][0]):
                if (answer := self._kept[chunk]) is None:
                    self._held[chunk] = row
                    return
                self._use(state, chunk, answer)
            if step % self.execute == 0 and not row.asked:
                self._ask(row)
                if step == 0 or self.delay == 0:
                    self._held[self._chunks] = row._replace(asked=True)
                    return
        except PolicyUnavailable:
            raise
        except survivable() as error:
            self._fail(row, error)
            return
        self._answer(row.request, np.array([row.place]), state)

    def _ask(self, row: _Row) -> None:
        request = self._policy.send(row.observation, row.state.get("inner"), row.noise)
        self._chunks += 1
        self._chunk_of[request], self._kept[self._chunks] = self._chunks, None
        row.state["chunk"][:] = self._chunks
        for planned in tree.flatten(row.state["planned"]):
            planned[:, : self.delay] = planned[:, self.execute :].copy()

    def _use(self, state: dict[str, Any], chunk: int, answer: Answer) -> None:
        """Write the planned actions of one row, and the inner policy's state."""
        del self._kept[chunk]
        state["chunk"][:] = 0
        if answer.error is not None:
            raise answer.error
        given, following = self._read((answer.actions, answer.state), state.get("inner"), np.ones(1, bool))
        since = 0 if state["step"][0] == 0 else self.delay

        def write(planned: npt.NDArray[Any], new: npt.NDArray[Any]) -> None:
            planned[:, since:] = new[:, since : self.execute + self.delay]

        tree.map_structure(write, state["planned"], given)
        if "inner" in state:
            tree.map_structure(lambda kept, new: assign_rows(kept, slice(None), new), state["inner"], following)

    def _answer(self, request: int, rows: npt.NDArray[np.int64], state: dict[str, Any]) -> None:
        every, place = np.arange(len(rows)), state["step"] % self.execute
        actions = tree.map_structure(lambda planned: planned[every, place], state["planned"])
        self._answers.append(Answer(request, actions, {**state, "step": state["step"] + 1}, rows=rows))

    def _fail(self, row: _Row, error: BaseException) -> None:
        self._answers.append(Answer(row.request, error=error, rows=[row.place]))
