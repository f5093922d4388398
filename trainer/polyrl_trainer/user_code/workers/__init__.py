"""Processes that user code runs in: killed at a deadline, replaced, lower in priority than the learner.

messages       what goes between trainer and worker
process        one worker, from the trainer's side
worker_set     so many workers of one function, replaced when they end
pool           calls of a function, spread over a set
environments   conversations, each in one worker of a set
worker         the process itself
conversations  the conversations of one process
thread_use     who holds a process's thread now, which both sides read
"""
