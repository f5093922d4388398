"""A version of a learner of one machine, and of several, to receivers that ask the learner alone: when all have it.

    sudo python benchmarks/weights/machines.py --machines 1 2 4 --receivers 4 --megabytes 128 --megabits 200

Every process has a network namespace of its own, joined by a bridge, and what it sends is shaped by tc's tbf to that
rate (see `joiners`). `sentMegabytes` is what left each machine of the learner while receivers pulled, `ratio` the
seconds of one machine over those of most, in the same run. Needs root. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

from joiners import DEADLINE_S, END_S, PROGRAMS, Fleet, Network
from run import PublisherProcess

from polyrl.keys import FILE_NAMES, AgentKeys, TrainerKeys
from polyrl_operator.secret import write_run_keys

MEETING_PORT: Final = 5004
PULLS: Final = 2
"""Of each number of machines; the fastest counts, so that processes are warm."""


def further(network: Network, number: int, keys: Path) -> subprocess.Popen[bytes]:
    """The machine of that number, from 2."""
    own = [sys.executable, str(PROGRAMS / "machine.py"), str(keys), f"{network.host(1)}:{MEETING_PORT}"]
    argv = network.within(number, *own, network.host(number), str(number - 1))
    return subprocess.Popen(argv, stdin=subprocess.PIPE)


def end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait(END_S)


async def pulls(network: Network, machines: int, hosts: list[int], folder: Path, megabytes: int) -> dict[str, Any]:
    trainer, agent = (folder / "keys" / FILE_NAMES[kind] for kind in (TrainerKeys, AgentKeys))
    rows = []
    with ExitStack() as stack:
        publisher = PublisherProcess(
            trainer,
            megabytes / 1e3,
            bind=f"tcp://{network.host(1)}:*",
            within=tuple(network.within(1)),
            pods=(machines - 1, MEETING_PORT) if machines > 1 else None,
        )
        stack.callback(publisher.close)
        publisher.ask("cpu")  # it listens
        for number in range(2, machines + 1):
            stack.callback(end, further(network, number, trainer))
        for version in range(PULLS):
            ref, _ = await asyncio.to_thread(publisher.publish, version)
            sent = [network.sent(number) for number in range(1, machines + 1)]
            fleet = Fleet(network, agent, ref, exchanges=False)
            try:
                async with asyncio.timeout(DEADLINE_S):
                    await fleet.join(*hosts)
                    begun = time.monotonic()
                    await asyncio.gather(*(fleet.joiners[host].wait(ref.receipt) for host in hosts))
                seconds = max(joiner.ready_at for joiner in fleet.joiners.values()) - begun
            finally:
                await fleet.close()
            left = [network.sent(number) - was for number, was in zip(range(1, machines + 1), sent, strict=True)]
            rows.append({"seconds": round(seconds, 2), "sentMegabytes": left})
    best = min(rows, key=lambda row: row["seconds"])
    return {**best, "sentMegabytes": [round(one / 1e6) for one in best["sentMegabytes"]]}


async def measure(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    write_run_keys(folder / "keys")
    most = max(arguments.machines)
    hosts = list(range(most + 1, most + 1 + arguments.receivers))
    network = Network(most + arguments.receivers, arguments.megabits)
    rows: dict[str, Any] = {}
    try:
        for machines in arguments.machines:
            rows[str(machines)] = await pulls(network, machines, hosts, folder, arguments.megabytes)
            print(json.dumps({machines: rows[str(machines)]}), flush=True)
    finally:
        network.close()
    least, last = (rows[str(number)]["seconds"] for number in (min(arguments.machines), most))
    ideal = arguments.megabytes * 8 * arguments.receivers / arguments.megabits
    return {**vars(arguments), "idealSecondsOfOne": ideal, "rows": rows, "ratio": round(least / last, 2)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--machines", type=int, nargs="+", default=[1, 2, 4], help="of the learner, in turns")
    parser.add_argument("--receivers", type=int, default=4)
    parser.add_argument("--megabytes", type=int, default=128, help="of the version")
    parser.add_argument("--megabits", type=int, default=200, help="per second, of each link outwards")
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(asyncio.run(measure(parser.parse_args(), Path(folder)))))


if __name__ == "__main__":
    main()
