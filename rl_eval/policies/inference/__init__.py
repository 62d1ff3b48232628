"""Inference: one forward pass of a policy for all live episodes of a runner, and the probe of such passes."""
