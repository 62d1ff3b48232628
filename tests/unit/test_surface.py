"""What the package shows: every public name is listed, in order, importable and documented."""

from __future__ import annotations

import ast
import importlib
import inspect
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import rl_eval

ROOT = Path(rl_eval.__file__).parent
FILES = {
    ".".join(("rl_eval", *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__"): path
    for path in sorted(ROOT.rglob("*.py"))
}
MODULES = sorted(set(FILES) - {"rl_eval.__main__", "rl_eval.backends.ray_actors"})
"""Importable without starting anything; the Ray backend is read, not imported, since no unit test needs Ray."""


PEERS = {"sb3": "stable_baselines3", "rllib": "ormsgpack", "torchrl": "torchrl"}
"""A package that is there if the peer of an integration is; Ray has RLlib's code without what that needs."""


def in_order(names: list[str]) -> list[str]:
    """Sort as linters do: constants, then classes, then the rest."""
    return sorted(names, key=lambda name: (0 if name.isupper() else 1 if name[0].isupper() else 2, name))


def listed(path: Path) -> list[str] | None:
    """Return ``__all__`` as it is written, or None."""
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            names: list[str] = ast.literal_eval(node.value)
            return names
    return None


def public(path: Path) -> Iterator[tuple[str, ast.AST]]:
    """Find the public classes and functions of a file, methods and properties included."""
    for node in ast.parse(path.read_text()).body:
        yield from _public(node, "")


def _public(node: ast.AST, prefix: str) -> Iterator[tuple[str, ast.AST]]:
    if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) and not node.name.startswith("_"):
        yield prefix + node.name, node
        if isinstance(node, ast.ClassDef):
            for child in node.body:
                yield from _public(child, f"{prefix}{node.name}.")


def undocumented(path: Path) -> list[str]:
    tree = ast.parse(path.read_text())
    missing = [] if ast.get_docstring(tree) else [path.name]
    return missing + [name for name, node in public(path) if not ast.get_docstring(node)]  # type: ignore[arg-type]


# ------------------------------------------------------------------------------ the front door


@pytest.mark.parametrize("name", rl_eval.__all__)
def test_every_public_name_of_the_package_is_there_and_documented(name: str) -> None:
    """What ``from rl_eval import ...`` offers can be imported, and says what it is."""
    value = getattr(rl_eval, name)
    if name == "__version__":
        assert value.count(".") == 2
        return
    assert inspect.getdoc(value)
    assert value.__name__ == name
    assert getattr(rl_eval, name) is value


def test_the_front_door_lists_what_it_has() -> None:
    """``dir()`` and ``__all__`` agree, in order and without repetition; anything else is an AttributeError."""
    assert dir(rl_eval) == sorted(rl_eval.__all__)
    assert rl_eval.__all__ == in_order(list(set(rl_eval.__all__)))
    with pytest.raises(AttributeError, match="module 'rl_eval' has no attribute 'evaluat'"):
        rl_eval.evaluat  # noqa: B018


def test_importing_a_module_does_not_hide_a_name() -> None:
    """A public name stays what it is after every module of the package has been imported."""
    before = {name: getattr(rl_eval, name) for name in rl_eval.__all__}
    for module in MODULES:
        if not module.startswith("rl_eval.integrations."):
            importlib.import_module(module)
    assert {name: getattr(rl_eval, name) for name in rl_eval.__all__} == before
    assert not any(isinstance(value, ModuleType) for value in before.values())


@pytest.mark.parametrize("name", sorted(set(rl_eval.__all__) - {"__version__"}))
def test_type_checkers_see_what_python_loads(name: str) -> None:
    """The imports for type checkers name the same module that the name is loaded from."""
    tree = ast.parse((ROOT / "__init__.py").read_text())
    homes = {
        alias.name: node.module
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("rl_eval.")
        for alias in node.names
    }
    assert getattr(importlib.import_module(homes[name]), name) is getattr(rl_eval, name)


def test_the_public_names_that_the_documentation_promises() -> None:
    """These names are fixed: scripts rely on them."""
    promised = {"EvalConfig", "EvalRunner", "EvalRunnerGroup", "SingleAgentEvalRunner", "VectorEvalRunner", "evaluate"}
    promised |= {"EpisodeRecord", "EvalHandle", "EvalResult", "EnvContext", "Policy", "compare"}
    assert promised <= set(rl_eval.__all__)


# ------------------------------------------------------------------------------ every module


@pytest.mark.parametrize("module", sorted(FILES))
def test_all_is_in_order_and_complete(module: str) -> None:
    """``__all__`` is sorted, names nothing twice, and leaves no public class out."""
    names = listed(FILES[module])
    if module == "rl_eval.__main__":
        return
    assert names is not None or not list(public(FILES[module]))
    names = names or []
    assert names == in_order(list(set(names)))
    assert not [name for name in names if name.startswith("_") and name != "__version__"]
    classes = {name for name, node in public(FILES[module]) if isinstance(node, ast.ClassDef) and "." not in name}
    assert classes <= set(names)


@pytest.mark.parametrize("module", MODULES)
def test_every_listed_name_can_be_imported(module: str) -> None:
    """A name in ``__all__`` exists, and classes and functions among them say what they are."""
    if module.startswith("rl_eval.integrations."):
        pytest.importorskip(
            {"sb3": "stable_baselines3", "rllib": "ormsgpack", "torchrl": "torchrl"}[module.split(".")[2]]
        )
    loaded: Any = importlib.import_module(module)
    for name in getattr(loaded, "__all__", ()):
        value = getattr(loaded, name)
        if inspect.isclass(value) or inspect.isfunction(value):
            assert inspect.getdoc(value), name


@pytest.mark.parametrize("module", sorted(FILES))
def test_everything_public_is_documented(module: str) -> None:
    """Every module, public class, function, method and property has a docstring."""
    assert undocumented(FILES[module]) == []


# ------------------------------------------------------------------------------ the checks themselves


def test_the_order_of_names() -> None:
    """Constants first, classes next, the rest last; each alphabetically."""
    assert in_order(["b", "B", "Z_Y", "Aa", "__version__", "A"]) == ["A", "B", "Z_Y", "Aa", "__version__", "b"]


def test_a_missing_docstring_is_noticed(tmp_path: Path) -> None:
    """Modules, classes, functions, methods and properties are all looked at; private ones are not."""
    path = tmp_path / "module.py"
    path.write_text(
        "def one(): pass\n"
        "def _private(): pass\n"
        'def two():\n    """Fine."""\n    def inner(): pass\n'
        'class Three:\n    """Fine."""\n    def four(self): pass\n    def _five(self): pass\n'
        "    @property\n    def six(self): pass\n"
        "class Seven: pass\n"
        "class _Eight:\n    def nine(self): pass\n"
    )
    assert undocumented(path) == ["module.py", "one", "Three.four", "Three.six", "Seven"]
