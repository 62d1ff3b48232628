"""Probe of a policy before its first episode: which rows may share a forward pass, and whether results repeat.

The probe calls the policy on generated observations in blocks. Then it calls the policy on the same observations at
other positions among other rows. If the bits of a row's result change, there are two possible reasons: the row depends
on its batch, or the policy gives different results in every call. To find the reason, the probe repeats the same calls.
A policy that does not repeat its results is not a function of its observations, so its episodes cannot be repeated.

Then the probe searches for smaller passes with the same bits, because a pass of 16 rows for one environment is slow.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import sys
from collections.abc import Iterator
from functools import cached_property, partial
from time import perf_counter
from typing import Any, Final, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import tree

from rl_eval.errors import ConfigError, PolicyError, PolicyUnavailable, listed, summary_of
from rl_eval.policies.inference.spaces import ActionReader, ObservationBatch, copy_batch, no_grad, take_rows
from rl_eval.policies.noise import EpisodeNoise
from rl_eval.protocols import Policy, Probeable
from rl_eval.records.determinism import POLICY_REMEDIES
from rl_eval.records.generators import changes, generator_states
from rl_eval.supervision.caller import end_fork, survivable

BLOCK: Final = 16
"""Rows of the reference block."""

_POOL: Final = 4 * BLOCK
"""Number of generated observations for the probe."""
_ROUNDS: Final = 4
_POOL_BYTES: Final = 2**26
"""If the whole pool of observations exceeds this number of bytes, the probe uses only a few observations."""
_FEW: Final = 4
_FEW_ROUNDS: Final = 2
_WARM_UP: Final = 1
"""Number of calls before the first call whose result is compared, in addition to the call that checks shapes. In these
calls, compilers and autotuners finish."""

_SIZES: Final = (1, 2, 4, 8, 12)
"""Rows of passes that may replace a block if few rows are live."""
_EVIDENCE: Final = 24
"""Rows that the probe computes for each of these sizes. In matrix products, a wrong size changes the bits of two rows
in five or more."""
_SAVED_S: Final = 2e-4
"""A smaller pass must save this time, in seconds, because it costs time to gather its rows."""
_COMPILED: Final = 100
"""If the first pass of a size takes this many times as long as a block, the policy was probably compiled for it."""

_UNCHECKED: Final = "It is not checked whether one policy acted in all episodes"

Verdict = Literal["whole", "block", "row"]


class Finding(NamedTuple):
    """Findings of the probe about a policy."""

    verdict: Verdict
    """Rows that may share a forward pass: ``whole``, ``block`` or ``row``."""
    outputs: str
    """Digest of the policy's outputs; empty if it cannot be compared with the digest of another runner."""
    notes: tuple[str, ...] = ()
    """Notes for readers of the result. Every runner gives the same notes."""
    sizes: tuple[int, ...] = (BLOCK,)
    """Numbers of rows, up to a block, for which a pass has the bits of a block."""
    overwrites: bool = False
    """Whether the policy changes its observations in place, or may do so."""
    repeats: bool = True
    """Whether the policy gives equal results for equal calls, as far as the probe sees."""


class _Unrepeatable(Exception):
    """The same call gave a different result the second time; the text names the call."""


