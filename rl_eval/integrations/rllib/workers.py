"""Methods of RLlib's rollout workers for a group of runners: calls, filters, state, and nodes of runners.

The page "Filters, state and calls on runners" has a table of all methods. This module does not import RLlib.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Collection, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, final

from rl_eval.atomic_write import write_atomically
from rl_eval.errors import ConfigError, EvalError, WeightsError, nearest
from rl_eval.errors.other_names import no_attribute
from rl_eval.execution.group import EvalRunnerGroup
from rl_eval.integrations.rllib.filters import MeanStdFilter, Moments
from rl_eval.policies.normalization import NormalizedPolicy, Statistics, by_path
from rl_eval.policies.subject import DEFAULT_POLICY
from rl_eval.protocols import Policy
from rl_eval.runners import EvalRunner
from rl_eval.weights import module_of, snapshot_weights, tensors_of

Result = TypeVar("Result")


@final
class RolloutWorkers:
    """Methods of ``RolloutWorker`` and ``WorkerSet`` that an evaluation needs, for the runners of a group.

    Returned lists have one item per ready runner. With ``timeout_s``, a method waits until every runner has answered,
    as :meth:`rl_eval.EvalRunnerGroup.foreach_runner` does.

    Args:
        group: The runners.

    Example:
        >>> workers = RolloutWorkers(group)  # doctest: +SKIP
        >>> workers.foreach_env(lambda env: env.spec.id)  # doctest: +SKIP
        [['CartPole-v1', 'CartPole-v1']]
    """

    def __init__(self, group: EvalRunnerGroup) -> None:
        self._group = group

    if not TYPE_CHECKING:  # Type checkers reject unknown names themselves.

        def __getattr__(self, name: str) -> Any:
            raise no_attribute(self, name, f"group.{name}" if hasattr(EvalRunnerGroup, name) else None)

    # ------------------------------------------------------------------ environments and policies

    def foreach_env(self, function: Callable[[Any], Result], timeout_s: float | None = None) -> list[list[Result]]:
        """Call a function with every environment that exists. Return a list per runner, with one result per slot."""
        return self._group.foreach_runner(lambda runner: runner.foreach_env(function), timeout_s)

    def for_policy(
        self, function: Callable[[Policy], Result], policy_id: str = DEFAULT_POLICY, timeout_s: float | None = None
    ) -> list[Result]:
        """On every runner, call a function with one policy (without its filter). Return one result per runner.

        Raises:
            EvalError: No policy has this name.
        """
        return self._group.foreach_runner(lambda runner: function(_bare(_policy(runner, policy_id))), timeout_s)

    def foreach_policy(
        self, function: Callable[[Policy, str], Result], timeout_s: float | None = None
    ) -> list[list[Result]]:
        """On every runner, call a function with each policy (without its filter) and the policy's name.

        Return a list per runner, with one result per policy.
        """
        return self._group.foreach_runner(
            lambda runner: [function(_bare(policy), name) for name, policy in _policies(runner).items()], timeout_s
        )

    # ------------------------------------------------------------------ filters, weights, state

    def get_filters(self, flush_after: bool = False) -> dict[str, MeanStdFilter]:
        """Return the filters of one runner, by policy name. Policies without a filter are left out.

        Args:
            flush_after: Not used, because filters have no buffer.
        """
        return self._group.apply_to_one(_filters)

    def sync_filters(self, filters: Mapping[str, MeanStdFilter], version: int | None = None) -> int:
        """Send filters and the current weights to all runners, as a new weights version.

        Args:
            filters: New filters, by policy name. Policies that are not named keep their filters.
            version: Version of the weights in the records; by default one more than the last version.

        Returns:
            The version.

        Raises:
            WeightsError: A named policy has no filter, or the new filter does not fit the policy's observations.
                Then all runners keep their old filters.
        """
        from rl_eval.policies.normalized import tensors_of

        weights = self.get_weights()
        for name, one in filters.items():
            prefix = "" if name == DEFAULT_POLICY else f"{name}."
            weights |= {prefix + key: tensor for key, tensor in tensors_of(by_path(**one.frozen())).items()}
        return self._group.sync_weights(weights, version)

    def get_weights(self, policies: Collection[str] | None = None) -> dict[str, Any]:
        """Return the weights of one runner, including the filters, as tensors by name.

        Args:
            policies: Names of the policies whose weights are returned; by default all.

        Raises:
            EvalError: No policy has one of these names.
            WeightsError: The weights have extra state that is not a tensor.
        """
        return self._group.apply_to_one(partial(_weights, policies=policies))

    def save(self, path: str | Path) -> None:
        """Write the weights, the filters and their version to a safetensors file.

        Raises:
            WeightsError: The weights have extra state that is not a tensor.
        """
        from safetensors.torch import save_file

        weights, version = self.get_weights(), str(self._group.weights_version)
        write_atomically(Path(path), lambda temporary: save_file(weights, temporary, {"version": version}))

    def restore(self, path: str | Path) -> int:
        """Read a file that :meth:`save` wrote, and send its weights and filters to all runners; return their version.

        Raises:
            WeightsError: The weights do not fit, or :meth:`save` did not write the file.
            ConfigError: The file cannot be read.
        """
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(str(path), "pt") as file:
                weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
                version = int(file.metadata()["version"])
        except OSError as error:
            raise ConfigError(
                f"restore: {str(path)!r} cannot be read: {error.strerror or error}", key="path", value=str(path)
            ) from None
        except (SafetensorError, KeyError, TypeError, ValueError) as error:
            raise WeightsError(
                f"restore: {str(path)!r} was not written by save(): {error!r}", key="path", value=str(path)
            ) from None
        return self._group.sync_weights(weights, version) if weights else self._group.weights_version

    # ------------------------------------------------------------------ where they run

    def creation_args(self, timeout_s: float | None = None) -> list[dict[str, Any]]:
        """Return the settings and the index of every runner, as arguments to construct an equal runner."""
        return self._group.foreach_runner(
            lambda runner: {"settings": runner.settings, "runner_index": runner.runner_index}, timeout_s
        )

    def get_node_ip(self, timeout_s: float | None = None) -> list[str]:
        """Return the IP address of the node of every runner."""
        import ray

        return self._group.foreach_runner(lambda _: str(ray.util.get_node_ip_address()), timeout_s)

    def find_free_port(self, timeout_s: float | None = None) -> list[int]:
        """Return, for every runner, a TCP port that is free on its node now."""
        return self._group.foreach_runner(_free_port, timeout_s)


def as_remote(
    cls: type[EvalRunner],
    num_cpus: float | None = None,
    num_gpus: float | None = None,
    memory: int | None = None,
    resources: Mapping[str, float] | None = None,
) -> Any:
    """Return a runner's class as a class of Ray actors. ``.remote(settings, runner_index, policy)`` starts an actor.

    A group starts and restarts its own runners. Use this function to control a runner yourself.
    For an argument that is None, Ray's default applies.

    Args:
        cls: Class of the runner.
        num_cpus: Number of CPUs that Ray reserves for an actor.
        num_gpus: Number of GPUs, or a fraction of a GPU, that Ray reserves for an actor.
        memory: Heap memory that Ray reserves for an actor, in bytes.
        resources: Amounts of Ray's custom resources, by name.
    """
    import ray

    asked = {"num_cpus": num_cpus, "num_gpus": num_gpus, "memory": memory, "resources": resources}
    given = {name: value for name, value in asked.items() if value is not None}
    return ray.remote(**given)(cls) if given else ray.remote(cls)


def _policies(runner: EvalRunner) -> Mapping[str, Policy]:
    return getattr(runner, "policies", {DEFAULT_POLICY: runner.policy})


def _policy(runner: EvalRunner, name: str) -> Policy:
    policies = _policies(runner)
    if name not in policies:
        raise EvalError(f"there is no policy {name!r}; {nearest(name, policies)}", key="policy_id", value=name)
    return policies[name]


def _bare(policy: Policy) -> Policy:
    return policy.policy if isinstance(policy, NormalizedPolicy) else policy


def _filters(runner: EvalRunner) -> dict[str, MeanStdFilter]:
    policies = _policies(runner).items()
    found = {name: _filter_of(one.statistics()) for name, one in policies if isinstance(one, NormalizedPolicy)}
    return {name: one for name, one in found.items() if one.moments}


def _filter_of(statistics: Mapping[str, Statistics]) -> MeanStdFilter:
    parts = {path: (one.count, one.mean.copy(), one.var.copy()) for path, one in statistics.items()}
    return MeanStdFilter(
        {path: Moments(int(count), mean, var) for path, (count, mean, var) in parts.items() if count is not None}
    )


def _weights(runner: EvalRunner, policies: Collection[str] | None = None) -> dict[str, Any]:
    for name in policies or ():
        _policy(runner, name)
    module = module_of(runner.policy)
    weights = {} if module is None else tensors_of(snapshot_weights(module, runner.weights_version))
    if policies is None:
        return weights
    several = bool(runner.settings.policy.policies)
    return {
        key: one for key, one in weights.items() if (key.partition(".")[0] if several else DEFAULT_POLICY) in policies
    }


def _free_port(_: EvalRunner) -> int:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as free:
        free.bind(("", 0))
        return int(free.getsockname()[1])
