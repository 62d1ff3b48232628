"""Redaction of secrets in everything that leaves the process: files, lines, messages.

A secret is recognized by its name (``api_key``, ``password``, ...; also before an ``=`` within a text) and by its place
(a value of ``runtime_env.env_vars``, the user and the query of a URI). In messages, tracebacks and notes it is also
recognized by its value: what a configuration held under such a name is masked wherever it turns up. Names of variables
that only steer libraries (``OMP_NUM_THREADS``) are no secrets.
"""

from __future__ import annotations

import functools
import hashlib
import hmac
import json
import os
import re
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final
from urllib.parse import quote, unquote

__all__ = ["MASK", "digest_secrets", "learn", "redact", "redact_command", "redact_text", "redacted_traceback"]

MASK: Final = "***"
_MASKED: Final = re.compile(r"\*\*\*( \([0-9a-f]{4}\))?")

_SECRET: Final = frozenset(
    (
        "apikey",
        "auth",
        "authorization",
        "bearer",
        "credential",
        "credentials",
        "passphrase",
        "passwd",
        "password",
        "passwords",
        "private",
        "pwd",
        "secret",
        "secrets",
        "token",
        "tokens",
    )
)
_SECRET_NUMBER: Final = frozenset(("apikey", "passphrase", "passwd", "password", "pwd", "secret"))
"""Words of names under which a number is a secret, too; a number of tokens is none."""
_KEYS: Final = frozenset(
    ("access", "account", "api", "auth", "encryption", "license", "private", "secret", "service", "signing", "ssh")
)
"""Words that make a secret of the word ``key`` after them."""
_RANDOM: Final = re.compile(r"(?=.*[0-9])(?=.*[A-Za-z])[\w+/=.~-]{16,}")
"""What looks like a secret where the whole name is ``key``."""
_WORD: Final = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")

_STEERING: Final = re.compile(
    r"(CUDA|EGL|JAX|MKL|MUJOCO|NCCL|NUMEXPR|NVIDIA|OMP|OPENBLAS|PYOPENGL|PYTHON|RAY|RL_EVAL|SDL|TORCH|XLA)_?.*"
    r"|DISPLAY|LANG|LC_.*|TZ|.*_(DEVICES|DIR|HOME|PATH|THREADS)",
)
"""Environment variables that are no secrets, unless their names say so."""
_PLACES: Final = ("env_vars", "runtime_env")

_SHORTEST: Final = 6
"""A shorter value is not looked for elsewhere: it would be found in every text."""
_COMMON: Final = re.compile(r"(?!.{16})([a-z]+|[A-Z]+|[A-Z]?[a-z]+|[+-]?[\d.]+)")
"""Nor is a plain word or number: it would be found where it means something else."""
_HEX: Final = re.compile(r"[0-9a-fA-F]+")
"""Would be found in digests, so it must stand alone."""

_USER: Final = re.compile(r"(://)(?:[^\s/@:\"'<>]*:[^\s\"'<>?]*|[^\s/@\"'<>]*)@")
"""A password may hold slashes, so what has a colon reaches to the last ``@``."""
_ASSIGNED: Final = re.compile(r"""(?<![\w-])([\w-]{1,64})=(?!=)("[^"]*"|'[^']*'|["']?[^\s;&"']+)""")
_QUERY: Final = re.compile(r"(://[^\s?\"'<>]*\?)([^\s\"'<>]*)")
_OPEN_QUERY: Final = frozenset(
    (
        "allow_bucket_creation",
        "allow_bucket_deletion",
        "connect_timeout",
        "endpoint_override",
        "region",
        "request_timeout",
        "scheme",
    )
)
"""Names in the query of a URI whose values say where something is, and not who may see it."""

Path = tuple[str, ...]
_lock: Final = threading.Lock()
_known: set[str] = set()
_pattern: re.Pattern[str] | None = None


