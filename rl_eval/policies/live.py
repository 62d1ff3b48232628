"""Policy objects in a config, and settings without policy objects, which can be sent to any process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from rl_eval.adapters import integration_for
from rl_eval.config.policy_sources import RANDOM, with_named_policies
from rl_eval.config.settings import EvalSettings, PolicySection, with_values
from rl_eval.errors import ConfigError, nearest
from rl_eval.weights import WeightsSnapshot, load_weights_file, module_of, snapshot_weights, weights_of

_LIVE: Final[dict[str, Any]] = {"policy_kwargs": {}, "weights": None, "weights_key": None}
"""Settings that do not apply to a policy object."""


def check_arguments(section: PolicySection) -> None:
    """Check that a policy object has no arguments for a factory.

    Raises:
        ConfigError: The policy object has such arguments.
    """
    if section.policy_kwargs and not (section.policy is None or isinstance(section.policy, str)):
        problem = 'policy.policy_kwargs are arguments of a "module:factory", but policy.policy is a policy object'
        raise ConfigError(problem, key="policy.policy_kwargs", value=", ".join(section.policy_kwargs))


def check_policies(section: PolicySection) -> None:
    """Check the policies of a section.

    Raises:
        ConfigError: The section has several policies by id and settings of a single policy, or one of the several
            policies is missing. Or ``policy_mapping_fn`` is set, but there are no policies by id. Or a policy object
            has arguments for a factory.
    """
    for one in (section, *section.policies.values()):
        check_arguments(one)
    if not section.policies and section.policy_mapping_fn is not None:
        problem = "policy.policy_mapping_fn is set, but policy.policies is empty"
        raise ConfigError(problem, key="policy.policy_mapping_fn", fix="Name the policies in policy.policies.")
    for key in ("policy", *_LIVE) if section.policies else ():
        if getattr(section, key):
            problem = f"policy.{key} is set together with policy.policies"
            fix = "Set this key for each policy in policy.policies instead."
            raise ConfigError(problem, key=f"policy.{key}", value=getattr(section, key), fix=fix)
    for name, policy in section.policies.items():
        if policy.policy is None:
            problem = f"policy.policies.{name}.policy is missing"
            fix = f'Set this key, or pass a mapping with a policy object for {name!r} as the argument "policy".'
            raise ConfigError(problem, key=f"policy.policies.{name}.policy", fix=fix)


def live_policies(section: PolicySection) -> dict[str, Any]:
    """Return the policy objects of several policies, by id."""
    return {name: one.policy for name, one in section.policies.items() if not isinstance(one.policy, str)}


def configured_weights(section: PolicySection, live: Any = None, version: int = 0) -> WeightsSnapshot | None:
    """Return the weights of the configured file, or else those of the policy object; None if there are no weights.

    Args:
        section: One policy, or several by id. The result contains the weights of every policy with a file or a module.
        live: The policy object, or a mapping of policy objects by id.
        version: Version of weights from the file of a single policy. All other weights have version 0.

    Raises:
        ConfigError: A file cannot be read.
    """
    if section.policies:
        return _weights_of_each(section, live or {})
    if section.weights is not None:
        return snapshot_weights(load_weights_file(section.weights, section.weights_key), version)
    return weights_of(live)


def _weights_of_each(section: PolicySection, live: Mapping[str, Any]) -> WeightsSnapshot | None:
    found = {
        name: module_of(live.get(name)) if one.weights is None else load_weights_file(one.weights, one.weights_key)
        for name, one in section.policies.items()
    }
    found = {name: weights for name, weights in found.items() if weights is not None}
    return snapshot_weights(found, 0) if found else None


def with_live(settings: EvalSettings, policy: Any) -> EvalSettings:
    """Return settings in which ``policy`` replaces the configured policies.

    ``policy`` is an object, a name, or a mapping of ids to objects.

    Raises:
        ConfigError: Policies are configured by id, but ``policy`` is not a mapping, or it has an unknown id.
    """
    section = settings.policy
    if isinstance(policy, str) and not section.policies:
        return _with_named(settings, policy)
    if not section.policies:
        return with_values(settings, policy={**_replaced(section), "policy": policy})
    if (divide := integration_for(policy, "as_policies")) is not None:
        policy = divide(policy, tuple(section.policies))
    if not isinstance(policy, Mapping):
        problem = f"the policy is a {type(policy).__name__}, but policy.policies has {', '.join(section.policies)}"
        fix = "Pass a mapping from these ids to policy objects."
        raise ConfigError(problem, key="policy", value=type(policy).__name__, fix=fix)
    for name in policy:
        if name not in section.policies:
            problem = f"policy has {name!r}, which is not in policy.policies: {nearest(str(name), section.policies)}"
            raise ConfigError(problem, key="policy", value=name)
    live = {name: section.policies[name].model_copy(update={**_LIVE, "policy": one}) for name, one in policy.items()}
    return with_values(settings, policy={"policies": {**section.policies, **live}})


def _replaced(section: PolicySection) -> dict[str, Any]:
    """Return reset values for the settings that belong to the configured policy, because another policy replaces it.

    Without a configured policy, nothing is reset: the settings already belong to the other policy.
    """
    if section.policy is None:
        return {}
    return {**_LIVE, "deterministic": True} if section.policy == RANDOM else _LIVE


def _with_named(settings: EvalSettings, policy: str) -> EvalSettings:
    """Return settings with a named policy. The name has the same forms as the key ``policy.policy``."""
    named = with_named_policies({"policy": {"policy": policy}})
    kept = {name: getattr(settings.policy, name) for name in settings.policy.model_fields_set}
    section = PolicySection.model_validate({**kept, **_replaced(settings.policy), **named.pop("policy")})
    return with_values(settings.model_copy(update={"policy": section}), **named)


def without_live(settings: EvalSettings) -> EvalSettings:
    """Return settings without the policy objects; named policies stay."""
    section = settings.policy
    if not section.policies:
        return with_live(settings, None)
    policies = {
        name: one if isinstance(one.policy, str) else one.model_copy(update={**_LIVE, "policy": None})
        for name, one in section.policies.items()
    }
    return with_values(settings, policy={"policies": policies})
