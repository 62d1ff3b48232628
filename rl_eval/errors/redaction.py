"""Redaction of secrets in all output of the process: files, printed lines, messages.

A secret is recognized by its name, its place or its form. Names are ``api_key``, ``password`` and others; in a string,
a name is before ``=`` or ``:``, or after ``--``. Places are the values of ``runtime_env.env_vars``, and the user
and the query of a URI. Forms are ``sk-...``, ``Bearer ...`` or a PEM block. In messages, tracebacks and notes, a secret
is also recognized by its value: secrets of the configuration and of this process's environment variables are masked
everywhere. Variables that only configure libraries (``OMP_NUM_THREADS``) are not secrets.

Masking changes the identity of a run and prevents its replay. So only an unmistakable name marks a secret:
``pass_rate``, ``tokenizer`` and ``obs_key`` are not secrets.
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

MASK: Final = "***"
_MASKED: Final = re.compile(r"\*\*\*( \([0-9a-f]{4}\))?")

_SECRET: Final = frozenset(
    (
        *("apikey", "auth", "authorization", "bearer", "connectionstring", "connstr", "cookie", "cookies", "cred"),
        *("credential", "credentials", "creds", "dsn", "jwt", "oauth", "otp", "passcode", "passphrase", "passwd"),
        *("password", "passwords", "private", "pw", "pwd", "secret", "secrets", "token", "tokens", "webhook"),
    )
)
_SECRET_NUMBER: Final = frozenset(("apikey", "passcode", "passphrase", "passwd", "password", "pwd", "secret"))
"""Words of a name that mark even a number as secret. ``tokens`` is not one of them, since it may be a count."""
_VOCABULARY: Final = re.compile(r"(bos|cls|end|eos|image|mask|pad|sep|special|start|stop|unk)_?tokens?", re.IGNORECASE)
"""Names of tokens that a tokenizer knows."""
_PASS: Final = re.compile(r"pass|(.*[_\W])?(admin|db|login|my|root|smtp|sql|user)[_-]?pass", re.IGNORECASE)
"""Names in which ``pass`` means a password. In other names, such as ``pass_rate`` and ``low_pass``, it has another
meaning."""
_KEYS: Final = frozenset(
    (
        *("access", "account", "activation", "api", "auth", "encryption", "licence", "license", "master", "private"),
        *("product", "secret", "service", "signing", "ssh", "storage", "subscription"),
    )
)
"""Words that mark a secret if ``key`` follows, as in ``api_key``."""
_RANDOM: Final = re.compile(r"(?=.*[0-9])(?=.*[A-Za-z])[\w+/=.~-]{16,}")
"""Form of a secret, for values whose whole name is ``key``."""
_COMPOUND: Final = re.compile(
    rf"[a-z]+?(passwords?|passwd|passphrase|passcode|secrets?|tokens?|credentials?)|({'|'.join(_KEYS)})(keys?)"
)
"""Words joined without a separator, such as ``dbpassword`` and ``accesskey``."""
_WORD: Final = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")

_STEERING: Final = re.compile(
    r"(CUDA|EGL|JAX|MKL|MUJOCO|NCCL|NUMEXPR|NVIDIA|OMP|OPENBLAS|PYOPENGL|PYTHON|RAY|RL_EVAL|SDL|TORCH|XLA)_?.*"
    r"|DISPLAY|LANG|LC_.*|TZ|.*_(DEVICES|DIR|HOME|PATH|THREADS)",
)
"""Environment variables that are not secrets, unless their names mark a secret."""
_PLACES: Final = ("env_vars", "runtime_env")

_SHORTEST: Final = 6
"""Minimum length of a value to search for. A shorter value would be found in too many strings."""
_COMMON: Final = re.compile(r"(?!.{16})([a-z]+|[A-Z]+|[A-Z]?[a-z]+|[+-]?[\d.]+)")
"""Plain words and numbers. They are not searched for, because they could mean something else."""
_HEX: Final = re.compile(r"[0-9a-fA-F]+")
"""Hexadecimal values. They are masked only as a whole word, because they could be part of a digest."""

_USER: Final = re.compile(r"://([^\s/@:\"'<>]{0,500}:[^\s\"'<>?]{0,500}|[^\s/@\"'<>]{0,500})@")
"""User info of a URI. A password may contain slashes, so user info with a colon ends at the last ``@``. The bound of
the length keeps the time linear."""
_QUERY: Final = re.compile(r"://[^\s?\"'<>]{0,2000}\?([^\s\"'<>]*)")
_ASSIGNED: Final = re.compile(r"""(?<![\w-])([\w-]{1,64})=(?!=)("[^"]*"|'[^']*'|["']?[^\s;&"']+)""")
_OPTION: Final = re.compile(r"""(?<![\w-])--([A-Za-z][\w-]{0,63})\s+("[^"]*"|'[^']*'|[^\s;&"'-][^\s;&"']*)""")
_QUOTED: Final = re.compile(r"""["']([\w.-]{1,64})["']\s*:\s*("(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*'|\d+)""")
"""Entry of JSON or of a dict's repr."""
_LINE: Final = re.compile(r"""(?<![\w-])([\w-]{1,64}):\s+(?=("[^"]*"|'[^']*'|[^\s,;"'\[\](){}]+))""")
"""Entry of YAML, or a header. The pattern does not consume the value, because the value may be the name of another
entry."""
_MIXED: Final = r"(?=[\w-]*[a-z])(?=[\w-]*[A-Z])(?=[\w-]*\d)"
_FORMED: Final = re.compile(
    r"(?i:authorization)[\"']?\s*[:=]\s*[\"']?((?:\w+\s+)?[^\s\"',;}]{4,})"
    r"|(?i:cookie):\s+((?!\*\*\*)[^\r\n\"']+)"
    r"|\bBearer\s+((?=[\w+/.~-]*[\d=])[\w+/=.~-]{8,})"
    r"|\bBasic\s+((?=[A-Za-z0-9+/]*[\d=])[A-Za-z0-9+/]{8,}={0,2})(?![=\w.-])"
    rf"|(?<![\w-])({_MIXED}(?:sk-[\w-]{{16,}}|(?:gh[oprsu]|hf)_[A-Za-z0-9]{{16,}}|github_pat_\w{{16,}}))"
    r"|(?<![\w-])((?:AKIA|ASIA)[A-Za-z0-9]{12,})"
    r"|(-----BEGIN [A-Z0-9 ]+-----.*?(?:-----END [A-Z0-9 ]+-----|\Z))",
    re.DOTALL,
)
"""Strings that are secrets under any name."""
_MARKS: Final = (
    *("uthorization", "ookie:", "Bearer", "Basic", "sk-", "ghp_", "gho_", "ghr_", "ghs_", "ghu_", "github_pat_", "hf_"),
    *("AKIA", "ASIA", "-----BEGIN"),
)
"""Strings for a quick check: a secret of one of these forms contains at least one of the strings, and most other texts
contain none of them."""
_SWITCH: Final = re.compile(r"true|false|none|null|~", re.IGNORECASE)
"""Values that are not secrets in formats where every value is a string."""
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
"""Names of query parameters of a URI. Their values are places or options, not credentials."""

