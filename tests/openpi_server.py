"""Server of openpi's protocol, as openpi writes it, with faults that a test chooses. Arguments: port, mode, gain.

It prints its port when it is open, and ends with the process that started it, which holds its input. ``mode`` is:

- ``det``: the action is a function of the observation;
- ``random``: one generator for all clients;
- ``chunks``: chunks of ten actions;
- ``drifts``: after 300 requests, it is another policy;
- a fault, once, at the request with the number in the variable ``FAULT_AT``: ``error``, ``shape``, ``nan``, ``half``,
  ``garbage``, ``never``, ``twice``, ``key``, ``dies``, ``noise`` (bytes that are no frame).
"""

import os
import socketserver
import sys
import threading
import time
import traceback
from typing import Any

import numpy as np
from policy_server import serve
from websockets.frames import Frame, Opcode
from websockets.server import ServerProtocol

from rl_eval.integrations.openpi.wire import pack, unpack

MODE, GAIN = sys.argv[2], float(sys.argv[3])
AT, TOKEN = int(os.environ.get("FAULT_AT", "0")), os.environ.get("SERVER_TOKEN", "")
ROW = bytes.fromhex(os.environ.get("FAULT_ROW", ""))
"""Observation on which the server always fails."""
RNG, LOCK, COUNT = np.random.default_rng(0), threading.Lock(), [0]
METADATA: dict[str, Any] = {"name": "stock"}


def action(request: dict[str, Any]) -> Any:
    """Return the action for CartPole or Pendulum."""
    seen = np.asarray(request["observation"], np.float64)
    gain = -GAIN if MODE == "drifts" and COUNT[0] > 300 else GAIN
    value = np.float32(gain * (seen[..., 1] + 0.5 * seen[..., -1]))
    if MODE == "random":
        value += np.float32(RNG.normal())
    found = np.full(1, value, np.float32)
    return np.stack([found * (1 - 0.08 * step) for step in range(10)]).astype(np.float32) if MODE == "chunks" else found


class Handler(socketserver.BaseRequestHandler):
    """One client."""

    def handle(self) -> None:
        self.request.setsockopt(6, 1, 1)
        protocol = ServerProtocol(max_size=None)
        self.protocol = protocol
        while data := self.request.recv(2**16):
            protocol.receive_data(data)
            for event in protocol.events_received():
                if not isinstance(event, Frame):
                    response = protocol.accept(event)
                    if TOKEN and event.headers.get("Authorization") != f"Api-Key {TOKEN}":
                        response = protocol.reject(401, "wrong key\n")
                    protocol.send_response(response)
                    if response.status_code == 101:
                        protocol.send_binary(pack(METADATA))
                elif event.opcode is Opcode.BINARY and not self.answer(bytes(event.data)):
                    return
            self.flush()

    def flush(self) -> None:
        self.request.sendall(b"".join(self.protocol.data_to_send()))  # Two answers come together.

    def answer(self, message: bytes) -> bool:
        """Answer a request; return whether to go on."""
        time.sleep(float(os.environ.get("SECONDS_OF_ROW", "0")))
        with LOCK:
            COUNT[0] += 1
            fault = MODE if COUNT[0] == AT else ""
        try:
            if fault == "error":
                raise KeyError("observation/state")
            request = unpack(message)
            if request["observation"].tobytes() == ROW:
                raise KeyError("observation/state")
            found = {"actions": action(request), "server_timing": {"infer_ms": 0.1}}
        except Exception:
            self.protocol.send_text(traceback.format_exc().encode())
            self.protocol.send_close(1011, "see the text")
            self.flush()
            return False
        return self.send(found, fault)

    def send(self, found: dict[str, Any], fault: str) -> bool:
        if fault == "shape":
            found["actions"] = np.zeros((7, 3), np.float32)
        elif fault == "nan":
            found["actions"] = np.full(1, np.nan, np.float32)
        elif fault == "key":
            found["act"] = found.pop("actions")
        whole = b"\xc1garbage" if fault == "garbage" else pack(found)
        if fault == "never":
            time.sleep(3600)
        if fault == "dies":
            os._exit(1)
        if fault == "noise":
            self.request.sendall(b"\xff" * 20)
            return False
        self.protocol.send_binary(whole)
        if fault == "twice":
            self.protocol.send_binary(whole)
        if fault == "half":
            self.request.sendall(b"".join(self.protocol.data_to_send())[:9])
            time.sleep(3600)
        self.flush()
        return True


if __name__ == "__main__":
    serve(Handler)
