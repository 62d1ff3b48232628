"""What ``rl-eval doctor`` looks at: the machine, the config, the environment, the policy and, on request, Ray."""
