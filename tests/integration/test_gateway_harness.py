"""agent=harness in real sandboxes: a foreign client reaches the gateway alone; its end is judged for what it was."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from conf.errors import ConfigError
from conf.load import parse_config
from launch.wiring import build_agent
from sandbox.bubblewrap import BubblewrapBackend
from sandbox.layers import unpack
from sandbox.none import NoneBackend
from sandbox.protocols import Sandbox, SandboxBackend, SandboxSpec
from sandbox.spawner import children_of
from stages.chat import ChatTokenizer
from stages.errors import AgentError, ContextLengthError, LLMError, PolicyTimeoutError, RolloutError
from stages.layout import StoreLayout
from stages.model import StreamModel
from stages.pools.equipment import Equipment
from stages.protocols import Limits, Row
from stages.store import LayerStore
from stages.trajectory import Trajectory
from tests.support import swe_instance
from tests.support.gateways import POLICY, SayingEngine, Says, call, model_over
from workflows.agents import harness_install
from workflows.agents.harness import HarnessAgent
from workflows.errors import HarnessError
from workflows.tasks.arith import ArithTask
from workflows.tasks.swe.task import SweTask
from workflows.wheels.cache import WheelCache

CLIENT = """
import http.client, json, os, subprocess, urllib.parse
url = urllib.parse.urlparse(os.environ["OPENAI_BASE_URL"])
task = json.load(open(os.environ["ROLLMILL_TASK"]))
messages, calls = task["messages"], True
while calls:
    connection = http.client.HTTPConnection(url.hostname, url.port)
    body = json.dumps({"model": "policy", "messages": messages, "tools": task["tools"]})
    key = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
    connection.request("POST", url.path + "/chat/completions", body, key)
    answer = connection.getresponse()
    said = json.loads(answer.read())
    assert answer.status == 200, said["error"]["message"]
    messages.append(said["choices"][0]["message"])
    calls = messages[-1].get("tool_calls")
    for one in calls or []:
        command = ["bash", "-c", json.loads(one["function"]["arguments"])["command"]]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        messages.append({"role": "tool", "tool_call_id": one["id"], "content": done.stdout})
