"""Public bugs of the field about sandboxes that meet each other or the host, on every backend that isolates."""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import IO

import pytest

from sandbox.protocols import Sandbox, SandboxSpec
from tests.integration.sandbox.grounds import QUICK, backend_named, in_sandbox
from tests.support.waiting import eventually

REPOSITORY = Path(__file__).resolve().parents[3]
ATTEMPTS = 32
PORT = 48123

_SERVER = (
    "import socket, threading; s = socket.create_server(('127.0.0.1', {port})); "
    "u = socket.socket(socket.AF_UNIX); u.bind('\\0rollmill-attempt'); "
    "threading.Thread(target=lambda: [s.accept()[0].sendall(b'{name}') for _ in range(99)], daemon=True).start(); "
    "open('/tmp/up', 'w').close(); threading.Event().wait()"
)
_ASK = "import socket; print(socket.create_connection(('127.0.0.1', {port}), 5).recv(99).decode())"

_WORKER = """
import asyncio, os, sys
from pathlib import Path
from tests.integration.sandbox.grounds import backend_named
from sandbox.protocols import SandboxSpec

async def main():
    async with backend_named(sys.argv[1], Path(sys.argv[2])) as backend, backend.create(SandboxSpec()) as sandbox:
        await sandbox.shell.run("sleep 300 & setsid sleep 300 &")
        print("started", flush=True)
        os.close(1)
        await asyncio.to_thread(sys.stdin.read)

asyncio.run(main())
"""


@pytest.mark.parametrize("name", ["bubblewrap", "none"])
def test_b31_the_shells_of_a_worker_wait_side_by_side(name: str, tmp_path: Path) -> None:
    """Each of 32 commands ends only after all of them have begun: one after another none would."""

    async def scenario() -> list[str]:
        async with backend_named(name, tmp_path) as backend, contextlib.AsyncExitStack() as stack:
            boxes = [await stack.enter_async_context(backend.create(SandboxSpec())) for _ in range(ATTEMPTS)]
            wait = "mkfifo never; echo >began; until [ -e go ]; do read -t 0.5 <>never; done; sleep 1; echo woke"
            running = [asyncio.create_task(box.shell.run(wait, 120.0)) for box in boxes]
            for box in boxes:
                await eventually(lambda box=box: _there(box, "began"), "every command has begun", 60.0)
            for box in boxes:
                await box.files.write("/work/go", b"")
            return [result.output for result in await asyncio.gather(*running)]

    assert asyncio.run(scenario()) == ["woke\n"] * ATTEMPTS


async def _there(box: Sandbox, name: str) -> bool:
    return name in [entry.name for entry in await box.files.list("/work")]


