"""The kernel protocol's messages: requests made and signed, and answers verified and read. The one door to Jupyter's.

Sessions sign and build; what comes back is decoded here into records of known fields, so that a hostile kernel's JSON
costs its length and no more. Importing this module takes a while (jupyter_client brings ZeroMQ and Tornado): it is done
in a thread, at the first use of the Python tool.

Method: https://jupyter-client.readthedocs.io/en/stable/messaging.html, protocol 5.
"""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from jupyter_client.session import DELIM, Session

from sandbox.kernel.zmtp import ProtocolError


class _Header(msgspec.Struct, frozen=True):
    msg_type: str
    msg_id: str = ""


class _Parent(msgspec.Struct, frozen=True):
    msg_id: str = ""


class Stream(msgspec.Struct, frozen=True):
    """What was printed."""

    text: str


class Media(msgspec.Struct, frozen=True):
    """One shown value in the forms that we take."""

    plain: str = msgspec.field(name="text/plain", default="")
    png: str = msgspec.field(name="image/png", default="")
    jpeg: str = msgspec.field(name="image/jpeg", default="")


class Shown(msgspec.Struct, frozen=True):
    """A result, or what a call displayed."""

    data: Media


class Failed(msgspec.Struct, frozen=True):
    """What a cell raised."""

    ename: str = ""
    evalue: str = ""
    traceback: list[str] = []


class Status(msgspec.Struct, frozen=True):
    """What the kernel does."""

    execution_state: str


class Reply(msgspec.Struct, frozen=True):
    """The end of a request."""

    status: str = ""


Body = Stream | Shown | Failed | Status | Reply
_BODIES: Mapping[str, msgspec.json.Decoder[Any]] = {
    name: msgspec.json.Decoder(body)
    for name, body in {
        "stream": Stream, "execute_result": Shown, "display_data": Shown, "update_display_data": Shown,
        "error": Failed, "status": Status, "execute_reply": Reply, "kernel_info_reply": Reply,
    }.items()
}  # fmt: skip
_header, _parent = msgspec.json.Decoder(_Header), msgspec.json.Decoder(_Parent)


class Message(msgspec.Struct, frozen=True):
    """A verified message; `body` is None for the kinds that we have no use for."""

    kind: str
    parent: str
    body: Body | None


class Wire:
    """One kernel's messages, signed with one key."""

    def __init__(self) -> None:
        self.key = secrets.token_hex(32)
        self._session = Session(key=self.key.encode(), username="rollmill", digest_history_size=0)

    def request(self, kind: str, content: Mapping[str, Any]) -> tuple[str, list[bytes]]:
        """A new request: its id, and its frames."""
        message = self._session.msg(kind, dict(content))
        return message["header"]["msg_id"], self._session.serialize(message)

    def read(self, frames: Sequence[bytes]) -> Message:
        """Verify and decode one message.

        Raises:
            ProtocolError: it is none, or not signed with the key.
        """
        try:
            start = frames.index(DELIM) + 1
            signature, parts = frames[start], list(frames[start + 1 : start + 5])
        except (ValueError, IndexError):
            raise ProtocolError("it sent what is no message of the kernel protocol") from None
        if len(parts) != 4 or not hmac.compare_digest(signature, self._session.sign(parts)):
            raise ProtocolError("it sent a message with a wrong signature")
        header, parent, _, content = parts
        try:
            kind = _decoded(_header, header).msg_type
            decoder = _BODIES.get(kind)
            return Message(kind, _decoded(_parent, parent).msg_id, decoder and _decoded(decoder, content))
        except (msgspec.MsgspecError, RecursionError) as error:
            raise ProtocolError(f"it sent a message with wrong fields: {error}"[:300]) from None


def _decoded(decoder: msgspec.json.Decoder[Any], data: bytes) -> Any:
    try:
        return decoder.decode(data)
    except UnicodeDecodeError:  # ipykernel sends lone surrogates as they are
        return decoder.decode(data.decode("utf-8", "replace").encode())
