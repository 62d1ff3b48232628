"""Contents of sent weights; a module gets all of them or stays unchanged."""

from __future__ import annotations

import copy
import json
import pickle
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import safetensors.torch
import torch
from torch import nn
from torch.nn.utils.prune import random_unstructured

from rl_eval import EvalConfig, EvalRunnerGroup, Evaluator, evaluate
from rl_eval.errors import ConfigError, WeightsError
from rl_eval.policies.module import ModulePolicy
from rl_eval.weights import (
    apply_weights,
    load_weights_file,
    save_weights_file,
    snapshot_weights,
)
from tests.refused import refused

DTYPES = "float32 float64 float16 bfloat16 complex64 int64 int32 int8 uint8 bool"


class Normalizer(nn.Module):
    """Keeps its count outside of its tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(3))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)
        self.extra: Any = {"count": 0}

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


class Everything(nn.Module):
    """Every kind of tensor that a module can hold."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
        self.normalizer = Normalizer()
        self.scalar = nn.Parameter(torch.tensor(1.0))
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
        self.empty = nn.Parameter(torch.empty(0, 5))
        self.transposed = nn.Parameter(torch.zeros(3, 5).T)
        for dtype in DTYPES.split():
            self.register_buffer(f"of_{dtype}", torch.zeros(2, 3).to(getattr(torch, dtype)))


