"""Watch of a Ray cluster: whether its head answers, and whether any of its nodes is alive.

Without a node, Ray's client waits without a limit. Without the head, it ends this process with exit code 1. The watch
notices both, so that the run ends before that with an error of its own.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Final, Literal, final

Sign = Literal["alive", "no node", "refused", "silent"]
"""Answer of a cluster. A head that refuses connections has ended; a silent one may be behind a cut link."""

_logger: Final = logging.getLogger(__name__)
_INTERVAL_S: Final = 2.0
_CONNECT_TIMEOUT_S: Final = 5.0
_ANSWER_TIMEOUT_S: Final = 3.0
_SILENCE_S: Final = 110.0
"""Seconds after which Ray's client notices a cut link, at the earliest. Then it tries to connect again."""
_NO_NODE_S: Final = 30.0
_MARGIN: Final = 0.75
"""Fraction of the time limits of Ray's client after which the cluster counts as lost."""


def time_limits(variables: Mapping[str, str]) -> dict[Sign, float]:
    """Return the seconds for which each sign of trouble may last.

    Args:
        variables: Environment variables. One of them sets the time for which Ray's client tries to connect again.
    """
    reconnect_s = _MARGIN * float(variables.get("RAY_gcs_rpc_server_reconnect_timeout_s", 60))
    return {"no node": _NO_NODE_S, "refused": reconnect_s, "silent": _SILENCE_S + reconnect_s}


@final
class Outage:
    """Signs of trouble since the cluster was well.

    Args:
        limits: Seconds for which each sign may last.
    """

    def __init__(self, limits: Mapping[Sign, float]) -> None:
        self._limits = limits
        self._since: dict[Sign, float] | None = None
        """Time of the first sign of each kind; None until the cluster was well once."""

    def saw(self, sign: Sign, now: float) -> bool:
        """Store a sign, and return whether it is the first of its kind in this outage."""
        if sign == "alive":
            self._since = {}
        if sign == "alive" or self._since is None or sign in self._since:
            return False
        self._since[sign] = now
        return True

    def lasts_too_long(self, now: float) -> bool:
        """Whether a sign has lasted longer than its limit."""
        return any(now - since > self._limits[sign] for sign, since in (self._since or {}).items())


@final
class ClusterWatch:
    """Watch in a daemon thread, because the questions may block.

    Args:
        address: Host and port of the cluster's head.
        on_loss: Function that the thread calls when the cluster is lost.
    """

    def __init__(self, address: str, on_loss: Callable[[], object]) -> None:
        self.loss = ""
        """Reason why the cluster is lost; empty while it is not."""
        self.answers = True
        """Whether the head answered the last question. A call of Ray blocks while it does not."""
        self._address = address
        self._on_loss = on_loss
        self._ended = threading.Event()
        threading.Thread(target=self._watch, name="rl_eval cluster watch", daemon=True).start()

    def end(self) -> None:
        """End the thread."""
        self._ended.set()

    def _watch(self) -> None:
        limits = time_limits(os.environ)
        outage = Outage(limits)
        while not self._ended.is_set() and not self.loss:
            asked = time.monotonic()
            sign = sign_of(self._address)
            self.answers = sign in ("alive", "no node")
            trouble = {
                "no node": f"no node of the Ray cluster at {self._address} is alive",
                "refused": f"the head of the Ray cluster at {self._address} refuses connections",
                "silent": f"the head of the Ray cluster at {self._address} does not answer",
            }.get(sign, "")
            if outage.saw(sign, asked):
                with suppress(Exception):  # A handler of the caller may raise.
                    _logger.warning("%s. The evaluation ends if this lasts for %.0f s", trouble, limits[sign])
            elif outage.lasts_too_long(asked):
                self.loss = trouble
                self._on_loss()
            self._ended.wait(_INTERVAL_S)


def sign_of(address: str) -> Sign:
    """Ask a cluster how it is.

    The question uses a connection of its own: Ray's client would retry it, and end this process after a while.

    Args:
        address: Host and port of the cluster's head.
    """
    try:
        connect_once(address)
    except ConnectionRefusedError:
        return "refused"
    except OSError:
        return "silent"
    try:
        from ray._private.grpc_utils import init_grpc_channel
        from ray.core.generated.gcs_pb2 import GcsNodeInfo
        from ray.core.generated.gcs_service_pb2 import GetAllNodeInfoRequest
        from ray.core.generated.gcs_service_pb2_grpc import NodeInfoGcsServiceStub

        with init_grpc_channel(address) as channel:
            request = GetAllNodeInfoRequest(state_filter=GcsNodeInfo.ALIVE, limit=1)
            answer = NodeInfoGcsServiceStub(channel).GetAllNodeInfo(request, timeout=_ANSWER_TIMEOUT_S)
    except Exception:  # Another version of Ray, or a busy head.
        return "alive"
    return "alive" if answer.node_info_list else "no node"


def connect_once(address: str) -> None:
    """Check that a process listens at an address, because Ray would retry a dead address for minutes.

    Raises:
        OSError: No process listens at the address.
    """
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if host and port.isdigit():
        socket.create_connection((host, int(port)), timeout=_CONNECT_TIMEOUT_S).close()
