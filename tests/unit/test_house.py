"""The house as a stranger sees it: the tree in the README, the top level, what must not be in any file."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tests.__main__ import CLUSTER, PARTS, left_out
from tests.support.tree import ROOMS, ROOT, modules, tree, written

TOP = {
    *ROOMS, "docs", "pyproject.toml", "README.md", "Makefile", "requirements.lock", "LICENSE", "CHANGELOG.md",
}  # fmt: skip


def tracked() -> list[str]:
    """What git tracks, or would."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()


def test_the_readmes_tree_is_the_tree() -> None:
    assert written((ROOT / "README.md").read_text()) == tree(), "python -m tests.support.tree writes it anew"


def test_the_top_level_is_what_was_agreed() -> None:
    top = {name.partition("/")[0] for name in tracked()}
    assert {name for name in top if not name.startswith(".")} <= TOP


def test_rooms_are_small() -> None:
    large = {
        str(p.relative_to(ROOT)): n
        for room in ROOMS
        for p in modules(room)
        if (n := len(p.read_text().splitlines())) > 350
    }
    assert large == {}


def test_every_module_says_what_it_is_for() -> None:
    named = [name for name in tracked() if name.endswith(".py") and not name.endswith("__init__.py")]
    assert [name for name in named if not (ROOT / name).read_text().startswith('"""')] == []


def test_every_test_file_is_in_one_part_and_in_one_alone() -> None:
    """tests/vllm and tests/train have commands of their own: they need environments of gigabytes."""
    files = {path for name in tracked() if (path := Path(name)).parts[0] == "tests" and path.match("test_*.py")}
    files = {path for path in files if path.parts[1] not in {"vllm", "train"}}
    for path in files:
        parts = [
            part for part in (CLUSTER, *PARTS) if path.is_relative_to(part)
            and not any(path.is_relative_to(option.removeprefix("--ignore=")) for option in left_out(part))
        ]  # fmt: skip
        assert len(parts) == 1, f"{path} is in {parts}"
    assert {path.parts[1] for path in files} == {"slurm", "unit", "e2e", "integration"}
