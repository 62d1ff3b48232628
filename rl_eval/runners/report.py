"""Next report of a runner: episodes and faults since the last report, and the data of aspects."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, final

import numpy as np
import numpy.typing as npt

from rl_eval.records.determinism import DETERMINISM, TracedRuns
from rl_eval.records.episode import ROW, Fault, RunReport, without_place
from rl_eval.runners.metrics import MetricFunction, write_metrics

if TYPE_CHECKING:
    from rl_eval.policies.inference.protocol import Inference


@final
class PendingReport:
    """Content of a runner's next report, collected until :meth:`take`.

    Args:
        info_keys: Names of the ``info`` scalars and of the metrics in each row.
        metrics: Functions of the metrics, by name; None for no metrics.
    """

    def __init__(self, info_keys: tuple[str, ...], metrics: Mapping[str, MetricFunction] | None = None) -> None:
        self.info_keys = info_keys
        self._metrics = metrics
        self.tracing = TracedRuns()
        self.extra: dict[str, Callable[[], Any]] = {DETERMINISM: self.tracing.take}
        """Functions that return the data of an aspect for a report, by aspect."""
        self._under_way = (0, 0.0)
        """Steps of live attempts that earlier reports have counted: their number, and their seconds."""
        self.standing_note = ""
        """Text of a note in every report, and so in every evaluation of the runner; empty for no note."""
        self.generators: dict[str, None] = {}
        """Changes of global random generators by an environment so far, as keys, without duplicates."""
        self._begin()

    def _begin(self) -> None:
        self.rows: list[tuple[Any, ...]] = []
        self.infos: list[list[float]] = []
        self.faults: list[Fault] = []
        self.returned: list[int] = []
        self.artifacts: defaultdict[str, dict[int, Any]] = defaultdict(dict)
        self._notes: dict[str, str] = {}
        self.env_steps = 0
        self.reset_seconds = self.step_seconds = self.inference_seconds = self.answer_seconds = 0.0

    def __bool__(self) -> bool:
        """Whether an attempt has ended."""
        return bool(self.rows or self.faults)

    def note(self, text: str) -> None:
        """Add a note. If notes differ only in the place (the episode and step), keep the first one."""
        self._notes.setdefault(without_place(text), text)

    def count(self, steps: int, seconds: float) -> None:
        """Count the steps of an attempt that has ended, and the seconds that these steps took."""
        self.env_steps += steps
        self.step_seconds += seconds

    def keep(self, index: int, artifacts: Mapping[str, Any]) -> None:
        """Store the artifacts of an episode, by observer name."""
        for name, artifact in artifacts.items():
            self.artifacts[name][index] = artifact

    def extend(self, completed: PendingReport) -> None:
        """Add the rows, info scalars and artifacts of completed episodes."""
        self.rows += completed.rows
        self.infos += completed.infos
        for name, artifacts in completed.artifacts.items():
            self.artifacts[name].update(artifacts)

    def take(
        self,
        live: npt.NDArray[np.void],
        live_seconds: float,
        weights_version: int,
        inference: Inference,
        artifacts: Sequence[tuple[str, Mapping[int, Any]]],
    ) -> RunReport:
        """Return the report, and start the next one.

        Args:
            live: Progress of the live attempts, one row of ``PROGRESS`` each. The report counts their steps so far.
            live_seconds: Seconds that these steps took.
            weights_version: Version of the policy's weights.
            inference: Inference of the runner, with its numerics key and its notes.
            artifacts: Artifacts in addition to :attr:`artifacts`.
        """
        under_way = int(live["step"].sum()), live_seconds
        infos = np.array(self.infos, np.float64).reshape(len(self.rows), len(self.info_keys))
        if self._metrics:
            write_metrics(self._metrics, self.rows, self.info_keys, infos, self.note)
        report = RunReport(
            rows=np.array(self.rows, ROW),
            infos=infos,
            faults=tuple(self.faults),
            progress=live,
            returned=tuple(self.returned),
            env_steps=self.env_steps + under_way[0] - self._under_way[0],
            reset_seconds=self.reset_seconds,
            step_seconds=self.step_seconds + under_way[1] - self._under_way[1],
            inference_seconds=self.inference_seconds,
            answer_seconds=self.answer_seconds,
            weights_version=weights_version,
            numerics=inference.numerics,
            probes=inference.probes,
            extra={name: data() for name, data in self.extra.items()},
            notes=(*inference.notes, *filter(None, [self.standing_note]), *self._notes.values()),
            generators=tuple(self.generators),
            artifacts=(*self.artifacts.items(), *artifacts),
        )
        self._under_way = under_way
        self._begin()
        return report
