"""Receivers that join at once behind the publisher's slow link: how often it sends the version, and when all have it.

    sudo python benchmarks/weights/joiners.py --joiners 8 --megabytes 256 --megabits 1000

Every process has a network namespace of its own, joined by a bridge, and what it sends is shaped by tc's tbf to that
rate. The same version goes out three times: to each from the publisher alone (`star`), by the exchange (`exchange`),
and by the exchange while one receiver is killed after another at random moments, each followed by a new one
(`exchangeWithDeaths`). `copies` is what left the publisher's interface, headers and seals included, over the version's
bytes; `ideal` is one copy over its link. All processes share this machine's cores: `cpuSeconds` says what they used.
The last line is one JSON object. Needs root, for the namespaces, which are removed again.

With `--behind-nat N` the last N receivers are each behind a router of their own, which translates their addresses: the
manager knows the router's, and nobody can dial them. Before anything is announced they have OFFERS_S to offer.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import resource
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
from polyrl.wire.roster import Roster
from polyrl_operator.secret import write_run_keys
from polyrl_rollout.weights.peers.offers import UNDIALLED_S

DEADLINE_S: Final = 280.0
"""Of one of the three ways."""
END_S: Final = 20.0
PROGRAMS: Final = Path(__file__).parent / "processes"
OFFERS_S: Final = UNDIALLED_S + 5.0
"""As long as an engine starts at least."""
PUBLISHER: Final = 1
"""Number of its host; receivers have the next ones."""


def ip(*words: str) -> str:
    argv = ["ip", *words]
    return subprocess.run(argv, check=True, capture_output=True, text=True, timeout=20).stdout


class Network:
    """Hosts on one bridge; the names hold this process's number, so that two runs do not meet."""

    def __init__(self, hosts: int, megabits: int, behind_nat: int = 0) -> None:
        """`behind_nat`: of the last ones, so many."""
        self._name, self._hosts = f"plj{os.getpid() % 10000}", hosts
        self._translated = range(hosts + 1 - behind_nat, hosts + 1)
        try:
            self._make(megabits)
        except BaseException:
            self.close()
            raise

    def host(self, number: int) -> str:
        return f"10.99.0.{number}"

    def within(self, number: int, *argv: str) -> list[str]:
        inner = "-inner" if self.is_translated(number) else ""
        return ["ip", "netns", "exec", f"{self._namespace(number)}{inner}", *argv]

    def is_translated(self, number: int) -> bool:
        return number in self._translated

    def sent(self, number: int) -> int:
        """Bytes that left the host."""
        links = json.loads(ip("-n", self._namespace(number), "-s", "-j", "link", "show", "dev", "eth0"))
        return int(links[0]["stats64"]["tx"]["bytes"])

    def close(self) -> None:
        for number in range(self._hosts + 1):
            for name in (f"{self._namespace(number)}-inner", self._namespace(number)):
                subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)

    def _namespace(self, number: int) -> str:
        return f"{self._name}-{number}"

    def _make(self, megabits: int) -> None:
        bridge = self._namespace(0)
        ip("netns", "add", bridge)
        ip("-n", bridge, "link", "add", "bridge", "type", "bridge")
        ip("-n", bridge, "link", "set", "bridge", "up")
        for number in range(1, self._hosts + 1):
            own = self._namespace(number)
            ip("netns", "add", own)
            ip("-n", own, "link", "add", "eth0", "type", "veth", "peer", "name", f"h{number}", "netns", bridge)
            ip("-n", bridge, "link", "set", f"h{number}", "master", "bridge", "up")
            ip("-n", own, "addr", "add", f"{self.host(number)}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                ip("-n", own, "link", "set", device, "up")
            shape = ["tc", "qdisc", "add", "dev", "eth0", "root", "tbf", "rate", f"{megabits}mbit"]
            ip("netns", "exec", own, *shape, "burst", "256kb", "latency", "50ms")
            if self.is_translated(number):
                self._put_behind(own)

    def _put_behind(self, router: str) -> None:
        """A host of its own behind that one, which is a router then."""
        inner = f"{router}-inner"
        ip("netns", "add", inner)
        ip("-n", inner, "link", "add", "eth0", "type", "veth", "peer", "name", "inner", "netns", router)
        ip("-n", inner, "addr", "add", "10.98.0.2/24", "dev", "eth0")
        ip("-n", router, "addr", "add", "10.98.0.1/24", "dev", "inner")
        for namespace, device in ((inner, "lo"), (inner, "eth0"), (router, "inner")):
            ip("-n", namespace, "link", "set", device, "up")
        ip("-n", inner, "route", "add", "default", "via", "10.98.0.1")
        ip("netns", "exec", router, "sysctl", "-qw", "net.ipv4.ip_forward=1")
        ip("netns", "exec", router, "iptables", "-t", "nat", "-A", "POSTROUTING", "-o", "eth0", "-j", "MASQUERADE")


class Joiner:
    """A receiver in a process and on a host of its own."""

    def __init__(self, network: Network, number: int, name: str, keys: Path, *, exchanges: bool) -> None:
        self.name, self.ready_at, self.result = name, 0.0, dict[str, Any]()
        self._host = network.host(number)
        bound = "0.0.0.0" if network.is_translated(number) else self._host
        own = [sys.executable, str(PROGRAMS / "joiner.py"), str(keys), name, bound]
        self._argv = network.within(number, *own, *([] if exchanges else ["--alone"]))

    async def start(self) -> wire.Peer:
        pipe = asyncio.subprocess.PIPE
        self.process = await asyncio.create_subprocess_exec(*self._argv, stdin=pipe, stdout=pipe)
        known = await self._line()
        endpoint = f"tcp://{self._host}:{known['port']}" if known["port"] else ""
        return wire.Peer(self.name, bytes.fromhex(known["key"]), endpoint)

    def send(self, message: wire.ToAgent) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(wire.encode(message).hex().encode() + b"\n")

    async def wait(self, receipt: bytes) -> None:
        self.result = await self._line()
        self.ready_at = time.monotonic()
        if self.result["receipt"] != receipt.hex():
            raise RuntimeError(f"{self.name} has something else than what was published")

    async def end(self) -> None:
        """With its memory given back, which one that is killed leaves to who starts next."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            await asyncio.wait_for(self.process.wait(), END_S)
        except TimeoutError:
            await self.kill()

    async def kill(self) -> None:
        self.process.kill()
        await self.process.wait()

    async def _line(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = await self.process.stdout.readline()
        if not line:
            raise ConnectionResetError(f"{self.name} has ended")
        answer: dict[str, Any] = json.loads(line)
        return answer


class Fleet:
    """Receivers on hosts, and the manager's list of them."""

    def __init__(self, network: Network, keys: Path, ref: WeightsRef, *, exchanges: bool) -> None:
        self._network, self._keys, self.ref, self._exchanges = network, keys, ref, exchanges
        self._roster = Roster()
        self.joiners: dict[int, Joiner] = {}
        self.made, self.begun = 0, 0.0

    async def join(self, *numbers: int) -> None:
        """All of these start, and then pull at once."""
        new = []
        for number in numbers:
            self.made += 1
            joiner = Joiner(self._network, number, f"e{self.made}", self._keys, exchanges=self._exchanges)
            self.joiners[number] = joiner
            new.append(joiner)
        for joiner, peer in zip(new, await asyncio.gather(*(joiner.start() for joiner in new)), strict=True):
            self._roster.welcome(joiner.name, peer if self._exchanges else None)
        self._spread()
        if self._exchanges and any(map(self._network.is_translated, numbers)):
            await asyncio.sleep(OFFERS_S)
        self.begun = time.monotonic()
        for joiner in new:
            joiner.send(wire.Announce.of(self.ref))

    async def die(self, number: int) -> None:
        joiner = self.joiners[number]
        await joiner.kill()
        self._roster.remove(joiner.name)
        self._spread()

    async def close(self) -> None:
        for joiner in self.joiners.values():
            await joiner.end()

    def _spread(self) -> None:
        by_name = {joiner.name: joiner for joiner in self.joiners.values()}
        for name, message in self._roster.messages():
            by_name[name].send(message)


async def way(fleet: Fleet, network: Network, hosts: list[int], deaths: int, within_s: float) -> dict[str, Any]:
    """All join at once, so many die, each at a random moment within that time."""
    cpu, sent, begun = cpu_seconds(), network.sent(PUBLISHER), 0.0
    try:
        async with asyncio.timeout(DEADLINE_S):
            await fleet.join(*hosts)
            begun, waiting = fleet.begun, {number: wait(fleet, number) for number in hosts}
            for moment, number in death_times(hosts, deaths, within_s):
                await asyncio.sleep(max(0.0, begun + moment - time.monotonic()))
                waiting.pop(number).cancel()
                await fleet.die(number)
                await fleet.join(number)
                waiting[number] = wait(fleet, number)
            await asyncio.gather(*waiting.values())
    finally:
        await fleet.close()
    seconds = [joiner.ready_at - begun for joiner in fleet.joiners.values()]
    return {
        "lastReadySeconds": round(max(seconds), 2),
        "firstReadySeconds": round(min(seconds), 2),
        "sent": network.sent(PUBLISHER) - sent,
        "shareOfPeers": round(share_of_peers(fleet), 3),
        "deaths": fleet.made - len(hosts),
        "cpuSeconds": round(cpu_seconds() - cpu, 1),
    }


def wait(fleet: Fleet, number: int) -> asyncio.Task[None]:
    return asyncio.create_task(fleet.joiners[number].wait(fleet.ref.receipt))


def death_times(hosts: list[int], deaths: int, within_s: float) -> list[tuple[float, int]]:
    dice = random.Random(1)
    return sorted((dice.uniform(0.1, 1.0) * within_s, dice.choice(hosts)) for _ in range(deaths))


def share_of_peers(fleet: Fleet) -> float:
    results = [joiner.result for joiner in fleet.joiners.values()]
    return sum(result["fromPeers"] for result in results) / sum(result["bytes"] for result in results)


def cpu_seconds() -> float:
    """Of receivers that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


async def measure(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    write_run_keys(folder / "keys")
    trainer, agent = (folder / "keys" / FILE_NAMES[kind] for kind in (TrainerKeys, AgentKeys))
    size, hosts = arguments.megabytes * 10**6, list(range(PUBLISHER + 1, PUBLISHER + 1 + arguments.joiners))
    ideal = size * 8 / (arguments.megabits * 1e6)
    network = Network(1 + arguments.joiners, arguments.megabits, arguments.behind_nat)
    try:
        within = tuple(network.within(PUBLISHER))
        publisher = PublisherProcess(trainer, size / 1e9, bind=f"tcp://{network.host(PUBLISHER)}:*", within=within)
        rows: dict[str, Any] = {}
        try:
            for version, name in enumerate(("star", "exchange", "exchangeWithDeaths")):
                ref, _ = await asyncio.to_thread(publisher.publish, version)
                fleet = Fleet(network, agent, ref, exchanges=name != "star")
                deaths = arguments.deaths if name == "exchangeWithDeaths" else 0
                within_s = rows["exchange"]["lastReadySeconds"] if deaths else 0.0
                row = rows[name] = await way(fleet, network, hosts, deaths, within_s)
                row["copies"] = round(row.pop("sent") / size, 3)
                row["overIdeal"] = round(row["lastReadySeconds"] / ideal, 2)
                print(json.dumps({name: row}), flush=True)
        finally:
            publisher.close()
    finally:
        network.close()
    star = rows["star"]["lastReadySeconds"] / rows["exchange"]["lastReadySeconds"]
    return {**vars(arguments), "idealSeconds": round(ideal, 2), "starOverExchange": round(star, 2), **rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--joiners", type=int, default=8)
    parser.add_argument("--megabytes", type=int, default=256, help="of the version")
    parser.add_argument("--megabits", type=int, default=1000, help="per second, of each link outwards")
    parser.add_argument("--behind-nat", type=int, default=0, help="receivers that nobody can dial")
    parser.add_argument("--deaths", type=int, default=3)
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(asyncio.run(measure(parser.parse_args(), Path(folder)))))


if __name__ == "__main__":
    main()
