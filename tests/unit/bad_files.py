"""Files that a stranger may have made: corrupted, cut off, renamed and malicious ones, of each kind."""

from __future__ import annotations

import io
import json
import os
import pickle
import struct
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save as safetensors

RAN = "code_of_a_file_ran"
"""File that malicious files make in the current folder, when their code runs."""


class Evil:
    """An object whose unpickling makes a file."""

    def __reduce__(self) -> tuple[Any, ...]:
        return open, (RAN, "w")


def saved(value: Any, *, old: bool = False) -> bytes:
    file = io.BytesIO()
    torch.save(value, file, _use_new_zipfile_serialization=not old)
    return file.getvalue()


def scripted() -> bytes:
    file = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.save(torch.jit.script(torch.nn.Linear(4, 2)), file)
    return file.getvalue()


def exported() -> bytes:
    file = io.BytesIO()
    torch.export.save(torch.export.export(torch.nn.Linear(4, 2), (torch.zeros(2, 4),)), file)
    return file.getvalue()


def zipped(entries: dict[str, bytes], compression: int = zipfile.ZIP_STORED) -> bytes:
    file = io.BytesIO()
    with warnings.catch_warnings(), zipfile.ZipFile(file, "w", compression) as archive:
        warnings.simplefilter("ignore")  # Some names are twice there.
        for name, content in entries.items():
            archive.writestr(name, content)
    return file.getvalue()


def of_sb3(attribute: Any = None) -> bytes:
    import base64

    data = {"observation_space": {":serialized:": base64.b64encode(pickle.dumps(attribute)).decode()}}
    return zipped({"data": json.dumps(data).encode(), "policy.pth": saved({})})


def of_d3rlpy(**more: Any) -> bytes:
    return pickle.dumps({"torch": saved({"q": torch.zeros(20_000)}), "config": "{}", "version": "2.8.1", **more})


