"""The other side of openpi's protocol, written with ``openpi-client``. The first argument is ``client`` or ``server``.

- ``client PORT``: an ``ActionChunkBroker`` that checks the actions of ``tests.served.Flat`` in chunks of four, until
  its input ends. It prints a line for its first chunk, and at the end the number of its steps.
- ``server MODE``: a server of Pendulum's policy, which prints its port. ``fixed`` answers with a function of the
  observation, and ``random`` adds noise from one generator for all clients. It ends with its input.
"""

import os
import select
import sys
import threading
import traceback

import numpy as np
import websockets.sync.server
from openpi_client import msgpack_numpy
from openpi_client.action_chunk_broker import ActionChunkBroker
from openpi_client.websocket_client_policy import WebsocketClientPolicy

HORIZON = 4


def chunk(seen):
    """Return the actions that a client executes for an observation of Pendulum."""
    rows = 3 * np.tanh(seen[:1] + 0.5 * seen[-1:])[None] * np.linspace(1, 0.2, HORIZON)[:, None]
    return np.clip(rows, -2, 2).astype(np.float32)


def act_as_client(port):
    broker = ActionChunkBroker(WebsocketClientPolicy("127.0.0.1", port, os.environ["OPENPI_API_KEY"]), HORIZON)
    draws, steps = np.random.default_rng(os.getpid()), 0
    while not select.select([sys.stdin], [], [], 0)[0]:
        seen = draws.normal(size=(HORIZON, 3)).astype(np.float32)
        for step, planned in enumerate(chunk(seen[0])):
            action = broker.infer({"observation": seen[step]})["actions"]
            assert (action.shape, action.dtype) == ((1,), np.float32), action
            np.testing.assert_allclose(action, planned, atol=1e-6)
        steps += HORIZON
        if steps == HORIZON:
            print(f"numpy {np.__version__}", flush=True)  # noqa: T201
    print(steps, flush=True)  # noqa: T201


def act_as_server(mode):
    packer, draws = msgpack_numpy.Packer(), np.random.default_rng(0)

    def serve(connection):
        connection.send(packer.pack({"name": "stock"}))
        for message in connection:
            try:
                actions = chunk(msgpack_numpy.unpackb(message)["observation"])[0]
                connection.send(packer.pack({"actions": actions + draws.normal() * (mode == "random")}))
            except Exception:
                connection.send(traceback.format_exc())
                raise

    with websockets.sync.server.serve(serve, "127.0.0.1", 0, compression=None, max_size=None) as server:
        print(server.socket.getsockname()[1], flush=True)  # noqa: T201
        threading.Thread(target=server.serve_forever, daemon=True).start()
        sys.stdin.read()
        os._exit(0)


if __name__ == "__main__":
    act_as_client(int(sys.argv[2])) if sys.argv[1] == "client" else act_as_server(sys.argv[2])
