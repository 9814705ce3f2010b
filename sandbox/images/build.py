"""Builds an image after a definition file: a base, files of this machine, a script run in a sandbox on it, a test.

The base is laid out by us where we can read it (an image of the store, a directory, a tar, Docker and OCI archives, a
.sif); other bases are fetched by Apptainer, which knows the registries. The script runs in our own sandbox, without a
network; with `network="open"` Apptainer's build runs it with the network of this machine.
"""

from __future__ import annotations

import asyncio
import glob
import os
import shutil
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from sandbox.errors import ImageError
from sandbox.flatten import flatten
from sandbox.images.containers import Configured
from sandbox.images.definition import Definition, driven, header_alone, read_definition
from sandbox.images.members import Member, directory_members
from sandbox.images.pack import MAX_BYTES, MAX_ENTRIES, PackedImage, one_line_errors, pack_root, read_image
from sandbox.images.rootwriter import RootWriter
from sandbox.layers import unpack
from sandbox.protocols import SandboxBackend, SandboxLimits, SandboxSpec

Network = Literal["none", "open"]
LOCAL = frozenset({"localimage", "docker-archive", "oci-archive", "oci"})
"""Bases that are read without Apptainer."""
_LIMITS = SandboxLimits(pack_bytes=MAX_BYTES, pack_entries=MAX_ENTRIES)
_LONGEST_SCRIPT = 120_000
"""Bytes: a script is one argument, of which the kernel takes 128 KiB."""
_REFUSED = "capability set"
"""In what Apptainer (1.4) says where it asks for capabilities that this root does not have."""
_OUTPUT = 64 * 1024
_SHOWN = 600


