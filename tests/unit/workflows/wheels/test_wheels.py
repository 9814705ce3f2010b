"""Wheels: what reaches the fetch, one fetch for many, honest content, and where an installer puts files."""

from __future__ import annotations

import io
import threading
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest

from workflows.wheels.cache import WheelCache, canonical, lock_key
from workflows.wheels.errors import UnresolvableError, WheelError
from workflows.wheels.fetch import fetch, fetch_environment
from workflows.wheels.install import Entry, unpack
from workflows.wheels.target import PythonTarget

MARKERS = {
    "implementation_name": "cpython", "implementation_version": "3.11.2", "os_name": "posix", "sys_platform": "linux",
    "platform_machine": "x86_64", "platform_python_implementation": "CPython", "platform_release": "",
    "platform_system": "Linux", "platform_version": "", "python_full_version": "3.11.2", "python_version": "3.11",
}  # fmt: skip
TARGET = PythonTarget("/usr/bin/python3.11", MARKERS, "glibc", "2.36")
OLD = msgspec.structs.replace(TARGET, markers={**MARKERS, "python_version": "3.9", "python_full_version": "3.9.2"})


def wheel(files: dict[str, str], name: str = "x-1") -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for path, text in files.items():
            archive.writestr(path, text)
        archive.writestr(f"{name}.dist-info/METADATA", "Name: x\n")
    return buffer.getvalue()


class Registry:
    """A fetch of a test's own; counts how often it was asked."""

    def __init__(self, files: dict[str, bytes]) -> None:
        self.files, self.asked = files, 0
        self.gate = threading.Barrier(1)

    def __call__(self, requirements: Any, target: Any, directory: Path, **options: Any) -> list[Path]:
        self.asked += 1
        for name, data in self.files.items():
            (directory / name).write_bytes(data)
        return sorted(directory.iterdir())


def test_platforms_are_those_of_the_libc_best_first() -> None:
    assert TARGET.platforms[0] == "manylinux_2_36_x86_64" and "manylinux2014_x86_64" in TARGET.platforms
    older = msgspec.structs.replace(TARGET, libc_version="2.12").platforms
    assert "manylinux2010_x86_64" in older and "manylinux2014_x86_64" not in older
    assert msgspec.structs.replace(TARGET, libc="musl").platforms[0] == "musllinux_1_2_x86_64"
    with pytest.raises(WheelError, match="none we know"):
        _ = msgspec.structs.replace(TARGET, libc="", libc_version="").platforms


def test_the_lock_is_of_requirements_and_target_and_not_of_their_order() -> None:
    patched = msgspec.structs.replace(TARGET, markers={**MARKERS, "python_full_version": "3.11.9"}, executable="/x")
    assert lock_key(["a", "b"], TARGET) == lock_key(["b", "a "], patched)
    assert len({lock_key(["a"], TARGET), lock_key(["a"], OLD), lock_key(["b"], TARGET)}) == 3


def test_many_at_once_fetch_once_and_what_is_there_is_never_resolved_again(tmp_path: Path) -> None:
    registry = Registry({"x-1-py3-none-any.whl": wheel({}), "Y_z-2-py3-none-any.whl": b"y"})
    cache = WheelCache(tmp_path, {}, registry)
    with ThreadPoolExecutor(12) as threads:
        locks = list(threads.map(lambda _: cache.lock(["x"], TARGET), range(12)))
    assert registry.asked == 1 and all(lock == locks[0] for lock in locks)
    registry.files = {"x-9-py3-none-any.whl": b"later"}
    again = WheelCache(tmp_path, {}, registry).lock(["x"], TARGET)
    assert registry.asked == 1 and [(w.name, w.version) for w in again.wheels] == [("y-z", "2"), ("x", "1")]
    assert cache.read(again.wheels[0]) == b"y"
    assert {path.name for path in tmp_path.glob("*.whl")} == {f"{w.sha256}.whl" for w in again.wheels}


def test_a_lost_wheel_is_fetched_anew_and_a_damaged_one_is_refused(tmp_path: Path) -> None:
    registry = Registry({"x-1-py3-none-any.whl": wheel({})})
    cache = WheelCache(tmp_path, {}, registry)
    (kept,) = cache.lock(["x"], TARGET).wheels
    (tmp_path / f"{kept.sha256}.whl").unlink()
    assert cache.lock(["x"], TARGET).wheels == [kept] and registry.asked == 2
    (tmp_path / f"{kept.sha256}.whl").write_bytes(b"other")
    with pytest.raises(WheelError, match="is damaged"):
        cache.read(kept)


def test_registry_settings_reach_the_fetch_and_nothing_else_does() -> None:
    given = {
        "PIP_INDEX_URL": "https://a", "PIP_CERT": "/c", "https_proxy": "http://p", "NO_PROXY": "x",
        "SSL_CERT_FILE": "/s", "UV_DEFAULT_INDEX": "https://u", "HOME": "/h", "PATH": "/bin", "AWS_SECRET": "s",
        "PYTHONPATH": "/evil", "LD_PRELOAD": "/evil.so", "OPENAI_API_KEY": "k", "PIP_TARGET": "/t",
    }  # fmt: skip
    kept = {"PIP_INDEX_URL", "PIP_CERT", "https_proxy", "NO_PROXY", "SSL_CERT_FILE", "UV_DEFAULT_INDEX", "HOME", "PATH"}
    assert set(fetch_environment(given)) == kept


