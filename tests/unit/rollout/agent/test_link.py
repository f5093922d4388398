"""Frames that an agent cannot read are dropped, counted and logged, ever more rarely."""

from __future__ import annotations

import zmq
from structlog.testing import capture_logs

from polyrl_rollout.agent.link import AgentLink


async def test_frames_of_a_manager_that_cannot_be_read_are_counted_and_logged() -> None:
    context = zmq.Context()
    peer, socket = context.socket(zmq.DEALER), context.socket(zmq.DEALER)
    peer.bind("inproc://manager")
    socket.connect("inproc://manager")
    link = AgentLink(socket, socket.get_monitor_socket(zmq.EVENT_DISCONNECTED))
    for _ in range(3):
        peer.send(b"\xc1")
    with capture_logs() as lines:
        link._read()
    link.close()
    context.destroy(linger=0)
    assert link.dropped_frames == 3
    assert [line["count"] for line in lines] == [1, 2]
