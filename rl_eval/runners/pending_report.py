"""Next report of a runner: what has happened since the last one."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, final

import numpy as np
import numpy.typing as npt

from rl_eval.records.episode import ROW, Fault, RunReport, without_place
from rl_eval.runners.lane import Lane

__all__ = ["PendingReport"]


@final
class PendingReport:
    """Everything that a runner has to tell, as it comes up.

    Args:
        info_keys: Names of the ``info`` scalars that each row comes with.
    """

    __slots__ = (
        "_notes",
        "_under_way",
        "artifacts",
        "built_weights",
        "construct_seconds",
        "env_steps",
        "faults",
        "inference_seconds",
        "info_keys",
        "infos",
        "reset_seconds",
        "returned",
        "rows",
        "standing_note",
        "step_seconds",
        "traces",
    )

    def __init__(self, info_keys: tuple[str, ...]) -> None:
        self.info_keys = info_keys
        self.construct_seconds = math.inf
        """Shortest construction of an environment so far."""
        self.built_weights = ""
        """Digest of the weights that the policy was built with."""
        self._under_way = (0, 0.0)
        """Steps of the live attempts, and their seconds, that earlier reports have counted."""
        self.standing_note = ""
        """Note of every report, and so of every evaluation of a runner."""
        self._begin()

    def _begin(self) -> None:
        self.rows: list[tuple[Any, ...]] = []
        self.infos: list[list[float]] = []
        self.faults: list[Fault] = []
        self.returned: list[int] = []
        self.traces: dict[int, npt.NDArray[np.void]] = {}
        self.artifacts: defaultdict[str, dict[int, Any]] = defaultdict(dict)
        self._notes: dict[str, str] = {}
        self.env_steps = 0
        self.reset_seconds = self.step_seconds = self.inference_seconds = 0.0

    def __bool__(self) -> bool:
        """Whether an attempt has ended."""
        return bool(self.rows or self.faults)

    def note(self, text: str) -> None:
        """Add a note; of those that differ in their place alone, the first stays."""
        self._notes.setdefault(without_place(text), text)

    def constructed(self, seconds: float) -> None:
        """Note how long an environment took to build, in seconds."""
        self.construct_seconds = min(self.construct_seconds, seconds)

    def count(self, lane: Lane) -> None:
        """Count the steps of an attempt that has ended."""
        self.env_steps += lane.length
        self.step_seconds += lane.step_seconds

    def take(
        self,
        lanes: Sequence[Lane],
        weights_version: int,
        numerics: dict[str, Any],
        notes: Sequence[str],
        artifacts: Sequence[tuple[str, Mapping[int, Any]]],
    ) -> RunReport:
        """Return the report, and begin the next one.

        Args:
            lanes: All lanes; the steps of those that are live count as far as they are.
            weights_version: Version of the weights that the policy has.
            numerics: Numerics key of the runner.
            notes: Notes beside those that were added here.
            artifacts: Artifacts beside those that were added here.
        """
        live = [lane for lane in lanes if lane.lease is not None]
        under_way = sum(lane.length for lane in live), sum(lane.step_seconds for lane in live)
        report = RunReport(
            rows=np.array(self.rows, ROW),
            infos=np.array(self.infos, np.float64).reshape(len(self.rows), len(self.info_keys)),
            faults=tuple(self.faults),
            progress=tuple(lane.progress() for lane in live),
            returned=tuple(self.returned),
            env_steps=self.env_steps + under_way[0] - self._under_way[0],
            reset_seconds=self.reset_seconds,
            step_seconds=self.step_seconds + under_way[1] - self._under_way[1],
            inference_seconds=self.inference_seconds,
            weights_version=weights_version,
            numerics=numerics,
            traces=self.traces,
            construct_seconds=self.construct_seconds,
            notes=(*notes, *filter(None, [self.standing_note]), *self._notes.values()),
            built_weights=self.built_weights,
            artifacts=(*self.artifacts.items(), *artifacts),
        )
        self._under_way = under_way
        self._begin()
        return report
