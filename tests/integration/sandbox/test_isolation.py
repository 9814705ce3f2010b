"""What backends that isolate keep from an agent; each test tries to get it."""

from __future__ import annotations

import asyncio
import os
import socket
from pathlib import Path

import pytest

from sandbox.choose import choose
from sandbox.errors import SandboxError, SandboxUnavailable
from sandbox.none import NoneBackend
from sandbox.protocols import CommandResult, Sandbox, SandboxLimits, SandboxSpec
from tests.integration.sandbox.grounds import QUICK, backend_named, image_directory, in_sandbox

REPOSITORY = Path(__file__).resolve().parents[3]


def run(name: str, scratch: Path, *commands: str, spec: SandboxSpec | None = None) -> list[CommandResult]:
    async def body(sandbox: Sandbox) -> list[CommandResult]:
        return [await sandbox.shell.run(command, 20.0) for command in commands]

    return in_sandbox(name, scratch, body, spec)


def probed(name: str, scratch: Path) -> str:
    async def scenario() -> str:
        backend = await choose(name, scratch)
        async with backend:
            return backend.name

    return asyncio.run(scenario())


def test_the_probe_passes_here(isolating: str, tmp_path: Path) -> None:
    assert probed(isolating, tmp_path) == isolating
    assert list(tmp_path.iterdir()) == []


def test_auto_takes_bubblewrap_and_apptainer_where_that_does_not_isolate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert probed("auto", tmp_path) == "bubblewrap"
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "bwrap").write_text("#!/bin/sh\necho 'bwrap: not on this machine' >&2\nexit 1\n")
    (programs / "bwrap").chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    assert probed("auto", tmp_path / "scratch") == "apptainer"
    assert list((tmp_path / "scratch").iterdir()) == []


