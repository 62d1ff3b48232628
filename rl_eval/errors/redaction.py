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
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain, pairwise
from typing import Any, Final
from urllib.parse import quote, unquote

from rl_eval.errors.printable import printable

MASK: Final = "***"
_MASKED: Final = re.compile(r"\*\*\*( \([0-9a-f]{4}\))?")

_WORD: Final = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
_KEYS: Final = (
    "access|account|activation|api|auth|encryption|licen[cs]e|master|private|product|secret|service|signing|ssh|storage"
    "|subscription"
)
"""Words that mark a secret together with ``key``, as in ``api_key`` and ``accesskeys``."""
_NAME: Final = re.compile(
    r"(?!_(bos|cls|end|eos|image|mask|pad|sep|special|start|stop|unk)_?tokens?_\Z)"  # Tokens of a tokenizer.
    r"(.*_([a-z]*(passwords?|passwd|passphrase|passcode|secrets?|tokens?|credentials?)|auth|authorization|bearer"
    r"|conn(ection)?_?str(ing)?|cookies?|creds?|dsn|jwt|oauth|otp|private|pw|pwd|webhook)_"
    r"|_((.*_)?(admin|db|login|my|root|smtp|sql|user)_?)?pass_\Z"  # Not pass_rate and low_pass.
    rf"|(?=.*(_|{_KEYS})keys?_).*_({_KEYS})(_|keys?_))"
)
"""Names of secret texts, as lower-case words between underscores."""
_NUMBER: Final = re.compile(r"_([a-z]*(password|passwd|passphrase|passcode|secret)|apikey|pwd)_")
"""Names of secret numbers. ``tokens`` is not one of them, since it may be a count."""
_RANDOM: Final = re.compile(r"(?=.*[0-9])(?=.*[A-Za-z])[\w+/=.~-]{16,}")
"""Form of a secret, for values whose whole name is ``key``."""
_STEERING: Final = re.compile(
    r"(CUDA|EGL|JAX|MKL|MUJOCO|NCCL|NUMEXPR|NVIDIA|OMP|OPENBLAS|PYOPENGL|PYTHON|RAY|RL_EVAL|SDL|TORCH|XLA)_?.*"
    r"|DISPLAY|LANG|LC_.*|TZ|.*_(DEVICES|DIR|HOME|PATH|THREADS)"
)
"""Environment variables that are not secrets, unless their names mark a secret."""

_USER: Final = re.compile(
    r"://(?!(?<=openpi://)[\w.,:\[\]-]*:(?:\d{1,5}|PORT)@)"  # openpi://HOST:PORT@FILE has no user.
    r"([^\s/@:\"'<>]{0,500}:[^\s\"'<>?]{0,500}|[^\s/@\"'<>]{0,500})@"
)
"""User info of a URI. A password may contain slashes, so user info with a colon ends at the last ``@``. The bound of
the length keeps the time linear."""
_URI: Final = re.compile(r"://[^\s\"'<>]+")
_PARAMETER: Final = re.compile(r"[?&](?!(?:region|scheme|\w+_(?:creation|deletion|override|timeout))=)[^=&?]*=([^&]*)")
"""Parameter of a URI, except those whose values are places or options."""
_FORMED: Final = (
    re.compile(r"(?:(?i:authorization):\s*|(?i:cookie):\s+)((?!\*\*\*)[^\s\"'][^\r\n\"']*)"),
    re.compile(r"Bearer\s+((?=[\w+/.~-]*[\d=])[\w+/=.~-]{8,})"),
    re.compile(r"Basic\s+((?=[A-Za-z0-9+/]*[\d=])[A-Za-z0-9+/]{8,}={0,2})(?![=\w.-])"),
    re.compile(
        r"(?<![\w-])((?:sk-|gh[oprsu]_|hf_|github_pat_)(?=\S*[a-z])(?=\S*[A-Z])(?=\S*\d)[\w-]{16,}|A[KS]IA\w{12,})"
    ),
    re.compile(r"(-----BEGIN [A-Z0-9 ]+-----[\s\S]*?(?:-----END [A-Z0-9 ]+-----|\Z))"),
)
"""Strings that are secrets under any name."""
_NAMED: Final = re.compile(r"""(?<![\w-])(--)?([\w-]{1,64})(=(?!=)|["']\s*:\s*(?=["'\d])|:\s+|(?(1)\s+(?!-)|(?!)))""")
"""Name with a separator: of an assignment, of JSON, of YAML or a header, or of an option."""
_VALUE: Final = re.compile(r"""(?s)"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*'|(?<==)["']?[^\s;&"']+|(?<!=)["']?[^\s;"']+""")
_REASON: Final = re.compile(r"(?i:cannot|invalid|(is|no|not|too) [a-z]+|permission denied|unknown|unsupported)\b")
"""Begin of an error text. After a path such as ``/etc/passwd:``, it is not a secret."""
_SWITCH: Final = re.compile(r"true|false|none|null|~|", re.IGNORECASE)
"""Values that are not secrets in formats where every value is a string."""