def randomized(module: nn.Module, seed: int) -> nn.Module:
    """Fill every tensor with other bits."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in [*module.parameters(), *module.buffers()]:
            tensor.copy_(torch.randn(tensor.shape, generator=generator) * 40)
    for part in module.modules():
        if isinstance(part, Normalizer):
            part.extra = {"count": seed, "names": ["a", "b"]}
    return module


def state_of(module: nn.Module) -> dict[str, Any]:
    """Return names, dtypes, shapes and bytes of everything, the volatile buffers and extra state included."""
    tensors = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    state: dict[str, Any] = {
        name: (value.dtype, tuple(value.shape), value.detach().contiguous().clone().view(-1).tolist())
        for name, value in tensors
    }
    extra = {f"{name}!": m.extra for name, m in module.named_modules() if isinstance(m, Normalizer)}
    return state | {name: pickle.loads(pickle.dumps(value)) for name, value in extra.items()}


def fresh(seed: int = 1) -> nn.Module:
    return randomized(Everything(), seed)


# ------------------------------------------------------------------------------ round trips


def test_everything_arrives() -> None:
    """Parameters, buffers of both kinds, every dtype, scalars, empty and transposed tensors and extra state travel.

    Also pickled, and mapped read-only as an object store maps it.
    """
    source = fresh(1)
    sent = snapshot_weights(source, 3)
    received = pickle.loads(pickle.dumps(sent))
    received.buffer.flags.writeable = False
    assert (received.digest, received.version) == (sent.digest, 3)
    for snapshot in (sent, received):
        target = fresh(2)
        assert state_of(source) != state_of(target)
        apply_weights(snapshot, target)
        assert state_of(source) == state_of(target)


def test_tensors_are_aligned_and_do_not_overlap() -> None:
    """Every tensor starts at a multiple of 64 bytes, behind the end of the one before."""
    snapshot = snapshot_weights(fresh(), 1)
    end = 0
    for entry in snapshot.entries:
        assert entry.offset % 64 == 0
        assert entry.offset >= end
        end = entry.offset + entry.num_bytes
    assert end <= snapshot.buffer.nbytes


def test_weights_are_copied_in_place() -> None:
    """The module keeps its Parameter objects, their memory, ``requires_grad``, gradients and its mode."""
    target = fresh(2).train()
    named = dict(target.named_parameters())
    target.scalar.grad = torch.tensor(5.0)
    before = {name: (id(p), p.data_ptr(), p.requires_grad) for name, p in named.items()}
    apply_weights(snapshot_weights(fresh(1), 1), target)
    assert {name: (id(p), p.data_ptr(), p.requires_grad) for name, p in target.named_parameters()} == before
    assert target.scalar.grad == 5.0
    assert target.training


def tied(seed: int) -> nn.Module:
    """Return two layers that share one weight."""
    module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    module[1].weight = module[0].weight
    return randomized(module, seed)


@pytest.mark.parametrize("form", ["module", "state dict"])
def test_tied_weights_stay_tied(form: str) -> None:
    """A shared tensor is one tensor afterwards too, with the values that were sent."""
    source, target = tied(1), tied(2)
    apply_weights(snapshot_weights(FORMS[form](source), 1), target)
    assert target[1].weight is target[0].weight
    assert state_of(target) == state_of(source)


def test_a_module_without_weights_is_fine() -> None:
    """An empty snapshot is a snapshot: a parameter-free module can be sent and set."""
    snapshot = snapshot_weights(nn.Tanh(), 4)
    apply_weights(snapshot, nn.ReLU())
    assert (snapshot.entries, snapshot.buffer.size, len(snapshot.digest)) == ((), 0, 32)


# ------------------------------------------------------------------------------ the forms that weights come in


def net(seed: int) -> nn.Module:
    """Return a module without volatile buffers, which no other form than a module carries."""
    return randomized(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)), seed)


def tensordict_of(module: nn.Module) -> Any:
    from tensordict import from_module  # It takes seconds to load, which importing this file need not.

    return from_module(module)


def tensordict_of_state_dict(module: nn.Module) -> Any:
    from tensordict import TensorDict

    return TensorDict(module.state_dict()).unflatten_keys(".")


FORMS = {
    "module": lambda module: module,
    "state dict": lambda module: module.state_dict(),
    "plain dict": lambda module: dict(module.state_dict()),
    "TensorDict": tensordict_of,
    "TensorDict of a state dict": tensordict_of_state_dict,
    "DataParallel": nn.DataParallel,
    "state dict of DataParallel": lambda module: nn.DataParallel(module).state_dict(),
    "compiled": lambda module: torch.compile(module, backend="eager"),
    "state dict of compiled": lambda module: torch.compile(module, backend="eager").state_dict(),
    "TensorDict of compiled": lambda module: tensordict_of(torch.compile(module, backend="eager")),
    "compiled DataParallel": lambda module: torch.compile(nn.DataParallel(module), backend="eager").state_dict(),
    "DataParallel of compiled": lambda module: nn.DataParallel(torch.compile(module, backend="eager")).state_dict(),
    "module in inference mode": lambda module: module.eval().requires_grad_(False),
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_weights_arrives(form: str) -> None:
    """A module, a state dict, a TensorDict, and what wrappers make of their names: alone, or as a part of an agent.

    The same tensors under the same names are the same weights, with one digest.
    """
    source, target = net(1), net(2)
    expected, digest = state_of(source), snapshot_weights(source, 1).digest
    sent = snapshot_weights(FORMS[form](source), 1)
    apply_weights(sent, target)
    assert state_of(target) == expected
    if form != "TensorDict of a state dict" and "DataParallel" not in form:
        assert sent.digest == digest
    sources, agent = {"actor": net(1), "critic": net(2)}, nn.ModuleDict({"actor": net(3), "critic": net(4)})
    apply_weights(snapshot_weights({name: FORMS[form](module) for name, module in sources.items()}, 1), agent)
    assert state_of(agent) == state_of(nn.ModuleDict(sources))


def test_a_policy_whose_part_is_called_module_keeps_its_names() -> None:
    """``module.`` is a wrapper's prefix only where the policy does not use it itself, as TensorDictModule does."""
    source, target = (nn.ModuleDict({"module": net(seed)}) for seed in (1, 2))
    apply_weights(snapshot_weights(source, 1), target)
    assert state_of(target) == state_of(source)


def test_weights_go_into_a_wrapped_module() -> None:
    """As they come out of one: a policy in DataParallel gets its own snapshot, and that of the bare module."""
    target = net(1)
    for source in (net(2), nn.DataParallel(net(3))):
        snapshot = snapshot_weights(source, 1)
        apply_weights(snapshot, nn.DataParallel(target))
        assert snapshot_weights(target, 1).digest == snapshot.digest


def test_a_state_dict_may_leave_volatile_buffers_out() -> None:
    """Non-persistent buffers are not in a state dict: they stay as they are."""
    source, target = fresh(1), fresh(2)
    scratch = target.normalizer.scratch.clone()
    apply_weights(snapshot_weights(source.state_dict(), 1), target)
    assert (target.normalizer.scratch == scratch).all()
    assert state_of(target) | {"normalizer.scratch": None} == state_of(source) | {"normalizer.scratch": None}


