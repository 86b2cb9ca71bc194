"""A store for benches: serves the ranges of a folder's files, each answer late by some ms, all of them with a limit of MB/s."""

import contextlib
import http.server
import os
import pathlib
import threading
import time


@contextlib.contextmanager
def served(folder, ms=0.0, mb_per_s=0.0):
    """The address of a server of `folder` while the block runs."""
    turn, free = threading.Lock(), [0.0]

    class Ranges(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def answer(self, body):
            path = pathlib.Path(folder) / self.path.lstrip("/")
            if not path.is_file():
                return self.send_error(404)
            size = path.stat().st_size
            first, last = 0, size - 1
            if wanted := self.headers.get("Range"):
                first, end = wanted.removeprefix("bytes=").split("-")
                first, last = int(first), min(int(end or size), size - 1)
            time.sleep(ms / 1e3)
            self.send_response(206 if wanted else 200)
            self.send_header("Content-Length", str(last - first + 1))
            self.send_header("Content-Range", f"bytes {first}-{last}/{size}")
            self.send_header("ETag", f'"{size}"')
            self.end_headers()
            if body:
                with path.open("rb") as file:
                    os.lseek(file.fileno(), first, os.SEEK_SET)
                    self.send(file, last - first + 1)

        def send(self, file, left):
            while left > 0:
                part = os.read(file.fileno(), min(left, 1 << 18))
                if mb_per_s:
                    with turn:
                        free[0] = max(free[0], time.monotonic()) + len(part) / mb_per_s / 1e6
                        until = free[0]
                    time.sleep(max(0.0, until - time.monotonic()))
                self.wfile.write(part)
                left -= len(part)

        def do_GET(self):
            self.answer(body=True)

        def do_HEAD(self):
            self.answer(body=False)

        def log_message(self, *_words):
            pass

    class Server(http.server.ThreadingHTTPServer):
        daemon_threads = True
        request_queue_size = 128

        def handle_error(self, *_error):
            """Clients that leave are no news."""

    server = Server(("127.0.0.1", 0), Ranges)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
