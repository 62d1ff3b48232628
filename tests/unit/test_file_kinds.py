"""Kinds of policy files: recognised by what they contain, with at most 1 MB read, and nothing unpickled."""

import pickle
import zipfile
from pathlib import Path

import pytest
import torch

from rl_eval.config import policy_sources
from rl_eval.config.model_files import described
from rl_eval.config.policy_sources import PolicyScheme, named_source, scheme_of, schemes
from rl_eval.errors import ConfigError
from tests.refused import refused, untold


def kind(path):
    """Return the name of the scheme that recognises a path; None if none does."""
    scheme = scheme_of(described(path))
    return next((name for name, one in schemes().items() if one is scheme), None)


def zipped(path, **entries):
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in entries.items():
            archive.writestr(name.replace("__", "."), content)
    return path


@pytest.fixture
def net():
    return torch.nn.Linear(4, 2)


@pytest.mark.parametrize("name", ["net.pt", "net.bin", "net"])
@pytest.mark.parametrize("as_zip", [True, False])
def test_files_of_torch_are_known_by_their_content(tmp_path, net, name, as_zip):
    for value, expected in ((net, "torch_module"), (net.state_dict(), "torch"), ({"a": 1}, "torch")):
        torch.save(value, tmp_path / name, _use_new_zipfile_serialization=as_zip)
        assert kind(tmp_path / name) == expected


def test_names_of_keys_are_known_and_long_values_skipped(tmp_path):
    """A long value before the keys, as that of a file within a pickle, is not read."""
    path = tmp_path / "long.d3"
    path.write_bytes(pickle.dumps({"torch": bytes(30_000_000), "config": "{}", "version": "1"}))
    before = read()
    assert {"torch", "config", "version"} <= described(path).texts
    assert read() - before < 2**20
    path.write_bytes(pickle.dumps({"first": "", "second": b"", "third": 0}))
    assert {"first", "second", "third"} <= described(path).texts
    saved = tmp_path / "saved.pt"
    torch.save({"actor_state_dict": {"0.weight": torch.zeros(3_000_000)}, "iter": 1}, saved)
    before = read()
    assert {"actor_state_dict", "0.weight"} <= described(saved).texts
    assert read() - before < 2**20


def read():
    """Return the number of bytes that this process has read."""
    return int(Path("/proc/self/io").read_text().split()[1])


def test_a_kind_of_another_package_comes_before_weights_of_torch(tmp_path, monkeypatch, net):
    def source(reference, path, given):
        raise AssertionError

    theirs = PolicyScheme("theirs:PATH", source, lambda file: "0.theirs" in file.texts)
    known = {**schemes(), "theirs": theirs}
    monkeypatch.setattr(policy_sources, "schemes", lambda: known)
    torch.save({"0.theirs": 1}, tmp_path / "a.pt")
    assert scheme_of(described(tmp_path / "a.pt")) is theirs
    torch.save({"0.ours": 1}, tmp_path / "a.pt")
    assert scheme_of(described(tmp_path / "a.pt")) is known["torch"]


@pytest.mark.parametrize(
    ("make", "looks"),
    [
        (lambda path: zipped(path, readme__txt=b"", b__bin=b""), "b.bin, readme.txt"),
        (lambda path: path.write_bytes(b"hello"), "neither"),
        (lambda path: path.touch(), "an empty file"),
        (lambda path: path.write_bytes(pickle.dumps({"replay": 1})), "a pickle file"),
        (lambda path: path.write_bytes(b"PK\x03\x04 cut"), "File is not a zip file"),
        (lambda path: path.mkdir(), "a folder with nothing"),
    ],
)
def test_a_file_of_unknown_kind_says_what_it_looks_like(tmp_path, make, looks):
    make(tmp_path / "file")
    with refused(ConfigError, "policy.policy", value=str(tmp_path / "file")) as caught:
        named_source(str(tmp_path / "file"))
    assert untold(str(caught.value), looks, "sb3:PATH", "torch_module:PATH") == []
