"""The agent beside each engine: dials the manager, generates what it is assigned, pulls weights, leaves in good order.

    app           the agent itself: messages in, actions out
    conversation  greets, receives and sends, over one link after the other
    link          one connection to the manager, which an injected fault can partition
    protocol      pure: which messages count, what was generated, sent and kept, what to send next
    generating    reads the engine's streams into the protocol's token book
    __main__      `python -m polyrl_rollout.agent`: files and flags in, an exit code out

Above it are the manager and the fleet; below it `engines.port` and `weights`. Tests drive `app.Agent` on a fake engine.
"""
