"""The one contract of every backend's shell: state, exit codes, output, time-outs, restarts."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from sandbox.errors import SandboxError
from sandbox.protocols import CommandResult, Sandbox, SandboxSpec
from tests.integration.sandbox.grounds import BACKENDS, OBEYING, QUICK, STUBBORN, in_sandbox


@pytest.fixture(params=BACKENDS)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def run_all(name: str, scratch: Path, *commands: str, timeout_s: float = 20.0) -> list[CommandResult]:
    async def body(sandbox: Sandbox) -> list[CommandResult]:
        return [await sandbox.shell.run(command, timeout_s) for command in commands]

    return in_sandbox(name, scratch, body)


def test_state_lives_from_command_to_command(name: str, tmp_path: Path) -> None:
    results = run_all(
        name, tmp_path,
        "mkdir -p deep/er && cd deep/er", "export EXPORTED=one", "declare -a LIST=(a b 'c d')", "plain=two",
        "greet() { echo \"hello $1 from $plain\"; }", "shopt -s nullglob; set -o noclobber; alias ll='echo aliased'",
        "echo $EXPORTED ${#LIST[@]} \"${LIST[2]}\"; greet you; basename $PWD; shopt nullglob; ll",
        "bash -c 'echo child sees $EXPORTED'; (exit 7)", "echo status $?",
    )  # fmt: skip
    assert results[6].output.split("\n")[:3] == ["one 3 c d", "hello you from two", "er"]
    assert "nullglob" in results[6].output and "on" in results[6].output and "aliased" in results[6].output
    assert results[6].cwd.endswith("/deep/er")
    assert results[7].output == "child sees one\n" and results[7].exit_code == 7
    assert results[8].output == "status 7\n"
    assert not any(result.restarted or result.timed_out or result.truncated for result in results)


def test_files_are_there_beside_a_command_that_runs(name: str, tmp_path: Path) -> None:
    async def body(sandbox: Sandbox) -> CommandResult:
        running = asyncio.create_task(
            sandbox.shell.run("echo now >began; until [ -s go ]; do sleep 0.05; done; cat go")
        )
        async with asyncio.timeout(20):
            while "began" not in [entry.name for entry in await sandbox.files.list("/work")]:
                await asyncio.sleep(0.02)
        await sandbox.files.write("/work/go", "went\n")
        return await running

    assert in_sandbox(name, tmp_path, body).output == "went\n"


def test_the_shell_starts_in_the_workspace(name: str, tmp_path: Path) -> None:
    async def body(sandbox: Sandbox) -> CommandResult:
        return await sandbox.shell.run("pwd; [ -d ../b/c ] && echo both")

    spec = SandboxSpec(workspace=("/data/a dir", "/data/b/c"))
    result = in_sandbox(name, tmp_path, body, spec)
    assert result.cwd.endswith("/data/a dir") and result.output.endswith("/data/a dir\nboth\n")


COMMANDS = (
    ("true", 0, ""),
    ("false", 1, ""),
    ("(exit 42)", 42, ""),
    ("no_such_program_here", 127, "not found"),
    ("printf 'a\\nb'", 0, "a\nb"),
    ("for i in 1 2 3\ndo\n  echo $i\ndone", 0, "1\n2\n3\n"),
    ("cat <<'END'\n$HOME `x` \"q\n\nEND\necho after", 0, '$HOME `x` "q\n\nafter\n'),
    ("echo out; echo err >&2", 0, "out\nerr\n"),
    ("echo 'unterminated", 2, "unexpected EOF"),
    ("if", 2, "syntax error"),
    ("echo a; ) ; echo b", 2, "syntax error"),
    ("! true", 1, ""),
    ("", 0, ""),
    ("   \n\n", 0, ""),
    ("# only a comment", 0, ""),
    ("echo !! $((12+7-4)) 'it'\\''s' \\\\", 0, "!! 15 it's \\\n"),
    ("printf 'é漢\\xff'", 0, "é漢\ufffd"),
    ("printf 'a\\000b\\001\\036c'", 0, "a\0b\x01\x1ec"),
    ("sleep 0.01 | cat; echo ${PIPESTATUS[@]}", 0, "0 0\n"),
)
"""Command, exit code, and its output: all of it, or where bash itself complains a part of it."""


def test_exit_codes_and_output(name: str, tmp_path: Path) -> None:
    """All in one sandbox, each followed by one that tells that the shell is as it was."""
    commands = [one for command, _, _ in COMMANDS for one in (command, "echo alive")]
    results = run_all(name, tmp_path, *commands)
    for (command, exit_code, output), result, after in zip(COMMANDS, results[::2], results[1::2], strict=True):
        assert result.exit_code == exit_code, (command, result)
        assert output in result.output if exit_code in (2, 127) else output == result.output, (command, result)
        assert (after.exit_code, after.output, after.restarted) == (0, "alive\n", False), (command, after)


def test_a_nul_is_refused(name: str, tmp_path: Path) -> None:
    (result,) = run_all(name, tmp_path, "echo a\0b")
    assert result.exit_code == 2 and "NUL" in result.output


def test_a_broken_command_does_not_spoil_the_next(name: str, tmp_path: Path) -> None:
    results = run_all(name, tmp_path, "echo 'open", "if", 'echo "open', "echo $(", "case x in", "echo fine")
    assert [result.exit_code for result in results[:-1]] == [2] * 5 or results[-1].output == "fine\n"
    assert results[-1].output == "fine\n" and not any(result.timed_out or result.restarted for result in results)


def test_output_is_capped_with_head_and_tail(name: str, tmp_path: Path) -> None:
    result, small = run_all(name, tmp_path, "echo FIRST; seq 1 200000; echo LAST", "echo ok")
    assert result.truncated and result.exit_code == 0
    assert result.output.startswith("FIRST\n1\n2\n") and result.output.endswith("200000\nLAST\n")
    assert "bytes left out" in result.output and len(result.output) < 66_000
    assert (small.output, small.truncated) == ("ok\n", False)


def test_a_hundred_megabytes_pass_in_bounded_memory(name: str, tmp_path: Path) -> None:
    import resource

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    result, after = run_all(name, tmp_path, "head -c 100000000 /dev/zero; echo; echo end", "echo ok", timeout_s=60.0)
    grown_mib = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    assert result.truncated and result.output.endswith("\nend\n") and after.output == "ok\n"
    assert grown_mib < 32, grown_mib


def test_a_megabyte_of_command(name: str, tmp_path: Path) -> None:
    text = "x" * 1_000_000
    result, after = run_all(name, tmp_path, f"cat <<'END' | wc -c\n{text}\nEND", "echo ok")
    assert (result.exit_code, result.output.strip(), after.output) == (0, "1000001", "ok\n")


def test_a_timed_out_command_is_interrupted_and_the_state_stays(name: str, tmp_path: Path) -> None:
    async def body(sandbox: Sandbox) -> None:
        await sandbox.shell.run("KEPT=yes; cd /tmp")
        started = time.monotonic()
        result = await sandbox.shell.run("echo before; sleep 100; echo never", timeout_s=0.5)
        assert time.monotonic() - started < 60.0
        assert result.timed_out and not result.restarted and result.exit_code != 0
        assert "before" in result.output and "never" not in result.output
        after = await sandbox.shell.run("echo $KEPT; pwd")
        assert after.output == "yes\n/tmp\n"

    in_sandbox(name, tmp_path, body, OBEYING)


@pytest.mark.parametrize(
    "command",
    [
        "bash -c 'trap \"\" INT TERM HUP; sleep 100 & wait; sleep 100'",
        "(trap '' INT; sleep 100)",
        "cat",
        "while :; do :; done",
        "stty -isig -icanon; sleep 100",
    ],
)
def test_what_ignores_the_interrupt_is_killed(name: str, tmp_path: Path, command: str) -> None:
    async def body(sandbox: Sandbox) -> None:
        await sandbox.shell.run("KEPT=yes")
        started = time.monotonic()
        result = await sandbox.shell.run(command, timeout_s=0.2)
        assert result.timed_out and not result.restarted
        assert time.monotonic() - started < 60.0
        assert (await sandbox.shell.run("echo $KEPT")).output == "yes\n"

    in_sandbox(name, tmp_path, body, STUBBORN)


def test_a_shell_that_reports_already_is_not_interrupted(name: str, tmp_path: Path) -> None:
    """It has taken its nonce then, and takes no other: its reading of that is made to last."""

    async def body(sandbox: Sandbox) -> None:
        slow = 'read() { builtin read "$@"; local r=$? i; for ((i=0; i<100000; i++)); do :; done; return $r; }'
        await sandbox.shell.run(f"KEPT=yes; {slow}")
        result = await sandbox.shell.run("(trap '' INT; sleep 100)", timeout_s=0.2)
        assert result.timed_out and not result.restarted
        assert (await sandbox.shell.run("echo $KEPT")).output == "yes\n"

    in_sandbox(name, tmp_path, body, STUBBORN)


def test_a_shell_that_cannot_be_stopped_is_started_again(name: str, tmp_path: Path) -> None:
    async def body(sandbox: Sandbox) -> None:
        await sandbox.shell.run("mkdir -p here; cd here; echo kept >file; LOST=1")
        result = await sandbox.shell.run("trap '' INT; while :; do :; done", timeout_s=0.2)
        assert (result.timed_out, result.restarted, result.exit_code) == (True, True, 124)
        after = await sandbox.shell.run("cat file; echo [$LOST]")
        assert after.output == "kept\n[]\n" and after.cwd.endswith("/here") and not after.restarted

    in_sandbox(name, tmp_path, body)


@pytest.mark.parametrize(
    ("command", "exit_code"), [("exit 3", 3), ("kill -9 $$", 137), ("exec true", 0), ("set -e; false", 1)]
)
def test_a_shell_that_ends_is_started_again(name: str, tmp_path: Path, command: str, exit_code: int) -> None:
    async def body(sandbox: Sandbox) -> None:
        await sandbox.shell.run("mkdir -p here; cd here")
        result = await sandbox.shell.run(f"echo last words; {command}")
        assert result.restarted and result.exit_code == exit_code and not result.timed_out
        assert result.output.startswith("last words\n")
        after = await sandbox.shell.run("basename $PWD")
        assert after.output == "here\n" and not after.restarted

    in_sandbox(name, tmp_path, body)


def test_a_background_job_does_not_block(name: str, tmp_path: Path) -> None:
    async def body(sandbox: Sandbox) -> None:
        jobs = ("(until [ -e go ]; do sleep 0.02; done; echo done >flag) >/dev/null 2>&1 &", "sleep 100 &")
        assert not any([(await sandbox.shell.run(job)).timed_out for job in jobs])  # neither job has ended
        waited = await sandbox.shell.run("touch go; while [ ! -e flag ]; do sleep 0.02; done; cat flag")
        assert "done" in waited.output.split("\n")  # bash may report the ended job before it, or behind

    in_sandbox(name, tmp_path, body)


@pytest.mark.parametrize(
    "spoiling",
    [
        "PS1='prompt> '; PS2='more> '",
        "PROMPT_COMMAND='echo spoilt'",
        "unset PROMPT_COMMAND; unset -f __rm_report __rm_go",
        "stty echo opost",
        "exec 3>&1 9>&- 8>&-",
        "set -u; set -o pipefail; set -f; IFS=,",
        "trap 'true' DEBUG; trap 'true' ERR",
        "exec 2>/dev/null",
        "umask 077; LC_ALL=C",
        "printf '\\036%s %d %s\\0' 0123456789abcdef 0 /forged",
    ],
)
def test_what_a_command_does_to_the_shell_does_not_break_it(name: str, tmp_path: Path, spoiling: str) -> None:
    results = run_all(name, tmp_path, spoiling, "echo one", "echo two", timeout_s=20.0)
    assert [result.output for result in results[1:]] == ["one\n", "two\n"], results
    assert not any(result.timed_out or result.restarted for result in results)
    assert results[0].cwd != "/forged"


def test_redirected_output_stays_redirected(name: str, tmp_path: Path) -> None:
    results = run_all(name, tmp_path, "exec 5>&1 >captured", "echo hidden", "exec >&5", "cat captured")
    assert [result.output for result in results] == ["", "", "", "hidden\n"]


def test_descriptors_that_a_command_opens_stay_open_and_ours_are_not_inherited(name: str, tmp_path: Path) -> None:
    results = run_all(
        name, tmp_path, "exec 9>held 8<held", "echo kept >&9", "read kept <&8; echo $kept; ls /proc/self/fd"
    )
    assert results[2].output.split() == ["kept", "0", "1", "2", "3", "8", "9"]  # 3 is what `ls` reads


def test_commands_of_one_shell_queue_up(name: str, tmp_path: Path) -> None:
    async def body(sandbox: Sandbox) -> None:
        await sandbox.shell.run("n=0")
        results = await asyncio.gather(*(sandbox.shell.run("n=$((n+1)); echo $n") for _ in range(20)))
        assert [result.output for result in results] == [f"{number}\n" for number in range(1, 21)]

    in_sandbox(name, tmp_path, body)


def test_a_cancelled_command_does_not_reach_the_next(name: str, tmp_path: Path) -> None:
    async def body(sandbox: Sandbox) -> None:
        await sandbox.shell.run("KEPT=yes")
        task = asyncio.create_task(sandbox.shell.run("echo stale; sleep 100"))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(task, 0.2)
        after = await sandbox.shell.run("echo $KEPT")
        assert (after.output, after.exit_code, after.restarted) == ("yes\n", 0, False)

    in_sandbox(name, tmp_path, body, OBEYING)


def test_stop_is_idempotent_and_leaves_nothing(name: str, tmp_path: Path) -> None:
    async def body(sandbox: Sandbox) -> None:
        await sandbox.shell.run("mkdir -p a/b; touch a/b/c; chmod 000 a/b; setsid sleep 100 & sleep 100 &")
        await asyncio.gather(sandbox.stop(), sandbox.stop())
        await sandbox.stop()
        with pytest.raises(SandboxError, match="stopped"):
            await sandbox.shell.run("true")
        with pytest.raises(SandboxError, match="stopped"):
            await sandbox.files.read("/etc/passwd")

    in_sandbox(name, tmp_path, body)
    assert list(tmp_path.iterdir()) == []


def test_a_stop_is_not_undone_by_cancellation(name: str, tmp_path: Path) -> None:
    async def body(sandbox: Sandbox) -> None:
        await sandbox.shell.run("touch x")
        task = asyncio.create_task(sandbox.stop())
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await sandbox.stop()

    in_sandbox(name, tmp_path, body)
    assert list(tmp_path.iterdir()) == []


def test_a_sandbox_that_was_never_used_costs_nothing(name: str, tmp_path: Path) -> None:
    def own_directories() -> list[str]:
        return [path.name for path in next(tmp_path.iterdir()).iterdir() if path.name != "skeleton"]

    async def body(sandbox: Sandbox) -> list[str]:
        del sandbox
        return await asyncio.to_thread(own_directories)

    assert in_sandbox(name, tmp_path, body) == []
    assert list(tmp_path.iterdir()) == []


def test_many_sandboxes_live_side_by_side(name: str, tmp_path: Path) -> None:
    from tests.integration.sandbox.grounds import backend_named

    async def scenario() -> None:
        async with backend_named(name, tmp_path) as backend:
            sandboxes = [backend.create(SandboxSpec(limits=QUICK)) for _ in range(12)]
            await asyncio.gather(*(one.shell.run(f"echo {n} >mine") for n, one in enumerate(sandboxes)))
            results = await asyncio.gather(*(one.shell.run("cat mine") for one in sandboxes))
            assert [result.output for result in results] == [f"{n}\n" for n in range(12)]

    asyncio.run(scenario())
    assert list(tmp_path.iterdir()) == []
