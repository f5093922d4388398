"""What a run's own turns and steps say, as folds that the state holds.

    lengths   how many tokens a turn will still have
    usage     what engines did for each step

Imported by `state` and `apply`; imports the status's values.
"""
