"""docs/extending.md's example on the cluster: a task and an agent outside the repository, on every pool's own node."""

from __future__ import annotations

from stages.shards import ShardReader
from tests.integration.grading.test_extending import example
from tests.slurm.jobs import ClusterRun
from tests.support.cluster import Cluster


def test_a_task_and_an_agent_outside_the_repository_are_rolled_out(cluster: Cluster) -> None:
    mine = cluster.share("alice") / "mine"
    package = mine / "my_pkg"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(example())
    own = ("task._target_=my_pkg.Letters", "agent._target_=my_pkg.Counter", f"import_path=[{mine}]", "task.limit=null")
    run = ClusterRun(cluster, "extending", "placement=het", *own, "group_size=2", "sandbox=bubblewrap")
    run.expected = 6
    run.submit()
    run.await_state("completed")
    run.exactly_once()
    rows = list(ShardReader(run.place))
    assert {row["reward"] for row in rows} == {1.0}
    assert {(row["task"], row["grading"]) for row in rows} == {("letters", "trusted")}
    assert all(sum(row["loss_mask"]) > 0 for row in rows), "the model was asked"
    assert len({node for row in rows for node in row["nodes"]}) > 1
    run.await_slurm(run.job, "COMPLETED")
    run.gone()
