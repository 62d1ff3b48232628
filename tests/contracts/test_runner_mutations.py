"""Whether tests notice a bug in the runner of lanes: each planted one must be caught.

A mutant replaces one snippet of a file, in a copy of the package. The shipped contract of runners catches every bug
that breaks a promise of the protocol. The default suite catches the others.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

import rl_eval

pytestmark = [pytest.mark.slow, pytest.mark.process]

ROOT: Final = Path(rl_eval.__file__).parents[1]
BASE, LANE, CORE, VECTOR = (f"rl_eval/runners/{name}.py" for name in ("base", "lane", "core", "vector"))
CONTRACT: Final = "tests/contracts/test_runner_contract.py::TestVector::"
SUMS: Final = f"{CONTRACT}test_sums_and_infos_are_those_of_the_reference_loop"
RETRIED: Final = f"{CONTRACT}test_a_fault_is_retried_with_the_same_seed"
AGENTS: Final = "tests/unit/test_multi_agent.py::test_records_do_not_depend_on_the_number_of_slots"
UNIT: Final = "tests/unit/test_runners.py::"
MUTANTS: Final = {
    "does not discount": (BASE, "lane.discount *= self._gamma", "pass", SUMS),
    "uses an environment after its fault": (CORE, "            self._spoil(slot)\n", "            pass\n", RETRIED),
    "gives back no queued lease": (
        CORE,
        "self.queue = deque(lease for lease in self.queue if lease.index not in wanted)",
        "pass",
        f"{CONTRACT}test_reclaim_gives_back_only_what_has_not_started",
    ),
    "keeps the success of the former episode": (
        LANE,
        "        self.success_once = -1\n        self.success_at_end = -1\n        self.info",
        "        self.info",
        SUMS,
    ),
    "keeps the infos of the former episode": (LANE, "self.info = [float", "self.info = self.info or [float", SUMS),
    "checks time limits once": (
        CORE,
        "self._next_expiry, limit = now + 0.1,",
        "self._next_expiry, limit = now + 1e9,",
        f"{CONTRACT}test_an_endless_episode_runs_into_its_timeout",
    ),
    "stores no version of the weights": (
        CORE,
        "self._weights_version, self._has_random_weights = snapshot.version, False",
        "self._has_random_weights = False",
        f"{CONTRACT}test_rows_carry_the_version_of_the_weights",
    ),
    "shows NaN to the policy": (
        CORE,
        "for slot in observations.nonfinite_rows(live):",
        "for slot in []:",
        f"{CONTRACT}test_a_nan_observation_is_the_environments_fault",
    ),
    "records its own limit instead of a truncation": (
        CORE,
        "        if not (terminated or truncated):\n            cut =",
        "        if length >= self._max_steps:\n            cut =",
        SUMS,
    ),
    "does not count dropped steps": (
        BASE,
        "        self._pending.count(lane.length, lane.step_seconds)\n",
        "",
        f"{CONTRACT}test_abort_gives_everything_back",
    ),
    "begins each attempt as the first": (
        BASE,
        "begin_episode(spec.position, spec.seed, attempt)",
        "begin_episode(spec.position, spec.seed, 1)",
        RETRIED,
    ),
    "resets with another seed": (
        BASE,
        "lane.reset(**spec.reset_arguments)",
        "lane.reset(seed=spec.seed + 1)",
        f"{CONTRACT}test_rows_are_those_of_the_reference_loop",
    ),
    "attributes an error of the policy to the environment": (
        BASE,
        'self.fail(row, "policy", "act", error)',
        'self.fail(row, "env", "act", error)',
        f"{CONTRACT}test_an_error_of_the_policy_is_its_own_fault",
    ),
    # No promise of the protocol.
    "acts for free lanes": (
        BASE,
        "        self._inference.end(lane.index)\n",
        "",
        AGENTS,
    ),
    "closes an environment before it reports": (
        BASE,
        " and not (lane.stale and lane.unreported)",
        "",
        f"{UNIT}test_nothing_unreported_is_at_stake_when_an_environment_closes",
    ),
    "does not report early": (
        VECTOR,
        "    def _starving(self) -> bool:\n",
        "    def _starving(self) -> bool:\n        return False\n",
        f"{UNIT}test_half_the_lanes_idle_is_reason_to_report_early",
    ),
}
"""For each mutant: file, snippet, its replacement, and the test that catches it."""


@pytest.mark.parametrize("name", MUTANTS)
def test_a_planted_bug_is_caught(name: str, tmp_path: Path) -> None:
    """The test that is named beside the mutant fails with it. The default suite shows that it passes without it."""
    path, old, new, test = MUTANTS[name]
    shutil.copytree(ROOT / "rl_eval", tmp_path / "rl_eval", ignore=shutil.ignore_patterns("__pycache__"))
    text = (tmp_path / path).read_text()
    assert text.count(old) == 1, f"{path} has {old!r} {text.count(old)} times: adapt or remove the mutant"
    (tmp_path / path).write_text(text.replace(old, new))
    command = [sys.executable, "-m", "pytest", "-xq", "--numprocesses=0", f"--config-file={ROOT}/pyproject.toml"]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}  # The copy in the working folder comes first.
    ran = subprocess.run([*command, ROOT / test], cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert ran.returncode == pytest.ExitCode.TESTS_FAILED, ran.stdout + ran.stderr
