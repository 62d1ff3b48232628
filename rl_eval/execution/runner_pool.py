"""Pool of runners: their states, and the back-off before a lost runner is replaced.

Each position in the group (``index``) has one runner after another. A lost runner is replaced after a back-off that
doubles with each consecutive loss. A finished episode of any runner resets the back-off. After ``max_runner_restarts``
consecutive losses, the position stays empty. A loss does not count if an episode or a pre-empted node caused it. A
runner is *broken* if it cannot start, raises, or fails all its episodes. Then only a finished episode at the same
position resets the count of losses, because other positions may be on other machines.
"""

from __future__ import annotations

import logging
import math
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
from rl_eval.errors import PolicyUnavailable, RunnerLost, RunnerStartError
from rl_eval.records.episode import RunReport
from rl_eval.scheduling.runner_failures import silence_limit
from rl_eval.weights import WeightsSnapshot

_logger: Final = logging.getLogger(__name__)
_FIRST_BACKOFF_S: Final = 0.25
_LONGEST_BACKOFF_S: Final = 10.0
_LONG_START_S: Final = 15.0
"""Seconds without a ready runner before a warning. Imports take less time."""


@dataclass(slots=True)
class Member:
    """One runner at a position of the group."""

    number: int
    """Number of the runner; a runner that replaces it has another number."""
    position: int
    """Position in the group, which users see as ``runner_index``."""
    spawned: float
    starts: int = 1
    """Number of unanswered starts. Another start, with other settings, may come before the first answer."""
    ready: bool = False
    terminated: bool = False
    """Whether the runner is being terminated, and its death is not reported yet."""
    broken: bool = False
    """Whether the runner could not start, a call raised, or all its episodes failed although other runners completed
    episodes."""
    heard: float = 0.0
    """Time of the runner's last answer, or of its last call if it was idle before the call."""
    pending: deque[tuple[int, RunnerRequest]] = field(default_factory=deque)
    """Unanswered requests, each with the tag of its job. The first request is running."""
    probed: bool = False
    """Whether the runner has answered a :class:`Run` with its present weights. The first :class:`Run` also probes the
    policy."""
    reported: Counter[str] = field(default_factory=Counter)
    """Sums over the runner's reports, without those of the determinism check: episodes, faults, env_steps."""

    def count(self, report: RunReport) -> None:
        """Add a report to the counters."""
        self.reported.update(episodes=len(report.rows), faults=len(report.faults), env_steps=report.env_steps)

    def in_flight(self, tag: int) -> int:
        """Return the number of unanswered requests of a job."""
        return sum(other == tag for other, _ in self.pending)


