"""Files of ONNX models, written byte by byte, and the roles of inputs and outputs. The library is not needed."""

from __future__ import annotations

import random
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

from rl_eval import evaluate
from rl_eval.config.policy_sources import digest_of, named_source
from rl_eval.errors import ConfigError
from rl_eval.integrations.onnx import load_policy
from rl_eval.integrations.onnx_files import external_data, is_model
from rl_eval.integrations.onnx_ports import Roles, roles_of
from tests.refused import refused, untold


def varint(value: int) -> bytes:
    head = bytes([value & 127 | (128 if value > 127 else 0)])
    return head + varint(value >> 7) if value > 127 else head


def message(*fields: tuple[int, bytes | int]) -> bytes:
    """Return a protocol buffer with fields, by number: bytes or an integer."""
    found = b""
    for number, value in fields:
        if isinstance(value, int):
            found += varint(number << 3) + varint(value)
        else:
            found += varint(number << 3 | 2) + varint(len(value)) + value
    return found


def outside(name: str) -> bytes:
    """Return a tensor whose data are in a file."""
    place, offset = message((1, b"location"), (2, name.encode())), message((1, b"offset"), (2, b"0"))
    return message((1, 3), (2, 1), (8, b"weight"), (13, place), (13, offset), (14, 1))


def model(*names: str, more: bytes = b"") -> bytes:
    inline = message((1, 2), (2, 1), (9, bytes(300)))
    graph = message(
        (1, message((1, b"x"), (4, b"Gemm"))), (2, b"g"), (5, inline), *((5, outside(name)) for name in names)
    )
    return message((1, 10), (2, b"pytorch"), (7, graph + more), (8, message((2, 18))))


def written(folder: Path, content: bytes, name: str = "policy.onnx") -> Path:
    path = folder / name
    path.write_bytes(content)
    return path


# ------------------------------------------------------------------------------ recognition


def test_a_model_is_recognised_by_its_suffix_and_its_structure(tmp_path: Path) -> None:
    assert is_model(written(tmp_path, model()))
    assert not is_model(written(tmp_path, model(), "policy.bin"))
    assert not is_model(tmp_path / "absent.onnx")
    source = named_source(str(tmp_path / "policy.onnx"))
    assert source is not None
    assert source.factory == "rl_eval.integrations.onnx:load_policy"
    assert source.pickled is None


def test_damaged_models_are_not_recognised(tmp_path: Path) -> None:
    whole, rng = model("policy.onnx.data"), random.Random(0)
    cut = [whole[:size] for size in range(len(whole))]
    other = [b"", b"PK\x03\x04" + bytes(50), b"\x80\x02}q\x00.", b"\xff" * 3000, rng.randbytes(5000), bytes(2000)]
    for content in (*cut, *other):
        path = written(tmp_path, content)
        assert not is_model(path)
        with refused(ConfigError, "policy.policy"):
            named_source(str(path))


def test_the_structure_that_is_read_is_bounded(tmp_path: Path) -> None:
    """A file of a million small fields, and one with a thousand graphs inside of each other."""
    assert not is_model(written(tmp_path, model() + message((14, b"")) * 2**20))
    inner = message((2, b"g"))
    for _ in range(1000):
        inner = message((1, message((5, message((6, inner))))))
    path = written(tmp_path, message((1, 10), (7, inner), (8, b"")))
    with refused(ConfigError, "policy.policy_kwargs.path"):
        external_data(path)


@pytest.mark.skipif(find_spec("onnxruntime") is not None, reason="the package is installed")
def test_a_missing_library_is_named(tmp_path: Path) -> None:
    with refused(ConfigError, "policy.policy_kwargs.path") as seen:
        evaluate("CartPole-v1", str(written(tmp_path, model())), num_episodes=1)
    assert "rl-eval[onnx]" in str(seen.value)


# ------------------------------------------------------------------------------ external data


