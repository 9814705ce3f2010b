"""Public bugs of the field that the fleet's assignment and policy decide: one test each, named by its number."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest

from stages import open_files
from stages.engine_client import Completion, EngineUnavailableError
from stages.pools.sessions import AttemptSession
from stages.router.metrics import render
from stages.router.readings import Reading
from stages.trajectory import Sampling
from stages.wire import PolicyIn, SessionOut
from tests.support.fleets import ScriptedEngines, ToyFleet
from tests.support.waiting import eventually

ROOT = Path(__file__).parents[3]


async def test_b07_a_generation_on_a_replica_that_is_down_is_not_waited_for() -> None:
    """One that is stopped, not dead, keeps its connections open: only the router knows."""

    class Hung:
        async def context_length(self, url: str) -> int:
            return 100

        async def generate(self, url: str, *_: object, **__: object) -> Completion:
            await asyncio.Event().wait()
            raise AssertionError

    class Link:
        async def call(self, *_: object, **__: object) -> SessionOut:
            return SessionOut("1", "r0", "http://r0", 0)

    session = AttemptSession(Link(), Hung(), "g1-0", 1)  # type: ignore[arg-type]
    await session.open(None)
    asking = asyncio.create_task(session.generate("http://r0", [1], Sampling(), name="x", timeout_s=3600))
    await asyncio.sleep(0)
    session.lost()
    with pytest.raises(EngineUnavailableError, match="is down"):
        await asyncio.wait_for(asking, 10)


async def test_b09_a_thousand_sessions_on_eight_idle_replicas_differ_by_at_most_one() -> None:
    toy = ToyFleet(8, 1000)
    given = Counter(await toy.open_all())
    assert len(given) == 8 and max(given.values()) - min(given.values()) <= 1


async def test_b10_sessions_whose_names_begin_alike_are_independent() -> None:
    toy = ToyFleet(3, 12)
    one, twelfth = "g1-1", "g1-11"
    first, other = await toy.open(one), await toy.open(twelfth)
    assert first.session_id != other.session_id and first.replica_id != other.replica_id
    toy.fleet.release(one)
    assert (await toy.open(twelfth)).session_id == other.session_id


async def test_b11_new_sessions_avoid_a_saturated_replica_and_old_ones_move_where_they_may() -> None:
    toy = ToyFleet(3, 60, move_above=1.2)
    old = dict(zip(toy.rollouts[:24], await toy.open_all(toy.rollouts[:24]), strict=True))
    toy.readings = {name: Reading(running=8, kv_usage=0.1) for name in ("r1", "r2")}
    toy.readings["r0"] = Reading(running=6, waiting=2, kv_usage=0.99)
    await toy.replicas.look()
    moved, _ = toy.replicas.uneasy(list(old))
    assert moved and {old[rollout] for rollout in moved} == {"r0"}
    assert "r0" not in {(await toy.open(rollout)).replica_id for rollout in moved}
    assert Counter(await toy.open_all(toy.rollouts[24:])).keys() == {"r1", "r2"}


@pytest.mark.parametrize(("mode", "moves"), [("keep", False), ("wait", False), ("abort", True)])
async def test_b12_sessions_of_a_replica_in_weight_sync_wait_or_move_as_asked(mode: str, moves: bool) -> None:
    engines = ScriptedEngines()
    toy = ToyFleet(2, 2, engines, sync="rolling")
    where = dict(zip(toy.rollouts, await toy.open_all(), strict=True))
    engines.free.clear()
    request = PolicyIn(version=1, weights_path="/w", mode=mode)  # type: ignore[arg-type]
    swapping = asyncio.create_task(toy.replicas.set_policy(request))
    await eventually(lambda: engines.under_way != [], "the first replica is in sync")
    assert engines.most_at_once == 1
    syncing = engines.under_way[0].removeprefix("http://")
    (rollout,) = [r for r, replica in where.items() if replica == syncing]
    # Only an aborted generation comes back here; a kept one goes on where it is, under both versions.
    session = await toy.open(rollout, failed=syncing if moves else None)
    assert (session.replica_id != syncing) is moves
    assert session.policy_version == 0
    engines.free.set()
    await swapping
    assert (await toy.open(rollout)).policy_version == 1 and engines.most_at_once == 1


def test_b15_a_small_limit_of_open_files_is_raised_and_one_that_cannot_be_is_refused() -> None:
    limits: list[tuple[int, int]] = []
    assert open_files.ensure(4096, get=lambda: (1024, 1 << 20), change=limits.append) == 4096
    assert limits == [(4096, 1 << 20)]
    assert open_files.ensure(4096, get=lambda: (20_000, 20_000), change=limits.append) == 20_000 and len(limits) == 1
    with pytest.raises(open_files.OpenFilesError, match="hard limit is 1024, 4096 are needed"):
        open_files.ensure(4096, get=lambda: (256, 1024), change=limits.append)


def test_b15_a_process_of_a_run_raises_its_own_limit_first(tmp_path: Path) -> None:
    program = (
        "import resource, sys\nfrom pathlib import Path\nfrom launch.bodies import open_context\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (512, 8192))\n"
        "try:\n    open_context('run', Path(sys.argv[1]), 1)\n"
        "except Exception as error:\n    print(type(error).__name__)\n"
        "print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])\n"
    )
    command = [sys.executable, "-c", program, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert done.stdout.split() == ["ManifestError", "4096"], done.stderr


async def test_b14_the_loop_lag_of_router_and_workers_is_exported() -> None:
    toy = ToyFleet(1, 1)
    router = toy.router
    router.lag_s, router.journal = [0.001] * 98 + [0.5] * 2, SimpleNamespace(fsync_s=[])  # type: ignore[attr-defined]
    loads = {"run-1-a": {"loop_lag_s": 0.25}, "run-2-b": {"loop_lag_s": 0.125}, "eval-1-c": {}}
    lines = render(router, toy.replicas.pressure.readings, loads).splitlines()  # type: ignore[arg-type]
    assert 'rollmill_event_loop_lag_seconds{quantile="0.99"} 0.500000' in lines
    assert 'rollmill_worker_loop_lag_seconds{stage="run"} 0.25' in lines


async def test_b37_a_joiner_gets_its_share_and_no_live_session_moves() -> None:
    toy = ToyFleet(8, 400)
    old = dict(zip(toy.rollouts[:200], await toy.open_all(toy.rollouts[:200]), strict=True))
    toy.join("r8")
    given = Counter(await toy.open_all(toy.rollouts[200:]))
    assert given["r8"] == 44
    assert dict(zip(old, await toy.open_all(list(old)), strict=True)) == old