def test_b17_attempts_of_one_task_on_one_node_do_not_clash(isolating: str, tmp_path: Path) -> None:
    """Two workers, 32 attempts: the same spec, port, abstract socket and files in each."""

    async def attempt(sandbox: Sandbox, name: str) -> str:
        await sandbox.shell.run("exec 2>/dev/null; echo mine >/tmp/lock; mkdir /tmp/work", 20.0)
        server = _SERVER.format(port=PORT, name=name)
        result = await sandbox.shell.run(
            f'python3 -I -c "{server}" & p=$!; while [ ! -e /tmp/up ] && kill -0 $p; do sleep 0.05; done; '
            f'python3 -I -c "{_ASK.format(port=PORT)}"', 60.0,
        )  # fmt: skip
        return result.output

    async def scenario() -> list[str]:
        async with backend_named(isolating, tmp_path) as one, backend_named(isolating, tmp_path) as other:
            sandboxes = [
                backend.create(SandboxSpec(limits=QUICK)) for backend in (one, other) for _ in range(ATTEMPTS // 2)
            ]
            return await asyncio.gather(*(attempt(one, f"attempt{n}") for n, one in enumerate(sandboxes)))

    outputs = asyncio.run(scenario())
    for number, output in enumerate(outputs):
        assert output.split()[-1] == f"attempt{number}", output
    assert list(tmp_path.iterdir()) == []


def test_b18_what_runs_in_a_sandbox_never_holds_the_workers_output(isolating: str, tmp_path: Path) -> None:
    """A reader of the worker's output reads to its end while the sandbox lives; and a command of 1 MB goes through."""
    command = [sys.executable, "-c", _WORKER, isolating, str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": f"{REPOSITORY}:{os.environ.get('PYTHONPATH', '')}"}
    with subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as worker:
        assert worker.stdout is not None and worker.stdin is not None
        said = _read_to_end(worker.stdout, 60.0)  # without the mending: until the sandbox ends, which it does not
        assert said == b"started\n" and worker.poll() is None
        worker.stdin.close()
        assert worker.wait(60.0) == 0

    async def body(sandbox: Sandbox) -> None:
        result = await sandbox.shell.run("sleep 300 & cat <<'END' | wc -c\n" + "x" * 1_000_000 + "\nEND")
        assert result.output.split()[-1] == "1000001"

    in_sandbox(isolating, tmp_path, body)


def _read_to_end(stream: IO[bytes], deadline_s: float) -> bytes | None:
    """All that a pipe gives; None where its end does not come in time."""
    found, end = b"", time.monotonic() + deadline_s
    while select.select([stream], [], [], max(0.0, end - time.monotonic()))[0]:
        data = os.read(stream.fileno(), 4096)
        if not data:
            return found
        found += data
    return None


def test_b34_no_sandbox_reaches_files_or_sockets_of_another_or_of_a_run(isolating: str, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    (run_dir / "worker.token").write_text("token-of-the-run")
    scratch = tmp_path / "scratch"
    with socket.socket(socket.AF_UNIX) as abstract, socket.socket(socket.AF_UNIX) as named:
        abstract.bind(f"\0rollmill-run-{os.getpid()}")
        abstract.listen()
        named.bind(str(tmp_path / "socket"))
        named.listen()

        async def scenario() -> str:
            async with backend_named(isolating, scratch) as backend:
                one, other = (backend.create(SandboxSpec(limits=QUICK)) for _ in range(2))
                served = "import socket as s; a = s.socket(1); a.bind('\\0one'); b = s.socket(1); b.bind('/tmp/one')"
                await one.shell.run(
                    f'echo secret-of-one | tee /tmp/file /dev/shm/file /work/file; '
                    f'python3 -I -c "{served}; a.listen(); b.listen(); open(\'/tmp/up\', \'w\'); '
                    'import time; time.sleep(300)" & '
                    "while [ ! -e /tmp/up ]; do sleep 0.02; done"
                )  # fmt: skip
                reach = (
                    "import socket as s, sys\n"
                    f"for name in ('\\0one', '/tmp/one', '\\0rollmill-run-{os.getpid()}', '{tmp_path}/socket'):\n"
                    "  try: s.socket(1).connect(name); print('REACHED', repr(name))\n"
                    "  except OSError: pass\n"
                )
                seen = await other.shell.run(
                    f'python3 -I -c "{reach}"; cat /tmp/file /dev/shm/file /work/file {run_dir}/worker.token; '
                    f"for root in /proc/[0-9]*/root /proc/[0-9]*/cwd; do "
                    f"cat $root{run_dir}/worker.token $root/{scratch}/*/*/upper/*/work/file; ls -d $root{tmp_path} && "
                    "echo REACHED $root; done; "
                    "for fd in /proc/1/fd/*; do [ -d $fd ] && ls -A $fd/.. && ls -A $fd && echo REACHED $fd; done; "
                    f"ls -d {tmp_path} {scratch} && echo REACHED; true",
                    30.0,
                )
                return seen.output

        output = asyncio.run(scenario())
    assert "REACHED" not in output and "secret-of-one" not in output and "token-of-the-run" not in output, output


def test_b35_there_is_no_route_out(isolating: str, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as local, socket.create_server(("0.0.0.0", 0)) as everywhere:
        address = socket.gethostbyname(socket.gethostname())
        ports = local.getsockname()[1], everywhere.getsockname()[1]

        async def body(sandbox: Sandbox) -> list[str]:
            asked = [
                ("127.0.0.1", ports[0]),
                ("127.0.0.1", ports[1]),
                (address, ports[1]),
                ("192.0.2.1", 80),
                ("1.1.1.1", 53),
            ]
            tried = [f"timeout 3 bash -c 'exec 3<>/dev/tcp/{host}/{port}' && echo REACHED" for host, port in asked]
            looked = [
                "tail -n +2 /proc/net/route",
                "tail -n +3 /proc/net/dev | grep -v ' lo:'",
                "grep -v ' lo$' /proc/net/ipv6_route",
            ]
            return [(await sandbox.shell.run(f"{{ {command}; }} 2>/dev/null")).output for command in (*tried, *looked)]

        outputs = in_sandbox(isolating, tmp_path, body)
    assert outputs == [""] * len(outputs), outputs
