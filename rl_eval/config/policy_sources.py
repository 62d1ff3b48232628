"""Schemes of policy strings, such as ``torch:my_pkg.nets:make@net.pt``.

The schemes of a library (:attr:`rl_eval.adapters.Integration.schemes`) are in a module that does not import the
library, because a command reads the policy string before it loads any library.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from operator import attrgetter
from pathlib import Path
from typing import Any, Final

import xxhash

from rl_eval.adapters import RANDOM, integrations, loader_of
from rl_eval.config.model_files import ModelFile, described
from rl_eval.config.references import import_attribute
from rl_eval.errors import ConfigError
from rl_eval.errors.redaction import redact

_WITH_FILE: Final = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*@.+")
"""A reference followed by ``@`` and a file. The first ``@`` ends the reference, because Python names have no ``@``."""


_FILES: Final = 1000
"""Maximum number of files to describe in a folder."""


@dataclass(frozen=True, slots=True)
class PolicySource:
    """Factory of a policy, found by a scheme."""

    factory: str
    """Factory of the policy, as ``"module:attr"``."""
    said: str
    """Description for messages."""
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the factory."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Defaults for other config keys, by dotted key."""
    pickled: str | None = None
    """File or folder with pickled objects, which can run code when they are loaded."""


@dataclass(frozen=True, slots=True)
class PolicyScheme:
    """Scheme of a policy string, ``NAME:PATH`` or ``NAME:MODULE:ATTR@FILE``."""

    form: str
    """Template with PATH, or with MODULE, ATTR and FILE."""
    source: Callable[[str, Path | None, Collection[str]], PolicySource]
    """Function that returns the source. Its arguments are the reference before ``@``, the file, and the names of the
    policy arguments that the config sets."""
    recognises: Callable[[ModelFile], bool]
    """Whether a file or folder is of this type."""
    suffix: str = ""
    """Suffix of a path that a policy string may omit."""
    parts: Callable[[Path], Mapping[str, Path]] | None = None
    """Function that returns the other files of the policy in a file, by their names in this file. A digest covers them.
    It must return none for a file of another type."""
    fallback: bool = False
    """Whether any scheme without this flag that recognises a file comes first."""

    def named(self, path: Path | str) -> str:
        """Return the policy string for a file or folder."""
        return re.sub("PATH|FILE", lambda _: str(path), self.form)

    def split(self, rest: str) -> tuple[str, str]:
        """Split the text after the scheme's name into a reference and a path. Each part may be empty."""
        if "@" not in self.form:
            return "", rest
        reference, at, path = rest.partition("@")
        return (reference, path) if at or ":" in rest or "://" in self.form else ("", rest)


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
    """Return the forms of the policy strings of all schemes, for messages."""
    return ", ".join(scheme.form for scheme in schemes().values())


def scheme_of(file: ModelFile) -> PolicyScheme | None:
    """Return the first scheme that recognises a file or folder; None if none does."""
    ordered = sorted(schemes().values(), key=attrgetter("fallback"))
    return next((scheme for scheme in ordered if scheme.recognises(file)), None)


def named_source(text: str, given: Collection[str] = ()) -> PolicySource | None:
    """Return the source of the policy for ``random``, a string with a scheme, or a path; None for any other string.

    Args:
        text: Value of ``policy.policy``, such as ``torch:my_pkg.nets:make@net.pt``.
        given: Names of policy arguments that the config sets. The scheme does not search for the files of these
            arguments.

    Raises:
        ConfigError: The file does not exist or does not belong to the scheme, its kind is unknown, the string has a
            file but no scheme, or the file must be downloaded first.
    """
    if "hf://" in text:
        problem = f"the policy {text!r}: a config does not download files"
        fix = f"Run rl-eval init FILE --policy {text}. It downloads the file, and writes a config with the file's path."
        raise ConfigError(problem, key="policy.policy", value=text, fix=fix)
    if text == "random":
        return PolicySource(RANDOM, "uniform random actions", settings={"policy.deterministic": False})
    name, colon, rest = text.partition(":")
    if not colon or name not in schemes():
        if _WITH_FILE.fullmatch(text):
            problem = f"the policy {text!r}: only a reference with a scheme can name a file"
            fix = f"Write 'torch:{text}', or pass the file as weights (--weights, policy.weights)."
            raise ConfigError(problem, key="policy.policy", value=text, fix=fix)
        return _of_path(text, user_path(text), given) if text and is_there(user_path(text)) else None
    scheme = schemes()[name]
    reference, path = scheme.split(rest)
    return scheme.source(reference, _existing(text, path, scheme.suffix) if path else None, given)


