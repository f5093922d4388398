"""Rules for whoever drives an engine that is a foreign program.

control   what an SGLang server may be ordered to do in its state, and the calls that do it
"""
