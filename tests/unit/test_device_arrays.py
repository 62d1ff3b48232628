"""Simulators whose arrays are not NumPy's: the same records, and observations that stay where they are."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import Any, ClassVar

import gymnasium as gym
import numpy as np
import pytest
import tree

from rl_eval import EvalConfig, EvalResult, evaluate
from rl_eval.errors import EnvError
from rl_eval.policies.inference.device_arrays import numpy_of
from rl_eval.policies.inference.device_observations import DeviceObservations
from rl_eval.runners.batched.simulator import BatchSimulator, BatchStep, checked
from rl_eval.runners.batched.vector_env import VectorEnvSimulator
from tests.refused import refused
from tests.unit.vector_world import Parts, Walk, as_class, follow, walks

torch = pytest.importorskip("torch")
Wrap = Callable[[Any], Any]


def on_cuda(array: Any) -> Any:
    return torch.tensor(array, device="cuda")


def in_jax(array: Any) -> Any:
    import jax

    return jax.numpy.array(array)


needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
needs_jax = pytest.mark.skipif(find_spec("jax") is None, reason="needs jax")  # A skip in an environment is its fault.
with_jax = pytest.param(in_jax, marks=needs_jax)
libraries = pytest.mark.parametrize(
    "array", [np.array, torch.tensor, pytest.param(on_cuda, marks=needs_cuda), with_jax]
)


class Foreign(BatchSimulator):
    """Walks whose arrays are of another library; it raises if its last observations were changed."""

    last: Any = ((), ())

    def __init__(
        self, num_envs: int, array: Wrap, *, first: Wrap | None = None, blocks: bool = False, **world: Any
    ) -> None:
        self.inner, self.array = VectorEnvSimulator(walks(num_envs, **world), blocks=blocks), array
        self.first = first or array
        self.num_envs = num_envs
        self.observation_space, self.action_space = self.inner.observation_space, self.inner.action_space

    def given(self, nested: Any) -> Any:
        return tree.map_structure(self.array, nested)

    def restart(self, slots: Any, specs: Any) -> Any:
        return tree.map_structure(self.first, self.inner.restart(slots, specs))

    def reset(self, seed: int) -> Any:
        return self.given(self.inner.reset(seed))

    def step(self, actions: Any) -> Any:
        np.testing.assert_equal(list(map(numpy_of, self.last[0])), self.last[1])
        step = self.inner.step(actions)
        observations = self.given(step.observations)
        self.last = (flat := tree.flatten(observations)), [np.array(numpy_of(leaf)) for leaf in flat]
        started = step.started and (self.array(step.started[0]), self.given(step.started[1]))
        parts = map(self.array, (np.float32(step.rewards), step.terminated, step.truncated))
        return BatchStep(observations, *parts, step.values, step.keys, started)

    def close(self) -> None:
        self.inner.close()


class Takes:
    """Policy that takes any arrays, and records their types."""

    takes_device_arrays = True
    kinds: ClassVar[set[type]] = set()

    def act(self, observations: Any, state: Any, live: Any, noise: Any) -> tuple[Any, Any]:
        self.kinds |= {type(leaf) for leaf in tree.flatten(observations)}
        return follow(tree.map_structure(numpy_of, observations)), None


class Narrow(gym.ObservationWrapper[Any, Any, Any]):
    """Bounds that some observations exceed."""

    observation_space = gym.spaces.Box(-1, 1, (3,))

    def observation(self, observation: Any) -> Any:
        return observation


class Spoiled(Narrow):
    """A NaN in the third step of some episodes."""

    def observation(self, observation: Any) -> Any:
        return observation * (np.nan if observation[1] == 3 and observation[2] == 7 else 1)


def evaluated(
    array: Wrap, width: int, policy: Any, inference: str = "batched", block: Any = None, **world: Any
) -> EvalResult:
    made = (
        EvalConfig()
        .environment(partial(Foreign, array=array, blocks=block is not None, **world))
        .evaluation(num_episodes=48)
    )
    device = "cuda" if array is on_cuda and policy is None else "cpu"
    made = made.policy(policy, inference=inference, device=device)
    module = torch.nn.Sequential(torch.nn.ReLU(inplace=True), torch.nn.Linear(3, 8), torch.nn.Linear(8, 3))
    for parameter in module.parameters():
        torch.nn.init.constant_(parameter, 0.5)
    return evaluate(
        made.runners(runner="batched", num_envs_per_runner=width, block=block), module if policy is None else None
    )


def seen(result: EvalResult) -> Any:
    """What a result shows of its episodes and observations."""
    notes = [note for note in result.notes if note.startswith("observation")]
    outcomes, differs = [one.outcome for one in result.episodes], result.determinism.passed is False
    return result.fingerprint, outcomes, notes, len(result.faults), differs


@libraries
@pytest.mark.parametrize("width", [7, 100])
@pytest.mark.parametrize("wrap", [Parts, Narrow, Spoiled])
def test_records_and_notes_do_not_depend_on_the_library(array: Wrap, width: int, wrap: Any) -> None:
    """Observations reach the policy in the arrays of the simulator."""
    Takes.kinds.clear()
    result = evaluated(array, width, Takes(), wrap=wrap)
    assert Takes.kinds == {np.ndarray, type(array(np.zeros(1)))}  # The probe makes up NumPy arrays.
    reference = evaluated(np.array, width, follow, inference="exact", wrap=wrap)
    assert seen(result) == seen(reference)
    assert ("failed" in seen(reference)[1]) == (wrap is Spoiled)
    assert bool(seen(reference)[2]) == (wrap is not Parts)


def doubles(array: Any) -> Any:
    return torch.tensor(array, dtype=torch.float64 if array.dtype == np.float32 else None)


@libraries
@pytest.mark.parametrize("width", [7, 8])
@pytest.mark.parametrize("first", [np.array, torch.tensor, doubles, with_jax, np.ndarray.tolist])
def test_restarts_may_be_of_another_library_than_steps(first: Wrap, array: Wrap, width: int) -> None:
    """No restart changes the observations of live slots."""
    result = evaluated(array, width, Takes(), first=first)
    assert seen(result) == seen(evaluated(np.array, width, follow, "exact"))


def test_integers_do_not_wrap() -> None:
    """The first arrays have the dtype of the simulator; later ones must fit in it."""
    batch = DeviceObservations(gym.spaces.Box(0, 255, (1,), np.uint8), 2)
    batch.adopt(np.array([1]), torch.tensor([[300]]))
    assert batch.arrays[1].tolist() == [300]
    batch.adopt_step(torch.ones((2, 1), dtype=torch.uint8), np.arange(2), 2)
    for wrong in (np.array([[300]]), torch.tensor([[300]]), [[300]]):
        with refused(EnvError, "observation"):
            batch.adopt(np.array([0]), wrong)


@libraries
@pytest.mark.parametrize("inference", ["exact", "batched"])
def test_a_module_gets_the_same_numbers(array: Wrap, inference: str) -> None:
    """It may change them in place, and the simulator does not notice."""
    result, reference = (evaluated(one, 7, None, inference) for one in (array, np.array))
    assert seen(result) == seen(reference)
    assert not reference.faults


@libraries
@pytest.mark.parametrize("inference", ["exact", "batched"])
def test_a_function_gets_numpy_arrays(array: Wrap, inference: str) -> None:
    assert seen(evaluated(array, 5, follow, inference)) == seen(evaluated(np.array, 5, follow, "exact"))


@libraries
def test_blocks_do_not_depend_on_the_library(array: Wrap) -> None:
    """Slots that restart by themselves get the first observations of the next episodes."""
    assert seen(evaluated(array, 5, Takes(), block=3)) == seen(evaluated(np.array, 5, follow, "exact", block=3))


class Remote(torch.Tensor):
    """A tensor that NumPy cannot read, as on a GPU."""

    def __array__(self, *_: Any) -> Any:
        raise TypeError("cannot convert a tensor of a GPU")

    def cpu(self) -> Any:
        return super().cpu().as_subclass(torch.Tensor)


def remote(nested: Any) -> Any:
    """Return tensors for the arrays of numbers in a nest, in which those of objects are stacked."""
    if isinstance(nested, dict):
        return {key: remote(value) for key, value in nested.items()}
    if nested.dtype == object:
        last = next(row for row in nested if row is not None)
        rows = [tree.map_structure(np.zeros_like, last) if row is None else row for row in nested]
        return remote(tree.map_structure(lambda *leaves: np.array(leaves), *rows))
    return torch.tensor(nested).as_subclass(Remote)


class RemoteWalks(gym.vector.SyncVectorEnv):
    """Walks of which everything is in tensors on a device."""

    def reset(self, **arguments: Any) -> Any:
        return tuple(map(remote, super().reset(**arguments)))

    def step(self, actions: Any) -> Any:
        return tuple(map(remote, super().step(actions)))


@pytest.mark.parametrize("inference", ["exact", "batched"])
@pytest.mark.parametrize("mode", ["NextStep", "SameStep"])
@pytest.mark.parametrize("walk", [Walk, lambda: Parts(Walk())])
def test_a_vector_environment_may_have_everything_on_a_device(walk: Any, mode: str, inference: str) -> None:
    def results(cls: type[Any]) -> EvalResult:
        made = EvalConfig().environment(as_class(cls, mode, walk)).policy(Takes(), inference=inference)
        made.evaluation(num_episodes=40, info_keys=["height"])
        return evaluate(made.runners(runner="batched", num_envs_per_runner=7))

    ours, theirs = results(RemoteWalks), results(gym.vector.SyncVectorEnv)
    assert not ours.faults
    assert [(one.episode_return, one.info, one.success_at_end) for one in ours.episodes] == [
        (one.episode_return, one.info, one.success_at_end) for one in theirs.episodes
    ]


@libraries
def test_flags_are_0_or_1_in_every_library(array: Wrap) -> None:
    rewards, flags = array(np.ones(2, np.float32)), array(np.array([0, 1], np.uint8))
    step = checked(BatchStep(rewards, rewards, flags, flags), 2)
    assert (step.rewards.dtype, step.terminated.tolist()) == (np.float64, [False, True])
    with refused(EnvError, "truncated"):
        checked(BatchStep(rewards, rewards, flags, flags + flags), 2)
    with refused(EnvError, "terminated"):
        checked(BatchStep(rewards, rewards, rewards, flags), 2)
