"""A further machine of the learner for `machines`: what another pod's process does of weights, until its input ends."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

from polyrl.keys import TrainerKeys, read_keys
from polyrl.wire.sealing import LastingKeys
from polyrl_trainer.backends.fsdp.heartbeat import SILENT_S, RankHeartbeat
from polyrl_trainer.backends.fsdp.pods.link import PodLink
from polyrl_trainer.backends.fsdp.pods.messages import HelloMessage
from polyrl_trainer.backends.fsdp.pods.shares import ShareAnswers
from polyrl_trainer.weights.share import ShareServer


def main(key_file: Path, first: tuple[str, int], host: str, pod: int) -> None:
    keys = read_keys(TrainerKeys, key_file)
    dial = partial(PodLink.dial, first, LastingKeys.of(keys.secret_key, keys.public_key, keys.public_key))
    share, link, heartbeat = ShareServer(key_file, f"tcp://{host}:*"), dial(), RankHeartbeat(SILENT_S)
    link.send(HelloMessage(pod))
    link.next()
    heartbeat.add("the first machine", link, lambda _: None)
    link.listen(lambda _: None, lambda _: None)
    answers = ShareAnswers(dial, pod, share)
    sys.stdin.read()
    answers.close()


if __name__ == "__main__":
    where, _, port = sys.argv[2].rpartition(":")
    main(Path(sys.argv[1]), (where, int(port)), sys.argv[3], int(sys.argv[4]))
