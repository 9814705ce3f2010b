"""A private Slurm cluster for tests: real daemons on this machine, several nodes, accounts, preemption."""

from tests.support.cluster.cluster import Cluster
from tests.support.cluster.errors import ClusterError
from tests.support.cluster.owner import AS_ROOT, account_of
from tests.support.cluster.spec import ClusterSpec

ALICE = account_of("alice")
"""The tests' first user as Slurm names it."""

__all__ = ["ALICE", "AS_ROOT", "Cluster", "ClusterError", "ClusterSpec"]
