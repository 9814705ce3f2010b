"""The host as an image: a small directory of what an agent may see beside /usr, and a digest of what it stands for."""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
from contextlib import suppress
from pathlib import Path

LINKS_OR_DIRECTORIES = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")
"""Links into /usr on a merged-usr system, which is what this backend asks for."""

EMPTY = ("dev", "home", "mnt", "opt", "proc", "run", "srv", "usr", "var", "var/cache", "var/lib", "var/log", "work")
PRIVATE = ("root",)
STICKY = ("tmp", "var/tmp")

ETC = (
    "alternatives", "bash.bashrc", "ca-certificates", "ca-certificates.conf", "debian_version", "fonts", "inputrc",
    "ld.so.cache", "ld.so.conf", "ld.so.conf.d", "locale.alias", "locale.conf", "localtime", "login.defs", "magic",
    "mime.types", "os-release", "perl", "pki", "profile", "protocols", "python3", "python3.11", "redhat-release", "rpc",
    "services", "shells", "skel", "ssl", "system-release", "terminfo", "timezone", "vim", "xattr.conf",
)  # fmt: skip
"""What programs need of /etc and no secret lies in; of these only what everybody may read is copied."""

WRITTEN = {
    "passwd": "root:x:0:0:root:/root:/bin/bash\nnobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n",
    "group": "root:x:0:\nnogroup:x:65534:\n",
    "hosts": "127.0.0.1 localhost\n::1 localhost\n127.0.1.1 sandbox\n",
    "hostname": "sandbox\n",
    "nsswitch.conf": "passwd: files\ngroup: files\nshadow: files\nhosts: files\nservices: files\nprotocols: files\n",
    "host.conf": "multi on\n",
}
"""Written anew, so that no user, host or directory service of the site is in it."""

_LARGEST_FILE = 16 * 1024 * 1024


def build_skeleton(target: Path, host: Path = Path("/")) -> None:
    """Make the lowest layer of a sandbox on the host's image: links, empty directories, the allowed part of /etc.

    Args:
        target: a new directory.
        host: the host's root.

    Raises:
        ValueError: /bin is no link into /usr, so /usr alone would make no system.
    """
    target.mkdir()
    target.chmod(0o755)
    for name in LINKS_OR_DIRECTORIES:
        there = host / name
        if there.is_symlink():
            (target / name).symlink_to(there.readlink())
        elif there.is_dir():
            raise ValueError(f"{there} is a directory of its own: the host image needs a merged-usr system")
    for names, mode in ((EMPTY, 0o755), (PRIVATE, 0o700), (STICKY, 0o1777)):
        for name in names:
            (target / name).mkdir()
            (target / name).chmod(mode)
    (target / "etc").mkdir()
    (target / "etc").chmod(0o755)
    for name in ETC:
        _copy_public(host / "etc" / name, target / "etc" / name)
    for name, text in WRITTEN.items():
        (target / "etc" / name).write_text(text)
        (target / "etc" / name).chmod(0o644)
    (target / "etc" / "mtab").symlink_to("../proc/self/mounts")


def host_digest(host: Path = Path("/")) -> str:
    """sha256, in hexadecimal, over what tells one host image from another: release, programs and their sizes.

    Two nodes installed alike agree; an upgrade of the system changes it. Reads names only, in a few milliseconds.
    """
    digest = hashlib.sha256()
    with suppress(OSError):
        digest.update((host / "etc/os-release").read_bytes())
    for directory in ("usr/bin", "usr/local/bin", "usr/lib/python3/dist-packages"):
        with suppress(OSError):
            for entry in sorted(os.scandir(host / directory), key=lambda found: found.name):
                size = entry.stat(follow_symlinks=False).st_size if entry.is_file(follow_symlinks=False) else 0
                digest.update(f"{directory}/{entry.name} {size}\n".encode("utf-8", "surrogateescape"))
    return digest.hexdigest()


def _copy_public(source: Path, target: Path) -> None:
    """Copy links as links, and files and directories that everybody may read; anything else is left out."""
    with suppress(OSError):
        status = source.lstat()
        if stat.S_ISLNK(status.st_mode):
            target.symlink_to(source.readlink())
        elif stat.S_ISREG(status.st_mode) and status.st_mode & 0o004 and status.st_size <= _LARGEST_FILE:
            shutil.copyfile(source, target)
            target.chmod(0o755 if status.st_mode & 0o001 else 0o644)
        elif stat.S_ISDIR(status.st_mode) and status.st_mode & 0o005 == 0o005:
            target.mkdir()
            target.chmod(0o755)
            for entry in sorted(source.iterdir()):
                _copy_public(entry, target / entry.name)
