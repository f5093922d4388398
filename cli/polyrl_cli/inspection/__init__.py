"""Looks into runs, live or ended: which there are, what their models wrote, who waits for whom, what became of a
sample, whether every promise was kept.

    runs, compare         lists and comparisons, from `run_facts`
    samples               texts, found by `kept_samples`
    why, explain, check   from the journal, by `journal_reader`
"""
