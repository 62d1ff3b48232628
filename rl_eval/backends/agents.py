"""Node agents of a group: one agent on each node with runners.

If deadlines are configured, an agent starts with the first runner of its node. Otherwise, agents start after the first
runner was lost.
"""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any, Final, final

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rl_eval.supervision.node_agent import Deadlines, NodeAgent
from rl_eval.supervision.processes import ProcessInfo, end_runner, erase_recordings

_MAX_AGENTS_PER_NODE: Final = 10
_CONCURRENCY: Final = 64
"""Maximum number of dead runners that are examined at the same time. Each examination takes up to half a second."""


@final
class NodeAgents:
    """Node agents of a group. A dead agent is replaced.

    Args:
        deadlines: Deadlines after which agents terminate a runner.
        runtime_env: Ray runtime environment that contains this package.
        at_once: Whether an agent starts with the first runner of its node. Otherwise, agents start after the first
            loss.
    """

    def __init__(self, deadlines: Deadlines, runtime_env: dict[str, Any], *, at_once: bool) -> None:
        self._deadlines = deadlines
        self._needed = at_once
        # The hook prepares a process for environments and policies. An agent has neither.
        plain = {key: value for key, value in runtime_env.items() if key != "worker_process_setup_hook"}
        self._actor_class = ray.remote(NodeAgent)
        self._options = {"num_cpus": 0, "max_concurrency": _CONCURRENCY, "max_restarts": 0, "runtime_env": plain}
        self._agents: dict[str, Any] = {}
        self._spawned: Counter[str] = Counter()
        self._processes: dict[int, tuple[ProcessInfo, partial[None]]] = {}
        """Process of each running runner, and the function with which Ray terminates the process."""
        self._settling: dict[Any, tuple[int, partial[None]]] = {}
        self._ended: set[int] = set()
        """Runners that were terminated before their process was known."""
        self._watches: dict[Any, str] = {}

    @property
    def refs(self) -> list[Any]:
        """References of pending calls. Pass the reference of a finished call to :meth:`ended`."""
        return [*self._settling, *self._watches]

    def knows(self, runner: int) -> bool:
        """Whether the process of a runner is known."""
        return runner in self._processes

    def expect(self, runner: int, actor: Any) -> None:
        """Ask a new runner for a description of its process."""
        self._settling[actor.settle.remote()] = runner, partial(ray.kill, actor)

    def ended(self, ref: Any) -> None:
        """Handle a finished call; ignore calls that are not in :attr:`refs`."""
        if ref in self._watches:
            self._replace(self._watches.pop(ref))
            return
        if ref not in self._settling:
            return
        runner, killer = self._settling.pop(ref)
        try:
            self._processes[runner] = ray.get(ref), killer
        except RayError:
            return  # The runner's other calls fail as well.
        if self._needed:
            self._watch(runner)
        if runner in self._ended:
            self._ended.remove(runner)
            self.end(runner)

    def _start_all(self) -> None:
        """Watch all runners from now on, after a loss."""
        if not self._needed:
            self._needed = True
            for runner in self._processes:
                self._watch(runner)

    def crash_report(self, runner: int) -> Any:
        """Ask for the crash report of a dead runner.

        Return the pending call; None if the runner's process is unknown.
        """
        found = self._processes.pop(runner, None)
        self._start_all()
        return None if found is None else self._agent(found[0].node_id).crash_report.remote(runner, *found)

    def end(self, runner: int) -> None:
        """Terminate a runner's process and its child processes, if the runner's node has an agent."""
        if any(runner == settling for settling, _ in self._settling.values()):
            self._ended.add(runner)
        found = self._processes.pop(runner, None)
        if found is not None and (agent := self._agents.get(found[0].node_id)) is not None:
            agent.end.remote(runner)

    def end_on(self, node_id: str) -> None:
        """Terminate the runners on this process's node directly, without the node agent.

        The raylet of the node has died, and the agent has died with the raylet.
        """
        for process_info, _ in self._processes.values():
            if process_info.node_id == node_id:
                end_runner(process_info)
                erase_recordings(process_info)

    def stop(self, timeout_s: float) -> None:
        """Terminate all remaining runners, and then the agents."""
        # An agent that is killed in the middle of a call makes Ray print a warning.
        stopping = [*(agent.stop.remote() for agent in self._agents.values()), *self._watches]
        if stopping:
            ray.wait(stopping, num_returns=len(stopping), timeout=timeout_s)
        for agent in self._agents.values():
            ray.kill(agent)
        self._agents, self._watches, self._settling = {}, {}, {}

    def _watch(self, runner: int) -> None:
        process_info, killer = self._processes[runner]
        self._agent(process_info.node_id).watch.remote(runner, process_info, killer)

    def _agent(self, node_id: str) -> Any:
        if node_id not in self._agents:
            where = NodeAffinitySchedulingStrategy(node_id, soft=False)
            agent = self._actor_class.options(scheduling_strategy=where, **self._options).remote(self._deadlines)
            self._agents[node_id] = agent
            self._spawned[node_id] += 1
            self._watches[agent.wait_closed.remote()] = node_id
        return self._agents[node_id]

    def _replace(self, node_id: str) -> None:
        """Replace a dead or broken agent, if its node is still alive."""
        if (agent := self._agents.pop(node_id, None)) is not None:
            ray.kill(agent)
        lives = any(node["NodeID"] == node_id and node["Alive"] for node in ray.nodes())
        if lives and self._spawned[node_id] < _MAX_AGENTS_PER_NODE:
            for runner, (process_info, _) in self._processes.items():
                if process_info.node_id == node_id:
                    self._watch(runner)
