"""Protected paths: whatever a hostile workspace layer holds, protected places show what the layers below have."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sandbox.protect import Protection
from sandbox.selection import Selection
from sandbox.uppertree import OPAQUE_XATTR

WORKSPACE = ("/w",)
PROTECTED = ("conftest.py", "/w/t", "/w/a/b/*.cfg", ".git")

WHITEOUT, OPAQUE = object(), object()
Tree = dict  # name -> Tree, text, ("link", target), WHITEOUT; the key OPAQUE marks a directory

names = st.sampled_from(["a", "b", "t", "x", "conftest.py", ".git", "s.cfg"])
leaves = st.one_of(st.text("uvw", max_size=2), st.sampled_from(["/etc", "a", "../t", "t"]).map(lambda to: ("link", to)))


def trees(layer: bool) -> st.SearchStrategy[Tree]:
    leaf = st.one_of(leaves, st.just(WHITEOUT)) if layer else leaves
    node = st.recursive(leaf, lambda inner: st.dictionaries(names, inner, max_size=4), max_leaves=12)
    inside = st.dictionaries(names, node, max_size=5)
    if not layer:
        return inside
    return st.one_of(inside, inside.flatmap(lambda tree: st.just({OPAQUE: True, **tree})))


@st.composite
def layers(draw: st.DrawFn) -> Tree:
    """A hostile layer: /w is anything, directories in it are opaque here and there, and something lies beside /w."""
    root = draw(st.one_of(trees(True), leaves, st.just(WHITEOUT)))
    return {"w": _sprinkled(draw, root), "etc": {"passwd": "mine"}}


def _sprinkled(draw: st.DrawFn, node: object) -> object:
    if not isinstance(node, dict):
        return node
    made = {name: _sprinkled(draw, one) for name, one in node.items() if name is not OPAQUE}
    return {OPAQUE: True, **made} if OPAQUE in node or draw(st.booleans()) else made


def write(tree: Tree, directory: Path) -> Path:
    directory.mkdir(exist_ok=True)
    for name, node in tree.items():
        if name is OPAQUE:
            os.setxattr(directory, OPAQUE_XATTR, b"y")
            continue
        path = directory / name
        if isinstance(node, dict):
            write(node, path)
        elif node is WHITEOUT:
            os.mknod(path, stat.S_IFCHR, 0)
        elif isinstance(node, tuple):
            path.symlink_to(node[1])
        else:
            path.write_text(node)
    return directory


def read(directory: Path) -> Tree:
    tree: Tree = {}
    try:
        if os.getxattr(directory, OPAQUE_XATTR):
            tree[OPAQUE] = True
    except OSError:
        pass
    for path in directory.iterdir():
        mode = path.lstat().st_mode
        if stat.S_ISDIR(mode):
            tree[path.name] = read(path)
        elif stat.S_ISCHR(mode):
            tree[path.name] = WHITEOUT
        else:
            tree[path.name] = ("link", os.readlink(path)) if stat.S_ISLNK(mode) else path.read_text()
    return tree


def merged(lower: object, upper: object) -> object:
    """What overlayfs shows of a layer on another, said in the simplest way."""
    if not isinstance(upper, dict):
        return upper
    base = lower if isinstance(lower, dict) and OPAQUE not in upper else {}
    names = {name for name in (*base, *upper) if name is not OPAQUE}
    seen = {name: merged(base.get(name), upper[name]) if name in upper else base[name] for name in names}
    return {name: node for name, node in seen.items() if node is not WHITEOUT}


def flat(tree: object, path: str = "") -> dict[str, object]:
    """Path -> content; directories are "dir"."""
    if not isinstance(tree, dict):
        return {path: tree}
    found: dict[str, object] = {path: "dir"} if path else {}
    for name, node in tree.items():
        found |= flat(node, f"{path}/{name}")
    return found


def protected(path: str) -> bool:
    selection = Selection(("/",), PROTECTED)
    parts = tuple(part.encode() for part in path.strip("/").split("/"))
    return any(selection.verdict(parts[:count]) == "leave" for count in range(1, len(parts) + 1))


def above(path: str) -> list[str]:
    parts = path.strip("/").split("/")
    return ["/" + "/".join(parts[:count]) for count in range(1, len(parts))]


@settings(max_examples=150, deadline=None)
@given(trees(False), trees(True), layers())
def test_protected_paths_are_the_layers_below_and_the_rest_is_the_agents(
    first: Tree, second: Tree, hostile: Tree
) -> None:
    lowers = [{"w": first, "etc": {"passwd": "ours"}}, {"w": second}]
    below = merged(lowers[0], lowers[1])
    with tempfile.TemporaryDirectory() as scratch:
        places = [write(tree, Path(scratch) / str(number)) for number, tree in enumerate(lowers)]
        layer = write(hostile, Path(scratch) / "layer")
        Protection(WORKSPACE, PROTECTED).apply(layer, places)
        mended = read(layer)
    before, wanted, got = flat(below), flat(merged(below, hostile)), flat(merged(below, mended))
    assert {path: node for path, node in got.items() if protected(path)} == {
        path: node for path, node in before.items() if protected(path)
    }
    assert "etc" not in mended and got["/w"] == "dir"
    for path in before:
        if protected(path):
            assert all(got[one] == "dir" for one in above(path))
    kept = {path for path in before if protected(path)}
    ways = {one for path in kept for one in above(path)} | {"/w", "/w/a", "/w/a/b"}
    for path in got.keys() | wanted.keys():
        if protected(path) or not path.startswith("/w") or path in ways:
            continue
        # Where a directory had to stay, what took its place is gone, and what it hid stays hidden.
        if any(one in ways and wanted.get(one) not in ("dir", None) for one in above(path)):
            assert path not in got
        else:
            assert got.get(path) == wanted.get(path), path


@pytest.mark.parametrize(
    "hostile",
    [
        {"w": WHITEOUT}, {"w": ("link", "/usr/lib/python3")}, {"w": "a file"}, {"w": {OPAQUE: True}},
        {"w": {"src": WHITEOUT}}, {"w": {"src": ("link", "/tmp/evil")}}, {"w": {"src": {"conftest.py": "evil"}}},
        {"w": {"src": {"conftest.py": WHITEOUT}}}, {"w": {"src": {"conftest.py": ("link", "mine.py")}}},
        {"w": {"src": {OPAQUE: True, "conftest.py": {"__init__.py": "evil"}}}},
    ],
)  # fmt: skip
def test_each_way_to_hide_a_protected_file_fails(tmp_path: Path, hostile: Tree) -> None:
    below = {"w": {"src": {"conftest.py": "ours", "mine.py": "old"}}}
    layer = write(hostile, tmp_path / "layer")
    Protection(WORKSPACE, PROTECTED).apply(layer, [write(below, tmp_path / "below")])
    assert flat(merged(below, read(layer)))["/w/src/conftest.py"] == "ours"


def test_what_was_deleted_beside_a_protected_file_stays_deleted(tmp_path: Path) -> None:
    below = {"w": {"src": {"conftest.py": "ours", "old.py": "old", "deep": {"old.py": "old"}}}}
    layer = write({"w": {"src": {OPAQUE: True, "new.py": "new"}}}, tmp_path / "layer")
    Protection(WORKSPACE, PROTECTED).apply(layer, [write(below, tmp_path / "below")])
    assert flat(merged(below, read(layer))) == {
        "/w": "dir", "/w/src": "dir", "/w/src/conftest.py": "ours", "/w/src/new.py": "new",
    }  # fmt: skip


def test_a_link_on_the_way_to_a_hidden_test_leads_nowhere(tmp_path: Path) -> None:
    """The file is not there yet: it is a hidden test's place."""
    layer = write({"w": {"new": ("link", "/etc"), "other": ("link", "/etc")}}, tmp_path / "layer")
    Protection(WORKSPACE, ("/w/new/test_it.py",)).apply(layer, [write({"w": {}}, tmp_path / "below")])
    assert read(layer) == {"w": {"new": {}, "other": ("link", "/etc")}}


