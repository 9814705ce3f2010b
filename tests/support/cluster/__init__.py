"""A private Slurm cluster for tests: real daemons on this machine, several nodes, accounts, preemption. Needs root."""

from tests.support.cluster.cluster import Cluster
from tests.support.cluster.errors import ClusterError
from tests.support.cluster.spec import ClusterSpec

__all__ = ["Cluster", "ClusterError", "ClusterSpec"]
