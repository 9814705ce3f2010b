"""A router on a disk that is really full for a while: `python -m tests.support.full_disk DIR` in its own mount."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from stages.client import AsyncRolloutClient
from stages.errors import ServiceError, StageError
from stages.status import read_status
from tests.support.routers import HandWorker, make_run, routed

BALLAST = 1 << 20


async def scenario(root: Path) -> None:
    """Fill the disk under a working router, see it refuse, make room, and see it go on with everything acknowledged."""
    ballast = root / "ballast"
    ballast.write_bytes(b"\0" * BALLAST)
    layout = make_run(root / "run")
    accepted, refused = 0, 0
    async with routed(layout) as link, AsyncRolloutClient(layout.root, patience_s=0.5) as trainer:
        await trainer.submit([{"task_id": "toy-1"}], group_size=2)
        accepted += 2
        worker = HandWorker(link, "w-1-a")
        await worker.through("init")
        leased = await worker.lease("run")
        fillers = root / "filler"
        with fillers.open("wb", buffering=0) as file:
            while True:
                try:
                    file.write(b"\0" * 4096)
                except OSError:
                    break
        while not refused:
            try:
                await trainer.submit([{"task_id": f"toy-{accepted}", "data": {"question": "x" * 4000}}])
                accepted += 1
            except ServiceError as error:
                assert (error.status, error.code) == (503, "journal_stalled"), error
                refused += 1
            except StageError:
                refused += 1
        fillers.unlink()
        ballast.unlink()
        async with AsyncRolloutClient(layout.root, patience_s=30) as patient:
            await patient.submit([{"task_id": "toy-2"}], idempotency_key="after")
        assert [lease["lease_id"] for lease in leased] == (
            await worker.heartbeat([lease["lease_id"] for lease in leased])
        )["renewed"], "a lease was lost to the full disk"
        for lease in leased:
            assert await worker.commit(lease) == "ok"
        live = (await trainer.status())["rollouts"]
    assert read_status(layout)["rollouts"] == live, "the journal and the live state differ"
    assert accepted + 1 <= live["accepted"] <= accepted + refused + 1, (accepted, refused, live)
    sys.stdout.write("went on\n")


if __name__ == "__main__":
    asyncio.run(scenario(Path(sys.argv[1])))
