"""RUN: one attempt of an agent in a sandbox; leaves its token stream and workspace in this worker's segment."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import time
from collections.abc import AsyncIterator, Coroutine, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from sandbox.errors import LayerError, LimitExceeded, SandboxError
from sandbox.protocols import Sandbox, SandboxBackend, SandboxLimits, SandboxSpec
from stages.chat import ChatTokenizer
from stages.engine_client import EngineClient
from stages.errors import AgentError, LLMError, PolicyTimeoutError, RolloutError, StageError
from stages.handoff import SegmentWriter
from stages.http import RouterLink
from stages.identity import node_name
from stages.layout import RunLayout
from stages.ledger.outcomes import GIVEN_BACK, OK, OUTCOMES
from stages.model import StreamModel
from stages.pools.equipment import Equipment
from stages.pools.sessions import AttemptSession
from stages.pools.turns import Drain, Restored, Turns, restored
from stages.protocols import Agent, Environment, Limits, ResumableAgent, Task
from stages.store import LayerStore, Standing
from stages.trajectory import ModelIdentity, RunResult, Sampling, Trajectory
from stages.wire import LeaseOut, RunInput
from stages.worker import Keep, Leave, Result, Stagehand

CANCEL_S: Final = 2.0
LIMITS: Final = SandboxLimits(pack_bytes=512 * 1024 * 1024, pack_entries=200_000)
"""What an agent may leave in its workspace: it is kept in a segment, and unpacked once more to be graded."""


class Policy(msgspec.Struct, frozen=True):
    """The policy that this worker's rollouts sample from."""

    chat: ChatTokenizer
    identity: ModelIdentity
    logprobs_mode: str = "processed"


class Saving(msgspec.Struct, frozen=True):
    """Where and how often checkpoints are made: `scratch` is on the sandbox backend's own filesystem."""

    layout: RunLayout
    scratch: Path
    every_turns: int = 0
    visibility_s: float = 60.0


