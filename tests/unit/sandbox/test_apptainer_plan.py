"""The command line of an Apptainer sandbox."""

from __future__ import annotations

import subprocess
from pathlib import Path

from sandbox.apptainer_plan import DEVICES, apptainer_argv, mounts
from sandbox.mountplan import plan_overlays


def argv(image: str = "host", *, alone: bool = False) -> list[str]:
    overlays = plan_overlays(image, Path("/skeleton"), [Path("/l/one")], [])
    return apptainer_argv(
        Path("/s"), overlays, {"A": "b c"}, ["/bin/prog", "x"], read_only=["/proc/sys"], cwd="/w",
        alone=alone,
    )  # fmt: skip


def test_every_namespace_is_left_and_every_privilege_dropped() -> None:
    words = argv()
    assert {"--contain", "--pid", "--cleanenv", "--no-home", "--no-privs", "--net"} <= set(words)
    assert {"--mount", "--cgroup", "--uts", "--ipc"} <= set(words[: words.index("/bin/sh")])
    assert words[words.index("--network") + 1] == "none"
    assert words[words.index("--no-mount") + 1] == "sys,dev,home,tmp,hostfs,cwd,bind-paths"
    assert "max_user_namespaces" in words[words.index("-c") + 1]
    assert words[words.index("--pdeathsig") + 1] == "KILL" and "--kill-child" in words
    assert "--fakeroot" not in words and "--overlay" not in words


def test_the_overlays_are_mounted_first_and_the_image_is_the_merged_directory() -> None:
    table = mounts(plan_overlays("host", Path("/skeleton"), [Path("/l/one")], []), 7).splitlines()
    options = "userxattr,lowerdir=lower/root0:lower/root1,upperdir=upper/root,workdir=wk/root"
    assert table[0] == f"overlay merged overlay {options} 0 0" and table[1].startswith("overlay merged/usr overlay ")
    assert table[2:-2] == [f"/dev/{name} dev/{name} none bind 0 0" for name in DEVICES]
    assert table[-2].startswith("devpts dev/pts devpts newinstance,") and ",size=7m," in table[-1].replace(
        " size", ",size"
    )
    words = argv()
    assert words.index("/bin/sh") < words.index("apptainer") and "mount -n -a -T fstab" in words[words.index("-c") + 1]
    binds = words[words.index("--bind") + 1].split(",")
    assert binds == ["merged/usr:/usr", "dev:/dev:ro", "/proc/sys:/proc/sys:ro"]
    assert argv("/image")[argv("/image").index("--bind") + 1].split(",")[0] == "dev:/dev:ro"


def test_a_program_alone_has_no_init() -> None:
    assert "--no-init" in argv(alone=True) and "--no-init" not in argv()


def test_the_program_gets_its_environment_and_nothing_else() -> None:
    words = argv()
    inside = words[words.index("/bin/bash") :]
    assert inside[-5:] == ["A=b c", "--", "/w", "/bin/prog", "x"]
    script = inside[inside.index("-c") + 1]
    done = subprocess.run(
        ["/bin/bash", "--norc", "--noprofile", "-c", script, "bash", "", "A=b c\n$(x)", "PATH=/usr/bin:/bin", "--",
         "/tmp", "env", "-0"],
        env={"LEAKED": "1", "APPTAINER_BIND": "/host", "PROMPT_COMMAND": "echo no", "A": "other"},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    variables = dict(line.split("=", 1) for line in done.stdout.split("\0") if line)
    assert variables.pop("A") == "b c\n$(x)" and variables.pop("PATH") == "/usr/bin:/bin"
    assert set(variables) <= {"PWD", "SHLVL", "_"}
