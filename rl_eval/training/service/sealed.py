"""Encrypted file with what a process needs that takes the place of a service's.

The key is an argument of the actor, which Ray keeps in memory and gives to the next process; it is in no file.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import final

from rl_eval.atomic_write import write_bytes

__all__ = ["SealedFile", "new_key"]

_NAME = "settings_{}"


def new_key() -> bytes:
    """Return a random key."""
    from cryptography.fernet import Fernet

    return Fernet.generate_key()


@final
class SealedFile:
    """File of one service in a folder, which at most one service uses.

    Args:
        folder: Where it is.
        key: From :func:`new_key`; a service with another one has another file.
    """

    def __init__(self, folder: Path, key: bytes) -> None:
        from cryptography.fernet import Fernet

        self._cipher = Fernet(key)
        self._path = folder / _NAME.format(hashlib.sha256(key).hexdigest()[:16])

    def read(self) -> bytes | None:
        """Return its content; None if it was not written."""
        return self._cipher.decrypt(self._path.read_bytes()) if self._path.exists() else None

    def write(self, content: bytes) -> None:
        """Replace those of earlier services, which have ended."""
        for former in self._path.parent.glob(_NAME.format("*")):
            former.unlink()
        write_bytes(self._path, self._cipher.encrypt(content))
        self._path.chmod(0o600)