@dataclass(frozen=True)
class Builder:
    """One build.

    Args:
        home: a private directory on a local disk; the caller removes it.
        stored: lays an image of the store out in a new directory and gives its variables; None where there is none.
        backend: of the sandbox that the script runs in; asked for only where one is needed, closed by the caller.
        network: of the script.
        timeout_s: of the script, and of each command of Apptainer.
        tell: takes what is said while it goes on, line by line.
    """

    home: Path
    stored: Callable[[str, Path], Configured | None]
    backend: Callable[[], Awaitable[SandboxBackend]]
    network: Network = "none"
    timeout_s: float = 3600.0
    tell: Callable[[str], None] = lambda line: None

    async def build(self, file: Path) -> PackedImage:
        """Follow a definition file to a packed image in `home`.

        Raises:
            ImageError: the file asks for what cannot be done, or a step failed; one line.
            SandboxError: the sandbox of the script could not be started.
        """
        definition = await asyncio.to_thread(read_definition, file)
        root = self.home / "root"
        base = await asyncio.to_thread(self._base, definition, file.parent, root)
        configured = replace_env(base, definition.env)
        await asyncio.to_thread(self._add_files, definition, file.parent, root)
        if definition.post and self.network == "open":
            root = await asyncio.to_thread(self._post_with_network, definition, root)
        elif definition.post:
            await self._post(definition.post, root, base)
        if definition.test:
            await self._run("%test", definition.test, root, configured)
        return await asyncio.to_thread(self._pack, file, root, configured)

    def _pack(self, file: Path, root: Path, configured: Configured) -> PackedImage:
        with one_line_errors(file):
            return pack_root(root, self.home / "image.tar.zst", configured)

    def _base(self, definition: Definition, beside: Path, root: Path) -> Configured:
        """Lay the base out."""
        kind, base = definition.bootstrap, definition.base
        if kind in LOCAL:
            stored = self.stored(base, root) if kind == "localimage" else None
            if stored is not None:
                return stored
            source = beside / _expanded(base)
            if not _exists(source):
                raise ImageError(
                    f"the base {base!r} is neither an image of the store nor a file at {source}", boundary="images"
                )
            return read_image(source, root, self.home)[0]
        header = self.home / "base.def"
        header.write_text(header_alone(kind, base))
        fetched = self._apptainer(header, self.home / "base", f"the base {kind}://{base}")
        return read_image(fetched, root, self.home)[0]

    def _add_files(self, definition: Definition, beside: Path, root: Path) -> None:
        writer = RootWriter(root, "%files", max_bytes=MAX_BYTES, max_entries=MAX_ENTRIES)
        for pattern, target in definition.files:
            sources = sorted(glob.glob(str(beside / _expanded(pattern))))  # noqa: PTH207 - may be absolute
            if not sources:
                raise ImageError(f"%files: there is no {pattern} beside {beside}", boundary="images")
            for name in sources:
                source = Path(name)
                into = target.endswith("/") or len(sources) > 1 or (root / target.lstrip("/")).is_dir()
                where = Path(target) / source.name if into and not source.is_dir() else Path(target)
                with one_line_errors(source):
                    writer.apply(_members(source, where), whiteouts=False)

    async def _post(self, script: str, root: Path, base: Configured) -> None:
        """Run the script in a sandbox on the base, and lay what it changed over the base."""
        layer = self.home / "post"
        await self._run("%post", script, root, base, keep=layer)
        await asyncio.to_thread(flatten, [layer], root)

    async def _run(
        self, what: str, script: str, root: Path, configured: Configured, *, keep: Path | None = None
    ) -> None:  # fmt: skip
        if len(script.encode()) > _LONGEST_SCRIPT:
            raise ImageError(f"{what} has more than {_LONGEST_SCRIPT} bytes: call a file of %files", boundary="images")
        spec = SandboxSpec(image=str(root), workspace=(), env=configured.env, limits=_LIMITS)
        env = {
            "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
            "HOME": "/root",
            "LANG": "C.UTF-8",
        }
        backend = await self.backend()
        async with backend.create(spec) as sandbox:
            done = await sandbox.execute(
                ("/bin/sh", "-e", "-c", script), env={**env, **configured.env}, timeout_s=self.timeout_s,
                output_bytes=_OUTPUT,
            )  # fmt: skip
            said = done.output.decode("utf-8", "replace")
            for line in said.splitlines():
                self.tell(line)
            if done.timed_out or done.exit_code != 0:
                why = f"was not done within {self.timeout_s:g} s" if done.timed_out else f"ended with {done.exit_code}"
                raise ImageError(
                    f"{what} {why}: {_end(said)} (it runs without a network and without privilege; --network open "
                    "lets Apptainer run it with this machine's)", boundary="images",
                )  # fmt: skip
            if keep is not None:
                packed = await sandbox.pack(exclude=("tmp/*",))
                with await asyncio.to_thread(Path(packed.path).open, "rb") as layer:
                    await asyncio.to_thread(unpack, layer, keep, digest=packed.digest, max_bytes=2 * MAX_BYTES)

    def _post_with_network(self, definition: Definition, root: Path) -> Path:
        """Have Apptainer run the script on the base; the root file system that it leaves, read anew."""
        whole = self.home / "whole.def"
        whole.write_text(header_alone("localimage", str(root)) + f"\n%post\n{definition.post}\n")
        built = self._apptainer(whole, self.home / "built", "%post")
        final = self.home / "final"
        read_image(built, final, self.home)
        return final

    def _apptainer(self, file: Path, target: Path, what: str) -> Path:
        if shutil.which("apptainer") is None:
            raise ImageError(f"{what} needs apptainer in PATH: there is none", boundary="images")
        env = {
            "PATH": os.environ.get("PATH", "/usr/local/bin:/usr/bin:/bin"), "HOME": str(self.home),
            "APPTAINER_TMPDIR": str(self.home), "APPTAINER_CACHEDIR": str(self.home / "cache"),
            "APPTAINER_CONFIGDIR": str(self.home / "config"),
            **{name: value for name, value in os.environ.items() if name.lower().endswith("_proxy")},
        }  # fmt: skip
        command = ["apptainer", "--nocolor", "build", "--force", "--sandbox", str(target), str(file)]
        said: list[str] = []
        why = ""
        for before in ((), ("unshare", "--user", "--map-root-user", "--")):
            said.clear()
            try:
                for line in driven((*before, *command), env, self.timeout_s):
                    said.append(line.rstrip())
                    self.tell(line.rstrip())
                return target
            except ImageError as error:
                why = str(error)
                # A root that lacks a capability (as in a container) is refused; in a user namespace it has them all.
                if not any(_REFUSED in line for line in said):
                    break
        raise ImageError(f"apptainer cannot build {what}: {why}: {_end(' '.join(said))}", boundary="images")


def replace_env(base: Configured, env: dict[str, str]) -> Configured:
    """What the base configures, with more variables."""
    return Configured({**base.env, **env}, base.workdir)


def _members(source: Path, where: Path) -> Iterator[Member]:
    """A file or a directory of this machine as members of an image at an absolute path."""
    prefix = tuple(os.fsencode(part) for part in where.parts[1:])
    if source.is_dir():
        yield Member(prefix, "directory", 0o755)
        for member in directory_members(source, str(source)):
            target = b"/".join((*prefix, member.target)) if member.kind == "hardlink" else member.target
            yield replace(member, path=(*prefix, *member.path), target=target)
        return
    with source.open("rb") as content:
        yield Member(prefix, "file", source.stat().st_mode & 0o777, content=content)


def _expanded(text: str) -> Path:
    """A path that may begin with somebody's home."""
    try:
        return Path(text).expanduser()
    except RuntimeError as error:
        raise ImageError(f"{text}: there is no such home directory", boundary="images") from error


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):  # no name of a file: too long, or a NUL byte
        return False


def _end(text: str) -> str:
    shown = "".join(one if one.isprintable() else " " for one in text)
    return " ".join(shown.split())[-_SHOWN:] or "it said nothing"
