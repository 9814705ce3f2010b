"""The Slurm tier: one real cluster for all its tests, started by the first that asks for it and always taken down."""

from __future__ import annotations

import os
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

from tests.support.cluster import AS_ROOT, Cluster, ClusterError, ClusterSpec

RATE_LIMIT_VARIABLE = "ROLLMILL_TEST_SLURM_RATE_LIMIT"
"""`rl_bucket_size=40,rl_refill_rate=4` runs the tier on a controller that refuses a user's calls beyond that."""
_running: list[Cluster] = []
_left_out: list[str] = []


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "root: takes two users of this machine, or what only root may do")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """A test's time is its own: the cluster's start and end, beside other tests' load, are not in it.

    An ordinary user's cluster has that one user: what takes two is left out, and named at the session's end.
    """
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(480, func_only=True))
    left_out = [] if AS_ROOT else [item for item in items if item.get_closest_marker("root") is not None]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]
        _left_out.extend(item.name for item in left_out)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if _left_out:
        terminalreporter.write_line(f"Slurm tests that need root, not run: {', '.join(_left_out)}")


@pytest.fixture(scope="session")
def shared_cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """Five cpu nodes and two gpu nodes, with accounting."""
    try:
        cluster = Cluster(ClusterSpec(rate_limit=os.environ.get(RATE_LIMIT_VARIABLE, "")))
        cluster.up()
    except ClusterError as error:
        pytest.fail(str(error), pytrace=False)
    _running.append(cluster)
    try:
        yield cluster
    finally:
        _running.remove(cluster)
        cluster.down(clear=not request.session.testsfailed)


@pytest.fixture
def cluster(shared_cluster: Cluster) -> Iterator[Cluster]:
    """The tier's cluster, without jobs and with all nodes idle; what the test left is ended afterwards."""
    shared_cluster.settle()
    yield shared_cluster
    shared_cluster.settle()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Show the daemons' last lines with a failure."""
    report = yield
    if report.failed and report.when == "call":
        report.sections += [("Slurm's logs", cluster.tails()) for cluster in _running]
    return report
