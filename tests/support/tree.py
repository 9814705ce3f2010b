"""The README's tree: every module with its docstring's first line. `python -m tests.support.tree` writes it anew."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2]
ROOMS = ("launch", "workflows", "stages", "sandbox", "conf", "tests")
SENTENCES = {
    "launch": "outside the allocation: compose, check, start, watch, report",
    "workflows": "what is rolled out: collect; agents, tools, tasks, policies, export",
    "stages": "process bodies inside the allocation: router, workers, replicas; ledger, journal, shards, token stream",
    "sandbox": "what an agent may touch: namespaces, layers, terminal, files",
    "conf": "data: the Hydra tree and its typed schema",
    "tests": "unit/ integration/ e2e/ bench/ and support/ (fakes, fault injection, runs by the real command)",
}
BEGIN, END = "<!-- tree -->\n```\n", "```\n<!-- /tree -->"


def first_line(path: Path) -> str:
    """The first line of a module's docstring, without its full stop."""
    docstring = ast.get_docstring(ast.parse(path.read_text())) or ""
    return docstring.partition("\n")[0].rstrip(".")


def modules(room: str) -> list[Path]:
    """The modules of a room that say something; tests are named by their folders alone."""
    if room == "tests":
        return []
    found = [path for path in (ROOT / room).rglob("*.py") if first_line(path)]
    return sorted(found, key=lambda path: (len(path.relative_to(ROOT).parts) > 2, path))


def tree() -> str:
    """The whole tree as text."""
    lines = []
    for room in ROOMS:
        lines.append(f"{room + '/':<34} {SENTENCES[room]}")
        lines += [f"  {path.relative_to(ROOT / room).as_posix():<32} {first_line(path)}" for path in modules(room)]
    return "\n".join(lines) + "\n"


def written(readme: str) -> str:
    """The tree as the README has it."""
    return readme.partition(BEGIN)[2].partition(END)[0]


def main() -> None:
    """Write the tree into README.md."""
    path = ROOT / "README.md"
    readme = path.read_text()
    path.write_text(readme.replace(BEGIN + written(readme) + END, BEGIN + tree() + END))


if __name__ == "__main__":
    main()
