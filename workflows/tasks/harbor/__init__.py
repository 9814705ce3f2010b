"""task=harbor: a directory a task, in the public Harbor format; no code to write."""

from workflows.tasks.harbor.task import HarborTask

__all__ = ["HarborTask"]
