"""Checks of ``rl-eval doctor``: the machine, the config, the environment, the policy and, on request, Ray."""