def test_a_site_that_told_uv_has_told_pip() -> None:
    made = fetch_environment(
        {"UV_INDEX_URL": "https://u", "UV_INDEX": "mine=https://a https://b", "UV_FIND_LINKS": "/w,/v"}
    )
    assert made["PIP_INDEX_URL"] == "https://u" and made["PIP_EXTRA_INDEX_URL"] == "https://a https://b"
    assert made["PIP_FIND_LINKS"] == "/w /v"


PLACES = ("--index-url=http://evil", "-r /etc/passwd", " ", "a\nb", "{evil}", "evil @ file://{evil}", "./evil",
          "evil @ git+file://{evil}", "file://{evil}", "evil[x] @ file://{evil} ; python_version > '3'")  # fmt: skip


@pytest.mark.parametrize("requirement", PLACES)
def test_options_and_places_are_no_requirements_and_nothing_of_them_runs(requirement: str, tmp_path: Path) -> None:
    evil, downloads = tmp_path / "evil", tmp_path / "downloads"
    evil.mkdir()
    downloads.mkdir()
    (evil / "setup.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    with pytest.raises(UnresolvableError) as raised:
        fetch([requirement.format(evil=evil)], TARGET, downloads, timeout_s=60, environ={})
    assert "\n" not in str(raised.value) and not (tmp_path / "ran").exists()


def test_what_is_not_of_this_python_or_nothing_at_all_needs_no_wheels(tmp_path: Path) -> None:
    assert fetch(["tomli; python_version < '3.11'"], TARGET, tmp_path, timeout_s=1, environ={}) == []
    assert fetch([], TARGET, tmp_path, timeout_s=1, environ={}) == []


def test_a_registry_that_is_not_there_is_worth_another_try(tmp_path: Path) -> None:
    environ = {
        "PIP_INDEX_URL": "http://127.0.0.1:9/simple",
        "PIP_CONFIG_FILE": "/dev/null",
        "PIP_RETRIES": "0",
        "HOME": "/",
    }
    with pytest.raises(WheelError) as raised:
        fetch(["nothing-of-that-name"], TARGET, tmp_path, timeout_s=60, environ=environ)
    assert not isinstance(raised.value, UnresolvableError)


def test_markers_are_those_of_the_target_and_wheels_alone_are_taken(tmp_path: Path) -> None:
    """A small index in a directory: the dependency that only old Pythons have is found for an old one."""
    links = tmp_path / "links"
    links.mkdir()
    metadata = "Metadata-Version: 2.1\nName: top\nVersion: 1\nRequires-Dist: extra; python_version < '3.10'\n"
    for name, text in (("top", metadata), ("extra", "Metadata-Version: 2.1\nName: extra\nVersion: 1\n")):
        with zipfile.ZipFile(links / f"{name}-1-py3-none-any.whl", "w") as archive:
            archive.writestr(f"{name}-1.dist-info/METADATA", text)
            archive.writestr(
                f"{name}-1.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
            )
            archive.writestr(f"{name}-1.dist-info/RECORD", "")
    (links / "source-1.tar.gz").write_bytes(b"no wheel")
    environ = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(links), "PIP_CONFIG_FILE": "/dev/null"}
    found = {}
    for target in (TARGET, OLD):
        directory = tmp_path / target.version
        directory.mkdir()
        found[target.version] = {p.name[:3] for p in fetch(["top"], target, directory, timeout_s=60, environ=environ)}
    assert found == {"3.11": {"top"}, "3.9": {"top", "ext"}}
    with pytest.raises(UnresolvableError, match="source"):
        fetch(["source"], TARGET, tmp_path / "3.9", timeout_s=60, environ=environ)


def test_files_go_where_an_installer_puts_them() -> None:
    files = {
        "pkg/__init__.py": "1", "x-1.data/purelib/pure.py": "2", "x-1.data/scripts/run": "#!python\nprint()\n",
        "x-1.data/data/share/x": "3", "x-1.data/headers/x.h": "4",
        "x-1.dist-info/entry_points.txt": "[console_scripts]\ntool = pkg.main:Main.run [extra]\n",
    }  # fmt: skip
    entries = {e.path: e for e in unpack("x-1.whl", wheel(files), version="3.11", interpreter="/env/bin/python")}
    site = "lib/python3.11/site-packages"
    assert {f"{site}/pkg/__init__.py", f"{site}/pure.py", "bin/run", "bin/tool", "share/x", "include/x.h"} <= set(
        entries
    )
    assert entries["bin/run"] == Entry("bin/run", b"#!/env/bin/python\nprint()\n", True)
    assert b"from pkg.main import Main\nsys.exit(Main.run())" in entries["bin/tool"].data


@pytest.mark.parametrize("path", ["../x.py", "/x.py", "a/../../x", "x-1.data/nowhere/x"])
def test_a_wheel_that_leads_out_is_refused(path: str) -> None:
    with pytest.raises(WheelError):
        list(unpack("x-1.whl", wheel({path: ""}), version="3.11", interpreter="/p"))


def test_what_is_no_wheel_is_refused() -> None:
    with pytest.raises(WheelError, match="is no wheel"):
        list(unpack("x-1.whl", b"PK nothing", version="3.11", interpreter="/p"))


def test_names_are_compared_as_the_index_does() -> None:
    assert canonical("Py.Test__x") == "py-test-x"
