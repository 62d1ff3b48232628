"""Files of a run folder on a disk or an object store, with atomic writes and exclusive creation.

On a disk, :mod:`rl_eval.atomic_write` writes the files. So a crash leaves the old file, the new file or an unused
temporary file. Exclusive creation uses ``O_EXCL``, and a crash can leave an incomplete file. In an object store, an
object becomes visible when its upload is complete. Exclusive creation is a conditional upload, which fails if the
object exists.
"""

from __future__ import annotations

import datetime
import errno
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final, Protocol, final
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

from typing_extensions import override

from rl_eval.atomic_write import make_folder, sweep, sync_folder, write_bytes
from rl_eval.bounded_read import LARGE, read_bytes
from rl_eval.errors import ConfigError, LogError, needs_extra
from rl_eval.errors.redaction import learn, redact_text

_SCHEMES: Final = frozenset({"s3", "s3a", "gs", "az", "abfs", "abfss"})
"""URI schemes of object stores."""

_PATIENCE: Final[dict[str, Any]] = {"max_retries": 3, "retry_timeout": datetime.timedelta(seconds=5)}
"""Retries inside one call to the object store. The writer of the log also retries, and sends heartbeats between its own
retries."""

_UNUSABLE: Final = (
    *(errno.EACCES, errno.EEXIST, errno.EISDIR, errno.ELOOP, errno.EINVAL, errno.ENAMETOOLONG),
    *(errno.ENOENT, errno.ENOTDIR, errno.EPERM, errno.EROFS),
)
_UNUSABLE_REMOTE: Final = re.compile(r"status code: 40[0134]|incorrectly configured region")


class Storage(Protocol):
    """Files of one log folder. Names are relative to the folder: ``manifest.json``, ``segments/...``."""

    label: str
    """Name of the folder for messages, without credentials."""

    def names(self, folder: str) -> list[str]:
        """Return the sorted names of the files in a subfolder; empty if the subfolder does not exist."""
        ...

    def read(self, name: str) -> bytes:
        """Return the bytes of a file.

        Raises:
            FileNotFoundError: The file does not exist.
        """
        ...

    def write(self, name: str, data: bytes) -> None:
        """Write a file atomically, or replace it."""
        ...

    def create(self, name: str, data: bytes) -> bool:
        """Create a file if it does not exist, and return whether this call created it.

        If several processes try at the same time, exactly one of them gets True.
        """
        ...

    def move(self, name: str, target: str) -> None:
        """Rename a file."""
        ...

    def sweep(self, folder: str) -> None:
        """Remove the temporary files of interrupted writes from a subfolder."""
        ...


def open_storage(folder: str | os.PathLike[str]) -> Storage:
    """Open a local path or a URI. This creates no file or folder.

    Raises:
        ConfigError: The path is empty, the URI cannot be opened, or the package for object stores is not installed.
    """
    text = os.fspath(folder)
    if not text:
        raise ConfigError("output is empty", key="output", fix="Pass a folder, or a URI such as s3://bucket/folder.")
    if not is_uri(text):
        return LocalStorage(Path(text))
    learn(text)
    parts, label = urlsplit(text), redact_text(text)
    if parts.scheme == "file" and parts.netloc in ("", "localhost"):
        return LocalStorage(Path(unquote(parts.path)))
    if parts.scheme not in _SCHEMES:
        raise _unopened(label, f"{parts.scheme}:// is not a supported object store")
    return ObjectStorage(_open_store(parts, label), label)


def is_unusable(error: OSError) -> bool:
    """Return whether an error shows that the folder cannot be used, so that a retry cannot help."""
    if error.errno is not None:
        return error.errno in _UNUSABLE
    return bool(_UNUSABLE_REMOTE.search(str(error)))


def is_uri(path: str) -> bool:
    """Return whether a string is a URI, and not a local path."""
    return "://" in path


def absolute_place(place: str | os.PathLike[str], folder: str | None = None) -> str:
    """Return the absolute path of a local path. Return a URI or an empty string unchanged.

    A path with ``..`` is resolved, so that the result ends with the name of the folder or file.

    Args:
        place: Path or URI.
        folder: Absolute path to which a relative path is appended; by default the working directory.
    """
    text = os.fspath(place)
    if not text or is_uri(text):
        return text
    path = Path(folder or "", text).absolute()
    return str(path.resolve() if ".." in path.parts else path)


def shown_place(place: str | os.PathLike[str]) -> str:
    """Return a path or URI for a message. A path below the working directory becomes relative to that directory."""
    text = os.fspath(place)
    with suppress(ValueError, OSError):
        return text if is_uri(text) else str(Path(text).relative_to(Path.cwd()))
    return text


def _open_store(parts: SplitResult, label: str) -> Any:
    with needs_extra("object-store", f"output {label} needs the package obstore", "output", label):
        from obstore.exceptions import BaseError
        from obstore.store import from_url
    options: dict[str, Any] = dict(parse_qsl(parts.query))
    netloc = parts.netloc
    if parts.scheme.startswith("s3"):
        user, _, netloc = netloc.rpartition("@")
        options = _s3_options(options, user)
    try:
        return from_url(f"{parts.scheme}://{netloc}{parts.path}", retry_config=_PATIENCE, **options)
    except (BaseError, ValueError, TypeError) as error:
        raise _unopened(label, redact_text(_reason(error))) from error


