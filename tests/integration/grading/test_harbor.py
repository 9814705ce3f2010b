"""task=harbor in real sandboxes: five tasks from both sides, cheats, and rewards as the tests may write them."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from sandbox.bubblewrap import BubblewrapBackend
from sandbox.none import NoneBackend
from sandbox.protocols import Sandbox, SandboxSpec
from stages.errors import RolloutError, VerifierError
from stages.protocols import Reward, Row
from stages.trajectory import Trajectory
from tests.support import harbor_tasks, three_stages
from tests.support.cheats import harbor as cheats
from workflows.tasks.harbor import HarborTask


def opened(root: Path, *names: str) -> tuple[HarborTask, dict[str, Row]]:
    task = HarborTask(str(harbor_tasks.write(root / "tasks", names or tuple(harbor_tasks.TASKS))), image="host")
    return task, {row["task_id"]: row for row in task.rows()}


async def nothing(sandbox: Sandbox) -> None:
    await sandbox.start()


@pytest.mark.parametrize("name", harbor_tasks.TASKS)
def test_the_oracle_is_paid_and_nobody_else_and_a_solution_that_cheats_is_not(tmp_path: Path, name: str) -> None:
    async def scenario() -> list[Reward]:
        task, rows = opened(tmp_path, name)
        async with BubblewrapBackend(tmp_path) as backend:
            spec = await three_stages.prepared(backend, tmp_path, task, rows[name])
            return [
                await three_stages.graded(backend, tmp_path, task, rows[name], act, spec)
                for act in (lambda sandbox: task.solve(sandbox, rows[name]), nothing)
            ]

    solved, idle = asyncio.run(scenario())
    assert (solved.value, idle.value) == (float(name != "cheated"), 0.0)
    assert solved.grading == ("trusted" if name == "artifact" else "untrusted")
    assert idle.parts["format"] == 1.0


@pytest.mark.parametrize(("name", "scripts"), [("hello", cheats.HELLO), ("tool", {**cheats.TOOL, **cheats.KNOWN})])
def test_cheats_are_paid_by_a_grader_that_believes_what_it_sees_and_not_by_ours(
    tmp_path: Path, name: str, scripts: dict[str, str]
) -> None:
    async def scenario() -> tuple[dict[str, str], dict[str, Reward]]:
        task, rows = opened(tmp_path, name)
        naive, ours = {}, {}
        async with BubblewrapBackend(tmp_path) as backend:
            spec = await three_stages.prepared(backend, tmp_path, task, rows[name])
            for cheat, script in scripts.items():
                async with backend.create(spec) as sandbox:
                    naive[cheat] = await believing(sandbox, task, name, script)
                ours[cheat] = await three_stages.graded(
                    backend, tmp_path, task, rows[name], lambda sandbox, it=script: run(sandbox, it), spec
                )
        return naive, ours

    naive, ours = asyncio.run(scenario())
    paid = [cheat for cheat, said in naive.items() if said == "1"]
    assert paid == [cheat for cheat in scripts if cheat not in cheats.VANDALS]
    assert {cheat: reward.value for cheat, reward in ours.items()} == {
        cheat: float(cheat in cheats.KNOWN) for cheat in scripts
    }
    assert {reward.grading for reward in ours.values()} == {"untrusted"}


async def run(sandbox: Sandbox, script: str) -> None:
    await sandbox.shell.run("mkdir -p /logs/verifier /tests", timeout_s=20.0)
    await sandbox.shell.run(script, timeout_s=20.0)


async def believing(sandbox: Sandbox, task: HarborTask, name: str, script: str) -> str:
    """Tests in the agent's own sandbox, by its own shell; what stands in the file counts."""
    await sandbox.shell.run("mkdir -p /logs/verifier /tests", timeout_s=20.0)
    for path, text in harbor_tasks.TASKS[name].items():
        if path.startswith("tests/"):
            await sandbox.files.write(f"/{path}", harbor_tasks.plain(text))
    await sandbox.shell.run(script, timeout_s=20.0)
    await sandbox.shell.run("cd /app; bash /tests/test.sh", timeout_s=20.0)
    # What was left in the background needs its turn on a CPU, and may still print.
    look = 'read -r said < /logs/verifier/reward.txt; [ "$said" = 1 ] && break; sleep 0.05'
    read = await sandbox.shell.run(f'for i in {{1..40}}; do {look}; done; echo "<$said>"', timeout_s=5.0)
    return "1" if "<1>" in read.output else read.output


@pytest.mark.parametrize(
    ("test", "value", "form"),
    [
        ("echo 0.25 > /logs/verifier/reward.txt", 0.25, 1.0),
        ('echo \'{"reward": 0.5, "speed": 3}\' > /logs/verifier/reward.json', 0.5, 1.0),
        ("echo '{\"accuracy\": 0.75}' > /logs/verifier/reward.json", 0.75, 1.0),
        ("echo 1 > /logs/verifier/reward.txt; echo 0.5 > /logs/verifier/reward.json", 0.5, 1.0),
        ("echo 1 > /logs/verifier/reward.txt; exit 3", 1.0, 1.0),
        ("echo yes > /logs/verifier/reward.txt", 0.0, 0.0),
        ("echo 1e308 > /logs/verifier/reward.txt", 1.0, 1.0),
        ('echo \'{"a": 1, "b": 1}\' > /logs/verifier/reward.json', 0.0, 0.0),
        ("printf '{\"reward\": 1%0400d}' 0 > /logs/verifier/reward.json", 0.0, 0.0),
        ("echo nan > /logs/verifier/reward.txt", 0.0, 0.0),
        ("true", 0.0, 0.0),
        ("echo 1 > /logs/verifier/reward.txt; sleep 30", 0.0, 0.0),
    ],
)
def test_what_the_tests_write_is_the_reward(tmp_path: Path, test: str, value: float, form: float) -> None:
    reward = asyncio.run(with_test(tmp_path, test))
    assert (reward.value, reward.parts["format"]) == (value, form)


