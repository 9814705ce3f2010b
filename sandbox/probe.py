"""The isolation probe: a real sandbox on two layers is made and tried, and what fails is named with its mending."""

from __future__ import annotations

import asyncio
import os
import shutil
import stat
from pathlib import Path

from sandbox.errors import SandboxError, SandboxUnavailable
from sandbox.protocols import SandboxBackend, SandboxLimits, SandboxSpec
from sandbox.scratch import make_private, remove_tree
from sandbox.uppertree import OPAQUE_XATTR

PACKAGES = {
    "bwrap": "bubblewrap",
    "unshare": "util-linux",
    "mount": "mount",
    "setpriv": "util-linux",
    "hostname": "hostname",
    "bash": "bash",
}

_CHECKS = """
fail() { echo "probe: $1"; exit 1; }
cd /probe || fail 'the layers are not visible'
[ "$(cat keep)" = upper ] || fail 'the upper layer does not cover the lower one'
[ ! -e gone ] || fail 'a whiteout of the upper layer does not hide the file below'
[ ! -e full/below ] || fail 'an opaque directory does not hide what lies below'
rm keep && [ ! -e keep ] && echo new >keep && [ "$(cat keep)" = new ] || fail 'a file cannot be removed and made again'
rm -r full && mkdir full && [ -z "$(ls full)" ] || fail 'a directory cannot be removed and made again'
while IFS=: read -r name rest; do
  case $name in *'|'*|*lo) ;; *) fail "the network device$name is visible" ;; esac
done </proc/net/dev
[ ! -e "$ROLLMILL_PROBE_HIDDEN" ] || fail "a directory of the host is visible: $ROLLMILL_PROBE_HIDDEN"
[ "$(echo /proc/[0-9]* | wc -w)" -le 8 ] || fail 'processes of the host are visible'
"""

_KNOBS = (
    ("/proc/sys/kernel/unprivileged_userns_clone", "0", "sysctl kernel.unprivileged_userns_clone=1"),
    ("/proc/sys/user/max_user_namespaces", "0", "sysctl user.max_user_namespaces=65536"),
    (
        "/proc/sys/kernel/apparmor_restrict_unprivileged_userns", "1",
        "sysctl kernel.apparmor_restrict_unprivileged_userns=0",
    ),
)  # fmt: skip


def require_programs(*names: str) -> None:
    """Check that programs are there.

    Raises:
        SandboxUnavailable: names what is missing and the command that installs it.
    """
    missing = [name for name in names if shutil.which(name) is None]
    if missing:
        packages = " ".join(dict.fromkeys(PACKAGES.get(name, name) for name in missing))
        raise SandboxUnavailable(
            f"{', '.join(missing)} not found in PATH; run: apt-get install -y {packages}", boundary="probe"
        )


async def probe_isolation(backend: SandboxBackend, scratch: Path) -> None:
    """Start a sandbox of the backend on two layers and try removing, making again, the network and the host.

    Args:
        backend: the backend to be probed.
        scratch: node-local directory for the layers.

    Raises:
        SandboxUnavailable: what failed, what the machine said, and what to ask for.
    """
    home = await asyncio.to_thread(make_private, scratch, "probe-")
    try:
        layers = await asyncio.to_thread(_make_layers, home)
        env = {"ROLLMILL_PROBE_HIDDEN": str(home)}
        limits = SandboxLimits(start_s=20.0)
        async with backend.create(SandboxSpec(layers=layers, env=env, limits=limits)) as sandbox:
            result = await sandbox.shell.run(_in_subshell(_CHECKS), timeout_s=20.0)
        if result.exit_code != 0:
            raise SandboxUnavailable(
                f"{backend.name} does not isolate here: {result.output.strip()}", boundary="probe", output=result.output
            )
    except SandboxUnavailable:
        raise
    except SandboxError as error:
        raise SandboxUnavailable(
            f"{backend.name} cannot start a sandbox: {error}; {_advice(str(error))}", boundary="probe"
        ) from error
    finally:
        await asyncio.to_thread(remove_tree, home)


def _in_subshell(script: str) -> str:
    return f"( {script} )"


def _make_layers(home: Path) -> tuple[str, str]:
    lower, upper = home / "lower/probe", home / "upper/probe"
    (lower / "full").mkdir(parents=True)
    (upper / "full").mkdir(parents=True)
    for path in (lower / "keep", lower / "gone", lower / "full/below"):
        path.write_text("lower\n")
    (upper / "keep").write_text("upper\n")
    try:
        os.mknod(upper / "gone", stat.S_IFCHR, 0)
        os.setxattr(upper / "full", OPAQUE_XATTR, b"y")
    except OSError as error:
        raise SandboxUnavailable(
            f"{home.parent} cannot hold a layer's deletions ({error.strerror}): give a node-local ext4 or xfs "
            "directory (cluster.scratch)",
            boundary="probe",
        ) from error
    for directory in (home / "lower", home / "upper"):
        directory.chmod(0o755)
    return str(home / "lower"), str(home / "upper")


def _advice(said: str) -> str:
    """What to ask for, from what the machine said and from the kernel's own switches."""
    for name, bad, mending in _KNOBS:
        try:
            if Path(name).read_text().strip() == bad:
                return f"ask the administrator for: {mending}"
        except OSError:
            continue
    if "overlay" in said or "wrong fs type" in said:
        return (
            "the kernel refuses an overlay mount here: it needs Linux >= 5.11 and a scratch directory that is neither "
            "overlayfs nor a network filesystem (cluster.scratch)"
        )
    if "Unknown option" in said:
        return "bubblewrap >= 0.8 is needed"
    return "user namespaces must be allowed for this user (seccomp, AppArmor or a container may forbid them)"
