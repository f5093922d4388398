"""Rules for whoever drives an engine that is a foreign program.

control     what an SGLang server may be ordered to do in its state, and the calls that do it
hand_over   whether the learner needs its GPU alone, or fits beside an engine
"""
