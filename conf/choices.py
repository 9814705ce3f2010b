"""The groups of the command line, and the one sentence about what a later version brings."""

from __future__ import annotations

from conf.errors import ConfigError

GROUPS = ("workflow", "task", "agent", "fleet", "sandbox", "placement", "cluster", "experiment")
"""In the order in which they are explained."""


def not_built(what: str) -> ConfigError:
    """A verb that is named and not there yet."""
    return ConfigError(f"{what} is not built yet", key=what.partition("=")[0])
