"""Kinds of policy files: recognised by what they contain, with at most 1 MB read, and nothing unpickled."""

import os
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
from tests.unit.bad_files import LEARNERS, ONNX, of_d3rlpy, of_sb3, saved


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


OTHERS = {
    **{name: (kind, lambda value=value: saved(value)) for name, (kind, value) in LEARNERS.items()},
    "zip": ("sb3", of_sb3),
    "algorithm": ("d3rlpy", of_d3rlpy),
}
"""Files of learners: the scheme of each, and what makes its content."""
OF_FILES = ("rsl_rl", "skrl", "rl_games", "sb3", "d3rlpy", "onnx", "torchscript", "torch_export", "torch_module")


@pytest.mark.parametrize("name", OTHERS)
def test_a_file_of_another_type_is_refused_with_its_own_scheme(tmp_path, name):
    path, (own, content) = tmp_path / "model.pt", OTHERS[name]
    path.write_bytes(content())
    for other in OF_FILES:
        if other != own:
            with refused(ConfigError, "policy.policy", value=str(path)) as caught:
                named_source(schemes()[other].named(path))
            assert schemes()[own].named(path) in caught.value.fix


def test_a_file_without_the_names_of_a_type_may_be_of_this_type(tmp_path):
    """As a checkpoint of skrl without preprocessors, or a compiled network of rl_games."""
    torch.save({"policy": {"0.weight": torch.zeros(1)}}, tmp_path / "agent.pt")
    for name in ("skrl", "torch_module", "onnx"):
        assert named_source(schemes()[name].named(tmp_path / "agent.pt"), ["model"]) is not None
    torch.save({"model_state_dict": {"0.weight": torch.zeros(1)}}, tmp_path / "any.pt")
    for text in ("torch:net:make", "torchrl:net:make", "cleanrl:net:Agent"):
        assert named_source(f"{text}@{tmp_path / 'any.pt'}") is not None


def test_a_folder_that_is_no_policy_names_its_newest_model(tmp_path):
    """Also with the scheme of the model, and of another library; weights alone come last."""
    run = tmp_path / "run"
    (run / "nn").mkdir(parents=True)
    (run / "events").write_bytes(b"events")
    for age, name in enumerate(("weights.pt", "nn/model_2.pt", "nn/model_1.pt")):
        torch.save({"a": 1} if age == 0 else {"actor_state_dict": {}}, run / name)
        os.utime(run / name, (1000 - age, 1000 - age))
    for text in (str(run), *(schemes()[name].named(run) for name in OF_FILES)):
        with refused(ConfigError, "policy.policy", value=str(run)) as caught:
            named_source(text)
        assert str(run / "nn/model_2.pt") in caught.value.fix


def test_a_model_of_onnx_with_another_name_is_described(tmp_path):
    (tmp_path / "model.pt").write_bytes(ONNX)
    with refused(ConfigError, "policy.policy") as caught:
        named_source(str(tmp_path / "model.pt"))
    assert untold(caught.value.problem, "ONNX", ".onnx") == []
