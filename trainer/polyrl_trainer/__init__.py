"""Learns: SFT and RL loops, losses, backends, the client to the manager, the weight publisher. Read next: `client`."""
