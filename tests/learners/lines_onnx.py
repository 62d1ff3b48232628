"""What the lines on ONNX models need."""

from typing import Any

import pytest
import torch
from torch import nn


class Memory(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gru, self.head = nn.GRUCell(4, 8), nn.Linear(8, 2)

    def forward(self, obs: Any, before: Any) -> Any:
        after = self.gru(obs, before)
        return self.head(after), after


def exported(path: str, module: nn.Module, *given: torch.Tensor, **names: list[str]) -> None:
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    torch.onnx.export(module.eval(), given, path, verbose=False, **names)


def plain() -> dict[str, Any]:
    exported("policy.onnx", nn.Linear(4, 2), torch.zeros(1, 4))
    return {}


def memory() -> dict[str, Any]:
    names = {"input_names": ["obs", "before"], "output_names": ["logits", "after"]}
    exported("memory.onnx", Memory(), torch.zeros(1, 4), torch.zeros(1, 8), **names)
    return {}


def session() -> dict[str, Any]:
    plain()
    import onnxruntime

    return {"session": onnxruntime.InferenceSession("policy.onnx")}


RUN = "rl-eval run --env CartPole-v1 --policy"
BEFORE = {
    f"{RUN} policy.onnx": plain,
    f"{RUN} memory.onnx --set 'policy.policy_kwargs.states={{before: after}}'": memory,
    'evaluate("CartPole-v1", session)': session,
}
