"""docs/extending.md is what it says: its example, outside the repository, is rolled out by the real command."""

from __future__ import annotations

import re
from pathlib import Path

from stages.shards import ShardReader
from tests.support import runs

PAGE = Path(__file__).parents[3] / "docs" / "extending.md"


def example() -> str:
    found = re.search(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert found is not None
    return found[1]


def test_the_example_is_short() -> None:
    for part in re.split(r"\n(?=class )", example()):
        assert len([line for line in part.splitlines() if line.strip()]) <= 30


def test_a_task_and_an_agent_outside_the_repository_are_rolled_out(tmp_path: Path) -> None:
    package = tmp_path / "mine" / "my_pkg"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(example())
    given = ("task._target_=my_pkg.Letters", "task.limit=null", "group_size=2")
    own = ("agent._target_=my_pkg.Counter", f"import_path=[{tmp_path / 'mine'}]", "sandbox=bubblewrap")
    done = runs.run(tmp_path / "run", *given, *own, timeout_s=300)
    assert done.returncode == 0, done.stdout[-1500:] + done.stderr[-1500:]
    rows = list(ShardReader(tmp_path / "run"))
    assert len(rows) == 6 and {row["reward"] for row in rows} == {1.0}
    assert {(row["task"], row["grading"]) for row in rows} == {("letters", "trusted")}
    assert all(sum(row["loss_mask"]) > 0 for row in rows), "the model was asked"
