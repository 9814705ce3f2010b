"""What can be chosen, and what of it this version does not have yet."""

from __future__ import annotations

from collections.abc import Mapping

from conf.errors import ConfigError
from conf.schema import Config

GROUPS = ("workflow", "task", "agent", "fleet", "sandbox", "placement", "cluster", "experiment")
"""The groups of the command line, in the order in which they are explained."""

NOT_BUILT: Mapping[str, frozenset[str]] = {}
"""Choices that are named by the contract and not there yet, by group."""


def not_built(what: str) -> ConfigError:
    """The one sentence about something that a later version brings."""
    return ConfigError(f"{what} is not built yet", key=what.partition("=")[0])


def check_choices(choices: Mapping[str, str | None]) -> None:
    """Refuse a choice that this version does not have.

    Args:
        choices: group -> the choice that was made, as composition reports it.

    Raises:
        ConfigError: the first such choice.
    """
    for group, choice in choices.items():
        if choice in NOT_BUILT.get(group, frozenset()):
            raise not_built(f"{group}={choice}")


def check_keys(config: Config) -> None:
    """Refuse a key whose behaviour this version does not have, where it asks for it.

    Raises:
        ConfigError: the first such key with its value.
    """
    check_choices({group: getattr(config, group).name for group in ("workflow", "fleet", "sandbox", "placement")})
