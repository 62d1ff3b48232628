"""Digests of the code of an evaluation: source files of environment and policy, and versions of their packages.

A name such as ``"my_project.envs:make"`` is looked up without importing the module, because only a runner's process may
import a user's code. For a file of an installed package, the version of the package is recorded. For any other file, a
digest is recorded. Digests are also recorded for the files that this file imports, or mentions in a string such as
``entry_point="my_project.envs:Env"``. The same holds for the file that defines an object, unless this file is the
started script. The digest of a script would also change with settings such as the number of runners. For an object
that the script defines, digests are therefore recorded only for the object's source and for the script's imports.

The search does not find imports that are resolved at run time, data files, compiled libraries, or code that is only on
another machine.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.util
import inspect
import re
import sys
import sysconfig
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from importlib import metadata
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any, Final

from rl_eval.config.settings import EvalSettings
from rl_eval.policies.subject import Subject, sections_of

_TARGET: Final = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w./-]*")
"""Reference to an attribute of a module, such as ``my_project.envs:make``."""
_OURS: Final = Path(__file__).parents[1]
_INSTALLED: Final = frozenset(("dist-packages", "site-packages"))


def code_of(settings: EvalSettings, subject: Subject | None = None) -> dict[str, Any]:
    """Return plain data: ``files`` with path and SHA-256 by module, and ``packages`` with versions by name.

    If a policy object can be neither sent nor digested, ``objects`` has a text by policy that no other process has.

    Args:
        settings: Settings of an evaluation.
        subject: Policies of the evaluation; None for those in the settings.
    """
    subject = subject or Subject(settings.policy)
    files: dict[str, Any] = {}
    packages: dict[str, str] = {}
    found = [part for value in _sources(settings, subject.objects) for part in _defined_in(value)]
    while found:
        module, path, source = found.pop()
        if _installed(path) and (package := _package_of(module)):
            packages[package] = str(package_version(package))
        elif module not in files and (_installed(path) or not _foreign(path)):
            files[module] = {"path": str(path), "sha256": hashlib.sha256(source()).hexdigest()}
            found += [(name, file, file.read_bytes) for name, file in _imports(module, path)]
    found_code: dict[str, Any] = {"files": dict(sorted(files.items())), "packages": dict(sorted(packages.items()))}
    # An object that was sent to a runner in another process can be pickled.
    objects = {} if settings.runners.num_runners else subject.identity()
    return found_code | ({"objects": objects} if objects else {})


@functools.cache
def package_version(package: str) -> str | None:
    """Return the version of an installed package."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _sources(settings: EvalSettings, objects: dict[str, Any]) -> Iterator[Any]:
    """Yield the names and the objects that implement environment, policies, metrics, rules and runners."""
    env, policies = settings.environment, sections_of(settings.policy)
    if env.python is None:
        yield from (env.env, _entry_point(env.env), *_live(env.wrappers))
    yield settings.policy.policy_mapping_fn
    yield from (*settings.evaluation.metrics.values(), *settings.evaluation.rules)
    yield from (settings.runners.runner, settings.runners.init_fn)
    yield from ({name: one.policy for name, one in policies.items()} | objects).values()
    yield from _live([env.env_kwargs, *(one.policy_kwargs for one in policies.values())])


def _entry_point(env: Any) -> Any:
    """Return the entry point of a registered gymnasium id. The id may have a module, as in ``module:id``."""
    if not isinstance(env, str):
        return None
    import gymnasium

    spec = gymnasium.registry.get(env.rpartition(":")[2])
    return None if spec is None else spec.entry_point


def _live(value: Any) -> Iterator[Any]:
    """Yield the functions, classes and texts in nested arguments."""
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        for item in value:
            yield from _live(item)
    elif callable(value) or isinstance(value, str):
        yield value


def _defined_in(value: Any) -> Iterator[tuple[str, Path, Callable[[], bytes]]]:
    """Yield the module, the file and the source of a definition; nothing if the source cannot be found."""
    if value is None:
        return
    if isinstance(value, str):
        module = value.partition(":")[0]
        if _TARGET.fullmatch(value) and (path := _file(module)) is not None:
            yield module, path, path.read_bytes
        return
    value = _definition(value)
    module = value.__module__ or ""
    if module == "__main__":
        with suppress(OSError, TypeError):
            source = inspect.getsource(value).encode()
            yield f"__main__:{value.__qualname__}", Path(inspect.getfile(value)), lambda: source
    elif (path := _file(module)) is not None:
        yield module, path, path.read_bytes


def _definition(value: Any) -> Any:
    """Return the function or class behind a partial, a method, a decorated function or an instance."""
    while isinstance(value, functools.partial):
        value = value.func
    value = inspect.unwrap(getattr(value, "__func__", value))
    return value if isinstance(value, type) or hasattr(value, "__qualname__") else type(value)


def _imports(module: str, path: Path) -> Iterator[tuple[str, Path]]:
    """Yield the modules that a file imports or names in a text, and the file's package.

    Modules of installed packages, of Python and of rl_eval are left out.
    """
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    if module.startswith("__main__:"):
        package = sys.modules["__main__"].__package__ or ""
    source = path.read_bytes() if path.is_file() else b""
    for name in _all_named(source, package) | {module.rpartition(".")[0]}:
        if (found := _file(name)) is not None and not _foreign(found) and not found.is_relative_to(_OURS):
            yield name, found


@functools.lru_cache(maxsize=4096)  # An evaluation during training must be cheap.
def _all_named(source: bytes, package: str) -> frozenset[str]:
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return frozenset()
    return frozenset().union(*(_named(node, package) for node in ast.walk(tree)))


def _named(node: ast.AST, package: str) -> Iterator[str]:
    """Yield the names of the modules that a piece of code may import."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        above = package.split(".")[: package.count(".") + 2 - node.level] if node.level else []
        base = ".".join([*above, *([node.module] if node.module else [])])
        yield base
        yield from (f"{base}.{alias.name}" for alias in node.names)
    elif isinstance(node, ast.Constant) and isinstance(node.value, str) and _TARGET.fullmatch(node.value):
        yield node.value.partition(":")[0]


def _file(module: str) -> Path | None:
    """Find the file of a module without importing it or its parents."""
    if (loaded := sys.modules.get(module)) is not None:
        path = getattr(loaded, "__file__", None)
        return Path(path).absolute() if path and Path(path).is_file() else None
    parts = module.split(".")
    with suppress(ImportError, ValueError, AttributeError):
        spec = importlib.util.find_spec(parts[0])
        for part in parts[1:]:  # Last names only: a full name may need the imported parent.
            locations = spec and spec.submodule_search_locations
            spec = PathFinder.find_spec(part, list(locations)) if locations else None
        if spec is not None and spec.origin is not None and Path(spec.origin).is_file():
            return Path(spec.origin).absolute()
    return None


@functools.cache
def _stdlib() -> str:
    return sysconfig.get_path("stdlib")


def _installed(path: Path) -> bool:
    return not _INSTALLED.isdisjoint(path.parts)


def _foreign(path: Path) -> bool:
    """Whether a file belongs to an installed package or to Python itself."""
    return _installed(path) or path.is_relative_to(_stdlib())


@functools.cache
def _package_of(module: str) -> str | None:
    """Return the name under which the package of a module was installed."""
    top = module.partition(".")[0]
    if package_version(top) is not None:
        return top
    names = metadata.packages_distributions().get(top)
    return names[0] if names else None
