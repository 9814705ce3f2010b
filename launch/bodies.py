"""The process bodies of a run, one a kind: each reads the run directory's config and does its part to the end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from conf.load import load_config
from conf.schema import Config
from launch import wiring
from launch.addresses import listen_address
from launch.process import in_job
from sandbox.choose import choose
from sandbox.protocols import SandboxBackend
from sandbox.scratch import owned, sweep
from stages import manifest
from stages.engine_client import EngineClient
from stages.errors import ManifestError
from stages.handoff import SegmentWriter
from stages.http import RouterLink
from stages.identity import member_id
from stages.images import ImageStore
from stages.layout import RunLayout, StoreLayout
from stages.members import present
from stages.store import LayerStore
from stages.wire import ReplicaIn, Stage
from stages.worker import Stagehand, Worker

DRAIN_GRACE_S = 20.0
ORPHAN_TTLS = 4
"""Lease times without any answer of a router after which a worker stops its sandboxes and ends."""


@dataclass(frozen=True)
class Context:
    """What every body starts from."""

    config: Config
    layout: RunLayout
    member: str
    run_id: str


def open_context(kind: str, run_dir: Path, number: int, member: str | None = None) -> Context:
    """Read the run directory; `member` is this incarnation's id, made here where the starter gave none.

    Raises:
        ManifestError: no run directory.
    """
    layout = RunLayout(run_dir)
    found = manifest.read(layout)
    if found is None:
        raise ManifestError(f"{run_dir} is no run directory: it has no manifest.json")
    return Context(load_config(run_dir), layout, member or member_id(kind, number), found.run_id)


async def router(context: Context) -> None:
    """The router."""
    from stages.ledger.events import Rules
    from stages.router.leasing import Budgets
    from stages.router.served import ServedTask
    from stages.router.service import RouterOptions, serve

    config = context.config
    task = wiring.build_task(config)
    agent = wiring.build_agent(config, task)
    served = ServedTask(task, ImageStore(StoreLayout(config.store_path)).digest, privileged_agent=agent.privileged)
    options = RouterOptions(
        run_id=context.run_id,
        member=context.member,
        rules=Rules(
            lease_ttl_s=config.lease.ttl_s,
            max_attempts=config.retry.max_attempts,
            ready_buffer=config.pools.init.ready_buffer,
            max_lag=config.policy.max_lag,
        ),
        sampling=wiring.sampling(config),
        budgets=Budgets(config.budget.init_s, config.budget.run_s, config.budget.eval_s),
        max_open=config.admission.max_open,
        host=listen_address(config),
    )
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    await serve(context.layout, served, options, stop)


async def replica(context: Context) -> None:
    """One engine of the embedded fleet; registers itself with the router."""
    from stages.engine.main import EngineOptions, serve

    config = context.config
    mode = "processed_logprobs" if config.sampling.logprobs == "processed" else "raw_logprobs"
    options = EngineOptions(
        model=wiring.model_dir(config),
        host=listen_address(config),
        served_model_name=config.fleet.model,
        api_key_file=context.layout.engine_token,
        logprobs_mode=mode,  # type: ignore[arg-type]
    )
    async with contextlib.AsyncExitStack() as stack:
        link = await stack.enter_async_context(RouterLink("worker", run_dir=context.layout.root))

        async def on_ready(url: str) -> None:
            await stack.enter_async_context(present(context.layout, "replica", context.member, endpoint=url))
            body = ReplicaIn(url=url, model=config.fleet.model, capacity=options.max_num_seqs, id=context.member)
            await link.call("POST", "/v1/replicas", body, answer=bytes)

        await serve(options, on_ready)


@contextlib.asynccontextmanager
async def _sandboxes(context: Context) -> AsyncIterator[tuple[SandboxBackend, LayerStore, Path]]:
    """The worker's sandbox backend, the layer store, and a scratch directory of its own."""
    base = node_scratch(context.config)
    store = LayerStore(StoreLayout(context.config.store_path), base / "layers")
    await asyncio.to_thread(store.prepare)
    await asyncio.to_thread(sweep, base)
    with owned(base, f"{context.member}-") as scratch:
        backend = await choose(context.config.sandbox.name, scratch)
        async with backend:
            yield backend, store, scratch