class Probe:
    """Probe of one policy with its current weights.

    Args:
        policy: Policy that acts on batches of observations.
        observations: Observations of the runner. The probe needs only their space and the number of rows.
        reader: Reader that checks the actions.
        fresh_state: Recurrent state of new episodes, one per row of ``observations``; None if the policy has no state.
        lanes: Highest number of live rows.
        deterministic: Whether the policy acts without noise.
        allow_nondeterministic: Whether a policy that does not repeat its results causes a note instead of an error.
    """

    def __init__(
        self,
        policy: Policy,
        observations: ObservationBatch,
        reader: ActionReader,
        fresh_state: Any,
        lanes: int,
        *,
        deterministic: bool,
        allow_nondeterministic: bool,
    ) -> None:
        self.policy = policy
        self._reader = reader
        self._fresh_state = fresh_state
        self._deterministic = deterministic
        self._allow_nondeterministic = allow_nondeterministic
        self._rows = observations.rows
        self._lanes = lanes
        self._ample = _POOL * observations.row_bytes <= _POOL_BYTES
        self._pool = _POOL if self._ample else _FEW
        self._rounds = _ROUNDS if self._ample else _FEW_ROUNDS
        self._observations = observations.sample(self._pool, np.random.default_rng(0))
        garbage = self._pool if self._ample else 1
        self._sample_garbage = partial(observations.sample, garbage, np.random.default_rng(1), scale=100.0)
        self._overwrites = False
        self._times: dict[int, list[float]] = {}
        """Seconds of each pass, by number of rows."""
        self._generators = generator_states()
        self._server: str = getattr(policy, "server", "")

    @cached_property
    def _garbage(self) -> Any:
        """Generated observations for the rows whose results are not compared."""
        return self._sample_garbage()

    def run(self) -> Finding:
        """Probe the policy, and restore the buffers of its modules.

        Raises:
            ConfigError: The policy cannot act as configured, or does not repeat its results.
            PolicyError: The actions have the wrong structure, shape or dtype for the action space.
        """
        self.check_shapes()
        with no_grad(), buffers_kept(self.policy):
            try:
                if self._server:
                    return self._ask_twice()
                return self._compare()._replace(overwrites=self._overwrites)
            except (ConfigError, PolicyUnavailable):
                raise
            except _Unrepeatable as seen:
                return self._unrepeatable(str(seen))
            except survivable() as error:
                # A policy may reject generated observations. Then each row is computed alone in its batch, where it
                # cannot depend on other rows.
                return self._unprobed(error)

    def digest_again(self, verdict: Verdict) -> str:
        """Compute the reference outputs again, and return their digest, as in :class:`Finding`.

        If the policy raises an error, the result names the error instead. If its former outputs are in doubt, the
        result is the reason.

        Raises:
            PolicyUnavailable: The policy cannot act for now.
        """
        with no_grad(), buffers_kept(self.policy):
            try:
                if verdict == "row":
                    digest = _digest(self._alone(0))
                else:
                    digest = _digest(self._outputs(self._observations, self._block(0), range(BLOCK)))
                # These answers, too, may show that former ones were those of other rows.
                return str(getattr(self.policy, "doubt", "") or digest)
            except PolicyUnavailable:
                raise
            except survivable() as error:
                return f"a {type(error).__name__}"

    def act_once(self, *, other: bool = False) -> None:
        """Act on the first block of observations, or with ``other`` on a later block. Ignore an error of the policy."""
        with no_grad():
            try:
                self._outputs(self._observations, self._block(self._pool // 2 if other else 0), range(BLOCK))
            except survivable():
                pass

    def check_shapes(self) -> None:
        """Check only that the structure, shapes and dtypes of the policy's actions fit the action space.

        Raises:
            ConfigError: The policy cannot act as configured.
            PolicyError: The actions do not fit, or the policy returns no next state.
        """
        with no_grad(), buffers_kept(self.policy):
            self._check_shapes()

    # ------------------------------------------------------------------ verdicts

    def _compare(self) -> Finding:
        """Compare rows computed in blocks with the same rows at other positions and in larger batches.

        Raises:
            _Unrepeatable: The same call gave a different result the second time.
        """
        for _ in range(_WARM_UP):
            self._outputs(self._observations, self._block(0), range(BLOCK))
        reference = self._reference()
        # The last two tests alone depend on the number of lanes. The numerics key does not contain their results.
        if self._depends(reference, BLOCK):
            return self._row_by_row()
        whole = self._rows == BLOCK or (self._ample and not self._depends(reference, self._rows))
        return Finding("whole" if whole else "block", _digest(reference[:BLOCK]), sizes=self._sizes(reference))

    def _ask_twice(self) -> Finding:
        """Ask a server for the reference block, again over a new connection in another order, and at other addresses.

        The server alone decides which rows share a pass.
        """
        rows = self._block(0)
        policy: Any = self.policy
        first = self._outputs(self._observations, rows, range(BLOCK))
        policy.reconnect()
        if self._outputs(self._observations, rows[::-1], range(BLOCK)) != first[::-1]:
            raise _Unrepeatable("the same observations")
        for other in policy.others():
            if self._outputs(self._observations, rows, range(BLOCK)) != first:
                problem, key = f"{self._server} and {other} have different policies", "policy.policy_kwargs.addresses"
                raise ConfigError(problem, key=key, value=other, fix="Name only servers of the same policy.")
        return Finding("whole", _digest(first))

    def _sizes(self, reference: list[bytes]) -> tuple[int, ...]:
        """Return the sizes of passes with the bits of a block, up to the number of lanes, and a block."""
        # A clock decides here only about speed: a pass of each size has the same bits, as far as the probe sees.
        found, block = [BLOCK], min(self._times[BLOCK])
        for size in _SIZES if block > _SAVED_S else ():
            if not self._same(reference, size):
                continue
            times = self._times[size]
            if min(times) > block - _SAVED_S or times[0] > _COMPILED * block:
                break
            found.insert(-1, size)
            if size >= self._lanes:
                break
        return tuple(found)

    def _same(self, reference: list[bytes], size: int) -> bool:
        """Whether a pass of this size has the bits of a block."""
        try:
            return self._mismatch(reference, size) is None
        except PolicyUnavailable:
            raise
        except survivable():
            return False

    def _row_by_row(self) -> Finding:
        try:
            self._demand_repeats()
        except _Unrepeatable:
            raise
        except survivable() as error:
            raise ConfigError(
                "the policy's result for an observation depends on the other observations in the batch, and the policy "
                f"cannot act on a single observation ({type(error).__name__}: {getattr(error, 'problem', error)})",
                key="policy.policy",
                fix=getattr(error, "fix", "") or "Call eval() on a module in training mode.",
            ) from error
        note = (
            "the policy's result for an observation depends on its place in the batch, or on the other observations"
            f"{_unpinned()}. Every row is computed alone, which is exact but slow: one forward pass per environment "
            "and step"
        )
        return Finding("row", _digest(self._alone(0)), (note,))

    def _unprobed(self, error: BaseException) -> Finding:
        try:
            self._demand_repeats()
            repeats = "a row alone gives equal results in repeated calls"
        except _Unrepeatable as seen:
            return self._unrepeatable(str(seen))
        except survivable():
            repeats = "it is not known whether a row gives equal results in repeated calls"
        brief = summary_of(error).partition("\n")[0][:200]
        note = (
            f"the policy could not be probed: it failed on generated observations ({brief}). Every row is computed "
            f"alone, which is exact but slow; {repeats}. {_UNCHECKED}"
        )
        return Finding("row", "", (note,), overwrites=True)

    def _unrepeatable(self, call: str) -> Finding:
        """Raise an error for a policy that does not repeat its results, or return a finding if that is allowed."""
        found = f"the policy gives different results for {call}, computed twice from the same state with the same noise"
        remedies = POLICY_REMEDIES
        if self._server:
            found = f"{self._server} answers differently when asked twice for {call}, over two connections"
            remedies = "Start the server with a policy that draws no random numbers and keeps no memory"
        if not self._allow_nondeterministic:
            drawn = changes(self._generators, generator_states())
            problem = found + (f"; meanwhile, {listed(drawn, 3)} changed" if drawn else "")
            fix = f"{remedies}. To evaluate this policy anyway, set policy.allow_nondeterministic: true."
            raise ConfigError(problem, key="policy.allow_nondeterministic", value=False, fix=fix) from None
        note = f"the result cannot be reproduced: {found} (policy.allow_nondeterministic is true). {_UNCHECKED}"
        return Finding("whole" if self._server else "row", "", (note,), overwrites=True, repeats=False)

    # ------------------------------------------------------------------ comparisons

    def _depends(self, reference: list[bytes], size: int) -> bool:
        """Whether rows depend on the rest of a batch of this size."""
        found = self._mismatch(reference, size)
        if found is None:
            return False
        if self._reference() != reference or self._mismatch(reference, size) != found:
            raise _Unrepeatable("the same batch of observations")
        return True

    def _demand_repeats(self) -> None:
        """Check that a row alone in its batch gives equal results in every call, even after calls with other rows.

        Raises:
            _Unrepeatable: A row gave a different result.
        """
        rows = range(min(self._pool, BLOCK))
        for _ in range(_WARM_UP):
            self._alone(0)
        seen: dict[int, list[bytes]] = {}
        for row in (*rows, *reversed(rows), *rows):
            outputs = self._alone(row)
            if seen.setdefault(row, outputs) != outputs:
                raise _Unrepeatable("an observation alone in its batch")

    def _reference(self) -> list[bytes]:
        """Return the bytes of every pool row, computed in blocks; rows repeat if the pool is smaller than a block."""
        rows: list[bytes] = []
        for start in range(0, self._pool, BLOCK):
            rows += self._outputs(self._observations, self._block(start), range(BLOCK), watch=True)
        return rows

    def _block(self, start: int) -> npt.NDArray[np.int64]:
        return np.arange(start, start + BLOCK) % self._pool

    def _mismatch(self, reference: list[bytes], size: int) -> tuple[int, int, bytes] | None:
        """Find a pool row whose bytes differ from its reference, at other positions of a batch, among other rows.

        Returns:
            Number of the batch, position and bytes of the first such row; None if there is none.
        """
        rng = np.random.default_rng(size)
        for number, mask in enumerate(self._masks(rng, size)):
            chosen, junk = rng.integers(0, self._pool, size), rng.integers(0, self._pool, size)
            if not self._ample:
                # With few rows and rounds, chance could put a row where its reference was.
                chosen = (np.arange(size) + 1 + chosen % (self._pool - 1)) % self._pool
            batch = tree.map_structure(
                lambda good, bad, chosen=chosen, junk=junk, mask=mask: _mixed(good, bad, chosen, junk, mask),
                self._observations,
                self._garbage,
            )
            positions = np.flatnonzero(mask)
            outputs = self._act(batch, positions, chosen)
            del batch  # It may be large, and is not needed while the next batch is built.
            for output, position in zip(outputs, positions, strict=True):
                if output != reference[chosen[position]]:
                    return number, int(position), output
        return None

    def _masks(self, rng: np.random.Generator, size: int) -> Iterator[npt.NDArray[np.bool_]]:
        """Yield, for each batch of a size, the mask of its rows without garbage."""
        for number in range(_EVIDENCE // size if size < BLOCK else 0):
            kept = np.ones(size, bool)
            kept[rng.permutation(size)[1 : 1 + number % 2]] = False  # A size of 1 has no other row.
            yield kept
        for _ in range(self._rounds if size >= BLOCK else 0):
            kept = rng.random(size) < 0.5
            yield kept
            yield ~kept

    # ------------------------------------------------------------------ calls

    def _check_shapes(self) -> None:
        live = np.zeros(BLOCK, bool)
        noise = None if self._deterministic else EpisodeNoise(np.zeros(BLOCK, np.int64), np.zeros(BLOCK, np.int64))
        state = self._state(BLOCK)
        try:
            answer = self.policy.act(take_rows(self._observations, self._block(0)), state, live, noise)
        except (ConfigError, PolicyError, PolicyUnavailable):
            raise
        except survivable():
            return
        self._reader.read(checked_answer(self.policy, answer, state)[0], live)

    def _alone(self, row: int) -> list[bytes]:
        return self._outputs(self._observations, np.array([row]), [0])

    def _outputs(self, pool: Any, rows: npt.NDArray[np.int64], wanted: Any, *, watch: bool = False) -> list[bytes]:
        """Return the bytes of the policy's outputs for pool rows. The row numbers are also the noise seeds.

        With ``watch``, detect whether the policy changed the observations.
        """
        batch = take_rows(pool, rows)
        outputs = self._act(batch, wanted, rows)
        if watch and not self._overwrites:
            self._overwrites = not _same_rows(batch, pool, rows)
        return outputs

    def _act(self, batch: Any, wanted: Any, seeds: npt.NDArray[np.int64]) -> list[bytes]:
        """Return all outputs of the policy for some rows of a batch, as bytes."""
        size = len(seeds)
        noise = None if self._deterministic else EpisodeNoise(seeds, np.zeros(size, np.int64))
        live = np.zeros(size, bool)
        live[list(wanted)] = True
        state, started = self._state(size), perf_counter()
        actions, state = self.policy.act(batch, state, live, noise)
        self._times.setdefault(size, []).append(perf_counter() - started)
        end_fork()
        computed = [actions, state]
        if self._server:  # The state is the number of an episode there.
            getattr(self.policy, "ended", lambda _: None)(state)
            computed = [actions]
        if isinstance(self.policy, Probeable):
            # An argmax hides last bits, so the probe compares its input too.
            computed.append(self.policy.probe_outputs(batch))
        leaves = [
            np.asarray(leaf.cpu() if hasattr(leaf, "cpu") else leaf)
            for leaf in tree.flatten(computed)
            if leaf is not None
        ]
        return [b"".join(leaf[row].tobytes() for leaf in leaves if leaf.ndim and len(leaf) == size) for row in wanted]

    def _state(self, size: int) -> Any:
        """Return a new state that the policy may change."""
        return copy_batch(take_rows(self._fresh_state, slice(0, size)))


def checked_answer(policy: Policy, answer: Any, state: Any) -> tuple[Any, Any]:
    """Return the actions and the next state that ``act`` returned.

    Args:
        policy: The policy.
        answer: Result of its ``act``.
        state: State that was passed; None without a state.

    Raises:
        PolicyError: The result is not a pair, or it lacks the next state.
    """
    if not isinstance(answer, tuple) or len(answer) != 2:
        problem = f"act() of the policy {type(policy).__name__} returned a {type(answer).__name__}"
        fix = "Return actions and the next state, or (actions, None) without a state."
        raise PolicyError(problem, key="act", value=type(answer).__name__, fix=fix)
    actions, following = answer
    if state is not None and following is None:
        raise PolicyError("the policy has initial_state(), but its act() returned no next state", key="act")
    return actions, following


def numerics_again(runner: Any) -> dict[str, Any] | str:
    """Probe the policy of a runner again, between evaluations. A new runner probes it for the first time.

    Returns:
        The numerics key, or the error of the policy as text. After a change, the next evaluation begins with a complete
        probe.

    Raises:
        EvalError: The policy of a new runner cannot act as configured.
    """
    former: dict[str, Any] = {}
    try:
        inference = runner.inference
        if not (former := inference.numerics):
            runner.accept()
            return dict(inference.numerics)
        inference.probe_again()
    except survivable() as error:
        if not former and not isinstance(error, PolicyUnavailable):
            raise
        return summary_of(error)
    found: dict[str, Any] = inference.numerics
    if found != former:
        inference.numerics = {}
    return found


@contextlib.contextmanager
def buffers_kept(policy: Policy) -> Iterator[None]:
    """Restore the buffers of a policy's modules at the end: statistics must not come from generated observations."""
    torch = sys.modules.get("torch")
    parts = (policy, *getattr(policy, "__dict__", {}).values())
    modules = [part for part in parts if torch is not None and isinstance(part, torch.nn.Module)]
    buffers = [buffer for module in modules for buffer in module.buffers()]
    former = [buffer.clone() for buffer in buffers]
    try:
        yield
    finally:
        for buffer, saved in zip(buffers, former, strict=True):
            buffer.copy_(saved)


def _mixed(
    good: npt.NDArray[Any],
    bad: npt.NDArray[Any],
    chosen: npt.NDArray[np.int64],
    junk: npt.NDArray[np.int64],
    mask: npt.NDArray[np.bool_],
) -> npt.NDArray[Any]:
    batch = np.empty((len(mask), *good.shape[1:]), good.dtype)
    for place, is_good in enumerate(mask):  # Row by row, to save memory.
        batch[place] = good[chosen[place]] if is_good else bad[junk[place] % len(bad)]
    return batch


def _same_rows(batch: Any, pool: Any, rows: npt.NDArray[np.int64]) -> bool:
    """Whether a batch still equals its rows in the pool. Compare row by row, so that no second batch is needed."""
    leaves = zip(tree.flatten(batch), tree.flatten(pool), strict=True)
    return all(np.array_equal(leaf[place], source[row]) for leaf, source in leaves for place, row in enumerate(rows))


def _digest(rows: list[bytes]) -> str:
    return hashlib.sha256(b"".join(rows)).hexdigest()[:16]


def _unpinned() -> str:
    """Return a hint if no MKL mode is set, the usual cause of different last bits; otherwise an empty string."""
    if os.environ.get("MKL_CBWR"):
        return ""
    return " (perhaps only in the last bits, because MKL_CBWR is not set in this process; `rl-eval` sets it)"
