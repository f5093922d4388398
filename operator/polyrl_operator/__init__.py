"""Provides: turns one PolyRLJob into workers, local processes or pods, and reports. Holds no torch. Read next: `cli`."""
