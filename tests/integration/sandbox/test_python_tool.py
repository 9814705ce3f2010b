"""The one contract of every backend's Python tool: state, output, errors, images, time-outs, and what ends a kernel."""

from __future__ import annotations

import asyncio
import base64
import time
from pathlib import Path

import pytest

from sandbox.errors import PythonUnavailable, SandboxError
from sandbox.protocols import CellResult, Sandbox, SandboxSpec
from tests.integration.sandbox.grounds import BACKENDS, OBEYING, QUICK, backend_named, in_sandbox, wait_until
from tests.integration.sandbox.test_worker_death import held, no_more

PNG = base64.b64encode(b"\x89PNG\r\n\x1a\nrest of it").decode()


@pytest.fixture(params=BACKENDS)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def run_all(name: str, scratch: Path, *cells: str, timeout_s: float = 20.0) -> list[CellResult]:
    async def body(sandbox: Sandbox) -> list[CellResult]:
        return [await sandbox.python.run(cell, timeout_s) for cell in cells]

    return in_sandbox(name, scratch, body)


def test_state_output_errors_and_images(name: str, tmp_path: Path) -> None:
    results = run_all(
        name, tmp_path,
        "import math; x = 20", "x + 1",
        "import sys\nprint('out'); print('err', file=sys.stderr); x",
        "def f():\n    return 1 / 0\nprint('before')\nf()",
        "x +", "import os; os.system('echo from a child'); None",
        f"display({{'image/png': {PNG!r}, 'text/plain': 'a picture'}}, raw=True)\n1",
        "display({'image/png': 'bm90IGFuIGltYWdl', 'text/html': '<b>'}, raw=True)",
        "print('\\udcff', '漢')", "input('?')", "x",
    )  # fmt: skip
    assert [r.text for r in results[:2]] == ["", "21\n"] and results[0].error is None
    assert sorted(results[2].text.splitlines()) == ["20", "err", "out"]
    assert results[3].text == "before\n" and results[3].error is not None
    assert "ZeroDivisionError: division by zero" in results[3].error and "\x1b" not in results[3].error
    assert "line 2, in f" in results[3].error.replace("f()", "f") or "1 / 0" in results[3].error
    assert "SyntaxError" in (results[4].error or "")
    assert results[5].text == "from a child\n"
    assert results[6].images == (PNG,) and results[6].text == "a picture\n1\n"
    assert results[7].images == () and "1 images left out" in results[7].text
    assert "漢" in results[8].text
    assert "StdinNotImplementedError" in (results[9].error or "")
    assert results[10].text == "20\n"
    assert not any(r.timed_out or r.restarted or r.truncated for r in results)


def test_it_stands_beside_the_shell_on_the_same_files(name: str, tmp_path: Path) -> None:
    async def body(sandbox: Sandbox) -> None:
        await sandbox.shell.run("echo from the shell >one; KEPT=yes")
        assert (await sandbox.python.run("open('one').read()")).text == "'from the shell\\n'\n"
        await sandbox.python.run("open('two', 'w').write('from python')")
        assert (await sandbox.shell.run("cat two; echo; echo $KEPT")).output == "from python\nyes\n"
        both = await asyncio.gather(
            sandbox.shell.run("until [ -e three ]; do sleep 0.01; done; echo seen"),
            sandbox.python.run("open('three', 'w').close()"),
        )
        assert both[0].output == "seen\n"

    in_sandbox(name, tmp_path, body)


def test_much_output_keeps_head_and_tail(name: str, tmp_path: Path) -> None:
    results = run_all(
        name, tmp_path, "print('FIRST'); print('x' * 30_000_000); print('LAST')", "'y' * 3_000_000",
        "for n in range(4_000): print(f'{n:<40}', flush=True)", "1",
    )  # fmt: skip
    assert results[0].text.startswith("FIRST\nxxx") and results[0].text.endswith("xxx\nLAST\n")
    assert results[1].text.startswith("'yyy") and results[1].text.endswith("yyy'\n")
    assert results[2].text.split()[:3] == ["0", "1", "2"] and results[2].text.split()[-2:] == ["3998", "3999"]
    for result in results[:3]:
        assert result.truncated and "left out" in result.text and len(result.text) < 70_000 and not result.error
    assert (results[3].text, results[3].truncated) == ("1\n", False)


