"""Laws of the control loop: whatever order answers and losses come in, every job gets its own answer."""

from dataclasses import replace
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

from rl_eval.backends import Call, Reply
from rl_eval.backends.requests import Apply as CallFunction
from rl_eval.backends.requests import GetWeightsVersion, Run, SetWeights, Start, Stop
from rl_eval.errors import ClusterError, RunnerLost, WeightsError
from rl_eval.execution.handle import EvalHandle
from rl_eval.execution.jobs import Apply, WeightsSync
from rl_eval.execution.opening import Opening
from rl_eval.execution.outcome import EvalOutcome
from rl_eval.execution.runner_pool import PublishedWeights
from rl_eval.scheduling.plan import EpisodePlan
from rl_eval.weights import snapshot_weights
from tests.unit.test_loop import World, played

EPISODES = 6
REQUESTS = ["send good", "send bad", "evaluate", "evaluate good", "evaluate bad", "apply"]
EVENTS = ["answer", "answer", "answer", "kill"]


class Cluster(World):
    """Runners that answer their calls in order, one at a time, and that can be killed."""

    def __init__(self, runners: int) -> None:
        super().__init__(runners, max_runner_restarts=1000)
        self.asked: list[tuple[str, int, Any]] = []
        """Requests, each with the version of the weights that it must have, and the job or the handle."""
        self.version = 0
        """Of the last good weights."""
        self.versions: dict[int, int] = {}
        """Of the weights that each runner has."""

    def ask(self, request: str) -> None:
        verb, _, kind = request.partition(" ")
        sync = self.weights(kind) if kind else None
        if verb == "apply":
            self.asked.append((request, 0, self.post(Apply(id))))
        elif verb == "send":
            self.asked.append((request, self.version, self.post(sync)))
        else:
            outcome = EvalOutcome(self.settings, EpisodePlan(EPISODES))
            if sync is not None:
                sync.evaluation = outcome.handle
                self.loop.post(sync)
            self.post(Opening(outcome, sync))
            self.asked.append((request, self.version, outcome.handle))

    def weights(self, kind: str) -> WeightsSync:
        version = len(self.asked) + 1
        if kind == "good":
            self.version = version
        return WeightsSync(PublishedWeights((kind, version), snapshot_weights({"w": torch.zeros(1)}, version)))

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
                report = played(request, self.pool.members[runner].index, broken=False)
                report.rows["weights_version"] = version = self.versions.get(runner, 0)
                return replace(report, weights_version=version)
            case SetWeights(("bad", _)):
                raise WeightsError("weights lack 'w'")
            case SetWeights((_, version)):
                self.versions[runner] = version
                return version
            case GetWeightsVersion():
                return self.versions.get(runner, 0)
            case Start() | CallFunction():
                return runner

    def lose(self, runner: int) -> None:
        self.turn(Reply(Call(runner, Stop(), 0), error=RunnerLost("killed"), lost=True))

    def settle(self) -> None:
        """Nothing is lost any more, and everybody answers."""
        for _ in range(300):
            if all(future(job).done() for _, _, job in self.asked):
                return
            self.now += 5.0
            self.turn()
            for runner in self.waiting():
                self.answer_one(runner)


def future(job: Any) -> Any:
    return job if isinstance(job, EvalHandle) else job.future


def check(request: str, version: int, job: Any) -> None:
    assert future(job).done(), f"{request}: nobody is told"
    error = future(job).exception()
    if request.endswith("bad"):
        assert isinstance(error, WeightsError), f"{request}: {error!r}"
    elif request == "apply":
        # What a call did before its only runner was lost, nobody knows.
        assert error is None or isinstance(error, ClusterError)
    else:
        assert error is None, f"{request}: {error!r}"
        if request == "send good":
            assert set(job.future.result()) == {version}
        else:
            result = job.result()
            assert (result.status, len(result.episodes)) == ("complete", EPISODES)
            assert {record.weights_version for record in result.episodes} == {version}


@given(
    runners=st.integers(1, 3),
    story=st.lists(
        st.sampled_from(REQUESTS) | st.tuples(st.sampled_from(EVENTS), st.integers(0, 5)), min_size=1, max_size=40
    ),
)
def test_every_job_gets_its_own_answer(runners: int, story: list[str | tuple[str, int]]) -> None:
    """Weights that are refused fail who sent them and nobody else; evaluations have those that were asked for."""
    world = Cluster(runners)
    for step in story:
        if isinstance(step, str):
            world.ask(step)
        elif step[0] == "answer" and (waiting := world.waiting()):
            world.answer_one(waiting[step[1] % len(waiting)])
        elif step[0] == "kill" and (alive := sorted(world.pool.members)):
            world.lose(alive[step[1] % len(alive)])
    world.settle()
    assert world.loop._fatal is None
    for asked in world.asked:
        check(*asked)
