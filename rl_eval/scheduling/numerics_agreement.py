"""Agreement of an evaluation's runners on one numerics key: what floats may depend on besides the weights."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any, final

from rl_eval.errors import ConfigError, NumericsMismatch

__all__ = ["NumericsAgreement"]


@final
class NumericsAgreement:
    """Keys that the runners of an evaluation reported: the most frequent counts, until something is recorded.

    Records cannot be taken back, so from then on their key counts, however many runners with another one come up.
    """

    def __init__(self) -> None:
        self.refused: list[str] = []
        """Why runners take no part."""
        self._keys: dict[int, dict[str, Any]] = {}
        self._built_weights: dict[int, str] = {}

    def cast(self, runner: int, key: dict[str, Any], built_weights: str) -> None:
        """Take the key of a runner (its incarnation), and the digest of the weights that its policy was built with."""
        self._keys[runner], self._built_weights[runner] = key, built_weights

    def forget(self, runner: int) -> None:
        """Drop the key of a runner that is gone."""
        self._keys.pop(runner, None)
        self._built_weights.pop(runner, None)

    def most_frequent(self) -> dict[str, Any]:
        """Return the key that most runners have, of equally frequent ones the first; empty if there is none."""
        keys = list(self._keys.values())
        texts = [json.dumps(key, sort_keys=True, default=str) for key in keys]
        return keys[texts.index(Counter(texts).most_common(1)[0][0])] if keys else {}

    def check(self, runner: int, index: int, known: dict[str, Any], *, weights_sent: bool, durable: bool) -> None:
        """Compare the key of a runner with the one that counts.

        Args:
            runner: Its incarnation.
            index: Its position in the group.
            known: The key that counts.
            weights_sent: Whether all runners got the same weights.
            durable: Whether the key is that of records in a log.

        Raises:
            NumericsMismatch: It differs, so the runner's floats could, too.
            ConfigError: The runner built its policy with other weights than the others.
        """
        key = self._keys[runner]
        different = [name for name in known if known[name] != key.get(name)]
        if not different:
            return
        if different == ["outputs"] and not weights_sent and self._built_others(runner, known):
            raise ConfigError(
                f"runner {index} built another policy than the others: a factory that initializes weights at random "
                "needs policy.weights, or sync_weights before the evaluation"
            )
        shown = ", ".join(f"{name} is {key.get(name)!r}, not {known[name]!r}" for name in different)
        others = "the records in the log" if durable else "its group"
        self.refused.append(f"runner {index} would compute other floats than {others}: {shown}")
        raise NumericsMismatch(self.refused[-1])

    def _built_others(self, runner: int, known: dict[str, Any]) -> bool:
        theirs = {self._built_weights[other] for other, key in self._keys.items() if key == known}
        built = self._built_weights[runner]
        return not built or built not in theirs
