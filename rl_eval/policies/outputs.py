"""Actions from the numbers that a network returns; the action space defines the meaning of these numbers.

=================  =============================  ==========================================
action space       module output per row          action
=================  =============================  ==========================================
Discrete           logits, (n,)                   argmax, or sampled by inverse CDF
MultiDiscrete      logits, (sum(nvec),)           the same for each part
MultiBinary        logits, (n,)                   logit > 0, or sampled
Box                actions, or (mean, log_std)    the mean, or mean + exp(log_std) * noise
=================  =============================  ==========================================

For Discrete and MultiDiscrete, integers in the shape of an action are actions, not logits.
"""

from __future__ import annotations

from typing import Any, final

import gymnasium as gym
import numpy as np
import numpy.typing as npt

from rl_eval.errors import ConfigError, PolicyError
from rl_eval.policies.inference.spaces import chunk_advice
from rl_eval.policies.sampling import bernoulli, categorical, gaussian, log_probability, refuse_nan
from rl_eval.protocols import NoiseSource

Array = npt.NDArray[Any]


@final
class OutputReader:
    """Reader of a network's outputs.

    Args:
        network: Description of the network for messages, such as ``an nn.Module``.
        action_space: Space that defines the meaning of the outputs.
        deterministic: Take the most likely action instead of sampling.
        chunks: Whether the network returns chunks: the outputs of several actions per row, whose number the first batch
            shows.

    Raises:
        ConfigError: The action space is not in the table above.
    """

    def __init__(
        self, network: str, action_space: gym.Space[Any], deterministic: bool, *, chunks: bool = False
    ) -> None:
        supported = (gym.spaces.Discrete, gym.spaces.MultiDiscrete, gym.spaces.MultiBinary, gym.spaces.Box)
        if not isinstance(action_space, supported):
            problem = f"policy.policy is {network}, whose outputs cannot be read as actions of {action_space}"
            fix = "Implement rl_eval.Policy: its act() returns actions."
            raise ConfigError(problem, key="policy.policy", value=network, fix=fix)
        self.space: Any = action_space
        self.is_box = isinstance(action_space, gym.spaces.Box)
        self._deterministic = deterministic
        self._single = action_space if chunks else None
        """Space of one action of a chunk; None without chunks. After the first batch, ``space`` contains chunks."""
        self._last: tuple[Array, Array | None, Array] | None = None
        """Outputs of the network for the last batch, and the actions drawn from them."""

    @property
    def drawn(self) -> dict[str, Array] | None:
        """``action_log_prob``, shape (batch,): log-probability (or log-density) of each action of the last batch.

        It belongs to the drawn action, before ``policy.actions`` clips or maps this action into the action space. None
        if actions are not sampled.
        """
        if self._last is None:
            return None
        return {"action_log_prob": log_probability(self.space, *self._last)}

    def actions(
        self, output: Array, log_std: Array | None, live: npt.NDArray[np.bool_], noise: NoiseSource | None
    ) -> Array:
        """Return the actions of a batch.

        Args:
            output: Logits or actions, shape (batch, ...).
            log_std: Logarithms of standard deviations, shape (batch, ...); None if the network returns none.
            live: Mask of the rows with an episode, shape (batch,).
            noise: Randomness of each row's episode; None for the most likely actions.

        Raises:
            ConfigError: Actions are sampled, but the network returns no distribution.
            PolicyError: The output has the wrong shape, or is NaN in a live row.
        """
        refuse_nan(output, live, "the module's output")
        if self.space is self._single:
            self.space = _space_of_chunks(self.space, output)
        if self._deterministic or noise is None:
            return self._read(output, log_std, live, None)
        actions = self._read(output, log_std, live, noise)
        self._last = output, log_std, actions
        return actions

    def log_prob(self, output: Array, log_std: Array | None, actions: Array) -> npt.NDArray[np.float64]:
        """Return the log-probabilities of actions; see :class:`rl_eval.protocols.ActionLogProb`.

        Raises:
            ConfigError: The action space is a Box, and actions are not sampled or the network returns no ``log_std``.
                So no action has a density.
            PolicyError: The actions are not in the action space.
        """
        _check_actions(actions, len(output), self.space)
        sampled = not self._deterministic
        if self.is_box and not (sampled and log_std is not None):
            problem = "the policy takes one action per observation in a continuous space, so no action has a density"
            fix = "Set policy.deterministic to False, and return (mean, log_std) from the module."
            raise ConfigError(problem, key="policy.deterministic", value=self._deterministic, fix=fix)
        if sampled:
            return log_probability(self.space, output, log_std, actions)
        taken = self._read(output, log_std, np.ones(len(output), np.bool_), None)
        return np.where((taken == actions).reshape(len(output), -1).all(1), 0.0, -np.inf)

    def _read(
        self, output: Array, log_std: Array | None, live: npt.NDArray[np.bool_], noise: NoiseSource | None
    ) -> Array:
        space = self.space
        batch = len(output)
        if isinstance(space, gym.spaces.Discrete | gym.spaces.MultiDiscrete) and self._has_actions(output):
            return self._read_actions(output, None, noise)
        if isinstance(space, gym.spaces.Discrete):
            logits = _expect(output, (batch, int(space.n)), "logits", space)
            return categorical(logits, live, noise) + int(space.start)
        if isinstance(space, gym.spaces.MultiDiscrete):
            sizes = [int(n) for n in space.nvec.ravel()]
            rows = output if self._single is None else output.reshape(batch, -1)
            logits = _expect(rows, (batch, sum(sizes)), "logits", space)
            parts = np.split(logits, np.cumsum(sizes)[:-1], axis=1)
            chosen = np.stack([categorical(part, live, noise) for part in parts], axis=1)
            return chosen.reshape(batch, *space.shape) + space.start
        if isinstance(space, gym.spaces.MultiBinary):
            logits = _expect(output.reshape(batch, -1), (batch, int(np.prod(space.shape))), "logits", space)
            return bernoulli(logits, noise).reshape(batch, *space.shape)
        return self._read_actions(output, log_std, noise)

    def _has_actions(self, output: Array) -> bool:
        """Return whether the network has chosen actions itself, such as by an argmax."""
        return output.dtype.kind in "iu" and output.size == len(output) * int(np.prod(self.space.shape or ()))

    def _read_actions(self, output: Array, log_std: Array | None, noise: NoiseSource | None) -> Array:
        shape = (len(output), *(self.space.shape or ()))
        if output.size != int(np.prod(shape)):
            _expect(output, shape, "actions", self.space)
        if noise is None:
            return output.reshape(shape)
        if log_std is None:
            problem = "policy.deterministic is False, but the module returns actions without a distribution"
            fix = "Return a tuple (mean, log_std) to sample from, or set policy.deterministic to True."
            raise ConfigError(problem, key="policy.deterministic", value=False, fix=fix)
        return gaussian(output, np.exp(log_std.astype(np.float64)), noise).reshape(shape)


