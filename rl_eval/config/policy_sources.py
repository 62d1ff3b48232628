"""Schemes by which a text names a policy, such as ``torch:my_pkg.nets:make@net.pt``.

The schemes of a library (:attr:`rl_eval.adapters.Integration.schemes`) stand in a module that imports nothing of it: a
command says what a policy is before anything is loaded.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import xxhash

from rl_eval.adapters import integrations, loader_of
from rl_eval.config.references import import_attribute
from rl_eval.errors import ConfigError
from rl_eval.errors.redaction import redact

_WITH_FILE: Final = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*@.+")
"""A reference with a file behind it, which no Python name can have."""


@dataclass(frozen=True, slots=True)
class PolicySource:
    """Factory of a policy that a text names."""

    factory: str
    """``"module:attr"``."""
    said: str
    """Description for messages."""
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the factory."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Other keys of the config, by dotted name, unless they are set."""
    pickled: str | None = None
    """File or folder that holds pickled objects, which can run code when they are loaded."""


@dataclass(frozen=True, slots=True)
class PolicyScheme:
    """One way to name a policy, ``NAME:PATH`` or ``NAME:MODULE:ATTR@FILE``."""

    form: str
    """Form with PATH, or MODULE, ATTR and FILE."""
    source: Callable[[str, Path | None, Collection[str]], PolicySource]
    """Called with the reference before ``@``, the file, and the names of the arguments that are given apart."""
    recognises: Callable[[Path], bool]
    """Whether a file or folder is plainly of this kind."""
    suffix: str = ""
    """Ending of a path that may be left out."""

    def named(self, path: Path | str) -> str:
        """Return how a file or folder of this kind is named."""
        return re.sub("PATH|FILE", lambda _: str(path), self.form)

    def split(self, rest: str) -> tuple[str, str]:
        """Return the reference and the path, each maybe empty, of what stands behind the scheme's name."""
        if "@" not in self.form:
            return "", rest
        reference, at, path = rest.partition("@")
        return (reference, path) if at or ":" in rest else ("", rest)


@functools.cache
def schemes() -> dict[str, PolicyScheme]:
    """Return the schemes by name."""
    found: dict[str, PolicyScheme] = {}
    for one in integrations():
        if one.schemes:
            theirs = import_attribute(f"the schemes of the integration {one.name}", one.schemes)
            found |= {name: scheme for name, scheme in theirs.items() if name not in found}
    return found


def forms() -> str:
    """Return how the schemes are written, for messages."""
    return ", ".join(scheme.form for scheme in schemes().values())


def named_source(text: str, given: Collection[str] = ()) -> PolicySource | None:
    """Return what a text names with a scheme, or ``random``; None for any other text.

    Args:
        text: Such as ``torch:my_pkg.nets:make@net.pt``.
        given: Names of arguments that are given apart, and are not looked for.

    Raises:
        ConfigError: There is no such file, or it is not what the scheme says.
    """
    if "hf://" in text:
        raise ConfigError(
            f"the policy {text!r}: a config downloads nothing: rl-eval init FILE --policy {text} downloads it, and "
            "writes a config with its path"
        )
    if text == "random":
        return PolicySource(
            "rl_eval.policies.uniform:UniformPolicy",
            "uniform random actions",
            settings={"policy.deterministic": False},
        )
    name, colon, rest = text.partition(":")
    if not colon or name not in schemes():
        if _WITH_FILE.fullmatch(text):
            raise ConfigError(
                f"the policy {text!r}: a file belongs to a reference with a scheme alone: write 'torch:{text}', or "
                "give the file as the weights (--weights, policy.weights)"
            )
        return None
    scheme = schemes()[name]
    reference, path = scheme.split(rest)
    return scheme.source(reference, _existing(text, path, scheme.suffix) if path else None, given)


def absolute(path: Path) -> str:
    """Return the absolute path of a file under its own name, which may be a link to a file in a cache."""
    return str(path.parent.resolve() / path.name)


def path_in(example: str, path: Path | None) -> Path:
    """Return the path of a policy that is a file or a folder.

    Args:
        example: A whole text of its scheme, such as ``torch_module:policy.pt``.
        path: The path, if there is one.

    Raises:
        ConfigError: There is none.
    """
    if path is None:
        raise ConfigError(f"the policy '{example.partition(':')[0]}:' lacks a path, as in {example}")
    return path


def anchored(text: str, folder: Path) -> str:
    """Return a text whose relative path, if a scheme has one, begins at a folder."""
    name, colon, rest = text.partition(":")
    if not colon or name not in schemes():
        return text
    path = schemes()[name].split(rest)[1]
    return f"{text.removesuffix(path)}{absolute(folder / Path(path).expanduser())}" if path else text


