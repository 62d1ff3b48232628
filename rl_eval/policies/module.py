"""Policy around an ``nn.Module``, whose outputs :class:`~rl_eval.policies.outputs.OutputReader` reads."""

from __future__ import annotations

from contextlib import suppress
from typing import Any, ClassVar, Final, cast, final

import gymnasium as gym
import numpy as np
import numpy.typing as npt
import torch
import tree

from rl_eval.errors import PolicyError
from rl_eval.policies.fixed_batch import row_by_row
from rl_eval.policies.outputs import OutputReader
from rl_eval.protocols import NoiseSource

Array = npt.NDArray[Any]

_UNDECLARED: Final = object()


@final
class ModulePolicy:
    """Policy around a module that maps observation tensors to logits or actions.

    Floating-point observations are cast to the dtype of the module's first floating-point parameter. To change this,
    give the module an attribute ``observation_dtype``: a torch dtype, or None to keep the dtype of the space.

    Args:
        module: Called with a batch of observation tensors in the structure of the observation space. If it has a method
            ``predict_action_chunk``, this method is called.
        action_space: Space that defines the meaning of the outputs.
        deterministic: Take the most likely action instead of sampling.
        device: Torch device to run on.
        chunks: Whether the module returns chunks: the outputs of several actions per row.
        batch: Number of rows that the module takes. Each row is then computed alone. None for any number.
        notes: Notes for readers of the result.

    Raises:
        ConfigError: The reader does not support the action space.
    """

    takes_device_arrays: ClassVar[bool] = True

    def __init__(
        self,
        module: torch.nn.Module,
        action_space: gym.Space[Any],
        deterministic: bool,
        device: str = "cpu",
        *,
        chunks: bool = False,
        batch: int | None = None,
        notes: tuple[str, ...] = (),
    ) -> None:
        self._reader = OutputReader("an nn.Module", action_space, deterministic, chunks=chunks)
        self.module = module.to(device)
        self._call = getattr(module, "predict_action_chunk", self.module)
        with suppress(NotImplementedError):  # A module of torch.export keeps the mode in which it was exported.
            self.module.eval()
        self._device = torch.device(device)
        self._dtype = _observation_dtype(module)
        self._batch, self.result_notes = batch, notes

    @property
    def outputs(self) -> dict[str, Array] | None:
        """Log-probability of each action of the last batch; see :attr:`OutputReader.drawn`."""
        return self._reader.drawn

    def probe_outputs(self, observations: Any) -> list[Array]:
        """Return the outputs of the module, before actions are read from them."""
        return [array for array in self._forward(observations) if array is not None]

    def log_prob(self, observations: Any, actions: Array) -> npt.NDArray[np.float64]:
        """Return the log-probabilities of actions; see :meth:`OutputReader.log_prob`."""
        return self._reader.log_prob(*self._forward(observations), actions)

    def act(
        self, observations: Any, state: Any, live: npt.NDArray[np.bool_], noise: NoiseSource | None
    ) -> tuple[Array, None]:
        """Choose actions; see :class:`rl_eval.Policy`."""
        return self._reader.actions(*self._forward(observations, live), live, noise), None

    def _forward(self, observations: Any, live: npt.NDArray[np.bool_] | None = None) -> tuple[Array, Array | None]:
        flat = hasattr(observations, "dtype")
        tensors = self._tensor(observations) if flat else tree.map_structure(self._tensor, observations)
        result = self._call(tensors) if self._batch is None else self._alone(tensors, self._batch, live)
        batch = len(observations) if flat else len(tree.flatten(observations)[0])
        if isinstance(result, torch.Tensor):
            return _array(result, batch), None
        box = self._reader.is_box
        if isinstance(result, tuple) and len(result) == 2 and box:
            mean, log_std = result
            return _array(mean, batch), _array(log_std.expand_as(mean), batch)
        wanted = "of actions or a tuple (mean, log_std)" if box else "of logits"
        problem = f"the module returned {type(result).__name__}, but {self._reader.space} needs a tensor {wanted}"
        raise PolicyError(problem, key="forward", value=type(result).__name__)

    def _alone(self, tensors: Any, size: int, live: npt.NDArray[np.bool_] | None) -> Any:
        """Return the outputs of a module with a batch of fixed size. Without ``live``, all rows are computed."""

        def run(rows: Any) -> Any:
            found = self._call(rows)
            if isinstance(found, tuple):  # One log_std for all rows.
                found = tuple(one.expand_as(found[0]) for one in found)
            return tree.map_structure(_numpy, found)

        computed = np.ones(len(tree.flatten(tensors)[0]), np.bool_) if live is None else live
        return tree.map_structure(torch.from_numpy, row_by_row(run, tensors, size, computed))

    def _tensor(self, array: Any) -> Any:
        """Return a tensor of an array; return texts as they are."""
        if isinstance(array, np.ndarray) and array.dtype.kind == "U":
            return array
        if isinstance(array, torch.Tensor):
            tensor = array
        else:
            tensor = torch.from_numpy(array) if isinstance(array, np.ndarray) else torch.utils.dlpack.from_dlpack(array)
        if self._dtype not in (None, tensor.dtype) and tensor.is_floating_point():
            tensor = tensor.to(self._dtype)
        return tensor.to(self._device)


def _observation_dtype(module: torch.nn.Module) -> torch.dtype | None:
    declared: Any = getattr(module, "observation_dtype", _UNDECLARED)
    if declared is not _UNDECLARED:
        return cast("torch.dtype | None", declared)
    return next((p.dtype for p in module.parameters() if p.is_floating_point()), None)


def _array(output: torch.Tensor, batch: int) -> Array:
    if output.ndim == 0 or len(output) != batch:
        shape = tuple(output.shape)
        raise PolicyError(
            f"the module returned a tensor of shape {shape} for a batch of {batch}", key="forward", value=str(shape)
        )
    return _numpy(output)


def _numpy(tensor: torch.Tensor) -> Array:
    # numpy has no bfloat16.
    return (tensor.float() if tensor.dtype is torch.bfloat16 else tensor).cpu().numpy()
