"""Descriptions of files and folders that may contain a policy. Schemes recognise their files by them.

To describe a file, at most 1 MB of it is read. Nothing is unpickled, and no library is imported.
"""

from __future__ import annotations

import io
import os
import pickletools
import zipfile
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Final

from rl_eval.bounded_read import BoundedFile

_HEAD: Final = 4096
_MOST: Final = 2**18
"""Maximum number of bytes to read of a pickle, and half of that of a table of contents."""
_LONGEST: Final = 4096
"""Maximum length of a text of interest. Longer values of a pickle are skipped."""
_FEW: Final = 8
"""Number of names to show in messages."""
_MANY: Final = 1000
_PICKLE: Final = b"\x80"
_STARTS: Final = {
    _PICKLE: "a pickle file",
    b"version https://git-lfs": "a pointer of Git LFS, whose file `git lfs pull` downloads",
    b"\x08": "perhaps an ONNX model, which must be complete and have a name that ends in .onnx",
}
"""Descriptions of files for messages, by their first bytes."""
_OLD_TORCH: Final = b"\x80\x02\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19"
"""First bytes of ``torch.save`` without a zip archive."""


@dataclass(frozen=True, slots=True)
class ModelFile:
    """Description of a file or folder."""

    path: Path
    is_folder: bool = False
    members: frozenset[str] = frozenset()
    """Names in a zip archive, without a folder that contains all of them; for a folder, some of its names."""
    texts: frozenset[str] = frozenset()
    """Short texts in the pickle of the file, or in the ``data.pkl`` of the archive, such as keys of dicts."""
    head: bytes = b""
    """First bytes."""
    problem: str = ""
    """Error that occurred when the file was read."""

    @property
    def is_torch(self) -> bool:
        """Whether ``torch.save`` wrote the file."""
        return not self.is_folder and ("data.pkl" in self.members or self.head.startswith(_OLD_TORCH))

    @property
    def is_safetensors(self) -> bool:
        """Whether the file begins as those of safetensors, with the length of a header in JSON."""
        return self.head[5:9] == b"\0\0\0{"

    def contains(self, *names: str) -> bool:
        """Return whether a folder or an archive contains all of these files."""
        return all((self.path / name).is_file() if self.is_folder else name in self.members for name in names)

    def __str__(self) -> str:
        """Return a description for messages. It shows no content, which may be secret."""
        if self.problem:
            return f"a file that cannot be read ({self.problem})"
        if self.is_folder:
            return f"a folder with {_shown(self.members)}"
        if self.members:
            return f"a zip archive with {_shown(self.members)}"
        other = "neither a zip archive nor a pickle file" if self.head else "an empty file"
        return next((text for start, text in _STARTS.items() if self.head.startswith(start)), other)


def described(path: Path) -> ModelFile:
    """Return the description of a file or folder. It never raises an error."""
    try:
        if path.is_dir():
            with os.scandir(path) as entries:
                return ModelFile(path, True, frozenset(entry.name for entry in islice(entries, _MANY)))
        with BoundedFile(path, 2 * _MOST) as file:
            head = file.read(_HEAD)
            file.seek(0)
            if head.startswith(b"PK"):
                return _archive(path, file, head)
            return ModelFile(path, texts=_texts(file) if head.startswith(_PICKLE) else frozenset(), head=head)
    except Exception as error:  # A damaged archive raises errors of many types.
        return ModelFile(path, problem=str(getattr(error, "strerror", None) or error))


def _archive(path: Path, file: BoundedFile, head: bytes) -> ModelFile:
    with zipfile.ZipFile(file) as archive:
        names = archive.namelist()
        top = f"{names[0].partition('/')[0]}/" if names else ""
        names = [name.removeprefix(top) for name in names] if all(one.startswith(top) for one in names) else names
        entry = next((one for one in archive.infolist() if one.filename in ("data.pkl", f"{top}data.pkl")), None)
        texts: frozenset[str] = frozenset()
        # Other compressions inflate whole blocks.
        if entry is not None and entry.compress_type in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            with archive.open(entry) as pickled:
                texts = _texts(io.BytesIO(pickled.read(_MOST)))
    return ModelFile(path, members=frozenset(names), texts=texts, head=head)


def _texts(file: io.BufferedIOBase) -> frozenset[str]:
    """Return the short texts of a pickle, or of several pickles in a row."""
    found: set[str] = set()
    skimmed = _Skimmed(file)
    with suppress(Exception):  # The pickle ends, is damaged, or is longer than what is read.
        while True:
            with suppress(_SkippedError):
                for _, value, _ in pickletools.genops(skimmed):  # type: ignore[arg-type]  # It reads and reads lines.
                    if isinstance(value, str):
                        found.add(value)
    return frozenset(found)


class _SkippedError(Exception):
    """A long value was skipped."""


class _Skimmed:
    """Pickle for :func:`pickletools.genops`, without its long values."""

    def __init__(self, file: io.BufferedIOBase) -> None:
        self._file, self._left = file, _MOST

    def read(self, size: int) -> bytes:
        if size > _LONGEST:
            self._file.seek(size, os.SEEK_CUR)
            raise _SkippedError
        return self._counted(self._file.read(size)) if size else b""  # An empty text, not the end.

    def readline(self) -> bytes:
        return self._counted(self._file.readline(_LONGEST))

    def _counted(self, content: bytes) -> bytes:
        self._left -= len(content)
        if self._left < 0 or not content:
            raise EOFError
        return content


def _shown(names: Collection[str]) -> str:
    few = ", ".join(sorted(names)[:_FEW])
    return f"{few}, ..." if len(names) > _FEW else few or "nothing"
