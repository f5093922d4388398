"""How many rollouts are desired: by an autoscaler, by the user, or by the gap between generation and training.

    decision      the number of a job now, and why
    gap           what each finished step asks for, steadied so that the fleet does not flap
    step_model    how long generation takes with n engines
    prices        what a fleet costs, and how large a one a budget pays for

A row imports only from rows below it. Which pods make up that number is `fleet`'s.
"""
