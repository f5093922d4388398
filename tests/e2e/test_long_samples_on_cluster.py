"""Samples that take far longer than a notice: they move, with every token that was generated.

A model with random weights and a large alphabet hardly ever ends a response by itself, so that each takes its whole
budget: many seconds, beside notices of two.
"""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest
from cluster.port import Cluster
from cluster.tools import Kubectl
from on_cluster.audit import Report, assert_nothing_lost, read_report
from on_cluster.faults import FAULTS, Hit, Victims
from on_cluster.job import Run, short_job

LETTERS = 400
"""Of the alphabet, beside digits; the chance of an end at each token is one in as many."""
FIRST_LETTER = 0x4E00
BUDGET = 384
"""Tokens of a response at most."""
CONTEXT = 512
DRAIN_S = 2
STEPS = 14
PROMPTS = 8
SAMPLES = 8
NOTICES = ("delete_gracefully", "evict")
LOSSES = ("kill_engine", "delete_at_once")

pytestmark = pytest.mark.timeout(1800)


def long_job(name: str) -> dict[str, Any]:
    job = short_job(name, STEPS)
    recipe, rollout = job["spec"]["recipe"], job["spec"]["rollout"]
    alphabet = "0123456789>" + "".join(chr(FIRST_LETTER + letter) for letter in range(LETTERS))
    recipe["mode"] = "rl"
    del recipe["sft"]
    recipe["model"]["tokenizer"]["alphabet"] = alphabet
    recipe["model"]["config"] |= {"vocab_size": len(alphabet) + 3, "max_position_embeddings": CONTEXT}
    recipe["sampling"] |= {"maxNewTokens": BUDGET, "samplesPerPrompt": SAMPLES}
    recipe["algorithm"] |= {"promptsPerStep": PROMPTS, "miniBatchPrompts": PROMPTS, "minMicroBatchSamples": SAMPLES}
    recipe["evaluation"] = {"everySteps": STEPS, "maxSamples": SAMPLES}
    rollout["engine"] |= {"maxContext": CONTEXT, "kvTokens": CONTEXT * PROMPTS * SAMPLES}
    rollout["drainSeconds"] = DRAIN_S
    # Its window closes in mid-sample by design; what it makes after that is not waited for.
    job["spec"]["trainer"]["reservedEngine"] = False
    return job


def survive(name: str, faults: tuple[str, ...], bed: Cluster, kubectl: Kubectl) -> tuple[list[Hit], Report]:
    run = Run(kubectl, long_job(name))
    run.apply()
    hits = []
    for fault in faults:
        run.await_step(run.step() + 1)
        run.await_whole()
        hits.append(FAULTS[fault](Victims(bed, kubectl, run=run)))
        run.await_whole(without=hits[-1].engines)
    run.await_complete()
    report = read_report(kubectl, run.name)
    causes = Counter(move["cause"] for move in report["moves"])
    print(json.dumps({"causes": causes, "again": report["tokensAgain"], **report["samples"]}))
    assert_nothing_lost(report)
    return hits, report


def test_a_notice_costs_no_token(whole_bed: Cluster, kubectl: Kubectl, operator: None) -> None:
    hits, report = survive("notices", NOTICES, whole_bed, kubectl)
    for hit in hits:
        moved = [move for move in report["moves"] if move["from"] in hit.engines]
        print(hit, [(move["tokens"], round(move["againAt"] - move["at"], 3)) for move in moved])
        assert moved, "nothing was under way"
        assert sum(move["tokens"] for move in moved) > 0
    assert report["tokensAgain"] == 0


def test_a_loss_costs_what_was_not_sent(whole_bed: Cluster, kubectl: Kubectl, operator: None) -> None:
    hits, report = survive("losses", LOSSES, whole_bed, kubectl)
    for hit in hits:
        moved = [move for move in report["moves"] if move["from"] in hit.engines]
        print(hit, [(move["tokens"], round(move["againAt"] - hit.at, 3)) for move in moved])
        assert moved, "nothing was under way"
        assert sum(move["tokens"] for move in moved) > 0
