"""Sampling of trajectories: batches with the episodes of a group's plan, in the order of the plan.

Episodes run in *waves*. A wave is an evaluation of the next indices of the plan. The contents of a batch depend only on
the plan, the weights and the request, not on waves or runners. If a wave has more episodes than a batch needs, the next
batch starts with the surplus episodes.
"""

from __future__ import annotations

import math
import operator
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal, final

from rl_eval.errors import ConfigError, EvalError, UsageError, check_known
from rl_eval.execution.handle import EvalHandle
from rl_eval.execution.recorded import TRAJECTORY
from rl_eval.records.episode import Outcome
from rl_eval.results.result import EvalResult
from rl_eval.runners.trajectories import Fragment, Trajectory, TrajectoryRecorder, as_arrays, as_tensordict, reserve
from rl_eval.scheduling.plan import EpisodePlan

_CHOICES: Final = {"mode": ("complete_episodes", "truncate_episodes"), "order": ("plan", "first_ready")}


@dataclass(frozen=True, kw_only=True)
class SampleRequest:
    """Contents and form of one batch.

    Raises:
        ConfigError: A value is out of range, or two values contradict each other.
    """

    num_episodes: int | None = None
    """Exact number of whole episodes."""
    num_env_steps: int | None = None
    """Number of steps. In mode ``truncate_episodes``, a batch has exactly this number. In mode ``complete_episodes``,
    it has as few whole episodes as are needed for this number."""
    mode: Literal["complete_episodes", "truncate_episodes"] = "complete_episodes"
    """Whether a batch has whole episodes only, or can end within an episode. In the second case, the next batch begins
    with the rest of this episode."""
    order: Literal["plan", "first_ready"] = "plan"
    """Order of the episodes in the batch: by index (``plan``), or as they finish (``first_ready``). The second order
    depends on the machine, and a batch then has the key ``("collector", "arrival")``. A batch has the same episodes in
    both orders."""
    split_trajs: bool = False
    """Give each episode a separate row, padded with zeros. The key ``("collector", "mask")`` is False for padding. By
    default, the frames of all episodes are concatenated."""
    as_arrays: bool = False
    """Return a dict of numpy arrays instead of a ``TensorDict``. A nested key becomes one string with dots."""
    storage: str | os.PathLike[str] | None = None
    """Folder for the batch as a memory-mapped ``TensorDict``. An iterator writes each batch to a new subfolder. The
    folder of a batch must not exist."""
    compress_images: bool = False
    """Compress images in the runner, without loss. They are decompressed when a batch is built."""
    skip_failed: bool = False
    """Skip episodes that failed on all attempts, and use the next episodes of the plan instead. By default, such an
    episode raises an error."""

    def __post_init__(self) -> None:
        if (self.num_episodes is None) == (self.num_env_steps is None):
            problem = f"num_episodes is {self.num_episodes}, and num_env_steps is {self.num_env_steps}"
            fix = "Pass exactly one of num_episodes and num_env_steps."
            raise ConfigError(problem, key="num_episodes", value=self.num_episodes, fix=fix)
        for name, choices in _CHOICES.items():
            check_known(name, getattr(self, name), choices)
        if self.number < 1:
            problem, fix = f"{self._measure} is {self.number}", "Pass at least 1."
            raise ConfigError(problem, key=self._measure, value=self.number, fix=fix)
        if self.num_episodes is not None and self.truncates:
            problem, fix = "mode 'truncate_episodes' cuts after a number of steps", "Pass num_env_steps."
            raise ConfigError(problem, key="mode", value="truncate_episodes", fix=fix)
        if self.as_arrays and self.storage is not None:
            problem = f"as_arrays is True, but storage {os.fspath(self.storage)!r} stores a TensorDict"
            raise ConfigError(problem, key="as_arrays", value=True, fix="Omit as_arrays or storage.")

    @property
    def _measure(self) -> str:
        return "num_env_steps" if self.num_episodes is None else "num_episodes"

    @property
    def number(self) -> int:
        """Requested number of episodes or steps."""
        return operator.index(getattr(self, self._measure))

    @property
    def truncates(self) -> bool:
        """Whether a batch may end within an episode."""
        return self.mode == "truncate_episodes"


RunWave = Callable[[int, int, int, Callable[..., Any]], "EvalHandle"]