@pytest.mark.parametrize("form", ["module", "state dict"])
@pytest.mark.parametrize("kind", [dict, np.ones, int, torch.ones])
def test_extra_state_of_submodules_arrives_as_it_was(kind: Any, form: str) -> None:
    """``get_extra_state`` travels with its submodule, whatever its type; changes afterwards do not."""
    source, target = nn.Sequential(nn.Linear(2, 2), Normalizer()), nn.Sequential(nn.Linear(2, 2), Normalizer())
    inner = [1.5, "x"]
    extra = source[1].extra = {"count": 9, "inner": inner} if kind is dict else kind(3)
    expected, snapshot = repr(extra), snapshot_weights(FORMS[form](source), 1)
    inner.append(2)
    apply_weights(snapshot, target)
    assert repr(target[1].extra) == expected


# ------------------------------------------------------------------------------ taken at once


@pytest.mark.parametrize("form", ["module", "state dict", "TensorDict"])
def test_later_training_steps_do_not_leak_in(form: str) -> None:
    """A snapshot holds the weights of the moment it was taken."""
    source, target = net(1), net(2)
    expected = state_of(source)
    snapshot = snapshot_weights(FORMS[form](source), 1)
    optimizer = torch.optim.SGD(source.parameters(), lr=0.1)
    sum(parameter.sum() for parameter in source.parameters()).backward()
    optimizer.step()
    apply_weights(snapshot, target)
    assert state_of(target) == expected
    assert state_of(source) != expected


def test_taking_a_snapshot_changes_nothing() -> None:
    """The trainer's module keeps mode, weights, gradients, ``requires_grad`` and random state."""
    source = fresh(1).train()
    source.scalar.grad = torch.tensor(2.0)
    before = (state_of(source), torch.get_rng_state().tolist())
    snapshot_weights(source, 1)
    assert (state_of(source), torch.get_rng_state().tolist()) == before
    assert source.training
    assert source.scalar.grad == 2.0
    assert [p.requires_grad for p in source.parameters()] == [p.requires_grad for p in Everything().parameters()]


# ------------------------------------------------------------------------------ the digest


def digest(weights: Any, version: int = 1) -> str:
    return snapshot_weights(weights, version).digest


def test_equal_weights_have_equal_digests() -> None:
    """The digest names the weights: neither version, order of names nor the object that they came in matters."""
    module = net(1)
    assert digest(dict(reversed(module.state_dict().items()))) == digest(module, version=2)
    assert digest(fresh(1)) == digest(fresh(1), version=2)


def test_the_least_difference_is_another_digest() -> None:
    """One bit of any tensor; equal bytes under another name, dtype or shape, or beside another extra state."""
    weights: list[Any] = [
        net(1),
        {"a": torch.zeros(4)},
        {"b": torch.zeros(4)},
        {"a": torch.zeros(2, 2)},
        {"a": torch.zeros(4, dtype=torch.int32)},
        {"a": torch.zeros(4), "b": torch.zeros(0)},
        {"a": torch.zeros(4), "x._extra_state": 1},
        {"a": torch.zeros(4), "x._extra_state": 2},
    ]
    for name in net(1).state_dict():
        weights.append(net(1))
        weights[-1].state_dict()[name].reshape(-1).view(torch.uint8)[0] ^= 1
    assert len(set(map(digest, weights))) == len(weights)


