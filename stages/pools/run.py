"""RUN: one attempt of an agent in a sandbox; leaves its token stream and workspace in this worker's segment."""

from __future__ import annotations

import asyncio
import hashlib
import time
from pathlib import Path

import msgspec

from sandbox.errors import SandboxError
from sandbox.protocols import Sandbox, SandboxBackend, SandboxSpec
from stages.chat import ChatTokenizer
from stages.engine_client import EngineClient
from stages.errors import AgentError, PolicyTimeoutError, RolloutError, StageError
from stages.handoff import SegmentWriter
from stages.http import RouterLink
from stages.identity import here
from stages.ledger.outcomes import OK, OUTCOMES
from stages.model import StreamModel
from stages.protocols import Agent, Environment, Limits, Task
from stages.store import LayerStore
from stages.trajectory import ModelIdentity, RunResult, Sampling, Trajectory
from stages.wire import LeaseOut, RunInput, SessionIn, SessionOut
from stages.worker import Result


class Policy(msgspec.Struct, frozen=True):
    """The policy that this worker's rollouts sample from."""

    chat: ChatTokenizer
    identity: ModelIdentity
    logprobs_mode: str = "processed"


class RunHand:
    """One RUN worker's hands."""

    timeout_class = "policy_timeout"

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
    ) -> None:
        self._task, self._agent, self._limits, self._policy = task, agent, limits, policy
        self._backend, self._store, self._engine, self._link = backend, store, engine, link
        self._segments = segments

    @property
    def warm(self) -> list[str]:
        """Layers that are unpacked on this node."""
        return self._store.warm

    async def work(self, lease: LeaseOut) -> Result:
        """Run the agent to its end, whatever that is, and hand on what it left."""
        given = msgspec.json.decode(lease.input, type=RunInput)
        started = time.perf_counter()
        environment = self._task.environment(given.payload)
        layers = [await asyncio.to_thread(self._store.unpacked, digest) for digest in given.layers]
        model = self._model(lease, given)
        async with self._backend.create(_spec(environment, layers)) as sandbox:
            outcome, message = await self._run_agent(given, model, sandbox)
            workspace = await self._workspace(environment, sandbox)
        trajectory = model.trajectory()
        place = await self._segments.append(
            RunResult(
                lease.rollout_id,
                given.group_id,
                given.task_id,
                lease.attempt,
                outcome,
                message,
                trajectory,
                given.sampling,
                self._policy.identity,
                here().node,
                time.perf_counter() - started,
                model.llm_s,
                model.tool_s,
                time.time(),
                *workspace,
            )
        )
        return Result(
            outcome=outcome, message=message, segment=place, min_policy_version=oldest_version(trajectory),
            llm_s=model.llm_s, tool_s=model.tool_s,
        )  # fmt: skip

    def _model(self, lease: LeaseOut, given: RunInput) -> StreamModel:
        async def open_session(failed: str | None) -> SessionOut:
            body = SessionIn(rollout_id=lease.rollout_id, attempt=lease.attempt, failed=failed)
            return await self._link.call("POST", "/v1/sessions", body, answer=SessionOut)

        return StreamModel(
            self._engine, open_session, self._policy.chat, _seeded(given, lease.rollout_id),
            name=f"{lease.rollout_id}.{lease.attempt}", logprobs_mode=self._policy.logprobs_mode,  # type: ignore[arg-type]
        )  # fmt: skip

    async def _run_agent(self, given: RunInput, model: StreamModel, sandbox: Sandbox) -> tuple[str, str]:
        """The agent's outcome; faults that say nothing about the policy are raised on."""
        try:
            async with asyncio.timeout(given.budget):
                await self._agent.run(given.payload, model, sandbox, self._limits)
        except TimeoutError:
            error: RolloutError = PolicyTimeoutError(f"the attempt used up its {given.budget:g} s of service time")
            return error.failure_class, str(error)
        except RolloutError as error:
            # Only what ends a trajectory that can be graded is an outcome; the rest is retried.
            if OUTCOMES[error.failure_class].status != "completed":
                raise
            return error.failure_class, str(error)
        except (StageError, SandboxError, OSError):
            raise
        except Exception as error:  # noqa: BLE001 - the boundary to an agent's own code: what breaks there is its doing
            return AgentError.failure_class, f"{type(error).__name__}: {error}"
        return OK, ""

    async def _workspace(self, environment: Environment, sandbox: Sandbox) -> tuple[str | None, bytes | None]:
        """What the agent changed under the task's declared paths: digest and packed layer; None where nothing."""
        if not environment.workspace:
            return None, None
        packed = await sandbox.pack(paths=environment.workspace)
        if packed.entries == 0:
            return None, None
        return packed.digest, await asyncio.to_thread(Path(packed.path).read_bytes)


def _spec(environment: Environment, layers: list[Path]) -> SandboxSpec:
    return SandboxSpec(
        image=environment.image, layers=tuple(str(layer) for layer in layers), workspace=environment.workspace
    )


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
