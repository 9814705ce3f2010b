"""Errors of the stages: one root, and one class for each boundary that can break inside the allocation."""

from __future__ import annotations

from typing import Any


class StageError(Exception):
    """Root of what the stages raise; `detail` holds machine-readable facts about the failure."""

    def __init__(self, message: str, **detail: Any) -> None:
        super().__init__(message)
        self.detail = detail


class RolloutError(StageError):
    """One rollout cannot go on; `failure_class` is a name of the contract's failure table."""

    failure_class = "infrastructure"


class LLMError(RolloutError):
    """The engine gave no usable answer within its deadline."""

    failure_class = "llm"


class ContextLengthError(RolloutError):
    """The token stream has reached the model's context length: the trajectory ends here and is graded as it stands."""

    failure_class = "context_length"


class PolicyTimeoutError(RolloutError):
    """The policy spent its turns or its service time without finishing."""

    failure_class = "policy_timeout"


class AgentError(RolloutError):
    """The agent's own code or harness broke: trainable, with reward 0."""

    failure_class = "agent"


class VerifierError(RolloutError):
    """Grading broke: says nothing about the policy."""

    failure_class = "verifier"


class CancelledError(RolloutError):
    """The lease was revoked: the rollout was cancelled or handed to another worker."""

    failure_class = "cancelled"


class JournalError(StageError):
    """The journal cannot take or give back an event."""


class FencedError(JournalError):
    """A newer epoch exists: this router may acknowledge nothing more."""


class ShardError(StageError):
    """A shard, segment or index does not hold what was promised."""


class SchemaError(ShardError):
    """A file was written by a newer schema than this reader knows."""


class ServiceError(StageError):
    """The router refused a request; `status` is the HTTP code, `code` the machine-readable reason."""

    def __init__(self, status: int, code: str, message: str, **detail: Any) -> None:
        super().__init__(message, **detail)
        self.status = status
        self.code = code


class RouterUnreachableError(StageError):
    """No router answered within the deadline."""


class ManifestError(StageError):
    """The run directory is missing, foreign, half-made or of another config."""