Path = tuple[str, ...]
_lock: Final = threading.Lock()
_known: set[str] = set()
_pattern: re.Pattern[str] | None = None
_num_variables = 0
"""Number of environment variables when their secrets were last collected."""


def redact(value: Any, *path: str) -> Any:
    """Return plain data without its secrets, recognized by name, place and form.

    Secrets of other configurations in this process do not change the result.

    Args:
        value: Nested mappings, lists and scalars.
        path: Keys of the value, the outermost first.
    """
    return _walk(value, path, lambda _path, _value: MASK, lambda _path, text: _redact_inside(text))


def digest_secrets(value: Any, *path: str) -> Any:
    """Return plain data in which every secret is replaced with a mask and a digest.

    The digest has 16 bits. So two different secrets have the same digest in one of 65,536 cases, and the digest does
    not help to guess a secret, even a short one.
    """
    return _walk(value, path, _digested, _identified)


def redact_text(text: str) -> str:
    """Return a text with masked secrets: known values, and values recognized by name, by form, or in a URI."""
    if len(os.environ) != _num_variables:
        _learn_variables()
    return _redact_inside(text if _pattern is None else _pattern.sub(MASK, text))


def redacted_traceback(error: BaseException) -> str:
    """Return the traceback of an error and its causes, without secrets."""
    return redact_text("".join(traceback.format_exception(type(error), error, error.__traceback__)))


