"""Errors of submission: what Slurm refused, what could not reach it, and what cannot be asked of it at all."""

from __future__ import annotations

from launch.errors import Exit, LaunchError


class SubmissionError(LaunchError):
    """A submission did not become a job.

    Args:
        message: the line for people.
        refused: Slurm understood and said no, so that another shape or placement may do better; else it was not
            reached, and the same may work later.
    """

    def __init__(self, message: str, *, refused: bool = False) -> None:
        super().__init__(message)
        self.refused = refused


class ShapeError(LaunchError):
    """The configuration asks Slurm for something that it, or the site, cannot give."""

    exit_code = Exit.WRONG
