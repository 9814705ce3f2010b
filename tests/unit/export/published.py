"""What the trainers themselves publish of the records that the adapters make: their classes, or their fields by source.

verl, SkyRL and TRL are on the package registry: their wheels are fetched by hash, and the classes and checks are taken
out of the sources and run alone, since importing the packages would want torch, ray and a GPU stack. The others are
read off the named commit of their repositories.
"""

from __future__ import annotations

import ast
import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

WHEELS = {
    "verl": ("0.9.1", "db6e6f2a8d9d5808d9ec32d357a42319fdc6967df688ff9d9810050f49bfdd14"),
    "skyrl": ("0.3.0", "0110e9434a58d6eb2aa533dd06e6346c8303757800af3c2b5a0d3f341cbad414"),
    "trl": ("1.16.0", "c4726e139dd40e1a41661511c639c8a68416782b2e3e8c0befebd77bb7ba0396"),
}


TRIES = 3


def fetch() -> dict[str, Path]:
    """The wheels, checked against their hashes, without what they depend on; kept in the user's cache by hash."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rollmill-tests" / "wheels"
    return {name: _wheel(cache / digest, name, version, digest) for name, (version, digest) in WHEELS.items()}


def _wheel(place: Path, name: str, version: str, digest: str) -> Path:
    """The wheel in this directory, which is fetched where it is not whole."""
    there = [one for one in place.glob("*.whl") if hashlib.sha256(one.read_bytes()).hexdigest() == digest]
    if there:
        return there[0]
    place.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=place) as scratch:
        wanted = Path(scratch) / "requirements.txt"
        wanted.write_text(f"{name}=={version} --hash=sha256:{digest}\n")
        command = [
            sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps",
            "--only-binary", ":all:", "--require-hashes", "--requirement", str(wanted), "--dest", scratch,
        ]  # fmt: skip
        for left in reversed(range(TRIES)):
            try:
                subprocess.run(command, check=True, timeout=120)
                break
            except (subprocess.CalledProcessError, subprocess.TimeoutExpired):
                if not left:
                    raise
        (made,) = Path(scratch).glob("*.whl")
        return made.rename(place / made.name)


def source(wheel: Path, member: str) -> str:
    """A module's text out of a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        return archive.read(member).decode()


def definition(text: str, name: str) -> ast.ClassDef | ast.FunctionDef:
    """The class or function of this name at the top of a module."""
    for node in ast.parse(text).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name:
            return node
    raise LookupError(f"{name} is not in the module: the framework has changed")


def fields(text: str, name: str) -> dict[str, tuple[str, bool]]:
    """A class's annotated fields: name to its type as written and whether it must be given."""
    body = definition(text, name).body
    found = [node for node in body if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)]
    return {node.target.id: (ast.unparse(node.annotation), node.value is None) for node in found}  # type: ignore[union-attr]


def run(text: str, name: str, **names: Any) -> Any:
    """The function of this name, defined with these globals and nothing else of its module."""
    node = definition(text, name)
    for argument in ast.walk(node):
        if isinstance(argument, ast.arg):
            argument.annotation = None
    code = compile(ast.Module([node], []), name, "exec")
    space = dict(names)
    exec(code, space)  # the framework's own check, out of a wheel whose hash is pinned
    return space[name]


@dataclass(frozen=True)
class Published:
    """Fields of a record as its source at that commit has them: name to type, the ones that must be given first."""

    source: str
    required: dict[str, str]
    optional: dict[str, str]


SLIME = Published(
    "github.com/THUDM/slime/blob/0d234f3e3a83c81b7d37209994e0b994deacbb24/slime/utils/types.py: Sample",
    {"status": "str"},
    {
        "group_index": "int", "index": "int", "prompt": "str | list[dict]", "tokens": "list[int]", "response": "str",
        "response_length": "int", "label": "str", "reward": "float", "loss_mask": "list[int]",
        "weight_versions": "list[str]", "rollout_log_probs": "list[float]", "remove_sample": "bool",
        "metadata": "dict", "train_metadata": "dict", "session_id": "str", "non_generation_time": "float",
    },
)  # fmt: skip
SLIME_STATUS = {"pending", "completed", "truncated", "aborted", "failed"}

PRIME_RL = Published(
    "github.com/PrimeIntellect-ai/prime-rl/blob/e86de6cbbbfded18f870bf14593898143e396d80/"
    "src/prime_rl/transport/types.py: TrainingSample",
    {
        "prompt_ids": "list[int]", "prompt_mask": "list[bool]", "completion_ids": "list[int]",
        "completion_mask": "list[bool]", "completion_logprobs": "list[float]",
    },
    {
        "advantage": "float",
        # later releases of the split layout
        "completion_temperatures": "list[float]", "env_name": "str", "reward": "float",
    },
)  # fmt: skip
PRIME_RL_FLAT = {"token_ids", "mask", "logprobs", "temperatures", "env_name", "reward", "advantages"}

NEMO_RL = Published(
    "github.com/NVIDIA-NeMo/RL/blob/0406a6414d1a7a0df9cd762a0a660c7aa164133a/nemo_rl/data/interfaces.py: DatumSpec",
    {"message_log": "list[dict]", "length": "int", "extra_env_info": "dict", "loss_multiplier": "float", "idx": "int"},
    {"task_name": "str", "total_reward": "float"},
)
NEMO_GYM = Published(
    "github.com/NVIDIA-NeMo/Gym/blob/009d2fec8e644065a260dfb83e58481c94af3562/nemo_gym/openai_utils.py: "
    "TokenIDLogProbMixin",
    {"prompt_token_ids": "list[int]", "generation_token_ids": "list[int]", "generation_log_probs": "list[float]"},
    {},
)
_KINDS: dict[str, Any] = {"int": int, "float": float, "str": str, "bool": bool, "dict": dict, "list": list}


def _is(value: Any, kind: str) -> bool:
    if " | " in kind:
        return any(_is(value, one) for one in kind.split(" | "))
    outer, _, inner = kind.partition("[")
    if outer == "float" and type(value) is int:
        return False
    if type(value) is not _KINDS[outer]:
        return False
    return not inner or all(_is(one, inner.removesuffix("]")) for one in value)


def check(record: dict[str, Any], published: Published, *, also: frozenset[str] = frozenset()) -> None:
    """Assert that the record has all that is required, nothing unknown, and every type."""
    known = published.required | published.optional
    assert set(record) - also <= set(known), (published.source, set(record) - set(known))
    assert set(published.required) <= set(record), published.source
    for name, kind in known.items():
        if name in record:
            assert _is(record[name], kind), (published.source, name, type(record[name]), kind)
