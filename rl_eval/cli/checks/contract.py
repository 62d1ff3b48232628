"""Check of an environment against gymnasium's contract, by gymnasium's own ``check_env``."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from typing import Any, Final

import gymnasium as gym
from gymnasium.utils.env_checker import check_env

from rl_eval.cli.checks.finding import Finding, note, ok, problem, warning
from rl_eval.runners.action_masks import ActionMasks

__all__ = ["check_contract"]

_ADVICE: Final = re.compile(
    r"different from the unwrapped version|is probably too (low|high)|symmetric and normalized|maximum and minimum"
    r"|Casting input"
)
"""What is said about wrappers, and about spaces that are hard to train on: no matter to an evaluation."""

_COMPARED: Final = re.compile(
    r"eterministic|not equal although similar|within the observation space|expecting .* dtype"
)
"""What whole episodes are looked at for as well, and bit by bit."""

_SEEDED: Final = re.compile(r"super\(\)\.reset|random number generator|np_random")
"""What breaks the contract, and an evaluation only of an environment that draws from this generator."""
_HARMLESS: Final = re.compile(r"share an object|`options`|after 1 step")
"""What breaks the contract, and nothing in an evaluation."""

_OLD_STEP: Final = "old step API"
_MARKS: Final = re.compile(r"\x1b\[[0-9;]*m|^(WARN|ERROR): ")
_FIX: Final = (
    "gymnasium.utils.env_checker.check_env(env) shows it; https://gymnasium.farama.org/api/env has the contract"
)


def check_contract(env: gym.Env[Any, Any] | None) -> Iterator[Finding]:
    """Call gymnasium's checker, which resets and steps a few times; it stops at the first broken part."""
    if not isinstance(env, gym.Env):
        yield note("it is no gymnasium.Env, which gymnasium's check_env asks for: not checked by it")
        return
    if isinstance(env, ActionMasks):
        yield note("gymnasium's check_env knows no action masks: not checked by it")
        return
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        broken = _broken(env)
    said = dict.fromkeys(_bare(text) for one in caught if "WARN: " in (text := str(one.message)))
    findings = [_judged(text) for text in said if not _ADVICE.search(text) and not _COMPARED.search(text)] + broken
    yield from findings or [ok("gymnasium's check_env has no complaint")]


def _broken(env: gym.Env[Any, Any]) -> list[Finding]:
    """Return what the checker stops at."""
    try:
        check_env(env, skip_render_check=True, skip_close_check=True)
    except (AssertionError, gym.error.Error) as error:
        text = _bare(str(error)) or f"{type(error).__name__} without a text"
        if _COMPARED.search(text):
            return [note(f"gymnasium's check_env stopped at: {text}")]
        if _SEEDED.search(text):
            rests = "An evaluation rests on it only where self.np_random is drawn from."
            return [warning(f"gymnasium's contract: {text} {rests}", _FIX)]
        if _HARMLESS.search(text):
            return [warning(f"gymnasium's contract: {text} An evaluation does not rest on it.", _FIX)]
        return [problem(f"gymnasium's contract: {text}", _FIX)]
    except (Exception, SystemExit) as error:
        return [note(f"gymnasium's check_env did not get through: {type(error).__name__}: {error}")]
    return []


def _judged(text: str) -> Finding:
    found = f"gymnasium's contract: {text}"
    return problem(found, _FIX) if _OLD_STEP in text else warning(found, _FIX)


def _bare(text: str) -> str:
    """Return a message of gymnasium without colours and label."""
    return " ".join(_MARKS.sub("", _MARKS.sub("", text)).split())