def _s3_options(query: dict[str, Any], user: str) -> dict[str, Any]:
    """Return the options of an S3 store. If neither the URI nor the environment has a key, boto3 searches for a key."""
    endpoint, scheme = query.pop("endpoint_override", ""), query.pop("scheme", "https")
    if endpoint:
        query |= {"endpoint": f"{scheme}://{endpoint}", "client_options": {"allow_http": scheme == "http"}}
    key, _, secret = user.partition(":")
    if key:
        query |= {"access_key_id": unquote(key), "secret_access_key": unquote(secret)}
    elif not {"access_key_id", "skip_signature"} & query.keys() and "AWS_ACCESS_KEY_ID" not in os.environ:
        with suppress(ImportError, ValueError):  # Without boto3 or a profile, the store uses the role of the machine.
            from obstore.auth.boto3 import Boto3CredentialProvider

            query["credential_provider"] = Boto3CredentialProvider()
    return query


def _unopened(label: str, reason: str) -> ConfigError:
    fix = "Pass a local folder, or a URI with file://, s3://, gs:// or abfs://."
    return ConfigError(f"output {label} cannot be opened: {reason}", key="output", value=label, fix=fix)


def log_error(storage: Storage, problem: str, fix: str = "") -> LogError:
    """Return an error about a log that cannot be read or written. The text of the error begins with the folder."""
    return LogError(f"{storage.label} {problem}", key="output", value=storage.label, fix=fix)


def _reason(error: BaseException) -> str:
    """Return the text of an error on one line, without its debug details."""
    return " ".join(str(error).partition("Debug source:")[0].split())


@final
class LocalStorage(Storage):
    """Folder of the operating system's file system.

    Args:
        root: The folder. The first write creates it.
    """

    def __init__(self, root: Path) -> None:
        self._root = root.absolute()
        self.label = shown_place(root)

    @override
    def names(self, folder: str) -> list[str]:
        try:
            return sorted(path.name for path in (self._root / folder).iterdir() if not path.name.startswith("."))
        except FileNotFoundError:
            return []

    @override
    def read(self, name: str) -> bytes:
        return read_bytes(self._root / name, LARGE)

    @override
    def write(self, name: str, data: bytes) -> None:
        write_bytes(self._root / name, data)

    @override
    def create(self, name: str, data: bytes) -> bool:
        # A crash during the write leaves a file that cannot be parsed.
        path = self._root / name
        make_folder(path.parent)
        try:
            _put(path, data)
        except FileExistsError:
            return False
        sync_folder(path.parent)
        return True

    @override
    def move(self, name: str, target: str) -> None:
        path = self._root / target
        make_folder(path.parent)
        (self._root / name).replace(path)
        sync_folder(path.parent)

    @override
    def sweep(self, folder: str) -> None:
        sweep(self._root / folder)


def _put(path: Path, data: bytes) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        left = memoryview(data)
        while left:
            left = left[os.write(descriptor, left) :]
        os.fsync(descriptor)
    except OSError:
        path.unlink()
        raise
    finally:
        os.close(descriptor)


@final
class ObjectStorage(Storage):
    """Folder of an object store.

    Args:
        store: Store of the package obstore, with the folder as its root.
        label: Name of the folder in messages.
    """

    def __init__(self, store: Any, label: str) -> None:
        self._store = store
        self.label = label

    @override
    def names(self, folder: str) -> list[str]:
        from obstore import list_with_delimiter

        with _os_errors():
            return sorted(
                found["path"].rpartition("/")[2] for found in list_with_delimiter(self._store, folder)["objects"]
            )

    @override
    def read(self, name: str) -> bytes:
        from obstore import get

        with _os_errors():
            return bytes(get(self._store, name).bytes())

    @override
    def write(self, name: str, data: bytes) -> None:
        self._put(name, data, "overwrite")

    @override
    def create(self, name: str, data: bytes) -> bool:
        try:
            self._put(name, data, "create")
        except FileExistsError:
            # Equal data are ours: the client lost the answer to its first upload, and repeated the upload.
            return self.read(name) == data
        return True

    @override
    def move(self, name: str, target: str) -> None:
        from obstore import rename

        with _os_errors():
            rename(self._store, name, target)

    @override
    def sweep(self, folder: str) -> None:
        """Do nothing, because an interrupted upload leaves no file."""

    def _put(self, name: str, data: bytes, mode: Any) -> None:
        from obstore import put

        with _os_errors():
            put(self._store, name, data, mode=mode, use_multipart=False)


@contextmanager
def _os_errors() -> Iterator[None]:
    """Convert errors of the store to an ``OSError`` with one line of text."""
    from obstore.exceptions import AlreadyExistsError, BaseError

    try:
        yield
    except AlreadyExistsError as error:
        raise FileExistsError(_reason(error)) from error
    except FileNotFoundError as error:
        raise FileNotFoundError(_reason(error)) from error
    except BaseError as error:
        raise OSError(_reason(error)) from error
