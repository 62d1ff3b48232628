"""References in a config: the object that a ``"module:attr"`` names, and what its signature tells."""

from __future__ import annotations

import difflib
import importlib
import inspect
import sys
from collections.abc import Mapping
from typing import Any, Final

from rl_eval.adapters import integrations
from rl_eval.errors import ConfigError

_OBSERVATIONS: Final = ("obs", "observation", "observations")
"""Names of the parameter by which a function is known to act, and not to make something."""


def dotted(path: str) -> str:
    """Return ``my_package.envs:make`` for ``my_package/envs.py:make``."""
    module_name, colon, attribute = path.partition(":")
    return f"{module_name.removesuffix('.py').strip('./').replace('/', '.')}{colon}{attribute}"


def import_attribute(key: str, path: str) -> Any:
    """Import ``"module:attr"`` (attr may be dotted).

    Raises:
        ConfigError: The text has no colon, or module or attribute do not exist; it names the key.
    """
    module_name, _, attribute = path.partition(":")
    if not module_name or not attribute:
        raise ConfigError(f'{key} is {path!r}: write it as "module:attr"', key=key, value=path)
    try:
        found: Any = importlib.import_module(module_name)
        for part in attribute.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        missing = str(error.name).partition(".")[0] if isinstance(error, ImportError) else ""
        install = next((one.install for one in integrations() if missing in one.packages and one.install), "")
        hint = f". Install it: pip install '{install}'" if install else ""
        if isinstance(error, ModuleNotFoundError) and error.name == module_name.partition(".")[0] and not hint:
            hint = ": call from the folder that has it, or name that folder in PYTHONPATH"
        if close := difflib.get_close_matches(attribute, dir(sys.modules.get(module_name)), n=1):
            hint = f": did you mean '{module_name}:{close[0]}'?"
        if module_name.endswith(".py"):
            hint = f". It names a module, not a file: write {dotted(path)!r}"
        text = f"{key} is {path!r}, which cannot be imported: {error}{hint}"
        raise ConfigError(text, key=key, value=path) from error
    return found


def takes_observations(function: Any) -> bool:
    """Return whether what a function must be given is observations, by their name: it is a policy."""
    if not inspect.isfunction(function):
        return False
    names = required(inspect.signature(function).parameters)
    return len(names) == 1 and names[0] in _OBSERVATIONS


def required(parameters: Mapping[str, inspect.Parameter]) -> list[str]:
    """Return the names of what a call must give."""
    optional = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [each.name for each in parameters.values() if each.kind not in optional and each.default is each.empty]
