"""task=swe: repositories with an issue and hidden tests."""

from workflows.tasks.swe.task import SweTask

__all__ = ["SweTask"]
