"""Where the files of a result go, and which existing files may be overwritten: only those of a result.

Everything is checked before the evaluation starts, so that hours of episodes do not end in a file that cannot
be written.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from rl_eval.errors import ConfigError

__all__ = ["claim_folder", "is_saved", "output_folder"]


def output_folder(output: Path | None, run_dir: str | None, config: Path, section: str | None) -> Path | None:
    """Return where a result is saved, None for nowhere.

    As given; else in the run folder, unless that is behind a URI; else in ``out/<name of the config>``, with the
    section's name if only that section is used.
    """
    if output is not None:
        return output
    if run_dir is not None:
        from rl_eval.log.storage import is_uri

        return None if is_uri(run_dir) else Path(run_dir)
    return Path("out", f"{config.stem}-{section}" if section else config.stem)


def claim_folder(folder: Path) -> None:
    """Make sure that a result can be written to a folder, and create it.

    Raises:
        ConfigError: It holds files of that name which no evaluation wrote, or cannot be written to.
    """
    from rl_eval.report.files import EPISODES_FILE, RESULT_FILE

    for path, is_ours in ((folder / RESULT_FILE, _is_result), (folder / EPISODES_FILE, _is_episodes)):
        if path.exists() and not is_ours(path):
            raise ConfigError(
                f"{path} exists and is not the result of an evaluation: choose another folder with --output"
            )
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"the output folder {folder} cannot be created: {error.strerror}") from error
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError(f"the output folder {folder} cannot be written to: choose another one with --output")


def is_saved(fingerprint: str, folder: Path) -> bool:
    """Tell whether a folder holds a result with this fingerprint already."""
    from rl_eval.report.files import RESULT_FILE

    return bool(_read_result(folder / RESULT_FILE).get("fingerprint") == fingerprint)


def _is_result(path: Path) -> bool:
    return {"format", "fingerprint", "plan"} <= _read_result(path).keys()


def _is_episodes(path: Path) -> bool:
    """Look for our columns: a save that was cut short leaves this file without the other."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    from rl_eval.episode import ROW

    try:
        return set(ROW.names or ()) <= set(pq.read_schema(path).names)
    except (OSError, pa.ArrowException):
        return False


def _read_result(path: Path) -> dict[str, Any]:
    """Return the contents of a result file; empty for anything else."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}
