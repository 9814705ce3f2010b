"""The one error of conf: a key, the value that came, and what is allowed instead."""

from __future__ import annotations

from typing import Any


class ConfigError(Exception):
    """A configuration that cannot be used; the message is one line: full key, what came, what is allowed.

    Args:
        message: the line for the person who wrote the configuration.
        key: full dotted key, where one key is to blame.
        value: what came for it.
    """

    def __init__(self, message: str, *, key: str | None = None, value: Any = None) -> None:
        super().__init__(" ".join(message.split()))
        self.key = key
        self.value = value
