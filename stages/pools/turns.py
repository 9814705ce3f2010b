"""One attempt's turns in a RUN worker: where its agent stands still, is checkpointed, and goes on or is handed on."""

from __future__ import annotations

import asyncio
import contextlib
import io
import logging
import time
import weakref
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, Final

import msgspec

from sandbox.errors import SandboxError
from sandbox.layers import unpack
from sandbox.protocols import Sandbox
from stages.checkpoint import Checkpoint
from stages.errors import StageError
from stages.handoff import SegmentWriter, wait_checkpoint
from stages.identity import node_name
from stages.model import StreamModel
from stages.pools.unpacked import unpacked
from stages.trajectory import CheckpointRange
from stages.waiters import wake
from stages.wire import LeaseOut, RunInput

CUT_AT: Final = 0.5
"""Share of a drain's grace after which an agent is stopped amid its turn; the rest is for the checkpoint."""
LEAVE_AT: Final = 0.9
"""Share of the grace that an agent gets which cannot be taken up again, to reach its end."""

log = logging.getLogger(__name__)


class Drain:
    """The worker's wish to stop, known to all of its attempts."""

    def __init__(self) -> None:
        self.asked = False
        self._waiters: set[asyncio.Future[None]] = set()
        self._from, self._grace_s = 0.0, 0.0

    def ask(self, grace_s: float) -> None:
        """Stop everything within `grace_s`."""
        self._from, self._grace_s = asyncio.get_running_loop().time(), grace_s
        self.asked = True
        for waiter in self._waiters:
            wake(waiter)

    async def until_asked(self, agent: asyncio.Task[Any]) -> None:
        """Returns when it is asked for, or when the agent has ended, without a task of its own: every attempt waits."""
        if self.asked or agent.done():
            return
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.add(waiter)
        agent.add_done_callback(lambda _: wake(waiter))
        try:
            await waiter
        finally:
            self._waiters.discard(waiter)

    def at(self, share: float) -> float:
        """The loop's time when this share of the grace is over."""
        return self._from + share * self._grace_s


class Restored(msgspec.Struct, frozen=True):
    """A checkpoint that was fetched, and its layer unpacked in a directory for one sandbox to take."""

    record: Checkpoint
    upper: Path


@contextlib.asynccontextmanager
async def restored(
    run_dir: Path, given: RunInput, scratch: Path, visibility_s: float
) -> AsyncIterator[Restored | None]:
    """The lease's checkpoint, or None where it has none or it cannot be used: the rollout then starts anew."""
    if given.checkpoint is None:
        yield None
        return
    async with contextlib.AsyncExitStack() as held:
        found: Restored | None = None
        try:
            record = await wait_checkpoint(run_dir, given.checkpoint, visibility_s=visibility_s)
            if record.layers != given.layers:
                raise StageError(f"it lies over layers {record.layers}, the lease has {given.layers}")

            def fill(place: Path) -> None:
                unpack(io.BytesIO(record.layer or b""), place / "upper", digest=record.layer_digest)

            place = await held.enter_async_context(unpacked(scratch, "checkpoint-", fill))
            found = Restored(msgspec.structs.replace(record, layer=None), place / "upper")
        except (StageError, SandboxError, OSError) as error:
            log.warning("%s: starts anew, its checkpoint cannot be used: %s", given.task_id, error)
        yield found


