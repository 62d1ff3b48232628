"""Imports point down: which part of the package may know which other, and where heavy packages may be imported."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

import rl_eval

ROOT = Path(rl_eval.__file__).parent

LAYERS = (
    "errors",
    "protocols",
    "adapters",
    "atomic_write",
    "bounded_read",
    "records",
    "supervision",
    "log",
    "scheduling",
    "weights",
    "config",
    "policies",
    "wrappers",
    "runners",
    "backends",
    "testing",
    "results",
    "execution",
    "recording",
    "reports",
    "ope",
    "training",
    "suites",
    "integrations",
    "cli",
    "__main__",
)
"""Parts of the package, bottom to top: a part imports from itself and from those before it."""

PURE = ("scheduling",)
"""Neither time nor chance nor processes: events in, commands out."""

IMPURE_MODULES = {
    "asyncio",
    "concurrent",
    "datetime",
    "multiprocessing",
    "os",
    "queue",
    "random",
    "ray",
    "secrets",
    "socket",
    "subprocess",
    "threading",
    "time",
    "torch",
    "uuid",
}

TORCH_AT_ONCE = ("policies.fresh_weights", "policies.mlp", "policies.module", "policies.normalized", "ope.fitted_q")
"""Modules that import torch when they are imported; all others wait until they need it."""

RAY = (
    "backends.ray_actors",
    "backends.agents",
    "backends.connection",
    "training.service.client",
)
"""Modules that import Ray."""

RAY_LATER = ("cli", "backends", "runners", "supervision", "training")
"""Parts that may import Ray inside functions."""


BY_NAME = {
    "adapters": "the registry: a library's module is imported only with the library, and a policy only where it acts",
    "results.text": "the printer: an object is printed as a page, and pages are made from objects",
}
"""Modules that name a module above them in a string, with the reason."""

PEERS = ("integrations",)
"""Parts that are loaded only when the framework that they are for is there, and import what that imports."""


class Import(NamedTuple):
    """One import statement, outside of ``if TYPE_CHECKING``."""

    module: str
    names: tuple[str, ...]
    line: int
    at_once: bool
    """Whether it runs when the module is imported, and not in a function."""


def module_name(path: Path, root: Path) -> str:
    """Return the dotted name inside the package; empty for the package itself."""
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(path: Path, root: Path) -> list[Import]:
    """Find the imports of a file."""
    package = [root.name, *path.relative_to(root).parts[:-1]]
    return list(_walk(ast.parse(path.read_text()), package, at_once=True))


def _walk(node: ast.AST, package: list[str], *, at_once: bool) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            yield from (Import(alias.name, (), child.lineno, at_once) for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            base = package[: len(package) - child.level + 1] if child.level else []
            module = ".".join([*base, *([child.module] if child.module else [])])
            yield Import(module, tuple(alias.name for alias in child.names), child.lineno, at_once)
        elif isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            for other in child.orelse:
                yield from _walk(ast.Module([other], []), package, at_once=at_once)
        else:
            inside = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
            yield from _walk(child, package, at_once=at_once and not inside)


def targets(found: Import, root: Path) -> list[str]:
    """Return the modules of the package that an import reaches, by dotted name inside it."""
    parts = found.module.split(".")
    if parts[0] != root.name:
        return []
    inside = parts[1:]
    reached = []
    for name in found.names or ("",):
        candidate = [*inside, name] if name and _exists(root.joinpath(*inside, name)) else inside
        reached.append(".".join(candidate))
    return reached


def _exists(path: Path) -> bool:
    return path.with_suffix(".py").is_file() or (path / "__init__.py").is_file()


def files(root: Path) -> dict[str, Path]:
    return {module_name(path, root): path for path in sorted(root.rglob("*.py"))}


def violations(root: Path) -> list[str]:
    """Return every broken rule, one line each."""
    found: list[str] = []
    graph: dict[str, set[str]] = {}
    for name, path in files(root).items():
        part = name.split(".")[0]
        graph[name] = set()
        if name and part not in LAYERS:
            found.append(f"{name}: is not in the table of layers")
            continue
        for statement in imports_of(path, root):
            where = f"{name or root.name}:{statement.line}"
            graph[name] |= set(targets(statement, root))
            found += [f"{where}: imports {other} from above" for other in _above(name, part, statement, root)]
            found += [f"{where}: {complaint}" for complaint in _outsiders(name, part, statement)]
        if name not in BY_NAME:
            found += _named_above(name, part, path, root)
    found += [f"{' -> '.join(cycle)}: is a cycle" for cycle in _cycles(graph)]
    return found


def _above(name: str, part: str, statement: Import, root: Path) -> Iterator[str]:
    for other in targets(statement, root):
        top = other.split(".")[0]
        if not top and part != "cli":
            yield "the package itself"
        elif top in LAYERS and (not name or LAYERS.index(top) > LAYERS.index(part)):
            yield other


def _named_above(name: str, part: str, path: Path, root: Path) -> Iterator[str]:
    """Find strings with the name of a module above."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Constant) and (named := re.fullmatch(r"(rl_eval(?:\.\w+)+)(?::\w+)?", str(node.value))):
            statement = Import(named[1], (), node.lineno, at_once=False)
            yield from (f"{name}:{node.lineno}: names {other}, above" for other in _above(name, part, statement, root))