"""
COMMAND = f"python3 -c {shlex.quote(CLIENT)}"
LIMITS = Limits(max_turns=6, turn_timeout_s=20, run_s=60)


def bash(command: str) -> str:
    return call("bash", json.dumps({"command": command}))


@contextlib.asynccontextmanager
async def sandbox_of(backend: SandboxBackend, **spec: Any) -> AsyncIterator[Sandbox]:
    async with backend, backend.create(SandboxSpec(**spec)) as sandbox:
        yield sandbox


async def attempt(
    sandbox: Sandbox, says: list[Says], command: str = COMMAND, *, limits: Limits = LIMITS, context: int = 8192
) -> tuple[StreamModel, RolloutError | None]:
    """One rollout of the first sum; the model, and what it ended with."""
    task = ArithTask(limit=1, file_fraction=0.0)
    chat = ChatTokenizer.load(POLICY)
    model = model_over(SayingEngine(chat, says, context), chat)
    (row,) = task.rows()
    try:
        await HarnessAgent(task, "command", command).run(row, model, sandbox, limits)
    except RolloutError as error:
        return model, error
    return model, None


@pytest.mark.parametrize("backend", [BubblewrapBackend, NoneBackend])
async def test_a_client_in_the_sandbox_reaches_the_policy_and_nothing_else(
    tmp_path: Path, backend: type[BubblewrapBackend] | type[NoneBackend]
) -> None:
    async with sandbox_of(backend(tmp_path)) as sandbox:
        says: list[Says] = [bash("ls /sys/class/net; echo $((12 + 7)) > n; cat n"), "The answer is 19."]
        model, error = await attempt(sandbox, says)
        assert error is None
        (chain,) = model.trajectory().chains
        assert len(chain.turns) == 2 and chain.sampled_tokens == sum(chain.loss_mask) > 10
        assert [span.version for span in chain.policy_versions] == [3, 3]
        assert model.trajectory().messages[-1].content == "The answer is 19."
        assert "19" in next(m for m in model.trajectory().messages if m.role == "tool").content
        if backend is BubblewrapBackend:
            dead = await sandbox.shell.run("exec 3<>/dev/tcp/1.1.1.1/53", timeout_s=10)
            assert "unreachable" in dead.output


async def test_an_end_is_judged_for_what_it_was(tmp_path: Path) -> None:
    async with sandbox_of(NoneBackend(tmp_path)) as sandbox:
        turns: list[Says] = [bash(f"echo {n}") for n in range(9)]
        model, error = await attempt(sandbox, turns, limits=Limits(max_turns=3, run_s=60))
        assert isinstance(error, PolicyTimeoutError) and "more than 3 turns" in str(error) and model.turns == 3
        _, error = await attempt(sandbox, [LLMError("gone")])
        assert isinstance(error, LLMError) and "gone" in str(error)
        model, error = await attempt(sandbox, ["x"], context=16)
        assert isinstance(error, ContextLengthError) and model.turns == 0
        _, error = await attempt(sandbox, ["x"], f"{COMMAND}; echo broken; exit 3")
        assert isinstance(error, AgentError) and "exit code 3: broken" in str(error)
        model, error = await attempt(sandbox, [], "true")
        assert isinstance(error, AgentError) and "without asking" in str(error)
        assert len(model.trajectory().chains) == 1  # its prompt: a row has at least one chain
        _, error = await attempt(sandbox, ["x"], "sleep 600", limits=Limits(max_turns=3, run_s=0.5))
        assert isinstance(error, PolicyTimeoutError) and "not done within 0.5 s" in str(error)


async def test_the_key_dies_with_the_attempt(tmp_path: Path) -> None:
    async with sandbox_of(NoneBackend(tmp_path)) as sandbox:
        keep = "export -p > kept"
        _, error = await attempt(sandbox, ["ok"], f"{keep}; {COMMAND}")
        assert error is None

        again = f"( . ./kept; {COMMAND} )"
        result = await sandbox.shell.run(again, timeout_s=20)
        assert result.exit_code != 0 and "refused" in result.output


async def test_a_gold_session_of_a_foreign_client_resolves_an_instance(tmp_path: Path) -> None:
    task = SweTask(str(swe_instance.write(tmp_path, [swe_instance.row()])), wheels=str(tmp_path / "wheels"))
    (row,) = task.rows()
    environment = task.environment(row)
    patch = f"git apply - <<'EOF'\n{row['patch']}\nEOF\n"
    says: list[Says] = ["I mend it.\n" + bash(patch), bash("git diff --stat"), "It is done."]
    chat = ChatTokenizer.load(POLICY)
    model = model_over(SayingEngine(chat, says), chat)
    async with sandbox_of(BubblewrapBackend(tmp_path / "init"), workspace=environment.workspace) as sandbox:
        await task.prepare(sandbox, row)
        prepared = await layer_of(sandbox, tmp_path / "prepared")
    run = {"workspace": environment.workspace, "layers": (prepared,)}
    async with sandbox_of(BubblewrapBackend(tmp_path / "run"), **run) as sandbox:
        await HarnessAgent(task, "command", COMMAND).run(row, model, sandbox, LIMITS)
        left = await layer_of(sandbox, tmp_path / "left", environment.workspace, environment.protected)
    trajectory: Trajectory = model.trajectory()
    assert "1 file changed" in trajectory.messages[-2].content
    assert [len(chain.turns) for chain in trajectory.chains] == [3]
    graded = {**run, "layers": (prepared, left)}
    async with sandbox_of(BubblewrapBackend(tmp_path / "eval"), **graded) as sandbox:
        reward = await task.verify(sandbox, row, trajectory)
    assert reward.value == 1.0


async def layer_of(sandbox: Sandbox, place: Path, paths: Sequence[str] = ("/",), exclude: Sequence[str] = ()) -> str:
    """What a sandbox changed, as a layer for the next."""
    packed = await sandbox.pack(paths=paths, exclude=exclude)
    unpack(io.BytesIO(Path(packed.path).read_bytes()), place, digest=packed.digest)
    return str(place)


class Equipped(HarnessAgent):
    """A harness of files alone; counts how often it is laid out."""

    made = 0

    @property
    def equipment_key(self) -> str:
        return "a-tool-1"

    async def equip(self, sandbox: Sandbox) -> None:
        type(self).made += 1
        await sandbox.files.write("/opt/tool/run", "#!/bin/sh\necho here\n", mode=0o755)


async def test_a_harness_is_laid_out_once_for_an_image(tmp_path: Path) -> None:
    store = LayerStore(StoreLayout(tmp_path / "store"), tmp_path / "unpacked")
    store.prepare(tmp_path)
    async with BubblewrapBackend(tmp_path) as backend:
        agent = Equipped(ArithTask(limit=1), "command", "true")
        first = await Equipment(agent, backend, store).layers("host")
        assert await Equipment(agent, backend, store).layers("host") == first and Equipped.made == 1
        assert await Equipment(HarnessAgent(ArithTask(limit=1), "command", "true"), backend, store).layers("host") == []
        async with (
            store.standing("host", first) as ground,
            backend.create(SandboxSpec(layers=tuple(map(str, ground.layers)))) as sandbox,
        ):
            assert (await sandbox.shell.run("/opt/tool/run")).output == "here\n"


class Broken(Equipped):
    """A harness that cannot be laid out; counts the tries."""

    tries = 0

    async def equip(self, sandbox: Sandbox) -> None:
        type(self).tries += 1
        raise RolloutError(f"no wheels, try {self.tries}")


async def test_a_harness_that_cannot_be_laid_out_is_tried_once_for_all_who_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = LayerStore(StoreLayout(tmp_path / "store"), tmp_path / "unpacked")
    store.prepare(tmp_path)
    async with BubblewrapBackend(tmp_path) as backend:
        equipment = Equipment(Broken(ArithTask(limit=1), "command", "true"), backend, store)
        results = await asyncio.gather(*(equipment.layers("host") for _ in range(9)), return_exceptions=True)
        assert Broken.tries == 1 and {str(one) for one in results} == {"no wheels, try 1"}
        later = asyncio.create_task(equipment.layers("host"))
        assert await asyncio.wait({later}, timeout=0.2) == (set(), {later})  # it is left time to mend
        later.cancel()
        monkeypatch.setattr("stages.pools.equipment.AGAIN_S", 0.0)
        with pytest.raises(RolloutError, match="try 2"):
            await equipment.layers("host")
    async with NoneBackend(tmp_path) as backend:
        with pytest.raises(RolloutError, match="sandbox=none has no layers") as caught:
            await Equipment(Broken(ArithTask(limit=1), "command", "true"), backend, store).layers("host")
        assert caught.value.detail["final"] and Broken.tries == 2


async def test_a_python_that_only_took_too_long_is_asked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness_install, "_SHELL_S", 0.3)
    parts = harness_install.Parts(("x",), {}, (), "/tmp/slow")
    async with sandbox_of(BubblewrapBackend(tmp_path)) as sandbox:
        await sandbox.files.write("/tmp/slow", "#!/bin/sh\nsleep 9\n", mode=0o755)
        with pytest.raises(RolloutError, match="said nothing within") as caught:
            await harness_install.install(sandbox, parts, WheelCache(tmp_path / "wheels", {}))
        assert not caught.value.detail.get("final")


def test_children_of_every_thread_are_found() -> None:
    program = (
        "import subprocess, threading, time\n"
        "def work():\n"
        "    child = subprocess.Popen(['sleep', '60']); print(child.pid, flush=True); time.sleep(60)\n"
        "threading.Thread(target=work).start()\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        child = int(process.stdout.readline())
        try:
            assert children_of(process.pid) == [child]
        finally:
            os.kill(child, signal.SIGKILL)
            process.kill()


def test_harnesses_are_refused_by_name() -> None:
    task = ArithTask(limit=1)
    for name, said in ((None, "allowed: command, mini_swe_agent, openai_tools"), ("codex", "npm registry"),
                       ("claude_code", "npm registry"), ("openhands", "agent.harness=command"),
                       ("command", "agent.options.command")):  # fmt: skip
        with pytest.raises(HarnessError, match=said):
            HarnessAgent(task, name)
    with pytest.raises(ConfigError, match="ToolsAgent takes no harness"):
        build_agent(parse_config("agent: {harness: codex}"), task)
    row: Row = next(iter(task.rows()))
    assert row["task_id"] and HarnessAgent(task, "mini_swe_agent").equipment_key