class RunnerPool:
    """Starts, watches and replaces runners."""

    def __init__(self, backend: Backend, settings: EvalSettings, weights: GroupWeights | None = None) -> None:
        self._backend = backend
        self._settings = settings
        self.weights = GroupWeights() if weights is None else weights
        """Weights of the group. A starting runner gets them before any other request."""
        self.members: dict[int, Member] = {}
        self.restarts = 0
        """Number of replacements since the pool was built."""
        self.losses = 0
        """Number of runners that were lost since the pool was built."""
        self.reported: Counter[str] = Counter()
        """Counters of lost members."""
        self.last_loss: BaseException | None = None
        self.unavailable: PolicyUnavailable | None = None
        """Reason of the last loss, if the policy was unavailable, until a runner answers a :class:`Run`."""
        self.ever_ready = False
        self.on_restart: Callable[[int], object] = lambda _: None
        """Function that is called with the position of a runner that replaces another one."""
        self._next_number = 0
        self._next_index = 0
        self.positions: set[int] = set()
        """All positions, including those that stay empty after too many losses."""
        self._consecutive: Counter[int] = Counter()
        """Number of losses of each position since any runner finished an episode."""
        self._broken: Counter[int] = Counter()
        """Number of broken runners of each position since an episode finished at this position."""
        self._failing: set[int] = set()
        """Positions whose latest start or call raised."""
        self._due: list[tuple[float, int]] = []
        self.last_ready = math.inf
        """Time at which a runner was ready, or at which the first one was started."""
        self._told_of_waiting = False

    # ------------------------------------------------------------------ size

    def grow(self, count: int, now: float) -> None:
        """Add positions, and start a runner at each of them."""
        self.last_ready = min(now, self.last_ready)
        for _ in range(count):
            self.positions.add(self._next_index)
            self._spawn(self._next_index, now)
            self._next_index += 1

    def shrink(self, count: int) -> list[Member]:
        """Remove positions, and return their members.

        Positions that wait for a replacement come first, then the last positions.
        """
        waiting = sorted(self._due, key=lambda due: due[1])[-count:]
        self._due = [due for due in self._due if due not in waiting]
        rest = count - len(waiting)
        gone = sorted(self.members.values(), key=lambda member: member.position)[-rest:] if rest else []
        self.positions -= {index for _, index in waiting} | {member.position for member in gone}
        for member in gone:
            self._remove(member)
        return gone

    def reconfigure(self, settings: EvalSettings, payload: Any, weights: GroupWeights, now: float) -> None:
        """Start all runners again with other settings.

        Args:
            settings: The settings.
            payload: Settings and policy, from :meth:`rl_eval.backends.Backend.pack`.
            weights: Weights of the group.
            now: Present time.
        """
        self._settings, self._backend.payload, self.weights = settings, payload, weights
        self.renew(now)

    def renew(self, now: float) -> None:
        """Start all runners again, in their processes if possible. Reset the counts of losses."""
        self.ever_ready, self.last_ready, self._told_of_waiting, self.unavailable = False, now, False, None
        for noted in (self._consecutive, self._broken, self._failing, self._due):
            noted.clear()
        for member in list(self.members.values()):
            if not member.terminated:  # Otherwise its death is about to be reported, and it is replaced.
                self.reported += member.reported
                self._start(Member(member.number, member.position, now, member.starts + 1, pending=member.pending))
        for index in sorted(self.positions - {member.position for member in self.members.values()}):
            self._spawn(index, now)

    def ready(self) -> list[Member]:
        """Return the members that can work, by position."""
        # A copy, since other threads read it too.
        fit = [member for member in list(self.members.values()) if member.ready and not member.terminated]
        return sorted(fit, key=lambda member: member.position)

    def expected(self) -> int:
        """Return the number of members, including members that are starting and pending replacements."""
        return len(self.members) + len(self._due)

    @property
    def filled(self) -> set[int]:
        """Positions with a member or a pending replacement."""
        return {*(member.position for member in self.members.values()), *(index for _, index in self._due)}

    @property
    def slice_s(self) -> float:
        """Working time of a call in seconds: 0.1 s, or longer if there are more runners than one loop can handle."""
        return max(0.1, 0.002 * len(self.members))

    @property
    def hopeless(self) -> bool:
        """Whether the pool has no runner, and none will replace a lost one."""
        return not self.members and not self._due

    @property
    def phase(self) -> str:
        """Activity of the runners, in a few words."""
        ready = self.ready()
        if self.unavailable is not None:
            return "waiting for the policy"
        if not ready:
            return self._backend.starting([member.number for member in list(self.members.values())])
        if any(member.probed for member in ready):
            return "running"
        return "sending weights" if all(map(_gets_weights, ready)) else "probing the policy"

    def counters(self) -> dict[str, int]:
        """Return the sums over the reports of all members, including lost members."""
        # A copy, as in ready().
        return dict(sum((member.reported for member in list(self.members.values())), self.reported))

    def absence(self) -> str:
        """Return the reason why there are fewer runners than requested."""
        with suppress(Exception):  # A cluster that does not answer must not cost the result.
            if (most := self._backend.capacity()) is not None and most < self.expected():
                return self._backend.shortage()
        if self.losses:
            return f"the other runners were lost; last reason: {self.last_loss}"
        return "the evaluation ended before the other runners were ready"

    # ------------------------------------------------------------------ calls

    def call(self, member: Member, request: RunnerRequest, *, tag: int, now: float) -> None:
        """Send a request to a runner."""
        if not member.pending:
            member.heard = now
        member.pending.append((tag, request))
        member.probed = member.probed and not isinstance(request, SetWeights)
        self._backend.call(member.number, request, tag=tag)

    def answered(self, reply: Reply, now: float) -> Member | None:
        """Handle a reply. Return the member that sent it; None if this member was removed or starts again."""
        member = self.members.get(reply.call.runner)
        if member is None:
            return None
        member.heard = now
        if isinstance(reply.call.request, Start) and not reply.lost:
            member.starts -= 1
            return None if member.starts else member
        if not reply.lost:
            # By its tag: a large answer from another node may arrive after a later, small one.
            place = next(place for place, (tag, _) in enumerate(member.pending) if tag == reply.call.tag)
            del member.pending[place]
            member.probed = isinstance(reply.call.request, Run) or member.probed
            if reply.error is None:
                self._failing.discard(member.position)
                if isinstance(reply.call.request, Run):
                    self.unavailable = None
        return member

    def start_answered(self, member: Member, now: float) -> None:
        """Mark a runner as ready, and send it the weights before any other call."""
        member.ready = self.ever_ready = True
        member.probed = False  # A late report of the former runner may have set it.
        if self.weights.sent is not None:
            self.call(member, SetWeights(self.weights.sent.handle), tag=0, now=now)

    def uses(self, request: SetWeights) -> bool:
        """Whether a request contains the present weights of the group."""
        return self.weights.sent is not None and request.weights is self.weights.sent.handle

    # ------------------------------------------------------------------ losses

    def raised(self, member: Member) -> bool:
        """Record that a start or a call of a runner raised an error.

        Return whether the latest start or call raised an error at every remaining position.
        """
        member.broken = True
        self._failing.add(member.position)
        return self.filled <= self._failing

    def terminate(self, member: Member, why: RunnerLost, *, broken: bool = False) -> None:
        """Terminate a faulty member. Its loss is reported later, with its crash report."""
        member.terminated = True
        member.broken = member.broken or broken
        self._backend.terminate(member.number, why)

    def lose(self, member: Member, why: BaseException, now: float, *, free: bool = False) -> None:
        """Remove a member, and replace it later if the budget allows.

        Args:
            member: Lost member.
            why: Reason of the loss.
            now: Present time.
            free: Whether the loss does not count, because an episode or a pre-empted node caused it.
        """
        self._remove(member)
        self.losses += 1
        self.last_loss = why
        if isinstance(why, PolicyUnavailable) and self.unavailable is None:
            with suppress(Exception):  # A handler of the caller may raise.
                _logger.warning("the policy is unavailable: %s", why)
        self.unavailable = why if isinstance(why, PolicyUnavailable) else None
        counts = self._broken if member.broken else self._consecutive
        losses = counts[member.position]
        if free or losses < self._settings.fault_tolerance.max_runner_restarts:
            delay = _FIRST_BACKOFF_S if free else min(_LONGEST_BACKOFF_S, _FIRST_BACKOFF_S * 2**losses)
            counts[member.position] += not free
            self._due.append((now + delay, member.position))

    def exclude(self, member: Member, why: BaseException) -> None:
        """Remove a member without a replacement."""
        self._remove(member)
        self.last_loss = why

    def progressed(self, member: Member | None = None) -> None:
        """Reset the counts of losses, because an episode has finished.

        Args:
            member: Member that finished the episode; None if the episode was given up.
        """
        self._consecutive.clear()
        if member is not None:
            self._broken.pop(member.position, None)

    def tick(self, now: float) -> None:
        """Start due replacements, and terminate members that exceeded a time limit.

        Raises:
            RunnerStartError: No runner was ready within ``runner_start_timeout_s``.
            PolicyUnavailable: The same, because the policy was unavailable.
        """
        if self.ready() or self.hopeless:
            self.last_ready, self._told_of_waiting = now, False
        else:
            self._await_ready(now - self.last_ready)
        for due in [item for item in self._due if item[0] <= now]:
            self._due.remove(due)
            self.restarts += 1
            self._spawn(due[1], now)
            self._tell_restart(due[1])
        for member in list(self.members.values()):
            if not member.terminated and (why := self._given_up(member, now)):
                self.terminate(member, why)

    def patience(self, now: float) -> float:
        """Return the time until the next replacement of a lost runner, in seconds, at most 1."""
        return max(0.0, min([1.0, *(when - now for when, _ in self._due)]))

    def _await_ready(self, seconds: float) -> None:
        limit = self._settings.runners.runner_start_timeout_s
        if seconds > limit and not self.ever_ready:
            if self.unavailable is not None:
                raise self.unavailable
            problem = f"no runner started within runners.runner_start_timeout_s={limit:g}: {self._backend.shortage()}"
            fix = "Request fewer resources, add resources to the cluster, or wait longer."
            raise RunnerStartError(problem, key="runners.runner_start_timeout_s", value=limit, fix=fix)
        if seconds > _LONG_START_S and not self._told_of_waiting and self.unavailable is None:
            self._told_of_waiting = True
            with suppress(Exception):  # As in absence().
                _logger.warning("no runner is ready after %.0f s. Waiting: %s", seconds, self._backend.shortage())

    def _given_up(self, member: Member, now: float) -> RunnerLost | None:
        if not member.ready:
            limit = self._settings.runners.runner_start_timeout_s
            if self.ever_ready and now - member.spawned > limit:
                return RunnerLost(
                    f"runner {member.position} did not start within {limit:g} s: {self._backend.shortage()}",
                    runner=member.position,
                )
            return None
        faults = self._settings.fault_tolerance
        # Node agents check single steps and resets.
        limit_s = faults.runner_timeout_s or faults.episode_timeout_s
        # A caller's function has no time limit here.
        working = bool(member.pending) and not isinstance(member.pending[0][1], Apply)
        if limit_s is None or not working or self._settings.runners.num_runners == 0:
            return None
        silence = now - member.heard
        if silence > silence_limit(limit_s, self.slice_s, probed=member.probed):
            why = f"runner {member.position} did not answer for {silence:.1f} s, longer than one call may take"
            return RunnerLost(why, runner=member.position)
        return None

    def _tell_restart(self, index: int) -> None:
        try:
            self.on_restart(index)
        except Exception:
            _logger.exception("the callback on_runner_restart raised; the group continues")

    def _spawn(self, index: int, now: float) -> None:
        number = self._next_number
        self._next_number += 1
        self._start(Member(number, index, now))

    def _start(self, member: Member) -> None:
        self.members[member.number] = member
        self._backend.spawn(member.number, member.position, self.weights.sent and self.weights.sent.handle)

    def _remove(self, member: Member) -> None:
        del self.members[member.number]
        self.reported += member.reported
        self._backend.kill(member.number)