def lasting(section: Mapping[str, Any]) -> dict[str, Any]:
    """Return a section ``policy`` without the arguments that are not part of an evaluation's identity.

    Such an argument is the address of a server.
    """
    factory, kept = section.get("policy"), dict(section)
    name, _, rest = str(factory).partition(":")
    scheme = schemes().get(name)
    if scheme is not None and "://" in scheme.form:
        reference, mapping = scheme.split(rest)
        try:
            factory = scheme.source(reference, None, ()).factory
        except ConfigError:
            return kept  # The evaluation raises it again.
        kept["policy"] = scheme.form.partition("HOST")[0] + (f"@{mapping}" if mapping else "")
    library = loader_of(factory)
    kwargs = kept.get("policy_kwargs", {})
    if library is not None and library.incidental and isinstance(kwargs, Mapping):
        kept["policy_kwargs"] = {name: value for name, value in kwargs.items() if name not in library.incidental}
    return kept


def _of_path(text: str, path: Path, given: Collection[str]) -> PolicySource:
    """Return the source of a file or folder, recognised by its content."""
    file = described(path)
    if (scheme := scheme_of(file)) is not None:
        return scheme.source("", path, given)
    problem = f"the policy {text!r} has an unknown type: it is {file}"
    fix = _newest_in(file) or f"Pass a file of a known type: {forms()}."
    raise ConfigError(problem, key="policy.policy", value=text, fix=fix)


def _newest_in(folder: ModelFile) -> str:
    """Return the advice to pass the newest model in a folder or its subfolders; an empty text without one."""
    found = islice((one for pattern in ("*", "*/*") for one in folder.path.glob(pattern) if one.is_file()), _FILES)
    newest = sorted(found, key=lambda one: one.stat().st_mtime, reverse=True) if folder.is_folder else []
    kinds = ((scheme_of(described(one)), one) for one in newest)
    known = sorted((kind.fallback, place, one) for place, (kind, one) in enumerate(kinds) if kind is not None)
    return f"Pass one of its files, such as {known[0][-1]}." if known else ""


def user_path(text: str) -> Path:
    """Return a path with the home folder instead of ``~``. The name of an unknown user stays as it is."""
    return Path(os.path.expanduser(text))  # noqa: PTH111 - raises an error for an unknown user.


def is_there(path: Path) -> bool:
    """Return whether a path is a file or a folder. A device is neither, and a long text is not a path."""
    with suppress(OSError):
        return path.is_file() or path.is_dir()
    return False


def absolute(path: Path) -> str:
    """Return the absolute path of a file. A link to the file is not followed: its target may have another name."""
    return str(path.parent.resolve() / path.name)


def path_in(example: str, path: Path | None) -> Path:
    """Return the path of a policy that is a file or a folder.

    Args:
        example: Complete policy string of the scheme, such as ``torch_module:policy.pt``.
        path: The path in the policy string; None if the string has no path.

    Raises:
        ConfigError: The path is missing.
    """
    if path is None:
        text = f"{example.partition(':')[0]}:"
        raise ConfigError(
            f"the policy {text!r} lacks a path", key="policy.policy", value=text, fix=f"Add a path, as in {example}."
        )
    return path


def file_in(example: str, path: Path | None) -> Path:
    """Return the path as :func:`path_in` does, for a scheme of files that have one type.

    Raises:
        ConfigError: The path is missing, or it is a folder or file that only another scheme recognises.
    """
    path, name = path_in(example, path), example.partition(":")[0]
    file = described(path)
    if not schemes()[name].recognises(file):
        other, fix = scheme_of(file), _newest_in(file)
        if other is not None and not other.fallback:
            fix = f"Write the policy as {other.named(path)}."
        if fix:  # Otherwise, the file may be of this type nevertheless.
            problem = f"the policy {str(path)!r} is not of the type {name}"
            raise ConfigError(problem, key="policy.policy", value=str(path), fix=fix)
    return path


