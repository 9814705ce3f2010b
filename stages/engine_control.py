"""Steering one engine from outside: pause, new weights, their version, resume, aborts, and what it counts.

The routes are those of vLLM's development mode, which the embedded engine has too; both sit behind the run's engine
token. vLLM dies of a directory that it cannot load, and reads tied embeddings back as noise without a word, so a
directory is looked at before any engine hears of it (`check_weights`).
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Final, Literal, TypeVar

import msgspec

from stages.errors import StageError
from stages.http import Client, InvalidURL, TransportError, error_of
from stages.wire import UNREADABLE

PauseMode = Literal["keep", "wait", "abort"]
RUNNING, WAITING, KV_USAGE = "vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc"
PREFIX_QUERIES, PREFIX_HITS = "vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total"
PREEMPTIONS = "vllm:num_preemptions_total"
_SAMPLE: Final = re.compile(r"^([a-zA-Z_:][\w:]*)(?:\{[^}]*\})? (\S+)$", re.MULTILINE)
_HEADER_LIMIT: Final = 100 << 20
_HEAD: Final = re.compile(r"\b(?:lm_head|embed_out)\b")

T = TypeVar("T")


class EngineControlError(StageError):
    """The engine did not do what it was asked; `detail["status"]` is its HTTP code, 0 where it gave no answer."""


class WeightsError(StageError):
    """A directory holds no weights that an engine could take."""


class _Paused(msgspec.Struct):
    is_paused: bool


class _Version(msgspec.Struct):
    weight_version: str


class _Success(msgspec.Struct):
    success: bool


class _TextConfig(msgspec.Struct):
    tie_word_embeddings: bool | None = None


class _ModelConfig(msgspec.Struct):
    tie_word_embeddings: bool | None = None
    text_config: _TextConfig | None = None

    @property
    def ties(self) -> bool | None:
        """Whether it says that embeddings are tied; None where it says nothing."""
        inner = self.text_config.tie_word_embeddings if self.text_config is not None else None
        return self.tie_word_embeddings if inner is None else inner


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


class _Tensor(msgspec.Struct):
    data_offsets: tuple[int, int]


def check_weights(directory: Path, *, allow_tied: bool = True) -> None:
    """Look whether an engine could load this directory. Blocking; reads headers, not tensors.

    Args:
        directory: a Hugging Face directory of safetensors.
        allow_tied: whether tied embeddings will do: they do not for a reload of vLLM 0.32.

    Raises:
        WeightsError: names the file and what is wrong with it.
    """
    ties = _read_object(directory / "config.json", _ModelConfig).ties
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        names = set(_read_object(index, _Index).weight_map.values())
        for name in sorted(names):
            if "/" in name or "\0" in name or name in {"", ".", ".."}:
                raise WeightsError(f"{index}: {name!r} is no file name; every shard lies beside the index")
    else:
        names = {path.name for path in directory.glob("*.safetensors")}
    if not names:
        raise WeightsError(f"{directory}: no safetensors file there; save the checkpoint as safetensors")
    tensors: set[str] = set()
    for name in sorted(names):
        tensors |= _check_tensors(directory / name)
    if not allow_tied and (ties or (ties is None and not any(_HEAD.search(name) for name in tensors))):
        said = "says nothing of tie_word_embeddings and no lm_head is saved" if ties is None else "ties the embeddings"
        raise WeightsError(
            f"{directory}: config.json {said}, and a reload would corrupt tied weights without a word; "
            "save the model with tie_word_embeddings=false, or start new replicas"
        )


def _read_object(path: Path, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except OSError as error:
        raise WeightsError(f"{path}: cannot be read ({error.strerror}); give a Hugging Face directory") from error
    except msgspec.MsgspecError as error:
        raise WeightsError(f"{path}: is no JSON object of its kind ({error})") from error
    except (UnicodeDecodeError, RecursionError) as error:
        raise WeightsError(f"{path}: is no JSON ({type(error).__name__})") from error


def _check_tensors(path: Path) -> set[str]:
    """The header of a safetensors file: 8 bytes of length, JSON, and offsets that the file is long enough for."""
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if not 2 <= length <= _HEADER_LIMIT:
                raise WeightsError(f"{path}: is no safetensors file")
            header = msgspec.json.decode(file.read(length), type=dict[str, msgspec.Raw])
        header.pop("__metadata__", None)
        ends = [msgspec.json.decode(entry, type=_Tensor).data_offsets[1] for entry in header.values()]
        size = path.stat().st_size
    except OSError as error:
        raise WeightsError(f"{path}: cannot be read ({error.strerror})") from error
    except UNREADABLE as error:
        raise WeightsError(f"{path}: its header is none of safetensors; copy or save it again ({error})") from error
    if not ends or 8 + length + max(ends) != size:
        raise WeightsError(
            f"{path}: has {size} bytes, its header tells {8 + length + max(ends, default=0)}; copy again"
        )
    return set(header)


class EngineControl:
    """Calls to any engine of a fleet; use as an async context manager.

    Args:
        api_key: the run's engine token.
        timeout_s: seconds for one call; a pause in mode `wait` and a reload have their own.
    """

    def __init__(self, *, api_key: str | None = None, timeout_s: float = 10.0) -> None:
        self._client = Client(timeout_s=timeout_s)
        self._headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        self._timeout_s = timeout_s

    async def __aenter__(self) -> EngineControl:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.aclose()

    async def pause(self, url: str, mode: PauseMode = "keep", *, timeout_s: float = 600.0) -> None:
        """Draw nothing more until `resume`; returns when that is so.

        Args:
            url: the replica's base URL.
            mode: `keep` freezes what runs, `wait` lets it end, `abort` ends it with its partial tokens.
            timeout_s: how long running requests may take in mode `wait`.

        Raises:
            EngineControlError: it did not pause.
        """
        await self._post(url, f"/pause?mode={mode}", timeout_s=timeout_s)

    async def resume(self, url: str) -> None:
        """Go on after a pause; harmless without one."""
        await self._post(url, "/resume")

    async def is_paused(self, url: str) -> bool:
        """Whether it is paused: /health says nothing of it."""
        return (await self._get(url, "/is_paused", _Paused)).is_paused

    async def weight_version(self, url: str) -> str:
        """What answers say of tokens that are drawn now."""
        return (await self._get(url, "/weight_info", _Version)).weight_version

    async def stamp(self, url: str, version: int) -> None:
        """Name the loaded weights."""
        await self._post(url, "/update_weight_version", {"new_version": str(version)})

    async def reload(self, url: str, directory: Path, *, timeout_s: float = 600.0) -> None:
        """Load other weights of the same architecture. Check the directory first: vLLM does not survive a bad one."""
        body = {"method": "reload_weights", "kwargs": {"weights_path": str(directory)}}
        await self._post(url, "/collective_rpc", body, timeout_s=timeout_s)

    async def reset_prefix_cache(self, url: str) -> None:
        """Forget all keys and values; running requests are computed again before they go on.

        Raises:
            EngineControlError: it could not, also by its own word.
        """
        content = await self._post(url, "/reset_prefix_cache?reset_running_requests=true")
        if not self._decode(url, content, _Success).success:
            raise EngineControlError(f"replica {url}: the prefix cache was not reset", status=200)

    async def swap(
        self, url: str, version: int, directory: Path | None, mode: PauseMode = "keep", *, timeout_s: float = 600.0
    ) -> None:
        """Serve another policy version: pause, load, forget the cache, stamp, resume.

        The caller has checked the directory. It is resumed also where a step failed; what it serves then is unknown,
        so that the caller must not use it any more. Doing all of it once more is harmless.

        Args:
            url: the replica's base URL.
            version: the new version.
            directory: its weights; None where the trainer has loaded them itself.
            mode: what becomes of running requests, see `pause`.
            timeout_s: seconds for the pause and for the load.

        Raises:
            EngineControlError: a step failed; the message says which.
        """
        async with self._paused(url, mode, timeout_s):
            if directory is not None:
                await self.reload(url, directory, timeout_s=timeout_s)
            await self.reset_prefix_cache(url)
            await self.stamp(url, version)

    async def load_adapter(self, url: str, version: int, name: str, directory: Path, mode: PauseMode = "keep") -> None:
        """Serve another policy version as a LoRA adapter over the weights that are there, in place of one of its name.

        vLLM takes adapters where it was started with `--enable-lora` and VLLM_ALLOW_RUNTIME_LORA_UPDATING=1; the
        embedded engine has none.

        Raises:
            EngineControlError: a step failed; see `swap`.
        """
        body = {"lora_name": name, "lora_path": str(directory), "load_inplace": True}
        async with self._paused(url, mode, 600.0):
            await self._post(url, "/v1/load_lora_adapter", body, timeout_s=600.0)
            await self.reset_prefix_cache(url)
            await self.stamp(url, version)

    @contextlib.asynccontextmanager
    async def _paused(self, url: str, mode: PauseMode, timeout_s: float) -> AsyncIterator[None]:
        """Paused meanwhile, and resumed whatever happens, also while the caller is being cancelled."""
        try:
            await self.pause(url, mode, timeout_s=timeout_s)
            yield
        except BaseException as broken:  # also a cancelled caller leaves no engine standing still; raised again
            try:
                await asyncio.shield(asyncio.ensure_future(self.resume(url)))
            except EngineControlError as error:
                # Whoever overlooks that a route is missing must not overlook that the engine stands still.
                if isinstance(broken, EngineControlError) and error.detail.get("status") != broken.detail.get("status"):
                    raise error from broken
            raise
        await self.resume(url)

    async def abort(self, url: str, request_ids: list[str]) -> None:
        """End requests by their full ids (`generate-tokens-ID`, `cmpl-ID-0`): their clients get what was drawn."""
        await self._post(url, "/inference/v1/abort_requests", {"request_ids": request_ids})

    async def metrics(self, url: str) -> dict[str, float]:
        """Every sample of /metrics by its name; samples of one name (of several engines or labels) are added up."""
        text = (await self._request("GET", url, "/metrics", None, self._timeout_s)).decode(errors="replace")
        values: dict[str, float] = {}
        for name, value in _SAMPLE.findall(text):
            with contextlib.suppress(ValueError):
                values[name] = values.get(name, 0.0) + float(value)
        return values

    async def healthy(self, url: str) -> bool:
        """Whether /health says so."""
        try:
            await self._request("GET", url, "/health", None, self._timeout_s)
        except EngineControlError:
            return False
        return True

    async def _get(self, url: str, path: str, kind: type[T]) -> T:
        return self._decode(url, await self._request("GET", url, path, None, self._timeout_s), kind)

    async def _post(self, url: str, path: str, body: Any = None, *, timeout_s: float | None = None) -> bytes:
        return await self._request("POST", url, path, body, timeout_s or self._timeout_s)

    async def _request(self, method: str, url: str, path: str, body: Any, timeout_s: float) -> bytes:
        content = None if body is None else msgspec.json.encode(body)
        headers = {**self._headers, "Content-Type": "application/json"}
        began = time.monotonic()
        try:
            response = await self._client.request(
                method, f"{url}{path}", content=content, headers=headers, timeout=timeout_s
            )
        except (TransportError, InvalidURL) as error:
            spent_s = time.monotonic() - began
            message = f"replica {url}: {path} gave no answer in {spent_s:.1f} s: {type(error).__name__}: {error}"
            raise EngineControlError(message, status=0) from error
        if response.status_code >= 400:
            message = f"replica {url}: {path} answered {response.status_code}: {error_of(response)}"
            raise EngineControlError(message, status=response.status_code)
        return response.content

    @staticmethod
    def _decode(url: str, content: bytes, kind: type[T]) -> T:
        try:
            return msgspec.json.decode(content, type=kind)
        except UNREADABLE as error:
            raise EngineControlError(f"replica {url}: answer not understood: {error}", status=200) from error
