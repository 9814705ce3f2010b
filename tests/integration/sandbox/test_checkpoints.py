"""A sandbox packed in mid-task goes on elsewhere: the same files, deletions, directory and environment."""

from __future__ import annotations

import asyncio
import multiprocessing
import shlex
import tempfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import msgspec
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from sandbox.layers import unpack
from sandbox.protocols import Sandbox, SandboxBackend, SandboxSpec, ShellState
from sandbox.scratch import remove_tree
from tests.integration.sandbox.grounds import ISOLATING, QUICK, backend_named

OTHER = {"bubblewrap": "apptainer", "apptainer": "bubblewrap"}
BELOW = "mkdir -p low/in; echo 1 >low/one; echo 2 >low/in/two; ln low/one low/hard; ln -s one low/link"
"""What the layer below has, so that there is something to delete and replace."""

_LOOK = r"""
import hashlib, os
seen = {}
for top in ("/work", "/etc/opt"):
    for path, names, files in sorted(os.walk(top.encode())):
        for name in sorted(names + files):
            one = os.path.join(path, name)
            s = os.lstat(one)
            what = os.readlink(one) if os.path.islink(one) else b""
            if os.path.isfile(one) and not what:
                what = hashlib.sha256(open(one, "rb").read()).hexdigest()
            first = seen.setdefault(s.st_ino, one)
            print(ascii((one, oct(s.st_mode), what, 0 if os.path.isdir(one) else s.st_size, first)))
print(os.path.exists("/etc/inputrc"), os.getcwd(), os.environ.get("KEPT"))
"""

NAMES = st.sampled_from(
    ["a", "b", "low", "low/one", "low/in", "low/in/two", "low/hard", "d/e", "d", "new\nline", "-x", "ü"]
)
OPERATIONS = st.one_of(
    st.builds("mkdir -p -- $(dirname -- {0}); echo {1} >{0}".format, NAMES.map(shlex.quote), st.integers(0, 9)),
    st.builds("echo more >>{0}".format, NAMES.map(shlex.quote)),
    st.builds("rm -rf -- {0}".format, NAMES.map(shlex.quote)),
    st.builds("mkdir -p -- {0}".format, NAMES.map(shlex.quote)),
    st.builds("mv -f -- {0} {1}".format, NAMES.map(shlex.quote), NAMES.map(shlex.quote)),
    st.builds("ln -f -- {0} {1}".format, NAMES.map(shlex.quote), NAMES.map(shlex.quote)),
    st.builds("ln -sfn -- {0} {1}".format, NAMES.map(shlex.quote), NAMES.map(shlex.quote)),
    st.builds("chmod -- {1} {0}".format, NAMES.map(shlex.quote), st.sampled_from(["700", "755", "555"])),
    st.builds("truncate -s 200000 -- {0}".format, NAMES.map(shlex.quote)),
    st.builds("touch $(printf '{0}\\\\xff\\\\xfe')".format, st.sampled_from("ab")),
    st.just("rm -f /etc/inputrc; mkdir -p /etc/opt/x; echo y >/etc/opt/x/y"),
)  # fmt: skip
SCRIPTS = st.lists(OPERATIONS, min_size=1, max_size=12).map("\n".join)


async def seen(sandbox: Sandbox) -> str:
    result = await sandbox.shell.run(f"python3 -IB - <<'END'\n{_LOOK}\nEND\n", 30.0)
    assert result.exit_code == 0, result.output
    return result.output


async def checkpoint(sandbox: Sandbox, target: Path) -> tuple[str, ShellState]:
    """Pack twice, unpack once; the digest and the shell's state."""
    packed, again = await sandbox.pack(), await sandbox.pack()
    assert packed.digest == again.digest
    await asyncio.to_thread(unpacked, packed.path, packed.digest, target)
    return packed.digest, await sandbox.shell.state()


def unpacked(path: str, digest: str, target: Path) -> Path:
    with Path(path).open("rb") as file:
        unpack(file, target, digest=digest)
    return target


