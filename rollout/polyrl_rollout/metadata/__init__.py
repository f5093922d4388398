"""What a cloud tells a machine about its own end, asked from inside the machine.

    clouds     the metadata services of AWS, Google Cloud and Azure, and what their answers mean; no socket, no clock
    watcher    polls one of them over HTTP until there is a notice; the agent drains then

The agent's `__main__` imports `watcher`; nothing else of the package is needed outside it.
"""
