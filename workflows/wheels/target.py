"""Which wheels a sandbox's Python takes: asked inside it, and said to pip outside as flags and markers."""

from __future__ import annotations

import msgspec

from workflows.wheels.errors import WheelError

PROBE = """
import json, os, platform, sys, sysconfig
def release(v):
    return "%d.%d.%d" % v[:3] + ("" if v[3] == "final" else v[3][0] + str(v[4]))
libc, libc_version = platform.libc_ver()
print(json.dumps({
    "executable": os.path.realpath(sys.executable),
    "libc": "musl" if os.path.exists("/lib/ld-musl-%s.so.1" % platform.machine()) else libc,
    "libc_version": libc_version,
    "markers": {
        "implementation_name": sys.implementation.name,
        "implementation_version": release(sys.implementation.version),
        "os_name": os.name,
        "platform_machine": platform.machine(),
        "platform_python_implementation": platform.python_implementation(),
        "platform_release": "",
        "platform_system": platform.system(),
        "platform_version": "",
        "python_full_version": platform.python_version(),
        "python_version": "%d.%d" % sys.version_info[:2],
        "sys_platform": sys.platform,
    },
}))
"""
"""Prints a PythonTarget as JSON; run it with the sandbox's Python. Kernel release and version are left empty: they
differ from node to node, and a lock must not."""

_LEGACY = ((17, "manylinux2014"), (12, "manylinux2010"), (5, "manylinux1"))
"""The names before PEP 600, and the glibc 2.N that each stands for."""


class PythonTarget(msgspec.Struct, frozen=True):
    """An interpreter for which wheels are chosen.

    Args:
        executable: its real path in the sandbox.
        markers: its values of the environment markers of PEP 508.
        libc: "glibc", "musl", or what else it says.
        libc_version: of glibc; empty where unknown.
    """

    executable: str
    markers: dict[str, str]
    libc: str = "glibc"
    libc_version: str = ""

    @property
    def version(self) -> str:
        """Major and minor, as in "3.11"."""
        return self.markers["python_version"]

    @property
    def platforms(self) -> list[str]:
        """Platform tags that it takes, best first (PEP 600, PEP 656).

        Raises:
            WheelError: it does not say which glibc it stands on.
        """
        machine = self.markers["platform_machine"]
        if self.libc == "musl":
            return [f"musllinux_1_{minor}_{machine}" for minor in (2, 1)] + [f"linux_{machine}"]
        try:
            newest = int(self.libc_version.split(".")[1])
        except (IndexError, ValueError):
            raise WheelError(f"{self.executable}: libc {self.libc!r} {self.libc_version!r} is none we know") from None
        oldest = 5 if machine in ("x86_64", "i686") else 17
        tags = [f"manylinux_2_{minor}_{machine}" for minor in range(newest, oldest - 1, -1)]
        tags += [f"{name}_{machine}" for minor, name in _LEGACY if oldest <= minor <= newest]
        return [*tags, f"linux_{machine}"]

    @property
    def identity(self) -> dict[str, str]:
        """What the choice of wheels depends on: the patch release of Python does not change it, its path neither."""
        chosen = {name: value for name, value in self.markers.items() if name != "implementation_version"}
        chosen["python_full_version"] = self.version
        return {**chosen, "libc": self.libc, "libc_version": self.libc_version}


def parse(text: bytes | str) -> PythonTarget:
    """What PROBE printed.

    Raises:
        WheelError: it printed something else.
    """
    try:
        return msgspec.json.decode(text, type=PythonTarget)
    except msgspec.DecodeError as error:
        raise WheelError(f"the sandbox's Python did not say what it is: {error}: {text[:200]!r}") from error
