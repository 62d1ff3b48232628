"""Subject of an evaluation: its policies, with policy objects beside the settings."""

from __future__ import annotations

import copy
import sys
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, final

import cloudpickle

from rl_eval.adapters import RANDOM, integration_for
from rl_eval.config.objects import name_of
from rl_eval.config.policy_sources import with_named_policies
from rl_eval.config.settings import EvalSettings, PolicySection, with_values
from rl_eval.errors import ConfigError, WeightsError, nearest
from rl_eval.weights import (
    WeightsSnapshot,
    check_tensors,
    is_distributed,
    load_weights_file,
    module_of,
    snapshot_weights,
    weights_of,
)

DEFAULT_POLICY: Final = "default_policy"
"""Id of the only policy."""
_LIVE: Final[dict[str, Any]] = {"policy_kwargs": {}, "weights": None, "weights_key": None, "normalizer": None}
"""Settings that do not apply to a policy object."""
_PROCESS: Final = uuid.uuid4().hex[:8]
"""Name of this process."""


@final
@dataclass(frozen=True, slots=True)
class Subject:
    """Policies of an evaluation: named policies in a section of settings, and policy objects.

    Settings of a group never contain a policy object. Results name its class.
    """

    section: PolicySection
    """Section ``policy`` of the settings, as results report it: with the name of each policy object."""
    objects: dict[str, Any] = field(default_factory=dict)
    """Policy objects by id. A single policy has the id ``DEFAULT_POLICY``."""

    def described(self, settings: EvalSettings) -> EvalSettings:
        """Return settings that describe these policies in results."""
        return settings.model_copy(update={"policy": self.section})

    def identity(self) -> dict[str, str]:
        """Return a text for each policy object that has no weights and cannot be pickled, as a session of onnxruntime.

        The text is the same only for the same object in the same process.
        """
        found = {}
        for name, policy in self.objects.items():
            if module_of(policy) is None:
                try:
                    cloudpickle.dumps(policy)
                except Exception:
                    key = name if self.section.policies else "policy"
                    found[key] = f"{name_of(policy)} of process {_PROCESS}, {id(policy):x}"
        return found

    def portable(self) -> Subject:
        """Return copies of the policies that can be unpickled without the devices and the trainer of the originals.

        Raises:
            WeightsError: A tensor of a policy cannot be copied.
        """
        return replace(self, objects={name: _portable(policy) for name, policy in self.objects.items()})

    def packed(self, settings: EvalSettings) -> tuple[EvalSettings, Any]:
        """Return the settings and the policy of a runner.

        The settings do not name the policy objects. The policy is a portable object, several such objects by id, or
        None.

        Raises:
            WeightsError: A tensor of a policy cannot be copied.
        """
        objects = self.portable().objects
        section = _with_policies(self.section, dict.fromkeys(objects))
        policy = objects if self.section.policies else objects.get(DEFAULT_POLICY)
        return settings.model_copy(update={"policy": section}), policy


def sections_of(section: PolicySection) -> Mapping[str, PolicySection]:
    """Return the policies by id: those of ``policy.policies``, otherwise the policy of the section."""
    return section.policies or {DEFAULT_POLICY: section}


def subject_of(settings: EvalSettings, policy: Any = None) -> tuple[EvalSettings, Subject]:
    """Separate policies from settings.

    Args:
        settings: Settings, which may contain policy objects.
        policy: Policy that replaces the configured policies: an object, a name, a mapping of ids to objects, or a
            subject. None for the configured policies.

    Returns:
        Settings that describe the policies, and the policies.

    Raises:
        ConfigError: There is no policy, or the settings of the policies are invalid. Or policies are configured by id,
            but ``policy`` is not a mapping, or it has an unknown id.
    """
    if isinstance(policy, Subject):
        return policy.described(settings), policy
    if isinstance(policy, str) and not settings.policy.policies:
        settings = _with_named(settings, policy)
    elif policy is not None:
        settings = settings.model_copy(update={"policy": _replaced(settings.policy, policy)})
    section = settings.policy
    _check_policies(section)
    given = {name: one.policy for name, one in sections_of(section).items() if not isinstance(one.policy, str)}
    named = _with_policies(section, {name: name_of(one) for name, one in given.items()})
    subject = Subject(named, given)
    return subject.described(settings), subject


