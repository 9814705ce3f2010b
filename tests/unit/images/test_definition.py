"""Definition files: what is read of them word by word, and what no build here follows."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from sandbox.errors import ImageError
from sandbox.images.definition import Definition, driven, read_definition
from tests.support.waiting import poll

WHOLE = """# a comment
Bootstrap: localimage
From: Team/Base:1   # trailing

%environment
    export FOO=bar
    X="a b"

%files
    a.txt /opt/a.txt
    /etc/hosts

%labels
    Author me
%post
    cat > /x <<'END'
      indented
    %d of nothing
Bootstrap: in the text
from: me
END
%test
    true
"""


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "image.def"
    path.write_text(text)
    return path


def test_a_file_is_read_as_it_stands(tmp_path: Path) -> None:
    assert read_definition(written(tmp_path, WHOLE)) == Definition(
        "localimage", "Team/Base:1",
        "    cat > /x <<'END'\n      indented\n    %d of nothing\nBootstrap: in the text\nfrom: me\nEND\n",
        [("a.txt", "/opt/a.txt"), ("/etc/hosts", "/etc/hosts")], {"FOO": "bar", "X": "a b"}, "    true\n",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "no `Bootstrap:` and `From:` lines"),
        ("Bootstrap: docker\n", "no `Bootstrap:` and `From:` lines"),
        ("Bootstrap: docker\nFrom: x\n%setup\n touch /y\n", "%setup runs on this machine"),
        ("Bootstrap: docker\nFrom: x\nStage: one\n", "several stages"),
        ("Bootstrap: docker\nFrom: x\n%files from one\n a b\n", "another stage"),
        ("Bootstrap: docker\nFrom: x\n%nonsense\n a\n", "%nonsense is no section"),
        ("Bootstrap: docker\nFrom: x\n%files\n a b c\n", "is not SOURCE"),
        ("Bootstrap: docker\nFrom: x\n%files\n a b\n", "'b' is no absolute path"),
        ("Bootstrap: docker\nFrom: x\n%environment\n A=$(id)\n", "not a plain value"),
        ("Bootstrap: docker\nFrom: x\n%environment\n echo\n", "no NAME=value"),
    ],
)
def test_what_cannot_be_followed_is_refused_in_one_line(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(ImageError) as caught:
        read_definition(written(tmp_path, text))
    assert words in str(caught.value) and "image.def: " in str(caught.value) and "\n" not in str(caught.value)


def test_a_file_that_is_not_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(ImageError, match=r"nope\.def cannot be read as a definition file"):
        read_definition(tmp_path / "nope.def")


def test_commands_are_driven_line_by_line_within_their_time() -> None:
    env = {"PATH": "/usr/bin:/bin", "ONLY": "this"}
    assert list(driven(["sh", "-c", "echo one; echo $ONLY >&2"], env, 20.0)) == ["one\n", "this\n"]
    with pytest.raises(ImageError, match="ended with 3"):
        list(driven(["sh", "-c", "exit 3"], env, 20.0))
    with pytest.raises(ImageError, match=r"not done within 0\.2 s"):
        list(driven(["sleep", "20"], env, 0.2))
    with pytest.raises(ImageError, match="cannot be started"):
        list(driven(["/no/such/program"], env, 0.2))


def test_a_command_ends_with_all_that_it_started_and_shows_no_variable(tmp_path: Path) -> None:
    script = f"echo $$ >{tmp_path}/pid; sleep 300 & echo $! >>{tmp_path}/pid; printf 'a\\377'; echo; wait"
    lines = driven(["sh", "-c", script], {"PATH": "/usr/bin:/bin", "SECRET": "word"}, 60.0)
    assert next(lines) == "a\ufffd\n"
    pids = (tmp_path / "pid").read_text().split()
    assert b"word" not in Path(f"/proc/{pids[0]}/cmdline").read_bytes()
    lines.close()  # type: ignore[attr-defined]
    poll(lambda: not any(_lives(pid) for pid in pids), "all gone")


def _lives(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def test_the_parser_is_not_loaded_by_a_worker() -> None:
    code = "import sys; import stages.store, launch.verbs.images; sys.exit('spython' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