def anchored(text: str, folder: Path) -> str:
    """Return a policy string, with a relative path in it resolved against a folder."""
    name, colon, rest = text.partition(":")
    if not colon or name not in schemes():
        path = folder / user_path(text)
        return absolute(path) if text not in ("", "random") and is_there(path) else text
    named = schemes()[name].split(rest)[1]
    return f"{text.removesuffix(named)}{absolute(folder / user_path(named))}" if named else text


def with_named_policies(values: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return config values in which each policy string with a scheme is replaced with a factory and its arguments.

    Values that the config sets itself, such as ``policy_kwargs``, do not change.

    Raises:
        ConfigError: A policy string is invalid; see :func:`named_source`.
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
    """Return a policy section with the factory of its policy string.

    Add the scheme's values for other sections to ``others``.
    """
    given: Any = {"policy": section} if isinstance(section, str) else section
    if not isinstance(given, Mapping) or not isinstance(text := given.get("policy"), str):
        return section
    kwargs = given.get("policy_kwargs", {})
    if not isinstance(kwargs, Mapping) or (source := named_source(text, kwargs)) is None:
        return section
    own = {key.removeprefix("policy."): value for key, value in source.settings.items() if key.startswith("policy.")}
    others |= {key: value for key, value in source.settings.items() if not key.startswith("policy.")}
    if "weights" in own and given.get("weights"):
        problem = f"policy.weights is {given['weights']!r}, but the policy {text!r} also names a file"
        raise ConfigError(problem, key="policy.weights", value=given["weights"], fix="Remove one of the two.")
    return {**own, **given, "policy": source.factory, "policy_kwargs": {**source.kwargs, **kwargs}}


def _existing(text: str, path: str, suffix: str) -> Path:
    found = user_path(path)
    for candidate in (found, Path(f"{found}{suffix}")):
        if is_there(candidate):
            return candidate
    there = "" if found.is_absolute() else f" in {Path.cwd()}"
    raise ConfigError(
        f"the policy {text!r}: there is no file or folder {str(found)!r}{there}", key="policy.policy", value=text
    )


_CHUNK: Final = 2**20


def file_digests(factory: Any, kwargs: Mapping[str, Any]) -> dict[str, str]:
    """Return the digests of the files that a factory's arguments name, by argument.

    Secrets, and values inside lists and nested mappings, are skipped. A folder has a digest only if the factory belongs
    to a library whose models are folders; any other folder could be very large.

    Args:
        factory: The factory, as ``"module:attr"``. Any other policy has no arguments, so the result is empty.
        kwargs: Keyword arguments of the factory.
    """
    texts = {name: os.fspath(value) for name, value in kwargs.items() if isinstance(value, (str, os.PathLike))}
    shown = redact(texts, "policy", "policy_kwargs")
    found = {}
    for name, text in texts.items():
        if shown[name] == text:
            with suppress(OSError, ValueError, RuntimeError):  # Not a path, no home folder, or not readable.
                if (path := _loaded(factory, Path(text).expanduser())) is not None:
                    found[name] = digest_of(path)
    return found


def changed_files(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Return the arguments whose digest has changed. An argument without a digest before or now is skipped."""
    return [name for name, digest in before.items() if now.get(name, digest) != digest]


def _loaded(factory: Any, path: Path) -> Path | None:
    """Return the file or folder that a factory loads for a path; None if there is no such file or folder."""
    library = loader_of(factory)
    for candidate in (Path(f"{path}{ending}") for ending in (library.endings if library else ("",))):
        if candidate.is_file():
            return candidate
    return path if library and library.folders and path.is_dir() else None


def digest_of(path: Path) -> str:
    """Return the 128-bit xxh3 of a file and its parts, or of the names and contents of all files in a folder."""
    digest = xxhash.xxh3_128()
    for name, file in files_in(path):
        if name:
            digest.update(f"{len(name)} {name} {file.stat().st_size} ".encode())
        with file.open("rb") as stream:
            while chunk := stream.read(_CHUNK):
                digest.update(chunk)
    return str(digest.hexdigest())


def files_in(path: Path) -> list[tuple[str, Path]]:
    """Return the files of a folder with their relative names, sorted.

    For a file, return the file with an empty name, and its parts with their names; see :attr:`PolicyScheme.parts`.
    """
    if not path.is_dir():
        parts = [part for scheme in schemes().values() if scheme.parts for part in scheme.parts(path).items()]
        return [("", path), *parts]
    return sorted((file.relative_to(path).as_posix(), file) for file in path.rglob("*") if file.is_file())
