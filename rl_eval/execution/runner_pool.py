"""Pool of runners: which exist, which are fit to work, and the back-off before another takes the place of a lost one.

A position in the group (``index``) is filled by one *incarnation* after another. A lost incarnation is
replaced after a back-off that doubles with each consecutive loss; a finished episode, anybody's, sets it back. After
``max_runner_restarts`` losses in a row the position stays empty. A loss that an episode was charged with, or that a
pre-empted node caused, is not one of them. Where incarnations of a position cannot start, raise, or fail all their
episodes, only an episode that is finished there sets its count back: other positions say nothing about its machine.
"""

from __future__ import annotations

import logging
import operator
import threading
from collections import Counter, deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, final

from rl_eval.backends import Backend, Reply
from rl_eval.backends.requests import Apply, Run, RunnerRequest, SetWeights, Start
from rl_eval.config.settings import EvalSettings
from rl_eval.errors import RunnerLost, RunnerStartError
from rl_eval.records.episode import RunReport
from rl_eval.scheduling.runner_failures import silence_limit
from rl_eval.weights import WeightsSnapshot

_logger: Final = logging.getLogger(__name__)
_FIRST_BACKOFF_S: Final = 0.25
_LONGEST_BACKOFF_S: Final = 10.0
_LONG_START_S: Final = 15.0
"""After which waiting for the first runner is told, once: longer than imports take."""


@dataclass(slots=True)
class Member:
    """One incarnation of a runner."""

    incarnation: int
    index: int
    spawned: float
    ready: bool = False
    terminated: bool = False
    """Whether it was given up, and is only waited for to be found dead."""
    broken: bool = False
    """Whether it could not start, a call raised, or all its episodes failed while others' did not."""
    heard: float = 0.0
    """When it last answered, or was called while idle."""
    pending: deque[tuple[int, RunnerRequest]] = field(default_factory=deque)
    """Unanswered requests, each behind the tag of its job; the one that it works on is first."""
    probed: bool = False
    """Whether it has answered a :class:`Run` with the weights that it has: the first one also probes the policy."""
    reported: Counter[str] = field(default_factory=Counter)
    """Sums of its reports, by the names that the runner's own counters have."""

    def in_flight(self, tag: int) -> int:
        """Number of unanswered requests of a job."""
        return sum(other == tag for other, _ in self.pending)


