"""References in a config: import of ``"module:attr"``, and checks of the signature of the imported function."""

from __future__ import annotations

import difflib
import functools
import importlib
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from rl_eval.adapters import integrations
from rl_eval.errors import ConfigError

_OBSERVATIONS: Final = ("obs", "observation", "observations")
"""Parameter names of functions that return actions. A function whose parameter has another name is a factory."""


def dotted(path: str) -> str:
    """Return a reference with dots instead of a path: ``my_package.envs:make`` for ``my_package/envs.py:make``."""
    module_name, colon, attribute = path.partition(":")
    return f"{module_name.removesuffix('.py').strip('./').replace('/', '.')}{colon}{attribute}"


def import_attribute(key: str, path: str) -> Any:
    """Import ``"module:attr"`` (attr may be dotted) and return the object.

    Raises:
        ConfigError: The string has no colon, or the module or attribute cannot be imported; the message names ``key``.
    """
    module_name, _, attribute = path.partition(":")
    if not module_name or not attribute:
        raise ConfigError(f"{key} is {path!r}", key=key, value=path, fix='Write "module:attr".')
    try:
        found: Any = importlib.import_module(module_name)
        for part in attribute.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        missing = str(error.name).partition(".")[0] if isinstance(error, ImportError) else ""
        install = next((one.install for one in integrations() if missing in one.packages and one.install), "")
        fix = f"Install the package: pip install '{install}'" if install else ""
        if isinstance(error, ModuleNotFoundError) and error.name == module_name.partition(".")[0] and not fix:
            fix = "Run in the folder that contains the module, or add this folder to PYTHONPATH."
        if close := difflib.get_close_matches(attribute, dir(sys.modules.get(module_name)), n=1):
            fix = f"Did you mean '{module_name}:{close[0]}'?"
        if module_name.endswith(".py"):
            fix = f"Name the module, not its file: {dotted(path)!r}."
        raise ConfigError(
            f"{key} is {path!r}, which cannot be imported: {error}", key=key, value=path, fix=fix
        ) from error
    return found


def named_factories(key: str, configured: Sequence[Any]) -> dict[str, Callable[..., Any]]:
    """Return the factories in a config, by name: ``"module:attr"`` as it is written, or the name of an object.

    Raises:
        ConfigError: A factory cannot be imported or called, or two have the same name.
    """
    found: dict[str, Callable[..., Any]] = {}
    for given in configured:
        factory = import_attribute(key, given) if isinstance(given, str) else given
        if not callable(factory):
            problem, fix = f"{key} has {given!r}, which is not callable", "Pass a class or another factory."
            raise ConfigError(problem, key=key, value=given, fix=fix)
        named = given.func if isinstance(given, functools.partial) else given
        name = given if isinstance(given, str) else getattr(named, "__qualname__", type(named).__qualname__)
        if name in found:
            problem = f"{key} has {name!r} twice: outputs are named after factories, so the names must differ"
            raise ConfigError(problem, key=key, value=name, fix="Remove or rename one of the factories.")
        found[name] = factory
    return found


def takes_observations(function: Any) -> bool:
    """Whether a function is a policy: it has one required parameter, with a name such as ``observations``."""
    if not inspect.isfunction(function):
        return False
    names = required(inspect.signature(function).parameters)
    return len(names) == 1 and names[0] in _OBSERVATIONS


def required(parameters: Mapping[str, inspect.Parameter]) -> list[str]:
    """Return the names of the required parameters."""
    optional = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [each.name for each in parameters.values() if each.kind not in optional and each.default is each.empty]
