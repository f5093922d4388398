"""What must hold between fields of a manifest, and which changes a stored one refuses.

    rule            one rule: a Python predicate, the same in CEL, and one sentence for both
    between_fields  the rules in one list; `broken_rules` is what pydantic asks
    evaluation      those of evaluations
    transitions     changes that only a cluster can see

A property test proves that a rule's Python and its CEL agree.
"""
