"""Stock SGLang as an engine.

engine    requests, aborts, loads, sleep over HTTP, to a server that is a child process
launch    how that is started: command, key, port
shapes    whether weights are such as it has loaded
sums      what it adds its weights up to
stream    what /generate streams, as the port's chunks
"""
