"""B39: a run in which nothing progresses says what it waits for and ends; one that progresses or idles does not."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest

from conf.schema import Config
from launch import drive
from launch.drive import Driver, StuckError
from launch.errors import Exit
from stages.layout import RunLayout
from stages.ledger.events import Rules
from stages.router.views import status_view
from tests.support.ledgers import Driven
from tests.support.waiting import eventually


class Told:
    """A client whose status is what the ledger says, `last_progress` so many seconds ago."""

    def __init__(self, driven: Driven, still_s: float, *, fleet: str = "ready") -> None:
        self._driven, self._still_s, self._fleet = driven, still_s, [{"state": fleet}]
        self.looks = 0

    async def status(self) -> dict[str, Any]:
        self.looks += 1
        return {**status_view(self._driven.ledger), "last_progress": time.time() - self._still_s, "fleet": self._fleet}


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Driver:
    monkeypatch.setattr(drive, "POLL_S", 0.01)
    layout = RunLayout(tmp_path)
    return Driver(Config(stuck_after_s=30.0), layout, 1, [])


async def watched(run: Driver, client: Told) -> bool:
    """Whether the run is still thought to be well after some looks."""
    watching, enough = asyncio.create_task(run._watch(client)), client.looks + 6  # type: ignore[arg-type]
    try:
        await eventually(lambda: watching.done() or client.looks >= enough, "it is looked at", 10.0)
        if watching.done():
            watching.result()
        return not watching.done()
    finally:
        watching.cancel()


async def test_b39_nothing_progresses_for_the_configured_time(run: Driver) -> None:
    driven = Driven(Rules())
    driven.submit(n=3)
    driven.through("init")
    driven.lease("run", free=1)
    with pytest.raises(StuckError) as caught:
        await watched(run, Told(driven, 31))
    assert "nothing has progressed for 31 s" in str(caught.value)
    assert "run 2 queued and 1 leased" in str(caught.value) and "1 of 1 replicas ready" in str(caught.value)
    assert caught.value.exit_code == Exit.FAILED != 0


async def test_b39_a_run_that_progresses_or_has_nothing_to_do_is_not_stuck(run: Driver) -> None:
    driven = Driven(Rules())
    assert await watched(run, Told(driven, 3600))
    driven.submit(n=1)
    assert await watched(run, Told(driven, 29))


async def test_b39_a_fleet_that_loads_has_longer_but_not_for_ever(run: Driver) -> None:
    driven = Driven(Rules())
    driven.submit(n=1)
    assert await watched(run, Told(driven, 800, fleet="down"))
    assert run._away_at is not None
    run._away_at -= 901  # fleet.start_s is 900
    assert await watched(run, Told(driven, 29, fleet="down"))  # its agent needs no model
    with pytest.raises(StuckError, match=r"no replica was ready for 90\d s"):
        await watched(run, Told(driven, 1000, fleet="down"))


def test_b39_what_counts_as_progress_is_work_that_came_in_or_ended() -> None:
    driven = Driven(Rules())
    driven.t += 1000
    driven.submit(n=2)
    assert driven.ledger.state.last_progress == driven.t, "a run that idled is not stuck when work comes at last"
    driven.through("init")
    (lease, _) = driven.lease("run")
    began = driven.ledger.state.last_progress
    driven.pass_time(5)
    assert driven.ledger.state.last_progress == began
    driven.commit(lease)
    assert driven.ledger.state.last_progress == driven.t > began