def redact_command(words: Sequence[str]) -> list[str]:
    """Return a command line with masked secrets, such as those in ``KEY=VALUE``, after ``--password``, and in URIs."""
    return [_redact_word(word, path) for path, word in _items(words, ())]


def learn(value: Any, *path: str) -> None:
    """Remember the secrets of a configuration or a URI. From now on, they are masked everywhere in this process."""
    global _pattern  # noqa: PLW0603  # Secrets are known to the whole process.
    found = {variant for secret in secrets_in(value, *path) if _is_telling(secret) for variant in _variants(secret)}
    with _lock:
        if not found <= _known:
            _known.update(found)
            # The longest secret comes first, because a secret may be the beginning of another secret.
            _pattern = re.compile("|".join(map(_searched, sorted(_known, key=len, reverse=True))))


def _learn_variables() -> None:
    """Remember the values of secret environment variables, if the number of environment variables has changed."""
    global _num_variables  # noqa: PLW0603
    variables = dict(os.environ)
    _num_variables = len(variables)
    learn(variables)


# Recognition of secrets


def _is_secret(path: Path, value: Any) -> bool:
    for position, name in enumerate(path):
        words = _words(name)
        if isinstance(value, (str, bytes)):
            if _is_named(name) or _is_key(name, value):
                return True
        elif words & _SECRET_NUMBER:
            return True
        # A string in place of a mapping may be an assignment, such as KEY=VALUE.
        if name in _PLACES and name == path[-1] and isinstance(value, (str, bytes)):
            return True
        if position and path[position - 1] == "env_vars" and not _STEERING.fullmatch(name):
            return True
    return False


@functools.lru_cache(maxsize=1024)
def _is_named(name: str) -> bool:
    words = _words(name)
    if words & _SECRET:
        return not _VOCABULARY.fullmatch(name)
    return bool(words & {"connection", "conn"} and words & {"string", "str"}) or _PASS.fullmatch(name) is not None


def _is_key(name: str, value: str | bytes) -> bool:
    words = _words(name)
    if "key" not in words and "keys" not in words:
        return False
    text = value if isinstance(value, str) else value.decode("latin-1")
    return bool(_KEYS & words) or name.isupper() or (words == {"key"} and bool(_RANDOM.fullmatch(text)))


@functools.lru_cache(maxsize=1024)  # The same few names lead to nearly all values.
def _words(name: str) -> frozenset[str]:
    words = [word.lower() for word in _WORD.findall(name)]
    compounds = filter(None, map(_COMPOUND.fullmatch, words))
    return frozenset((*words, *(part for found in compounds for part in found.groups() if part)))


def _walk(value: Any, path: Path, mask: Callable[[Path, Any], str], text: Callable[[Path, str], str]) -> Any:
    if isinstance(value, Mapping):
        return {key: _walk(item, where, mask, text) for key, where, item in _entries(value, path)}
    if isinstance(value, (list, tuple)):
        walked = [_walk(item, where, mask, text) for where, item in _items(value, path)]
        return tuple(walked) if isinstance(value, tuple) else walked
    if isinstance(value, str) and _MASKED.fullmatch(value):
        return value
    if _can_be_secret(value) and _is_secret(path, value):
        return mask(path, value)
    return text(path, value) if isinstance(value, str) else value


def _entries(values: Mapping[Any, Any], path: Path) -> Iterator[tuple[Any, Path, Any]]:
    """Yield the key, the path and the value of each entry.

    In ``{"name": "token", "value": "abc"}``, the path of ``"abc"`` ends with ``token``.
    """
    names = [name for key, name in values.items() if str(key).lower() in {"name", "key"} and isinstance(name, str)]
    named = next((name for name in names if _is_named(name) or _is_key(name, "")), None)
    for key, item in values.items():
        yield key, (*path, named if named and str(key).lower() == "value" else str(key)), item


def _items(values: Sequence[Any], path: Path) -> Iterator[tuple[Path, Any]]:
    """Yield the items of a list with their paths.

    In ``["--token", "abc"]``, the path of ``"abc"`` ends with ``token``.
    """
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
    # Secrets that only this process knows are not masked, because an identity must be the same in every process.
    redacted = _redact_inside(text)
    return text if redacted == text else f"{redacted} ({_digest(path, text)})"


