"""`polyrl report --live`: the page for a browser of this machine, made anew each time that it asks.

A browser cannot send a manager's token, and should not know it. So the page is served here, on the loopback, under a
path that holds a secret of this command's own: other users of the machine cannot guess it, other pages cannot read it,
and it is worth nothing once the command has ended.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable
from html import escape
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final

from polyrl.errors import PolyRLError
from polyrl.history.foreign_text import printable
from polyrl.page.page import PAGE_HEADERS, REFRESH_S

SECRET_BYTES: Final = 32
HOST: Final = "127.0.0.1"

MAX_CONNECTIONS: Final = 16
"""At once; a browser opens six. Further ones are closed: whoever is on this machine can connect."""

IDLE_S: Final = 10.0
"""Longest wait for a request, and for whoever reads the answer."""


def serve_page(make: Callable[[], str], emit: Callable[[str], None]) -> None:
    """Serves until Ctrl-C; `emit` is given the address."""
    with PageServer(make) as server:
        emit(f"Open {server.url}\nIt is made anew every {REFRESH_S} s while the run goes on. Ctrl-C ends it.")
        server.serve_forever()


class PageServer(ThreadingHTTPServer):
    """One page under one path."""

    daemon_threads = True

    def __init__(self, make: Callable[[], str]) -> None:
        self.make = make
        self.path = f"/{secrets.token_urlsafe(SECRET_BYTES)}/"
        self._free = threading.Semaphore(MAX_CONNECTIONS)
        super().__init__((HOST, 0), _Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        """In a thread of its own, unless there are too many."""
        if self._free.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Answers, and makes room for another one."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Nothing: a browser that has left is no error, and others were answered."""

    @property
    def origin(self) -> str:
        return f"{HOST}:{self.server_address[1]}"

    @property
    def url(self) -> str:
        return f"http://{self.origin}{self.path}"


class _Handler(BaseHTTPRequestHandler):
    server: PageServer
    timeout = IDLE_S

    def do_GET(self) -> None:
        """The page, to whoever knows its path and came by its address: a name that leads here is somebody's trick."""
        known = secrets.compare_digest(self.path.encode("utf-8", "replace"), self.server.path.encode())
        if not known or self.headers.get("Host") != self.server.origin:
            self._answer(404, "There is nothing here.")
            return
        try:
            page = self.server.make()
        except (PolyRLError, OSError) as error:
            text = f"<!DOCTYPE html><meta charset=utf-8><meta http-equiv=refresh content={REFRESH_S}><p>"
            self._answer(503, text + escape(printable(str(error))))
        else:
            self._answer(200, page)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """What the base refuses, with the same headers as a page, and without the request's own words."""
        self._answer(code, "This is no request for a page.")

    def _answer(self, status: int, text: str) -> None:
        body = text.encode()
        self.send_response(status)
        headers = {**PAGE_HEADERS, "Content-Type": "text/html; charset=utf-8", "Content-Length": str(len(body))}
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base's own name
        """Nothing: the path is a secret."""
