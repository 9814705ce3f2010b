"""The harnesses that are known by name: what is installed for each, and the command that runs it. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

import msgspec

from workflows.agents import openai_tools
from workflows.agents.harness_install import BIN, ROOT
from workflows.errors import HarnessError


class Preset(msgspec.Struct, frozen=True):
    """One harness.

    Args:
        name: as `agent.harness` says it.
        command: what bash runs in the workspace.
        requirements: of PEP 508, installed for it in a virtual environment of its own below ROOT.
        files: name below ROOT -> text.
        env: variables of the command.
        without: distributions that its metadata names and its command never imports, left out of the layer.
    """

    name: str
    command: str
    requirements: tuple[str, ...] = ()
    files: Mapping[str, str] = {}
    env: Mapping[str, str] = {}
    without: tuple[str, ...] = ()


OPENAI_TOOLS: Final = Preset(
    "openai_tools", f'{BIN}/python {ROOT}/openai_tools.py "$ROLLMILL_TASK"', ("openai>=1.60,<4",),
    {"openai_tools.py": Path(openai_tools.__file__).read_text(encoding="utf-8")},
)  # fmt: skip
MINI_SWE_AGENT: Final = Preset(
    "mini_swe_agent",
    f"{BIN}/mini -y --exit-immediately --cost-limit 0 -m openai/$ROLLMILL_MODEL -c mini.yaml "
    "-c environment.timeout=${ROLLMILL_TURN_TIMEOUT_S%.*} -o $ROLLMILL_HOME/mini.json "
    '-t "$(cat "$ROLLMILL_PROMPT")"',
    # litellm 1.106 imports mcp for every request with tools and does not require it.
    ("mini-swe-agent>=2.4,<2.5", "litellm[mcp]"),
    env={
        "MSWEA_CONFIGURED": "true", "MSWEA_SILENT_STARTUP": "1", "MSWEA_COST_TRACKING": "ignore_errors",
        "MSWEA_GLOBAL_CONFIG_DIR": "/tmp/rollmill/mini", "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # noqa: S108
    },
    # What its own benchmarks need, and the clouds' clients: two thirds of half a gigabyte.
    without=("datasets", "pandas", "pyarrow", "numpy", "dill", "multiprocess", "xxhash", "boto3", "botocore",
             "s3transfer", "jmespath", "hf-xet", "textual"),
)  # fmt: skip
_PRESETS: Final[tuple[Preset, ...]] = (MINI_SWE_AGENT, OPENAI_TOOLS)
_NOT_FETCHED: Final = {
    "claude_code": "its package is of the npm registry, which nothing here installs from",
    "codex": "its package is of the npm registry, which nothing here installs from",
    "openhands": "its package needs a server and a browser beside it",
}
"""Harnesses that people ask for, and why there is no preset; an image that holds one can be used by `command`."""


def preset(name: str | None, command: str | None) -> Preset:
    """The preset, with a command of the user's in the place of its own.

    Raises:
        HarnessError: there is none of that name, or no command.
    """
    known = {one.name: one for one in _PRESETS}
    allowed = ", ".join(["command", *known])
    if name == "command":
        if not command:
            raise HarnessError("agent.options.command: agent.harness=command needs the command that bash is to run")
        return Preset("command", command)
    if name in _NOT_FETCHED:
        raise HarnessError(
            f"agent.harness={name}: {_NOT_FETCHED[name]}; with an image that holds it: agent.harness=command"
        )
    if name is None or name not in known:
        raise HarnessError(f"agent.harness got {name!r}; allowed: {allowed}")
    found = known[name]
    return found if not command else msgspec.structs.replace(found, command=command)
