"""Subject of an evaluation: settings hold names of policies, and policy objects travel beside them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from agents_world import crowd_config
from safetensors.torch import save_file

from rl_eval import EvalConfig, EvalRunnerGroup, Evaluator, replay
from rl_eval.config.settings import EvalSettings, with_values
from rl_eval.policies.subject import DEFAULT_POLICY, Subject, subject_of
from rl_eval.records.plain import leaves
from rl_eval.results.source_code import code_of


class Net(torch.nn.Module):
    """Policy with two actions."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 2)

    def forward(self, observations: torch.Tensor) -> torch.Tensor:
        """Return logits."""
        return self.layer(observations)


def first(observations: Any) -> Any:
    """Choose the first action."""
    return [0] * len(observations)


NET = f"{__name__}:Net"


def cartpole() -> EvalConfig:
    return EvalConfig().environment("CartPole-v1").evaluation(num_episodes=3)


CROWD = crowd_config().policy(policies={"hawk": Net(), "dove": f"{__name__}:first"})
WORLDS = {
    "argument": (cartpole(), Net(), {DEFAULT_POLICY}),
    "config": (cartpole().policy(Net()), None, {DEFAULT_POLICY}),
    "in place of a named policy": (cartpole().policy(f"{__name__}:first"), Net(), {DEFAULT_POLICY}),
    "named": (cartpole().policy(f"{__name__}:first"), None, set()),
    "random": (cartpole(), "random", set()),
    "several": (CROWD, None, {"hawk"}),
    "one of several": (crowd_config(), {"dove": Net()}, {"dove", "hawk"}),
}


def objects_in(settings: EvalSettings) -> Iterator[Any]:
    """Yield the policies in a section that are not names."""
    for section in (settings.policy, *settings.policy.policies.values()):
        if not isinstance(section.policy, str | None):
            yield section.policy


@pytest.mark.parametrize(("config", "policy", "live"), WORLDS.values(), ids=list(WORLDS))
def test_settings_name_every_policy(config: EvalConfig, policy: Any, live: set[str]) -> None:
    """Config text, identity and digests are those of the settings with the objects."""
    settings, subject = subject_of(config.build(), policy)
    assert subject.objects.keys() == live
    assert not [*objects_in(settings)]
    assert subject_of(settings, subject) == (settings, subject)
    for_runners, packed = subject.packed(settings)
    assert not [*objects_in(for_runners)]
    assert (packed is None) == (not live)
    if policy is None:
        assert (settings.described(), settings.identity()) == (config.build().described(), config.build().identity())
        assert code_of(settings, subject) == code_of(config.build())


def test_a_group_and_an_evaluator_keep_no_policy_object_in_their_settings() -> None:
    with EvalRunnerGroup(cartpole(), Net(), threaded=False) as group:
        assert group.settings.policy.policy == NET
        assert group.apply_to_one(lambda runner: runner.settings.policy.policy) is None
        group.reconfigure(cartpole().policy(Net()))
        assert group.settings.policy.policy == NET
    with Evaluator(cartpole(), Net(), backend="inline") as evaluator:
        assert evaluator.settings.policy.policy == NET


def test_a_result_names_the_policy_of_its_evaluation(tmp_path: Path) -> None:
    """A watcher evaluates the copy of a file, and the result names the original."""
    with EvalRunnerGroup(cartpole(), Net(), threaded=False) as group:
        before = group.settings
        named = Subject(with_values(before, policy={"weights": "theirs.safetensors"}).policy)
        result = group.submit(output=tmp_path, subject=named).result()
        assert group.settings is before
        assert group.evaluate().provenance["config"]["policy"]["weights"] is None
    assert result.provenance["config"]["policy"]["weights"] == "theirs.safetensors"
    assert "theirs.safetensors" in {value for _, value in leaves(result.provenance)}


def test_a_policy_object_with_a_file_of_weights_is_replayed(tmp_path: Path) -> None:
    """The weights of the run came from the file."""
    save_file(Net().state_dict(), tmp_path / "net.safetensors")
    config = cartpole().policy(weights=str(tmp_path / "net.safetensors"))
    with EvalRunnerGroup(config, Net(), threaded=False) as group:
        result = group.evaluate()
    assert replay(result, 1, config=config, policy=Net()).identical