async def below(name: str, home: Path) -> str:
    async with backend_named(name, home) as backend, backend.create(SandboxSpec(limits=QUICK)) as sandbox:
        assert (await sandbox.shell.run(BELOW)).exit_code == 0
        packed = await sandbox.pack()
        return str(await asyncio.to_thread(unpacked, packed.path, packed.digest, home / "below"))


@pytest.mark.parametrize("name", ISOLATING)
def test_any_work_goes_on_where_it_stood(name: str) -> None:
    with tempfile.TemporaryDirectory() as place:
        home = Path(place)
        layer = asyncio.run(below(name, home))

        @settings(max_examples=2, deadline=None, database=None, derandomize=True, phases=[Phase.generate])
        @given(scripts=st.lists(SCRIPTS, min_size=6, max_size=6))
        def check(scripts: list[str]) -> None:
            asyncio.run(all_go_on(name, home, layer, scripts))

        check()
        remove_tree(home)


async def all_go_on(name: str, home: Path, layer: str, scripts: list[str]) -> None:
    """Several pieces of work beside each other: a backend's start costs more than a sandbox's."""
    place = Path(tempfile.mkdtemp(dir=home))
    async with backend_named(name, place / "scratch") as backend, asyncio.TaskGroup() as group:
        for number, script in enumerate(scripts):
            group.create_task(goes_on(backend, layer, place / f"upper{number}", script))


async def goes_on(backend: SandboxBackend, layer: str, upper: Path, script: str) -> None:
    spec = SandboxSpec(layers=(layer,), limits=QUICK)
    async with backend.create(spec) as sandbox:
        await sandbox.shell.run(f"{script}\nexport KEPT='a b'; cd /work/d 2>/dev/null || cd /etc", 20.0)
        before = await seen(sandbox)
        digest, state = await checkpoint(sandbox, upper)
    resumed = msgspec.structs.replace(spec, upper=str(upper), shell=state)
    async with backend.create(resumed) as sandbox:
        assert await seen(sandbox) == before, script
        assert (await sandbox.pack()).digest == digest, script


def goes_on_there(name: str, home: str, layer: str, state: bytes) -> tuple[str, str]:
    """In another process: what the sandbox looks like, and the digest of what it changed."""

    async def scenario() -> tuple[str, str]:
        spec = SandboxSpec(
            layers=(layer,), limits=QUICK, upper=f"{home}/upper", shell=msgspec.json.decode(state, type=ShellState)
        )
        async with backend_named(name, Path(home) / "other") as backend, backend.create(spec) as sandbox:
            return await seen(sandbox), (await sandbox.pack()).digest

    return asyncio.run(scenario())


def test_another_process_and_another_backend_go_on(isolating: str, tmp_path: Path) -> None:
    work = (
        "rm -r low/in; mkdir low/in; mv low/hard moved; echo 3 >>low/one; mkdir -p d; truncate -s 3M d/sparse; "
        "ln d/sparse d/again; rm -f /etc/inputrc; export KEPT='a b'; sleep 300 & cd d"
    )

    async def scenario() -> tuple[str, str, str, bytes]:
        layer = await below(isolating, tmp_path)
        async with (
            backend_named(isolating, tmp_path / "scratch") as backend,
            backend.create(SandboxSpec(layers=(layer,), limits=QUICK)) as sandbox,
        ):
            await sandbox.shell.run(work)
            look = await seen(sandbox)
            digest, state = await checkpoint(sandbox, tmp_path / "upper")
        return layer, look, digest, msgspec.json.encode(state)

    layer, look, digest, state = asyncio.run(scenario())
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        found = pool.submit(goes_on_there, OTHER[isolating], str(tmp_path), layer, state).result(60)
    assert found == (look, digest)
    assert look.endswith("False /work/d a b\n"), look
    assert look.count(", b'/work/d/again')\n") == 2, "both names are one file"
