"""The mount plan: which overlays, in which order, and the command line."""

from __future__ import annotations

from pathlib import Path

import pytest

from sandbox.errors import SandboxError
from sandbox.mountplan import KERNEL_FILES, MAX_LAYERS, bwrap_argv, enter_argv, plan_overlays

SKELETON = Path("/scratch/skeleton")


def test_the_host_image_is_two_overlays() -> None:
    layers = [Path("/l/one"), Path("/l/two"), Path("/l/three")]
    root, usr = plan_overlays("host", SKELETON, layers, [layers[0], layers[2]])
    assert (root.mount_at, usr.mount_at) == ("merged", "merged/usr")
    assert list(root.lowers.values()) == [Path("/l/three"), Path("/l/two"), Path("/l/one"), SKELETON]
    assert list(usr.lowers.values()) == [Path("/l/three/usr"), Path("/l/one/usr"), Path("/usr")]


def test_an_image_directory_is_one_overlay() -> None:
    (root,) = plan_overlays("/images/x", SKELETON, [Path("/l/one")], [Path("/l/one")])
    assert list(root.lowers.values()) == [Path("/l/one"), Path("/images/x")]


def test_options_are_relative_so_that_no_name_needs_quoting() -> None:
    root, usr = plan_overlays("host", SKELETON, [Path("/l/a,b:c\\d")], [])
    assert root.options == "userxattr,lowerdir=lower/root0:lower/root1,upperdir=upper/root,workdir=wk/root"
    assert usr.options == "userxattr,lowerdir=lower/usr0,upperdir=upper/usr,workdir=wk/usr"


def test_a_long_chain_is_refused() -> None:
    layers = [Path(f"/l/{number}") for number in range(MAX_LAYERS + 1)]
    assert plan_overlays("host", SKELETON, layers[1:], [])
    with pytest.raises(SandboxError, match=r"9 layers; at most 8 .*squash"):
        plan_overlays("host", SKELETON, layers, [])


def test_every_namespace_is_left_and_every_privilege_dropped() -> None:
    argv = bwrap_argv(Path("/s/merged"), {"A": "b c"}, 64)
    for option in ("user", "pid", "net", "uts"):
        assert f"--unshare-{option}" in argv
    assert {"--disable-userns", "--die-with-parent", "--clearenv"} <= set(argv)
    assert argv[argv.index("--cap-drop") + 1] == "ALL"
    assert argv[argv.index("--setenv") : argv.index("--setenv") + 3] == ["--setenv", "A", "b c"]
    assert argv.index("--clearenv") < argv.index("--setenv") and argv[-1] == "--"
    assert "--new-session" not in argv and "--share-net" not in argv
    binds = [argv[place + 1 : place + 3] for place, word in enumerate(argv) if "bind" in word]
    assert binds == [["/s/merged", "/"], *([path, path] for path in KERNEL_FILES)]
    assert binds[1] == ["/proc/sys", "/proc/sys"] and "--bind" not in argv[argv.index("--proc") :]


def test_the_command_line_mounts_in_order_and_ends_in_bash() -> None:
    overlays = plan_overlays("host", SKELETON, [], [])
    argv = enter_argv(Path("/s"), overlays, {}, 64)
    assert argv[:3] == ["unshare", "--user", "--map-root-user"] and "--ipc" in argv[: argv.index("--")]
    assert argv.index("merged") < argv.index("merged/usr") < argv.index("bwrap")
    assert argv[-5:] == ["/bin/bash", "--norc", "--noprofile", "--noediting", "-i"]