def with_named_policies(values: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the values of a config in which policies that schemes name have a factory with arguments.

    What is set stays as it is, such as ``policy_kwargs``.

    Raises:
        ConfigError: As :func:`named_source`.
    """
    settings = {name: dict(section) for name, section in values.items()}
    policy = settings.get("policy", {})
    others: dict[str, Any] = {}
    if isinstance(several := policy.get("policies"), Mapping):
        policy["policies"] = {name: _expanded(one, others) for name, one in several.items()}
    if policy:
        settings["policy"] = _expanded(policy, others)
    for key, value in others.items():
        section, _, name = key.partition(".")
        settings.setdefault(section, {}).setdefault(name, value)
    return settings


def _expanded(section: Any, others: dict[str, Any]) -> Any:
    """Return a policy section with its factory, and add the keys of other sections to ``others``."""
    given: Any = {"policy": section} if isinstance(section, str) else section
    if not isinstance(given, Mapping) or not isinstance(text := given.get("policy"), str):
        return section
    kwargs = given.get("policy_kwargs", {})
    if not isinstance(kwargs, Mapping) or (source := named_source(text, kwargs)) is None:
        if ":" not in text and (path := Path(text).expanduser()).exists():
            kinds = [scheme.named(text) for scheme in schemes().values() if scheme.recognises(path)]
            as_in = " or ".join(kinds) or forms()
            raise ConfigError(f"policy.policy is {text!r}, a file or folder: say of what kind, as in {as_in}")
        return section
    own = {key.removeprefix("policy."): value for key, value in source.settings.items() if key.startswith("policy.")}
    others |= {key: value for key, value in source.settings.items() if not key.startswith("policy.")}
    if "weights" in own and given.get("weights"):
        raise ConfigError(f"policy.weights is set, but the policy {text!r} names a file as well: leave one out")
    return {**own, **given, "policy": source.factory, "policy_kwargs": {**source.kwargs, **kwargs}}


def _existing(text: str, path: str, suffix: str) -> Path:
    found = Path(path).expanduser()
    for candidate in (found, Path(f"{found}{suffix}")):
        if candidate.exists():
            return candidate
    there = "" if found.is_absolute() else f" in {Path.cwd()}"
    raise ConfigError(f"the policy {text!r}: there is no file or folder {str(found)!r}{there}")


_CHUNK: Final = 2**20


def file_digests(factory: Any, kwargs: Mapping[str, Any]) -> dict[str, str]:
    """Return the digest of each argument of a factory that is the path of a file on this machine, by its name.

    Lists and nested mappings are not looked into, secrets are left alone, and a folder may be anything, of any size: it
    has a digest only for a factory of a library whose models are folders.

    Args:
        factory: ``"module:attr"``; anything else takes no arguments.
        kwargs: Its arguments.
    """
    texts = {name: os.fspath(value) for name, value in kwargs.items() if isinstance(value, (str, os.PathLike))}
    shown = redact(texts, "policy", "policy_kwargs")
    found = {}
    for name, text in texts.items():
        if shown[name] == text:
            with suppress(OSError, ValueError, RuntimeError):  # What can be no path, has no home, or cannot be read.
                if (path := _loaded(factory, Path(text).expanduser())) is not None:
                    found[name] = digest_of(path)
    return found


def changed_files(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Return the arguments whose files both sides have and that differ."""
    return [name for name, digest in before.items() if now.get(name, digest) != digest]


def _loaded(factory: Any, path: Path) -> Path | None:
    """Return the file or folder that a factory loads that is given a path; None if it is not there."""
    library = loader_of(factory)
    for candidate in (Path(f"{path}{ending}") for ending in (library.endings if library else ("",))):
        if candidate.is_file():
            return candidate
    return path if library and library.folders and path.is_dir() else None


def digest_of(path: Path) -> str:
    """Return the 128-bit xxh3 of a file, or of all names and files of a folder."""
    digest = xxhash.xxh3_128()
    for name, file in files_in(path):
        if name:
            digest.update(f"{len(name)} {name} {file.stat().st_size} ".encode())
        with file.open("rb") as stream:
            while chunk := stream.read(_CHUNK):
                digest.update(chunk)
    return str(digest.hexdigest())


def files_in(path: Path) -> list[tuple[str, Path]]:
    """Return the files of a folder with their relative names, in their order; a path of a file has the name ""."""
    if not path.is_dir():
        return [("", path)]
    return sorted((file.relative_to(path).as_posix(), file) for file in path.rglob("*") if file.is_file())
