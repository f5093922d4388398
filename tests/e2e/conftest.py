"""What the tests on a cluster share: the bed, a namespace each, the installed chart, and a bed made whole again.

A verb that the cluster may not do skips the test, with the reason; a bed that breaks is an error, never a pass.
"""

from __future__ import annotations

import secrets
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
from cluster.choice import choose_cluster
from cluster.port import POOL_LABEL, Cluster, Unsupported
from cluster.tools import Kubectl
from on_cluster import release
from on_cluster.faults import mend

HERE = Path(__file__).parent
DELETE_S = 180


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """All that lies here needs a cluster."""
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.e2e)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, None, None]:
    """What this cluster may not do is skipped aloud."""
    try:
        return (yield)
    except Unsupported as cannot:
        pytest.skip(str(cannot))


@pytest.fixture(scope="session")
def bed() -> Cluster:
    """The cluster; `make cluster-up` has made it, or KUBECONFIG names it."""
    cluster = choose_cluster()
    if not cluster.kubeconfig.exists() or not Kubectl(cluster.kubeconfig).answers():
        pytest.fail(f"no cluster answers at {cluster.kubeconfig}: make cluster-up, or name one by KUBECONFIG")
    return cluster


@pytest.fixture
def kubectl(bed: Cluster) -> Iterator[Kubectl]:
    """In a namespace of the test's own, where Pod Security `restricted` is enforced; gone afterwards."""
    name = f"e2e-{secrets.token_hex(3)}"
    Kubectl(bed.kubeconfig)("create", "namespace", name)
    mine = Kubectl(bed.kubeconfig, name)
    mine("label", "namespace", name, "pod-security.kubernetes.io/enforce=restricted")
    yield mine
    mine("delete", "namespace", name, f"--timeout={DELETE_S}s", timeout_s=DELETE_S)


@pytest.fixture
def operator(bed: Cluster) -> None:
    """The chart is installed with this checkout's images."""
    release.install(bed.kubeconfig)


@pytest.fixture
def whole_bed(bed: Cluster, kubectl: Kubectl) -> Iterator[Cluster]:
    """The bed, whose nodes are there and schedulable again when the test is over, whatever it did to them; only then
    does the namespace go, for pods of a dead node end when it is back or removed."""
    everywhere = Kubectl(bed.kubeconfig)
    before = {
        n["metadata"]["name"]: n["metadata"]["labels"][POOL_LABEL] for n in everywhere.items("nodes", "-l", POOL_LABEL)
    }
    yield bed
    for name, pool in before.items():
        mend(bed, name, pool)
