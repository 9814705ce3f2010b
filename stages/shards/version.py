"""The version of the shard schema, known to writer and reader alike."""

from __future__ import annotations

SCHEMA_VERSION = 1
VERSION_KEY = "rollmill.schema_version"
