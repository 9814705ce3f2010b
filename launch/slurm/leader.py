"""The batch process of a job: starts the job's steps, passes signals on to them, and says how the run goes on."""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from conf.load import load_config
from launch.errors import Exit
from launch.slurm.code import CODE_CHANGED
from launch.slurm.continuing import KILLED_S, Continuing, say
from launch.slurm.run_over import run_is_over
from launch.slurm.sruns import Steps, parse_steps
from stages import control, manifest, sharedfs
from stages.errors import ManifestError
from stages.layout import RunLayout

HAND_OVER_S: Final = 45.0
"""What the steps are given to end in order: a worker's drain and a supervisor's patience with it."""
EARLY_S: Final = 35.0
"""Slurm's warning may come half a minute before the moment that was asked for (sbatch's manual, --signal)."""
RESERVE_S: Final = 10.0
"""Kept of the time before the limit for ending the steps and for the call that lets the run go on."""


def lead(run_dir: str, job: str, signal_s: int) -> int:
    """Run a job of the run; returns its exit code. The steps' command lines come on standard input.

    Args:
        run_dir: the run directory.
        job: which job this is, as the record of submissions names it.
        signal_s: seconds between Slurm's USR2 and its kill.
    """
    return asyncio.run(Leader(RunLayout(Path(run_dir)), job, sys.stdin.read(), signal_s).run())


