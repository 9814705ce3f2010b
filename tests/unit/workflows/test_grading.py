"""The parts of trusted grading: reports that carry a key, values that are plain, rows out of files."""

from __future__ import annotations

import ast
import asyncio
import itertools
import json
import math
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandbox.fake import FakeBackend
from sandbox.protocols import Execution, SandboxSpec
from stages.errors import VerifierError
from tests.support.waiting import poll
from workflows.errors import TaskDataError
from workflows.grading import bounds, values
from workflows.grading.bootstrap import reporter
from workflows.grading.trusted import believed, run_trusted, source
from workflows.tasks.rows import BROKEN, read_rows

KEY = b"k" * 32


def told(key: bytes, records: list[Any]) -> bytes:
    take, give = os.pipe()
    tell = reporter(key, give)
    for record in records:
        tell(record)
    os.close(give)
    with os.fdopen(take, "rb") as pipe:
        return pipe.read()


def test_only_what_carries_the_key_is_believed() -> None:
    report = told(KEY, [{"hello": 1}, {"verdict": True}])
    assert believed(KEY, report) == [{"hello": 1}, {"verdict": True}]
    assert believed(b"x" * 32, report) == []
    assert believed(KEY, told(b"y" * 32, [{"verdict": False}]) + report) == [{"hello": 1}, {"verdict": True}]
    first, second = (line + b"\n" for line in report.split(b"\n") if line)
    assert believed(KEY, second) == [], "a record is good at its place alone"
    assert believed(KEY, first + first + first) == [{"hello": 1}]
    assert believed(KEY, first + second.replace(b"true", b"null")) == [{"hello": 1}]
    assert believed(KEY, first + b"garbage without an end" + b"\n" + second) == [{"hello": 1}, {"verdict": True}]


def test_a_pipe_full_of_lines_is_read_in_good_time() -> None:
    first, second = (line + b"\n" for line in told(KEY, [{"hello": 1}, {"verdict": True}]).split(b"\n") if line)
    for junk in (b"\n" * (7 << 20), (b"0" * 64 + b" \n") * 110_000, b"0" * (7 << 20)):
        began = time.process_time()
        assert believed(KEY, first + junk + b"\n" + second) == [{"hello": 1}, {"verdict": True}]
        assert time.process_time() - began < 5


def test_the_event_loop_does_not_wait_for_a_report_to_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    readers: list[threading.Thread] = []

    def reading(key: bytes, report: bytes) -> list[Any]:
        readers.append(threading.current_thread())
        return [{"hello": []}]

    async def run() -> None:
        fake = FakeBackend(tmp_path, programs=lambda argv, given: Execution(0, b"", b"", 0.1))
        async with fake as backend, backend.create(SandboxSpec()) as sandbox:
            await run_trusted(sandbox, ["workflows.grading.values"], {}, timeout_s=3)

    monkeypatch.setattr("workflows.grading.trusted.believed", reading)
    asyncio.run(run())
    assert len(readers) == 1 and readers[0] is not threading.main_thread()


@given(st.binary(max_size=300), st.integers(0, 10**6))
def test_bytes_of_others_add_no_record(junk: bytes, seed: int) -> None:
    records: list[Any] = [{"n": number} for number in range(5)]
    lines = told(KEY, records).split(b"\n")
    random.Random(seed).shuffle(lines)
    got = believed(KEY, junk + b"\n".join(lines) + junk)
    assert got == records[: len(got)]


def test_a_grader_that_does_not_begin_is_no_reward(tmp_path: Path) -> None:
    async def run(execution: Execution) -> None:
        fake = FakeBackend(tmp_path, programs=lambda argv, given: execution)
        async with fake as backend, backend.create(SandboxSpec()) as sandbox:
            await run_trusted(sandbox, ["workflows.grading.values"], {}, timeout_s=3)

    with pytest.raises(VerifierError, match=r"ended with 127 .* said: no python"):
        asyncio.run(run(Execution(127, b"", b"no python", 0.1)))
    with pytest.raises(VerifierError, match=r"did not begin within 3 s .* said: \(nothing\)"):
        asyncio.run(run(Execution(124, b"forged\n", b"", 3.0, timed_out=True)))


