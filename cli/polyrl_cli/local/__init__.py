"""A run as processes on this machine: the runner, its fleet of processes, its folder."""
