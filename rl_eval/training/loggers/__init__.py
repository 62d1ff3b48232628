"""Loggers of learning curves: console, files, TensorBoard, Weights & Biases, MLflow, Ray metrics.

A logger imports its packages only when it is built or used.
"""

from rl_eval.training.loggers.base import Logger
from rl_eval.training.loggers.text import ConsoleLogger, CSVLogger, JSONLinesLogger
from rl_eval.training.loggers.trackers import MLflowLogger, RayMetrics, TensorBoardLogger, WandbLogger

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
