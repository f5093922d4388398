"""The engines behind the port: embedded for CPUs, SGLang for everything else.

Read next: `choice`, `embedded`, `sglang`.
"""