class Statistics(nn.Module):
    """A normalizer whose statistics are tensors, arrays and names in its extra state."""

    def __init__(self, count: int = 5) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(2))
        self.state: dict[str, Any] = {
            "mean": torch.zeros(3),
            "count": count,
            "deviation": np.ones(3),
            "names": {f"name{i}" for i in range(20)},
        }

    def get_extra_state(self) -> dict[str, Any]:
        """Return copies, as a module that goes on training does."""
        return {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in self.state.items()}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Take them."""
        self.state = state


def test_extra_state_with_tensors_and_sets_is_in_the_digest() -> None:
    """Resume and replay recognize the weights of a run by it; other processes compute it too (``test_canonical``)."""
    crossed = pickle.loads(pickle.dumps(snapshot_weights(Statistics(), 1)))
    assert digest(Statistics()) == digest(Statistics(), version=2) == crossed.digest
    assert digest(Statistics(count=6)) != crossed.digest


def test_weights_without_extra_state_keep_the_digest_that_logs_hold() -> None:
    """A log that an earlier version wrote can be continued."""
    weights = {"b": torch.arange(6.0).reshape(2, 3), "a": torch.tensor([1, 2], dtype=torch.int32)}
    assert digest(weights) == "8a3c64f4e53e623b80dc59670a0b9734"


# ------------------------------------------------------------------------------ refused, and nothing changed


def without(weights: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in weights.items() if name not in names}


def changed(**tensors: Any) -> dict[str, Any]:
    return fresh(1).state_dict() | {name.replace("__", "."): value for name, value in tensors.items()}


MISFITS: dict[str, tuple[dict[str, Any], str | None]] = {
    "missing": (without(changed(), "body.0.weight"), "body.0.weight"),
    "two missing": (without(changed(), "body.0.weight", "scalar"), "body.0.weight"),
    "extra": (changed(body__9__weight=torch.zeros(1)), "body.9.weight"),
    "misshapen": (changed(body__2__weight=torch.zeros(2, 5)), "body.2.weight"),
    "transposed": (changed(body__2__weight=torch.zeros(4, 2)), "body.2.weight"),
    "broadcastable": (changed(body__2__bias=torch.zeros(1)), "body.2.bias"),
    "other dtype": (changed(frozen=torch.zeros(3, dtype=torch.float64)), "frozen"),
    "half": (changed(frozen=torch.zeros(3).half()), "frozen"),
    "no extra state": (without(changed(), "normalizer._extra_state"), "normalizer._extra_state"),
    "too much extra state": (changed(body___extra_state={}), "body._extra_state"),
    "nothing": ({}, None),
}


@pytest.mark.parametrize("misfit", MISFITS)
def test_weights_that_do_not_fit_are_named_and_change_nothing(misfit: str) -> None:
    """A missing or extra tensor, or one of the wrong shape or dtype, is named; the policy stays unchanged."""
    weights, key = MISFITS[misfit]
    target = fresh(2)
    before = state_of(target)
    with refused(WeightsError, key):
        apply_weights(snapshot_weights(weights, 1), target)
    assert state_of(target) == before


def test_extra_state_that_a_module_rejects_changes_nothing() -> None:
    """All or nothing holds too when a submodule refuses its extra state."""

    class Picky(Normalizer):
        def set_extra_state(self, state: Any) -> None:
            raise ValueError("not mine")

    target = nn.Sequential(nn.Linear(2, 2), Picky())
    before = state_of(target)
    with pytest.raises(ValueError, match="not mine"):
        apply_weights(snapshot_weights(randomized(nn.Sequential(nn.Linear(2, 2), Normalizer()), 3), 1), target)
    assert state_of(target) == before


@pytest.mark.parametrize(
    ("weights", "key"),
    [
        *((weights, "weights") for weights in (None, "policy.pt", [torch.zeros(3)], torch.zeros(3))),
        ({"a": {"b": 3}}, "a.b"),
        ({"a": None}, "a"),
    ],
)
def test_what_are_no_weights_is_refused(weights: Any, key: str) -> None:
    with refused(WeightsError, key):
        snapshot_weights(weights, 1)


def lazy() -> nn.Module:
    return nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 2))


def test_uninitialized_weights_are_refused() -> None:
    """A lazy layer that never ran has nothing to send, and no shape to check against; it is named."""
    for weights in (lazy(), lazy().state_dict()):
        with refused(WeightsError, "0.weight"):
            snapshot_weights(weights, 1)
    with refused(WeightsError, "0.weight"):
        apply_weights(snapshot_weights(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)), 1), lazy())


# ------------------------------------------------------------------------------ files


@pytest.mark.parametrize("name", ["w.safetensors", "w.pt", "w.pth", "w"])
def test_weights_files_hold_the_weights(tmp_path: Path, name: str) -> None:
    """Of another program and of ours, in any format, they have the digest of the module that was saved."""
    module = net(1)
    snapshot = snapshot_weights(module, 0)
    save = safetensors.torch.save_file if name.endswith(".safetensors") else torch.save
    save(module.state_dict(), tmp_path / name)
    save_weights_file(snapshot, tmp_path / "new" / name)
    for path in (tmp_path / name, tmp_path / "new" / name):
        assert digest(load_weights_file(path)) == snapshot.digest
    assert [path.name for path in (tmp_path / "new").iterdir()] == [name]


def test_a_torch_file_holds_extra_state(tmp_path: Path) -> None:
    """Normalizers keep their statistics in it."""
    source, target = fresh(1), fresh(2)
    torch.save(source.state_dict(), tmp_path / "w.pt")
    apply_weights(snapshot_weights(load_weights_file(tmp_path / "w.pt"), 0), target)
    assert target.normalizer.extra == source.normalizer.extra


class Payload:
    """Creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


