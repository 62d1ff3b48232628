"""``rl-eval ope``: off-policy estimates of a policy's value from logged episodes."""

from __future__ import annotations

from typing import Annotated

import typer

from rl_eval.cli.exits import ExitCode
from rl_eval.cli.printing import AsJson, print_either
from rl_eval.cli.settings import Assignments, ConfigPath, Section, read_settings
from rl_eval.cli.shared import argument, option


def ope(
    data: Annotated[
        str, argument("DATA", "Logged episodes with log-probabilities: npz file, TensorDict folder or minari:ID.")
    ],
    config: ConfigPath,
    section: Section = None,
    gamma: Annotated[float | None, option("G", "Discount factor. [default: evaluation.gamma]", "--gamma")] = None,
    simulation: Annotated[
        bool, typer.Option(help="Also run the policy, and show its mean return beside the estimates.")
    ] = True,
    fit: Annotated[
        bool, typer.Option(help="Fit action values to the data, for the doubly robust estimators and fitted Q.")
    ] = True,
    assignments: Assignments = None,
    as_json: AsJson = False,
) -> None:
    """Estimate the value of a config's policy from logged episodes of another policy."""
    settings = read_settings(config, section, assignments, {} if gamma is None else {"evaluation.gamma": gamma})
    from rl_eval.execution.evaluate import evaluate
    from rl_eval.ope import estimate, load_episodes, target_policy

    episodes = load_episodes(data)
    estimates = estimate(
        episodes,
        target_policy(settings, episodes),
        gamma=settings.evaluation.gamma,
        values="fitted" if fit else None,
        simulation=evaluate(settings) if simulation else None,
    )
    print_either(as_json, estimates.to_dict(), estimates)
    if not estimates.identified:
        raise typer.Exit(ExitCode.USAGE)
