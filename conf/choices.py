"""The groups of the command line: each is a folder of named choices."""

from __future__ import annotations

GROUPS = ("workflow", "task", "agent", "fleet", "sandbox", "placement", "cluster", "experiment")
"""In the order in which they are explained."""
