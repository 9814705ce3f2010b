"""The engine as a process: `python -P -m stages.engine.main --model DIR`, or `serve()` in a replica's body."""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec

from stages import sharedfs
from stages.chat import ChatTokenizer
from stages.engine.errors import EngineError
from stages.engine.loop import EngineLoop
from stages.engine.qwen3 import Qwen3
from stages.engine.sampling import LogprobsMode
from stages.engine.scheduler import Scheduler, SchedulerOptions
from stages.engine.server import Served, create_app
from stages.engine.weights import load_model_files, read_special_ids
from stages.errors import StageError
from stages.web import ASGIApp, run, serve_app

_FLOAT_BYTES = 4
_DEFAULT_MAX_LEN = 4096


class EngineOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How one engine is started; names follow vLLM's flags where it has the same.

    Args:
        model: a Hugging Face directory with a Qwen3.
        host: address to listen on.
        port: port to listen on; 0 takes any free one.
        served_model_name: the name clients use; the directory's by default.
        weight_version: the version that answers carry for these weights.
        api_key_file: file with the bearer token that all routes but /health demand; without it they are open.
        dev_mode: whether it can be paused and given other weights over HTTP.
        max_model_len: tokens of the longest sequence; by default the model's positions, at most 4,096.
        max_num_seqs: sequences that run at once.
        max_num_batched_tokens: tokens a step computes at most.
        block_size: tokens in a block of the prefix cache.
        kv_cache_mib: memory of all blocks; it is taken as it is used.
        enable_prefix_caching: off recomputes every prompt.
        logprobs_mode: log-probs of the distribution that was sampled from, or of the model alone.
    """

    model: Path
    host: str = "127.0.0.1"
    port: int = 0
    served_model_name: str | None = None
    weight_version: str = "0"
    api_key_file: Path | None = None
    dev_mode: bool = False
    max_model_len: int | None = None
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512
    block_size: int = 16
    kv_cache_mib: int = 256
    enable_prefix_caching: bool = True
    logprobs_mode: LogprobsMode = "processed_logprobs"


def _read_api_key(path: Path | None) -> str | None:
    if path is None:
        return None
    try:
        key = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise EngineError(f"api key file {path}: cannot be read ({error}); give a file with one line") from error
    if not key:
        raise EngineError(f"api key file {path} is empty; write the token into it, or leave --api-key-file out")
    return key


def build(options: EngineOptions) -> tuple[EngineLoop, ASGIApp]:
    """Load the model and put the application around it; blocks for some ten milliseconds.

    Raises:
        StageError: the model directory, the key file or a bound is not usable; the message says which and what to do.
    """
    files = load_model_files(options.model)
    config = files.config
    max_len = options.max_model_len or min(config.max_position_embeddings, _DEFAULT_MAX_LEN)
    tokens = options.kv_cache_mib * 2**20 // (_FLOAT_BYTES * config.kv_floats_per_token)
    tokenizer = ChatTokenizer.load(options.model)
    bounds = SchedulerOptions(
        max_model_len=max_len,
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=options.max_num_batched_tokens,
        block_size=options.block_size,
        kv_cache_tokens=tokens,
        enable_prefix_caching=options.enable_prefix_caching,
        logprobs_mode=options.logprobs_mode,
    )
    eos_ids = config.eos_token_ids | tokenizer.eos_ids
    loop = EngineLoop(Scheduler(Qwen3(files), bounds, eos_ids, options.weight_version))
    served = Served(
        model=options.served_model_name or options.model.resolve().name,
        root=str(options.model),
        vocab_size=config.vocab_size,
        max_model_len=max_len,
        special_ids=read_special_ids(options.model),
        created=int(time.time()),
    )
    key = _read_api_key(options.api_key_file)
    return loop, create_app(loop, tokenizer, served, key, dev_mode=options.dev_mode)


async def serve(options: EngineOptions, on_ready: Callable[[str], Awaitable[None]]) -> None:
    """Run an engine until SIGTERM, SIGINT or cancellation; requests in flight get what was drawn so far.

    Args:
        options: how it is started.
        on_ready: awaited with the url once requests are accepted.

    Raises:
        StageError: it cannot start.
    """
    engine, app = await asyncio.to_thread(build, options)
    asyncio_loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio_loop.add_signal_handler(number, stop.set)
    try:
        stepping = asyncio.create_task(engine.run(), name="engine")
        serving = asyncio.create_task(serve_app(app, options.host, options.port, on_ready), name="server")
        stopped = asyncio.create_task(stop.wait(), name="signal")
        try:
            await asyncio.wait({stepping, serving, stopped}, return_when=asyncio.FIRST_COMPLETED)
            if not stopped.done():
                # One of the two broke: its exception is ours.
                await (stepping if stepping.done() else serving)
        finally:
            engine.abort_all()
            for task in (serving, stepping, stopped):
                task.cancel()
            await asyncio.gather(serving, stepping, stopped, return_exceptions=True)
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio_loop.remove_signal_handler(number)


def _parse(argv: list[str]) -> tuple[EngineOptions, Path | None]:
    parser = argparse.ArgumentParser(prog="python -P -m stages.engine.main", description="serve a Qwen3 with NumPy")
    parser.add_argument("--model", type=Path, required=True, help="Hugging Face directory")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0, help="0: any free port")
    parser.add_argument("--served-model-name", default=None)
    parser.add_argument("--weight-version", default="0")
    parser.add_argument("--api-key-file", type=Path, default=None)
    parser.add_argument("--dev-mode", action="store_true", help="routes that pause it and change its weights")
    parser.add_argument("--port-file", type=Path, default=None, help="the bound port is written there once it listens")
    parser.add_argument("--max-model-len", type=int, default=None)
    parser.add_argument("--max-num-seqs", type=int, default=64)
    parser.add_argument("--max-num-batched-tokens", type=int, default=512)
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--kv-cache-mib", type=int, default=256)
    parser.add_argument("--no-enable-prefix-caching", dest="enable_prefix_caching", action="store_false")
    parser.add_argument("--logprobs-mode", choices=("processed_logprobs", "raw_logprobs"), default="processed_logprobs")
    values = vars(parser.parse_args(argv))
    port_file: Path | None = values.pop("port_file")
    return EngineOptions(**values), port_file


def main(argv: list[str] | None = None) -> int:
    """Run from the command line; gives the exit code."""
    options, port_file = _parse(sys.argv[1:] if argv is None else argv)

    async def on_ready(url: str) -> None:
        sys.stderr.write(f"engine: serving {options.model} at {url}\n")
        if port_file is not None:
            await asyncio.to_thread(sharedfs.write_atomic, port_file, url.rpartition(":")[2].encode())

    try:
        run(serve(options, on_ready))
    except StageError as error:
        sys.stderr.write(f"engine: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
