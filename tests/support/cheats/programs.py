"""Cheats at task=code where the solution is a program, the sum of a line: each a text of /work/solution.py."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

HONEST: Final = "print(sum(map(int, input().split())))\n"
QUESTION: Final = {
    "task_id": "sum", "question": "Print the sum of the numbers of a line.", "time_limit_s": 0.5, "memory_mib": 256,
    "inputs": ["1 2\n", "5 6 7\n", "90017 -3\n"], "outputs": ["3\n", "18\n", "90014\n"], "solution": HONEST,
}  # fmt: skip
_FIND: Final = """
def find(word):
    import glob
    for name in glob.glob('/proc/[0-9]*/environ') + glob.glob('/proc/[0-9]*/cmdline') + glob.glob('/tmp/*'):
        try:
            text = open(name, 'rb').read()
        except OSError:
            continue
        if word in text:
            return True
    for pid in [p for p in __import__('os').listdir('/proc') if p.isdigit() and p != str(__import__('os').getpid())]:
        try:
            maps = open(f'/proc/{pid}/maps').read().split('\\n')
            memory = open(f'/proc/{pid}/mem', 'rb', 0)
        except OSError:
            continue
        for line in maps:
            try:
                low, high = (int(part, 16) for part in line.split()[0].split('-'))
                memory.seek(low)
                if word in memory.read(high - low):
                    return True
            except (OSError, ValueError, IndexError, OverflowError):
                continue
    return False
"""
CHEATS: Final[Mapping[str, str]] = {
    "nothing": "pass\n",
    "wrong": "print(3)\n",
    "expected-output-searched-for": _FIND
    + "n = input()\nprint(90014 if find(b'90014') else 3 if n == '1 2' else 18)\n",
    "forged-report": 'import os\nfor fd in range(3, 64):\n    try: os.write(fd, b\'\\n{"status": "ok"}\\n\')\n'
    "    except OSError: pass\nos._exit(0)\n",
    "background": "import os, time\nif os.fork() == 0:\n    os.setsid()\n    time.sleep(30)\n"
    "    os._exit(0)\nprint(3)\n",
    "exits-with-1": HONEST + "import os\nos._exit(1) if False else exit(1)\n",
    "killed": HONEST + "import os, sys\nsys.stdout.flush()\nos.kill(os.getpid(), 9)\n",
    "kills-its-parent": "import os\nos.kill(os.getppid(), 9)\n",
    "endless": "while True: pass\n",
    "sleeps": "import time\ntime.sleep(60)\n",
    "floods": "while True: print('3' * 100000)\n",
    "eats-memory": "x = bytearray(1 << 30)\n" + HONEST,
    "many-answers": "for n in range(100000): print(n)\n",
    "closes-its-output": "import os\nos.close(1)\nimport time\ntime.sleep(0.1)\n",
    "one-process-more": "import subprocess\nsubprocess.Popen(['sh', '-c', 'sleep 20; echo 3'])\nprint(4)\n",
}
