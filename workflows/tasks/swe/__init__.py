"""task=swe: repositories with an issue and hidden tests."""

from workflows.tasks.swe.imaged import ImagedSweTask
from workflows.tasks.swe.task import SweTask

__all__ = ["ImagedSweTask", "SweTask"]