def cut(content: bytes) -> bytes:
    return content[: len(content) // 2]


def holed(content: bytes) -> bytes:
    """Return a content with zeros in the middle and near its end."""
    middle, end = len(content) // 2, len(content) * 9 // 10
    return content[:middle] + bytes(40) + content[middle + 40 : end] + bytes(40) + content[end + 40 :]


def deep_onnx(depth: int) -> bytes:
    """Return a model whose graphs contain each other."""
    message = b""
    for _ in range(depth):
        for key in (b"\x32", b"\x2a", b"\x0a"):  # A graph of an attribute of a node of a graph.
            message = key + _varint(len(message)) + message
    return b"\x08\x08\x42\x00\x3a" + _varint(len(message)) + message


def _varint(value: int) -> bytes:
    found = b""
    while value > 127:
        found, value = found + bytes([value & 127 | 128]), value >> 7
    return found + bytes([value])


ONNX = b"\x08\x08\x3a\x00\x42\x00"
"""The version of the format, an empty graph, and versions of operators."""
WEIGHTS = {"0.weight": torch.zeros(3, 3)}
LEARNERS: dict[str, tuple[str, dict[str, Any]]] = {
    "rsl_rl": ("rsl_rl", {"actor_state_dict": WEIGHTS, "critic_state_dict": WEIGHTS, "iter": 1}),
    "old rsl_rl": ("rsl_rl", {"model_state_dict": WEIGHTS, "iter": 1}),
    "rl_games": ("rl_games", {"model": {"a2c_network.mu.weight": torch.zeros(2, 2)}, "epoch": 1}),
    "skrl": ("skrl", {"policy": WEIGHTS, "state_preprocessor": WEIGHTS}),
    "policy.save": ("sb3", {"state_dict": WEIGHTS, "data": {"observation_space": None, "action_space": None}}),
}


def _content(content: Callable[[], bytes] | bytes) -> Callable[[Path], Any]:
    return lambda path: path.write_bytes(content if isinstance(content, bytes) else content())


def _folder(names: int) -> Callable[[Path], Any]:
    def make(path: Path) -> None:
        path.mkdir()
        for number in range(names):
            (path / f"{number}.zip").touch()

    return make


def _sparse(path: Path) -> None:
    path.write_bytes(saved(WEIGHTS))
    os.truncate(path, 2**29)


FILES: dict[str, tuple[str | None, Callable[[Path], Any]]] = {
    # ---------------------------------------------------------------- cut off
    "cut_script.pt": (None, _content(lambda: cut(scripted()))),
    "cut_export.pt2": (None, _content(lambda: cut(exported()))),
    "cut_weights.pt": (None, _content(lambda: cut(saved(WEIGHTS)))),
    "cut_old_weights.pt": ("torch", _content(lambda: cut(saved(WEIGHTS, old=True)))),
    "cut_sb3.zip": (None, _content(lambda: cut(of_sb3()))),
    "cut_model.d3": (None, _content(lambda: cut(of_d3rlpy()))),
    "cut_model.onnx": (None, _content(ONNX[:3])),
    "cut.safetensors": ("torch", _content(lambda: cut(safetensors(WEIGHTS)))),
    "empty.pt": (None, _content(b"")),
    "one_byte.pt": (None, _content(b"\x80")),
    # ---------------------------------------------------------------- corrupted
    "holed_script.pt": (None, _content(lambda: holed(scripted()))),
    "holed_weights.pt": (None, _content(lambda: holed(saved({"w": torch.zeros(3)})))),
    "holed_sb3.zip": (None, _content(lambda: holed(of_sb3()))),
    "zeros.onnx": (None, _content(bytes(1000))),
    "html.pt": (None, _content(b"<!DOCTYPE html><title>Not found</title>")),
    "pointer.pt": (None, _content(b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n")),
    # ---------------------------------------------------------------- renamed
    "script.zip": ("torchscript", _content(scripted)),
    "export.zip": ("torch_export", _content(exported)),
    "weights.onnx": ("torch", _content(lambda: saved(WEIGHTS))),
    "onnx.pt": (None, _content(ONNX)),
    "sb3.pt": ("sb3", _content(of_sb3)),
    "model.pt": ("d3rlpy", _content(of_d3rlpy)),
    "safetensors.bin": ("torch", _content(lambda: safetensors(WEIGHTS))),
    "whole.safetensors": ("torch_module", _content(lambda: saved(torch.nn.Linear(1, 1)))),
    "old_whole.zip": ("torch_module", _content(lambda: saved(torch.nn.Linear(1, 1), old=True))),
    # ---------------------------------------------------------------- too large for what they are
    "bomb.pt": ("torch", _content(lambda: zipped({"a/data.pkl": bytes(2**28)}, zipfile.ZIP_DEFLATED))),
    "many.zip": (None, _content(lambda: zipped({f"{number:0200}": b"" for number in range(9000)}))),
    "bzip2.pt": ("torch", _content(lambda: zipped({"data.pkl": bytes(2**22)}, zipfile.ZIP_BZIP2))),
    "long.d3": (None, _content(b"\x80\x04\x8e" + struct.pack("<Q", 2**62))),
    "marks.d3": (None, _content(b"\x80\x04" + b"(" * 2**22)),
    "line.d3": (None, _content(b"\x80\x02V" + b"a" * 2**22)),
    "integer.d3": (None, _content(b"\x80\x02\x8b" + struct.pack("<i", 2**22) + b"\1" * 2**22)),
    "digits.d3": (None, _content(b"\x80\x02L" + b"9" * 2**22)),
    "claims.onnx": (None, _content(b"\x08\x08\x42\x00\x3a" + _varint(2**62))),
    "deep.onnx": ("onnx", _content(lambda: deep_onnx(3000))),
    "header.safetensors": (None, _content(struct.pack("<Q", 2**63) + b"{")),
    "sparse.pt": (None, _sparse),
    "folder.zip": (None, _folder(2000)),
    # ---------------------------------------------------------------- malicious
    "evil_whole.pt": ("torch_module", _content(lambda: saved({"_parameters": Evil()}))),
    "evil_weights.pt": ("torch", _content(lambda: saved({"0.weight": Evil()}))),
    "evil_old_weights.pt": ("torch", _content(lambda: saved({"0.weight": Evil()}, old=True))),
    "evil_twice.pt": ("torch", _content(lambda: zipped({"data.pkl": pickle.dumps(Evil()), "./data.pkl": b""}))),
    "evil_script.pt": ("torchscript", _content(lambda: zipped({
        "a/code/a.py": b"", "a/constants.pkl": pickle.dumps(Evil()), "a/data.pkl": pickle.dumps(Evil()),
    }))),
    "evil_export.pt2": ("torch_export", _content(lambda: zipped({
        "a/archive_format": b"pt2", "a/models/model.json": b"{}", "a/data/sample_inputs/model.pt": saved(Evil()),
    }))),
    "evil_sb3.zip": ("sb3", _content(lambda: of_sb3(Evil()))),
    "evil_model.d3": ("d3rlpy", _content(lambda: of_d3rlpy(evil=Evil()))),
    "evil_config.d3": ("d3rlpy", _content(lambda: of_d3rlpy(torch=saved(Evil())))),
    "evil_any.pkl": (None, _content(lambda: pickle.dumps(Evil()))),
    **{
        f"evil_{name}.pt": (kind, _content(lambda value=value: saved({**value, "infos": Evil()})))
        for name, (kind, value) in LEARNERS.items()
    },
}  # fmt: skip
"""For each file: the name of the scheme that recognises it, None if none does; and what makes it."""
