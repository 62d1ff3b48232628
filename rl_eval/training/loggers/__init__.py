"""Loggers of learning curves: console, files, TensorBoard, Weights & Biases, MLflow, Ray metrics.

Names are loaded on first use: no logger imports another's packages. Imported by ``training/`` and above.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rl_eval.training.loggers.base import Logger
    from rl_eval.training.loggers.console import ConsoleLogger
    from rl_eval.training.loggers.files import CSVLogger, JSONLinesLogger
    from rl_eval.training.loggers.mlflow import MLflowLogger
    from rl_eval.training.loggers.ray_metrics import RayMetrics
    from rl_eval.training.loggers.tensorboard import TensorBoardLogger
    from rl_eval.training.loggers.wandb import WandbLogger

_HOME = {
    "CSVLogger": "files",
    "ConsoleLogger": "console",
    "JSONLinesLogger": "files",
    "Logger": "base",
    "MLflowLogger": "mlflow",
    "RayMetrics": "ray_metrics",
    "TensorBoardLogger": "tensorboard",
    "WandbLogger": "wandb",
}

__all__ = [
    "CSVLogger",
    "ConsoleLogger",
    "JSONLinesLogger",
    "Logger",
    "MLflowLogger",
    "RayMetrics",
    "TensorBoardLogger",
    "WandbLogger",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'rl_eval.training.loggers' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"rl_eval.training.loggers.{_HOME[name]}"), name)
    globals()[name] = value
    return value