class RunHand(Stagehand):
    """One RUN worker's hands."""

    timeout_class = "sandbox"

    def __init__(
        self,
        task: Task,
        agent: Agent,
        limits: Limits,
        policy: Policy,
        *,
        backend: SandboxBackend,
        store: LayerStore,
        engine: EngineClient,
        link: RouterLink,
        segments: SegmentWriter,
        saving: Saving,
    ) -> None:
        self._task, self._agent, self._limits, self._policy = task, agent, limits, policy
        self._backend, self._store, self._engine, self._link = backend, store, engine, link
        self._segments, self._saving = segments, saving
        self._equipment = Equipment(agent, backend, store)
        self._resumable = agent if isinstance(agent, ResumableAgent) else None  # asked once: it looks at every member
        self._drain = Drain()
        self._keep: Keep = lambda lease, checkpoint: None
        self._leave: Leave = lambda lease: None
        self._sessions: dict[str, AttemptSession] = {}

    def sessions(self, moved: Sequence[str], lost: Sequence[str]) -> None:
        """See Stagehand."""
        for rollout_id in moved:
            if rollout_id in self._sessions:
                self._sessions[rollout_id].moved()
        for rollout_id in lost:
            if rollout_id in self._sessions:
                self._sessions[rollout_id].lost()

    @property
    def warm(self) -> list[str]:
        """Layers that are unpacked on this node."""
        return self._store.warm

    def attach(self, keep: Keep) -> None:
        """See Stagehand."""
        self._keep = keep

    def leaves(self, leave: Leave) -> None:
        """See Stagehand."""
        self._leave = leave

    def drain(self, grace_s: float) -> None:
        """Stop each agent at its next turn's boundary; its checkpoint goes back with the lease."""
        self._drain.ask(grace_s)

    async def work(self, lease: LeaseOut) -> Result:
        """Run the agent to its end, whatever that is, and hand on what it left; or to where a drain stops it."""
        session = self._sessions[lease.rollout_id] = AttemptSession(
            self._link, self._engine, lease.rollout_id, lease.attempt
        )
        try:
            return await self._work(lease, session)
        finally:  # of a lease that was lost the rollout's next attempt may be here already
            if self._sessions.get(lease.rollout_id) is session:
                del self._sessions[lease.rollout_id]

    async def _work(self, lease: LeaseOut, session: AttemptSession) -> Result:
        given = msgspec.json.decode(lease.input, type=RunInput)
        environment = self._task.environment(given.payload)
        saving = self._saving
        brought = await self._equipment.layers(environment.image)
        async with (
            self._store.standing(environment.image, [*given.layers, *brought]) as ground,
            restored(saving.layout.root, given, saving.scratch, saving.visibility_s) as before,
        ):
            lost = given.checkpoint.tokens if given.checkpoint is not None and before is None else 0
            turns = Turns(
                lease, given, before, resumes=self._resumable is not None, every=saving.every_turns,
                drain=self._drain, segments=self._segments, keep=self._keep,
            )  # fmt: skip
            model = self._model(lease, given, turns, session)
            if before is not None:
                model.restore(before.record.stream)
            spec = _spec(environment, ground, before)
            # A workspace is packed at the end, so its sandbox starts in any case.
            async with self._backend.create(spec) as sandbox, _starting(sandbox, ahead=bool(environment.workspace)):
                turns.begin(model, sandbox)
                late = asyncio.timeout(given.budget - turns.spent_s + CANCEL_S)
                ended = await _until_stopped(self._run_agent(given, model, sandbox, turns, before), turns, late)
                if ended is None and late.expired():  # it was told to end, and did not
                    ended = _used_up(given, model)
                if ended is None:
                    checkpoint, wasted = await turns.hand_on()
                    return Result(
                        outcome=GIVEN_BACK, message="the worker drained", checkpoint=checkpoint,
                        wasted_tokens=wasted + lost,
                    )  # fmt: skip
                try:
                    workspace = await self._workspace(environment, sandbox)
                except LimitExceeded as error:
                    ended, workspace = (AgentError.failure_class, str(error)), (None, None)
                except LayerError as error:
                    if not error.detail.get("content"):
                        raise
                    ended, workspace = (AgentError.failure_class, f"the workspace: {error}"), (None, None)
                self._leave(lease)
        return await self._hand_over(lease, given, model, turns, *ended, *workspace, lost=lost)

    async def _hand_over(
        self, lease: LeaseOut, given: RunInput, model: StreamModel, turns: Turns, outcome: str, message: str,
        digest: str | None, workspace: bytes | None, *, lost: int,
    ) -> Result:  # fmt: skip
        """Write the finished attempt to this worker's segment."""
        trajectory = model.trajectory()
        place = await self._segments.append(
            RunResult(
                lease.rollout_id, given.group_id, given.task_id, lease.attempt, outcome, message, trajectory,
                given.sampling, self._policy.identity, node_name(), turns.spent_s, model.llm_s, model.tool_s,
                time.time(), digest, workspace, turns.nodes,
            )
        )  # fmt: skip
        return Result(
            outcome=outcome, message=message, segment=place, min_policy_version=oldest_version(trajectory),
            wasted_tokens=lost, llm_s=model.llm_s, tool_s=model.tool_s,
        )  # fmt: skip

    def _model(self, lease: LeaseOut, given: RunInput, turns: Turns, session: AttemptSession) -> StreamModel:
        if given.session is not None:
            session.given(given.session)
        return StreamModel(
            session, session.open, self._policy.chat, _seeded(given, lease.rollout_id),
            name=f"{lease.rollout_id}.{lease.attempt}", hold=turns.hold,
            logprobs_mode=self._policy.logprobs_mode,  # type: ignore[arg-type]
        )  # fmt: skip

    async def _run_agent(
        self, given: RunInput, model: StreamModel, sandbox: Sandbox, turns: Turns, before: Restored | None
    ) -> tuple[str, str]:
        """The agent's outcome; faults that say nothing about the policy are raised on."""
        budget = asyncio.timeout(given.budget - turns.spent_s)
        try:
            async with budget:
                if before is not None and self._resumable is not None:
                    history = before.record.stream.history
                    await self._resumable.resume(given.payload, model, sandbox, self._limits, history)
                else:
                    await self._agent.run(given.payload, model, sandbox, self._limits)
        except TimeoutError as error:
            if budget.expired():
                return _used_up(given, model)
            if error.errno is not None:
                raise
            return AgentError.failure_class, f"TimeoutError: {error}"
        except RolloutError as error:
            # Only what ends a trajectory that can be graded is an outcome; the rest is retried.
            if OUTCOMES[error.failure_class].status != "completed":
                raise
            return error.failure_class, str(error)
        except LimitExceeded as error:  # were it retried and masked, an agent could take back what goes badly
            return AgentError.failure_class, str(error)
        except (StageError, SandboxError, OSError):
            raise
        except Exception as error:  # noqa: BLE001 - the boundary to an agent's own code: what breaks there is its doing
            return AgentError.failure_class, f"{type(error).__name__}: {error}"
        # One that was told to end, and ended later of its own accord, used more than it had all the same.
        return _used_up(given, model) if budget.expired() else (OK, "")

    async def _workspace(self, environment: Environment, sandbox: Sandbox) -> tuple[str | None, bytes | None]:
        """What the agent changed under the task's declared paths, but for the protected ones; None where nothing.

        Returns:
            Digest and packed layer.

        Raises:
            LayerError: it cannot be packed; with `content` in its detail, because of what the agent left there.
        """
        if not environment.workspace:
            return None, None
        packed = await sandbox.pack(paths=environment.workspace, exclude=environment.protected)
        if packed.entries == 0:
            return None, None
        return packed.digest, await asyncio.to_thread(Path(packed.path).read_bytes)


