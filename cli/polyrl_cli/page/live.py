"""`polyrl report --live`: the page for a browser of this machine, made anew each time that it asks.

A browser cannot send a manager's token, and should not know it. So the page is served here, on the loopback, under a
path that holds a secret of this command's own: other users of the machine cannot guess it, other pages cannot read it,
and it is worth nothing once the command has ended.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from html import escape
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final

from polyrl.errors import PolyRLError
from polyrl.history.foreign_text import printable
from polyrl.page.page import PAGE_HEADERS, REFRESH_S

SECRET_BYTES: Final = 32
HOST: Final = "127.0.0.1"


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
        super().__init__((HOST, 0), _Handler)

    @property
    def origin(self) -> str:
        return f"{HOST}:{self.server_address[1]}"

    @property
    def url(self) -> str:
        return f"http://{self.origin}{self.path}"


class _Handler(BaseHTTPRequestHandler):
    server: PageServer

    def do_GET(self) -> None:
        """The page, to whoever knows its path and came by its address: a name that leads here is somebody's trick."""
        known = secrets.compare_digest(self.path.encode("utf-8", "replace"), self.server.path.encode())
        if not known or self.headers.get("Host") != self.server.origin:
            self._answer(404, "There is nothing here.")
            return
        try:
            self._answer(200, self.server.make())
        except PolyRLError as error:
            text = f"<!DOCTYPE html><meta charset=utf-8><meta http-equiv=refresh content={REFRESH_S}><p>"
            self._answer(503, text + escape(printable(str(error))))

    def _answer(self, status: int, text: str) -> None:
        body = text.encode()
        self.send_response(status)
        headers = {**PAGE_HEADERS, "Content-Type": "text/html; charset=utf-8", "Content-Length": str(len(body))}
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base's own name
        """Nothing: the path is a secret."""
