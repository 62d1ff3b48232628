"""ONNX: exported models as policies, from a file or from a session of onnxruntime."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import gymnasium as gym
import numpy as np
import numpy.typing as npt
import tree

from rl_eval.config.policy_sources import digest_of
from rl_eval.config.settings import PolicySection
from rl_eval.errors import ConfigError, PolicyError, needs_extra
from rl_eval.integrations.onnx_files import external_data
from rl_eval.integrations.onnx_ports import Roles, roles_of
from rl_eval.integrations.policy_files import reading
from rl_eval.policies.fixed_batch import row_by_row
from rl_eval.policies.outputs import OutputReader
from rl_eval.protocols import NoiseSource

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class OnnxModel:
    """Model in a file. Each process that uses the model opens its own session of onnxruntime."""

    path: str
    digest: str
    """Digest of the file and of its external data."""
    states: Mapping[str, str] | None
    outputs: Sequence[str]


def load_policy(path: str, states: Mapping[str, str] | None = None, outputs: Sequence[str] | None = None) -> OnnxModel:
    """Load a policy from an ONNX file.

    Use it as a factory, or pass the result as the policy::

        config.policy("onnx:policy.onnx", policy_kwargs={"states": {"h": "h_next"}})

    Args:
        path: The file. Files with external data must be in its folder.
        states: The output that follows each recurrent input. By default, inputs and outputs are paired by name, such as
            ``h_in`` and ``h_out``. States are zero at the start of each episode.
        outputs: Name of the output with actions or logits, or names of the mean and of its ``log_std``. By default, the
            first output that is not a state, and an output named ``log_std``.

    Raises:
        ConfigError: The file cannot be read, or names external data outside of its folder.
    """
    file = Path(path).expanduser()
    external_data(file)
    return OnnxModel(str(file), digest_of(file), states, tuple(outputs or ()))


def as_policy(
    value: Any, section: PolicySection, observation_space: gym.Space[Any], action_space: gym.Space[Any]
) -> OnnxPolicy:
    """Build the policy of an :class:`OnnxModel` or an ``onnxruntime.InferenceSession`` for these spaces.

    Raises:
        ConfigError: The inputs and outputs do not fit the spaces, or it is unclear which are states.
    """
    reader = OutputReader("an ONNX model", action_space, section.deterministic, chunks=section.chunk is not None)
    if section.device != "cpu":
        problem = f"policy.device is {section.device!r}, but ONNX models run on the CPU"
        raise ConfigError(problem, key="policy.device", value=section.device, fix="Set policy.device to cpu.")
    known = value if isinstance(value, OnnxModel) else OnnxModel("the session", "", None, ())
    session = value if known is not value else _session(known.path)
    takes, gives = ({one.name: one for one in ports} for ports in (session.get_inputs(), session.get_outputs()))
    name = Path(known.path).name
    roles = roles_of(name, takes, gives, observation_space, states=known.states, outputs=known.outputs)
    return OnnxPolicy(session, roles, reader)


def _session(path: str) -> Any:
    """Return a session with one thread: runners use the cores."""
    with needs_extra("onnx", f"{path} needs the package onnxruntime", "policy.policy_kwargs.path", path):
        import onnxruntime
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    with reading("path", path, "an ONNX model", "Export or download it again."):
        return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])


@final
class OnnxPolicy:
    """Policy that runs a model in a session of onnxruntime. States are dicts of arrays, by input.

    Args:
        session: The session.
        roles: Roles of the model's inputs and outputs.
        reader: Reader of actions.
    """

    def __init__(self, session: Any, roles: Roles, reader: OutputReader) -> None:
        self._session, self._roles, self._reader = session, roles, reader
        self._wanted = [*roles.outputs, *roles.states.values()]
        self.result_notes = roles.notes

    @property
    def outputs(self) -> dict[str, Array] | None:
        """Log-probability of each action of the last batch; see :attr:`OutputReader.drawn`."""
        return self._reader.drawn

    def initial_state(self, batch_size: int) -> dict[str, Array] | None:
        """Return zeros; None for a model without states."""
        roles = self._roles
        zeros = {one: np.zeros((batch_size, *shape), roles.dtypes[one]) for one, shape in roles.zeros.items()}
        return zeros or None

    def probe_outputs(self, observations: Any) -> list[Array]:
        """Return the outputs of the model at the start of an episode, before actions are read from them."""
        batch = len(next(iter(tree.flatten(observations))))
        found = self._forward(observations, self.initial_state(batch), np.ones(batch, bool))
        return [found[one] for one in self._roles.outputs]

    def act(
        self, observations: Any, state: Any, live: npt.NDArray[np.bool_], noise: NoiseSource | None
    ) -> tuple[Array, dict[str, Array] | None]:
        """Choose actions; see :class:`rl_eval.Policy`."""
        found = self._forward(observations, state, live)
        output, *log_std = (found[one] for one in self._roles.outputs)
        actions = self._reader.actions(output, log_std[0] if log_std else None, live, noise)
        return actions, {one: found[after] for one, after in self._roles.states.items()} or None

    def _forward(self, observations: Any, state: Any, live: npt.NDArray[np.bool_]) -> dict[str, Array]:
        """Return the outputs by name, each of shape (batch, ...)."""
        roles = self._roles
        seen = observations if isinstance(observations, dict) else {roles.observations[0]: observations}
        rows = {one: seen[one] for one in roles.observations} | (state or {})
        found = self._run(rows) if roles.batch is None else row_by_row(self._run, rows, roles.batch, live)
        for one, array in found.items():
            if array.ndim == 0 or len(array) != len(live):
                problem = f"the output {one!r} of the model has shape {array.shape} for a batch of {len(live)}"
                raise PolicyError(problem, key="act", value=str(array.shape))
        return found

    def _run(self, rows: dict[str, Array]) -> dict[str, Array]:
        roles = self._roles
        given = {
            one: np.ascontiguousarray(np.moveaxis(array, 0, roles.axes[one]), roles.dtypes[one])
            for one, array in rows.items()
        }
        found = dict(zip(self._wanted, self._session.run(self._wanted, given), strict=True))
        mean, *log_std = roles.outputs
        for one in log_std:
            found[one] = np.broadcast_to(found[one], found[mean].shape)
        return {one: np.moveaxis(array, roles.axes[one], 0) if array.ndim else array for one, array in found.items()}