def is_pure(name: str) -> bool:
    return any(f"{name}.".startswith(f"{pure}.") for pure in PURE)


def _outsiders(name: str, part: str, statement: Import) -> Iterator[str]:
    outsider = statement.module.split(".")[0]
    if part in PEERS:
        return
    if is_pure(name) and outsider in IMPURE_MODULES:
        yield f"imports {outsider}, but {part} is pure"
    if outsider == "ray" and name not in RAY and (part not in RAY_LATER or statement.at_once):
        yield "imports ray"
    if outsider in ("torch", "tensordict") and statement.at_once and name not in TORCH_AT_ONCE:
        yield f"imports {outsider} at once"


def _cycles(graph: dict[str, set[str]]) -> list[list[str]]:
    cycles: list[list[str]] = []
    done: set[str] = set()

    def visit(name: str, trail: list[str]) -> None:
        if name in trail:
            cycles.append([*trail[trail.index(name) :], name])
        elif name not in done:
            for other in sorted(graph.get(name, ())):
                if other and other != name:
                    visit(other, [*trail, name])
            done.add(name)

    for name in sorted(graph):
        visit(name, [])
    return cycles


# ------------------------------------------------------------------------------ this package


def test_imports_point_down() -> None:
    """No part imports from a part above it, Ray and torch stay where they belong, and nothing goes in circles."""
    assert violations(ROOT) == []


def test_the_table_of_layers_names_what_there_is() -> None:
    """A part that is gone leaves the table; a new one enters it."""
    present = {name.split(".")[0] for name in files(ROOT)} - {""}
    assert present == set(LAYERS)


def test_there_are_at_most_twenty_folders() -> None:
    """The folders alone explain the architecture; a list that is longer explains nothing."""
    folders = [path.parent for path in ROOT.glob("*/__init__.py")]
    assert 0 < len(folders) <= 20


def test_the_pure_parts_use_no_generator_of_numpy_either() -> None:
    """Chance does not come in through ``np.random``."""
    for path in [path for name, path in files(ROOT).items() if is_pure(name)]:
        attributes = {node.attr for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Attribute)}
        assert "random" not in attributes


IMPORTED = [
    ("rl_eval", ("torch", "ray", "tensordict", "gymnasium", "numpy")),
    ("rl_eval.backends.runner_actor", ("torch", "ray", "tensordict", "gymnasium", "rl_eval.runners")),
    ("rl_eval.training.service.actor", ("torch", "ray", "tensordict", "gymnasium", "rl_eval.runners")),
    ("rl_eval.scheduling.schedule", ("torch", "ray", "tensordict", "gymnasium")),
    ("rl_eval.weights", ("torch", "ray", "tensordict", "gymnasium")),
    ("rl_eval.execution.group", ("torch", "ray", "tensordict")),
    ("rl_eval.cli", ("torch", "ray", "tensordict", "gymnasium")),
    ("rl_eval.cli.progress", ("torch", "ray", "tensordict", "gymnasium", "numpy")),
]
"""Modules, and what importing them must not bring: user code comes first in an actor, and commands start at once."""

FRESH_IMPORTS = """
import importlib, os, sys

for module, absent in %r:
    sys.stdout.flush()
    if not (child := os.fork()):
        importlib.import_module(module)
        print(*(f"{module} imports {name}" for name in absent if name in sys.modules), sep="\\n", end="")
        sys.stdout.flush()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0, module
print("checked", end="")
"""
"""Forks before each import, so that every module is the first one of its process, which starts Python only once."""


@pytest.mark.process
def test_an_import_brings_no_heavy_package() -> None:
    """In a fresh process, what must stay out of ``sys.modules`` stays out."""
    command = [sys.executable, "-c", FRESH_IMPORTS % ([*IMPORTED, ("numpy.linalg", ("numpy",))],)]
    ran = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT.parent)
    assert ran.stdout == "numpy.linalg imports numpychecked"


# ------------------------------------------------------------------------------ the checker itself


