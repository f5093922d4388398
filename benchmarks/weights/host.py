"""Agents of one machine that get a version at once: what leaves the publisher, how long it takes, what it costs.

    .venv/bin/python benchmarks/weights/host.py --agents 3 --megabytes 512

Each agent is a process, the publisher too, over loopback. Versions go out in turns to agents that each have a folder of
their own (`apart`) and to agents that share one (`shared`); the first two of each touch fresh memory, and do not count.
`copies` is what the agents got of the publisher over the version's bytes, `memoryCopies` what lies in their folders
over them, `seconds` until the last one has it, `cpuSeconds` of all agents and of the publisher. The last line is one
JSON object.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Final

from run import PublisherProcess

from polyrl import wire
from polyrl.keys import FILE_NAMES, AgentKeys, TrainerKeys
from polyrl.weights import WeightsRef
from polyrl_operator.secret import write_run_keys
from polyrl_rollout.weights.staging import default_base

PROGRAM: Final = Path(__file__).parent / "processes/joiner.py"
FRESH: Final = 2
"""Versions until all pages have been touched."""
END_S: Final = 20.0


class Agents:
    """Processes on this machine."""

    def __init__(self, keys: Path, count: int, *, shared: bool) -> None:
        names = [f"{'shared' if shared else 'apart'}-{number}" for number in range(count)]
        self._processes = [
            subprocess.Popen(
                [sys.executable, PROGRAM, keys, name, "127.0.0.1", "--alone", *(["--key=shared"] if shared else [])],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for name in names
        ]
        for _ in self._answers():
            pass

    def pull(self, ref: WeightsRef) -> dict[str, float]:
        begun, line = time.monotonic(), wire.encode(wire.Announce.of(ref)).hex() + "\n"
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write(line)
            process.stdin.flush()
        answers = self._answers()
        if {answer["receipt"] for answer in answers} != {ref.receipt.hex()}:
            raise RuntimeError("what was pulled is not what was published")
        return {
            "seconds": time.monotonic() - begun,
            "bytes": sum(answer["bytes"] for answer in answers),
            "agents": sum(answer["cpu"] for answer in answers),
            "memory": memory_bytes(),
        }

    def close(self) -> None:
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.close()
        for process in self._processes:
            process.wait(END_S)

    def _answers(self) -> list[dict[str, Any]]:
        answers = []
        for process in self._processes:
            assert process.stdout is not None
            answers.append(json.loads(process.stdout.readline()))
        return answers


def memory_bytes() -> int:
    """In all folders of these agents; a file counts once."""
    files = {path.stat().st_ino: path.stat() for path in default_base().glob("polyrl-joiners-*/v*/*")}
    return sum(found.st_blocks * 512 for found in files.values())


def measure(keys: Path, agents: int, size: int, rounds: int) -> dict[str, Any]:
    result: dict[str, Any] = {}
    agent, trainer = (keys / FILE_NAMES[kind] for kind in (AgentKeys, TrainerKeys))
    publisher, version = PublisherProcess(trainer, size / 1e9), 0
    try:
        for way in ("apart", "shared"):
            rows, fleet = [], Agents(agent, agents, shared=way == "shared")
            for _ in range(FRESH + rounds):
                ref, _ = publisher.publish(version)
                version += 1
                before = publisher.ask("cpu")["cpu"]
                row = fleet.pull(ref)
                rows.append(row | {"publisher": publisher.ask("cpu")["cpu"] - before})
            fleet.close()
            middle = {name: statistics.median(row[name] for row in rows[FRESH:]) for name in rows[0]}
            result[way] = {
                "copies": round(middle["bytes"] / size, 2),
                "memoryCopies": round(middle["memory"] / size, 2),
                "seconds": round(middle["seconds"], 2),
                "cpuSeconds": {side: round(middle[side], 2) for side in ("agents", "publisher")},
            }
    finally:
        publisher.close()
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--agents", type=int, default=3)
    parser.add_argument("--megabytes", type=int, default=512, help="of one version")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        write_run_keys(Path(name) / "keys")
        found = measure(Path(name) / "keys", arguments.agents, arguments.megabytes * 10**6, arguments.rounds)
    print(json.dumps({**vars(arguments), **found}))


if __name__ == "__main__":
    main()