def _digest(path: Path, value: Any) -> str:
    content = value if isinstance(value, bytes) else str(value).encode("utf-8", "surrogatepass")
    return hmac.new(".".join(path).encode(), content, hashlib.sha256).hexdigest()[:4]


def _redact_inside(text: str) -> str:
    """Mask the secrets in a text, recognized by name, by form, or in a URI."""
    parts, done = [], 0
    for start, end, _ in sorted(_spots(text)):
        if start >= done:
            parts += [text[done:start], MASK]
        done = max(done, end)
    return "".join([*parts, text[done:]])


def _spots(text: str) -> Iterator[tuple[int, int, str]]:
    """Yield start, end and text of each secret in a text, recognized by name, by form, or in a URI."""
    for found in _USER.finditer(text):
        yield *found.span(1), found[1].rpartition(":")[2]
    for found in _QUERY.finditer(text):
        start = found.start(1)
        for pair in found[1].split("&"):
            name, equals, value = pair.partition("=")
            if equals and name not in _OPEN_QUERY:
                yield start + len(name) + 1, start + len(pair), value
            start += len(pair) + 1
    for pattern in (_ASSIGNED, *([_OPTION] if "--" in text else []), _QUOTED, _LINE):
        for found in pattern.finditer(text):
            if _gives_secret(*found.groups()) and (pattern is not _LINE or _is_told(*found.groups())):
                yield *found.span(2), found[2].strip("\"'")
    for found in _FORMED.finditer(text) if any(mark in text for mark in _MARKS) else ():
        assert found.lastindex is not None
        yield *found.span(found.lastindex), found[found.lastindex]


def _gives_secret(name: str, value: str) -> bool:
    # RAY_AUTH_MODE=token is not a secret, and messages contain it.
    plain = value.strip("\"'") or value
    return not (name.endswith("_MODE") or _SWITCH.fullmatch(plain.rstrip(",)]}"))) and _is_secret(
        (name,), 1 if value.isdecimal() else plain
    )


def _is_told(name: str, value: str) -> bool:
    """Whether ``name: value`` in prose contains a secret; for example, ``token: str`` does not."""
    words = _words(name)
    return bool(words & _SECRET_NUMBER) or (words != {"key"} and len(value) >= 4 and not _COMMON.fullmatch(value))


def _redact_word(word: str, named: Path) -> str:
    if _is_secret(named, word):
        return MASK
    key, equals, value = word.removeprefix("--set=").partition("=")
    path = tuple(key.lstrip("-").split("."))
    if equals and value and "://" not in key and _is_secret(path, value):
        return word[: len(word) - len(value)] + MASK
    return redact_text(word)


# Remembered secrets


def secrets_in(value: Any, *path: str) -> frozenset[str]:
    """Return the secrets in plain data as strings, and each line of these secrets.

    A secret is a whole value or a part of a string.
    """
    found: list[str] = []

    def inside(_: Path, text: str) -> str:
        found.extend(secret for _, _, secret in _spots(text))
        return text

    def whole(path: Path, secret: Any) -> str:
        text = secret.decode("latin-1") if isinstance(secret, bytes) else str(secret)
        found.append(text)
        return inside(path, text)

    _walk(value, path, whole, inside)
    return frozenset(line for secret in found for line in (secret, *secret.splitlines()))


def _is_telling(secret: str) -> bool:
    """Whether a value is rare enough to search for: not a common word, a number or a path that exists."""
    return not _COMMON.fullmatch(secret) and not os.path.exists(secret)  # noqa: PTH110  # Path raises if it is long.


def _variants(secret: str) -> Iterator[str]:
    """Yield the spellings of a secret: as it is, in a URI, in JSON, and in a repr."""
    spellings = {secret, unquote(secret), quote(secret, safe=""), json.dumps(secret)[1:-1], repr(secret)[1:-1]}
    return (spelling for spelling in spellings if len(spelling.strip()) >= _SHORTEST and MASK not in spelling)


def _searched(secret: str) -> str:
    alone = r"(?<![0-9A-Za-z]){}(?![0-9A-Za-z])" if _HEX.fullmatch(secret) else "{}"
    return alone.format(re.escape(secret))
