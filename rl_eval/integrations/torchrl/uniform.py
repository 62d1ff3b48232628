"""Random actions of an environment's spec as a tensordict module, in the form that the environment takes."""

from __future__ import annotations

from typing import Any, Final, final

import numpy as np
import torch
from tensordict import TensorDictBase, unravel_key
from tensordict.nn import TensorDictModuleBase
from torchrl.data import Composite, TensorSpec

from rl_eval.integrations.torchrl.keys import Key
from rl_eval.integrations.torchrl.spaces import action_space, action_writer
from rl_eval.policies.uniform import UniformPolicy
from rl_eval.protocols import NoiseSource

__all__ = ["UNIFORM", "RandomActions"]

UNIFORM: Final = "uniform"
"""Mode of a policy whose actions are random."""


@final
class RandomActions(TensorDictModuleBase):  # type: ignore[misc]  # Where tensordict is not installed.
    """Counterpart of ``torchrl.modules.RandomPolicy`` that draws from each episode's own noise.

    Args:
        spec: Spec of the actions: of one, or a Composite of all.
        action_key: Key of a single action.

    Raises:
        ConfigError: Actions of this spec cannot be drawn.
    """

    def __init__(self, spec: TensorSpec, action_key: Key = "action") -> None:
        super().__init__()
        specs = dict(spec.items(True, True)) if isinstance(spec, Composite) else {action_key: spec}
        self._drawn = {key: (UniformPolicy(action_space(leaf)), action_writer(leaf)) for key, leaf in specs.items()}
        self.in_keys: list[Key] = []
        self.out_keys = [unravel_key(key) for key in specs]

    def draw(self, batch: TensorDictBase, noise: NoiseSource | None) -> TensorDictBase:
        """Write actions into a batch of observations, of which an ``action_mask`` is respected.

        Raises:
            ConfigError: There is no noise, since actions are to be deterministic.
        """
        mask: Any = batch.get("action_mask", None)
        seen = {} if mask is None else {"action_mask": mask.cpu().numpy()}
        for key, (policy, write) in self._drawn.items():
            actions, _ = policy.act(seen, None, np.ones(len(batch), bool), noise)
            batch.set(key, torch.stack([write(action) for action in actions]))
        return batch
