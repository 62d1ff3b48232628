"""Signatures by which the folders of this user, on this machine, are distinguished from those of others.

What a result says about its making names code: replaying it imports that code. Whoever can write a result can so have
anything run by whoever replays it. A key that only this user can read lies outside of all results, and each result is
signed with it when it is made. The signature covers the recorded config and the folder from which modules are found
first, so neither a stranger's config nor a stranger's modules beside a copied one pass.
"""

from __future__ import annotations

import functools
import hashlib
import hmac
import json
import os
import secrets
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from rl_eval.errors import UntrustedError
from rl_eval.records.plain import leaves

__all__ = ["check_trust", "is_own", "named_code", "sign", "working_folder"]

_KEY_BYTES: Final = 32
_CALLED: Final = ("environment.env", "policy.policy", "policy.weights")
_ARGUMENTS: Final = ("environment.env_kwargs.", "policy.policy_kwargs.")


def working_folder() -> str | None:
    """Return the folder in which this process works; None if it was removed."""
    try:
        return str(Path.cwd())
    except OSError:
        return None


def sign(config: Any) -> str | None:
    """Return the signature of a config, as plain JSON, in this process's working folder; None without a folder."""
    return _sign(config, working_folder())


def is_own(provenance: Mapping[str, Any]) -> bool:
    """Return whether this user made a result on this machine, in the folder in which this process works."""
    return _was_made_in(working_folder(), provenance)


def check_trust(provenance: Mapping[str, Any]) -> None:
    """Make sure that what a result names may be imported and called.

    Raises:
        UntrustedError: Somebody else may have written it; the message shows what it names.
    """
    if is_own(provenance):
        return
    names = "".join(f"\n  {name}" for name in named_code(provenance.get("config")))
    raise UntrustedError(
        f"{_reason(provenance)}; running its episodes again runs the code that it names:{names}\n"
        "If you trust whoever made it, give --trust (in Python: trust=True)"
    )


def named_code(config: Any) -> list[str]:
    """Return what a config has imported and called, and with which texts: one line each, ``section.key = 'value'``."""
    return [
        f"{key} = {value!r}"
        for key, value in leaves(config)
        if isinstance(value, str)
        and (key in _CALLED or key.startswith(_ARGUMENTS) or (key == "runners.runner" and ":" in value))
    ]


def _sign(config: Any, folder: str | None) -> str | None:
    if folder is None:
        return None
    message = json.dumps([config, folder], sort_keys=True, separators=(",", ":"))
    return hmac.new(_key(_key_file())[0], message.encode(), hashlib.sha256).hexdigest()


def _was_made_in(folder: str | None, provenance: Mapping[str, Any]) -> bool:
    theirs, ours = provenance.get("signature"), _sign(provenance.get("config"), folder)
    return isinstance(theirs, str) and ours is not None and hmac.compare_digest(theirs.encode(), ours.encode())


def _reason(provenance: Mapping[str, Any]) -> str:
    """Say why a result is not known as this user's, and how it could be."""
    if problem := _key(_key_file())[1]:
        return (
            f"whether this result was made by you is not known, since rl_eval cannot keep your key: {problem} (set "
            "XDG_STATE_HOME to a folder that you alone can write, before results are made)"
        )
    folder = provenance.get("folder")
    if isinstance(folder, str) and _was_made_in(folder, provenance):
        return (
            f"this result was made by you, working in {folder}, and you are in {working_folder()}, where other modules "
            "may have the same names: go there"
        )
    return "this result was not made by you, on this machine, in this folder"


def _key_file() -> Path | None:
    """Return where the key of this user is kept; None without a home."""
    state = Path(os.environ.get("XDG_STATE_HOME", ""))
    try:
        folder = state if state.is_absolute() else Path.home() / ".local" / "state"
    except RuntimeError:
        return None
    return folder / "rl_eval" / "key"


@functools.cache
def _key(path: Path | None) -> tuple[bytes, str]:
    """Return the key of this user, made at its first use, and why it cannot be kept, empty if it can.

    One that cannot be kept ends with this process.
    """
    new = secrets.token_bytes(_KEY_BYTES)
    if path is None:
        return new, "there is no home folder"
    try:
        return _kept(path, new), ""
    except OSError as error:
        return new, str(error) if str(path) in str(error) else f"{path}: {error}"


def _kept(path: Path, new: bytes) -> bytes:
    """Return the key in a file, which is made, whole, if there is none.

    Raises:
        OSError: The file cannot be made or read, or somebody else could have read or written it.
    """
    if not path.exists():
        _write_new(path, new)
    found = path.stat()
    key = path.read_bytes()
    if found.st_uid != os.geteuid() or found.st_mode & 0o077 or len(key) != _KEY_BYTES:
        raise PermissionError(f"{path} is not this user's alone")
    return key


def _write_new(path: Path, key: bytes) -> None:
    """Make a file that is whole as soon as it is there, unless another process is first."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        temporary.touch(mode=0o600, exist_ok=False)
        temporary.write_bytes(key)
        with suppress(FileExistsError):
            os.link(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
