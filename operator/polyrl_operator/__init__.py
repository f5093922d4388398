"""Provides: turns one PolyRLJob into workers (processes or pods), and reports. Holds no torch. Read next: `cli`."""
