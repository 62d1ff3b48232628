"""Files of ONNX models. Only their structure is read: no weights, and no library is imported.

An ONNX file is a protocol buffer. It may name other files of its folder that contain its weights, the external data.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import Final

from rl_eval.bounded_read import BoundedFile
from rl_eval.config.model_files import ModelFile
from rl_eval.errors import ConfigError
from rl_eval.integrations.policy_files import file_scheme, reading

SUFFIX: Final = ".onnx"
_MOST: Final = 2**20
"""Maximum number of bytes to read of the structure."""
_TEXT: Final = 4096
"""Maximum length of a name."""
_VARINT, _LONG, _BYTES, _INT = 0, 1, 2, 5
"""Types of a field."""
_REQUIRED: Final = {1, 7, 8}
"""Fields of every model: version of the format, graph, versions of operators."""
_INSIDE: Final = {
    "model": {7: "graph", 25: "function"},
    "function": {7: "node"},
    "graph": {1: "node", 5: "tensor", 15: "sparse"},
    "node": {5: "attribute"},
    "attribute": {5: "tensor", 6: "graph", 10: "tensor", 11: "graph", 22: "sparse", 23: "sparse"},
    "sparse": {1: "tensor", 2: "tensor"},
    "tensor": {13: "entry"},
    "entry": {},
}
"""Messages inside of each message that lead to external data, by number of the field (onnx.proto3)."""


class _Fields:
    """Reader of the fields of a protocol buffer. It skips their values."""

    def __init__(self, file: BoundedFile) -> None:
        self.file, self._left = file, _MOST

    def read(self, size: int) -> bytes:
        self._left -= size
        content = self.file.read(size) if self._left >= 0 else b""
        if len(content) < size:
            raise ValueError("the structure ends too early or is too long")
        return content

    def between(self, start: int, end: int) -> Iterator[tuple[int, int, int]]:
        """Yield the number, the start and the end of each field."""
        while start < end:
            self.file.seek(start)
            key = self._varint()
            size = {_VARINT: 0, _LONG: 8, _INT: 4}.get(key & 7)
            if key & 7 == _VARINT:
                self._varint()
            elif key & 7 == _BYTES:
                size = self._varint()
            start = self.file.tell()
            if size is None or start + size > end or not key >> 3:
                raise ValueError("a field has an unknown type or is cut off")
            yield key >> 3, start, start + size
            start += size

    def _varint(self) -> int:
        value = shift = 0
        while True:
            (byte,) = self.read(1)
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128 or shift > 63:
                return value


def is_model(path: Path) -> bool:
    """Return whether a file has the suffix and the structure of an ONNX model."""
    if path.suffix == SUFFIX:
        with suppress(OSError, ValueError), BoundedFile(path) as file:
            return {number for number, _, _ in _Fields(file).between(0, file.size)} >= _REQUIRED
    return False


def external_data(path: Path) -> dict[str, Path]:
    """Return the files of a model's external data, by the names in the model file.

    Raises:
        ConfigError: The model file cannot be read, a name leads out of its folder, or a file is missing.
    """
    with reading("path", path, "an ONNX model", "Export or download it again."), BoundedFile(path) as file:
        names = dict.fromkeys(_locations(_Fields(file), "model", 0, file.size))
    for name in names:
        parts = PurePosixPath(name.replace("\\", "/"))
        leaves = parts.is_absolute() or ".." in parts.parts
        if leaves or not (path.parent / name).is_file():
            where = "not in its folder" if leaves else "missing"
            problem = f"{str(path)!r} has weights in the file {name!r}, which is {where}"
            fix = "Export the model again." if leaves else f"Copy {name} into the folder of {path.name}."
            raise ConfigError(problem, key="policy.policy_kwargs.path", value=name, fix=fix)
    return {name: path.parent / name for name in names}


def parts(path: Path) -> dict[str, Path]:
    """Return the files of :func:`external_data`. If they cannot be read, or for any other file, return none."""
    if is_model(path):
        with suppress(ConfigError):
            return external_data(path)
    return {}


def _locations(fields: _Fields, message: str, start: int, end: int) -> Iterator[str]:
    """Yield the names of files with external data, from a message and the messages inside of it."""
    entry = {}
    for number, first, last in fields.between(start, end):
        if message == "entry" and last - first <= _TEXT:
            fields.file.seek(first)
            entry[number] = fields.read(last - first)
        elif inner := _INSIDE[message].get(number):
            yield from _locations(fields, inner, first, last)
    if entry.get(1) == b"location":
        yield entry.get(2, b"").decode()


def _recognises(file: ModelFile) -> bool:
    return is_model(file.path)


SCHEMES: Final = {
    "onnx": file_scheme(
        "onnx", "onnx:load_policy", "an ONNX model", _recognises, runs_code=False, suffix=SUFFIX, parts=parts
    )
}
