"""Files of the Hugging Face Hub, named as ``hf://repo/file``: they are downloaded into its own cache."""

from __future__ import annotations

import glob
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final

from rl_eval.adapters import integrations
from rl_eval.errors import ConfigError

_SCHEME: Final = "hf://"
_FORM: Final = "hf://OWNER/REPO/FILE or hf://OWNER/REPO/FILE@REVISION"


def on_this_machine(text: str, say: Callable[[str], None]) -> str:
    """Return a text with the path of a downloaded file in the place of ``hf://OWNER/REPO/FILE``; any other as it is.

    Normalizers of Stable-Baselines3 are downloaded with the file, for they belong to it. Without a network, or if
    the server does not answer, the files of the cache are used.

    Args:
        text: Such as ``hf://sb3/ppo-CartPole-v1/ppo-CartPole-v1.zip``, or ``torch:pkg:make@hf://me/nets/a.safetensors``.
        say: Called with the address of each file, and then with its revision.
    """
    before, scheme, rest = text.partition(_SCHEME)
    if not scheme:
        return text
    place, at, revision = rest.partition("@")
    owner, name, path = (*place.split("/", 2), "", "")[:3]
    if not (owner and name and path) or (at and not revision):
        raise ConfigError(f"{_SCHEME}{rest} is not a file of the Hugging Face Hub: write it as {_FORM}")
    folder = _fetched(f"{_SCHEME}{rest}", f"{owner}/{name}", path, revision or None, say)
    if not (folder / path).exists():
        raise ConfigError(f"{_SCHEME}{rest}: {owner}/{name} has no such file")
    say(f"{_SCHEME}{rest}: revision {folder.name}")
    return f"{before}{folder / path}"


def _fetched(text: str, repo: str, path: str, revision: str | None, say: Callable[[str], None]) -> Path:
    """Return the folder of the revision, which has its digest as name."""
    try:
        from huggingface_hub import HfApi, constants, errors, snapshot_download
        from huggingface_hub.utils import disable_progress_bars
    except ImportError:
        raise ConfigError(f"{text} needs the package huggingface_hub: pip install 'rl-eval[hf]'") from None
    say(f"{text}: asking {constants.ENDPOINT}, which needs the network")
    if not sys.stderr.isatty():
        disable_progress_bars()
    offline = False
    try:  # A download has no limit of time for a server that accepts and is silent; this question has one.
        wanted = revision or constants.DEFAULT_REVISION
        HfApi().model_info(repo, revision=wanted, timeout=constants.HF_HUB_ETAG_TIMEOUT)
    except errors.HfHubHTTPError:
        pass  # An answer: the error of the download explains it.
    except Exception:
        offline = True
    file, beside = glob.escape(path), glob.escape(str(Path(path).parent)).removeprefix(".")
    companions = [f"{beside}/{one.companions}".removeprefix("/") for one in integrations() if one.companions]
    patterns = [file, f"{file}/*", *companions]
    try:
        return Path(snapshot_download(repo, revision=revision, allow_patterns=patterns, local_files_only=offline))
    except Exception as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        if isinstance(error, errors.LocalEntryNotFoundError):
            timeout = f"{constants.ENDPOINT} has not answered within {constants.HF_HUB_ETAG_TIMEOUT} s"
            why = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else f"{timeout} (HF_HUB_ETAG_TIMEOUT)"
            reason = f"it is not in the cache, and {why}"
        raise ConfigError(f"{text}: {reason}") from error
