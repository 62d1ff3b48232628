"""Saved state of a runner: weights, filters and open leases in one safetensors file, without pickles."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Final

from rl_eval.errors import WeightsError
from rl_eval.policies.filters import DEFAULT_POLICY, FilteredPolicy, with_filters
from rl_eval.protocols import Policy
from rl_eval.weights import WeightsSnapshot, module_of, snapshot_weights, tensors_of

__all__ = ["pack_state", "unpack_state"]

_KEY: Final = "rl_eval"
"""Name in the file's metadata."""


def pack_state(policy: Policy, version: int, leases: Sequence[Sequence[Any]]) -> bytes:
    """Return the bytes of a file with a policy's weights and filter, their version, and leases.

    Raises:
        WeightsError: The weights have extra state that is no tensor.
    """
    from safetensors.torch import save

    module = module_of(policy)
    snapshot = snapshot_weights({} if module is None else module, version)
    if isinstance(policy, FilteredPolicy):
        snapshot = with_filters(snapshot, {DEFAULT_POLICY: policy.filter}, version)
    facts = json.dumps({"version": version, "leases": [list(lease) for lease in leases]})
    return bytes(save(tensors_of(snapshot), {_KEY: facts}))


def unpack_state(state: bytes) -> tuple[WeightsSnapshot, list[list[Any]]]:
    """Return weights with filters, and leases.

    Raises:
        WeightsError: These are not the bytes of a saved state.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load

    try:
        header = json.loads(state[8 : 8 + int.from_bytes(state[:8], "little")])
        facts = json.loads(header["__metadata__"][_KEY])
        return snapshot_weights(load(state), facts["version"]), facts["leases"]
    except (SafetensorError, ValueError, KeyError, TypeError) as error:
        raise WeightsError(f"this is no state that save() returned: {error!r}") from error
