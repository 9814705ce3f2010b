"""Errors of the workflows: one root; the failures of a rollout itself are stages' (stages.errors)."""

from __future__ import annotations


class WorkflowError(Exception):
    """Root of what workflows raise."""


class TaskDataError(WorkflowError):
    """A task's options or data file cannot be used; the message names the option, or the file and its line."""


class PolicyMakeError(WorkflowError):
    """A policy could not be trained or written."""


class ExportError(WorkflowError):
    """An export cannot be made as asked: the format, the run directory or the output is named."""
