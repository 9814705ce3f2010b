"""A sandbox goes on in another: files, deletions, directory and exported variables, on every backend."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from sandbox.bashtext import SHELL_ARGV, shell_env
from sandbox.errors import ShellDied
from sandbox.layers import unpack
from sandbox.procfields import children_of
from sandbox.protocols import PackedLayer, SandboxBackend, SandboxSpec, ShellState
from sandbox.pty_sandbox import PtySandbox
from sandbox.spawn_client import SpawnClient
from sandbox.started import Spawned
from sandbox.terminal import Terminal
from tests.integration.sandbox.grounds import BACKENDS, ISOLATING, QUICK, backend_named, image_directory

BROKEN = "'f() {'\n'g() { echo g; }'\n"
ODD = "two words 'and' \"quotes\" $HOME `x` \\ ~/a:~/b * ünï"


@pytest.fixture(params=BACKENDS)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


async def carried_on(
    backend: SandboxBackend, before: str, after: str, place: Path, layers: tuple[str, ...] = (), image: str = "host"
) -> tuple[str, ShellState, PackedLayer]:
    """What `after` prints in a sandbox that goes on from one in which `before` ran."""
    async with backend.create(SandboxSpec(image=image, layers=layers, limits=QUICK)) as sandbox:
        await sandbox.shell.run(before)
        state = await sandbox.shell.state()
        packed = await sandbox.pack()
        await asyncio.to_thread(_unpack, packed, place)
    spec = SandboxSpec(image=image, layers=layers, limits=QUICK, upper=str(place), shell=state)
    async with backend.create(spec) as sandbox:
        result = await sandbox.shell.run(after)
        again = await sandbox.pack()
    return result.output.replace("\r\n", "\n"), state, again


def _unpack(packed: PackedLayer, target: Path) -> None:
    with Path(packed.path).open("rb") as file:
        unpack(file, target, digest=packed.digest)


def test_variables_of_any_kind_and_the_directory_come_over(name: str, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with backend_named(name, tmp_path / "scratch") as backend:
            before = f"""
mkdir -p 'deep/a b'; cd 'deep/a b'
export ODD={_quoted(ODD)} LINES2=$'one\\ntwo\\t\\x01' EMPTY= OUTER=1; own=2; unset TERM; set -eu
"""
            after = (
                'printf "%s|" "$ODD" "$LINES2" "$EMPTY" "$OUTER" "${own-none}" "${TERM-none}"; pwd; declare -p EMPTY'
            )
            output, state, _ = await carried_on(backend, before, after, tmp_path / "place")
            values, _, rest = output.rpartition("|")
            assert values == f"{ODD}|one\ntwo\t\x01||1|none|none"
            assert rest.startswith("/") and rest.split("\n")[0].endswith("/deep/a b")
            assert 'declare -x EMPTY=""' in rest
            assert "own=" not in state.exports and (state.root == "") == (name in ISOLATING)

    (tmp_path / "scratch").mkdir()
    asyncio.run(scenario())


def test_functions_aliases_and_options_come_over(name: str, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with backend_named(name, tmp_path / "scratch") as backend:
            before = """shopt -s extglob nullglob; set -uo pipefail