def test_what_the_grader_is_given_is_on_its_input_alone(tmp_path: Path) -> None:
    seen: list[tuple[Any, bytes]] = []

    def program(argv: Any, given: bytes) -> Execution:
        seen.append((argv, given))
        return Execution(0, told(bytes.fromhex(json.loads(given)["key"]), [{"hello": []}, "done"]), b"", 0.1)

    async def run() -> Any:
        async with FakeBackend(tmp_path, programs=program) as backend, backend.create(SandboxSpec()) as sandbox:
            both = [
                await run_trusted(sandbox, ["workflows.grading.values"], {"secret": "heron"}, timeout_s=3) for _ in "ab"
            ]
            return [one.records for one in both]

    assert asyncio.run(run()) == [("done",), ("done",)]
    keys = {json.loads(given)["key"] for _, given in seen}
    assert len(keys) == 2, "a key is used once"
    assert all("heron" not in repr(argv) and keys.isdisjoint(argv) and b"heron" in given for argv, given in seen)


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary() | st.complex_numbers(),
    lambda inner: st.lists(inner, max_size=4) | st.lists(inner, max_size=4).map(tuple)
    | st.dictionaries(st.text() | st.integers() | st.tuples(st.integers(), st.text()), inner, max_size=4)
    | st.sets(st.integers() | st.text(), max_size=4) | st.frozensets(st.integers(), max_size=4),
    max_leaves=20,
)  # fmt: skip


@given(plain)
def test_plain_values_arrive_as_they_were(value: Any) -> None:
    back = values.decode(json.loads(json.dumps(values.encode(value))))
    assert same(back, value)


def same(one: Any, other: Any) -> bool:
    """Of one type at every depth, and equal; a nan is a nan, and -0.0 is not 0.0."""
    if type(one) is not type(other):
        return False
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict):
        return same(list(one.items()), list(other.items()))
    return one == other if isinstance(one, (set, frozenset)) else repr(one) == repr(other)


class Liar(int):
    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = int.__hash__


class Rebel(list):
    def __eq__(self, other: object) -> bool:
        return True

    def __iter__(self):  # type: ignore[no-untyped-def]
        return iter(["lies"])


def test_subclasses_arrive_as_their_base_and_anything_else_as_nothing() -> None:
    liar, rebel, other = values.decode(values.encode([Liar(3), Rebel([1]), object()]))
    assert (type(liar), liar, type(rebel), rebel) == (int, 3, list, [1])
    assert other != other and not other == 1  # noqa: SIM201 - it is equal to nothing
    with pytest.raises(TypeError):
        bool(other)
    assert math.copysign(1, values.decode(values.encode(-0.0))) == -1
    nested: list[Any] = []
    nested.append(nested)
    with pytest.raises(values.NotPlainError):
        values.encode(nested)


def test_ranges_and_iterators_arrive_as_such_up_to_a_bound() -> None:
    def there(value: Any) -> Any:
        return values.decode(values.carried(values.encode(value)))

    assert there([range(3), range(5, 0, -2)]) == [range(3), range(5, 0, -2)] and there(range(3)) != [0, 1, 2]
    for made in (iter([1, (2,)]), (one for one in (1, (2,))), reversed([(2,), 1])):
        arrived = there(made)
        assert arrived != [1, (2,)] and next(arrived) == 1 and list(arrived) == [(2,)]
    assert [type(there(one)) for one in (range(10**18), itertools.count())] == [values.Opaque] * 2
    million = list(range(10**6))
    assert there(million) == million
    with pytest.raises(values.NotPlainError, match="the most is"):
        values.carried("x" * values.LARGEST_BYTES)


