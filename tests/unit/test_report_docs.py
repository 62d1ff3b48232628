"""What docs/report.md shows runs: its commands and its Python, one after the other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rl_eval import EvalConfig
from tests.unit.pages_world import ROOT, Reader, pages


def balance(observations: Any) -> Any:
    return (observations[:, 2] + observations[:, 3] > 0).astype(int)


def short_episodes() -> dict[str, Any]:
    """The config of the page with short episodes: a frame takes longer than a step."""
    text = Path("configs/local.yaml").read_text()
    Path("configs").unlink()
    Path("configs").mkdir()
    Path("configs/local.yaml").write_text(text + "  max_episode_steps: 30\n")
    Path("configs/weights").symlink_to(ROOT / "configs/weights")
    config = EvalConfig().environment("CartPole-v1").evaluation(num_episodes=2, max_episode_steps=30)
    return {"config": config, "policy": balance}


@pytest.mark.process
def test_the_examples_run(reader: Reader) -> None:
    """And what Python writes is what the command wrote."""
    [page] = pages("tests/unit/test_report_docs.py")
    reader.names |= short_episodes()
    reader.follow(page)
    assert Path("again.html").read_bytes() == Path("random.html").read_bytes()
