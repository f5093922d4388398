"""The engines behind the port.

    port        what an agent needs of an engine, the errors it may raise, the checks that all share
    streams     token streams with one consumer each, and the deadline for an engine's silence
    child       an engine's process, seen from its parent
    embedded/   transformers' continuous batching in a process of its own, for CPUs
    sglang/     a stock SGLang server over HTTP, for everything else

The agent imports `port` only; `choose_engine` in its `__main__` makes the engine that a manifest names.
"""
