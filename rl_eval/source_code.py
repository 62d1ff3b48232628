"""Digests of the code behind an evaluation: source files of environment and policy, versions of their packages.

A name such as ``"my_project.envs:make"`` is looked up without importing it, since only a runner's process may import a
user's code, and followed through ``from ... import ...`` to the file that defines it. A file of an installed package
stands for the package's version. What a live object is defined in is looked up the same way, except for the script that
was started: of that only the object's own source counts, since a script also says how many runners there are.

Not seen are modules that these files import, data files, compiled libraries, and what only another machine has.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.util
import inspect
import site
import sys
import sysconfig
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from importlib import metadata
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any, Final

from rl_eval.settings import EvalSettings

__all__ = ["code_of", "package_version"]

_REEXPORTS: Final = 8
"""Longest way from a name to the file that defines it."""


def code_of(settings: EvalSettings) -> dict[str, Any]:
    """Return ``files`` (module to path and sha256) and ``packages`` (name to version) as plain data."""
    files: dict[str, Any] = {}
    packages: dict[str, str] = {}
    for value in _sources(settings):
        for module, path, source in _defined_in(value):
            if path.is_relative_to(_stdlib()) and not _installed(path):
                continue
            if _installed(path) and (package := _package_of(module)):
                packages[package] = str(package_version(package))
            else:
                files[module] = {"path": str(path), "sha256": hashlib.sha256(source()).hexdigest()}
    return {"files": dict(sorted(files.items())), "packages": dict(sorted(packages.items()))}


@functools.cache
def package_version(package: str) -> str | None:
    """Return the version of an installed package."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _sources(settings: EvalSettings) -> Iterator[Any]:
    """Return what is implemented somewhere: texts that name it, and live objects."""
    env, runner = settings.environment.env, settings.runners.runner
    yield _entry_point(env) if isinstance(env, str) else env
    yield from _live(settings.environment.env_kwargs)
    yield settings.policy.policy
    yield from _live(settings.policy.policy_kwargs)
    yield runner
    yield settings.runners.init_fn


def _entry_point(env: str) -> Any:
    """Return what a gymnasium id stands for, if it is a known one."""
    import gymnasium

    spec = gymnasium.registry.get(env)
    return env if spec is None or spec.entry_point is None else spec.entry_point


def _live(value: Any) -> Iterator[Any]:
    """Return the functions and classes in a tree of arguments."""
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        for item in value:
            yield from _live(item)
    elif callable(value):
        yield value


def _defined_in(value: Any) -> Iterator[tuple[str, Path, Callable[[], bytes]]]:
    """Return module, file and source of every file that leads to a definition; none if it cannot be found."""
    if value is None:
        return
    if isinstance(value, str):
        module, colon, attribute = value.partition(":")
        if colon:
            yield from ((name, path, path.read_bytes) for name, path in _way(module, attribute.split(".")[0]))
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


def _way(module: str, name: str) -> Iterator[tuple[str, Path]]:
    """Return the files from where a name is imported to where it is defined."""
    for _ in range(_REEXPORTS):
        path = _file(module)
        if path is None:
            return
        yield module, path
        if _installed(path) or path.suffix != ".py" or (found := _imported_from(path, module, name)) is None:
            return
        module, name = found


def _imported_from(path: Path, module: str, name: str) -> tuple[str, str] | None:
    """Return module and name that a file imports a name from; None if it defines the name itself."""
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError):
        return None
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    for node in ast.walk(tree):
        for alias in node.names if isinstance(node, ast.ImportFrom) else ():
            if name == (alias.asname or alias.name):
                assert isinstance(node, ast.ImportFrom)
                base = _base(node, package)
                submodule = f"{base}.{alias.name}"
                return (submodule, "") if _file(submodule) else (base, alias.name)
    return None


def _base(node: ast.ImportFrom, package: str) -> str:
    parts = package.split(".")
    above = parts[: len(parts) - node.level + 1] if node.level else []
    return ".".join([*above, *([node.module] if node.module else [])])


def _file(module: str) -> Path | None:
    """Find the file of a module without importing it or what is above it."""
    if (loaded := sys.modules.get(module)) is not None:
        path = getattr(loaded, "__file__", None)
        return Path(path).absolute() if path and Path(path).is_file() else None
    parts = module.split(".")
    with suppress(ImportError, ValueError, AttributeError):
        spec = importlib.util.find_spec(parts[0])
        for end in range(2, len(parts) + 1):
            locations = spec and spec.submodule_search_locations
            spec = PathFinder.find_spec(".".join(parts[:end]), locations) if locations else None
        if spec is not None and spec.origin is not None and Path(spec.origin).is_file():
            return Path(spec.origin).absolute()
    return None


@functools.cache
def _site_folders() -> tuple[str, ...]:
    found = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), site.getusersitepackages()}
    return tuple(found | set(site.getsitepackages()))


@functools.cache
def _stdlib() -> str:
    return sysconfig.get_path("stdlib")


def _installed(path: Path) -> bool:
    return any(path.is_relative_to(folder) for folder in _site_folders())


@functools.cache
def _package_of(module: str) -> str | None:
    """Return the name under which the package of a module was installed."""
    top = module.partition(".")[0]
    if package_version(top) is not None:
        return top
    names = metadata.packages_distributions().get(top)
    return names[0] if names else None