@dataclass(frozen=True)
class _Failure:
    """An episode that failed on all attempts and has no trajectory."""

    why: str
    weights_version: int
    told: bool = False
    """Whether the failure was raised or skipped before. If so, later batches continue without the episode."""


@final
class Sampler:
    """Source of batches with the episodes of a group's plan, in the order of their indices.

    Args:
        run: Function that starts a wave and returns the handle of the wave. The arguments of the function are ``(seed,
            first index, number of episodes, recorder)``.
        version: Function that returns the version of the weights that the next wave uses.
        slots: Function that returns the number of episodes that run at once.
        seed: Root seed of the plan.
        index: Index of the first episode.
        works_ahead: Whether ``run`` returns before the wave ends, so that a wave can run while the caller uses a batch.
    """

    def __init__(
        self,
        run: RunWave,
        version: Callable[[], int],
        slots: Callable[[], int],
        seed: int,
        index: int = 0,
        *,
        works_ahead: bool = True,
    ) -> None:
        self._run, self._version, self._slots, self._works_ahead = run, version, slots, works_ahead
        self._lock = threading.RLock()
        self._seed, self._next, self._offset = seed, index, 0
        self._ready: dict[int, Trajectory] = {}
        """Finished episodes by index, in the order of arrival."""
        self._failed: dict[int, _Failure] = {}
        """Episodes without a trajectory, by index."""
        self._ahead: tuple[int, int, EvalHandle] | None = None
        """Running wave: its first index, number of episodes, and handle."""
        self._episodes = self._frames = 0
        """Numbers of episodes and steps so far. The mean length determines the size of a wave."""
        self._last_version: int | None = None
        """Version of the weights of the last batch."""
        self._renewed = False
        """Whether the weights changed since the last batch. They probably change again before the next batch, and then
        surplus episodes are dropped."""

    # ------------------------------------------------------------------ position in the plan

    def restart(self, seed: int | None = None, index: int = 0) -> None:
        """Move to another position in the plan; drop episodes that ran before a batch needed them.

        Args:
            seed: Root seed of the plan; by default the current root seed.
            index: Index of the next episode.

        Raises:
            ConfigError: A value is out of range.
        """
        seed = self._seed if seed is None else seed
        plan = EpisodePlan(1, seed, index)
        with self._lock:
            self.stop_ahead()
            self._seed, self._next, self._offset = plan.seed, plan.first_index, 0
            self._ready, self._failed = {}, {}

    def state_dict(self) -> dict[str, int]:
        """Return the root seed, the index of the next episode, and the number of its steps in earlier batches."""
        with self._lock:
            return {"seed": self._seed, "index": self._next, "step": self._offset}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Restore a position that :meth:`state_dict` returned.

        If the position is within an episode, this episode runs again.

        Raises:
            UsageError: The state does not come from :meth:`state_dict`.
        """
        try:
            seed, index, step = (operator.index(state[key]) for key in ("seed", "index", "step"))
        except (KeyError, TypeError) as error:
            step, why = -1, str(error)
        else:
            why = f"step is {step}"
        if step < 0:
            problem, fix = f"{state} is not the state of a sampler ({why})", "Pass the return value of state_dict()."
            raise UsageError(problem, key="state", value=str(state), fix=fix)
        with self._lock:
            self.restart(seed, index)
            self._offset = step

    def skip_rest(self) -> None:
        """Start the next batch with a new episode, even if the last batch ended within an episode."""
        with self._lock:
            if self._offset:
                self._next, self._offset = self._next + 1, 0

    def stop_ahead(self) -> None:
        """Cancel the running wave; keep its finished episodes."""
        with self._lock:
            if self._ahead is None:
                return
            *_, handle = self._ahead
            self._ahead = None
            handle.cancel("the sampler cancelled the wave")
            if handle.exception() is None and handle.done():
                self._take_in(handle.result())

    # ------------------------------------------------------------------ batches

    def sample(self, request: SampleRequest) -> Any:
        """Return the next batch.

        Raises:
            EvalError: An episode failed, and ``skip_failed`` is not set. The next call skips the episode. Or an episode
                has no trajectory.
            ConfigError: The folder ``storage`` exists.
            UsageError: The batch cannot be stored. The next call returns the same batch.
        """
        with self._lock:
            return self._sample(request, request.storage)

    def iterate(self, request: SampleRequest, num_batches: int | None = None) -> Iterator[Any]:
        """Return an iterator over batches. While the caller uses a batch, at most one wave runs for the next batch.

        Args:
            request: Contents of each batch.
            num_batches: Number of batches; by default no limit.

        Raises:
            ConfigError: ``num_batches`` is below 1.
        """
        if num_batches is not None and num_batches < 1:
            fix = "Pass at least 1, or omit num_batches."
            raise ConfigError(f"num_batches is {num_batches}", key="num_batches", value=num_batches, fix=fix)
        return self._batches(request, num_batches)

    def _batches(self, request: SampleRequest, num_batches: int | None) -> Iterator[Any]:
        done = 0
        try:
            while True:
                with self._lock:
                    folder = None if request.storage is None else Path(request.storage, f"batch_{done:06d}")
                    batch = self._sample(request, folder)
                    done += 1
                    if done != num_batches:
                        self._run_ahead(request)
                yield batch
                del batch
                if done == num_batches:
                    return
        finally:
            self.stop_ahead()

    def _sample(self, request: SampleRequest, folder: str | os.PathLike[str] | None) -> Any:
        if folder is not None and Path(folder).exists():
            problem = f"storage: the folder {os.fspath(folder)!r} already exists"
            raise ConfigError(problem, key="storage", value=os.fspath(folder), fix="Choose another folder.")
        if not request.truncates:
            self.skip_rest()
        version = self._version()
        self._renewed, self._last_version = self._last_version not in {None, version}, version
        while (fragments := self._fragments(request)) is None:
            self._take_wave(request)
        batch = _formed(fragments, request, folder, list(self._ready))
        # If the batch could not be stored, this line is not reached, and the next call returns the same batch.
        self._advance(fragments)
        return batch

    def _fragments(self, request: SampleRequest) -> list[Fragment] | None:
        """Return the fragments of the next batch, in plan order; None if an episode has not run yet.

        Raises:
            EvalError: An episode failed, ``skip_failed`` is not set, and no earlier call raised or skipped the failure.
        """
        self._drop_other_weights()
        found: list[Fragment] = []
        missing, index, start = request.number, self._next, self._offset
        while missing > 0:
            if index in self._failed:
                self._tolerate(index, request)
            elif (trajectory := self._ready.get(index)) is None:
                return None
            else:
                start = self._checked_start(trajectory, start)
                stop = min(len(trajectory), start + missing) if request.truncates else len(trajectory)
                found.append(Fragment(trajectory, start, stop))
                missing -= 1 if request.num_episodes is not None else stop - start
            index, start = index + 1, 0
        return found

    def _checked_start(self, trajectory: Trajectory, start: int) -> int:
        """Return the first step of an episode that no batch contains yet.

        Raises:
            UsageError: The episode ran again after :meth:`load_state_dict`, and now has no more than ``start`` steps.
        """
        if start >= len(trajectory):
            problem = (
                f"episode {trajectory.index} has {len(trajectory)} steps, but earlier batches contain {start} steps of "
                "it, which were sampled with other weights"
            )
            fix = "Call sampler.skip_rest() to continue with the next episode."
            raise UsageError(problem, key="step", value=start, episode=trajectory.index, fix=fix)
        return start

    def _tolerate(self, index: int, request: SampleRequest) -> None:
        failure = self._failed[index]
        self._failed[index] = replace(failure, told=True)
        if not (failure.told or request.skip_failed):
            problem = f"episode {index} failed on all attempts and has no trajectory: {failure.why}"
            fix = "Call again to continue without this episode, or skip failed episodes with skip_failed=True."
            raise EvalError(problem, episode=index, fix=fix)

    def _advance(self, fragments: list[Fragment]) -> None:
        """Move the position to the end of the batch, and drop the trajectories of earlier episodes."""
        last = fragments[-1]
        whole = last.stop == len(last.trajectory)
        self._next = last.trajectory.index + whole
        self._offset = 0 if whole else last.stop
        self._ready = {index: one for index, one in self._ready.items() if index >= self._next}
        self._failed = {index: one for index, one in self._failed.items() if index >= self._next}

    def _drop_other_weights(self) -> None:
        """Drop whole episodes that ran with other weights than the current ones; they run again.

        If the last batch ended within an episode, the remaining steps of this episode are kept, with their weights
        version. A failure that was reported is kept too.
        """
        version = self._version()
        begun = self._next if self._offset else -1
        self._failed = {index: one for index, one in self._failed.items() if one.told or one.weights_version == version}
        self._ready = {
            index: one for index, one in self._ready.items() if one.weights_version == version or index == begun
        }

    # ------------------------------------------------------------------ waves

    def _take_wave(self, request: SampleRequest) -> None:
        """Wait for the running wave, or for a new one, and store its trajectories."""
        if self._ahead is None:
            self._start_wave(request)
        assert self._ahead is not None
        first, count, handle = self._ahead
        self._ahead = None
        result = handle.result()
        self._take_in(result)
        if not self._ready.keys() | self._failed.keys() >= set(range(first, first + count)):
            why = result.reason or "; ".join(result.notes) or "the cause is not known"
            raise EvalError(f"some episodes of the batch have no trajectory: {why}", key="episodes")

    def _take_in(self, result: EvalResult) -> None:
        """Store each episode of a wave, unless it is already stored, or is before the position in the plan."""
        table, first = result.table, result.plan.first_index
        for row, artifacts in result.artifacts.items():
            index = first + row
            if (trajectory := artifacts.get(TRAJECTORY)) is not None and self._lacks(index):
                self._ready[index] = replace(trajectory, index=index)
                self._episodes += 1
                self._frames += len(trajectory)
        for row in (table.rows["outcome"] == Outcome.FAILED).nonzero()[0].tolist():
            faults = table.faults.get(row)
            why = str(faults[-1]) if faults else "its runners died without a report"
            if self._lacks(first + row):
                self._failed[first + row] = _Failure(why, int(table.rows["weights_version"][row]))

    def _lacks(self, index: int) -> bool:
        """Return whether the next batches need an episode, and this episode has not run."""
        return index >= self._next and index not in self._ready and index not in self._failed

    def _start_wave(self, request: SampleRequest) -> None:
        """Start a wave that begins with the first episode that has not run."""
        index, missing = self._next, request.number + self._offset
        while not self._lacks(index):
            known = self._ready.get(index)
            missing -= 0 if known is None else 1 if request.num_episodes is not None else len(known)
            index += 1
        count = max(1, missing)
        if request.num_env_steps is not None:
            count = self._expected(count)
        recorder = partial(TrajectoryRecorder, compress_images=request.compress_images)
        self._ahead = (index, count, self._run(self._seed, index, count, recorder))

    def _expected(self, steps: int) -> int:
        """Return the number of episodes to run for a number of steps."""
        expected = math.ceil(steps * self._episodes / self._frames) if self._frames else 1
        if self._renewed and self._frames:
            # Run a few more episodes than expected: if steps were missing, a second wave would double the time.
            return expected + math.isqrt(expected)
        # A wave with fewer episodes than slots would leave slots idle. Surplus episodes start the next batch.
        return max(self._slots(), expected)

    def _run_ahead(self, request: SampleRequest) -> None:
        able = self._works_ahead and not self._renewed
        idle = able and self._ahead is None and all(one.told for one in self._failed.values())
        if idle and self._fragments(request) is None:
            self._start_wave(request)


def _formed(
    fragments: list[Fragment], request: SampleRequest, folder: str | os.PathLike[str] | None, arrived: list[int]
) -> Any:
    """Return a batch in the requested form.

    Raises:
        UsageError: The batch cannot be stored.
    """
    arrivals = request.order == "first_ready"
    if arrivals:
        place = {index: number for number, index in enumerate(arrived)}
        fragments = sorted(fragments, key=lambda one: place[one.trajectory.index])
    if request.as_arrays:
        return as_arrays(fragments, padded=request.split_trajs, arrivals=arrivals)
    batch = as_tensordict(fragments, padded=request.split_trajs, arrivals=arrivals)
    return batch if folder is None else _stored(batch, Path(folder))


def _stored(batch: Any, folder: Path) -> Any:
    """Write a batch to a new folder, and return the batch with its tensors in this folder.

    If the batch cannot be written, remove the folder.
    """
    created = False
    try:
        folder.mkdir(parents=True)
        created = True
        stored = batch.memmap_like(folder)
        reserve(*folder.rglob("*.memmap"))
        return stored.update_(batch)
    except (OSError, RuntimeError) as error:
        if created:  # Otherwise, another process has created it in the meantime.
            shutil.rmtree(folder, ignore_errors=True)
        problem = f"the batch cannot be written to storage {os.fspath(folder)!r}: {error}"
        fix = "Call again with another folder. The call returns the same batch."
        raise UsageError(problem, key="storage", value=os.fspath(folder), fix=fix) from error