def redact(value: Any, *path: str) -> Any:
    """Return plain data without its secrets, as they are recognized by name and place.

    A config must stay what it is, whatever else this process was given.

    Args:
        value: Nested mappings, lists and scalars.
        path: Keys that lead to it, the outermost first.
    """
    return _walk(value, path, lambda _path, _value: MASK, lambda _path, text: _redact_inside(text))


def digest_secrets(value: Any, *path: str) -> Any:
    """Return plain data in which every secret is a mask with a digest that distinguishes it from others.

    It has 16 bits: another value has another one but for 1 time in 65 536, and far too many values have the same one
    for it to be of use in guessing even a short secret.
    """
    return _walk(value, path, _digested, _identified)


def redact_text(text: str) -> str:
    """Return a text without known secrets, and without those that it names itself or has in its URIs."""
    return _redact_inside(text if _pattern is None else _pattern.sub(MASK, text))


def redacted_traceback(error: BaseException) -> str:
    """Return the text of an error, with where it was raised and what caused it, without secrets."""
    return redact_text("".join(traceback.format_exception(type(error), error, error.__traceback__)))


def redact_command(words: Sequence[str]) -> list[str]:
    """Return a command line without secrets: in ``KEY=VALUE``, after ``--password``, and in URIs."""
    return [_redact_word(word, path) for path, word in _items(words, ())]


def learn(value: Any, *path: str) -> None:
    """Remember the secrets of a configuration, or of a URI, to mask them wherever they turn up in this process."""
    global _pattern  # noqa: PLW0603  # What a process was given is known to all of it.
    found = {variant for secret in _secrets(value, path) if _is_telling(secret) for variant in _variants(secret)}
    with _lock:
        if not found <= _known:
            _known.update(found)
            # The longest first: one secret may be the beginning of another.
            _pattern = re.compile("|".join(map(_searched, sorted(_known, key=len, reverse=True))))


# What is a secret


def _is_secret(path: Path, value: Any) -> bool:
    for position, name in enumerate(path):
        words = _words(name)
        if isinstance(value, (str, bytes)):
            if words & _SECRET or _is_key(name, value):
                return True
        elif words & _SECRET_NUMBER:
            return True
        # Text where a mapping should be may be an assignment.
        if name in _PLACES and name == path[-1] and isinstance(value, (str, bytes)):
            return True
        if position and path[position - 1] == "env_vars" and not _STEERING.fullmatch(name):
            return True
    return False


def _is_key(name: str, value: str | bytes) -> bool:
    words = _words(name)
    if "key" not in words and "keys" not in words:
        return False
    text = value if isinstance(value, str) else value.decode("latin-1")
    return bool(_KEYS & words) or name.isupper() or (words == {"key"} and bool(_RANDOM.fullmatch(text)))


@functools.lru_cache(maxsize=1024)  # The same few names lead to nearly all values.
def _words(name: str) -> frozenset[str]:
    return frozenset(word.lower() for word in _WORD.findall(name))


