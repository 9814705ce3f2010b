"""The Arrow schema of a shard, version 1, and the conversion of rollouts to record batches.

One Arrow row a chain; a rollout without any chain still gives one, with empty lists. `?` of the contract is nullable,
all else is not, down to the items of lists (a rollout's sampling seed alone may be null inside its struct).
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import msgspec
import pyarrow as pa

from stages.errors import ShardError
from stages.shards.version import SCHEMA_VERSION, VERSION_KEY
from stages.trajectory import Chain, Row, Trajectory

_MICROSECONDS = 1_000_000
_NO_CHAIN = Chain.of(0, (), (), ())


def _field(name: str, kind: pa.DataType, nullable: bool = False) -> pa.Field:
    return pa.field(name, kind, nullable=nullable)


def _list(kind: pa.DataType) -> pa.DataType:
    return pa.list_(_field("item", kind))


def _struct(**kinds: pa.DataType) -> pa.DataType:
    return pa.struct([_field(name, kind) for name, kind in kinds.items()])


_TEXT, _I32, _I64, _F64 = pa.string(), pa.int32(), pa.int64(), pa.float64()
_TIME = pa.timestamp("us", tz="UTC")
_SPAN = _struct(version=_I64, start=_I32, end=_I32)
_TURN = _struct(start=_I32, end=_I32, finish_reason=_TEXT, replica=_TEXT, cached_tokens=_I32, llm_s=_F64, tool_s=_F64)
_SAMPLING = pa.struct(
    [_field("temperature", _F64), _field("top_p", _F64), _field("max_tokens", _I32), _field("seed", _I64, True)]
)
_STAGE_TIMES = (
    "queue_init_s",
    "init_s",
    "queue_run_s",
    "run_s",
    "llm_s",
    "tool_s",
    "queue_eval_s",
    "eval_s",
    "total_s",
)
_TIMING = _struct(**dict.fromkeys(_STAGE_TIMES, _F64))

SCHEMA = pa.schema(
    [
        *(_field(name, _TEXT) for name in ("run_id", "rollout_id", "group_id", "task_id", "tag")),
        _field("chain", _I32),
        _field("attempt", _I32),
        *(_field(name, _TEXT) for name in ("workflow", "task", "agent", "model")),
        *(_field(name, _TEXT) for name in ("model_digest", "tokenizer_digest", "template_digest")),
        _field("status", _TEXT),
        _field("failure_class", _TEXT, True),
        _field("mask_sample", pa.bool_()),
        _field("mask_reason", _TEXT, True),
        _field("reward", _F64, True),
        _field("reward_parts", pa.map_(_TEXT, _field("value", _F64))),
        _field("grading", _TEXT),
        _field("prompt_length", _I32),
        _field("token_ids", _list(_I32)),
        _field("loss_mask", _list(pa.uint8())),
        _field("logprobs", _list(pa.float32())),
        _field("logprobs_mode", _TEXT),
        _field("policy_versions", _list(_SPAN)),
        _field("min_policy_version", _I64, True),
        _field("routed_experts", pa.binary(), True),
        _field("turns", _list(_TURN)),
        _field("sampling", _SAMPLING),
        _field("messages", _TEXT, True),
        _field("timing", _TIMING),
        _field("nodes", _list(_TEXT)),
        _field("slurm_job_id", _TEXT, True),
        _field("layer_digests", _list(_TEXT)),
        _field("infrastructure_attempts", _I32),
        _field("created_at", _TIME),
        _field("finished_at", _TIME),
        _field("artifacts", _TEXT, True),
    ],
    metadata={VERSION_KEY: str(SCHEMA_VERSION)},
)


def schema_message() -> bytes:
    """The schema as one encapsulated IPC message: what every shard file begins with."""
    return bytes(SCHEMA.serialize())


def min_policy_version(trajectory: Trajectory) -> int | None:
    """The oldest policy version that sampled any token of any chain; None when none was sampled."""
    return min((span.version for chain in trajectory.chains for span in chain.policy_versions), default=None)


def _listed(lengths: Sequence[float]) -> str:
    return f"({', '.join(f'{length:g}' for length in lengths)})"


def check_row(row: Row) -> None:
    """Raise ShardError unless the per-token arrays of each chain have one length and its offsets lie inside it."""
    for number, chain in enumerate(row.trajectory.chains):
        lengths = [len(packed(chain)) / size for size, packed in _TOKEN_COLUMNS.values()]
        where = f"rollout {row.rollout_id}, chain {number}"
        if len(set(lengths)) != 1:
            raise ShardError(
                f"{where}: token_ids, loss_mask and logprobs have lengths {_listed(lengths)}, not one length"
            )
        size = chain.length
        if not 0 <= chain.prompt_length <= size:
            raise ShardError(f"{where}: prompt_length {chain.prompt_length} is outside 0..{size}")
        spans = [(part.start, part.end) for part in chain.turns] + [(v.start, v.end) for v in chain.policy_versions]
        for start, end in spans:
            if not 0 <= start <= end <= size:
                raise ShardError(f"{where}: a turn or version span [{start}, {end}) is outside 0..{size}")


_Entry = tuple[Row, int, Chain]
"""A rollout, the number of one of its chains, and that chain."""


def _micros(seconds: float) -> int:
    return round(seconds * _MICROSECONDS)


def _chain_version(chain: Chain) -> int | None:
    return min((span.version for span in chain.policy_versions), default=None)


def _dicts(structs: Sequence[msgspec.Struct]) -> list[dict[str, Any]]:
    return [msgspec.structs.asdict(struct) for struct in structs]


_COLUMNS: dict[str, Callable[[Row, int, Chain], Any]] = {
    "chain": lambda row, number, chain: number,
    "model": lambda row, number, chain: row.model.model,
    "model_digest": lambda row, number, chain: row.model.model_digest,
    "tokenizer_digest": lambda row, number, chain: row.model.tokenizer_digest,
    "template_digest": lambda row, number, chain: row.model.template_digest,
    "reward_parts": lambda row, number, chain: list(row.reward_parts.items()),
    "prompt_length": lambda row, number, chain: chain.prompt_length,
    "logprobs_mode": lambda row, number, chain: row.trajectory.logprobs_mode,
    "policy_versions": lambda row, number, chain: _dicts(chain.policy_versions),
    "min_policy_version": lambda row, number, chain: _chain_version(chain),
    "routed_experts": lambda row, number, chain: None,
    "turns": lambda row, number, chain: _dicts(chain.turns),
    "sampling": lambda row, number, chain: msgspec.structs.asdict(row.sampling),
    "timing": lambda row, number, chain: msgspec.structs.asdict(row.timing),
    "created_at": lambda row, number, chain: _micros(row.created_at),
    "finished_at": lambda row, number, chain: _micros(row.finished_at),
}
"""Columns whose value is not the row's attribute of the same name; the per-token lists and messages are apart."""

