"""Five tasks in the Harbor format, written for these tests; the last one's own solution cheats."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping
from pathlib import Path

_TOML = (
    'version = "1.0"\n[metadata]\ndifficulty = "easy"\n[verifier]\ntimeout_sec = 60.0\n[agent]\ntimeout_sec = 60.0\n'
)
_SUM_TEST = """
    cd "$WHERE"
    python3 - <<'PY'
    import json, os, pathlib
    rows = [int(line) for line in pathlib.Path("data/numbers.txt").read_text().split()]
    said = pathlib.Path("sum.txt").read_text().strip() if pathlib.Path("sum.txt").is_file() else ""
    there = float(bool(said))
    right = float(said == str(sum(rows)))
    pathlib.Path("/logs/verifier/reward.json").write_text(json.dumps({"reward": right, "written": there}))
    PY
"""
_TOOL_TEST = """
    import sys, unittest
    sys.path.insert(0, "/app")
    class Words(unittest.TestCase):
        def test_counts(self):
            import tool
            self.assertEqual(tool.count("a b  c"), 3)
            self.assertEqual(tool.count(""), 0)
    if __name__ == "__main__":
        unittest.main()
"""
_CHEAT = """
    mkdir -p /logs/verifier /tests
    echo 1 > /logs/verifier/reward.txt
    echo '{"reward": 1}' > /logs/verifier/reward.json
    chmod 444 /logs/verifier/*; chmod 555 /logs/verifier
    printf '#!/bin/sh\\necho 1 > /logs/verifier/reward.txt\\n' > /tests/test.sh
    printf '#!/bin/sh\\necho 1 > /logs/verifier/reward.txt; exit 0\\n' > /tmp/forged
    chmod +x /tmp/forged
    for one in /bin/bash /usr/bin/python3 /usr/bin/grep /usr/local/bin/grep; do
      rm -f "$one"; cp /tmp/forged "$one"
    done
    (while :; do echo 1 > /logs/verifier/reward.txt; done) > /dev/null 2>&1 &
"""

TASKS: Mapping[str, Mapping[str, str]] = {
    "hello": {
        "task.toml": _TOML,
        "instruction.md": "<!-- canary 1234 -->\nWrite `Hello, world!` into /app/hello.txt.\n",
        "environment/Dockerfile": "FROM mill/base:latest\nWORKDIR /app\n",
        "tests/test.sh": """
            if grep -qx 'Hello, world!' /app/hello.txt; then
              echo 1 > /logs/verifier/reward.txt
            else
              echo 0 > /logs/verifier/reward.txt
            fi
        """,
        "solution/solve.sh": "echo 'Hello, world!' > hello.txt\n",
    },
    "sum": {
        "task.toml": _TOML + '[verifier.env]\nWHERE = "/app/work"\n',
        "instruction.md": "Add the numbers of data/numbers.txt; write the sum into sum.txt.\n",
        "environment/Dockerfile": "ARG PLACE=/app/work\nFROM mill/base\nENV KIND=sum MORE=\"a b\"\n"
        "WORKDIR $PLACE\nCOPY numbers.txt \\\n  data/\n"
        "RUN wc -l < data/numbers.txt > count.txt && test \"$KIND\" = sum\n",
        "environment/numbers.txt": "3\n4\n35\n",
        "tests/test.sh": _SUM_TEST,
        "solution/solve.sh": ". /etc/task-environment\ntest \"$MORE\" = 'a b' && test $(cat count.txt) -eq 3\n"
        "echo $(( $(paste -sd+ data/numbers.txt) )) > sum.txt\n",
    },
    "tool": {
        "task.toml": _TOML,
        "instruction.md": "count in /app/tool.py must count words.\n",
        "environment/Dockerfile": "FROM mill/base\nWORKDIR /app\nCOPY . .\n",
        "environment/tool.py": "def count(text):\n    return len(text.split(' '))\n",
        "tests/test.sh": """
            python3 /tests/test_tool.py
            if [ $? -eq 0 ]; then echo 1 > /logs/verifier/reward.txt; else echo 0 > /logs/verifier/reward.txt; fi
        """,
        "tests/test_tool.py": _TOOL_TEST,
        "solution/solve.sh": "sed -i \"s/split(' ')/split()/\" tool.py\n",
    },
    "artifact": {
        "task.toml": 'artifacts = ["/app/out"]\n' + _TOML
        .replace("[metadata]\n", "[metadata]\nartifacts_are_data = true\n")
        .replace("[verifier]\n", '[verifier]\nenvironment_mode = "separate"\n'),
        "instruction.md": "Write the square of 12 into /app/out/answer.\n",
        "environment/Dockerfile": "FROM mill/base\nWORKDIR /app\n",
        "tests/test.sh": """
            answer=$(cat /app/out/answer 2>/dev/null)
            [ "$answer" = 144 ] && [ ! -e /app/elsewhere ] && echo 1.0 > /logs/verifier/reward.txt \\
              || echo 0.0 > /logs/verifier/reward.txt
        """,
        "solution/solve.sh": "mkdir -p out; echo 144 > out/answer; touch elsewhere\n",
    },
    "cheated": {
        "task.toml": _TOML,
        "instruction.md": "Write `done` into /app/state.\n",
        "environment/Dockerfile": "FROM mill/base\nWORKDIR /app\n",
        "tests/test.sh": """
            grep -qx done /app/state && echo 1 > /logs/verifier/reward.txt || echo 0 > /logs/verifier/reward.txt
        """,
        "solution/solve.sh": _CHEAT,
    },
}  # fmt: skip
HONEST = tuple(name for name in TASKS if name != "cheated")


def write(root: Path, names: Iterable[str] = tuple(TASKS)) -> Path:
    """Write tasks below a new directory."""
    for name in names:
        for path, text in TASKS[name].items():
            file = root / name / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(plain(text))
    return root


def plain(text: str) -> str:
    """A file's text without the indentation that it has here."""
    return textwrap.dedent(text).lstrip("\n")