@pytest.mark.parametrize(
    "data",
    [
        1.5, [], {}, {"i": 5}, {"i": "zz"}, {"i": "0x1", "f": "0x1"}, {"d": [[1]]}, {"d": [[{"l": []}, None]]},
        {"s": [{"l": []}]}, {"q": 1}, {"c": ["0x1p0"]}, {"b": "x"}, {"l": 3}, {"f": "zz"}, {"i": {}},
        {"r": [0, 10**9, 1]}, {"r": [0, 1, 0]}, {"r": ["a"]}, {"r": 5}, {"n": 3},
    ],
)  # fmt: skip
def test_what_is_no_value_is_refused(data: Any) -> None:
    with pytest.raises(values.NotPlainError):
        values.decode(data)


def within(seconds: float) -> Callable[[], float]:
    end = time.monotonic() + seconds
    return lambda: max(0.0, end - time.monotonic())


def test_a_pipe_takes_whole_messages_of_a_bounded_size_in_time() -> None:
    take, give = os.pipe()
    pipe = values.Pipe(take, give)
    large = {"x": "y" * 1_000_000}
    sending = threading.Thread(target=pipe.send, args=(large,))
    sending.start()
    assert pipe.receive(within(20)) == large
    sending.join()
    with pytest.raises(EOFError, match="in time"):
        pipe.receive(within(0.01))
    os.write(give, b"\xff\xff\xff\xff")
    with pytest.raises(values.NotPlainError, match="a message of"):
        pipe.receive(within(5))
    os.write(give, b"\0\0\0\2{]")
    with pytest.raises(values.NotPlainError):
        pipe.receive(within(5))
    os.write(give, b"\0\0\0\2{")
    os.close(give)
    with pytest.raises(EOFError, match="in the middle"):
        pipe.receive(within(5))
    assert pipe.receive(within(5)) is None
    os.close(take)


@pytest.mark.parametrize("module", ["bootstrap", "bounds", "candidate", "functions", "programs", "values"])
def test_what_is_sent_into_sandboxes_imports_the_standard_library_alone(module: str) -> None:
    nodes = list(ast.walk(ast.parse(source(f"workflows.grading.{module}"), feature_version=(3, 8))))
    imported = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    imported |= {str(node.module) for node in nodes if isinstance(node, ast.ImportFrom)}
    assert {name.partition(".")[0] for name in imported} <= {*sys.stdlib_module_names, "workflows"}
    assert {name for name in imported if name.startswith("workflows")} <= {"workflows.grading"}


def test_rows_are_read_line_by_line(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(
        b'{"task_id": "a"}\r\n\n[1]\n{"task_id": "a"}\n{"task_id": "line-3"}\n' + b"[" * 100_000 + b"\n\xff"
    )

    def check(row: dict[str, Any], number: int) -> dict[str, Any] | str:
        return {**row, "line": number}

    rows = list(read_rows(path, check))
    assert [row["task_id"] for row in rows] == ["a", "line-3", "line-4", "line-5", "line-6", "line-7"]
    assert [row.get("line") for row in rows] == [1, None, None, None, None, None]
    assert [BROKEN in row for row in rows] == [False, True, True, True, True, True]
    for row, said in zip(
        rows[1:], ("expected an object", "on line 1", "on line 3", "not JSON", "not UTF-8"), strict=True
    ):
        assert row[BROKEN].startswith(f"{path}:") and said in row[BROKEN]
    with pytest.raises(TaskDataError, match="cannot be read"):
        list(read_rows(tmp_path, check))


@pytest.fixture
def spinner() -> Iterator[int]:
    """The id of a process that does nothing but use CPU."""
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as process:
        yield process.pid
        process.kill()


def test_a_budget_is_used_up_by_the_process(spinner: int) -> None:
    mine, generous = bounds.Budget(os.getpid(), 1000.0), bounds.Budget(spinner, 1000.0)
    poll(lambda: generous.left() < 999.8, "it has used 0.2 s", 60, 0.01)
    assert generous.left() < mine.left(), "this process has waited"
    budget = bounds.Budget(spinner, 0.05)
    poll(lambda: budget.left() == 0, "it has used all that it may", 60, 0.01)


def test_a_budget_is_used_up_by_the_wall_where_the_process_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounds, "SLACK", 0.0)
    assert bounds.Budget(os.getpid(), 1000.0).left() == 0