class Leader:
    """One start of one job."""

    def __init__(self, layout: RunLayout, job: str, lines: str, signal_s: int) -> None:
        self._patience_s = HAND_OVER_S
        self._layout, self._job, self._lines, self._signal_s = layout, job, lines, signal_s
        self._config = load_config(layout.root)
        self._told, self._ended = asyncio.Event(), asyncio.Event()
        self._continuing = Continuing(self._config, layout, job, self._ended)
        self._steps = Steps({})
        self._attempt = 0
        self._preempted = False

    async def run(self) -> int:
        """From the start of the steps to the job's exit code."""
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGUSR2, self._told.set)
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._ended.set)
        missing = self._continuing.missing_components()
        if missing:
            return await self._continuing.submit_again(missing)
        leads_run = self._continuing.leads_run
        if leads_run and (rival := await self._continuing.end_rivals()):
            say(f"{rival}: this job is not needed")
            return Exit.DONE
        await self._continuing.end_predecessor()
        changed = await asyncio.to_thread(self._continuing.changed_code)
        if changed:
            if self._config.cluster.changed_code == "refuse":
                return await self._refuse(
                    f"{changed} (cluster.changed_code=refuse); `rollmill resume` takes the new one"
                )
            say(changed)
        # A linked job that has failed does not come back with the router's; the components of one job all do.
        stale: list[control.Request] = ["drain"] if self._continuing.is_linked else ["drain", "fail"]
        self._attempt = await asyncio.to_thread(_attempt, self._layout, stale if leads_run else ())
        self._steps = Steps(parse_steps(self._lines, self._attempt))
        say(f"job {self._job}, attempt {self._attempt}: {', '.join(self._steps.names)}")
        try:
            await self._steps.start(self._attempt, {CODE_CHANGED: "1" if changed else "0"})
            return await (self._lead_run() if leads_run else self._follow_run())
        finally:
            await self._steps.end(HAND_OVER_S)

    # -- the job that holds the router --------------------------------------------------------------------------------

    async def _lead_run(self) -> int:
        """Until the driver has ended; then the others end, and the run goes on or is over."""
        broken = await self._until_told()
        if self._preempted:
            await self._continuing.submit_ahead()
        if not self._ended.is_set() and not self._steps.over("control"):
            await self._hand_over()
        if self._ended.is_set():
            return await self._let_slurm_end()
        code = await self._steps.wait("control", self._patience_s)
        await self._steps.end(self._patience_s)
        if self._ended.is_set():
            return await self._let_slurm_end()
        told = self._told.is_set() or await self._steps_were_told()
        if code > 128 and not told and not broken:  # the driver may have been the first step to end
            told = await self._is_preempted()
        if (told or bool(broken)) and await asyncio.to_thread(self._continuing.was_cut_short, code):
            return await (self._continuing.submit_again(broken) if broken else self._continuing.go_on())
        return await self._continuing.finish(code)

    async def _let_slurm_end(self) -> int:
        """Slurm ends this job: its steps go in order, and where only half of it would come back it is asked for again.

        At a node failure Slurm 22.05 queues the components up to the one that lost its node again and completes those
        after it, so that half of the job waits for ever.
        """
        ending = asyncio.create_task(self._steps.end(self._patience_s), name="end")
        torn = await self._continuing.torn()
        if torn:
            await self._continuing.submit_again(torn)
        await ending
        return 128 + signal.SIGTERM

    async def _refuse(self, why: str) -> int:
        """cluster.changed_code=refuse: nothing is started, and the run is told that this job is missing."""
        say(why)
        if self._continuing.leads_run:
            await self._continuing.fail(why)
        elif not self._continuing.is_added:
            control.request(self._layout.root, "fail", why)
        return Exit.WRONG

    async def _until_told(self) -> str:
        """Return when the driver has ended, or when it has to; says what of a heterogeneous job Slurm took away."""
        while not self._steps.over("control"):
            gone = await self._steps.next_end(self._told, self._ended)
            if self._told.is_set() or self._ended.is_set():
                return ""
            if gone is None or gone == "control":
                continue
            if await self._is_preempted():
                self._told.set()
                return ""
            broken = await self._continuing.lost_component(gone)
            if broken:  # half of a heterogeneous job is no job: all of it is asked for again
                say(broken)
                return broken
            if broken is not None:
                say("Slurm queues the whole job again")
                await self._steps.next_end(self._ended, timeout_s=KILLED_S)
                continue
            if self._steps.code(gone) == Exit.REQUEUED:  # a signal went to the steps alone
                self._told.set()
            else:
                self._tell_driver(gone)
        return ""

    async def _is_preempted(self) -> bool:
        """Whether a step has ended because Slurm takes the job away, of which it has told the steps alone."""
        if self._told.is_set() or self._preempted:
            return self._preempted
        self._preempted = await self._continuing.is_preempted()
        if self._preempted:
            say("preempted")
        return self._preempted

    async def _hand_over(self) -> None:
        """Drain: workers finish or checkpoint their turns, the driver ends when nothing is leased any more."""
        left_s = await self._time_to_hand_over()
        if self._steps.over("control") or self._ended.is_set():
            return
        say(f"told to end within {left_s:.0f} s: draining")
        until = time.monotonic() + max(left_s - RESERVE_S, left_s / 3)
        self._steps.drain()
        while not self._steps.over("control") and not self._ended.is_set():
            left = until - time.monotonic()
            if left <= 0:
                say("the drain takes longer than there is time: ending the steps now")
                self._patience_s = RESERVE_S / 3  # twice this, and the rest for the call that lets the run go on
                for name in self._steps.names:
                    self._steps.terminate(name)
                return
            await self._steps.next_end(self._ended, timeout_s=left)

    async def _time_to_hand_over(self) -> float:
        """Return when it is time to begin, with the seconds that there are: an early warning leaves time to work."""
        began = time.monotonic()
        left_s = await self._continuing.seconds_left()
        if left_s is None:
            left_s = self._signal_s
        early_s = left_s - self._signal_s
        if 0 < early_s <= EARLY_S:
            await self._steps.next_end(self._ended, timeout_s=early_s)
        return min(left_s - (time.monotonic() - began), self._signal_s)

    async def _steps_were_told(self) -> bool:
        """Whether Slurm's signal went to the steps alone (`scancel --signal=USR2`)."""
        return await asyncio.to_thread(control.message, self._layout, "drain") == control.TOLD_BY_SLURM

    def _tell_driver(self, gone: str) -> None:
        words = self._steps.last_words(gone, self._layout, self._attempt)
        message = f"component {gone} ended with exit code {self._steps.code(gone)}: {words}"
        say(message)
        try:
            control.request(self._layout.root, "fail", message)
        except ManifestError as error:
            say(str(error))
            self._steps.terminate("control")

    # -- a job of workers or engines alone ----------------------------------------------------------------------------

    async def _follow_run(self) -> int:
        """Until the run is over elsewhere, or this job's time is."""
        watching = asyncio.create_task(run_is_over(self._config, self._layout), name="run over")
        over = asyncio.Event()
        watching.add_done_callback(lambda _: over.set())
        try:
            gone = await self._steps.next_end(self._told, self._ended, over)
        finally:
            watching.cancel()
        if self._ended.is_set():
            return 128 + signal.SIGTERM
        if over.is_set() and not watching.cancelled():
            say(watching.result())
            return Exit.DONE
        if gone is not None and await self._is_preempted():
            await self._continuing.submit_ahead()
            self._told.set()
        if self._told.is_set() or (gone is not None and self._steps.code(gone) == Exit.REQUEUED):
            left_s = await self._time_to_hand_over()
            say("told to end soon: handing over")
            await self._steps.end(max(5.0, left_s - RESERVE_S))
            code = await self._continuing.go_on()
            stays_away = code == Exit.FAILED or self._config.cluster.continue_by == "none"
            if stays_away and not self._continuing.is_added:
                control.request(self._layout.root, "fail", f"component {self._job} ended and cannot go on by itself")
            return code
        if gone is not None and not self._continuing.is_added:
            self._tell_driver(gone)
        return self._steps.code(self._steps.names[0]) or Exit.FAILED


def _attempt(layout: RunLayout, stale: Sequence[control.Request]) -> int:
    """The run's attempt: the newest, or a new one where the router has been in that; its log directory is there.

    Args:
        layout: the run directory.
        stale: requests to an earlier attempt that do not hold for a new one; empty for a job that begins none.
    """
    asked = "drain" in stale and control.message(layout, "drain") not in (None, control.TOLD_BY_SLURM)
    control.clear(layout, [name for name in stale if not (asked and name == "drain")])  # a person's drain holds
    attempt = manifest.last_attempt(layout)
    if stale and any(layout.attempt_logs(attempt).glob("control-*")):
        attempt = manifest.begin_attempt(layout)
    sharedfs.make_dirs(layout.attempt_logs(attempt))  # srun cannot start a task whose log it cannot open
    return attempt