def test_there_is_no_network(isolating: str, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket(socket.AF_UNIX) as abstract:
        abstract.bind("\0rollmill-test-" + str(os.getpid()))
        abstract.listen()
        devices, loopback, route, unix, names = run(
            isolating,
            tmp_path,
            "tail -n +3 /proc/net/dev | cut -d: -f1",
            f"exec 3<>/dev/tcp/127.0.0.1/{server.getsockname()[1]}",
            "exec 3<>/dev/tcp/192.0.2.1/80",
            "grep -c rollmill-test- /proc/net/unix",
            "exec 3<>/dev/tcp/example.com/80",
        )
    assert devices.output.split() == ["lo"]
    assert loopback.exit_code != 0 and "refused" in loopback.output
    assert route.exit_code != 0 and "unreachable" in route.output
    assert unix.output == "0\n"
    assert names.exit_code != 0


def test_nothing_of_the_host_is_visible(isolating: str, tmp_path: Path) -> None:
    marked = tmp_path / "host-file"
    marked.write_text("host")
    scratch = tmp_path / "scratch"
    paths = [REPOSITORY, Path.home(), tmp_path, scratch, marked, Path("/sys/class"), Path("/etc/shadow"), Path("/boot")]
    paths += [Path(__file__), Path("/var/lib/dpkg"), Path("/run/user"), Path("/etc/ssh"), Path("/etc/ssl/private")]
    seen = [path for path in paths if path not in (Path("/root"), Path("/"))]
    result, empty, name, groups = run(
        isolating,
        scratch,
        "\n".join(f"[ -e '{path}' ] && echo visible '{path}'" for path in seen),
        "ls -A /home /root /opt /srv /mnt /run /work /tmp",
        "cat /proc/sys/kernel/hostname",
        "cat /proc/self/cgroup",
    )
    assert result.output == ""
    lines = [line for line in empty.output.split("\n") if line and not line.endswith(":")]
    assert lines == []
    assert name.output == "sandbox\n" and "slurm" not in groups.output


def test_the_mount_table_names_no_directory_of_the_host(isolating: str, tmp_path: Path) -> None:
    (result,) = run(isolating, tmp_path, "cat /proc/mounts")
    assert str(tmp_path) not in result.output


def test_no_host_process_is_visible(isolating: str, tmp_path: Path) -> None:
    processes, worker, signalled = run(
        isolating, tmp_path, "cat /proc/[0-9]*/comm | sort -u", f"ls -d /proc/{os.getpid()}", f"kill -0 {os.getpid()}"
    )
    assert set(processes.output.split()) <= {"bash", "bwrap", "appinit", "cat", "sort"}
    assert worker.exit_code != 0 and signalled.exit_code != 0


def test_another_sandbox_is_not_visible(isolating: str, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with backend_named(isolating, tmp_path) as backend:
            one, other = (backend.create(SandboxSpec(limits=QUICK)) for _ in range(2))
            await one.shell.run("echo secret >/tmp/mine; (exec -a hidden-process sleep 100) & ")
            seen = await other.shell.run(f"ls -A /tmp {tmp_path}; cat /proc/[0-9]*/cmdline | tr '\\0' ' '; ls /dev/shm")
            assert "mine" not in seen.output and "hidden-process" not in seen.output
            assert "No such file" in seen.output

    asyncio.run(scenario())


def test_the_environment_is_clean(isolating: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("SLURM_JOB_ID", "PMIX_RANK", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(variable, "leaked")
    result, everywhere = run(
        isolating, tmp_path, "env | cut -d= -f1 | sort", "cat /proc/[0-9]*/environ | tr '\\0' '\\n' | grep -c leaked",
        spec=SandboxSpec(env={"MINE": "yes"}),
    )  # fmt: skip
    allowed = {"PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "TERM", "PAGER", "GIT_PAGER", "MANPAGER", "MINE"}
    assert set(result.output.split()) - allowed <= {"PWD", "SHLVL", "_", "OLDPWD", "VIRTUAL_ENV_DISABLE_PROMPT"}
    assert "MINE" in result.output.split()
    assert everywhere.output == "0\n"


def test_the_host_is_not_written(isolating: str, tmp_path: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in map(Path, ("/usr", "/usr/bin", "/usr/lib", "/etc"))}
    _, _, listing = run(
        isolating, tmp_path, "echo x >/usr/rollmill-was-here",
        "rm -f /usr/bin/env /usr/bin/true; echo x >/usr/bin/planted",
        "ls /usr; mkdir /new; touch /etc/new; ls -d /new /etc/new",
    )  # fmt: skip
    assert "rollmill-was-here" in listing.output and "/etc/new" in listing.output
    assert not Path("/usr/rollmill-was-here").exists() and not Path("/new").exists() and not Path("/etc/new").exists()
    assert Path("/usr/bin/env").exists() and not Path("/usr/bin/planted").exists()
    assert before == {path: path.stat().st_mtime_ns for path in before}


def test_no_privilege_is_held_or_gained(isolating: str, tmp_path: Path) -> None:
    capabilities, nested, mounting, devices, sysctl, kernel = run(
        isolating,
        tmp_path,
        "grep Cap /proc/self/status | cut -f2 | sort -u; grep NoNewPrivs /proc/self/status",
        "unshare -Ur true",
        "mount -t tmpfs none /tmp",
        "mknod /tmp/disk b 8 0; echo 1 >/dev/planted",
        "echo 1 >/proc/sys/kernel/hostname; echo b >/proc/sysrq-trigger",
        "find /proc -path '/proc/[0-9]*' -prune -o -type f -writable -print 2>/dev/null",
    )
    assert capabilities.output.split() == ["0000000000000000", "NoNewPrivs:", "1"]
    assert nested.exit_code != 0 and mounting.exit_code != 0
    assert devices.exit_code != 0 and sysctl.exit_code != 0
    # for a worker that runs as root: core_pattern, for one, names a program that the kernel runs outside
    assert [path for path in kernel.output.split() if path.startswith("/proc/sys")] == []


def test_shared_memory_is_there_and_bounded(isolating: str, tmp_path: Path) -> None:
    (result,) = run(
        isolating, tmp_path, "head -c 20M /dev/zero >/dev/shm/fill; wc -c </dev/shm/fill",
        spec=SandboxSpec(limits=SandboxLimits(shm_mib=4)),
    )  # fmt: skip
    assert result.output.strip().endswith(str(4 * 1024 * 1024))


def test_an_image_directory_is_the_whole_root(isolating: str, tmp_path: Path) -> None:
    image = image_directory(tmp_path / "image")
    listing, who, gone = run(
        isolating, tmp_path / "scratch", "ls /", "cat /etc/passwd", "rm /etc/passwd; echo x >/etc/y",
        spec=SandboxSpec(image=str(image), limits=QUICK),
    )  # fmt: skip
    assert "home" not in listing.output.split() and "work" in listing.output.split()
    assert "image" in who.output and gone.exit_code == 0
    assert (image / "etc/passwd").exists() and not (image / "etc/y").exists()


@pytest.mark.parametrize("bad", ["relative", "/nowhere/at/all", "link"])
def test_a_wrong_layer_or_image_is_refused(isolating: str, tmp_path: Path, bad: str) -> None:
    (tmp_path / "link").symlink_to("/")
    path = str(tmp_path / "link") if bad == "link" else bad
    for spec in (SandboxSpec(layers=(path,)), SandboxSpec(image=path)):
        with pytest.raises(SandboxError, match="not an absolute path of a directory") as caught:
            run(isolating, tmp_path / "scratch", "true", spec=spec)
        assert caught.value.boundary == "start"


def test_a_layer_whose_usr_is_a_link_is_refused(isolating: str, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.mkdir()
    (secret / "rollmill-secret").write_text("host")
    layer = tmp_path / "layer"
    layer.mkdir()
    (layer / "usr").symlink_to(secret)
    with pytest.raises(SandboxError, match="/usr is no directory in layer"):
        run(isolating, tmp_path / "scratch", "ls -R /usr /work", spec=SandboxSpec(layers=(str(layer),)))


@pytest.mark.parametrize(
    ("name", "mending"),
    [
        ("auto", "apt-get install -y bubblewrap"),
        ("bubblewrap", "apt-get install -y bubblewrap"),
        ("apptainer", "module load"),
    ],
)
def test_a_machine_without_the_program_is_refused_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, mending: str
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SandboxUnavailable) as caught:
        asyncio.run(choose(name, tmp_path / "scratch"))
    assert mending in str(caught.value) and "\n" not in str(caught.value)
    assert not (tmp_path / "scratch").exists() or list((tmp_path / "scratch").iterdir()) == []


def test_a_machine_that_refuses_namespaces_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "unshare").write_text(
        "#!/bin/sh\necho 'unshare: unshare failed: Operation not permitted' >&2\nexit 1\n"
    )
    (programs / "unshare").chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    with pytest.raises(SandboxUnavailable) as caught:
        asyncio.run(choose("auto", tmp_path / "scratch"))
    message = str(caught.value)
    assert "Operation not permitted" in message and "user namespaces" in message and "sandbox=none" in message
    assert list((tmp_path / "scratch").iterdir()) == []


def test_a_name_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SandboxError, match="'docker' is none of auto"):
        asyncio.run(choose("docker", tmp_path))


def test_none_warns_once(tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(NoneBackend, "_warned", False)

    async def scenario() -> None:
        for _ in range(2):
            async with await choose("none", tmp_path) as backend:
                assert backend.name == "none"

    asyncio.run(scenario())
    assert caplog.text.count("without isolation") == 1