async def with_test(tmp_path: Path, test: str) -> Reward:
    harbor_tasks.write(tmp_path / "tasks", ["hello"])
    (tmp_path / "tasks/hello/tests/test.sh").write_text(test + "\n")
    task = HarborTask(str(tmp_path / "tasks"), image="host", verify_s=2.0)
    (row,) = task.rows()
    async with BubblewrapBackend(tmp_path) as backend:
        return await three_stages.graded(backend, tmp_path, task, row, nothing)


def test_a_part_of_the_reward_that_is_forged_is_not_paid_either(tmp_path: Path) -> None:
    folder = harbor_tasks.write(tmp_path / "tasks", ["hello"]) / "hello"
    (folder / "tests/test.sh").write_text("python3 /tests/test_share.py\n")
    (folder / "tests/test_share.py").write_text(
        "import sys\nsys.path.insert(0, '/app')\ndef test_share():\n    import tool\n    assert tool.x\ntest_share()\n"
        "open('/logs/verifier/reward.txt', 'w').write('0.5')\n"
    )
    forged = "import os\nopen('/logs/verifier/reward.txt', 'w').write('0.99')\nos._exit(0)\n"

    async def scenario() -> list[Reward]:
        task = HarborTask(str(tmp_path / "tasks"), image="host")
        (row,) = task.rows()
        async with BubblewrapBackend(tmp_path) as backend:
            return [
                await three_stages.graded(
                    backend, tmp_path, task, row, lambda sandbox, it=text: sandbox.files.write("/app/tool.py", it)
                )
                for text in ("x = 1\n", forged)
            ]

    honest, cheat = asyncio.run(scenario())
    assert (honest.value, honest.parts["canary"], cheat.value, cheat.parts["canary"]) == (0.5, 1.0, 0.0, 0.0)


def test_a_directory_that_changed_is_no_reward_at_all(tmp_path: Path) -> None:
    async def changed() -> None:
        task, rows = opened(tmp_path / "other", "hello")
        (tmp_path / "other/tasks/hello/tests/test.sh").write_text("true\n")
        with pytest.raises(VerifierError, match="has changed since the run began"):
            await task.verify(None, rows["hello"], None)  # type: ignore[arg-type]

    asyncio.run(changed())


def test_a_sandbox_with_this_machines_root_is_refused_before_anything_is_touched(tmp_path: Path) -> None:
    async def scenario() -> None:
        task, rows = opened(tmp_path, "hello")
        async with NoneBackend(tmp_path) as backend, backend.create(SandboxSpec(workspace=("/app",))) as sandbox:
            for step in (
                task.prepare(sandbox, rows["hello"]), task.solve(sandbox, rows["hello"]),
                task.verify(sandbox, rows["hello"], Trajectory([], [])),
            ):  # fmt: skip
                with pytest.raises(RolloutError, match="take a sandbox with a root of its own") as caught:
                    await step
                assert caught.value.detail["final"]

    asyncio.run(scenario())
    assert not Path("/solution/solve.sh").exists() and not Path("/tests/test.sh").exists()


def test_a_command_that_fails_in_init_says_which_and_what_to_do(tmp_path: Path) -> None:
    task, _ = opened(tmp_path, "hello")
    file = tmp_path / "tasks/hello/environment/Dockerfile"
    file.write_text(file.read_text() + "RUN echo no network here && false\n")
    (row,) = task.rows()

    async def scenario() -> None:
        async with BubblewrapBackend(tmp_path) as backend:
            await three_stages.prepared(backend, tmp_path, task, row)

    with pytest.raises(
        RolloutError, match=r"Dockerfile:3: RUN gave exit code 1: no network here .*docker_image"
    ) as caught:
        asyncio.run(scenario())
    assert caught.value.detail["final"]


def test_the_whole_machine_may_be_graded_and_is_not_trusted(tmp_path: Path) -> None:
    folder = harbor_tasks.write(tmp_path / "tasks", ["hello"]) / "hello"
    (folder / "task.toml").write_text('artifacts = ["/"]\n' + (folder / "task.toml").read_text())
    (folder / "tests/test.sh").write_text('[ "$(mill-tool)" = ground ] && echo 1 > /logs/verifier/reward.txt\n')

    async def scenario() -> Reward:
        task = HarborTask(str(tmp_path / "tasks"), image="host")
        (row,) = task.rows()
        assert task.environment(row).workspace == ("/",)
        script = "printf '#!/bin/sh\\necho ground\\n' > /usr/local/bin/mill-tool; chmod +x /usr/local/bin/mill-tool"
        async with BubblewrapBackend(tmp_path) as backend:
            return await three_stages.graded(backend, tmp_path, task, row, lambda sandbox: run(sandbox, script))

    assert asyncio.run(scenario()) == Reward(1.0, {"canary": 1.0, "format": 1.0}, "untrusted")