def plant(folder: Path, planted: dict[str, str]) -> Path:
    """Write a small package that keeps all rules, with some files replaced."""
    root = folder / "rl_eval"
    sources = {
        "__init__.py": "import typing\nif typing.TYPE_CHECKING:\n    from rl_eval.execution import evaluate\n",
        "errors.py": "import difflib\n",
        "scheduling.py": "import numpy as np\nfrom rl_eval.errors import ConfigError\n",
        "policies/__init__.py": "def adapt():\n    import torch\n    from rl_eval.policies.module import A\n",
        "policies/module.py": "import torch\nfrom ..errors import ConfigError\n",
        "backends/__init__.py": "",
        "backends/ray_actors.py": "import ray\nfrom rl_eval.backends import Call\n",
        "execution.py": "def make():\n    from rl_eval.backends.ray_actors import RayBackend\n",
        "cli.py": "from rl_eval import __version__\ndef doctor():\n    import ray\n    from rl_eval import execution\n",
    }
    for name, text in (sources | planted).items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_a_package_that_keeps_the_rules_has_no_violations(tmp_path: Path) -> None:
    """The checker accepts what is allowed: typing imports, late imports, relative imports from below."""
    assert violations(plant(tmp_path, {})) == []


@pytest.mark.parametrize(
    ("planted", "expected"),
    [
        (
            {"errors.py": "from rl_eval.scheduling import A\n", "scheduling.py": ""},
            "errors:1: imports scheduling from above",
        ),
        ({"errors.py": "import rl_eval.execution\n"}, "errors:1: imports execution from above"),
        ({"errors.py": "from rl_eval import execution\n"}, "errors:1: imports execution from above"),
        ({"errors.py": "from . import scheduling\n", "scheduling.py": ""}, "errors:1: imports scheduling from above"),
        ({"errors.py": "from rl_eval import evaluate\n"}, "errors:1: imports the package itself from above"),
        ({"errors.py": "A = 'rl_eval.execution:evaluate'\n"}, "errors:1: names execution, above"),
        (
            {"policies/module.py": "def act():\n    from ..execution import evaluate\n"},
            "policies.module:2: imports execution from above",
        ),
        ({"policies/module.py": "from rl_eval import cli\n"}, "policies.module:1: imports cli from above"),
        ({"__init__.py": "from rl_eval.scheduling import EpisodePlan\n"}, "rl_eval:1: imports scheduling from above"),
        (
            {"scheduling.py": "if TYPE_CHECKING:\n    import rl_eval.execution\nelse:\n    import rl_eval.cli\n"},
            "scheduling:4: imports cli from above",
        ),
        ({"extra.py": ""}, "extra: is not in the table of layers"),
        ({"scheduling.py": "import numpy\nimport time\n"}, "scheduling:2: imports time, but scheduling is pure"),
        (
            {"scheduling.py": "def now():\n    from random import random\n"},
            "scheduling:2: imports random, but scheduling is pure",
        ),
        ({"scheduling.py": "import concurrent.futures\n"}, "scheduling:1: imports concurrent, but scheduling is pure"),
        ({"execution.py": "def stop():\n    import ray\n"}, "execution:2: imports ray"),
        ({"backends/__init__.py": "from ray.util import state\n"}, "backends:1: imports ray"),
        ({"cli.py": "import ray\n"}, "cli:1: imports ray"),
        ({"policies/__init__.py": "import torch\n"}, "policies:1: imports torch at once"),
        ({"policies/__init__.py": "class A:\n    import torch\n"}, "policies:2: imports torch at once"),
        (
            {"execution.py": "try:\n    import tensordict\nexcept ImportError:\n    pass\n"},
            "execution:2: imports tensordict at once",
        ),
        (
            {
                "policies/module.py": "from rl_eval.policies.mlp import a\n",
                "policies/mlp.py": "def f():\n    from rl_eval.policies import module\n",
            },
            "policies.module -> policies.mlp -> policies.module: is a cycle",
        ),
    ],
)
def test_a_planted_violation_is_caught(tmp_path: Path, planted: dict[str, str], expected: str) -> None:
    """Each rule is noticed when it is broken, by file and line, and nothing else is complained about."""
    assert violations(plant(tmp_path, planted)) == [expected]


LEARNERS = re.compile("sb3|stable.?baselines|rllib|torchrl|cleanrl|tianshou", re.IGNORECASE)


def test_code_outside_of_the_integrations_names_no_learner() -> None:
    """Libraries stand in the table of integrations, which others can add to; docstrings may compare."""
    found = []
    for path in sorted(ROOT.rglob("*.py")):
        tree = ast.parse(path.read_text())
        prose = {node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        if "integrations" not in path.parts:
            found += [
                f"{path}:{node.lineno}: {ast.unparse(node)}"
                for node in ast.walk(tree)
                if isinstance(node, (ast.Constant, ast.Name, ast.Attribute)) and node not in prose
                if LEARNERS.search(ast.unparse(node))
            ]
    assert found == []