f() { case $1 in !(y)) echo "no y: $2"; esac; cat <<END
here $1
END
}
g-h() { f "$@"; }; e() { echo exported; }; export -f e; readonly -f g-h
alias ll='echo "it'"'"'s an alias"'
trap 'echo never' DEBUG; trap - DEBUG"""
            after = """f x 'a  b'; bash -c e; shopt -q nullglob && echo nullglob; echo ${-//[!u]/}
(false | true) || echo pipefail
ll; g-h y z"""
            output, state, _ = await carried_on(backend, before, after, tmp_path / "place")
            assert output == "no y: a  b\nhere x\nexported\nnullglob\nu\npipefail\nit's an alias\nhere y\n"
            assert "__rm_" not in state.definitions

    (tmp_path / "scratch").mkdir()
    asyncio.run(scenario())


def test_a_definition_that_cannot_be_read_keeps_no_other_away(name: str, tmp_path: Path) -> None:
    async def scenario() -> None:
        state = ShellState("/", "A=1\n", "", BROKEN, "set -o onecmd\nset -o nounset\nrm -r /\n")
        async with (
            backend_named(name, tmp_path) as backend,
            backend.create(SandboxSpec(limits=QUICK, shell=state)) as sandbox,
        ):
            assert (await sandbox.shell.run("g; echo $A ${-//[!u]/}")).output == "g\n1 u\n"
            assert (await sandbox.shell.run("echo on")).output == "on\n"

    asyncio.run(scenario())


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"


def test_what_was_changed_stays_changed_and_is_packed_again_with_what_comes_later(name: str, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with backend_named(name, tmp_path / "scratch") as backend:
            async with backend.create(SandboxSpec(limits=QUICK)) as sandbox:
                await sandbox.shell.run("mkdir kept gone; echo 1 >kept/one; echo 2 >gone/two; echo 3 >three")
                await asyncio.to_thread(_unpack, await sandbox.pack(), tmp_path / "one")
            layers = (str(tmp_path / "one"),)
            output, _, again = await carried_on(
                backend, "rm -r gone three; echo more >>kept/one; echo new >four", "ls -1; cat kept/one four; rm four",
                tmp_path / "place", layers,
            )  # fmt: skip
            assert output == "four\nkept\n1\nmore\nnew\n"
            # The second pack alone, over the first layer, is the whole state.
            assert again.entries > 0
            async with backend.create(SandboxSpec(limits=QUICK, layers=layers)) as sandbox:
                fresh = await sandbox.shell.run("ls")
            assert fresh.output.split() == ["gone", "kept", "three"]

    (tmp_path / "scratch").mkdir()
    asyncio.run(scenario())


def test_changes_under_usr_and_in_an_image_come_over(isolating: str, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with backend_named(isolating, tmp_path / "scratch") as backend:
            before = "echo here >/usr/new; rm /etc/passwd; cd /usr"
            after = "pwd; cat new; [ -e /etc/passwd ] || echo no passwd"
            output, _, _ = await carried_on(backend, before, after, tmp_path / "host")
            assert output == "/usr\nhere\nno passwd\n"
            image = image_directory(tmp_path / "image")
            before, after = "echo here >/usr/new; rm /etc/passwd", "cat /usr/new; ls /etc"
            output, _, _ = await carried_on(backend, before, after, tmp_path / "imaged", image=str(image))
            assert output == "here\n"

    (tmp_path / "scratch").mkdir()
    asyncio.run(scenario())


def test_asking_for_the_state_changes_nothing(name: str, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with (
            backend_named(name, tmp_path / "scratch") as backend,
            backend.create(SandboxSpec(limits=QUICK)) as sandbox,
        ):
            await sandbox.shell.run("IFS=x; set -f; f() { echo f; }; own=3; false")
            first = await sandbox.shell.state()
            told = await sandbox.shell.run('printf "%s " $? "$IFS" "$own" "$-"; f; declare -F; compgen -v __rm_s')
            assert told.output.startswith("1 x 3 ") and "f\n" in told.output.replace("\r", "")
            assert "__rm_state" not in told.output
            assert await sandbox.shell.state() == first

    (tmp_path / "scratch").mkdir()
    asyncio.run(scenario())


def test_what_holds_an_apptainer_sandbox_ends_it_too(tmp_path: Path) -> None:
    """Its exit status says what a bash that killed itself would say: only the note of its launcher tells them apart."""

    async def scenario() -> None:
        async with (
            backend_named("apptainer", tmp_path) as backend,
            backend.create(SandboxSpec(limits=QUICK)) as sandbox,
        ):
            assert (await sandbox.shell.run("kill -9 $$")).restarted
            assert isinstance(sandbox, PtySandbox) and sandbox.shell.process is not None
            runtime = children_of(children_of(sandbox.shell.process.pid)[0])[0]
            assert b"pptainer" in Path(f"/proc/{runtime}/cmdline").read_bytes()
            os.kill(runtime, signal.SIGKILL)
            with pytest.raises(ShellDied, match="ended from outside by a signal"):
                await sandbox.shell.run("sleep 20")

    asyncio.run(scenario())


def test_a_shell_that_outlives_its_launcher_by_a_moment_gives_no_result() -> None:
    """A killed sandbox's terminal hangs up its command, which a shell that is not dead yet would tell as its end."""

    async def scenario() -> None:
        spawner = SpawnClient()

        async def launch() -> Spawned:
            argv = ("/bin/sh", "-c", f"/bin/bash {' '.join(SHELL_ARGV)}; true")
            return await spawner.spawn(argv, env=shell_env({}), cwd="/", timeout_s=10)

        terminal = Terminal(spawner, launch, (), QUICK)
        try:
            assert (await terminal.run("echo [$KEPT]")).output == "[]\n"
            with pytest.raises(ShellDied, match="ended from outside by signal 9"):
                gone = "until ! read -r at </proc/$PPID/stat || [[ $at = *') Z '* ]]; do :; done 2>/dev/null"
                await terminal.run(f"trap '' HUP; (sleep 0.2; kill -9 $$) & kill -9 $PPID; {gone}; echo here")
        finally:
            await terminal.kill()
            await spawner.close()

    asyncio.run(scenario())


@pytest.mark.parametrize("isolating", ISOLATING)
def test_a_sandbox_that_is_ended_from_outside_is_lost(isolating: str, tmp_path: Path) -> None:
    """A batch system ends every process of a step: no agent may go on in a new shell without its state."""

    async def scenario() -> None:
        async with (
            backend_named(isolating, tmp_path) as backend,
            backend.create(SandboxSpec(limits=QUICK)) as sandbox,
        ):
            await sandbox.shell.run("export KEPT=1")
            assert isinstance(sandbox, PtySandbox) and sandbox.shell.process is not None
            os.kill(sandbox.shell.process.pid, signal.SIGKILL)
            with pytest.raises(ShellDied, match="ended from outside by signal 9"):
                await sandbox.shell.run("sleep 20; echo $KEPT")
            with pytest.raises(ShellDied, match="ended from outside"):
                await sandbox.shell.state()

    asyncio.run(scenario())