WRITERS = [
    lambda path, value: path.write_bytes(pickle.dumps(value)),
    lambda path, value: path.write_bytes(pickle.dumps(value, protocol=2)),
    lambda path, value: torch.save(value, path),
    lambda path, value: torch.save(value, path, _use_new_zipfile_serialization=False),
]


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@pytest.mark.parametrize("write", WRITERS)
@pytest.mark.parametrize("name", ["policy.pt", "policy.safetensors", "policy.pkl"])
def test_a_pickle_is_refused_without_running_it(tmp_path: Path, name: str, write: Any) -> None:
    """A file that would run code when loaded is refused, whatever its name, and no code of it runs."""
    trace, path = tmp_path / "trace", tmp_path / name
    write(path, {"weight": torch.zeros(2), "payload": Payload(trace)})
    with refused(ConfigError, "policy.weights", value=str(path)):
        load_weights_file(path)
    assert not trace.exists()
    pickle.loads(pickle.dumps(Payload(trace)))
    assert trace.exists()


@pytest.mark.parametrize("name", ["w.safetensors", "w.pt"])
@pytest.mark.parametrize("damage", ["missing", "folder", "cut", "empty", "noise", "text"])
def test_a_damaged_file_is_named(tmp_path: Path, name: str, damage: str) -> None:
    """A file that is cut, empty, something else altogether or not there is a ConfigError with its path."""
    path = tmp_path / name
    (safetensors.torch.save_file if name == "w.safetensors" else torch.save)(net(1).state_dict(), path)
    whole, noise = path.read_bytes(), np.random.default_rng(0).bytes(2000)
    path.unlink()
    contents = {"cut": whole[: len(whole) // 2], "empty": b"", "noise": noise, "text": b"hello\n" * 50}
    if damage in contents:
        path.write_bytes(contents[damage])
    elif damage == "folder":
        path.mkdir()
    with refused(ConfigError, "policy.weights", value=str(path)):
        load_weights_file(path)


@pytest.mark.parametrize("value", [{"state_dict": {"a": torch.zeros(1)}}, [torch.zeros(1)], torch.zeros(1), {"a": 3}])
def test_a_file_must_hold_a_flat_mapping_of_tensors(tmp_path: Path, value: Any) -> None:
    """A checkpoint with weights somewhere inside is refused: which of them are meant cannot be guessed."""
    torch.save(value, tmp_path / "checkpoint.pt")
    with refused(ConfigError, "policy.weights", value=str(tmp_path / "checkpoint.pt")):
        load_weights_file(tmp_path / "checkpoint.pt")


# ------------------------------------------------------------------------------ files that hold more than weights


@pytest.fixture
def checkpoint(tmp_path: Path) -> tuple[Path, str]:
    """The file of a training run, and the digest of the weights in it."""
    module = net(1)
    optimizer = torch.optim.Adam(module.parameters())
    nested = {f"policy.{name}": tensor for name, tensor in module.state_dict().items()}
    held = {"model": module.state_dict(), "optimizer": optimizer.state_dict(), "step": 3, "agent": {"state": nested}}
    torch.save(held, tmp_path / "ckpt.pt")
    safetensors.torch.save_file({**nested, "critic.weight": torch.zeros(2)}, tmp_path / "ckpt.safetensors")
    return tmp_path / "ckpt.pt", snapshot_weights(module, 0).digest


def test_a_key_selects_the_weights_in_a_checkpoint(checkpoint: tuple[Path, str]) -> None:
    """Dots lead into mappings, and then into the common beginning of names, which is all that a flat file has."""
    path, digest = checkpoint
    flat = path.with_suffix(".safetensors")
    for file, key in ((path, "model"), (path, "agent.state.policy"), (flat, "policy")):
        assert snapshot_weights(load_weights_file(file, key), 0).digest == digest


@pytest.mark.parametrize(
    ("key", "names"),
    [
        (None, ["model", "optimizer", "step", "agent"]),
        ("modle", ["model", "optimizer", "step", "agent"]),
        ("agent.net", ["state"]),
        ("step", []),
        ("optimizer", ["state", "param_groups"]),
    ],
)
def test_a_key_that_leads_nowhere_is_answered_with_those_that_there_are(
    checkpoint: tuple[Path, str], key: str | None, names: list[str]
) -> None:
    """The message lists the keys at the place where the key fails."""
    path = checkpoint[0]
    place = ("policy.weights", str(path)) if key is None else ("policy.weights_key", key)
    with refused(ConfigError, place[0], value=place[1]) as caught:
        load_weights_file(path, key)
    assert all(repr(name) in str(caught.value) for name in names)


# ------------------------------------------------------------------------------ what a snapshot does not contain


class Attribute(nn.Module):
    """A tensor or an array that is a plain attribute."""

    def __init__(self, factor: float, kind: str = "tensor") -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.factor: Any = torch.tensor([factor]) if kind == "tensor" else np.array([factor], np.float32)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.linear(inputs) * torch.as_tensor(self.factor)


class Unsent(nn.Module):
    """Nothing but such a tensor."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = torch.tensor([factor])

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs[:, :1] * self.factor


def quantized(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch announces its replacement.
        return torch.ao.quantization.quantize_dynamic(nn.Sequential(nn.Linear(3, 2)), {nn.Linear}, torch.qint8)


@pytest.mark.parametrize(
    ("make", "key"),
    [
        (Attribute, "factor"),
        (lambda seed: Attribute(seed, "array"), "factor"),
        (lambda seed: nn.Sequential(Attribute(seed)), "0.factor"),
        (quantized, "0._packed_params._packed_params"),
    ],
)
def test_state_that_is_not_sent_must_be_equal(make: Callable[[int], nn.Module], key: str) -> None:
    """Otherwise the policy would be evaluated with the state of another one. A copy has the same state."""
    policy, same, other = make(1), make(1), make(2)
    apply_weights(snapshot_weights(same, 1), policy)
    apply_weights(snapshot_weights(copy.deepcopy(same), 1), policy)
    with refused(WeightsError, key):
        apply_weights(snapshot_weights(other, 1), policy)
    with refused(WeightsError, f"a.{key}"):
        apply_weights(snapshot_weights({"a": other}, 1), nn.ModuleDict({"a": policy}))


def prune(layer: nn.Module) -> nn.Module:
    return random_unstructured(layer, "weight", 0.5)


@pytest.mark.parametrize("wrap", [nn.utils.weight_norm, prune])
def test_what_a_layer_computes_from_its_parameters_is_no_state(wrap: Callable[[nn.Module], nn.Module]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        source, target = wrap(nn.Linear(3, 2)), wrap(nn.Linear(3, 2))
    inputs = torch.ones(1, 3)
    with torch.no_grad():
        source(inputs)
        apply_weights(snapshot_weights(source, 1), target)
        assert torch.equal(source(inputs), target(inputs))


def test_the_result_of_a_forward_pass_is_no_state() -> None:
    """It has a gradient function, as a value that a trainer keeps for its loss."""
    source, target = nn.Linear(3, 2), nn.Linear(3, 2)
    source.features = source(torch.ones(1, 3))
    apply_weights(snapshot_weights(source, 1), target)


class Keeps(nn.Module):
    """A module that keeps what its last forward pass computed."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 2)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs = self.linear(inputs)
        self.last = outputs.detach()
        return outputs


def test_what_the_evaluated_policy_keeps_of_forward_passes_is_no_other_state() -> None:
    """It is no reason to reject the policy itself, a copy of it, or the policy of another configuration."""
    policy, following = Keeps(), Keeps()
    config = EvalConfig().environment("CartPole-v1").runners(num_runners=0).evaluation(num_episodes=2)
    following(torch.ones(1, 4))
    with EvalRunnerGroup(config, policy, threaded=False) as group:
        for sent in (policy, policy, copy.deepcopy(policy), following):
            sent(torch.rand(1, 4))
            group.sync_weights(sent)
            assert group.evaluate().status == "complete"
        group.reconfigure(config, following)
        for _ in range(2):
            following(torch.rand(1, 4))
            group.sync_weights(following)
            group.sync_weights(policy)


def test_state_that_acting_does_not_change_must_be_equal_in_a_runner() -> None:
    """The module keeps values of forward passes, too."""
    config = EvalConfig().environment("CartPole-v1").runners(num_runners=0).evaluation(num_episodes=2)
    policy, other = Keeps(), Keeps()
    policy.factor, other.factor = torch.tensor([1.0]), torch.tensor([2.0])
    with EvalRunnerGroup(config, policy, threaded=False) as group:
        group.evaluate()
        other(torch.rand(1, 4))
        with refused(WeightsError, "factor"):
            group.sync_weights(other)
        other.factor = torch.tensor([1.0])
        group.sync_weights(other)


class Expanded(nn.Module):
    """A buffer whose elements share one place in memory."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.register_buffer("row", torch.tensor([[value], [2 * value]]).expand(2, 4))


def test_an_expanded_buffer_is_copied() -> None:
    target = Expanded(1.0)
    apply_weights(snapshot_weights(Expanded(3.0), 1), target)
    assert target.row.tolist() == [[3.0] * 4, [6.0] * 4]
    apply_weights(snapshot_weights(Expanded(5.0), 1), target)
    assert target.row.tolist() == [[5.0] * 4, [10.0] * 4]


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.eye(3).to_sparse(),
        lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
        lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
        lambda: torch.ones(3, device="meta"),
    ],
    ids=["sparse", "quantized", "nested", "meta"],
)
def test_a_tensor_that_cannot_be_copied_is_named(make: Callable[[], torch.Tensor]) -> None:
    module = nn.Sequential(nn.Linear(3, 2))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # Nested tensors are a prototype.
        module[0].register_buffer("odd", make())
    with refused(WeightsError, "0.odd"):
        snapshot_weights(module, 1)


def test_a_policy_on_the_meta_device_is_named() -> None:
    config = EvalConfig().environment("Pendulum-v1").evaluation(num_episodes=2, max_episode_steps=5)
    with refused(WeightsError, "0.weight"):
        evaluate(config, nn.Sequential(nn.Linear(3, 1, device="meta")))


DISTRIBUTED = """
import json, sys
import torch
from torch import distributed, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, distribute_tensor
from rl_eval import EvalConfig, Evaluator, evaluate
from rl_eval.errors import WeightsError
from rl_eval.weights import snapshot_weights

rank, world = map(int, sys.argv[2:])
distributed.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=rank, world_size=world)
mesh = init_device_mesh("cpu", (world,))
config = EvalConfig().environment("Pendulum-v1").evaluation(num_episodes=2, max_episode_steps=5)


def built():
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))