def _gets_weights(member: Member) -> bool:
    # A copy, since other threads read the phase.
    return any(isinstance(request, SetWeights) for _, request in list(member.pending))


class PublishedWeights(NamedTuple):
    """Weights that are available to every runner."""

    handle: Any
    """Argument of :class:`~rl_eval.backends.requests.SetWeights`."""
    snapshot: WeightsSnapshot


@final
class GroupWeights:
    """Weights of a group. Any thread may call the methods.

    Args:
        initial: Weights of starting runners; None if each runner keeps the initial weights of its policy.
    """

    def __init__(self, initial: PublishedWeights | None = None) -> None:
        self.sent = initial
        """Weights of starting runners. The next evaluation uses them, unless other weights are posted."""
        self.posted = initial
        """Weights that were posted last. They are sent after all earlier jobs."""
        self._last_number = 0
        self._lock = threading.Lock()

    @property
    def posted_version(self) -> int:
        """Version of the weights that were posted last; 0 if no weights were posted."""
        return 0 if self.posted is None else self.posted.snapshot.version

    def number(self, version: int | None = None) -> int:
        """Return the version of new weights. The next default version follows this version.

        Args:
            version: The version; by default one more than the last version, even if those weights were rejected.

        Raises:
            TypeError: The version is not an integer.
        """
        with self._lock:
            self._last_number = self._last_number + 1 if version is None else operator.index(version)
            return self._last_number

    def post(self, weights: PublishedWeights) -> None:
        """Store weights that are about to be sent."""
        with self._lock:
            self.posted = weights

    def send(self, weights: PublishedWeights) -> PublishedWeights | None:
        """Set the weights of the runners, and return the former weights."""
        with self._lock:
            former, self.sent = self.sent, weights
            return former

    def withdraw(self, refused: PublishedWeights, former: PublishedWeights | None) -> None:
        """Restore former weights, unless other weights were posted meanwhile."""
        with self._lock:
            self.sent = former
            if self.posted is refused:
                self.posted = former

    def drop(self) -> None:
        """Drop all weights now, because reference cycles keep the group in memory until the garbage collector runs."""
        self.sent = self.posted = None
