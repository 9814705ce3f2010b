"""What workflows implement and stages call: Task, Agent, Model, and the values that pass between them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, Protocol, runtime_checkable

import msgspec

from sandbox.protocols import Sandbox
from stages.trajectory import Message, Trajectory

Row = Mapping[str, Any]
"""One dataset row; `task_id` is always there and stable from run to run."""


class Environment(msgspec.Struct, frozen=True):
    """Where a row's agent works; equal environments are prepared once and shared.

    Args:
        image: "host" or the name, digest or directory of an image in the store.
        setup_key: names everything that `prepare` does and the data it needs; two rows with one key get one layer.
        workspace: absolute paths in the sandbox whose changes EVAL is given from RUN.
        protected: globs under the workspace that EVAL never takes from RUN.
        network: "none", or "open" where the task needs it and the site allows it.
    """

    image: str = "host"
    setup_key: str = ""
    workspace: tuple[str, ...] = ()
    protected: tuple[str, ...] = ()
    network: Literal["none", "open"] = "none"


class Reward(msgspec.Struct, frozen=True):
    """What the verifier says of a rollout; `parts` are for people who look."""

    value: float
    parts: dict[str, float] = {}
    grading: Literal["trusted", "untrusted"] = "trusted"


class Limits(msgspec.Struct, frozen=True):
    """What an agent may spend: turns, seconds a tool call, and seconds of service time for the whole attempt."""

    max_turns: int = 16
    turn_timeout_s: float = 30.0
    run_s: float = 600.0


class Model(Protocol):
    """The policy as an agent sees it; it keeps the exact token stream of all it was asked."""

    async def generate(self, *, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> Message:
        """Sample the next assistant message.

        Raises:
            ContextLengthError: the stream has reached the context length.
            LLMError: the engine gave no answer within the deadline.
        """
        ...

    def say(self, *, messages: Sequence[Message], reply: Message, tools: Sequence[Mapping[str, Any]] = ()) -> None:
        """Record an assistant message that was not sampled (the oracle's answer): mask 0, nothing to train on."""
        ...


@runtime_checkable
class Task(Protocol):
    """A dataset and how its environments are made and graded."""

    name: str
    private: frozenset[str]
    """Columns that EVAL and the oracle alone see."""

    def rows(self) -> Iterable[Row]:
        """All rows, each with a stable `task_id`."""
        ...

    def environment(self, row: Row) -> Environment:
        """The row's environment; a pure function of the row."""
        ...

    async def prepare(self, sandbox: Sandbox, row: Row) -> None:
        """INIT: make the environment's layer; what it writes is shared by every row of the same setup_key."""
        ...

    def prompt(self, row: Row) -> list[Message]:
        """The messages an agent starts from; sees public columns only."""
        ...

    def tools(self, row: Row) -> list[dict[str, Any]]:
        """Tool schemas in OpenAI's function format."""
        ...

    async def verify(self, sandbox: Sandbox, row: Row, trajectory: Trajectory) -> Reward:
        """EVAL: grade what the agent left; raise only where grading itself broke."""
        ...

    async def solve(self, sandbox: Sandbox, row: Row) -> str | None:
        """The oracle's way: do the task in the sandbox, and return the answer to say, if the task wants one."""
        ...


@runtime_checkable
class Agent(Protocol):
    """A policy's body: it talks to the model and acts in the sandbox until it is done."""

    name: str
    privileged: bool
    """True for the oracle alone: its RUN leases carry the private columns."""

    async def run(self, row: Row, model: Model, sandbox: Sandbox, limits: Limits) -> None:
        """Work on one row. The token stream is kept by `model`; time-outs are raised around this call."""
        ...


@runtime_checkable
class ResumableAgent(Agent, Protocol):
    """An agent whose whole state is its messages: what one worker began, another can end."""

    async def resume(
        self, row: Row, model: Model, sandbox: Sandbox, limits: Limits, messages: Sequence[Message]
    ) -> None:
        """Go on from `messages`; model and sandbox are as they were left.

        They are what the agent last asked the model with; or they end with the model's reply, where the agent was
        stopped while it acted on it: that action is done again.
        """
        ...


@runtime_checkable
class EquippedAgent(Agent, Protocol):
    """An agent that brings files of its own into the sandbox: one layer above the task's, made once for an image.

    EVAL never mounts it. Nothing of it may be under a path that a task declares as its workspace.
    """

    @property
    def equipment_key(self) -> str:
        """Names everything that `equip` does; empty for an agent that needs nothing."""
        ...

    async def equip(self, sandbox: Sandbox) -> None:
        """Write the files into a fresh sandbox of the image, which has no network.

        Raises:
            RolloutError: it cannot be done; final where nobody could do it.
        """
        ...
