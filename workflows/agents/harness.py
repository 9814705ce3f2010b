"""agent=harness: a program that brings its own client, run in the sandbox against a gateway that records tokens."""

from __future__ import annotations

import asyncio
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import msgspec

from sandbox.directory import TOKEN_NAME
from sandbox.protocols import CommandResult, Sandbox
from stages.errors import AgentError, ContextLengthError, PolicyTimeoutError
from stages.gateway.server import GatewayServer, opened
from stages.gateway.session import CaptureSession
from stages.model import StreamModel
from stages.protocols import Limits, Model, Row, Task
from stages.trajectory import Message
from workflows.agents.harness_install import Parts, install, key
from workflows.agents.presets import Preset, preset
from workflows.wheels.cache import WheelCache
from workflows.wheels.fetch import own_environ

PLACE: Final = "/tmp/rollmill"  # noqa: S108 - inside the sandbox
"""Where a harness finds its task: `prompt.md` for people and command lines, `task.json` with messages and tools."""
_PLACES: Final = (
    f'ROLLMILL_HOME="${{{TOKEN_NAME}:+${TOKEN_NAME}/root}}{PLACE}"; export ROLLMILL_HOME '
    'ROLLMILL_PROMPT="$ROLLMILL_HOME/prompt.md" ROLLMILL_TASK="$ROLLMILL_HOME/task.json"'
)
"""Their names as the shell has them: with sandbox=none its root is a directory."""
MODEL: Final = "policy"
_TAIL_CHARS: Final = 400


class HarnessAgent:
    """Runs one command in the sandbox; what it asks the policy for becomes the rollout's chains.

    Args:
        task: gives the prompt, and the tools for harnesses that take them.
        harness: a preset's name, or "command".
        command: what bash runs in the workspace; needed by "command", else in the preset's place.
        env: variables of the command beside the gateway's.
        wheels: the store's directory of wheels, for harnesses that are installed.
        python: the image's interpreter that they are installed for.

    Raises:
        HarnessError: there is no such preset, or "command" has no command.
    """

    name = "harness"
    privileged = False

    def __init__(
        self, task: Task, harness: str | None = None, command: str | None = None, env: Mapping[str, str] | None = None,
        wheels: str | None = None, python: str = "python3",
    ) -> None:  # fmt: skip
        self._task, self._env = task, dict(env or {})
        self._preset: Preset = preset(harness, command)
        self._parts = Parts(self._preset.requirements, self._preset.files, self._preset.without, python)
        self._wheels = Path(wheels or "wheels")

    @property
    def equipment_key(self) -> str:
        """See EquippedAgent; empty for a command of the image."""
        return key(self._parts)

    async def equip(self, sandbox: Sandbox) -> None:
        """See EquippedAgent."""
        await install(sandbox, self._parts, WheelCache(self._wheels, own_environ()))

    async def run(self, row: Row, model: Model, sandbox: Sandbox, limits: Limits) -> None:
        """Work on one row until the command ends, its turns are spent, or the fleet fails.

        Raises:
            PolicyTimeoutError: it asked for more than `limits.max_turns` answers.
            ContextLengthError: it ended when its history had become too long.
            AgentError: it failed, or never asked the policy for anything.
            LLMError: the engine failed.
        """
        if not isinstance(model, StreamModel):
            raise AgentError(f"a harness needs the token streams of a worker's model, got {type(model).__name__}")
        await self._lay_out(row, sandbox)
        session = CaptureSession(model, max_turns=limits.max_turns)
        async with GatewayServer() as server, opened(server, session):
            port = await server.listen(await sandbox.listen())
            result = await self._command(sandbox, session, f"http://127.0.0.1:{port}", limits)
        if model.turns == 0:
            model.say(messages=self._task.prompt(row), reply=Message("assistant"))
        self._judge(session, result, limits)

    async def _lay_out(self, row: Row, sandbox: Sandbox) -> None:
        prompt = self._task.prompt(row)
        text = "\n\n".join(message.content for message in prompt)
        await sandbox.files.write(f"{PLACE}/prompt.md", text + "\n")
        both = {"messages": prompt, "tools": self._task.tools(row)}
        await sandbox.files.write(f"{PLACE}/task.json", msgspec.json.encode(both))

    async def _command(
        self, sandbox: Sandbox, session: CaptureSession, url: str, limits: Limits
    ) -> CommandResult | None:
        """The command's result; None where it was ended."""
        variables = {**self._preset.env, **gateway_env(url, session.token, limits), **self._env}
        exports = " ".join(f"{name}={shlex.quote(value)}" for name, value in variables.items())
        script = f"( {_PLACES}\nexport {exports}\n{self._preset.command}\n) </dev/null"
        running = asyncio.ensure_future(sandbox.shell.run(script, timeout_s=limits.run_s))
        ended = asyncio.ensure_future(session.ended.wait())
        try:
            await asyncio.wait({running, ended}, return_when=asyncio.FIRST_COMPLETED)
            if running.done():
                return running.result()
            return None
        finally:
            ended.cancel()
            if not running.done():
                running.cancel()
                await asyncio.wait({running})
                await sandbox.shell.close()

    def _judge(self, session: CaptureSession, result: CommandResult | None, limits: Limits) -> None:
        """What the end means for the rollout."""
        if session.failure is not None:
            raise session.failure
        if session.spent:
            raise PolicyTimeoutError(
                f"{self._preset.name}: more than {limits.max_turns} turns were asked for (agent.max_turns)"
            )
        if result is None or result.timed_out:
            raise PolicyTimeoutError(f"{self._preset.name}: not done within {limits.run_s:g} s")
        if session.full is not None:
            raise ContextLengthError(f"{self._preset.name}: {session.full}")
        said = result.output.strip()[-_TAIL_CHARS:]
        if result.exit_code != 0:
            raise AgentError(f"{self._preset.name}: exit code {result.exit_code}: {said}")
        if session.turns == 0:
            raise AgentError(f"{self._preset.name}: it ended without asking the policy for anything: {said}")


def gateway_env(url: str, token: str, limits: Limits) -> dict[str, str]:
    """The variables by which clients find the gateway: those that the makers' own clients read, and plain ones."""
    return {
        "OPENAI_BASE_URL": f"{url}/v1", "OPENAI_API_BASE": f"{url}/v1", "OPENAI_API_KEY": token,
        "ANTHROPIC_BASE_URL": url, "ANTHROPIC_API_KEY": token, "ANTHROPIC_AUTH_TOKEN": token,
        "ROLLMILL_MODEL": MODEL,
        "ROLLMILL_MAX_TURNS": str(limits.max_turns), "ROLLMILL_TURN_TIMEOUT_S": f"{limits.turn_timeout_s:g}",
        "NO_PROXY": "127.0.0.1,localhost", "no_proxy": "127.0.0.1,localhost",
    }  # fmt: skip
