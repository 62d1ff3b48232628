"""Changes of the code between the sessions of a log, and their acceptance.

The manifest never changes. A change that was accepted is an amendment, a file of its own under ``amendments/`` that
never changes either; the last one holds the digests that the next session is compared with.
"""

from __future__ import annotations

import datetime
import socket
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from rl_eval.log.manifest import Manifest
from rl_eval.log.numbered import read_numbered, write_numbered
from rl_eval.log.storage import Storage

__all__ = ["Amendment", "amend", "code_differences", "newest_code", "read_amendments"]

_FOLDER: Final = "amendments"
_SHOWN: Final = 12
"""Hexadecimal digits of a digest that are shown."""


@dataclass(frozen=True)
class Amendment:
    """One change of the code that was accepted."""

    accepted_at: str
    host: str
    num_finished: int
    """Episodes that the log held then."""
    differences: tuple[str, ...]
    code: dict[str, Any]
    """Digests from here on."""

    def __str__(self) -> str:
        return (
            f"the code was changed after {self.num_finished:,} finished episodes, which was accepted on "
            f"{self.accepted_at}: {'; '.join(self.differences)}"
        )


def code_differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return one line per file or package that both sides know and that differs."""
    files, packages = before.get("files", {}), before.get("packages", {})
    return [
        *(
            f"file {found['path']} (module {module}): sha256 {files[module]['sha256'][:_SHOWN]} -> "
            f"{found['sha256'][:_SHOWN]}"
            for module, found in now.get("files", {}).items()
            if module in files and files[module]["sha256"] != found["sha256"]
        ),
        *(
            f"package {name}: {packages[name]} -> {version}"
            for name, version in now.get("packages", {}).items()
            if packages.get(name, version) != version
        ),
    ]


def newest_code(manifest: Manifest, amendments: Sequence[Amendment]) -> dict[str, Any]:
    """Return the digests of the last session."""
    return amendments[-1].code if amendments else manifest.code


def read_amendments(storage: Storage) -> list[Amendment]:
    """Read all amendments of a log, in order.

    Raises:
        LogError: One is damaged.
    """
    return list(read_numbered(storage, _FOLDER, Amendment, "which code the last episodes were made with"))


def amend(storage: Storage, manifest: Manifest, known: Sequence[Amendment], ours: Manifest, finished: int) -> Amendment:
    """Write an amendment that makes this session's code that of the log from now on."""
    before = newest_code(manifest, known)
    amendment = Amendment(
        accepted_at=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        host=socket.gethostname(),
        num_finished=finished,
        differences=tuple(code_differences(before, ours.code)),
        code={part: {**before.get(part, {}), **found} for part, found in ours.code.items()},
    )
    write_numbered(storage, _FOLDER, len(known) + 1, asdict(amendment), indent=2)
    return amendment
