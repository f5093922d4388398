"""Stock SGLang as an engine.

engine    the server's start as a child process; requests, aborts, loads over HTTP
stream    what /generate streams, as the port's chunks
"""
