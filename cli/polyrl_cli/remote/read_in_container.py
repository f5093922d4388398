"""Run inside a container of the trainer's image, by its Python and nothing else: sends a run's files on stdout.

First a line of JSON: the checkpoint's name, its seal, and the files that follow with their sizes; or, where the wanted
one is not, the names of those that were `kept`. Then the files one after another. All are opened before the first byte
goes out, so that a checkpoint which the trainer removes meanwhile is still whole; a file that grows is sent as long as
it was.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any, BinaryIO

CHUNK_BYTES = 1 << 20


def main(order: dict[str, Any]) -> None:
    """`order`: run, step (or null), leave (names within the model), beside (files of the run)."""
    run = Path(order["run"])
    seals = [(json.loads(seal.read_bytes()), seal.parent) for seal in run.glob("checkpoints/[!.]*/COMPLETE.json")]
    seals.sort(key=lambda one: (one[0].get("serial", 0), one[1]))
    wanted = [one for one in seals if order["step"] is None or one[1].name.endswith(f"-step-{order['step']:06d}")]
    if not wanted:
        print(json.dumps({"kept": [folder.name for _, folder in seals]}), flush=True)
        return
    seal, folder = wanted[-1]
    names = [name for name in seal["files"] if name.startswith("model/") and name[6:] not in order["leave"]]
    places = [(name, folder / name) for name in sorted(names)] + [(name, run / name) for name in order["beside"]]
    _send(folder.name, seal, [(name, place.open("rb")) for name, place in places if place.is_file()])


def _send(name: str, seal: dict[str, Any], opened: list[tuple[str, BinaryIO]]) -> None:
    sizes = [os.fstat(file.fileno()).st_size for _, file in opened]
    files = [[name, size] for (name, _), size in zip(opened, sizes, strict=True)]
    out = sys.stdout.buffer
    out.write(json.dumps({"checkpoint": name, "seal": seal, "files": files}).encode() + b"\n")
    for (_, file), size in zip(opened, sizes, strict=True):
        left = size
        while left:
            chunk = file.read(min(left, CHUNK_BYTES))
            if not chunk:
                sys.exit("a file became shorter while it was read")
            out.write(chunk)
            left -= len(chunk)
    out.flush()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