_SHORTEST: Final = 6
"""Minimum length of a value to search for. A shorter value would be found in too many strings."""
_COMMON: Final = re.compile(r"(?!.{16})([a-z]+|[A-Z]+|[A-Z]?[a-z]+|[+-]?[\d.]+)")
"""Plain words and numbers. They are not searched for, and neither are paths, because they could mean something else."""
_HEX: Final = re.compile(r"[0-9a-fA-F]+")
"""Hexadecimal values. They are masked only as a whole word, because they could be part of a digest."""

Path = tuple[str, ...]
_known: Final[set[str]] = set()
_variables: Final[dict[Any, Any]] = {}
"""Environment variables when their secrets were last collected."""


def redact(value: Any, *path: str) -> Any:
    """Return plain data without its secrets, recognized by name, place and form.

    Secrets of other configurations in this process do not change the result.

    Args:
        value: Nested mappings, lists and scalars.
        path: Keys of the value, the outermost first.
    """
    return _walk(value, path, lambda _path, _value, hidden: hidden)


def digest_secrets(value: Any, *path: str) -> Any:
    """Return plain data in which every secret is replaced with a mask and a digest.

    Secrets that only this process knows remain, because an identity must be the same in every process. The digest has
    16 bits. So two different secrets have the same digest in one of 65,536 cases, and the digest does not help to guess
    a secret, even a short one.
    """

    def digested(path: Path, value: Any, hidden: str) -> str:
        content = value if isinstance(value, bytes) else str(value).encode("utf-8", "surrogatepass")
        return f"{hidden} ({hmac.new('.'.join(path).encode(), content, hashlib.sha256).hexdigest()[:4]})"

    return _walk(value, path, digested)


def secrets_in(value: Any, *path: str) -> frozenset[str]:
    """Return the secrets in plain data as strings, and each line of these secrets.

    A secret is a whole value or a part of a string.
    """
    found: list[str] = []

    def collect(_: Path, value: Any, hidden: str) -> str:
        text = value.decode("latin-1") if isinstance(value, bytes) else str(value)
        spots = [*_spots(text), *([(0, len(text))] if hidden == MASK else [])]
        found.extend(text[start:end].strip("\"'") for start, end in spots)
        return hidden

    _walk(value, path, collect)
    # The password of a URI's user is after a colon.
    return frozenset(part for one in found for part in (one, one.rpartition(":")[2], *one.splitlines()))


def learn(value: Any, *path: str) -> None:
    """Remember the secrets of a configuration or a URI. From now on, they are masked everywhere in this process."""
    for secret in secrets_in(value, *path):
        if not (_COMMON.fullmatch(secret) or os.path.exists(secret)):  # noqa: PTH110  # Path raises if it is long.
            quoted = quote(secret, safe="", errors="surrogatepass")
            spellings = {secret, unquote(secret), quoted, json.dumps(secret)[1:-1], repr(secret)[1:-1]}
            _known.update(one for one in spellings if len(one.strip()) >= _SHORTEST and MASK not in one)


def redact_text(text: str, most: int = 100_000) -> str:
    """Return a printable text with masked secrets: known values, and values recognized by name, by form, or in a URI.

    Args:
        text: The text.
        most: Maximum number of characters. A longer text is cut first, since the search takes time.
    """
    # Reading all names takes longer. A program may have replaced os.environ with a dict.
    raw: Mapping[Any, Any] = getattr(os.environ, "_data", os.environ)
    if changed := raw != _variables and dict(raw.items() - _variables.items()):
        learn({os.fsdecode(name): os.fsdecode(value) for name, value in changed.items()})
        _variables.update(changed)
    shown, known = printable(text[:most]), sorted(_known, key=len, reverse=True)  # A secret may begin with another one.
    for secret in known:
        if secret in shown:
            beside = "[0-9A-Za-z]" if _HEX.fullmatch(secret) else "(?!)"
            shown = re.sub(f"(?<!{beside}){re.escape(secret)}(?!{beside})", MASK, shown)
    shown = _masked(shown)
    # The cut may leave the first part of a secret, which is not recognized.
    return shown if len(text) <= most else f"{shown[: max(0, len(shown) - len(''.join(known[:1])))]} (cut)"


def redact_command(words: Sequence[str]) -> list[str]:
    """Return a command line with masked secrets, such as those in ``KEY=VALUE``, after ``--password``, and in URIs."""
    shown = []
    for path, word in _items(words, ()):
        key, _, value = word.removeprefix("--set=").partition("=")
        assigned = _is_secret(tuple(key.lstrip("-").split(".")), value)
        text = redact_text(word[: len(word) - len(value)] + MASK if assigned else word)
        shown.append(MASK if _is_secret(path, word) else text)
    return shown