@contextlib.asynccontextmanager
async def _starting(sandbox: Sandbox, *, ahead: bool) -> AsyncIterator[None]:
    """Start the sandbox beside the policy's first turn; one that does not start tells whoever uses it first."""
    if not ahead:
        yield
        return
    start = asyncio.create_task(sandbox.start(), name="start")
    try:
        yield
    finally:
        start.cancel()
        await asyncio.gather(start, return_exceptions=True)


def _used_up(given: RunInput, model: StreamModel) -> tuple[str, str]:
    """The outcome of an attempt whose service time is over."""
    if model.unanswered is not None:
        raise LLMError(f"the fleet was away when the attempt's {given.budget:g} s ended: {model.unanswered}")
    return PolicyTimeoutError.failure_class, f"the attempt used up its {given.budget:g} s of service time"


async def _until_stopped(
    agent: Coroutine[Any, Any, tuple[str, str]], turns: Turns, late: asyncio.Timeout
) -> tuple[str, str] | None:
    """The agent's outcome, or None where a drain stopped it, or `late` came: it is then cancelled and has ended."""
    running = asyncio.create_task(agent, name="agent")
    try:
        with contextlib.suppress(TimeoutError):
            async with late:
                await turns.until_stopped(running)
        return running.result() if running.done() else None
    finally:
        if not running.done():
            running.cancel()
            # An agent that swallows its cancellation is left to the sandbox's end.
            await asyncio.wait({running}, timeout=CANCEL_S)


def _spec(environment: Environment, ground: Standing, before: Restored | None) -> SandboxSpec:
    return SandboxSpec(
        image=ground.image.root, env=ground.image.env, layers=tuple(str(layer) for layer in ground.layers),
        workspace=environment.workspace,
        upper=None if before is None else str(before.upper), shell=None if before is None else before.record.shell,
        limits=LIMITS,
    )  # fmt: skip


def _seeded(given: RunInput, rollout_id: str) -> Sampling:
    """A configured seed gives every rollout a seed of its own: the rollouts of a group must differ."""
    if given.sampling.seed is None:
        return given.sampling
    name = f"{given.sampling.seed}:{given.task_id}:{rollout_id.rpartition('-')[2]}".encode()
    seed = int.from_bytes(hashlib.blake2b(name, digest_size=4).digest(), "big")
    return msgspec.structs.replace(given.sampling, seed=seed)


def oldest_version(trajectory: Trajectory) -> int | None:
    """The lowest policy version that sampled any token; None where nothing was sampled or no version is known."""
    versions = [span.version for chain in trajectory.chains for span in chain.policy_versions]
    return min(versions, default=None)
