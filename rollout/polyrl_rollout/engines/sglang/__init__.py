"""Stock SGLang as an engine.

engine    the port's side: requests, aborts, loads over HTTP
server    the child process: its command line, its start, what it cannot load
stream    what /generate streams, as the port's chunks
"""