def test_the_digest_covers_external_data(tmp_path: Path) -> None:
    """Also the data of tensors in attributes and in graphs inside of the graph."""
    branch = message((1, message((5, message((6, message((5, outside("deep/b.bin")))))))))
    constant = message((1, message((5, message((5, outside("c.bin")))))))
    path = written(tmp_path, model("a.bin", "a.bin", more=branch + constant))
    (tmp_path / "deep").mkdir()
    files = {name: tmp_path / name for name in ("a.bin", "deep/b.bin", "c.bin")}
    for file in files.values():
        file.write_bytes(b"first")
    assert external_data(path) == files
    digests = {digest_of(path)}
    for file in files.values():
        file.write_bytes(b"other")
        digests.add(digest_of(path))
    assert len(digests) == 4
    alone = written(tmp_path, model(), "alone.onnx")
    assert digest_of(alone) == digest_of(written(tmp_path, model(), "alone.bin"))


@pytest.mark.parametrize("name", ["../w.bin", "/etc/passwd", "a/../../w.bin", "..\\w.bin", "absent.bin"])
def test_external_data_must_be_in_the_folder_of_the_model(tmp_path: Path, name: str) -> None:
    (tmp_path / "w.bin").write_bytes(b"w")
    folder = tmp_path / "model"
    folder.mkdir()
    path = written(folder, model(name))
    for call in (lambda: external_data(path), lambda: load_policy(str(path))):
        with refused(ConfigError, "policy.policy_kwargs.path", value=name):
            call()
    assert digest_of(path)


# ------------------------------------------------------------------------------ roles


def ports(**shapes: Any) -> dict[str, Any]:
    return {
        name: SimpleNamespace(shape=list(shape), type=kind)
        for name, (*shape, kind) in ((name, (*given, "tensor(float)")) for name, given in shapes.items())
    }


BOX = gym.spaces.Box(-1, 1, (3,), np.float32)


def roles(takes: Any, gives: Any, space: Any = BOX, **given: Any) -> Roles:
    return roles_of("policy.onnx", takes, gives, space, **({"states": None, "outputs": ()} | given))


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (("h_in", "c_in"), ("h_out", "c_out")),
        (("state_in_0", "state_in_1"), ("state_out_0", "state_out_1")),
        (("hidden",), ("hidden_out",)),
        (("in_state.1", "in_state.2"), ("out_state.1", "out_state.2")),
        (("out_state_1", "hidden_state_1"), ("out_state", "hidden_state")),
        (("h0", "c0"), ("hn", "cn")),
        (("h_0", "c_0"), ("h_n", "c_n")),
        (("recurrent_in",), ("recurrent_out",)),
        (("prev_hidden",), ("next_hidden",)),
        (("state_ins",), ("state_outs",)),
        (("h", "c"), ("h2", "c2")),
    ],
)
def test_states_are_paired_by_name(before: Any, after: Any) -> None:
    takes = ports(obs=("n", 3), **dict.fromkeys(before, (1, "n", 8)))
    gives = ports(mu=("n", 1), **dict.fromkeys(reversed(after), (1, "n", 8)))
    found = roles(takes, gives)
    assert dict(found.states) == dict(zip(before, after, strict=True))
    assert (found.observations, found.outputs, found.batch) == (("obs",), ("mu",), None)
    assert {found.axes[one] for one in (*before, *after)} == {1}
    assert set(found.zeros.values()) == {(1, 8)}


@pytest.mark.parametrize(
    ("shape", "first", "axis", "batch"),
    [
        ((2, "n", 8), "n", 1, None),
        (("n", 8), "n", 0, None),
        (("other", 2, 8), "n", 0, None),
        ((1, 1, 8), 1, 1, 1),
        ((2, 1, 8), 1, 1, 1),
        ((1, 8), 1, 0, 1),
        ((2, 4, 8), 4, 1, 4),
        ((2, 1, 8), "n", 1, 1),
        ((2, "n", 8), 1, 1, 1),
    ],
)
def test_the_batch_of_a_state_is_its_free_dimension(shape: Any, first: Any, axis: int, batch: int | None) -> None:
    found = roles(ports(obs=(first, 3), h_in=shape), ports(a=(first, 1), h_out=shape))
    assert (found.axes["h_in"], found.batch) == (axis, batch)
    assert found.zeros["h_in"] == tuple(size for at, size in enumerate(shape) if at != axis)
    assert len(found.notes) == (batch is not None)
    assert batch is None or untold(found.notes[0], "dimension", batch, "dynamic_axes") == []


