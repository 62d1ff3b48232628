"""Files of the Hugging Face Hub, named ``hf://repo/file`` and downloaded into the cache of ``huggingface_hub``."""

from __future__ import annotations

import glob
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final

from rl_eval.adapters import integrations
from rl_eval.errors import ConfigError, needs_extra

_SCHEME: Final = "hf://"
_FORM: Final = "hf://OWNER/REPO/FILE or hf://OWNER/REPO/FILE@REVISION"


def on_this_machine(text: str, say: Callable[[str], None]) -> str:
    """Replace ``hf://OWNER/REPO/FILE`` in a text by the path of the downloaded file; return other texts unchanged.

    Normalizers of Stable-Baselines3 and external data of ONNX are downloaded with the file. Without a network, or
    if the server does not answer, cached files are used.

    Args:
        text: Value of ``--policy``, such as ``hf://sb3/ppo-CartPole-v1/ppo-CartPole-v1.zip`` or
            ``torch:pkg:make@hf://me/nets/a.safetensors``.
        say: Prints a note to the user: the server before the download, and the revision after it.
    """
    before, scheme, rest = text.partition(_SCHEME)
    if not scheme:
        return text
    place, at, revision = rest.partition("@")
    owner, name, path = (*place.split("/", 2), "", "")[:3]
    if not (owner and name and path) or (at and not revision):
        problem = f"{_SCHEME}{rest} does not name a file of the Hugging Face Hub"
        raise ConfigError(problem, key="--policy", value=text, fix=f"Pass {_FORM}.")
    folder = _fetched(f"{_SCHEME}{rest}", f"{owner}/{name}", path, revision or None, say)
    if not (folder / path).exists():
        raise ConfigError(f"{_SCHEME}{rest}: {owner}/{name} does not have this file", key="--policy", value=text)
    say(f"{_SCHEME}{rest}: revision {folder.name}")
    return f"{before}{folder / path}"


def _fetched(text: str, repo: str, path: str, revision: str | None, say: Callable[[str], None]) -> Path:
    """Return the folder of the downloaded revision. The name of the folder is the commit hash.

    Raises:
        ConfigError: ``huggingface_hub`` is not installed, or the download failed.
    """
    with needs_extra("hf", f"{text} needs the package huggingface_hub", "--policy", text):
        from huggingface_hub import HfApi, constants, errors, snapshot_download
        from huggingface_hub.utils import disable_progress_bars
    say(f"{text}: connecting to {constants.ENDPOINT}")
    if not sys.stderr.isatty():
        disable_progress_bars()
    offline = False
    try:  # A download has no timeout for a silent server; this request has one.
        wanted = revision or constants.DEFAULT_REVISION
        HfApi().model_info(repo, revision=wanted, timeout=constants.HF_HUB_ETAG_TIMEOUT)
    except errors.HfHubHTTPError:
        pass  # The server answered; the download raises the error.
    except Exception:
        offline = True
    file, beside = glob.escape(path), glob.escape(str(Path(path).parent)).removeprefix(".")
    companions = [f"{beside}/{one.companions}".removeprefix("/") for one in integrations() if one.companions]
    patterns = [file, f"{file}/*", f"{file}.data", *companions]  # ONNX models have external data.
    try:
        return Path(snapshot_download(repo, revision=revision, allow_patterns=patterns, local_files_only=offline))
    except Exception as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        if isinstance(error, errors.LocalEntryNotFoundError):
            timeout = f"{constants.ENDPOINT} did not answer within {constants.HF_HUB_ETAG_TIMEOUT} s"
            why = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else f"{timeout} (HF_HUB_ETAG_TIMEOUT)"
            reason = f"the file is not in the cache, and {why}"
        raise ConfigError(f"{text}: {reason}", key="--policy", value=text) from error