def outcome(call):
    try:
        return call()
    except WeightsError as error:
        return error.key


def acting(weights):
    with Evaluator(config, policy=nn.Sequential(*built()), backend="inline") as evaluator:
        return evaluator.evaluate(weights).fingerprint


plain, module = built(), fully_shard(built(), mesh=mesh)
copies = {name: distribute_tensor(tensor, mesh, [Replicate()]) for name, tensor in plain.state_dict().items()}
gathered = get_model_state_dict(module, options=StateDictOptions(full_state_dict=True))
print(json.dumps({
    "plain": snapshot_weights(plain, 1).digest,
    "replicated": snapshot_weights(copies, 1).digest,
    "gathered": snapshot_weights(gathered, 1).digest,
    "sharded": outcome(lambda: snapshot_weights(module, 1).digest),
    "state dict": outcome(lambda: snapshot_weights(module.state_dict(), 1).digest),
    "policy": outcome(lambda: evaluate(config, module)),
    "acting": acting(gathered if world > 1 else module) == acting(plain),
}))
distributed.barrier()
distributed.destroy_process_group()
"""


@pytest.mark.process
@pytest.mark.parametrize("world", [1, 2])
def test_tensors_of_several_processes_are_complete_or_named(world: int, tmp_path: Path) -> None:
    """One process alone cannot gather the parts: it would wait for ever. The advice of the error works."""
    if not hasattr(pytest.importorskip("torch.distributed.fsdp"), "fully_shard"):
        pytest.skip("torch has no fully_shard yet")
    words = [sys.executable, "-W", "ignore", "-c", DISTRIBUTED, str(tmp_path / "meeting")]
    ranks = [subprocess.Popen([*words, str(rank), str(world)], stdout=subprocess.PIPE) for rank in range(world)]
    for rank in ranks:
        found = json.loads(rank.communicate(timeout=120)[0])
        assert found["replicated"] == found["gathered"] == found["plain"]
        whole = found["plain"] if world == 1 else "0.weight"
        assert (found["sharded"], found["state dict"]) == (whole, whole)
        assert (found["policy"], found["acting"]) == ("0.weight", True)


def test_extra_state_that_cannot_be_pickled_is_named() -> None:
    class Holder(nn.Module):
        def get_extra_state(self) -> Any:
            return lambda: 1

    with refused(WeightsError, "_extra_state"):
        snapshot_weights(Holder(), 1)


class Written(nn.Module):
    """Its weights are written while their names are read, as by a thread that trains."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self.linear, self.times = nn.Linear(3, 2), times

    def get_extra_state(self) -> Any:
        return _Writes(self)

    def set_extra_state(self, state: Any) -> None:
        pass