def _space_of_chunks(space: Any, output: Array) -> Any:
    """Return the space of chunks with as many actions as there are outputs in a row of a batch."""
    discrete = isinstance(space, gym.spaces.Discrete | gym.spaces.MultiDiscrete)
    sizes = (space.n if isinstance(space, gym.spaces.Discrete) else space.nvec) if discrete else np.ones(space.shape)
    count = output.size // (len(output) * int(np.sum(sizes)))

    def repeated(values: Any) -> Array:
        return np.broadcast_to(values, (count, *np.shape(values)))

    if discrete:
        return gym.spaces.MultiDiscrete(repeated(sizes), start=repeated(space.start))
    if isinstance(space, gym.spaces.MultiBinary):
        return gym.spaces.MultiBinary((count, *space.shape))
    return gym.spaces.Box(repeated(space.low), repeated(space.high), dtype=space.dtype)


def _expect(output: Array, shape: tuple[int, ...], what: str, space: gym.Space[Any]) -> Array:
    if output.shape != shape:
        hint = ""
        if what == "logits" and output.shape == shape[:1]:
            hint = "Return logits, which rl_eval turns into actions, or pass a function that returns actions."
        elif output.ndim == len(shape) == 2:
            hint = f"Give the last layer {shape[1]} outputs."
        hint = hint or chunk_advice(output.shape, shape)
        problem = f"the policy returned {what} of shape {output.shape}, but {space} needs {shape}"
        raise PolicyError(problem, key=what, value=str(output.shape), fix=hint)
    return output


def _check_actions(actions: Array, batch: int, space: gym.Space[Any]) -> None:
    """Raise if actions are not in the space, because their probabilities would be read at wrong indices."""
    if actions.shape != (batch, *(space.shape or ())):
        problem = f"actions of shape {actions.shape} are not {batch} actions of {space}"
        fix = "Pass actions in the form that the environment takes, not one-hot."
        raise PolicyError(problem, key="actions", value=str(actions.shape), fix=fix)
    if isinstance(space, gym.spaces.Discrete | gym.spaces.MultiDiscrete):
        sizes = space.n if isinstance(space, gym.spaces.Discrete) else space.nvec
        if (outside := (actions < space.start) | (actions >= space.start + sizes)).any():
            wrong = actions[outside][0]
            raise PolicyError(f"action {wrong} is not in {space}", key="actions", value=wrong.item())
