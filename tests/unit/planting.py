"""Planted bugs: a mutant replaces one snippet of a module, and a simulated world has to notice it.

The source file is only read. The mutated text is executed as a module of its own, and nothing is looked up inside of
it: the world has to notice by itself.
"""

import importlib
import inspect
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

HISTORIES = 300
"""A mutant that survives this many is not caught."""


def planted(name: str, old: str, new: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Return a module with one snippet replaced."""
    genuine = importlib.import_module(name)
    text = inspect.getsource(genuine)
    assert text.count(old) == 1, f"{name} has {old!r} {text.count(old)} times: adapt or remove the mutant"
    module = ModuleType(f"mutated_{name.rpartition('.')[2]}")
    module.__file__ = genuine.__file__
    monkeypatch.setitem(sys.modules, module.__name__, module)
    exec(compile(text.replace(old, new), module.__name__, "exec"), vars(module))
    return module


def check(run: Callable[[int, ModuleType], Any], module: ModuleType) -> None:
    """Run histories until one breaks a law."""
    for seed in range(HISTORIES):
        run(seed, module)
