"""openpi: policies on a server, by openpi's websocket protocol. ``openpi://HOST:PORT`` is such a policy."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import gymnasium as gym

from rl_eval.config.policy_sources import PolicyScheme, PolicySource, absolute
from rl_eval.config.settings import PolicySection
from rl_eval.errors import ConfigError, needs_extra

if TYPE_CHECKING:
    from rl_eval.integrations.openpi.client import PolicyClient

_FORM: Final = "openpi://HOST:PORT@MAPPING.yaml"


@dataclass(frozen=True)
class Server:
    """Address of a policy. Each process that uses it opens its own connection."""

    addresses: tuple[str, ...]
    mapping: str | None
    prompt: str | None
    key_variable: str
    connect_timeout_s: float
    answer_timeout_s: float
    patience_s: float


def load_policy(
    addresses: str,
    mapping: str | None = None,
    prompt: str | None = None,
    key_variable: str = "OPENPI_API_KEY",
    connect_timeout_s: float = 10.0,
    answer_timeout_s: float = 60.0,
    patience_s: float = 10.0,
) -> Server:
    """Name a policy on a server. Only the arguments mapping and prompt are part of an evaluation's identity.

    Args:
        addresses: ``HOST:PORT``; several, separated by commas, of servers with the same policy.
        mapping: How observations become requests: a YAML file, or ``aloha``, ``droid`` or ``libero``. By default, each
            part of the observation is sent under its path.
        prompt: Instruction in every request.
        key_variable: Environment variable with the API key of the server. If it is not set, no key is sent.
        connect_timeout_s: Time limit of one connection, in seconds.
        answer_timeout_s: Time limit of one answer, in seconds.
        patience_s: Time for which a lost connection is tried again, in seconds, before the policy is unavailable.

    Raises:
        ConfigError: An address is not of this form.
    """
    limits = connect_timeout_s, answer_timeout_s, patience_s
    return Server(_split(addresses), mapping, prompt, key_variable, *map(float, limits))


def _split(addresses: str) -> tuple[str, ...]:
    places = tuple(one.strip() for one in addresses.split(","))
    for one in places:
        host, colon, port = one.rpartition(":")
        if not host or not port.isdecimal() or "/" in one or "@" in one:
            problem = f"{one!r} is not the address of a server" if colon else f"the address {one!r} has no port"
            raise ConfigError(problem, key="policy.policy_kwargs.addresses", value=one, fix="Write HOST:PORT.")
    return places


def as_policy(
    value: Server, section: PolicySection, observation_space: gym.Space[Any], action_space: gym.Space[Any]
) -> PolicyClient:
    """Build the client of a server for these spaces.

    Raises:
        ConfigError: The mapping does not fit the spaces, or a package is missing.
    """
    with needs_extra("openpi", "a policy on a server needs the packages msgpack and websockets", "policy.policy"):
        from rl_eval.integrations.openpi.client import PolicyClient
    return PolicyClient(value, section, observation_space, action_space)


def _source(reference: str, path: Path | None, given: Collection[str]) -> PolicySource:
    addresses = reference.removeprefix("//")
    if not addresses:
        problem = "the policy openpi: lacks the address of a server"
        raise ConfigError(problem, key="policy.policy", value="openpi:", fix=f"Write it as {_FORM}.")
    _split(addresses)
    kwargs = {"addresses": addresses} | ({"mapping": absolute(path)} if path else {})
    return PolicySource(f"{__name__}:load_policy", f"the policy at {addresses}", kwargs)


SCHEMES: Final = {"openpi": PolicyScheme(_FORM, _source, lambda _: False)}