# Recognition of secrets


@functools.lru_cache(maxsize=1024)  # The same few names lead to nearly all values.
def _marked(name: str) -> int:
    """Return which values a name marks as secret: 0 none, 1 random texts, 2 all texts, 3 also numbers."""
    words = f"_{'_'.join(_WORD.findall(name)).lower()}_"
    if name.endswith("_MODE"):  # RAY_AUTH_MODE=token is not a secret, and messages contain it.
        return 0
    named = _NAME.match(words) or (name.isupper() and re.search("_keys?_", words))
    return 3 if _NUMBER.search(words) else 2 if named else int(words == "_key_")


def _is_secret(path: Path, value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, (str, bytes, int, float)) or not value:
        return False
    least = 3
    if isinstance(value, (str, bytes)):
        if path[-1:] in {("env_vars",), ("runtime_env",)}:
            return True  # A string in place of a mapping may be an assignment, such as KEY=VALUE.
        least = 1 if isinstance(value, bytes) or _RANDOM.fullmatch(value) else 2
    variables = (name for place, name in pairwise(path) if place == "env_vars")
    return any(_marked(name) >= least for name in path) or not all(map(_STEERING.fullmatch, variables))


def _walk(value: Any, path: Path, replace: Callable[[Path, Any, str], str]) -> Any:
    """Return plain data in which values with secrets are replaced.

    Args:
        value: Nested mappings, lists and scalars.
        path: Keys of the value.
        replace: Takes the path and the value of a leaf, and its text with masked secrets.
    """
    if isinstance(value, Mapping):
        return {key: _walk(item, where, replace) for key, where, item in _entries(value, path)}
    if isinstance(value, (list, tuple)):
        walked = [_walk(item, where, replace) for where, item in _items(value, path)]
        return tuple(walked) if isinstance(value, tuple) else walked
    if isinstance(value, str) and _MASKED.fullmatch(value):
        return value
    hidden = MASK if _is_secret(path, value) else _masked(value) if isinstance(value, str) else value
    return value if hidden is value or hidden == value else replace(path, value, hidden)


def _entries(values: Mapping[Any, Any], path: Path) -> Iterator[tuple[Any, Path, Any]]:
    """Yield the key, the path and the value of each entry.

    In ``{"name": "token", "value": "abc"}``, the path of ``"abc"`` ends with ``token``.
    """
    names = (name for key, name in values.items() if str(key).lower() in {"name", "key"} and isinstance(name, str))
    named = next((name for name in names if _marked(name) > 1), None)
    for key, item in values.items():
        yield key, (*path, named if named and str(key).lower() == "value" else str(key)), item


def _items(values: Sequence[Any], path: Path) -> Iterator[tuple[Path, Any]]:
    """Yield the items of a list with their paths.

    In ``["--token", "abc"]``, the path of ``"abc"`` ends with ``token``.
    """
    for before, value in pairwise(("", *values)):
        word, option = (one if isinstance(one, str) else "" for one in (value, before))
        named = option.startswith("-") and "=" not in option and not word.startswith("-")
        yield (*path, option.lstrip("-")) if named else path, value


def _masked(text: str) -> str:
    """Mask the secrets in a text, recognized by name, by form, or in a URI."""
    parts, done = [], 0
    for start, end in sorted(_spots(text)):
        parts += [text[done:start], MASK] if start >= done else []
        done = max(done, end)
    return "".join([*parts, text[done:]])


def _spots(text: str) -> Iterator[tuple[int, int]]:
    """Yield start and end of each secret in a text, recognized by name, by form, or in a URI."""
    queries = (found for uri in _URI.finditer(text) for found in _PARAMETER.finditer(text, *uri.span()))
    for found in chain(_USER.finditer(text), queries, *(form.finditer(text) for form in _FORMED)):
        yield found.span(1)
    done = 0
    for found in _NAMED.finditer(text):
        name, separator = found.group(2, 3)
        if found.start() >= done and _marked(name) and (value := _VALUE.match(text, found.end())):
            done, shown = value.end(), value[0] if separator == "=" else value[0].rstrip(",)]}")
            is_file = separator[0] == ":" and text.endswith(("/", "\\"), 0, found.start())
            if not (is_file and _REASON.match(text, found.end())) and _gives_secret(name, separator[0], shown):
                yield found.end(), found.end() + len(shown)


def _gives_secret(name: str, separator: str, value: str) -> bool:
    plain = value.strip("\"'")
    if separator == ":" and plain == value and _marked(name) < 3:  # In prose, such as "token: str", it may be any word.
        word = re.split(r"[,\[({]", value)[0]
        if _marked(name) == 1 or len(word) < 4 or _COMMON.fullmatch(word):
            return False
    return not _SWITCH.fullmatch(plain.rstrip(",)]}")) and _is_secret((name,), 1 if value.isdecimal() else plain)
