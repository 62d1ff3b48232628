"""Where the files of a result go, and which existing files may be overwritten: only those of a result.

Everything is checked before the evaluation starts, so that hours of episodes do not end in a file that cannot
be written.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from rl_eval.errors import ConfigError

__all__ = ["claim_folder", "default_folder"]


def default_folder(config: Path, section: str | None) -> Path:
    """Return ``out/<name of the config>``, with the section's name if only that section is used."""
    return Path("out", f"{config.stem}-{section}" if section else config.stem)


def claim_folder(folder: Path) -> None:
    """Make sure that a result can be written to a folder, and create it.

    Raises:
        ConfigError: It holds files of that name which no evaluation wrote, or cannot be written to.
    """
    from rl_eval.report.files import EPISODES_FILE, RESULT_FILE

    taken = [name for name in (RESULT_FILE, EPISODES_FILE) if (folder / name).exists()]
    if taken and not _is_result(folder / RESULT_FILE):
        raise ConfigError(
            f"{folder / taken[0]} exists and is not the result of an evaluation: choose another folder with --output"
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"the output folder {folder} cannot be created: {error.strerror}") from error
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError(f"the output folder {folder} cannot be written to: choose another one with --output")


def _is_result(path: Path) -> bool:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(content, dict) and {"format", "fingerprint", "plan"} <= content.keys()
