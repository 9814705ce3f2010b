"""EVAL: grade what RUN left in a fresh sandbox and write the rollout's row into this worker's shard."""

from __future__ import annotations

import asyncio
import io
import time
from pathlib import Path

import msgspec

from sandbox.errors import LimitExceeded, SandboxError
from sandbox.layers import unpack
from sandbox.protect import Protection
from sandbox.protocols import SandboxBackend, SandboxSpec
from stages.errors import AgentError, RolloutError, VerifierError
from stages.gathered import Gathered
from stages.handoff import wait_record
from stages.identity import node_name, slurm_job_id
from stages.layout import RunLayout
from stages.ledger.outcomes import OK, OUTCOMES, failure_class
from stages.pools.run import oldest_version
from stages.pools.unpacked import unpacked
from stages.protocols import Environment, Reward, Task
from stages.shards.writer import ShardWriter
from stages.store import LayerStore, Standing
from stages.trajectory import Row, RunResult, Timing
from stages.wire import CommitRow, EvalInput, LeaseOut
from stages.worker import Leave, Result, Stagehand


class RunNames(msgspec.Struct, frozen=True):
    """The columns that are the same for every row of a run."""

    run_id: str
    workflow: str
    task: str
    agent: str
    keep_messages: bool = True


class EvalHand(Stagehand):
    """One EVAL worker's hands."""

    timeout_class = "verifier"

    def __init__(
        self,
        task: Task,
        names: RunNames,
        layout: RunLayout,
        *,
        backend: SandboxBackend,
        store: LayerStore,
        shards: ShardWriter,
        scratch: Path,
        visibility_s: float,
    ) -> None:
        self._task, self._names, self._layout = task, names, layout
        self._backend, self._store, self._shards = backend, store, shards
        self._scratch, self._visibility_s = scratch, visibility_s
        self._leave: Leave = lambda lease: None
        self._reads = Gathered()
        """Leases come many at a time."""

    def leaves(self, leave: Leave) -> None:
        """See Stagehand."""
        self._leave = leave

    @property
    def warm(self) -> list[str]:
        """Layers that are unpacked on this node."""
        return self._store.warm

    async def work(self, lease: LeaseOut) -> Result:
        """Grade one rollout; its row is durable when this returns."""
        given = msgspec.json.decode(lease.input, type=EvalInput)
        started = time.perf_counter()
        left = await wait_record(self._layout.root, given.segment, visibility_s=self._visibility_s, reads=self._reads)
        outcome, message, reward = await self._grade(given, left)
        row = self._row(lease, given, left, outcome, reward, time.perf_counter() - started)
        self._leave(lease)
        place = await self._shards.append(row)
        sampled = sum(sum(chain.loss_mask) for chain in left.trajectory.chains)
        return Result(
            outcome=OK if outcome == given.outcome else outcome,
            message=message,
            row=CommitRow(
                place.path, place.offset, place.length, place.crc32, row.reward, oldest_version(left.trajectory),
                max(1, len(left.trajectory.chains)), sampled,
            ),
        )  # fmt: skip

    async def _grade(self, given: EvalInput, left: RunResult) -> tuple[str, str, Reward]:
        """Outcome, message and reward; the verifier is asked only where the table lets it speak."""
        if OUTCOMES[given.outcome].reward == "zero":
            return given.outcome, given.message, Reward(0.0)
        try:
            async with asyncio.timeout(given.budget):
                return given.outcome, given.message, await self._verify(given, left)
        except RolloutError as error:
            if OUTCOMES[error.failure_class].status != "completed":
                raise
            return error.failure_class, str(error), Reward(0.0)

    async def _verify(self, given: EvalInput, left: RunResult) -> Reward:
        environment = self._task.environment(given.payload)
        async with self._store.standing(environment.image, given.layers, room=1) as ground:
            return await self._verify_on(ground, environment, given, left)

    async def _verify_on(self, ground: Standing, environment: Environment, given: EvalInput, left: RunResult) -> Reward:
        workspace, digest = left.workspace, left.workspace_digest
        if workspace is None or digest is None:
            return await self._verify_over(ground, ground.layers, environment, given, left)
        below = ground.layers if ground.image.root == "host" else (Path(ground.image.root), *ground.layers)

        def fill(place: Path) -> None:
            """RUN's workspace as a layer directory of its own, without what is protected."""
            unpack(io.BytesIO(workspace), place / "layer", digest=digest)
            Protection(environment.workspace, environment.protected).apply(place / "layer", list(below))

        async with unpacked(self._scratch, "workspace-", fill) as place:
            return await self._verify_over(ground, (*ground.layers, place / "layer"), environment, given, left)

    async def _verify_over(
        self, ground: Standing, layers: tuple[Path, ...], environment: Environment, given: EvalInput, left: RunResult
    ) -> Reward:
        image = ground.image
        spec = SandboxSpec(
            image=image.root, env=image.env, workspace=environment.workspace, layers=tuple(map(str, layers))
        )
        try:
            async with self._backend.create(spec) as sandbox:
                return await self._task.verify(sandbox, given.payload, left.trajectory)
        except LimitExceeded as error:  # of what runs there only the agent's work differs from rollout to rollout
            raise AgentError(f"while it was graded: {error}") from error
        except (RolloutError, SandboxError, TimeoutError):
            raise
        except Exception as error:  # the boundary to a task's verifier: it says nothing about the policy
            raise VerifierError(f"{type(error).__name__}: {error}") from error

    def _row(
        self, lease: LeaseOut, given: EvalInput, left: RunResult, outcome: str, reward: Reward, eval_s: float
    ) -> Row:
        rule = OUTCOMES[outcome]
        trajectory = left.trajectory
        if not self._names.keep_messages:
            trajectory = msgspec.structs.replace(trajectory, messages=[])
        now = time.time()
        timing = Timing(
            given.queue_init_s, given.init_s, given.queue_run_s, left.run_s, left.llm_s, left.tool_s,
            given.queue_eval_s, eval_s, now - given.created_at,
        )  # fmt: skip
        return Row(
            run_id=self._names.run_id, rollout_id=lease.rollout_id, group_id=given.group_id, task_id=given.task_id,
            tag=given.tag, attempt=lease.attempt, workflow=self._names.workflow, task=self._names.task,
            agent=self._names.agent, model=left.model, status=rule.status, failure_class=failure_class(outcome),
            mask_sample=rule.mask_sample, mask_reason=None, reward=reward.value, reward_parts=reward.parts,
            grading=reward.grading, trajectory=trajectory, sampling=left.sampling, timing=timing,
            nodes=list(dict.fromkeys([*left.earlier_nodes, left.node, node_name()])), slurm_job_id=slurm_job_id(),
            layer_digests=given.layers, infrastructure_attempts=given.infrastructure_attempts,
            created_at=given.created_at, finished_at=now,
        )  # fmt: skip
