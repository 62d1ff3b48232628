"""References in a config: the object that a ``"module:attr"`` names."""

from __future__ import annotations

import difflib
import importlib
import sys
from typing import Any, Final

from rl_eval.errors import ConfigError

__all__ = ["dotted", "import_attribute"]

_EXTRAS: Final = {"stable_baselines3": "sb3", "torchrl": "torchrl"}
"""Which extra brings a package."""


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
        raise ConfigError(f'{key} is {path!r}: write it as "module:attr"')
    try:
        found: Any = importlib.import_module(module_name)
        for part in attribute.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        extra = _EXTRAS.get(str(getattr(error, "name", "")).partition(".")[0])
        hint = f". Install it: pip install 'rl-eval[{extra}]'" if extra and isinstance(error, ImportError) else ""
        if isinstance(error, ModuleNotFoundError) and error.name == module_name.partition(".")[0] and not hint:
            hint = ": call from the folder that has it, or name that folder in PYTHONPATH"
        if close := difflib.get_close_matches(attribute, dir(sys.modules.get(module_name)), n=1):
            hint = f": did you mean '{module_name}:{close[0]}'?"
        if module_name.endswith(".py"):
            hint = f". It names a module, not a file: write {dotted(path)!r}"
        raise ConfigError(f"{key} is {path!r}, which cannot be imported: {error}{hint}") from error
    return found