class Turns:
    """Stops one attempt's agent at its boundaries.

    Args:
        lease: the attempt.
        given: its input.
        before: what it goes on from.
        resumes: the agent can be taken up by another worker; one that cannot is never checkpointed.
        every: turns from one checkpoint to the next; 0: at a drain only.
        drain: the worker's.
        segments: where checkpoints go.
        keep: commits a checkpoint while the lease goes on.
    """

    def __init__(
        self,
        lease: LeaseOut,
        given: RunInput,
        before: Restored | None,
        *,
        resumes: bool,
        every: int,
        drain: Drain,
        segments: SegmentWriter,
        keep: Callable[[LeaseOut, CheckpointRange], None],
    ) -> None:
        self._lease, self._given, self._before = lease, given, before
        self._resumes, self._every, self._drain = resumes, every if resumes else 0, drain
        self._segments, self._keep = segments, keep
        self._started = time.perf_counter()
        self._parked = asyncio.Event()
        self._held: Callable[[], StreamModel | None] = lambda: None
        self._sandbox: Sandbox | None = None
        self._kept_turns = self._kept_tokens = 0
        if before is not None:
            chains = before.record.stream.chains
            self._kept_turns = sum(len(chain.turns) for chain in chains)
            self._kept_tokens = sum(sum(chain.loss_mask) for chain in chains)

    def begin(self, model: StreamModel, sandbox: Sandbox) -> None:
        """The agent is about to start on these."""
        # The model holds this: two that hold each other wait for the garbage collector, with the whole trajectory.
        self._held, self._sandbox = weakref.ref(model), sandbox

    @property
    def _model(self) -> StreamModel | None:
        return self._held()

    @property
    def spent_s(self) -> float:
        """Service time of the rollout so far, that of the checkpoint included."""
        earlier_s = 0.0 if self._before is None else self._before.record.spent_s
        return earlier_s + time.perf_counter() - self._started

    @property
    def nodes(self) -> list[str]:
        """Nodes of the checkpoint that this attempt goes back to."""
        return [] if self._before is None else self._before.record.nodes

    async def hold(self) -> None:
        """The model's hook before each generation: makes the checkpoint that is due, and stands still in a drain."""
        assert self._model is not None
        if self._every and not self._drain.asked and self._model.turns - self._kept_turns >= self._every:
            self._kept_turns = self._model.turns  # one that fails is not tried again at every turn
            checkpoint = await self.take()
            if checkpoint is not None:
                self._keep(self._lease, checkpoint)
        if self._drain.asked and self._resumes:
            self._parked.set()
            await asyncio.Event().wait()

    async def until_stopped(self, agent: asyncio.Task[Any]) -> None:
        """Returns when the agent has ended or is to be stopped.

        Stopped it is at a boundary of a drain, or when the drain's time for it is up.
        """
        await self._drain.until_asked(agent)
        if not agent.done():
            parked = asyncio.create_task(self._parked.wait(), name="parked")
            left_s = self._drain.at(CUT_AT if self._resumes else LEAVE_AT) - asyncio.get_running_loop().time()
            try:
                await asyncio.wait({agent, parked}, timeout=max(0.0, left_s), return_when=asyncio.FIRST_COMPLETED)
            finally:
                parked.cancel()

    async def hand_on(self) -> tuple[CheckpointRange | None, int]:
        """The stopped agent's checkpoint (None: nothing newer than what is kept), and the tokens that nothing keeps."""
        checkpoint = await self.take() if self._resumes else None
        assert self._model is not None
        return checkpoint, self._model.sampled_tokens - self._kept_tokens

    async def take(self) -> CheckpointRange | None:
        """Pack, write, and make durable; None where nothing was sampled since the last one, or where it failed."""
        model, sandbox = self._model, self._sandbox
        assert model is not None and sandbox is not None
        if model.sampled_tokens == self._kept_tokens:
            return None
        try:
            shell = await sandbox.shell.state()
            packed = await sandbox.pack()
            layer = await asyncio.to_thread(_take_file, Path(packed.path), packed.entries > 0)
            state, tokens = model.snapshot(), model.sampled_tokens
            place = await self._segments.append(
                Checkpoint(
                    rollout_id=self._lease.rollout_id, attempt=self._lease.attempt, stream=state, shell=shell,
                    layers=self._given.layers, spent_s=self.spent_s, finished_at=time.time(),
                    nodes=list(dict.fromkeys([*self.nodes, node_name()])), layer_digest=packed.digest, layer=layer,
                )
            )  # fmt: skip
        except (SandboxError, StageError, OSError) as error:
            log.warning("%s: no checkpoint: %s", self._lease.rollout_id, error)
            return None
        self._kept_tokens = tokens
        versions = [span.version for chain in state.chains for span in chain.policy_versions]
        return CheckpointRange(
            place.path, place.offset, place.length, place.crc32, model.turns, tokens, min(versions, default=None)
        )


def _take_file(path: Path, own: bool) -> bytes:
    data = path.read_bytes()
    if own:  # a layer without entries may be the file of several sandboxes
        path.unlink()
    return data
