"""Registry of learner libraries: how its objects, texts and files are recognised, without an import of it.

The table of our own libraries is ``rl_eval.integrations.INTEGRATIONS``. Other packages add an :class:`Integration` by
an entry point of the group ``rl_eval.integrations``.

An adapter is a module with some of these functions:

- ``portable(value)``: a copy that can be pickled, and shares nothing with the trainer;
- ``as_policy(value, section, observation_space, action_space)``: the :class:`rl_eval.Policy` of an object;
- ``as_policies(value, names)``: policies by id, of an object that holds several;
- ``as_weights(value)``: its weights, as :func:`rl_eval.weights.snapshot_weights` takes them;
- ``for_environment(value, env)``: the policy with the statistics that a live environment has of observations;
- ``as_env(value)``: the :class:`gymnasium.Env` of an environment of the library;
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
"""Group of the entry points."""
_logger: Final = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Integration:
    """A learner library. All modules are named, and imported on first use."""

    name: str
    """Name of the library, and of the scheme of its models."""
    packages: tuple[str, ...] = ()
    """Packages of its classes: an object with such a class, or such a base class, goes to the adapter."""
    adapter: str = ""
    """Module with the functions above."""
    schemes: str = ""
    """``"module:attr"`` of a mapping of names to :class:`rl_eval.config.policy_sources.PolicyScheme`."""
    loaders: tuple[str, ...] = ()
    """Modules whose factories load models: a result has the digests of the files that such a factory is given, and an
    evaluation is refused if a file changes on the way."""
    endings: tuple[str, ...] = ("",)
    """Endings that its factories add to a path."""
    folders: bool = False
    """Whether its factories take folders, which are digested whole."""
    companions: str = ""
    """Glob of files that belong to a model and lie beside it."""
    distributions: tuple[str, ...] = ()
    """Distributions whose versions stand in the results of its models."""
    install: str = ""
    """Argument of ``pip install`` that brings the library."""
    watching_wrappers: tuple[str, ...] = ()
    """Beginnings of ``"module:Class"`` of environment wrappers that change no episode."""
    modelled_wrappers: tuple[str, ...] = ()
    """The same of wrappers whose work ``for_environment`` does to the observations."""
    advice: Mapping[str, str] = field(default_factory=dict)
    """Advice on a policy that cannot act, by a method that it has or an argument that it needs; ``{}`` is its name."""


@functools.cache
def integrations() -> tuple[Integration, ...]:
    """Return all libraries, our own first. An entry point that cannot be loaded is left out, with a warning."""
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


def integration_for(value: Any, function: str) -> Any:
    """Return a function of the adapter for an object, or None."""
    for base in type(value).__mro__:
        for one in integrations():
            if f"{base.__module__}.".startswith(tuple(f"{package}." for package in one.packages)):
                return getattr(importlib.import_module(one.adapter), function, None)
    return None


def loader_of(factory: Any) -> Integration | None:
    """Return the library whose model a factory, ``"module:attr"``, loads; None for any other factory."""
    module = factory.partition(":")[0] if isinstance(factory, str) else ""
    return next((one for one in integrations() if module in one.loaders), None)
