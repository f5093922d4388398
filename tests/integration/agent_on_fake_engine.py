"""An agent process on the fake engine: `python agent_on_fake_engine.py KEYS ENDPOINT EPOCH NAME TOKENS_PER_SECOND`."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from polyrl import leash
from polyrl.keys import AgentKeys, read_keys
from polyrl.sample import Pool
from polyrl_rollout.agent.__main__ import serve
from polyrl_rollout.agent.conversation import AgentSettings
from polyrl_rollout.agent.link import ManagerAddress
from polyrl_rollout.fake_engine import FakeEngine

if __name__ == "__main__":
    leash.hold()
    key_file, endpoint, epoch, name, speed = sys.argv[1:]
    keys = read_keys(AgentKeys, Path(key_file))
    address = ManagerAddress(endpoint, keys.manager_public_key)
    settings = AgentSettings(lambda: address, keys, int(epoch), name, Pool.SPOT, 3.0)
    engine = FakeEngine(tokens_per_second=float(speed))
    sys.exit(asyncio.run(serve(settings, engine, engine.info, "agent-processes")))
