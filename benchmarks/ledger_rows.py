"""What the ledger itself costs: CPU seconds per 1M tokens, and the time to place a step. Figures, no judgement.

    python benchmarks/ledger_rows.py [--tokens 1000000] [--engines 8] [--samples 1024] [--row 10]

The messages are decoded, checked, applied and answered; sockets and journal are not in it (see `benchmarks/manager`).
"""

from __future__ import annotations

import argparse
import json
import time

from polyrl.ledger import Effects, Ledger, LedgerConfig
from polyrl.sample import Group, Pool, Purpose, SamplingParams
from polyrl.wire import Assign, Deltas, Hello, PublishVersion, Submit, TrainerHello, WeightsLoaded, pack_ids, pack_rows

GROUP = 8
"""Samples per group."""
PROMPT = 200
"""Tokens per prompt."""
DELTA_S = 0.03


def fleet(engines: int, samples: int) -> Ledger:
    """A ledger whose engines serve version 0 and have room for all samples."""
    ledger = Ledger(LedgerConfig(run_epoch=1))
    ledger.from_trainer(TrainerHello(1, -1), 0.0)
    ledger.from_trainer(PublishVersion(1, 0, endpoint="tcp://publisher", public_key="key", manifest_hash=b"hash"), 0.0)
    for index in range(engines):
        name = f"engine-{index}"
        ledger.from_agent(
            name,
            Hello(1, name, pool=Pool.SPOT, max_running=samples, kv_tokens=10**9, max_context=10**9, weight_version=-1),
            0.0,
        )
        ledger.from_agent(name, WeightsLoaded(0, 1.0, load_seconds=1.0, bytes_pulled=1), 0.0)
    return ledger


def place(ledger: Ledger, samples: int, budget: int) -> tuple[list[Effects], list[float]]:
    """Submits a step at once; the outcomes until all is placed, and the CPU seconds of each."""
    sampling = SamplingParams(budget)
    prompt = pack_ids(range(PROMPT))
    groups = tuple(
        Group(g, 0, purpose=Purpose.TRAIN, prompt_ids=prompt, n=GROUP, sampling=sampling, min_version=0, max_version=0)
        for g in range(samples // GROUP)
    )
    begin = time.process_time()
    outcomes, seconds = [ledger.from_trainer(Submit(2, groups), 0.0)], [time.process_time() - begin]
    while ledger.state.queue:
        begin = time.process_time()
        outcomes.append(ledger.tick(0.0))
        seconds.append(time.process_time() - begin)
    return outcomes, seconds


def feed(ledger: Ledger, placed: list[Effects], tokens: int, row: int) -> float:
    """Streams at least `tokens` tokens in frames of one row per running sample; CPU seconds of the ledger alone."""
    numbers: dict[str, list[int]] = {}
    for engine, message in (sent for outcome in placed for sent in outcome.to_agents):
        if isinstance(message, Assign):
            numbers.setdefault(engine, []).append(message.assignment)
    column, done, position, cpu = bytes(4 * row), 0, 0, 0.0
    while done < tokens:
        for engine, mine in numbers.items():
            rows = pack_rows([(number, position, row, 0) for number in mine])
            frame = Deltas(1, 0, rows=rows, ids=column * len(mine), logprobs=column * len(mine))
            begin = time.process_time()
            ledger.from_agent(engine, frame, position / row * DELTA_S)
            cpu += time.process_time() - begin
            done += row * len(mine)
        position += row
    return cpu / done * 1e6


def main() -> None:
    """Prints one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=1_000_000)
    parser.add_argument("--engines", type=int, default=8)
    parser.add_argument("--samples", type=int, default=1024)
    parser.add_argument("--row", type=int, default=10, help="tokens per row")
    arguments = parser.parse_args()
    ledger = fleet(arguments.engines, arguments.samples)
    placed, seconds = place(ledger, arguments.samples, arguments.tokens)
    cpu = feed(ledger, placed, arguments.tokens, arguments.row)
    status = ledger.status(0.0)
    figures = {
        "cpuSecondsPerMillionTokens": round(cpu, 3),
        "placeSeconds": round(sum(seconds), 4),
        "slices": len(seconds),
        "longestSliceSeconds": round(max(seconds), 4),
        "bytesPerToken": round(status.delta_bytes / status.tokens.generated, 2),
    }
    print(json.dumps(vars(arguments) | figures))


if __name__ == "__main__":
    main()
