"""Provides: turns one PolyRLJob into workers, as local processes or as pods, and reports. Holds no torch. Read next: `cli`."""
