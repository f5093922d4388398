"""The agent beside each engine: dials the manager, generates what it is assigned, pulls weights, leaves in good order.

    tokens        pure: what was generated, sent, kept; what to send next
    conversation  greets, listens and tells, over one link after the other
    link          one connection to the manager
    cut           the same, with a cut that a drill can make
    generating    reads the engine's streams into `tokens`
    versions      pulls announced weight versions and has the engine load them
    app           the agent itself: messages in, actions out

Read next: `app`.
"""
