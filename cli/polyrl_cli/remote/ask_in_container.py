"""Run inside a job's manager container, by its Python and nothing else: asks the manager, writes its answers on stdout.

The token is read from the manager's own key file and goes to the manager alone, over the loopback: it never leaves the
pod, and whoever may run this could read the file anyway. Either one answer as it is, or a line of JSON for each change.
"""

from __future__ import annotations

import http.client
import json
import ssl
import sys
import time
from pathlib import Path
from typing import Any

ANSWER_S = 30.0
WAIT_S = 10
"""How long one question waits for a change; after it something is written all the same, so that this ends with its
reader."""


class OwnManager:
    """The manager beside this process."""

    def __init__(self, order: dict[str, Any]) -> None:
        keys = Path(order["keys"])
        self._token = json.loads((keys / "manager.key").read_text())["httpToken"]
        # Its certificate names a Service, and is renewed while it runs; the run's authority signs no other.
        self._tls = ssl.create_default_context(cafile=keys / "ca.crt")
        self._tls.check_hostname = False
        self._port = order["port"]

    def get(self, path: str) -> bytes:
        """The answer's body. Ends this process with its sentence where it refuses."""
        connection = http.client.HTTPSConnection("127.0.0.1", self._port, timeout=ANSWER_S, context=self._tls)
        try:
            connection.request("GET", path, headers={"Authorization": f"Bearer {self._token}"})
            answer = connection.getresponse()
            body = answer.read()
        except OSError as error:
            sys.exit(f"the manager does not answer: {error}")
        finally:
            connection.close()
        if answer.status != 200:
            sys.exit(f"the manager answered {answer.status} to {path}")
        return body


def main(order: dict[str, Any]) -> None:
    """`order`: keys, port, and either a path to get, or for how many seconds to follow (0: one line)."""
    manager, out = OwnManager(order), sys.stdout.buffer
    if "path" in order:
        out.write(manager.get(order["path"]))
        out.flush()
        return
    seq, after, ends_at = -1, 0.0, time.monotonic() + order["follow"]
    while True:
        wait = WAIT_S if seq >= 0 else 0
        status = json.loads(manager.get(f"/v1/status?since={seq}&waitSeconds={wait}"))
        history = json.loads(manager.get(f"/v1/history?after={after}"))
        waits = json.loads(manager.get("/v1/waits"))
        line = {"status": status, "history": history, "waits": waits}
        out.write(json.dumps(line).encode() + b"\n")
        out.flush()
        seq = status["seq"]
        after = max([after, *(one["time"] for part in ("rows", "events") for one in history[part])])
        if status["finished"] or time.monotonic() >= ends_at:
            return
        time.sleep(order["pause"])


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
