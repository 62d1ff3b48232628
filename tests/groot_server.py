"""Server with GR00T's messages over ZeroMQ. The argument is ``fixed``, or ``random`` for one generator for all clients.

It prints its port. An observation has the parts ``video``, ``state`` and ``language``, of shape (batch, time, ...).
"""

import io
import sys

import msgpack
import numpy as np
import zmq

RANDOM = np.random.default_rng(0)


def encoded(value):
    file = io.BytesIO()
    np.save(file, value, allow_pickle=False)
    return {"__ndarray_class__": True, "as_npy": file.getvalue()}


def decoded(value):
    return np.load(io.BytesIO(value["as_npy"]), allow_pickle=False) if "__ndarray_class__" in value else value


def get_action(observation, options):
    """Return chunks of eight actions of shape (batch, 8, 2), and an info."""
    front, arm, task = (
        observation[part][key] for part, key in (("video", "front"), ("state", "arm"), ("language", "task"))
    )
    assert (front.dtype, front.shape[1:], arm.shape[1:]) == (np.uint8, (1, 6, 6, 3), (1, 3)), "of another shape"
    rows = [
        np.tanh(0.1 * len(text) * (one[0, :2] + image.mean() / 255))
        for image, one, (text,) in zip(front, arm, task, strict=True)
    ]
    chunks = np.array(rows)[:, None] * np.linspace(1, 0.4, 8)[:, None]
    return {"arm": (chunks + RANDOM.normal(size=chunks.shape) * (sys.argv[1] == "random")).astype(np.float32)}, {}


if __name__ == "__main__":
    with zmq.Context() as context, context.socket(zmq.REP) as listener:
        print(listener.bind_to_random_port("tcp://127.0.0.1"), flush=True)  # noqa: T201
        while True:
            request = msgpack.unpackb(listener.recv(), object_hook=decoded)
            try:
                answer = {"get_action": get_action}[request["endpoint"]](**request["data"])
            except Exception as error:
                answer = {"error": str(error)}
            listener.send(msgpack.packb(answer, default=encoded))
