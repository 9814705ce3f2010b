"""One program that runs alone in a sandbox, driven by the event loop: input goes in, output and report come out."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable

from sandbox.marker import BoundedOutput
from sandbox.protocols import Execution
from sandbox.started import Piped, exit_code, gone

TIMED_OUT_EXIT = 124
_READ_BYTES = 64 * 1024
_LAST_READS = 32  # a pipe holds 64 KiB, 1 MiB where it was enlarged; what still comes then is of one that slipped away


class Running:
    """A started program and its pipes; belongs to one event loop.

    Nothing here waits for the end of a pipe, which a process that slipped away could hold open: what the pipes hold
    when the program and all of its session are gone is the whole of it.

    Args:
        process: just started; its descriptors are closed here.
        kill: SIGKILLs it and all that it started.
        given: for its stdin.
        output_bytes: most bytes of stdout and stderr that are kept.
        report_bytes: most bytes of the report; a program that writes more is killed.
        leave_s: deadline of its going away once it is killed.
    """

    def __init__(
        self, process: Piped, kill: Callable[[], None], given: bytes, *, output_bytes: int, report_bytes: int,
        leave_s: float,
    ) -> None:  # fmt: skip
        self._process, self._kill, self._unsent, self._leave_s = process, kill, memoryview(given), leave_s
        self._output = BoundedOutput(output_bytes)
        self._report, self._most, self._overflow = bytearray(), report_bytes, False
        self._open = {process.input, process.output, process.report}
        self._ending: asyncio.Task[None] | None = None
        loop = asyncio.get_running_loop()
        loop.add_reader(process.output, self._on_output)
        loop.add_reader(process.report, self._on_report)
        loop.add_writer(process.input, self._on_input)

    @property
    def pid(self) -> int:
        """Of the program's outermost process."""
        return self._process.pid

    async def result(self, timeout_s: float) -> Execution:
        """Wait for its end, or bring it about: by the time-out, or because the caller is cancelled.

        Raises:
            SandboxError: it is still there after the kill.
        """
        started = time.perf_counter()
        timed_out = False
        try:
            await asyncio.wait_for(asyncio.shield(self._process.exited), timeout_s)
        except TimeoutError:
            timed_out = True
        finally:
            await self.end()
        code = TIMED_OUT_EXIT if timed_out else exit_code(self._process.exited.result())
        return Execution(
            code, bytes(self._report), self._output.text().encode(), time.perf_counter() - started,
            self._output.truncated, timed_out, self._overflow,
        )  # fmt: skip

    async def end(self) -> None:
        """Kill what is left of it and take what the pipes still hold; idempotent, and not undone by cancellation.

        Raises:
            SandboxError: it is still there at the deadline.
        """
        if self._ending is None:
            self._ending = asyncio.create_task(self._end())
        await asyncio.shield(self._ending)

    async def _end(self) -> None:
        self._kill()
        try:
            await gone(self._process, "program", self._leave_s)
        finally:
            for _ in range(_LAST_READS):
                self._on_output()
                self._on_report()
            for descriptor in list(self._open):
                self._close(descriptor)

    def _on_output(self) -> None:
        self._output.add(self._read(self._process.output))

    def _on_report(self) -> None:
        data = self._read(self._process.report)
        room = self._most - len(self._report)
        self._report += data[:room]
        if len(data) > room and not self._overflow:
            self._overflow = True
            self._kill()

    def _on_input(self) -> None:
        try:
            self._unsent = self._unsent[os.write(self._process.input, self._unsent[: 16 * _READ_BYTES]) :]
        except BlockingIOError:
            return
        except OSError:  # it closed its stdin
            self._unsent = memoryview(b"")
        if not self._unsent:
            self._close(self._process.input)

    def _read(self, descriptor: int) -> bytes:
        """What the pipe gives at once; at its end it is closed."""
        if descriptor not in self._open:
            return b""
        try:
            data = os.read(descriptor, _READ_BYTES)
        except BlockingIOError:
            return b""
        if not data:
            self._close(descriptor)
        return data

    def _close(self, descriptor: int) -> None:
        if descriptor in self._open:
            self._open.remove(descriptor)
            asyncio.get_running_loop().remove_reader(descriptor)
            asyncio.get_running_loop().remove_writer(descriptor)
            os.close(descriptor)
