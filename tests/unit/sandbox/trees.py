"""Trees in overlay format: made from a description, read back, and drawn at random."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from sandbox.uppertree import OPAQUE_XATTR

Tree = dict[bytes, Any]
"""name -> ("dir", mode, opaque, Tree) | ("file", mode, content) | ("link", target) | ("gone",)"""

NAMES = st.one_of(
    st.binary(min_size=1, max_size=8),
    st.sampled_from([b"a", b"b", b"new\nline", b"\xff\xfe", b" ", b"-rf", b"x" * 200]),
).filter(
    lambda name: b"/" not in name and b"\0" not in name and name not in (b".", b"..") and not name.startswith(b".wh.")
)
MODES = st.integers(0, 0o777)
TARGETS = st.binary(min_size=1, max_size=150).filter(lambda target: b"\0" not in target)
LEAVES = st.one_of(
    st.tuples(st.just("file"), MODES, st.binary(max_size=1500)),
    st.tuples(st.just("link"), TARGETS),
    st.tuples(st.just("gone")),
)
TREES = st.recursive(
    st.dictionaries(NAMES, LEAVES, max_size=4),
    lambda inner: st.dictionaries(
        NAMES, st.one_of(LEAVES, st.tuples(st.just("dir"), MODES, st.booleans(), inner)), max_size=4
    ),
    max_leaves=12,
)


def make(directory: Path | bytes, tree: Tree) -> None:
    base = os.fsencode(directory)
    os.makedirs(base, exist_ok=True)
    for name, node in tree.items():
        path = base + b"/" + name
        if node[0] == "dir":
            make(path, node[3])
            if node[2]:
                os.setxattr(path, OPAQUE_XATTR, b"y")
            os.chmod(path, node[1])
        elif node[0] == "file":
            with open(path, "wb") as file:
                file.write(node[2])
            os.chmod(path, node[1])
        elif node[0] == "link":
            os.symlink(node[1], path)
        else:
            os.mknod(path, stat.S_IFCHR, 0)


def read(directory: Path | bytes) -> Tree:
    base = os.fsencode(directory)
    tree: Tree = {}
    for name in os.listdir(base):
        path = base + b"/" + name
        status = os.lstat(path)
        mode = stat.S_IMODE(status.st_mode)
        if stat.S_ISDIR(status.st_mode):
            opaque = OPAQUE_XATTR in os.listxattr(path)
            os.chmod(path, 0o700)
            tree[name] = ("dir", mode, opaque, read(path))
            os.chmod(path, mode)
        elif stat.S_ISREG(status.st_mode):
            os.chmod(path, 0o600)
            with open(path, "rb") as file:
                tree[name] = ("file", mode, file.read())
            os.chmod(path, mode)
        elif stat.S_ISLNK(status.st_mode):
            tree[name] = ("link", os.readlink(path))
        else:
            tree[name] = ("gone",)
    return tree
