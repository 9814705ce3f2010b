"""A real image (Debian's packages) under every backend that isolates: the same files, tools and layers."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
from pathlib import Path

import pytest

from sandbox.errors import ImageError
from sandbox.images.pack import pack_image
from sandbox.layers import unpack
from sandbox.protocols import CommandResult, Sandbox, SandboxSpec
from tests.integration.sandbox.grounds import QUICK, backend_named, in_sandbox


def run(name: str, scratch: Path, spec: SandboxSpec, *commands: str) -> list[CommandResult]:
    async def body(sandbox: Sandbox) -> list[CommandResult]:
        return [await sandbox.shell.run(command, 60.0) for command in commands]

    return in_sandbox(name, scratch, body, spec)


def test_the_tools_of_an_image_work(isolating: str, tmp_path: Path, debian: Path) -> None:
    python, git, owner, writing, host = run(
        isolating, tmp_path, SandboxSpec(image=str(debian), limits=QUICK),
        "python3 -c 'import sys, ssl, sqlite3, ctypes; print(sys.version_info[0])'",
        "git init -q . && git -c user.name=a -c user.email=b commit -q --allow-empty -m one && git log --format=%s",
        "stat -c %U /usr/bin/git /etc/passwd /root; id -u",
        "cd /usr/share && rm -r perl5 && mkdir perl5 && ls -A perl5; echo x >/etc/motd; rm /usr/bin/git",
        "ls -A /home /mnt /srv; ls -d /usr/share/doc/bash",
    )  # fmt: skip
    assert python.output == "3\n" and git.output == "one\n"
    assert owner.output.split() == ["root", "root", "root", "0"]
    assert (writing.exit_code, writing.output) == (0, "")
    assert "/usr/share/doc/bash" not in host.output.replace("access '/usr/share/doc/bash'", "")
    assert (debian / "usr/bin/git").exists() and (debian / "usr/share/perl5").is_dir()


def test_an_image_says_where_its_programs_are(isolating: str, tmp_path: Path, debian: Path) -> None:
    spec = SandboxSpec(image=str(debian), env={"PATH": "/opt/own:/usr/bin:/bin", "GREETING": "a b"}, limits=QUICK)
    (result,) = run(isolating, tmp_path, spec, "echo $PATH; echo $GREETING; bash -c 'echo $GREETING'")
    assert result.output == "/opt/own:/usr/bin:/bin\na b\na b\n"


def test_both_backends_pack_the_same_layer_on_an_image(tmp_path: Path, debian: Path) -> None:
    work = (
        "mkdir -p a/b; echo 1 >a/b/c; ln -s c a/b/d; chmod 700 a; rm -r /usr/share/perl5 /etc/profile; "
        "mkdir /usr/share/perl5; mv /usr/bin/git /usr/bin/other; touch /tmp/t /var/tmp/t; echo y >>/etc/passwd"
    )

    async def digest(name: str) -> str:
        async with (
            backend_named(name, tmp_path / name) as backend,
            backend.create(SandboxSpec(image=str(debian), limits=QUICK)) as sandbox,
        ):
            result = await sandbox.shell.run(work)
            assert result.exit_code == 0, result.output
            packed = await sandbox.pack()
            with await asyncio.to_thread(Path(packed.path).open, "rb") as file:
                await asyncio.to_thread(unpack, file, tmp_path / f"layer-{name}", digest=packed.digest)
        layers = (str(tmp_path / f"layer-{name}"),)
        other = {"bubblewrap": "apptainer", "apptainer": "bubblewrap"}[name]
        async with (
            backend_named(other, tmp_path / other) as backend,
            backend.create(SandboxSpec(image=str(debian), layers=layers, limits=QUICK)) as sandbox,
        ):
            seen = await sandbox.shell.run(
                "cat a/b/d; ls /usr/share/perl5; ls /etc/profile /usr/bin/git; tail -1 /etc/passwd"
            )
            assert (
                seen.output.startswith("1\n")
                and seen.output.endswith("y\n")
                and seen.output.count("cannot access") == 2
            )
        return packed.digest

    assert asyncio.run(digest("bubblewrap")) == asyncio.run(digest("apptainer"))


def test_a_sif_is_what_it_was_built_from(tmp_path: Path) -> None:
    root = tmp_path / "root"
    shutil.copytree("/etc/apt", root / "etc/apt", ignore=lambda *_: ["auth.conf.d"], symlinks=True)
    for name in ("bin", "tmp", "proc", "dev", "sys", "run", "usr/bin"):
        (root / name).mkdir(parents=True)
    (root / "tmp").chmod(0o1777)
    shutil.copy(Path("/bin/bash").resolve(), root / "bin/bash")
    (root / "bin/sh").symlink_to("bash")
    image = tmp_path / "image.sif"
    made = subprocess.run(
        ["unshare", "--user", "--map-root-user", "--", "apptainer", "--silent", "build", str(image), str(root)],
        env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "HOME": str(tmp_path), "APPTAINER_TMPDIR": str(tmp_path)},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert made.returncode == 0, made.stderr
    packed = pack_image(image, tmp_path / "image.tar.zst", tmp_path / "scratch")
    with Path(packed.layer.path).open("rb") as file:
        unpack(file, tmp_path / "unpacked", digest=packed.layer.digest)
    assert (tmp_path / "unpacked/bin/bash").read_bytes() == (root / "bin/bash").read_bytes()
    assert not (tmp_path / "unpacked/.singularity.d").exists()
    assert list((tmp_path / "scratch").iterdir()) == []


def test_a_damaged_sif_is_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "image.sif").write_bytes(bytes(32) + b"SIF_MAGIC" + bytes(5000))
    with pytest.raises(ImageError, match=r"apptainer cannot unpack \S+: \S+") as caught:
        pack_image(tmp_path / "image.sif", tmp_path / "image.tar.zst", tmp_path / "scratch")
    assert "\n" not in str(caught.value)
