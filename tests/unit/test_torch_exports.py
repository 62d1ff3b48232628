"""Exported modules of torch: files and objects of TorchScript and torch.export."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from rl_eval import EvalConfig, EvalResult, evaluate
from rl_eval.backends.pickling import pickled_settings
from rl_eval.config.policy_sources import named_source
from rl_eval.errors import ConfigError
from tests.refused import refused, untold
from tests.unit.cli_world import call

# Of torch: TorchScript is deprecated, and torch.export copies parts that are.
pytestmark = [pytest.mark.filterwarnings(f"ignore::{kind}Warning") for kind in ("Deprecation", "Future")]

BATCH = {0: torch.export.Dim("batch")}


class Gaussian(nn.Module):
    """Actions with one standard deviation for all rows."""

    def __init__(self) -> None:
        super().__init__()
        self.mean, self.log_std = nn.Linear(3, 1), nn.Parameter(torch.zeros(1))

    def forward(self, observations: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.mean(observations), self.log_std


def net() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 2))


def exported(module: nn.Module, rows: int, columns: int = 4, **shapes: Any) -> torch.export.ExportedProgram:
    return torch.export.export(module, (torch.zeros(rows, columns),), **shapes)


def save(folder: Path) -> dict[str, Path]:
    """Write the files of each kind, with names that do not tell the kind."""
    module = net()
    torch.jit.save(torch.jit.script(module), folder / "a.bin")
    torch.export.save(exported(module, 2, dynamic_shapes=(BATCH,)), folder / "b.pt2")
    torch.export.save(exported(module, 1), folder / "c.pt2")
    torch.export.save(exported(module, 3), folder / "d.pt2")
    (folder / "b.pt2").rename(folder / "b.bin")
    return {
        "script": folder / "a.bin",
        "free": folder / "b.bin",
        "fixed": folder / "c.pt2",
        "of three": folder / "d.pt2",
    }


def result_of(policy: Any, lanes: int, env: str = "CartPole-v1", **settings: Any) -> EvalResult:
    config = EvalConfig().environment(env).policy(**settings).runners(num_envs_per_runner=lanes)
    return evaluate(config.evaluation(num_episodes=6), policy)


@pytest.mark.parametrize("lanes", [1, 4])
def test_a_file_and_its_module_act_as_the_module_before_the_export(tmp_path: Path, lanes: int) -> None:
    """A batch of fixed size is computed row by row, and one note says so."""
    expected = result_of(net(), lanes).fingerprint
    for kind, path in save(tmp_path).items():
        found = result_of(str(path), lanes)
        assert found.fingerprint == expected, kind
        is_fixed = [note for note in found.notes if "torch.export.Dim" in note]
        assert len(is_fixed) == (kind in ("fixed", "of three"))
        load = torch.jit.load if kind == "script" else lambda file: torch.export.load(file).module()
        assert result_of(load(path), lanes).fingerprint == expected, kind
        assert named_source(str(path)).pickled == str(path)


@pytest.mark.parametrize("deterministic", [True, False])
def test_means_and_deviations_of_a_fixed_batch_are_computed_alone(deterministic: bool) -> None:
    module = Gaussian()
    free, fixed = exported(module, 2, 3, dynamic_shapes=(BATCH,)), exported(module, 1, 3)
    found = [result_of(one.module(), 2, "Pendulum-v1", deterministic=deterministic) for one in (free, fixed)]
    assert found[0].mean_return == pytest.approx(found[1].mean_return, rel=1e-4)


def test_a_program_that_is_not_a_module_says_how_to_get_it() -> None:
    with refused(ConfigError, "policy.policy", value="ExportedProgram") as caught:
        result_of(exported(net(), 1), 1)
    assert untold(str(caught.value), "program.module()") == []


@pytest.mark.parametrize("kind", ["script", "free"])
def test_a_module_that_cannot_be_sent_to_a_runner_names_the_form_of_its_file(tmp_path: Path, kind: str) -> None:
    path = save(tmp_path)[kind]
    module = torch.jit.load(path) if kind == "script" else torch.export.load(path).module()
    with refused(ConfigError, "the policy") as caught:
        pickled_settings(EvalConfig().environment("CartPole-v1").build(), module)
    assert untold(str(caught.value), "torchscript:PATH" if kind == "script" else "torch_export:PATH") == []


@pytest.mark.parametrize("kind", ["script", "free"])
def test_a_file_is_loaded_with_trust_and_has_a_digest(tmp_path: Path, monkeypatch: Any, kind: str) -> None:
    monkeypatch.chdir(tmp_path)
    name = save(tmp_path)[kind].name
    command = ("run", "--env", "CartPole-v1", "-n", 2, "--policy", name, "--output", "out")
    assert call(*command).exit_code == 2
    done = call(*command, "--trust")
    assert done.exit_code == 0, done.output
    assert list(json.loads(Path("out/result.json").read_text())["provenance"]["weights"]["files"]) == ["path"]


def test_a_damaged_file_is_an_error_that_names_it(tmp_path: Path) -> None:
    for path in save(tmp_path).values():
        path.write_bytes(path.read_bytes().replace(b"Linear", b"Lineal").replace(b"aten.", b"nets."))
        with refused(ConfigError, value=str(path)):
            result_of(str(path), 1)


def test_a_folder_of_lerobot_is_recognised(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"type": "act"}')
    (tmp_path / "model.safetensors").touch()
    with refused(ConfigError, "policy.policy", value=str(tmp_path)) as caught:
        named_source(str(tmp_path))
    assert untold(str(caught.value), "LeRobot", "Serve it") == []
    assert "lerobot" not in sys.modules
