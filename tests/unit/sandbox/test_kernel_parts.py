"""The Python tool's pure parts: ZeroMQ's framing, the kernel's messages, a cell's output, the program's cuts."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import random
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sandbox.joining import _connected_pair
from sandbox.kernel import program, zmtp
from sandbox.kernel.cell import CellOutput
from sandbox.kernel.distributions import DONE, inventory, needed
from sandbox.kernel.layer import KernelLayer, _alone, _is_whole
from sandbox.kernel.messages import Failed, Reply, Shown, Status, Stream, Wire
from sandbox.spawn_client import SpawnClient

GREETING = zmtp.opening("SUB")[:64]


def decoded(decoder: zmtp.Decoder, data: bytes, step: int) -> list[list[bytes]]:
    found = []
    for start in range(0, len(data), step):
        found += list(decoder.feed(data[start : start + step]))
    return found


@pytest.mark.parametrize("step", [1, 7, 64, 100_000])
def test_messages_survive_any_cutting(step: int):
    drawn = random.Random(step)
    sent = [
        [drawn.randbytes(drawn.choice([0, 1, 255, 256, 3000])) for _ in range(drawn.randint(1, 8))] for _ in range(20)
    ]
    decoder = zmtp.Decoder()
    opening = zmtp.opening("DEALER")
    assert not decoder.ready
    assert decoded(decoder, opening + b"".join(map(zmtp.encode, sent)), step) == sent
    assert decoder.ready


@pytest.mark.parametrize(
    "data",
    [
        b"HTTP/1.1 200 OK\r\n" + bytes(64),
        GREETING[:12] + b"CURVE".ljust(20, b"\0") + bytes(32),
        GREETING[:10] + b"\x02" + GREETING[11:],
        GREETING + struct.pack(">BQ", 2, zmtp.MESSAGE_BYTES + 1),
        GREETING + b"\x01\x00" * (zmtp.FRAMES + 1),
        GREETING + (struct.pack(">BQ", 3, 1 << 20) + bytes(1 << 20)) * 5,
        GREETING + b"\x04\x00" * (zmtp.COMMANDS + 1),
        GREETING + b"\xff\x00",
    ],
)
def test_what_is_too_large_or_no_protocol_is_refused_before_it_is_kept(data: bytes):
    decoder = zmtp.Decoder()
    with pytest.raises(zmtp.ProtocolError):
        decoded(decoder, data, 4096)
    assert len(decoder._buffer) + decoder._bytes <= 2 * zmtp.MESSAGE_BYTES


def answer(wire: Wire, kind: str, content: Any, parent: str = "p") -> list[bytes]:
    parts = [json.dumps(one).encode() for one in ({"msg_type": kind, "msg_id": "i"}, {"msg_id": parent}, {}, content)]
    return [b"topic", b"<IDS|MSG>", wire._session.sign(parts), *parts]


def test_answers_are_read_into_records():
    wire = Wire()
    assert wire.read(answer(wire, "stream", {"name": "stdout", "text": "hi"})).body == Stream("hi")
    shown = wire.read(answer(wire, "display_data", {"data": {"text/plain": "x", "image/png": "y", "more": [1]}})).body
    assert isinstance(shown, Shown) and (shown.data.plain, shown.data.png, shown.data.jpeg) == ("x", "y", "")
    assert wire.read(answer(wire, "error", {"ename": "E", "traceback": ["t"]})).body == Failed("E", "", ["t"])
    assert wire.read(answer(wire, "status", {"execution_state": "idle"})).body == Status("idle")
    message = wire.read(answer(wire, "execute_reply", {"status": "ok"}, "asked"))
    assert (message.parent, message.body) == ("asked", Reply("ok"))
    assert wire.read(answer(wire, "comm_open", {"anything": 1})).body is None


def test_a_request_carries_its_id_and_a_true_signature():
    wire, other = Wire(), Wire()
    number, frames = wire.request("execute_request", {"code": "1"})
    assert json.loads(frames[2])["msg_id"] == number and json.loads(frames[5])["code"] == "1"
    assert wire.read(frames).kind == "execute_request"
    with pytest.raises(zmtp.ProtocolError, match="signature"):
        other.read(frames)


@pytest.mark.parametrize("spoil", [0, 1, 2, 3, 4, 5, 6])
def test_a_changed_or_missing_part_is_refused(spoil: int):
    wire = Wire()
    whole = answer(wire, "stream", {"text": "hi"})
    if spoil:  # the topic is nobody's promise
        with pytest.raises(zmtp.ProtocolError):
            wire.read([*whole[:spoil], whole[spoil] + b" ", *whole[spoil + 1 :]])
    with pytest.raises(zmtp.ProtocolError):
        wire.read(whole[:spoil])


@pytest.mark.parametrize("content", [{"text": 3}, {"text": None}, [], "text", {}])
def test_wrong_fields_are_refused_although_signed(content: Any):
    wire = Wire()
    with pytest.raises(zmtp.ProtocolError, match="wrong fields"):
        wire.read(answer(wire, "stream", content))


def image(kind: bytes, size: int = 10) -> str:
    return base64.b64encode(kind + os.urandom(size)).decode()


def test_a_cells_output_keeps_order_and_its_bounds():
    cell = CellOutput(1000)
    cell.printed("no newline")
    cell.shown("42", ())
    cell.printed("after\n")
    assert cell.text() == "no newline\n42\nafter\n" and not cell.truncated
    for _ in range(1000):
        cell.printed("x" * 1000)
    assert cell.truncated and len(cell.text()) < 1100 and cell.text().startswith("no newline\n42")
    cell.failed("E", "v", ["\x1b[0;31mE\x1b[0m: v", "second"])
    assert cell.error == "E: v\nsecond"
    cell.failed("E", "v", [])
    assert cell.error == "E: v"
    cell.failed("E", "", ["x" * 10_000_000])
    assert cell.error is not None and len(cell.error) < 17_000


def test_images_are_checked_and_counted():
    cell = CellOutput(1000)
    png, jpeg = image(b"\x89PNG\r\n\x1a\n"), image(b"\xff\xd8\xff")
    cell.shown("", (png, jpeg + "\n"))
    for wrong in ("no base64!", "漢字", base64.b64encode(b"GIF89a").decode(), png + "=" * 9):
        cell.shown("", (wrong,))
    assert cell.images == [png, jpeg] and "[4 images left out" in cell.text()
    for _ in range(20):
        cell.shown("", (image(b"\x89PNG\r\n\x1a\n", 1_500_000),))
    assert len(cell.images) == 6 and sum(map(len, cell.images)) <= 8 * 1024 * 1024


def test_the_program_cuts_what_the_reader_would_refuse():
    content = program.trim(
        {
            "name": "stdout", "text": "a" * 10_000_000, "payload": [1], "traceback": ["t" * 10_000_000],
            "data": {"text/plain": "b" * 10_000_000, "text/html": "c" * 10_000_000, "image/png": "d" * 10_000_000},
        }
    )  # fmt: skip
    assert len(json.dumps(content)) < zmtp.MESSAGE_BYTES / 2
    assert content["text"].startswith("aaa") and "9737856 characters left out" in content["text"]
    assert set(content["data"]) == {"text/plain"}
    assert "an image of 10000000 base64 characters is left out" in content["data"]["text/plain"]
    assert program.trim({"execution_state": "idle"}) == {"execution_state": "idle"}


def test_a_python_of_another_version_is_told_what_its_image_lacks(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(program.importlib.util, "find_spec", lambda name: None)
    for site, minor in (("/site", "3.9"), ("-", f"3.{sys.version_info.minor}")):
        with pytest.raises(SystemExit, match="install ipykernel in the image") as told:
            program.find_kernel(site, minor)
        assert f"Python is 3.{sys.version_info.minor}" in str(told.value) and minor in str(told.value)


def test_what_ipykernel_needs_is_found_and_what_it_does_not_is_left():
    names = {distribution.metadata["Name"].lower().replace("_", "-") for distribution in needed()}
    assert {"ipykernel", "ipython", "pyzmq", "tornado", "traitlets", "jupyter-client"} <= names
    assert not names & {"debugpy", "jedi", "numpy", "pytest", "rollmill"}


def test_the_sockets_have_no_name_and_their_paths_no_limit(tmp_path: Path):
    deep = tmp_path / ("d" * 100) / ("e" * 100)
    deep.mkdir(parents=True)
    listening, connected = _connected_pair(str(deep), "k")
    os.write(connected, b"x")
    assert list(deep.iterdir()) == []
    os.close(listening)
    os.close(connected)


def test_the_layer_is_laid_out_once_and_stays_where_that_may_be_written(tmp_path: Path) -> None:
    home, cache, closed = tmp_path / "home", tmp_path / "cache", tmp_path / "file"
    (home).mkdir()
    closed.write_text("")  # an installation that this user cannot write

    async def own() -> Path:
        return home

    async def made(spawner: SpawnClient, shared: Path, cache: Path | None = None) -> Path:
        found = await KernelLayer(spawner, own, shared, cache).path()
        assert found is not None and (found / "ipykernel/__pycache__").is_dir()
        return found

    async def scenario() -> None:
        first, unstarted = SpawnClient(), SpawnClient()
        try:
            both = await asyncio.gather(*(made(first, closed, cache) for _ in range(2)))
            assert both[0] == both[1] and both[0].parent == cache
            assert sorted(cache.iterdir()) == sorted([both[0], cache / f".{both[0].name}.lock"])
            assert await made(unstarted, closed, cache) == both[0] and await made(unstarted, cache) == both[0]
            assert unstarted._process is None, "it was laid out again"
            (both[0] / "ipykernel/__init__.py").unlink()  # as one that cleans up old files does
            assert await made(first, closed, cache) == both[0]
            assert (both[0] / "ipykernel/__init__.py").exists()
            cache.chmod(0o777)  # anybody could put a kernel there
            assert await made(first, closed, cache) == home / "kernel1"
        finally:
            await first.close()

    asyncio.run(scenario())


def test_a_kernel_is_taken_only_whole_and_from_where_nobody_else_may_write(tmp_path: Path) -> None:
    made = tmp_path / "cache/kernel"
    made.mkdir(parents=True, mode=0o700)
    (tmp_path / "cache").chmod(0o700)
    (made / "module.py").write_text("1\n")
    assert not _is_whole(made, private=True)
    (made / DONE).write_text(inventory(made))
    (made / "__pycache__").mkdir()
    (made / "__pycache__/module.pyc").touch()
    assert _is_whole(made, private=True)
    for open_to_others in (made, made.parent):
        open_to_others.chmod(0o777)
        assert not _is_whole(made, private=True) and _is_whole(made, private=False)
        open_to_others.chmod(0o755)
    (made / "module.py").write_text("")
    assert not _is_whole(made, private=True)


async def test_a_lock_that_cannot_be_had_is_passed_over(tmp_path: Path) -> None:
    """Another user's, for one: a layer that is made twice costs less than a tool that is missing."""
    (tmp_path / "lock").symlink_to("/nowhere")
    entered = False
    async with _alone(tmp_path / "lock"):
        entered = True
    assert entered


def test_a_kernel_loads_no_client_and_its_user_can() -> None:
    code = """
import sys
from sandbox.kernel.program import thin_client
thin_client()
import ipykernel.kernelapp
assert "jupyter_client.session" in sys.modules and "jupyter_client.manager" not in sys.modules
import jupyter_client
from jupyter_client import AsyncKernelClient
jupyter_client.KernelManager, jupyter_client.session.Session, jupyter_client.__version__
assert not hasattr(jupyter_client, "no_such_name")
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(program.__file__).parents[2])
