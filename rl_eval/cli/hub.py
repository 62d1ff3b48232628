"""Files of the Hugging Face Hub, named as ``hf://repo/file``: they are downloaded into its own cache."""

from __future__ import annotations

import glob
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple

from rl_eval.adapters import integrations
from rl_eval.errors import ConfigError, nearest

__all__ = ["on_this_machine"]

_SCHEME: Final = "hf://"
_FORM: Final = "hf://OWNER/REPO/FILE or hf://OWNER/REPO/FILE@REVISION"


class _HubFile(NamedTuple):
    """File or folder of a repository."""

    text: str
    repo: str
    path: str
    revision: str | None


def on_this_machine(text: str, say: Callable[[str], None]) -> str:
    """Return a text with the path of a downloaded file in the place of ``hf://OWNER/REPO/FILE``; any other as it is.

    Normalizers of Stable-Baselines3 are downloaded with the file, for they belong to it. Without a network, or if
    the server does not answer, what the cache has is used.

    Args:
        text: Such as ``hf://sb3/ppo-CartPole-v1/ppo-CartPole-v1.zip``, or ``torch:pkg:make@hf://me/nets/a.safetensors``.
        say: Called with what is downloaded from where, and then with the revision.
    """
    before, scheme, rest = text.partition(_SCHEME)
    if not scheme:
        return text
    file = _parse(rest)
    folder, names = _fetched(file, say)
    path = folder / file.path
    if not path.exists():
        raise ConfigError(f"{file.text}: {file.repo} has no such file: {nearest(file.path, names)}")
    say(f"{file.text}: revision {folder.name}")
    return f"{before}{path}"


def _parse(rest: str) -> _HubFile:
    place, at, revision = rest.partition("@")
    owner, name, path = (*place.split("/", 2), "", "")[:3]
    if not (owner and name and path) or (at and not revision):
        raise ConfigError(f"{_SCHEME}{rest} is no file of the Hugging Face Hub: write it as {_FORM}")
    return _HubFile(_SCHEME + rest, f"{owner}/{name}", path, revision or None)


def _fetched(file: _HubFile, say: Callable[[str], None]) -> tuple[Path, list[str]]:
    """Return the folder of the revision, which has its digest as name, and the names of all its files."""
    try:
        from huggingface_hub import constants, snapshot_download
        from huggingface_hub.utils import disable_progress_bars
    except ImportError:
        raise ConfigError(f"{file.text} needs the package huggingface_hub: pip install 'rl-eval[hf]'") from None
    say(f"{file.text}: asking {constants.ENDPOINT}, which needs the network")
    if not sys.stderr.isatty():
        disable_progress_bars()
    path = glob.escape(file.path)
    beside = glob.escape(str(Path(file.path).parent)).removeprefix(".")
    companions = [f"{beside}/{one.companions}".removeprefix("/") for one in integrations() if one.companions]
    patterns = [path, f"{path}/*", *companions]
    names = _names(file)
    try:
        folder = snapshot_download(
            file.repo, revision=file.revision, allow_patterns=patterns, local_files_only=names is None
        )
    except Exception as error:
        raise ConfigError(f"{file.text}: {_reason(file, error)}") from error
    return Path(folder), names or []


def _names(file: _HubFile) -> list[str] | None:
    """Return the names of a revision's files; None if the server cannot be reached or does not answer.

    A download would wait for ever for a server that accepts and is silent, since only its later questions have limits.
    """
    from huggingface_hub import HfApi, constants, errors

    try:
        revision = file.revision or constants.DEFAULT_REVISION
        found = HfApi().model_info(file.repo, revision=revision, timeout=constants.HF_HUB_ETAG_TIMEOUT)
    except errors.HfHubHTTPError:
        return []  # An answer: the download says what is wrong.
    except Exception:
        return None
    return [sibling.rfilename for sibling in found.siblings or ()]


def _reason(file: _HubFile, error: Exception) -> str:
    """Say in one line why a file was not downloaded."""
    from huggingface_hub import constants, errors

    if isinstance(error, errors.LocalEntryNotFoundError):
        if constants.HF_HUB_OFFLINE:
            return "it is not in the cache, and HF_HUB_OFFLINE forbids to download it"
        return (
            f"it is not in the cache, and {constants.ENDPOINT} cannot be reached, or has not answered for "
            f"{constants.HF_HUB_ETAG_TIMEOUT} s (HF_HUB_ETAG_TIMEOUT): connect to the network, or try again later"
        )
    if isinstance(error, errors.GatedRepoError):
        return f"{file.repo} is given to whom its owners allow only: ask them, and log in with `hf auth login`"
    if isinstance(error, errors.RepositoryNotFoundError):
        return f"there is no repository {file.repo}, or it is private: log in with `hf auth login`, or set HF_TOKEN"
    if isinstance(error, errors.RevisionNotFoundError):
        return f"{file.repo} has no revision {file.revision}"
    return str(error).strip().partition("\n")[0] or type(error).__name__