class RunnerPool:
    """Spawns, watches and replaces runners."""

    def __init__(self, backend: Backend, settings: EvalSettings, weights: GroupWeights | None = None) -> None:
        self._backend = backend
        self._settings = settings
        self.weights = GroupWeights() if weights is None else weights
        """Weights of the group, which runners get when they start, before anything else."""
        self.members: dict[int, Member] = {}
        self.restarts = 0
        """Replacements over the pool's lifetime."""
        self.losses = 0
        """Runners lost over the pool's lifetime."""
        self.reported: Counter[str] = Counter()
        """Sums of the reports of members that are gone."""
        self.last_loss: BaseException | None = None
        self.ever_ready = False
        self.on_restart: Callable[[int], object] = lambda _: None
        """Called with the position of a runner that is replaced."""
        self._next_incarnation = 0
        self._next_index = 0
        self._consecutive: Counter[int] = Counter()
        """Losses of each position since an episode finished."""
        self._broken: Counter[int] = Counter()
        """Incarnations of each position that were broken, since an episode finished there."""
        self._failing: set[int] = set()
        """Positions whose latest start or call raised."""
        self._due: list[tuple[float, int]] = []
        self._founded: float | None = None
        self._told_of_waiting = False

    # ------------------------------------------------------------------ size

    def grow(self, count: int, now: float) -> None:
        """Add positions and fill them."""
        self._founded = now if self._founded is None else self._founded
        for _ in range(count):
            self._spawn(self._next_index, now)
            self._next_index += 1

    def shrink(self, count: int) -> list[Member]:
        """Empty positions, those that wait for a replacement first, then the last; return the members that went."""
        waiting = sorted(self._due, key=lambda due: due[1])[-count:]
        self._due = [due for due in self._due if due not in waiting]
        rest = count - len(waiting)
        gone = sorted(self.members.values(), key=lambda member: member.index)[-rest:] if rest else []
        for member in gone:
            self._remove(member)
        return gone

    def ready(self) -> list[Member]:
        """Members that can work, in order of their position."""
        # A copy, since other threads ask too.
        fit = [member for member in list(self.members.values()) if member.ready and not member.terminated]
        return sorted(fit, key=lambda member: member.index)

    def expected(self) -> int:
        """Members that work or will, if all goes well."""
        return len(self.members) + len(self._due)

    @property
    def slice_s(self) -> float:
        """Seconds of work per call: a tenth, or longer so that one driver keeps up with many runners."""
        return max(0.1, 0.002 * len(self.members))

    @property
    def hopeless(self) -> bool:
        """Whether no runner is left and none will come."""
        return not self.members and not self._due

    @property
    def phase(self) -> str:
        """Occupation of the runners, in a few words."""
        ready = self.ready()
        if not ready:
            return self._backend.starting([member.incarnation for member in list(self.members.values())])
        if any(member.probed for member in ready):
            return "running"
        return "sending weights" if all(map(_gets_weights, ready)) else "probing the policy"

    def absence(self) -> str:
        """Return why there are fewer runners than requested."""
        with suppress(Exception):  # A cluster that does not answer must not cost the result.
            if (most := self._backend.capacity()) is not None and most < self.expected():
                return self._backend.shortage()
        if self.losses:
            return f"the others were lost, the last one because: {self.last_loss}"
        return "the evaluation ended before the others were ready"

    # ------------------------------------------------------------------ calls

    def call(self, member: Member, request: RunnerRequest, *, tag: int, now: float) -> None:
        """Send a request to a runner."""
        if not member.pending:
            member.heard = now
        member.pending.append((tag, request))
        member.probed = member.probed and not isinstance(request, SetWeights)
        self._backend.call(member.incarnation, request, tag=tag)

    def answered(self, reply: Reply, now: float) -> Member | None:
        """Note a reply; return its member, unless that is no longer one."""
        member = self.members.get(reply.call.runner)
        if member is None:
            return None
        member.heard = now
        if not isinstance(reply.call.request, Start) and not reply.lost:
            # By its tag: a large answer that is fetched from another node may come after a younger, small one.
            place = next(place for place, (tag, _) in enumerate(member.pending) if tag == reply.call.tag)
            del member.pending[place]
            member.probed = isinstance(reply.call.request, Run) or member.probed
            if reply.error is None:
                self._failing.discard(member.index)
            if isinstance(report := reply.value, RunReport):
                member.reported.update(episodes=len(report.rows), faults=len(report.faults), env_steps=report.env_steps)
        return member

    def start_answered(self, member: Member, now: float) -> None:
        """A runner is up: send it the weights, behind which all other calls queue."""
        member.ready = self.ever_ready = True
        if self.weights.sent is not None:
            self.call(member, SetWeights(self.weights.sent.handle), tag=0, now=now)

    def uses(self, request: SetWeights) -> bool:
        """Whether a request has the weights of the group, and not some that were withdrawn or replaced since."""
        return self.weights.sent is not None and request.weights is self.weights.sent.handle

    # ------------------------------------------------------------------ losses

    def raised(self, member: Member) -> bool:
        """Note that a start or a call raised; return whether that is so on every position that is left."""
        member.broken = True
        self._failing.add(member.index)
        positions = {*(other.index for other in self.members.values()), *(index for _, index in self._due)}
        return positions <= self._failing

    def terminate(self, member: Member, why: RunnerLost, *, broken: bool = False) -> None:
        """End a member that has gone wrong; its loss is reported when it is known what it was doing."""
        member.terminated = True
        member.broken = member.broken or broken
        self._backend.terminate(member.incarnation, why)

    def lose(self, member: Member, why: BaseException, now: float, *, free: bool = False) -> None:
        """Give a member up, and replace it later if the budget allows.

        Args:
            member: Which.
            why: What is known.
            now: The time.
            free: Whether the loss is not counted: an episode was charged with it, or the node was pre-empted.
        """
        self._remove(member)
        self.losses += 1
        self.last_loss = why
        counts = self._broken if member.broken else self._consecutive
        losses = counts[member.index]
        if free or losses < self._settings.fault_tolerance.max_runner_restarts:
            delay = _FIRST_BACKOFF_S if free else min(_LONGEST_BACKOFF_S, _FIRST_BACKOFF_S * 2**losses)
            counts[member.index] += not free
            self._due.append((now + delay, member.index))

    def exclude(self, member: Member, why: BaseException) -> None:
        """Give a member up for good."""
        self._remove(member)
        self.last_loss = why

    def progressed(self, member: Member | None = None) -> None:
        """Set the counts of losses back: an episode finished.

        Args:
            member: Where it finished; None if it was given up.
        """
        self._consecutive.clear()
        if member is not None:
            self._broken.pop(member.index, None)

    def tick(self, now: float) -> None:
        """Start the replacements that are due, and terminate the members that must be given up.

        Raises:
            RunnerStartError: No runner ever came up, for longer than ``runner_start_timeout_s``.
        """
        if not self.ever_ready and self._founded is not None:
            self._await_first(now - self._founded)
        for due in [item for item in self._due if item[0] <= now]:
            self._due.remove(due)
            self.restarts += 1
            self._spawn(due[1], now)
            self._tell_restart(due[1])
        for member in list(self.members.values()):
            if not member.terminated and (why := self._given_up(member, now)):
                self.terminate(member, why)

    def patience(self, now: float) -> float:
        """Seconds until something may be due, at most 1."""
        return max(0.0, min([1.0, *(when - now for when, _ in self._due)]))

    def _await_first(self, seconds: float) -> None:
        limit = self._settings.runners.runner_start_timeout_s
        if seconds > limit:
            raise RunnerStartError(
                f"no runner started within runners.runner_start_timeout_s={limit:g}: {self._backend.shortage()}",
                key="runners.runner_start_timeout_s",
                value=limit,
                fix="Request less, free or add resources, or wait longer.",
            )
        if seconds > _LONG_START_S and not self._told_of_waiting:
            self._told_of_waiting = True
            with suppress(Exception):  # As in absence().
                _logger.warning("no runner is ready after %.0f s. Waiting: %s", seconds, self._backend.shortage())

    def _given_up(self, member: Member, now: float) -> RunnerLost | None:
        if not member.ready:
            limit = self._settings.runners.runner_start_timeout_s
            if self.ever_ready and now - member.spawned > limit:
                return RunnerLost(
                    f"runner {member.index} did not start within {limit:g} s: {self._backend.shortage()}",
                    runner=member.index,
                )
            return None
        faults = self._settings.fault_tolerance
        # Agents on the nodes see to single steps and resets.
        limit_s = faults.runner_timeout_s or faults.episode_timeout_s
        # What a caller applies to the runners may take its time.
        working = bool(member.pending) and not isinstance(member.pending[0][1], Apply)
        if limit_s is None or not working or self._settings.runners.num_runners == 0:
            return None
        silence = now - member.heard
        if silence > silence_limit(limit_s, self.slice_s, probed=member.probed):
            why = f"runner {member.index} did not answer for {silence:.1f} s, longer than one call may take"
            return RunnerLost(why, runner=member.index)
        return None

    def _tell_restart(self, index: int) -> None:
        try:
            self.on_restart(index)
        except Exception:
            _logger.exception("the callback on_runner_restart raised; the group continues")

    def _spawn(self, index: int, now: float) -> None:
        incarnation = self._next_incarnation
        self._next_incarnation += 1
        self.members[incarnation] = Member(incarnation, index, now)
        self._backend.spawn(incarnation, index, self.weights.sent and self.weights.sent.handle)

    def _remove(self, member: Member) -> None:
        del self.members[member.incarnation]
        self.reported += member.reported
        self._backend.kill(member.incarnation)