def test_content_shared_by_a_hard_link_stays_the_agents_own(tmp_path: Path) -> None:
    layer = write({"w": {"conftest.py": "mine"}}, tmp_path / "layer")
    (layer / "w/z.py").hardlink_to(layer / "w/conftest.py")
    Protection(WORKSPACE, PROTECTED).apply(layer, [write({"w": {"conftest.py": "ours"}}, tmp_path / "below")])
    assert read(layer) == {"w": {"z.py": "mine"}}


def test_directories_without_permissions_do_not_keep_the_grader_out(tmp_path: Path) -> None:
    layer = write({"w": {"a": {"x": "mine"}}}, tmp_path / "layer")
    (layer / "w/a").chmod(0)
    Protection(WORKSPACE, PROTECTED).apply(layer, [])
    assert stat.S_IMODE((layer / "w/a").stat().st_mode) == 0o700


def test_files_that_their_owner_may_not_read_do_not_keep_the_grader_out(tmp_path: Path) -> None:
    layer = write({"w": {"a": {"x": "mine", "y": "mine", "l": ("link", "/etc/passwd")}}}, tmp_path / "layer")
    (layer / "w/a/x").chmod(0o030)
    (layer / "w/a/y").chmod(0o755)
    Protection(WORKSPACE, PROTECTED).apply(layer, [])
    assert [stat.S_IMODE((layer / "w/a" / name).stat().st_mode) for name in "xy"] == [0o430, 0o755]
    assert (layer / "w/a/l").is_symlink()
