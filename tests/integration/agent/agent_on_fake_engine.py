"""An agent process on the fake engine.

python agent_on_fake_engine.py KEYS ENDPOINT EPOCH NAME TOKENS_PER_SECOND [PRESET URL]

The last two when it is to watch the metadata of that preset's cloud.
"""

from __future__ import annotations

import asyncio
import sys
from functools import partial
from pathlib import Path

from polyrl import parent_death_signal
from polyrl.keys import AgentKeys, read_keys
from polyrl.sample import Pool
from polyrl_rollout.agent.__main__ import run_agent
from polyrl_rollout.agent.conversation import AgentSettings
from polyrl_rollout.metadata import CLOUDS, MetadataWatcher
from polyrl_rollout.testing.fake_engine import FakeEngine
from polyrl_rollout.weights.staging import Staging

if __name__ == "__main__":
    parent_death_signal.hold()
    key_file, endpoint, run_epoch, name, speed, *cloud = sys.argv[1:]
    keys = read_keys(AgentKeys, Path(key_file))
    settings = AgentSettings(
        lambda: endpoint, keys, run_epoch=int(run_epoch), engine=name, pool=Pool.SPOT, drain_s=3.0, seed=0
    )
    engine = FakeEngine(tokens_per_second=float(speed))
    watch = partial(MetadataWatcher, CLOUDS[cloud[0]](), cloud[1]) if cloud else None
    sys.exit(asyncio.run(run_agent(settings, engine, engine.capacity, Staging("agent-processes", name), watch)))