def test_a_timed_out_cell_is_interrupted_and_the_state_stays(name: str, tmp_path: Path) -> None:
    async def body(sandbox: Sandbox) -> None:
        await sandbox.python.run("import time; kept = 1")
        for cell in ("print('before'); time.sleep(100)", "import subprocess; subprocess.run(['sleep', '100'])"):
            started = time.monotonic()
            late = await sandbox.python.run(cell, timeout_s=0.5)
            assert late.timed_out and not late.restarted and time.monotonic() - started < 60.0
            assert "KeyboardInterrupt" in (late.error or "")
        assert (await sandbox.python.run("kept")).text == "1\n"

    in_sandbox(name, tmp_path, body, OBEYING)


def test_a_cell_that_cannot_be_interrupted_costs_the_kernel(name: str, tmp_path: Path) -> None:
    async def body(sandbox: Sandbox) -> None:
        late = await sandbox.python.run(
            "import signal, time; print('said'); signal.pthread_sigmask(signal.SIG_BLOCK, [2]); lost = time.sleep(100)",
            timeout_s=0.5,
        )
        assert (late.timed_out, late.restarted, late.text) == (True, True, "said\n")
        assert "killed" in (late.error or "")
        after = await sandbox.python.run("'lost' in globals()")
        assert after.text == "False\n" and not after.restarted

    in_sandbox(name, tmp_path, body)


@pytest.mark.parametrize(
    ("cell", "how"),
    [
        ("import os; os._exit(3)", "exit code 3"),
        ("import os; os.kill(os.getpid(), 9)", "signal 9"),
        ("import ctypes; ctypes.string_at(0)", "signal 11"),
    ],
)
def test_a_kernel_that_ends_is_said_and_replaced(name: str, tmp_path: Path, cell: str, how: str) -> None:
    async def body(sandbox: Sandbox) -> None:
        await sandbox.shell.run("KEPT=yes")
        last = await sandbox.python.run("print('last words', flush=True); lost = 1\n" + cell)
        assert last.restarted and how in (last.error or "") and not last.timed_out
        after = await sandbox.python.run("'lost' in globals()")
        assert after.text == "False\n" and not after.restarted and after.error is None
        assert (await sandbox.shell.run("echo $KEPT")).output == "yes\n"

    in_sandbox(name, tmp_path, body)


def test_restart_and_cells_that_queue_up(name: str, tmp_path: Path) -> None:
    async def body(sandbox: Sandbox) -> None:
        await sandbox.python.run("n = 0")
        results = await asyncio.gather(*(sandbox.python.run("n += 1; print(n)") for _ in range(10)))
        assert [result.text for result in results] == [f"{number}\n" for number in range(1, 11)]
        await sandbox.python.restart()
        fresh = await sandbox.python.run("'n' in globals()")
        assert fresh.text == "False\n" and not fresh.restarted

    in_sandbox(name, tmp_path, body)


def test_a_cancelled_cell_does_not_reach_the_next(name: str, tmp_path: Path) -> None:
    async def body(sandbox: Sandbox) -> None:
        await sandbox.python.run("import time; kept = 1")
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(sandbox.python.run("print('stale', flush=True); time.sleep(100)"), 0.4)
        after = await sandbox.python.run("kept")
        assert (after.text, after.error, after.restarted) == ("1\n", None, False)

    in_sandbox(name, tmp_path, body, OBEYING)


def test_what_ends_the_sandboxs_processes_is_said_by_the_next_cell(name: str, tmp_path: Path) -> None:
    async def body(sandbox: Sandbox) -> None:
        await sandbox.python.run("lost = 1")
        await sandbox.execute(("/bin/true",))
        after = await sandbox.python.run("'lost' in globals()")
        assert (after.text, after.restarted) == ("False\n", True)
        assert not (await sandbox.python.run("1")).restarted

    in_sandbox(name, tmp_path, body)


