"""Stands for python3 in a sandbox whose agent attacks the worker: a kernel that speaks as MODE says. Run there only."""

import hashlib
import hmac
import json
import os
import socket
import struct
import sys
import time

MODE = "silent"
KEY = os.environ.get("ROLLMILL_KERNEL_KEY", "").encode()
GREETING = b"\xff" + bytes(7) + b"\x01\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)


def frame(body: bytes, flags: int = 0) -> bytes:
    return struct.pack(">BQ", flags | 2, len(body)) + body


def message(kind: str, parent: str, content: bytes) -> bytes:
    parts = [
        json.dumps({"msg_type": kind, "msg_id": "x"}).encode(), json.dumps({"msg_id": parent}).encode(), b"{}", content,
    ]  # fmt: skip
    signature = hmac.new(KEY, b"".join(parts), hashlib.sha256).hexdigest().encode()
    frames = [b"<IDS|MSG>", signature, *parts]
    return b"".join(frame(one, 1) for one in frames[:-1]) + frame(frames[-1])


def forever(peer: socket.socket, data: bytes) -> None:
    while True:
        peer.sendall(data)


def greet(peer: socket.socket, kind: bytes) -> None:
    ready = b"\x05READY\x0bSocket-Type" + struct.pack(">I", len(kind)) + kind
    peer.sendall(GREETING + bytes([4, len(ready)]) + ready)


def asked(peer: socket.socket, seen: bytearray) -> str:
    """The id of the next request."""
    while b'"msg_id":' not in seen or not seen.endswith(b"}"):
        seen += peer.recv(65536)
    found = bytes(seen).rpartition(b'"msg_id":')[2].split(b'"')[1].decode()  # packed with a blank there or without
    seen.clear()
    return found


def answer(shell: socket.socket, iopub: socket.socket, request: str) -> None:
    iopub.sendall(message("status", request, b'{"execution_state": "idle"}'))
    shell.sendall(message("kernel_info_reply", request, b'{"status": "ok"}'))


def main() -> None:
    shell, iopub = (socket.socket(fileno=number).accept()[0] for number in (3, 4))
    if MODE == "silent":
        time.sleep(1000)
    if MODE == "noise":
        forever(shell, os.urandom(1000))
    greet(shell, b"ROUTER")
    greet(iopub, b"PUB")
    if MODE == "huge":
        shell.sendall(struct.pack(">BQ", 2, 1 << 40))
        forever(shell, bytes(65536))
    if MODE == "endless":
        forever(iopub, frame(bytes(65536), 1))
    if MODE == "frames":
        forever(iopub, b"\x01\x00" * 1000)
    if MODE == "commands":
        forever(iopub, b"\x04\x00" * 1000)
    if MODE == "empty":
        forever(iopub, b"\x00\x00" * 1000)
    if MODE == "unsigned":
        forever(iopub, b"".join(frame(one, 1) for one in (b"<IDS|MSG>", b"0" * 64, b"{}", b"{}", b"{}")) + frame(b"{}"))
    if MODE == "fields":
        forever(iopub, message("stream", "", b'{"text": ["a list"]}'))
    if MODE == "nested":
        forever(iopub, message("stream", "", b"[" * 1_000_000))
    seen = bytearray()
    answer(shell, iopub, asked(shell, seen))
    cell = asked(shell, seen)
    if MODE == "flood":
        forever(iopub, message("stream", cell, b'{"name": "stdout", "text": "flood\\n"}') * 100)
    if MODE == "images":
        picture = b"iVBORw0KGgo" + b"A" * 1_000_001
        forever(iopub, message("display_data", cell, b'{"data": {"image/png": "' + picture + b'"}, "metadata": {}}'))
    if MODE == "late":
        shell.sendall(message("execute_reply", cell, b'{"status": "ok"}'))
        forever(iopub, message("status", "another", b'{"execution_state": "idle"}') * 50)
    sys.exit("no such mode")


main()
