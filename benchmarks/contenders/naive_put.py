"""The obvious broadcast: ``ray.put(state_dict)``, and ``load_state_dict`` in every actor."""

from __future__ import annotations

from typing import Any

from benchmarks import scenarios
from benchmarks.contenders import base


class Holder:
    """An actor that holds the policy and nothing else."""

    def __init__(self, num_params: int) -> None:
        self._module = scenarios.wide_policy(num_params)

    def load(self, state: dict[str, Any]) -> float:
        """Take the weights; return one of them as the acknowledgement."""
        self._module.load_state_dict(state)
        return next(iter(self._module.parameters())).flatten()[0].item()


def broadcast(params: base.Params) -> dict[str, Any]:
    """Time put and loads, next to one memcpy of the same bytes."""
    module = scenarios.wide_policy(params["num_params"])
    with base.ray_cluster(num_cpus=params["runners"], object_store_gb=params["object_store_gb"]) as ray:
        remote = ray.remote(num_cpus=1)(Holder)
        actors = [remote.remote(params["num_params"]) for _ in range(params["runners"])]

        ray.get([actor.__ray_ready__.remote() for actor in actors])
        base.touch_store(ray, params["object_store_gb"])

        def send() -> None:
            state = ray.put(module.state_dict())
            first = next(iter(module.parameters())).flatten()[0].item()
            if ray.get([actor.load.remote(state) for actor in actors]) != [first] * len(actors):
                raise RuntimeError("an actor holds other weights than were sent")

        return base.broadcast_row(module, send, params["rounds"])


if __name__ == "__main__":
    base.run({"broadcast": broadcast})