def _walk(value: Any, path: Path, mask: Callable[[Path, Any], str], text: Callable[[Path, str], str]) -> Any:
    if isinstance(value, Mapping):
        return {key: _walk(item, (*path, str(key)), mask, text) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        walked = [_walk(item, where, mask, text) for where, item in _items(value, path)]
        return tuple(walked) if isinstance(value, tuple) else walked
    if isinstance(value, str) and _MASKED.fullmatch(value):
        return value
    if _can_be_secret(value) and _is_secret(path, value):
        return mask(path, value)
    return text(path, value) if isinstance(value, str) else value


def _items(values: Sequence[Any], path: Path) -> Iterator[tuple[Path, Any]]:
    """Yield what a list holds with its path; in ``["--token", "abc"]`` the second one is named by the first."""
    before = ""
    for value in values:
        word = value if isinstance(value, str) else ""
        named = before.startswith("-") and "=" not in before and not word.startswith("-")
        yield (*path, before.lstrip("-")) if named else path, value
        before = word


def _can_be_secret(value: Any) -> bool:
    return isinstance(value, (str, bytes, int, float)) and not isinstance(value, bool) and bool(value)


def _digested(path: Path, value: Any) -> str:
    return f"{MASK} ({_digest(path, value)})"


def _identified(path: Path, text: str) -> str:
    # Without what else this process knows: an identity is the same everywhere.
    redacted = _redact_inside(text)
    return text if redacted == text else f"{redacted} ({_digest(path, text)})"


def _digest(path: Path, value: Any) -> str:
    content = value if isinstance(value, bytes) else str(value).encode("utf-8", "surrogatepass")
    return hmac.new(".".join(path).encode(), content, hashlib.sha256).hexdigest()[:4]


def _redact_inside(text: str) -> str:
    """Mask what a text gives to a secret name, and users and query values in its URIs."""
    if "://" in text:
        text = _QUERY.sub(lambda found: found[1] + _redact_query(found[2]), _USER.sub(rf"\1{MASK}@", text))
    return _ASSIGNED.sub(lambda found: f"{found[1]}={MASK}" if _gives_secret(found) else found[0], text)


def _gives_secret(found: re.Match[str]) -> bool:
    name, value = found.groups()
    # RAY_AUTH_MODE=token is what messages advise.
    return not name.endswith("_MODE") and _is_secret((name,), int(value) if value.isdecimal() else value)


def _redact_query(query: str) -> str:
    pairs = (pair.partition("=") for pair in query.split("&"))
    return "&".join(name + (equals and "=" + (value if name in _OPEN_QUERY else MASK)) for name, equals, value in pairs)


def _redact_word(word: str, named: Path) -> str:
    if _is_secret(named, word):
        return MASK
    key, equals, value = word.removeprefix("--set=").partition("=")
    path = tuple(key.lstrip("-").split("."))
    if equals and value and "://" not in key and _is_secret(path, value):
        return word[: len(word) - len(value)] + MASK
    return redact_text(word)


# What is remembered


def _secrets(value: Any, path: Path) -> Iterator[str]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _secrets(item, (*path, str(key)))
    elif isinstance(value, (list, tuple)):
        for where, item in _items(value, path):
            yield from _secrets(item, where)
    elif _can_be_secret(value):
        text = value.decode("latin-1") if isinstance(value, bytes) else str(value)
        if _is_secret(path, value):
            yield text
            yield from text.splitlines()
        yield from _inside(text)


def _inside(text: str) -> Iterator[str]:
    """Yield what a text gives to a secret name, and the passwords and secret query values of its URIs."""
    yield from (found[2].strip("\"'") for found in _ASSIGNED.finditer(text) if _gives_secret(found))
    for found in _USER.finditer(text):
        yield found[0][len("://") : -1].rpartition(":")[2] if ":" in found[0][3:] else found[0][len("://") : -1]
    for found in _QUERY.finditer(text):
        pairs = (pair.partition("=") for pair in found[2].split("&"))
        yield from (value for name, _, value in pairs if name not in _OPEN_QUERY)


def _is_telling(secret: str) -> bool:
    """Whether a text in which a secret is found speaks of the secret."""
    return not _COMMON.fullmatch(secret) and not os.path.exists(secret)  # noqa: PTH110  # Path raises if it is long.


def _variants(secret: str) -> Iterator[str]:
    """Yield the ways in which a text may hold a secret: as it is, in a URI, in JSON, in a repr."""
    spellings = {secret, unquote(secret), quote(secret, safe=""), json.dumps(secret)[1:-1], repr(secret)[1:-1]}
    return (spelling for spelling in spellings if len(spelling.strip()) >= _SHORTEST and MASK not in spelling)


def _searched(secret: str) -> str:
    alone = r"(?<![0-9A-Za-z]){}(?![0-9A-Za-z])" if _HEX.fullmatch(secret) else "{}"
    return alone.format(re.escape(secret))
