"""Errors for unknown attributes: the nearest name, or the counterpart of a name of RLlib's and TorchRL's workers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from rl_eval.errors import nearest

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
    """Return the error for an attribute that an object does not have. It names the counterpart or the nearest name.

    Args:
        owner: The object.
        name: Name of the attribute.
        counterpart: Counterpart of a name that is not one of :data:`COUNTERPARTS`; None if there is none.
        group: Description of the group in the message.
    """
    counterpart = COUNTERPARTS.get(name, counterpart)
    return _unknown(owner, name, "" if counterpart is None else f". Use {counterpart}, where group is {group}")


def _unknown(owner: object, name: str, advice: str = "") -> AttributeError:
    if not advice and not name.startswith("_"):
        near = nearest(name, (one for one in dir(owner) if not one.startswith("_")))
        advice = f": {near}" if near.startswith("did") else ""
    return AttributeError(f"{type(owner).__name__!r} object has no attribute {name!r}{advice}", name=name)


class KnowsNames:
    """Base class of objects that name the nearest attribute in the error for an unknown one."""

    __slots__ = ()

    if not TYPE_CHECKING:  # Type checkers reject unknown names themselves.

        def __getattr__(self, name: str) -> Any:
            raise _unknown(self, name)
