"""The client to the manager: all that a trainer needs of the rollout side; imports no torch.

    client         `RolloutClient`: one call per request, streams of finished turns and dropped groups
    link           the socket: greeting, heartbeats, a new connection when one breaks
    conversation   requests that await answers, streams, and what a manager without its journal is sent again

Other packages import from `polyrl_trainer.client` only.
"""

from polyrl_trainer.client.client import CONNECT_TIMEOUT_S, MAX_MANAGER_OUTAGE_S, RolloutClient
from polyrl_trainer.client.conversation import RequestRefused

__all__ = ["CONNECT_TIMEOUT_S", "MAX_MANAGER_OUTAGE_S", "RequestRefused", "RolloutClient"]
