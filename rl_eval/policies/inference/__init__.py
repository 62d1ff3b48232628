"""Inference: forward passes of a policy for all live episodes of a runner, and the probe of these passes."""
