"""Registry of learner libraries.

It recognises the objects, strings and files of a library without importing the library.

The libraries that this package supports are in ``rl_eval.integrations.INTEGRATIONS``. Other packages add an
:class:`Integration` with an entry point of the group ``rl_eval.integrations``.

An adapter is a module with some of these functions:

- ``portable(value)``: a copy that can be pickled and shares nothing with the trainer;
- ``as_policy(value, section, observation_space, action_space)``: the :class:`rl_eval.Policy` of an object;
- ``as_policies(value, names)``: the policies by id, for an object with several policies;
- ``as_weights(value)``: the weights, for :func:`rl_eval.weights.snapshot_weights`;
- ``for_environment(value, env)``: the policy with the observation statistics of an environment object;
- ``environment_settings(value)``: the arguments of ``EvalConfig.environment`` that the policy needs;
- ``as_env(value)``: an environment of the library as a :class:`gymnasium.Env`;
- ``as_agents_env(value)``: the environment of several agents, or None.
"""

from __future__ import annotations

import functools
import importlib
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

GROUP: Final = "rl_eval.integrations"
"""Name of the entry-point group of other packages."""
RANDOM: Final = "rl_eval.policies.uniform:UniformPolicy"
"""Factory of the policy ``random``."""
SERVED: Final = "rl_eval.integrations.openpi:load_policy"
"""Factory of a policy on a server."""
FROZEN: Final = "rl_eval.integrations.normalizers:frozen"
"""Function that reads the statistics of a normalizer from a file."""
_logger: Final = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Integration:
    """A learner library. Modules are given by name and imported on first use."""

    name: str
    """Name of the library, and of the scheme of its models."""
    packages: tuple[str, ...] = ()
    """Packages of the library's classes. The adapter handles an object if its class or a base class is in one of
    them."""
    adapter: str = ""
    """Module with the functions above."""
    schemes: str = ""
    """``"module:attr"`` of a mapping of names to :class:`rl_eval.config.policy_sources.PolicyScheme`."""
    loaders: tuple[str, ...] = ()
    """Modules with factories that load models. A result records the digest of each file that a factory gets. An
    evaluation raises an error if a file changed after it was configured."""
    endings: tuple[str, ...] = ("",)
    """Suffixes that the factories add to a path."""
    folders: bool = False
    """Whether the factories of the library take folders. The digest then covers the whole folder."""
    companions: str = ""
    """Glob of files that belong to a model, in the model's folder."""
    distributions: tuple[str, ...] = ()
    """Distributions whose versions are recorded in the results of the library's models."""
    incidental: tuple[str, ...] = ()
    """Arguments of the factories on which no result depends, such as the address of a server. They are not part of an
    evaluation's identity."""
    install: str = ""
    """Argument of ``pip install`` for the library."""
    simulator: str = ""
    """``"module:attr"`` of a function ``(name, num_envs, **env_kwargs)`` that builds the
    :class:`rl_eval.runners.batched.simulator.BatchSimulator` of ``environment.env="NAME_OF_LIBRARY:name"``."""
    watching_wrappers: tuple[str, ...] = ()
    """Environment wrappers that do not change episodes, as prefixes of ``"module:Class"``."""
    learning_wrappers: Mapping[str, str] = field(default_factory=dict)
    """Environment wrappers with running statistics, as ``"module:Class"``, each with the name of the attribute that is
    true while the statistics change. An evaluation rejects such a wrapper, unless the attribute is false."""
    modelled_wrappers: tuple[str, ...] = ()
    """Wrappers that ``for_environment`` replaces with preprocessing of observations, as prefixes of
    ``"module:Class"``."""
    advice: Mapping[str, str] = field(default_factory=dict)
    """Advice for a policy that cannot act. A key is the name of a method of the policy, or of an argument that its
    factory needs. ``{}`` is replaced with the ``"module:attr"`` of the policy's class or factory."""


@functools.cache
def integrations() -> tuple[Integration, ...]:
    """Return all libraries, first those of this package. Skip, with a warning, entry points that cannot be loaded."""
    from importlib.metadata import entry_points

    found = list(importlib.import_module("rl_eval.integrations").INTEGRATIONS)
    for point in entry_points(group=GROUP):
        try:
            one = point.load()
        except Exception as error:
            _logger.warning("the integration %s (%s) cannot be loaded: %r", point.name, point.value, error)
            continue
        if isinstance(one, Integration):
            found.append(one)
        else:
            _logger.warning("the integration %s (%s) is a %s, not an Integration", point.name, point.value, type(one))
    return tuple(found)


def learning_wrappers() -> dict[str, str]:
    """Return :attr:`Integration.learning_wrappers` of all libraries."""
    return {name: flag for one in integrations() for name, flag in one.learning_wrappers.items()}


def library_of(value: Any) -> Integration | None:
    """Return the library of an object that has an adapter; None for any other object."""
    for base in type(value).__mro__:
        for one in integrations():
            if one.adapter and f"{base.__module__}.".startswith(tuple(f"{package}." for package in one.packages)):
                return one
    return None


def integration_for(value: Any, function: str) -> Any:
    """Return a function of the adapter of an object's library; None if there is no such adapter or function."""
    library = library_of(value)
    return getattr(importlib.import_module(library.adapter), function, None) if library else None


def loader_of(factory: Any) -> Integration | None:
    """Return the library of a factory ``"module:attr"`` that loads models; None for any other factory."""
    module = factory.partition(":")[0] if isinstance(factory, str) else ""
    return next((one for one in integrations() if module in one.loaders), None)


def simulator_for(env: Any) -> Integration | None:
    """Return the library that builds the batched simulator of an id such as ``jumanji:Snake-v1``; otherwise None."""
    library, colon, _ = env.partition(":") if isinstance(env, str) else ("", "", "")
    return next((one for one in integrations() if colon and one.simulator and one.name == library), None)
