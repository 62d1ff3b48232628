"""Laws of the control loop: whatever order answers and losses come in, every job gets its own answer."""

from dataclasses import replace
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_eval.backends import Call, Reply
from rl_eval.backends.requests import Apply, GetWeightsVersion, Run, SetWeights, Start, Stop
from rl_eval.errors import ClusterError, RunnerLost, WeightsError
from rl_eval.execution.handle import EvalHandle
from rl_eval.execution.jobs import ApplyToReady, WeightsSync
from rl_eval.execution.opening import Opening
from rl_eval.execution.outcome import EvalOutcome
from rl_eval.execution.runner_pool import PublishedWeights
from rl_eval.runners import layout_of
from rl_eval.scheduling.plan import EpisodePlan
from rl_eval.weights import snapshot_weights
from tests.unit.test_loop import World, played

EPISODES = 6
REQUESTS = ["send good", "send bad", "evaluate", "evaluate good", "evaluate bad", "apply"]
EVENTS = ["answer", "answer", "answer", "kill", "cancel"]


class Cluster(World):
    """Runners that answer their calls in order, one at a time, and that can be killed."""

    def __init__(self, runners: int) -> None:
        super().__init__(runners, max_runner_restarts=1000)
        self.asked: list[tuple[str, Any]] = []
        """Requests, each with the job or the handle."""
        self.cancelled: list[EvalHandle] = []
        self.versions: dict[int, int] = {}
        """Of the weights that each runner has."""

    def ask(self, request: str) -> None:
        verb, _, kind = request.partition(" ")
        version = len(self.asked) + 1
        sync = WeightsSync(PublishedWeights((kind, version), snapshot_weights({"w": torch.zeros(1)}, version)))
        if verb == "apply":
            self.asked.append((request, self.post(ApplyToReady(id))))
        elif verb == "send":
            self.asked.append((request, self.post(sync)))
        else:
            outcome = EvalOutcome(self.settings, layout_of(self.settings), EpisodePlan(EPISODES))
            self.asked.append((request, outcome.handle))
            if kind:
                sync.evaluation = outcome.handle
                self.loop.post(sync)
            self.post(Opening(outcome, sync if kind else None))

    def sent(self, asked: int) -> set[int]:
        """Versions that a request may have: of the last good weights, or before if an evaluation needs them no more."""
        versions = set()
        for version, (request, job) in reversed([*enumerate(self.asked[: asked + 1], 1)]):
            if request.endswith("good"):
                versions.add(version)
                if job not in self.cancelled:
                    return versions
        return versions | {0}

    def waiting(self) -> list[int]:
        """Runners with calls to answer."""
        return sorted({runner for runner, *_ in self.backend.calls})

    def answer_one(self, runner: int) -> None:
        """The runner answers the call that it got first."""
        call = next(call for call in self.backend.calls if call[0] == runner)
        self.backend.calls.remove(call)
        try:
            self.turn(Reply(Call(*call), self.value(*call[:2])))
        except WeightsError as error:
            self.turn(Reply(Call(*call), error=error))

    def value(self, runner: int, request: Any) -> Any:
        match request:
            case Run():
                report = played(request, self.pool.members[runner].position, failing=())
                report.rows["weights_version"] = version = self.versions.get(runner, 0)
                return replace(report, weights_version=version)
            case SetWeights(("bad", _)):
                raise WeightsError("weights lack 'w'")
            case SetWeights((_, version)):
                self.versions[runner] = version
                return version
            case GetWeightsVersion():
                return self.versions.get(runner, 0)
            case Start() | Apply():
                return runner

    def lose(self, runner: int) -> None:
        self.turn(Reply(Call(runner, Stop(), 0), error=RunnerLost("killed"), lost=True))

    def cancel(self, place: int) -> None:
        running = [job for _, job in self.asked if isinstance(job, EvalHandle) and not job.done()]
        if running:
            self.cancelled.append(running[place % len(running)])
            self.cancelled[-1].cancel()
            self.turn()

    def settle(self) -> None:
        """Stop losing runners; every runner answers."""
        for _ in range(300):
            if all(future(job).done() for _, job in self.asked):
                return
            self.now += 5.0
            self.turn()
            for runner in self.waiting():
                self.answer_one(runner)


def future(job: Any) -> Any:
    return job if isinstance(job, EvalHandle) else job.future


def check(world: Cluster, place: int) -> None:
    request, job = world.asked[place]
    assert future(job).done(), f"{request}: nobody is told"
    error = future(job).exception()
    if request.startswith("evaluate") and error is None:
        result = job.result()
        assert {record.weights_version for record in result.episodes} <= world.sent(place)
        if job in world.cancelled:
            return
        assert (result.status, len(result.episodes)) == ("complete", EPISODES)
    if request.endswith("bad"):
        assert isinstance(error, WeightsError), f"{request}: {error!r}"
    elif request == "apply":
        # What a call did before its only runner was lost, nobody knows.
        assert error is None or isinstance(error, ClusterError)
    else:
        assert error is None, f"{request}: {error!r}"


@settings(max_examples=100)
@given(
    runners=st.integers(1, 3),
    story=st.lists(
        st.sampled_from(REQUESTS) | st.tuples(st.sampled_from(EVENTS), st.integers(0, 5)), min_size=1, max_size=40
    ),
)
def test_every_job_gets_its_own_answer(runners: int, story: list[str | tuple[str, int]]) -> None:
    """Rejected weights fail only their own job; every evaluation has the weights of its request."""
    world = Cluster(runners)
    for step in story:
        if isinstance(step, str):
            world.ask(step)
        elif step[0] == "answer" and (waiting := world.waiting()):
            world.answer_one(waiting[step[1] % len(waiting)])
        elif step[0] == "kill" and (alive := sorted(world.pool.members)):
            world.lose(alive[step[1] % len(alive)])
        elif step[0] == "cancel":
            world.cancel(step[1])
    world.settle()
    assert world.loop._fatal is None
    for place in range(len(world.asked)):
        check(world, place)
