"""What the line on action chunks needs."""

import numpy as np

from rl_eval import EvalConfig


def plan(observations):
    return np.linspace(2.0, 0.0, 16)[:, None] * np.sign(observations[:, None, 2:])


BEFORE = {
    'evaluate(EvalConfig().environment("Pendulum-v1").policy(chunk={"execute": 8}), plan)': lambda: {
        "EvalConfig": EvalConfig,
        "plan": plan,
    },
}