@pytest.mark.parametrize("shape", [(4, 4, 8), ("n", "m", 8), (8,), (3, 8)])
def test_a_state_without_a_clear_batch_is_refused(shape: Any) -> None:
    first = "k" if "n" in shape else 4
    with refused(ConfigError, "policy.policy_kwargs.states", value="h_in"):
        roles(ports(obs=(first, 3), h_in=shape), ports(a=(first, 1), h_out=shape))


def test_states_that_do_not_pair_need_a_mapping() -> None:
    takes = ports(x=("n", 3), memory=(1, "n", 8), cell=(1, "n", 8))
    gives = ports(mu=("n", 1), y=(1, "n", 8), z=(1, "n", 8))
    with refused(ConfigError, "policy.policy_kwargs.states") as seen:
        roles(takes, gives)
    assert untold(str(seen.value), *takes, *gives, "states: {memory: y, cell: z}") == []
    assert roles(takes, gives, states={"memory": "y", "cell": "z"}).observations == ("x",)
    for wrong in ({"memory": "y"}, {"memory": "nothing", "cell": "z"}, {"nothing": "y"}, dict.fromkeys(takes, "y")):
        with refused(ConfigError, "policy.policy_kwargs.states"):
            roles(takes, gives, states=wrong)


def test_names_without_letters_and_other_shapes_do_not_pair() -> None:
    assert roles(ports(input_0=("n", 3)), ports(output_0=("n", 3))).observations == ("input_0",)
    with refused(ConfigError, "policy.policy_kwargs.states"):
        roles(ports(obs=("n", 3), h_in=(1, "n", 8)), ports(a=("n", 1), h_out=(1, "n", 9)))


def test_parts_of_a_dict_have_inputs_of_their_names() -> None:
    parts = {"state": BOX, "goal": gym.spaces.Discrete(4)}
    takes = ports(state=("n", 3), goal=("n",), h_in=("n", 8))
    takes["goal"].type = "tensor(int64)"
    gives = ports(a=("n", 1), h_out=("n", 8))
    found = roles(takes, gives, gym.spaces.Dict(parts))
    assert set(found.observations) == set(parts)
    assert found.dtypes["goal"] == np.int64
    with refused(ConfigError, "policy.policy_kwargs.states"):
        roles(takes, gives, gym.spaces.Dict({"state": BOX}))


@pytest.mark.parametrize(
    ("space", "kind"),
    [
        (gym.spaces.Box(-1, 1, (4,)), "tensor(float)"),
        (gym.spaces.Box(-1, 1, (3, 1)), "tensor(float)"),
        (BOX, "tensor(int64)"),
        (BOX, "tensor(string)"),
        (gym.spaces.Discrete(3), "tensor(int64)"),
        (gym.spaces.Tuple((BOX, BOX)), "tensor(float)"),
    ],
)
def test_an_input_must_fit_the_observations(space: Any, kind: str) -> None:
    takes = ports(obs=("n", 3))
    takes["obs"].type = kind
    with refused(ConfigError, "policy.policy", value="obs"):
        roles(takes, ports(a=("n", 1)), space)


def test_outputs_that_are_not_used_are_noted() -> None:
    takes, gives = ports(obs=("n", 3)), ports(mu=("n", 1), log_std=("n", 1), value=("n", 1))
    found = roles(takes, gives)
    assert found.outputs == ("mu", "log_std")
    assert untold(found.notes[0], "'mu'", "'value'") == []
    assert roles(takes, gives, outputs=("value",)).outputs == ("value",)
    with refused(ConfigError):
        roles(takes, gives, outputs=("nothing",))
