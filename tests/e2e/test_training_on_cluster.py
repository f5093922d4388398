"""The example on a cluster, as its README tells: `kubectl apply -k`, wait, and the result of the laptop's run."""

from __future__ import annotations

import pytest
from cluster.tools import Kubectl
from on_cluster.audit import assert_nothing_lost, read_report
from on_cluster.job import EXAMPLE

NAME = "sort-digits"
COMPLETE_S = 1200.0
EXACT_MATCH = 0.85
"""What the main job's test asks of a laptop."""


@pytest.mark.timeout(COMPLETE_S + 300)
def test_apply_k_trains_to_the_result_of_the_laptop(kubectl: Kubectl, operator: None) -> None:
    kubectl("apply", "-k", str(EXAMPLE))
    complete = ("wait", "prl/sort-digits", "--for=condition=Complete", f"--timeout={COMPLETE_S:g}s")
    kubectl(*complete, timeout_s=COMPLETE_S)
    print(kubectl("get", "prl", NAME))
    report = read_report(kubectl, NAME)
    assert_nothing_lost(report)
    print(report["result"], report["samples"])
    assert report["result"]["exactMatch"]["afterRl"] >= EXACT_MATCH