class _Writes:
    def __init__(self, module: Written) -> None:
        self._module = module

    def __reduce__(self) -> Any:
        if self._module.times:
            self._module.times -= 1
            with torch.no_grad():
                self._module.linear.bias.add_(1.0)
        return int, ()


@pytest.mark.parametrize("kind", [np.float32, np.float64, np.int64, np.uint8, np.bool_])
def test_a_checkpoint_may_contain_numpy_scalars(tmp_path: Path, kind: type[np.generic]) -> None:
    """They are not code. An array of objects is refused, since its pickle could name anything."""
    weights = nn.Linear(2, 1).state_dict()
    torch.save({"model": weights, "score": kind(1)}, tmp_path / "checkpoint.pt")
    assert load_weights_file(tmp_path / "checkpoint.pt", "model").keys() == weights.keys()
    torch.save({"model": weights, "score": np.array([Path()], object)}, tmp_path / "checkpoint.pt")
    with refused(ConfigError, "policy.weights"):
        load_weights_file(tmp_path / "checkpoint.pt", "model")


def test_weights_that_change_while_they_are_copied_are_noticed() -> None:
    """They are copied again a few times, since training steps have pauses."""
    assert snapshot_weights(Written(1), 1).entries
    with refused(WeightsError, "linear.bias"):
        snapshot_weights(Written(100), 1)


