"""Names of other frameworks' workers: each has a row in the docs, and what stands there in its place exists."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from rl_eval import EnvContext, EvalRunner, EvalRunnerGroup
from rl_eval.config.references import import_attribute
from rl_eval.config.settings import SECTIONS
from rl_eval.errors.other_names import COUNTERPARTS
from rl_eval.execution.group import GroupCallbacks
from rl_eval.integrations.rllib.workers import RolloutWorkers
from rl_eval.runners import EpisodeObserver

PAGE: Final = Path(__file__).parents[2] / "docs" / "worker_interface.md"
OWNERS: Final[dict[str, Any]] = {
    "group": EvalRunnerGroup,
    "runner": EvalRunner,
    "context": EnvContext({}, 0, 0, 1),
    "observer": EpisodeObserver,
    "callbacks": GroupCallbacks,
    "workers": RolloutWorkers,
}
ON_INSTANCES: Final = {"runner.runner_index", "runner.settings"}
"""Attributes that the classes annotate, and constructors set."""


def rows() -> dict[str, tuple[str, str]]:
    """Return counterpart and remark of every name in the tables."""
    found: dict[str, tuple[str, str]] = {}
    for line in PAGE.read_text().partition("## Names that you know")[2].splitlines():
        if line.startswith("| `"):
            names, cell = (cell.strip() for cell in line.strip("|").split("|"))
            here, _, remark = cell.partition(": " if cell.startswith("none") else "; ")
            for name in re.findall(r"`([^`]+)`", names):
                assert name not in found, f"{name} has two rows"
                found[name] = here, remark
    return found


def counterparts(text: str) -> Iterator[str]:
    """Yield what a cell names in code that looks like a counterpart."""
    for code in re.findall(r"`([^`]+)`", text):
        owner = code.partition(".")[0]
        if owner in OWNERS or owner in SECTIONS or (code.startswith("rl_eval.") and ":" in code):
            yield code


def exists(code: str) -> bool:
    """Whether a counterpart is there: a config key, a ``module:attr``, or an attribute of its owner."""
    if ":" in code:
        return import_attribute("a counterpart", code.partition(": ")[0]) is not None
    owner, _, name = code.partition(".")
    if owner in SECTIONS and name in SECTIONS[owner].model_fields:
        return True
    return code in ON_INSTANCES or (owner in OWNERS and hasattr(OWNERS[owner], name))


@pytest.mark.parametrize("name", sorted(rows()))
def test_a_counterpart_exists_or_there_is_a_reason(name: str) -> None:
    """In the second column one, or ``none`` with a reason; whatever the remark after it names exists, too."""
    here, remark = rows()[name]
    if here == "none":
        assert remark, f"{name}: say why it has no counterpart"
    else:
        assert list(counterparts(here)), f"{name}: {here}"
    for code in counterparts(f"{here} {remark}"):
        if not re.match(r"runners\.\w+: ", code):
            assert exists(code), f"{name}: there is no {code}"


@pytest.mark.parametrize("name", sorted(COUNTERPARTS))
def test_an_error_names_the_counterpart_of_the_docs(name: str) -> None:
    """It exists, and neither the group nor the workers have the name itself and another in its place."""
    code = COUNTERPARTS[name].replace("RolloutWorkers(group)", "workers")
    assert exists(code)
    assert f"`{code}`" in " ".join(rows()[name])
    assert not hasattr(EvalRunnerGroup, name)
    assert not hasattr(RolloutWorkers, name) or code == f"workers.{name}"


def test_a_counterpart_that_is_missing_is_noticed() -> None:
    """The check can fail."""
    missing = ("group.no_such", "runners.no_such", "context.no_such", "rl_eval.errors:NoSuch")
    assert [code for code in missing if "errors" not in code and exists(code)] == []
    with pytest.raises(Exception, match="NoSuch"):
        exists("rl_eval.errors:NoSuch")


def test_yaml_of_the_page_are_keys_that_there_are() -> None:
    """And of the page on environments."""
    import yaml

    from rl_eval import EvalConfig

    for page in (PAGE, PAGE.with_name("environments.md")):
        found = re.findall(r"```yaml\n(.*?)```", page.read_text(), re.DOTALL)
        assert found
        for block in found:
            EvalConfig.from_dict(yaml.safe_load(block))
