"""Who talks to the manager.

router        its ROUTERs: who may connect, frames in and out
connections   what agents' connections have brought that is no whole frame yet
sessions      who may say what: the agents, and the trainer
"""
