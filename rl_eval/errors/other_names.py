"""Names of RLlib's and TorchRL's workers, with the names of their counterparts, for error messages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

_WORKERS: Final = "RolloutWorkers(group)"

COUNTERPARTS: Final[Mapping[str, str]] = {
    **dict.fromkeys(
        (
            *("apply", "cascade_execute", "foreach_env_runner", "foreach_env_runner_async", "foreach_worker"),
            *("foreach_worker_with_id", "get_spaces"),
        ),
        "group.foreach_runner",
    ),
    **dict.fromkeys(
        (
            *("assert_healthy", "healthy_env_runner_ids", "healthy_worker_ids", "num_healthy_env_runners"),
            *("num_healthy_remote_env_runners", "num_healthy_remote_workers", "num_healthy_workers"),
            *("num_remote_env_runners", "num_remote_workers", "ping", "probe_unhealthy_env_runners"),
            *("probe_unhealthy_workers", "remote_collectors", "remote_workers"),
        ),
        "group.healthy_runner_ids",
    ),
    **dict.fromkeys(("local_env_runner", "local_worker"), "group.apply_to_one"),
    **dict.fromkeys(("gen_rollouts", "sample_with_count"), "group.sample"),
    **dict.fromkeys(
        ("set_weights", "sync_env_runner_states", "sync_policies", "update_policy_weights_"), "group.sync_weights"
    ),
    **dict.fromkeys(("add_collectors", "add_workers"), "group.add_runners"),
    **dict.fromkeys(("num_env_runners_dropped_lifetime", "num_remote_worker_restarts"), "group.get_metrics"),
    **dict.fromkeys(("async_shutdown", "shutdown"), "group.stop"),
    "reset": "group.reconfigure",
    **{
        name: f"{_WORKERS}.{name}"
        for name in (
            *("creation_args", "find_free_port", "for_policy", "foreach_env", "foreach_policy", "get_filters"),
            *("get_node_ip", "get_weights", "restore", "save", "sync_filters"),
        )
    },
    "foreach_env_with_context": f"{_WORKERS}.foreach_env",
    "get_policy": f"{_WORKERS}.for_policy",
    **dict.fromkeys(("foreach_policy_to_train", "foreach_trainable_policy"), f"{_WORKERS}.foreach_policy"),
    "get_host": f"{_WORKERS}.get_node_ip",
    "get_state": f"{_WORKERS}.get_weights",
    **dict.fromkeys(("restore_from_path", "set_state"), f"{_WORKERS}.restore"),
    **dict.fromkeys(("export_policy_checkpoint", "export_policy_model", "save_to_path"), f"{_WORKERS}.save"),
}
"""Counterpart of each name, for a ``group`` of runners."""


def no_attribute(
    owner: object, name: str, counterpart: str | None = None, group: str = "the EvalRunnerGroup"
) -> AttributeError:
    """Return the error for an attribute that an object does not have.

    Args:
        owner: The object.
        name: Name of the attribute.
        counterpart: Counterpart of a name that is not one of :data:`COUNTERPARTS`; None if there is none.
        group: Description of the group in the message.
    """
    text = f"{type(owner).__name__!r} object has no attribute {name!r}"
    counterpart = COUNTERPARTS.get(name, counterpart)
    advice = "" if counterpart is None else f". Use {counterpart}, where group is {group}"
    return AttributeError(f"{text}{advice}", name=name, obj=owner)
