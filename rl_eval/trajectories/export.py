"""Export of the trajectories of a finished evaluation: its episodes run again, and are written once they are proved."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

from rl_eval.config.builder import EvalConfig
from rl_eval.config.settings import EvalSettings
from rl_eval.errors import ConfigError, nearest
from rl_eval.records.agents import agent_columns, agents_in
from rl_eval.results.loading import load
from rl_eval.results.replay import rebuilt_runner
from rl_eval.results.result import EvalResult
from rl_eval.runners import Runner
from rl_eval.runners.one_thread import one_thread
from rl_eval.trajectories.minari import MinariWriter
from rl_eval.trajectories.rerun import rerun, selected
from rl_eval.trajectories.team_recorder import make_recorder
from rl_eval.trajectories.writers import NpzWriter, Source, TensorDictWriter, Writer, publish, workspace

__all__ = ["FORMATS", "Exported", "export_trajectories"]

FORMATS: Final[dict[str, Callable[[str | os.PathLike[str]], Writer]]] = {
    "minari": MinariWriter,
    "npz": NpzWriter,
    "tensordict": TensorDictWriter,
}
"""What writes a format, by its name."""


@dataclass(frozen=True)
class Exported:
    """What was written."""

    path: Path
    """Where it is."""
    episodes: int
    frames: int


def export_trajectories(
    source: str | os.PathLike[str] | EvalResult,
    to: str,
    output: str | os.PathLike[str],
    indices: Sequence[int] | None = None,
    config: EvalConfig | EvalSettings | None = None,
    policy: Any = None,
    *,
    trust: bool = False,
) -> Exported:
    """Run episodes of a finished evaluation again, in this process, and write their steps.

    Nothing has to have been recorded: an episode is a function of its index. Each has to come out as its record says,
    bit by bit in all outcome columns, or nothing is written at all. Nothing is ever overwritten.

    Args:
        source: Folder or URI of an evaluation log, folder of a saved result, or a result.
        to: ``minari``, ``npz`` or ``tensordict``.
        output: Path of the file or folder; for ``minari`` the id of the data set.
        indices: Which episodes; by default all that completed.
        config: What was evaluated, for a run that was configured with live objects; by default as recorded.
        policy: The live policy, if the run was given one.
        trust: Whether code that the result names may be imported and called; see
            :func:`rl_eval.replay`.

    Raises:
        UsageError: An episode did not complete, or the config is another one.
        UntrustedError: The result names code that no evaluation of this process named.
        WeightsError: The weights are not those of the run.
        ConfigError: Something is there already, it cannot be written, or the recorded config cannot be used again.
        EvalError: An episode did not come out as it was recorded.
    """
    if to not in FORMATS:
        raise ConfigError(f"trajectories cannot be exported to {to!r}: {nearest(to, FORMATS)}")
    writer = FORMATS[to](output)
    if os.path.lexists(writer.place):
        raise ConfigError(f"{writer.place} exists, and nothing is overwritten: choose another name for it")
    result = source if isinstance(source, EvalResult) else load(source)
    if to == "minari" and (agents := agents_in(result.table.info_keys)):
        raise ConfigError(
            f"Minari's data sets are of one agent, and the episodes have {', '.join(agents)}: export to npz or "
            "tensordict"
        )
    chosen = selected(result, indices)
    with rebuilt_runner(result, config, policy, trust=trust) as runner, one_thread():
        try:
            _write(writer, result, runner, chosen)
        except OSError as error:
            raise ConfigError(f"{writer.place} cannot be written: {error.strerror or error}") from error
    return Exported(writer.place, len(chosen), int(result.table.rows["length"][chosen].sum()))


def _write(writer: Writer, result: EvalResult, runner: Runner, chosen: Sequence[int]) -> None:
    """Write all trajectories beside their place, and move them there."""
    seen: list[Any] = []
    of_agents = agent_columns(agents_in(result.table.info_keys))
    info_keys = [key for key in result.table.info_keys if key not in of_agents]
    recorder = partial(_recorder, seen=seen, info_keys=info_keys)
    with workspace(writer.place) as folder:
        begun = False
        for trajectories in rerun(result, runner, chosen, recorder):
            if not begun:
                writer.begin(_source(result, seen[0], chosen), Path(folder))
                begun = True
            writer.write(trajectories)
        publish(writer, writer.finish())


def _recorder(env: Any, seen: list[Any], info_keys: Sequence[str]) -> Any:
    """Build the observer of an environment, and note the environment."""
    seen.append(env)
    return make_recorder(env, info_keys, compress_images=True)


def _source(result: EvalResult, env: Any, chosen: Sequence[int]) -> Source:
    return Source(
        observation_space=env.observation_space,
        action_space=env.action_space,
        env_spec=getattr(env, "spec", None),
        frames=int(result.table.rows["length"][chosen].sum()),
        title=f"{len(chosen)} of {len(result.plan)} episodes of the evaluation {result.fingerprint[:16]}",
    )