def node_scratch(config: Config) -> Path:
    """This user's node-local directory, mode 0700.

    Raises:
        ManifestError: somebody else's directory has that name.
    """
    base = Path(config.cluster.scratch or tempfile.gettempdir()) / f"rollmill-{os.getuid()}"
    base.mkdir(mode=0o700, parents=True, exist_ok=True)
    if base.stat().st_uid != os.getuid() or base.is_symlink():
        raise ManifestError(f"{base} belongs to another user; set cluster.scratch to a directory of your own")
    return base


def _worker_link(context: Context) -> RouterLink:
    """A worker's calls. One that no router answers for so long has lost its leases to others: it stops and ends."""
    return RouterLink("worker", run_dir=context.layout.root, patience_s=ORPHAN_TTLS * context.config.lease.ttl_s)


async def _work(context: Context, hand: Stagehand, link: RouterLink, stage: Stage, slots: int) -> None:
    worker = Worker(
        link, hand, member=context.member, stage=stage, slots=slots, heartbeat_s=context.config.lease.heartbeat_s
    )
    async with present(context.layout, stage, context.member):
        await worker.run(grace_s=DRAIN_GRACE_S, term="abandon" if in_job() else "drain")


async def init(context: Context) -> None:
    """One INIT worker."""
    from stages.pools.init import InitHand

    config = context.config
    task = wiring.build_task(config)
    async with (
        _sandboxes(context) as (backend, store, _),
        _worker_link(context) as link,
    ):
        await _work(context, InitHand(task, backend, store), link, "init", config.pools.init.slots)


async def run(context: Context) -> None:
    """One RUN worker."""
    from stages.chat import ChatTokenizer
    from stages.model_files import identify
    from stages.pools.run import Policy, RunHand, Saving

    config = context.config
    task = wiring.build_task(config)
    agent = wiring.build_agent(config, task)
    directory = wiring.model_dir(config)
    chat = await asyncio.to_thread(ChatTokenizer.load, directory)
    identity = await asyncio.to_thread(identify, config.fleet.model, directory, chat)
    async with (
        _sandboxes(context) as (backend, store, scratch),
        _worker_link(context) as link,
        EngineClient(api_key=_engine_key(context)) as engine,
        SegmentWriter(context.layout, context.member) as segments,
    ):
        hand = RunHand(
            task, agent, wiring.limits(config), Policy(chat, identity, config.sampling.logprobs),
            backend=backend, store=store, engine=engine, link=link, segments=segments,
            saving=Saving(context.layout, scratch, config.checkpoint.turns or 0, config.fs.visibility_s),
        )  # fmt: skip
        await _work(context, hand, link, "run", config.pools.run.slots)


async def evaluate(context: Context) -> None:
    """One EVAL worker."""
    from stages.pools.eval import EvalHand, RunNames
    from stages.shards.writer import ShardWriter

    config = context.config
    task = wiring.build_task(config)
    names = RunNames(context.run_id, config.workflow.name, task.name, config.agent.name, config.shards.messages)
    async with (
        _sandboxes(context) as (backend, store, scratch),
        _worker_link(context) as link,
        ShardWriter(context.layout, context.member) as shards,
    ):
        hand = EvalHand(
            task, names, context.layout, backend=backend, store=store, shards=shards, scratch=scratch,
            visibility_s=config.fs.visibility_s,
        )  # fmt: skip
        await _work(context, hand, link, "eval", config.pools.eval.slots)


def _engine_key(context: Context) -> str | None:
    path = context.layout.engine_token
    return path.read_text().strip() if path.exists() else None


BODIES: dict[str, Callable[[Context], Awaitable[None]]] = {
    "router": router,
    "replica": replica,
    "init": init,
    "run": run,
    "eval": evaluate,
}
