"""Errors of the workflows: one root; the failures of a rollout itself are stages' (stages.errors)."""

from __future__ import annotations


class WorkflowError(Exception):
    """Root of what workflows raise."""


class TaskDataError(WorkflowError):
    """A task's options or data file cannot be used; the message names the option, or the file and its line."""


class HarnessError(WorkflowError):
    """A harness cannot be used as it is configured; the message names the key and what it may be."""


class PolicyMakeError(WorkflowError):
    """A policy could not be trained or written."""


class TrainError(WorkflowError):
    """Training cannot begin or go on; the message says which part, and what to change."""


class ExportError(WorkflowError):
    """An export cannot be made as asked: the format, the run directory or the output is named."""
