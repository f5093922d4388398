"""How a job's look is told: conditions, status, Events, money.

Refuses to hold: decisions (see `fleet`). Read next: `judged`, then `status_of`.
"""
