"""Surface of the package: a package lists its public names in order; every one is importable and documented.

A module lists nothing: its names that begin without an underscore are public.
"""

from __future__ import annotations

import ast
import importlib
import inspect
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import pytest

import rl_eval

ROOT = Path(rl_eval.__file__).parent
FILES = {
    ".".join(("rl_eval", *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__"): path
    for path in sorted(ROOT.rglob("*.py"))
}
MODULES = sorted(set(FILES) - {"rl_eval.__main__", "rl_eval.backends.ray_actors"})
"""Importable without starting anything; the Ray backend is read, not imported, since no unit test needs Ray."""

PROMISED = {
    *("EnvContext", "EpisodeRecord", "EvalConfig", "EvalHandle", "EvalResult", "EvalRunner", "EvalRunnerGroup"),
    *("Policy", "SingleAgentEvalRunner", "VectorEvalRunner", "compare", "evaluate"),
}
"""Names that are fixed: scripts rely on them."""

PEERS = {
    "envpool": "envpool",
    "jumanji": "jumanji",
    "atari": "ale_py",
    "cleanrl": "torch",
    "d3rlpy": "d3rlpy",
    "onnx": "onnxruntime",
    "openpi": "websockets",
    "rl_games": "rl_games",
    "rsl_rl": "rsl_rl",
    "skrl": "skrl",
    "sb3": "stable_baselines3",
    "rllib": "ormsgpack",
    "tianshou": "tianshou",
    "torch_draws": "torch",
    "torchrl": "torchrl",
}
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


def disorder(module: str, path: Path) -> Iterator[str]:
    """Yield the problems of ``__all__``."""
    names = listed(path) or []
    if names != in_order(list(set(names))):
        yield f"{module}: __all__ is not in order"
    yield from (f"{module}: lists {name}" for name in names if name.startswith("_") and name != "__version__")


def is_there(module: str) -> bool:
    """Whether what a module needs is installed."""
    parts = module.split(".")
    if parts[-1] == "functional":  # Outside of the integrations: any environment may be written in JAX.
        return find_spec("jax") is not None
    return len(parts) < 3 or parts[1] != "integrations" or find_spec(PEERS.get(parts[2], "rl_eval")) is not None


def undocumented(path: Path) -> list[str]:
    """Return the public names without a docstring; a method marked ``@override`` has that of its base."""
    tree = ast.parse(path.read_text())
    missing = [] if ast.get_docstring(tree) else [path.name]
    return missing + [
        name
        for name, node in public(path)
        if not ast.get_docstring(node)  # type: ignore[arg-type]
        and "override" not in map(ast.unparse, node.decorator_list)  # type: ignore[attr-defined]
    ]


# ------------------------------------------------------------------------------ the package


def test_the_front_door_offers_what_it_lists() -> None:
    """``dir()``, ``__all__``, the imports for type checkers and what is loaded agree; what scripts rely on stays."""
    tree = ast.parse(FILES["rl_eval"].read_text())
    homes = {
        alias.name: node.module
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("rl_eval.")
        for alias in node.names
    }
    assert dir(rl_eval) == sorted(rl_eval.__all__)
    assert rl_eval.__all__ == in_order(list(set(rl_eval.__all__)))
    assert set(rl_eval.__all__) >= PROMISED
    assert rl_eval.__version__.count(".") == 2
    for name in set(rl_eval.__all__) - {"__version__"}:
        value = getattr(rl_eval, name)
        assert (value.__name__, inspect.getdoc(value) is None) == (name, False)
        assert getattr(importlib.import_module(homes[name]), name) is value
    with pytest.raises(AttributeError, match="'evaluat'"):
        rl_eval.evaluat  # noqa: B018


def test_every_listed_name_can_be_imported_and_hides_no_other() -> None:
    """A name in ``__all__`` exists, and a public name of the package stays what it is after all imports."""
    before = {name: getattr(rl_eval, name) for name in rl_eval.__all__}
    missing = []
    for module in MODULES:
        if is_there(module):
            loaded = importlib.import_module(module)
            missing += [f"{module}.{name}" for name in getattr(loaded, "__all__", ()) if not hasattr(loaded, name)]
    assert missing == []
    assert {name: getattr(rl_eval, name) for name in rl_eval.__all__} == before
    assert not any(isinstance(value, ModuleType) for value in before.values())


def test_what_is_listed_is_in_order() -> None:
    """``__all__`` is sorted, names nothing twice and nothing private."""
    assert [complaint for module in FILES for complaint in disorder(module, FILES[module])] == []


def test_everything_public_is_documented() -> None:
    """Every module, public class, function, method and property has a docstring."""
    assert {module: found for module, path in FILES.items() if (found := undocumented(path))} == {}


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


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("__all__ = ['A', 'b']\nclass A: pass\ndef b(): pass\n", []),
        ("class _A: pass\n", []),
        ("__all__ = ['b', 'A']\nclass A: pass\n", ["m: __all__ is not in order"]),
        ("__all__ = ['A', 'A']\nclass A: pass\n", ["m: __all__ is not in order"]),
        ("__all__ = ['_a']\n", ["m: lists _a"]),
    ],
)
def test_a_wrong_list_of_names_is_noticed(tmp_path: Path, source: str, expected: list[str]) -> None:
    """Each rule of ``__all__`` is noticed when it is broken."""
    path = tmp_path / "m.py"
    path.write_text(source)
    assert list(disorder("m", path)) == expected
