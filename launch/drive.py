"""Drives a run beside its router: the workflow under supervision, to a summary and an exit code."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, Final

import msgspec

from conf.schema import Config
from launch import evaluation, training, wiring
from launch.bodies import node_scratch
from launch.errors import Exit, LaunchError
from launch.failures import describe
from launch.forked import ForkServer
from launch.progress import Progress, print_summary
from launch.slurm.code import CODE_CHANGED
from launch.supervisor import Slot, Supervisor
from sandbox.scratch import sweep
from stages import control, leftovers, sharedfs
from stages.client import AsyncRolloutClient
from stages.errors import ManifestError, RouterUnreachableError, ServiceError, StageError
from stages.layout import RunLayout, StoreLayout
from stages.status import read_status
from stages.summary import write_summary
from workflows.collect import collect

POLL_S: Final = 0.5
START_S: Final = 120.0
"""Patience with a router that has not come up yet, however small `stuck_after_s` is."""


Look = Callable[[Mapping[str, Any]], Awaitable[None]]
"""Something beside the driver that acts on what the router says of the run."""


class StuckError(LaunchError):
    """Nothing has progressed for `stuck_after_s`."""


class BrokenRunError(LaunchError):
    """A component of the run is gone and will not come back."""


class Interrupted(Exception):
    """A signal or a request ended the run early; it can go on."""

    def __init__(self, state: str, code: Exit) -> None:
        super().__init__(state)
        self.state, self.code = state, code


class Driver:
    """One start of a run: its router and workflow, and whichever other processes are kept here.

    Args:
        config: the run's.
        layout: its run directory, opened.
        attempt: which start this is; names the log directory.
        kept: the processes that are kept here: all of them on one machine, the router alone inside an allocation;
            or the supervisor that keeps them already.
        looks: told every status that the router gives; may change the run's jobs.
        patience_s: how long a stop waits for workers elsewhere to hand over to the router.
        forks: forks processes that are kept here.
    """

    def __init__(
        self,
        config: Config,
        layout: RunLayout,
        attempt: int,
        kept: Iterable[Slot] | Supervisor,
        looks: Sequence[Look] = (),
        patience_s: float = 0.0,
        forks: ForkServer | None = None,
    ) -> None:
        self._looks, self._patience_s = looks, patience_s
        self._manned = 0.0
        self._config, self._layout, self._attempt = config, layout, attempt
        self._progress = Progress(layout.root)
        self._stop = asyncio.Event()
        self._status: dict[str, Any] = {}
        self._began = time.monotonic()
        self._report = ""
        self._unready_at = 0.0
        """Unix seconds of the last look that found no ready replica."""
        self._away_at: float | None = None
        if not isinstance(kept, Supervisor):
            kept = Supervisor(layout, kept, attempt, self._progress.say, forks)
        self._supervisor = kept

    async def to_the_end(self) -> int:
        """Collect under supervision; leaves report/summary.json when all has ended.

        SIGTERM and SIGINT end it, with what is open handed over; SIGUSR2 asks for a drain first.
        """
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self.stop)
        loop.add_signal_handler(signal.SIGUSR2, self.drain)
        error: BaseException | None = None
        with self._progress:
            keeping = self._supervisor.keep()
            working = asyncio.create_task(self._work(), name="collect")
            stopping = asyncio.create_task(self._stop.wait(), name="signal")
            try:
                await asyncio.wait({keeping, working, stopping}, return_when=asyncio.FIRST_COMPLETED)
                if self._stop.is_set() and self._patience_s:
                    self.drain()  # workers were told too: the router stays until they have handed over
                    await asyncio.wait(
                        {working, keeping}, timeout=self._patience_s, return_when=asyncio.FIRST_COMPLETED
                    )
                error = _first_error(working, keeping)
            finally:
                working.cancel()
                await asyncio.shield(self._supervisor.stop())
                await asyncio.shield(asyncio.to_thread(_sweep, self._config, self._layout))
                keeping.cancel()
                stopping.cancel()
                await asyncio.gather(keeping, working, stopping, return_exceptions=True)
        return self._ended(error, finished=working.done() and not working.cancelled() and error is None)

    def stop(self) -> None:
        """End the run here; it can go on later."""
        self._stop.set()

    def drain(self) -> None:
        """Slurm is about to take the allocation away: the router leases nothing more from now on."""
        with contextlib.suppress(ManifestError):  # the deadline of whoever sent the signal still holds
            if not control.pending(self._layout, "drain"):  # a person's own drain stays one
                control.request(self._layout.root, "drain", control.TOLD_BY_SLURM)

    def _ended(self, error: BaseException | None, *, finished: bool) -> int:
        if isinstance(error, Interrupted):
            self._leave_summary(error.state)
            return error.code
        if error is not None:
            with contextlib.suppress(StageError, OSError):  # the error that ends the run must not be hidden
                self._leave_summary("failed", describe(error)[0])
            raise error
        if not finished:
            raise KeyboardInterrupt
        summary = self._leave_summary("completed")
        print_summary(summary, self._layout.root)
        if self._report:
            sys.stdout.write(self._report)
        if summary["state"] == "completed":
            return Exit.DONE
        sys.stderr.write(f"rollmill: {summary['error']}\n")
        return Exit.FAILED

    def _leave_summary(self, state: str, error: str | None = None) -> dict[str, Any]:
        """Write report/summary.json; a run none of whose rollouts completed has failed."""
        status, wall_s = self._status or read_status(self._layout), time.monotonic() - self._began
        rollouts = status["rollouts"]
        if state == "completed" and rollouts["accepted"] and not rollouts["completed"]:
            state, error = (
                "failed",
                f"none of {rollouts['accepted']} rollouts completed; {_first_failure(self._layout)}",
            )
        work_s = max(1e-9, status.get("work_s", wall_s))
        summary = {
            **status, "state": state, "members": [], "slurm": {}, "stuck": None, "error": error,
            "attempt": self._attempt, "code_changed": os.environ.get(CODE_CHANGED) == "1",
            "rates": {"rollouts_per_s": rollouts["completed"] / work_s, "tokens_per_s": status["tokens"] / work_s},
            "timings": {"wall_s": wall_s, "work_s": work_s},
        }  # fmt: skip
        write_summary(self._layout, summary)
        return summary

    async def _work(self) -> None:
        """The workflow itself, beside a watcher that shows progress and ends what is stuck."""
        async with AsyncRolloutClient(self._layout.root, patience_s=max(START_S, self._config.stuck_after_s)) as client:
            for url in self._config.fleet.urls:
                await client.add_replica(url, model=self._config.fleet.model)
            watching = asyncio.create_task(self._watch(client), name="watch")
            collecting = asyncio.create_task(self._workflow(client), name=self._config.workflow.name)
            try:
                await asyncio.wait({watching, collecting}, return_when=asyncio.FIRST_COMPLETED)
                asked = control.pending(self._layout, "cancel") or control.pending(self._layout, "drain")
                if asked and not watching.done():
                    # Whatever collecting ran into, the watcher knows when nothing of the run is under way any more.
                    await watching
                for task in (watching, collecting):
                    if task.done():
                        task.result()
                await self._look(client)
            finally:
                for task in (watching, collecting):
                    task.cancel()
                await asyncio.gather(watching, collecting, return_exceptions=True)

    async def _workflow(self, client: AsyncRolloutClient) -> None:
        """What the run is for; serving lasts until the watcher finds that it was asked to end."""
        config = self._config
        if config.workflow.name == "serve":
            await asyncio.Event().wait()
        elif config.workflow.name == "evaluate":
            report = await evaluation.evaluate_config(client, config, self._layout)
            self._report = evaluation.table(report)
        elif config.workflow.name == "train":
            self._report = await training.keep_training(self._layout, self._attempt, self._progress.say)
        else:
            task_ids = [row["task_id"] for row in wiring.build_task(config).rows()]
            await collect(
                client, task_ids, group_size=config.group_size, tag=config.tag, max_open=config.admission.max_open
            )

    async def _look(self, client: AsyncRolloutClient) -> None:
        status = await client.status()
        accepted_at = self._status.get("accepted_at") or (time.monotonic() if status["rollouts"]["accepted"] else None)
        self._status = {**status, "accepted_at": accepted_at}
        if accepted_at is not None:
            self._status["work_s"] = time.monotonic() - accepted_at
        self._progress.update(self._status)
        for look in self._looks:
            await look(self._status)

    async def _watch(self, client: AsyncRolloutClient) -> None:
        while True:
            await asyncio.sleep(POLL_S)
            with contextlib.suppress(RouterUnreachableError, ServiceError):
                await self._look(client)
            if not self._status:
                continue
            if await self._is_over():
                return
            away_s = self._fleet_away_s()
            since = max(self._status["last_progress"], self._manned_since(), self._unready_at)
            still_s = time.time() - since
            if self._status["rollouts"]["open"] and still_s > self._config.stuck_after_s:
                raise StuckError(f"nothing has progressed for {still_s:.0f} s: {_waits_for(self._status)}")
            longest_s = max(self._config.stuck_after_s, self._config.fleet.start_s)
            idle_s = time.time() - self._status["last_progress"]  # an agent that needs no model goes on without a fleet
            if self._status["rollouts"]["open"] and min(away_s, idle_s) > longest_s:
                raise StuckError(f"no replica was ready for {away_s:.0f} s: {_waits_for(self._status)}")

    def _fleet_away_s(self) -> float:
        """Seconds since when no replica of ours is ready; engines may load for longer than a run may stand still.

        Where each component is a job of its own, the fleet's may wait for hours: it is away from its first word on.
        """
        fleet, now = self._status["fleet"], time.time()
        queued = not fleet and self._config.placement.name in {"linked", "auto"}
        if self._config.fleet.name == "external" or any(replica["state"] == "ready" for replica in fleet):
            self._away_at = None
            return 0.0
        self._unready_at = now
        if self._away_at is None or queued:
            self._away_at = now
        return now - self._away_at

    def _manned_since(self) -> float:
        """Unix seconds since when every pool has a worker: where each is a job of its own, one may wait for hours."""
        if self._config.placement.name not in {"linked", "auto"}:
            return 0.0
        there = {str(member.get("kind")) for member in self._status["members"]}
        if not {"init", "run", "eval"} <= there:
            self._manned = time.time()
        return self._manned

    async def _is_over(self) -> bool:
        """End a run that cannot go on, and one that was cancelled or drained once nothing of it is under way.

        A service that a person drained, and that has nothing open, has done what it was for.
        """
        broken = await asyncio.to_thread(control.message, self._layout, "fail")
        if broken is not None:
            raise BrokenRunError(broken)
        busy = sum(stage["leased"] for stage in self._status["stages"].values())
        if self._status["state"] != "draining" or busy:
            return False
        still_open = self._status["rollouts"]["open"]
        if not control.pending(self._layout, "cancel"):
            by_person = await asyncio.to_thread(control.message, self._layout, "drain") != control.TOLD_BY_SLURM
            if self._config.workflow.name == "serve" and by_person and not still_open and not self._stop.is_set():
                return True
            raise Interrupted("requeued", Exit.REQUEUED)
        if not still_open:
            raise Interrupted("cancelled", Exit.INTERRUPTED)
        return False


def _sweep(config: Config, layout: RunLayout) -> None:
    """Take away what processes that were killed here could not: nothing of theirs is left on disk or node."""
    leftovers.sweep(layout, StoreLayout(config.store_path))
    sweep(node_scratch(config))


def _first_failure(layout: RunLayout) -> str:
    try:
        first = msgspec.json.decode(sharedfs.read_bytes(layout.failures).partition(b"\n")[0])
    except (FileNotFoundError, msgspec.MsgspecError):
        return "failures.jsonl has none"
    return f"the first failed by {first.get('class')}: {first.get('message')}"


def _waits_for(status: dict[str, Any]) -> str:
    stages = ", ".join(f"{name} {s['queued']} queued and {s['leased']} leased" for name, s in status["stages"].items())
    ready = sum(replica["state"] == "ready" for replica in status["fleet"])
    return f"{stages}; {ready} of {len(status['fleet'])} replicas ready; logs/ has what each process said"


def _first_error(*tasks: asyncio.Task[Any]) -> BaseException | None:
    for task in tasks:
        if task.done() and not task.cancelled() and (error := task.exception()) is not None:
            while isinstance(error, BaseExceptionGroup):
                error = error.exceptions[0]
            return error
    return None
