"""Image archives written by hand: tars from a description, Docker archives and OCI layouts around them."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

Given = tuple[str, str, Any]
"""name, kind ("file", "dir", "link", "hard", "device", "fifo"), and what belongs to it; "file:4755" gives a mode."""

BASH: list[Given] = [("bin", "dir", None), ("bin/bash", "file:755", b"#!bash")]


def tar(members: Sequence[Given]) -> bytes:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for name, kind, given in members:
            info = tarfile.TarInfo(name)
            kind, _, mode = kind.partition(":")
            info.mode = int(mode, 8) if mode else 0o755 if kind == "dir" else 0o644
            info.uid = info.gid = 1234
            if kind == "file":
                info.size = len(given)
            elif kind == "device":
                info.type = tarfile.CHRTYPE
            else:
                types = {
                    "dir": tarfile.DIRTYPE,
                    "link": tarfile.SYMTYPE,
                    "hard": tarfile.LNKTYPE,
                    "fifo": tarfile.FIFOTYPE,
                }
                info.type = types[kind]
                info.linkname = given or ""
            archive.addfile(info, io.BytesIO(given) if kind == "file" else None)
    return made.getvalue()


CONFIG: dict[str, Any] = {
    "architecture": "amd64",
    "os": "linux",
    "config": {"Env": ["PATH=/opt/bin:/usr/bin", "A=b=c", "not a name=x"], "WorkingDir": "/testbed"},
}


def docker(layers: Sequence[Sequence[Given]]) -> bytes:
    """As `docker save` wrote it before version 25."""
    files: list[Given] = [("0" * 64 + ".json", "file", json.dumps(CONFIG).encode())]
    names = [f"{number:064x}/layer.tar" for number in range(1, len(layers) + 1)]
    for name, layer in zip(names, layers, strict=True):
        files += [(name.partition("/")[0], "dir", None), (name, "file", tar(layer))]
    manifest = [{"Config": "0" * 64 + ".json", "RepoTags": ["x:latest"], "Layers": names}]
    return tar([*files, ("manifest.json", "file", json.dumps(manifest).encode())])


def oci_files(layers: Sequence[Sequence[Given]], *, damaged: bool = False, machine: str = "amd64") -> dict[str, bytes]:
    """An OCI layout with gzipped layers, as files by name."""
    files: dict[str, bytes] = {"oci-layout": b'{"imageLayoutVersion":"1.0.0"}'}

    def add(content: bytes) -> dict[str, Any]:
        digest = hashlib.sha256(content).hexdigest()
        files[f"blobs/sha256/{digest}"] = content
        return {"digest": f"sha256:{digest}", "size": len(content)}

    packed = [gzip.compress(tar(layer), mtime=0) for layer in layers]
    described = [add(layer) for layer in packed]
    manifest = {"schemaVersion": 2, "config": add(json.dumps(CONFIG).encode()), "layers": described}
    if damaged:
        files["blobs/sha256/" + described[-1]["digest"][7:]] = gzip.compress(tar(layers[-1]), mtime=1)
    chosen = {**add(json.dumps(manifest).encode()), "platform": {"architecture": machine, "os": "linux"}}
    attestation = {**add(b"{}"), "platform": {"architecture": "unknown", "os": "unknown"}}
    index = add(json.dumps({"manifests": [chosen, attestation]}).encode())
    files["index.json"] = json.dumps({"schemaVersion": 2, "manifests": [index]}).encode()
    return files


def oci(layers: Sequence[Sequence[Given]], **options: Any) -> bytes:
    return tar([(name, "file", content) for name, content in oci_files(layers, **options).items()])


def oci_layout(target: Path, layers: Sequence[Sequence[Given]]) -> Path:
    for name, content in oci_files(layers).items():
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        (target / name).write_bytes(content)
    return target