def _gets_weights(member: Member) -> bool:
    # A copy, since other threads ask for the phase.
    return any(isinstance(request, SetWeights) for _, request in list(member.pending))


class PublishedWeights(NamedTuple):
    """Weights that every runner can fetch."""

    handle: Any
    """Argument of :class:`~rl_eval.backends.requests.SetWeights`."""
    snapshot: WeightsSnapshot


@final
class GroupWeights:
    """The one place that knows the weights of a group; its methods may be called from any thread.

    Args:
        initial: Weights that runners start with; None if each has those that its policy was built with.
    """

    def __init__(self, initial: PublishedWeights | None = None) -> None:
        self.sent = initial
        """Weights that runners get when they start, and that the next evaluation uses unless others are posted."""
        self.posted = initial
        """Weights that were posted last; they are sent when all jobs before them are done."""
        self._last_number = 0
        self._lock = threading.Lock()

    @property
    def posted_version(self) -> int:
        """Version of the weights that were posted last; 0 before any."""
        return 0 if self.posted is None else self.posted.snapshot.version

    def number(self, version: int | None = None) -> int:
        """Take a number for new weights, which the next ones go on from.

        Args:
            version: The number; by default one more than the last, that of refused weights included.

        Raises:
            TypeError: The version is not an integer.
        """
        with self._lock:
            self._last_number = self._last_number + 1 if version is None else operator.index(version)
            return self._last_number

    def post(self, weights: PublishedWeights) -> None:
        """Take weights that are about to be sent."""
        with self._lock:
            self.posted = weights

    def send(self, weights: PublishedWeights) -> PublishedWeights | None:
        """Make weights those of the runners; return those before."""
        with self._lock:
            former, self.sent = self.sent, weights
            return former

    def withdraw(self, refused: PublishedWeights, former: PublishedWeights | None) -> None:
        """Go back to former weights, unless others were posted meanwhile."""
        with self._lock:
            self.sent = former
            if self.posted is refused:
                self.posted = former

    def drop(self) -> None:
        """Drop all weights; cycles keep the group until the garbage collector runs."""
        self.sent = self.posted = None
