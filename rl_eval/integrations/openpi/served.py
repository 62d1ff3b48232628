"""Policy of a server: the house's inference, with one lane per live episode of all clients."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, final

import gymnasium as gym
import numpy as np
import tree

from rl_eval.config.settings import EvalSettings, with_values
from rl_eval.errors import ConfigError, EnvError, PolicyUnavailable, summary_of
from rl_eval.integrations.openpi.greeting import EXTENSION, greeting, key_of
from rl_eval.integrations.openpi.lanes import Place, Row
from rl_eval.integrations.openpi.wire import pack
from rl_eval.policies.chunks import ChunkedPolicy
from rl_eval.policies.inference.inference import RowInference
from rl_eval.policies.inference.spaces import ActionReader
from rl_eval.policies.subject import configured_weights
from rl_eval.protocols import Recurrent
from rl_eval.runners import class_of
from rl_eval.runners.core import RunnerCore
from rl_eval.supervision.caller import survivable
from rl_eval.weights import weights_of


@final
class ServedPolicy:
    """Configured policy, with the lanes of a server.

    It builds one environment for its spaces and texts, and closes it. The policy's actions are not clipped or mapped:
    the client does that, as it does with a policy in its process. With ``policy.chunk``, an action is a whole chunk.

    Args:
        settings: Settings of an evaluation of the policy.
        lanes: Number of lanes.

    Raises:
        ConfigError: The policy cannot be served, or gives different results for equal observations.
    """

    def __init__(self, settings: EvalSettings, lanes: int) -> None:
        section = settings.policy
        runner = _runner(settings)
        try:
            snapshot = configured_weights(section, version=1)
            if snapshot is not None:
                runner.set_weights(snapshot)
            (seen, acts), policy, inference = runner.spaces, runner.policy, runner.inference
        finally:
            runner.stop()
        horizon = None
        if isinstance(policy, ChunkedPolicy):
            horizon, policy = policy.horizon, policy.inner
        raw = section.model_copy(update={"actions": "none"})
        self._inference = RowInference(policy, seen, _raw_space(acts, horizon), lanes, raw)
        if isinstance(inference, RowInference):
            self._inference.observations.share_texts(inference.observations)
        self._inference.probe()
        self._inference.in_blocks = True
        self._reader, self._chunked = ActionReader(acts, section.actions), horizon is not None
        self._keys = [
            (path, key_of(path)) for path, _ in tree.flatten_with_path(self._inference.observations.structure)
        ]
        self._structure = self._inference.observations.structure
        self.memory = isinstance(policy, Recurrent)
        """Whether the policy has a recurrent state."""
        self.sampled = not section.deterministic
        weights = weights_of(policy)
        digest = "-".join(section.file_digests.values()) if weights is None else weights.digest
        self.greeting: dict[str, Any] = {
            "rl_eval": 1,
            **greeting(section, seen, acts),
            "horizon": horizon,
            "memory": self.memory,
            "weights": digest,
            "numerics": self._inference.numerics,
            "name": str(section.policy),
        }
        """First message to a client."""

    def _observation(self, request: dict[Any, Any]) -> Any:
        if missing := [key for _, key in self._keys if key not in request]:
            given = sorted(str(key) for key in request if key != EXTENSION)
            problem = f"the request has the keys {given}, but the observation space needs {missing[0]}"
            raise EnvError(problem, key=missing[0], value=str(given))
        return tree.unflatten_as(self._structure, [request[key] for _, key in self._keys])

    def end(self, lanes: Sequence[int]) -> None:
        """Free some lanes."""
        for lane in lanes:
            self._inference.end(lane)

    def act(self, block: Sequence[Place]) -> list[tuple[Row, bytes | str]]:
        """Compute the rows of a block; return the message for each row: a text is an error."""
        errors: dict[int, BaseException] = {}
        for lane, row, begins in block:
            if begins:
                self._inference.begin(lane, row.seed)
            self._inference.at_step(lane, row.step)
            try:
                self._inference.observations.write(lane, self._observation(row.request))
            except survivable() as error:
                errors[lane] = error
        lanes, actions = [place.lane for place in block if place.lane not in errors], ()
        try:
            if lanes:
                self._inference.ask(lanes)
                _, actions, failed = self._inference.answered()
                errors |= failed
        except survivable() as error:
            errors |= dict.fromkeys(lanes, error)
        return [(row, self._message(row, errors.get(lane), actions, lane)) for lane, row, _ in block]

    def _message(self, row: Row, error: BaseException | None, actions: Any, lane: int) -> bytes | str:
        if error is not None:
            return refused(row, summary_of(error), unavailable=isinstance(error, PolicyUnavailable))
        if row.episode >= 0:
            return pack({"actions": actions[lane], EXTENSION: {"id": row.episode, "step": row.step}})
        try:
            return pack({"actions": self._ready_to_use(actions[lane])})
        except survivable() as raised:
            return summary_of(raised)

    def _ready_to_use(self, action: Any) -> Any:
        """Apply ``policy.actions``, for a client that only executes actions."""
        batch = action if self._chunked else tree.map_structure(lambda leaf: np.asarray(leaf)[None], action)
        rows = len(tree.flatten(batch)[0])
        read = self._reader.read(batch, np.ones(rows, bool))
        return read if self._chunked else tree.map_structure(lambda leaf: leaf[0], read)


def refused(row: Row, reason: str, *, unavailable: bool) -> bytes | str:
    """Return the answer to a row without an action: an error as text for a client that does not number episodes."""
    named = {"id": row.episode, "step": row.step, "error": reason} | ({"unavailable": True} if unavailable else {})
    return reason if row.episode < 0 else pack({EXTENSION: named})


def _runner(settings: EvalSettings) -> RunnerCore:
    """Build a runner in this process, as an evaluation would.

    Raises:
        ConfigError: The policy of such a runner cannot be served.
    """
    if settings.policy.inference == "batched":
        problem = "policy.inference is batched, so an action would depend on the other clients"
        raise ConfigError(problem, key="policy.inference", value="batched", fix="Remove the key.")
    batched = class_of(settings).facts.steps_all_slots
    here = with_values(settings, runners={"num_runners": 0} | ({} if batched else {"num_envs_per_runner": 1}))
    runner = class_of(here)(here, 0)
    if not isinstance(runner, RunnerCore) or not isinstance(runner.inference, RowInference):
        runner.stop()
        problem = f"runners.runner is {settings.runners.runner!r}: a server has one policy for one agent"
        raise ConfigError(problem, key="runners.runner", value=str(settings.runners.runner), fix="Remove the key.")
    return runner


def _raw_space(space: gym.Space[Any], horizon: int | None) -> gym.Space[Any]:
    """Return the space of a policy's results for one observation, before ``policy.actions`` is applied."""
    if isinstance(space, gym.spaces.Dict):
        return gym.spaces.Dict({key: _raw_space(part, horizon) for key, part in space.spaces.items()})
    if isinstance(space, gym.spaces.Tuple):
        return gym.spaces.Tuple([_raw_space(part, horizon) for part in space.spaces])
    is_box = isinstance(space, gym.spaces.Box)
    if not is_box and horizon is None:
        return space
    shape = (space.shape or ()) if horizon is None else (horizon, *(space.shape or ()))
    if is_box:
        return gym.spaces.Box(-math.inf, math.inf, shape, np.float64)
    most = np.iinfo(np.int64)
    return gym.spaces.Box(most.min, most.max, shape, np.int64)