@pytest.mark.parametrize("make", [lambda seed: nn.Sequential(Attribute(seed), nn.Linear(2, 1)), Unsent])
def test_an_evaluator_does_not_evaluate_its_policy_in_place_of_another_module(make: Callable[[float], Any]) -> None:
    """The tensors that it cannot send differ, so the evaluation fails."""
    policy, other = make(1.0), make(2.0)
    config = EvalConfig().environment("Pendulum-v1").evaluation(num_episodes=2, max_episode_steps=5)
    with Evaluator(config, policy, backend="inline", on_error=lambda _: None) as evaluator:
        assert evaluator.evaluate(policy).status == "complete"
        with refused(WeightsError, "factor" if make is Unsent else "0.factor"):
            evaluator.evaluate(other)
        assert evaluator.evaluate(other.state_dict()).status == "complete"


def test_an_exported_module_is_a_policy() -> None:
    """It keeps its mode, since it has no other."""
    module = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    shapes = ({0: torch.export.Dim("rows")},)
    exported = torch.export.export(module, (torch.zeros(4, 3),), dynamic_shapes=shapes).module()
    batch = np.random.default_rng(0).normal(size=(16, 3)).astype(np.float32)
    space = gym.spaces.Discrete(2)
    with torch.no_grad():
        policies = [ModulePolicy(one, space, True) for one in (module, exported)]
        actions = [policy.act(batch, None, np.ones(16, bool), None)[0] for policy in policies]
    assert np.array_equal(*actions)
