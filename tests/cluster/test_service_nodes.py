"""Whose object the weights of a waiting request are, when the client's machine is gone."""

from pathlib import Path
from typing import Any

import pytest
import ray
from machines import many_nodes
from service_world import ROOT, echo
from waiting import eventually

from rl_eval import Evaluator
from rl_eval.training.service.client import end_service

pytestmark = [pytest.mark.ray, pytest.mark.slow]

MEGABYTES = 8
"""Small objects travel with the message, whoever owns them."""


def test_what_a_client_sent_outlives_the_clients_node(tmp_path: Path) -> None:
    """A client's node dies after the acknowledgement; its requests are evaluated with its weights."""
    gate = tmp_path / "gate"
    with many_nodes(1) as cluster:
        paths = {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests' / 'cluster'}"}
        config, policy = echo(str(gate), runtime_env={"env_vars": paths})
        policy.register_buffer("ballast", _ballast(0))
        with Evaluator(config, policy, name="eval", client="owner") as ev:
            running = ev.submit(step=1)
            assert eventually(lambda: running.progress().num_runners == 1)
            node = cluster.add_node(num_cpus=1, resources={"away": 1}, object_store_memory=80 * 1024**2)
            client = ray.remote(_client()).options(num_cpus=0, resources={"away": 1}).remote()
            where, tickets = ray.get(client.submit.remote())
            assert where == node.node_id
            assert tickets == [(2, 1), (3, 2)]
            cluster.remove_node(node, allow_graceful=False)
            assert eventually(lambda: not any(one["NodeID"] == where and one["Alive"] for one in ray.nodes()))
            gate.touch()
            running.result(60)
            with Evaluator.from_name("eval", client="away") as back:
                assert [(handle.step, handle.weights_version) for handle in back.resumed] == [(2, 1), (3, 2)]
                assert [handle.result(60).mean_return for handle in back.resumed] == [20.0, 30.0]
            end_service("eval", "rl_eval")


def _ballast(value: float) -> Any:
    import torch

    return torch.full((MEGABYTES * 2**18,), float(value))


def _client() -> Any:
    """Return the class of a trainer on another node."""
    megabytes = MEGABYTES

    class Client:
        def submit(self) -> Any:
            import torch

            self.ev = Evaluator.from_name("eval", client="away", busy_policy="queue")
            handles = []
            for step in (2, 3):
                ballast = torch.full((megabytes * 2**18,), 1.0)
                handles.append(self.ev.submit({"weight": torch.full((1, 1), 10.0 * step), "ballast": ballast}, step))
            tickets = [(handle.step, handle.weights_version) for handle in handles]
            return ray.get_runtime_context().get_node_id(), tickets

    return Client
