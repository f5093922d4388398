"""Processes that begin with their libraries loaded: forked from one that has loaded torch and transformers once.

To import both takes 5 to 10 CPU seconds, and a run on one machine has a trainer and several engines that all do; an
engine that comes back after a preemption does it again. `multiprocessing` has a fork server too, which speaks pickle.

    whoever starts processes           a fork server (`python -m polyrl.forks`): one thread, libraries loaded
      ForkServer.fork(command) ──────>   forks twice, and the one between ends
      waits for it, ends it    <──────     the process: now a child of whoever asked

The kernel gives an orphan to its next ancestor that asks for orphans, which is whoever asked for the fork: so the tree
of processes, exit codes and parent death signals are what they are when processes are spawned; its session is the
server's, if it is given none of its own. One that starts others (an agent its engine, a trainer its ranks) gets a fork
server of its own, forked before it has threads.

Forked is only what reads its environment as the server read it while it loaded libraries (`request`); anything else is
spawned, as is everything where there is a GPU, since CUDA does not bear a fork.
"""

from polyrl.forks.client import ForkServer, OutputFiles, own_server, start
from polyrl.forks.forked import Forked

__all__ = ["ForkServer", "Forked", "OutputFiles", "own_server", "start"]