_TOKEN_COLUMNS: dict[str, tuple[int, Callable[[Chain], bytes]]] = {
    "token_ids": (4, lambda chain: chain.packed_ids),
    "loss_mask": (1, lambda chain: chain.packed_mask),
    "logprobs": (4, lambda chain: chain.packed_logprobs),
}
"""Column to the bytes of one value and its packed values, which are the column's own layout: they are only joined."""


def _token_lists(name: str, entries: Sequence[_Entry]) -> pa.Array:
    size, packed = _TOKEN_COLUMNS[name]
    parts = [packed(chain) for _, _, chain in entries]
    offsets = array("i", accumulate((len(part) // size for part in parts), initial=0))
    kind = SCHEMA.field(name).type
    values = pa.py_buffer(b"".join(parts))
    items = pa.Array.from_buffers(kind.value_type, offsets[-1], [None, values])
    return pa.Array.from_buffers(kind, len(entries), [None, pa.py_buffer(offsets)], children=[items])


def _column(name: str, entries: Sequence[_Entry], messages: bool) -> pa.Array:
    kind = SCHEMA.field(name).type
    if name in _TOKEN_COLUMNS:
        return _token_lists(name, entries)
    if name == "messages":
        # Once a rollout, on its first chain: they are for people, and the same for all its chains.
        texts = [
            msgspec.json.encode(row.trajectory.messages).decode() if messages and number == 0 else None
            for row, number, _ in entries
        ]
        return pa.array(texts, kind)
    value_of = _COLUMNS.get(name)
    if value_of is None:
        return pa.array([getattr(row, name) for row, _, _ in entries], kind)
    return pa.array([value_of(*entry) for entry in entries], kind)


def rows_to_batch(rows: Sequence[Row], *, messages: bool = True) -> pa.RecordBatch:
    """One record batch of SCHEMA with the chains of all rollouts, in order.

    Raises:
        ShardError: a row is inconsistent in itself or a value does not fit its column.
    """
    for row in rows:
        check_row(row)
    entries = [
        (row, number, chain) for row in rows for number, chain in enumerate(row.trajectory.chains or (_NO_CHAIN,))
    ]
    names = [row.rollout_id for row in rows]
    try:
        columns = [_column(name, entries, messages) for name in SCHEMA.names]
        return pa.RecordBatch.from_arrays(columns, schema=SCHEMA)
    except (pa.ArrowException, OverflowError, TypeError) as error:
        raise ShardError(f"rollouts {names}: a value does not fit its shard column: {error}") from error
