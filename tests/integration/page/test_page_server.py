"""The server of `polyrl report --live`, as browsers that leave, other programs and other users here find it."""

from __future__ import annotations

import http.client
import socket
import struct
import threading
from collections.abc import Iterator

import pytest

from polyrl_cli.page import live
from polyrl_cli.page.live import MAX_CONNECTIONS, PageServer

ANSWER_S = 10.0
RESET_ON_CLOSE = struct.pack("ii", 1, 0)
"""SO_LINGER: closing sends a reset, as a tab does that is closed while it loads."""


@pytest.fixture
def server() -> Iterator[PageServer]:
    with PageServer(lambda: "x" * 5_000_000) as server:
        serving = threading.Thread(target=server.serve_forever, args=(0.02,))
        serving.start()
        yield server
        server.shutdown()
        serving.join()


def connect(server: PageServer) -> socket.socket:
    return socket.create_connection((live.HOST, server.server_address[1]), timeout=ANSWER_S)


def ask(server: PageServer, method: str = "GET") -> tuple[int, http.client.HTTPMessage, bytes]:
    connection = http.client.HTTPConnection(server.origin, timeout=ANSWER_S)
    try:
        connection.request(method, server.path)
        answer = connection.getresponse()
        return answer.status, answer.headers, answer.read()
    finally:
        connection.close()


def test_a_browser_that_leaves_while_it_loads_is_no_news(server: PageServer, capfd: pytest.CaptureFixture[str]) -> None:
    for _ in range(3):
        with connect(server) as leaving:
            leaving.sendall(f"GET {server.path} HTTP/1.1\r\nHost: {server.origin}\r\n\r\n".encode())
            leaving.recv(1)
            leaving.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_ON_CLOSE)
    assert ask(server)[0] == 200
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("method", ["HEAD", "POST", "FOO<script>"])
def test_other_methods_get_the_headers_of_a_page_and_none_of_their_words(server: PageServer, method: str) -> None:
    status, headers, body = ask(server, method)
    assert status == 501
    assert headers["Content-Security-Policy"].startswith("default-src 'none'")
    assert headers["Cache-Control"] == "no-store"
    assert b"script" not in body


def test_a_file_that_cannot_be_read_now_is_a_sentence(server: PageServer) -> None:
    def broken() -> str:
        raise OSError(5, "Input/output error", "metrics.jsonl")

    server.make = broken
    status, headers, body = ask(server)
    assert status == 503
    assert b"Input/output error" in body
    assert headers["Content-Security-Policy"].startswith("default-src 'none'")


def test_idle_connections_take_a_bounded_number_of_threads_and_end(
    server: PageServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live._Handler, "timeout", 0.5)
    before = threading.active_count()
    idle = [connect(server) for _ in range(4 * MAX_CONNECTIONS)]
    refused = idle[-1]
    assert refused.recv(1) == b"", "the last ones are closed at once"
    assert threading.active_count() <= before + MAX_CONNECTIONS
    assert idle[0].recv(1) == b"", "the first ones after a while"
    for one in idle:
        one.close()
    assert ask(server)[0] == 200
