"""Server of a policy: answers two numbers with the gain times the second, plus the first. Arguments: port and gain.

It prints its port when it is open, and ends with the process that started it, which holds its input.
"""

import os
import socketserver
import struct
import sys
import threading


class Handler(socketserver.StreamRequestHandler):
    """One client."""

    def handle(self) -> None:
        while len(request := self.rfile.read(16)) == 16:
            first, second = struct.unpack("dd", request)
            self.wfile.write(struct.pack("d", first + float(sys.argv[2]) * second))


class Server(socketserver.ThreadingTCPServer):
    """One thread per client."""

    allow_reuse_address = daemon_threads = True


def end_with_input() -> None:
    sys.stdin.read()
    os._exit(0)


def serve(handler: type[socketserver.BaseRequestHandler]) -> None:
    """Print the port, and serve until the input ends."""
    threading.Thread(target=end_with_input, daemon=True).start()
    with Server(("127.0.0.1", int(sys.argv[1])), handler) as server:
        print(server.server_address[1], flush=True)  # noqa: T201
        server.serve_forever()


if __name__ == "__main__":
    serve(Handler)
