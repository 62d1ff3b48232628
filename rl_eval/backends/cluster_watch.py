"""Watch of a Ray cluster: whether its head answers, and whether any of its nodes is alive.

Without a node, Ray's client waits without a limit. Without the head, it ends this process with exit code 1. The watch
notices both, so that the evaluation ends before that with an error of its own.
"""

from __future__ import annotations

import errno
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Final, Literal, final

NO_NODE: Final = "no node of the Ray cluster is alive"
REFUSED: Final = "the head of the Ray cluster refuses connections"
SILENT: Final = "the head of the Ray cluster does not answer"
_RECONNECT_S: Final = 0.75 * float(os.environ.get("RAY_gcs_rpc_server_reconnect_timeout_s") or 60)  # noqa: SIM112
"""A part of the time for which Ray's client tries to connect again before it ends this process."""
LIMITS_S: Final[Mapping[str, float]] = {NO_NODE: 30.0, REFUSED: _RECONNECT_S, SILENT: 110.0 + _RECONNECT_S}
"""Seconds for which each kind of trouble may last. Ray's client notices a cut link after 120 s."""
_UNREACHABLE: Final = (errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN, errno.ENETDOWN, errno.ECONNRESET)
_INTERVAL_S: Final = 2.0
_TIMEOUT_S: Final = 5.0
_logger: Final = logging.getLogger(__name__)


@final
class Outage:
    """Kinds of trouble since the cluster was well."""

    def __init__(self) -> None:
        self._since: dict[str, float] | None = None
        """Begin of each kind of trouble; None until the cluster was well once."""

    def saw(self, trouble: str, now: float) -> Literal["", "new", "over"]:
        """Store a kind of trouble, or its absence. Return whether it is new, or whether the outage lasts too long."""
        if not trouble:
            self._since = {}
        elif self._since is not None:
            if self._since.setdefault(trouble, now) == now:
                return "new"
            if any(now - since > LIMITS_S[one] for one, since in self._since.items()):
                return "over"
        return ""


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
        self._address, self._on_loss, self._ended = address, on_loss, threading.Event()
        threading.Thread(target=self._watch, name="rl_eval cluster watch", daemon=True).start()

    def end(self) -> None:
        """End the thread."""
        self._ended.set()

    def _watch(self) -> None:
        outage = Outage()
        while not self._ended.wait(_INTERVAL_S):
            asked = time.monotonic()
            trouble = trouble_of(self._address)
            found, text = outage.saw(trouble, asked), f"{trouble} ({self._address})"
            if found == "new":
                with suppress(Exception):  # A handler of the caller may raise.
                    _logger.warning("%s. The evaluation ends if this lasts for %.0f s", text, LIMITS_S[trouble])
            elif found == "over":
                self.loss = text
                self.end()
                self._on_loss()


def trouble_of(address: str) -> str:
    """Ask a cluster whether it is well. Return its trouble, a key of :data:`LIMITS_S`; empty if there is none.

    The question uses a connection of its own: Ray's client would retry it, and end this process after a while.

    Args:
        address: Host and port of the cluster's head.
    """
    try:
        connect_once(address)
    except ConnectionRefusedError:
        return REFUSED
    except OSError as error:  # Other errors are those of this process, such as too many open files.
        return SILENT if isinstance(error, TimeoutError) or error.errno in _UNREACHABLE else ""
    try:
        from ray._private.grpc_utils import init_grpc_channel
        from ray.core.generated.gcs_pb2 import GcsNodeInfo
        from ray.core.generated.gcs_service_pb2 import GetAllNodeInfoRequest
        from ray.core.generated.gcs_service_pb2_grpc import NodeInfoGcsServiceStub

        with init_grpc_channel(address) as channel:
            request = GetAllNodeInfoRequest(state_filter=GcsNodeInfo.ALIVE, limit=1)
            answer = NodeInfoGcsServiceStub(channel).GetAllNodeInfo(request, timeout=_TIMEOUT_S)
    except Exception:  # Another version of Ray, or a busy head.
        return ""
    return "" if answer.node_info_list else NO_NODE


def connect_once(address: str) -> None:
    """Check that a process listens at an address, because Ray would retry a dead address for minutes.

    Raises:
        OSError: No process listens at the address.
    """
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if host and port.isdigit():
        socket.create_connection((host, int(port)), timeout=_TIMEOUT_S).close()