def check_arguments(section: PolicySection) -> None:
    """Check that a policy object has no arguments for a factory.

    Raises:
        ConfigError: The policy object has such arguments.
    """
    if section.policy_kwargs and not isinstance(section.policy, str | None):
        problem = 'policy.policy_kwargs are arguments of a "module:factory", but policy.policy is a policy object'
        raise ConfigError(problem, key="policy.policy_kwargs", value=", ".join(section.policy_kwargs))


def _check_policies(section: PolicySection) -> None:
    """Check the policies of a section.

    Raises:
        ConfigError: A policy is missing. The section has several policies by id and settings of a single policy. Or
            ``policy_mapping_fn`` is set, but there are no policies by id. Or a policy object has arguments for a
            factory.
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
    for name, policy in sections_of(section).items():
        if policy.policy is None:
            key, passed = "policy.policy", "a policy object"
            if section.policies:
                key, passed = f"policy.policies.{name}.policy", f"a mapping with a policy object for {name!r}"
            fix = f'Set {key}, or pass {passed} as the argument "policy".'
            raise ConfigError(f"{key} is missing", key=key, fix=fix)


def configured_weights(section: PolicySection, live: Any = None, version: int = 0) -> WeightsSnapshot | None:
    """Return the weights of the configured file, or else those of the policy object; None if there are no weights.

    Args:
        section: One policy, or several by id. The result contains the weights of every policy with a file or a module.
        live: The policy object, or a mapping of policy objects by id.
        version: Version of weights from the file of a single policy. All other weights have version 0.

    Raises:
        ConfigError: A file cannot be read, or there is a key of the weights without a file.
    """
    if section.policies:
        live = live or {}
        found = {
            name: module_of(live.get(name)) if one.weights is None else load_weights_file(one.weights, one.weights_key)
            for name, one in section.policies.items()
        }
        found = {name: weights for name, weights in found.items() if weights is not None}
        return snapshot_weights(found, 0) if found else None
    if section.weights is not None:
        return snapshot_weights(load_weights_file(section.weights, section.weights_key), version)
    if section.weights_key is not None:
        problem = f"policy.weights_key is {section.weights_key!r}, but policy.weights is not set"
        fix = "Set policy.weights to the file, or remove the key."
        raise ConfigError(problem, key="policy.weights_key", value=section.weights_key, fix=fix)
    return weights_of(live)


def _replaced(section: PolicySection, policy: Any) -> PolicySection:
    """Return a section with policy objects in place of configured policies."""
    if not section.policies:
        return section.model_copy(update={**_reset(section), "policy": policy})
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
    return _with_policies(section, policy, **_LIVE)


def _with_policies(section: PolicySection, policies: Mapping[str, Any], **values: Any) -> PolicySection:
    """Return a section with other policies, by id, and other values for each of these policies."""
    changed = {
        name: sections_of(section)[name].model_copy(update={**values, "policy": policy})
        for name, policy in policies.items()
    }
    if section.policies:
        return section.model_copy(update={"policies": {**section.policies, **changed}})
    return changed.get(DEFAULT_POLICY, section)


def _with_named(settings: EvalSettings, policy: str) -> EvalSettings:
    """Return settings with a named policy. The name has the same forms as the key ``policy.policy``."""
    named = with_named_policies({"policy": {"policy": policy}})
    kept = {name: getattr(settings.policy, name) for name in settings.policy.model_fields_set}
    section = PolicySection.model_validate({**kept, **_reset(settings.policy), **named.pop("policy")})
    return with_values(settings.model_copy(update={"policy": section}), **named)


def _reset(section: PolicySection) -> dict[str, Any]:
    """Return reset values for the settings that belong to the configured policy, because another policy replaces it.

    Without a configured policy, nothing is reset: the settings already belong to the other policy.
    """
    if section.policy is None:
        return {}
    return {**_LIVE, "deterministic": True} if section.policy == RANDOM else _LIVE


def _portable(policy: Any) -> Any:
    """Return a policy that shares nothing with a device or a trainer; copy it only if necessary."""
    if (detach := integration_for(policy, "portable")) is not None:
        policy = detach(policy)
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(policy, torch.nn.Module):
        return policy
    if distributed := [name for name, tensor in policy.named_parameters() if is_distributed(tensor)]:
        fix = "Pass a module without DTensors as the policy of an Evaluator, and this module as weights."
        raise WeightsError(f"parameter {distributed[0]!r} of the policy is a DTensor", key=distributed[0], fix=fix)
    if all(tensor.device.type == "cpu" for tensor in [*policy.parameters(), *policy.buffers()]):
        return policy
    check_tensors(policy)
    return copy.deepcopy(policy).cpu()