def test_a_sandbox_that_goes_on_from_a_checkpoint_says_that_its_kernel_is_new(name: str, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with backend_named(name, tmp_path) as backend:
            async with backend.create(SandboxSpec(limits=QUICK)) as first:
                await first.python.run("x = 1")
                state = await first.shell.state()
            async with backend.create(SandboxSpec(limits=QUICK, shell=state)) as second:
                assert [(await second.python.run("'x' in globals()")).restarted for _ in range(2)] == [True, False]

    asyncio.run(scenario())


def test_it_leaves_no_file_in_the_sandbox_and_nothing_behind(name: str, tmp_path: Path) -> None:
    async def body(sandbox: Sandbox) -> None:
        await sandbox.shell.run(": >mark")
        before = await sandbox.pack()
        await sandbox.python.run("import math; 1")
        after = await sandbox.pack()
        assert (after.entries, after.digest) == (before.entries, before.digest)
        await sandbox.python.run("import subprocess; subprocess.Popen(['sleep', '1000'])")
        await sandbox.stop()
        with pytest.raises(SandboxError, match="stopped"):
            await sandbox.python.run("1")

    in_sandbox(name, tmp_path, body)
    assert list(tmp_path.iterdir()) == []


def test_cycles_leave_no_descriptor_and_no_process(name: str, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with backend_named(name, tmp_path) as backend:
            async with backend.create(SandboxSpec(limits=QUICK)) as sandbox:
                await sandbox.python.run("1")
            before = held()
            for _ in range(2):
                sandboxes = [backend.create(SandboxSpec(limits=QUICK)) for _ in range(2)]
                await asyncio.gather(*(one.python.run("1") for one in sandboxes))
                await sandboxes[0].python.restart()
                await asyncio.gather(*(one.stop() for one in sandboxes))
            await asyncio.to_thread(wait_until, "no more is held", lambda: no_more(held(), before))

    asyncio.run(scenario())


def test_it_has_no_privilege_and_sees_no_host(isolating: str, tmp_path: Path) -> None:
    code = f"""
import os, socket
lines = dict(line.split(':', 1) for line in open('/proc/self/status').read().splitlines())
print({{name: lines[name].strip() for name in ('CapEff', 'CapPrm', 'CapInh', 'CapBnd', 'CapAmb', 'NoNewPrivs')}})
print([name for _, name in socket.if_nameindex()], os.path.exists({str(tmp_path)!r}))
print(sorted(int(fd) for fd in os.listdir('/proc/self/fd'))[:6], os.environ.get('ROLLMILL_KERNEL_KEY'))
for path in ('/proc/self/fd/5/x', '/proc/self/fd/5/IPython/x', '/proc/self/fd/5/../x'):
    try:
        open(path, 'w')
    except OSError as error:
        print(type(error).__name__, error.errno)
print(os.path.samefile('/proc/self/fd/5/..', '/proc/self/fd/5/'), os.path.exists('/proc/self/fd/5/../../s1'))
import ctypes
print(ctypes.CDLL(None).unshare(0x10000000), ctypes.CDLL(None).unshare(0x20000))
"""
    (result,) = run_all(isolating, tmp_path, code)
    none = "0" * 16
    lines = result.text.splitlines()
    assert eval(lines[0]) == {
        **dict.fromkeys(("CapEff", "CapPrm", "CapInh", "CapBnd", "CapAmb"), none),
        "NoNewPrivs": "1",
    }
    assert lines[1] == "['lo'] False"
    assert lines[2].endswith("None")
    assert lines[3:6] == ["OSError 30"] * 3, lines
    assert lines[6] == "True False"
    assert lines[7] == "-1 -1"


def test_an_image_without_python_is_refused_and_the_sandbox_goes_on(
    isolating: str, tmp_path: Path, debian: Path
) -> None:
    async def body(sandbox: Sandbox) -> None:
        assert (await sandbox.python.run("import sys; sys.executable")).text == "'/usr/bin/python3'\n"
        await sandbox.shell.run("rm /usr/bin/python3*")
        assert (await sandbox.python.run("import os; os._exit(0)")).restarted
        with pytest.raises(PythonUnavailable, match="python3") as caught:
            await sandbox.python.run("1")
        assert caught.value.boundary == "python"
        assert (await sandbox.shell.run("echo alive")).output == "alive\n"

    in_sandbox(isolating, tmp_path, body, SandboxSpec(image=str(debian), limits=QUICK))


def test_the_workspaces_modules_do_not_stand_in_for_the_kernels(name: str, tmp_path: Path) -> None:
    async def body(sandbox: Sandbox) -> CellResult:
        for module in ("tornado", "random", "json", "ipykernel"):
            await sandbox.files.write(f"/work/{module}.py", "raise SystemExit('shadowed')")
        await sandbox.files.write("/work/mine.py", "value = 7")
        return await sandbox.python.run("import mine; mine.value")

    result = in_sandbox(name, tmp_path, body)
    assert (result.text, result.error) == ("7\n", None)
