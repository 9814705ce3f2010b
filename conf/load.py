"""Reads, writes, checks and fingerprints a run's config.yaml: what every process of a run starts from."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from conf.convert import plain, structure
from conf.errors import ConfigError
from conf.schema import Config

YamlError = yaml.YAMLError
"""What text that is not YAML raises, for those who read more of it by way of another library."""

_PLACE_KEYS = ("run_dir", "action", "import_path")
"""Keys that say where or how one looks at a run, not which run it is."""


def load_config(path: Path) -> Config:
    """Read a run directory's config.yaml (or the directory that holds it) back into the same Config.

    `run_dir` becomes the directory that the file lies in, so that a run directory can be moved.

    Raises:
        ConfigError: unreadable, not YAML, a key or value that the schema refuses.
    """
    file = path / "config.yaml" if path.is_dir() else path
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} cannot be read ({error}); give a run directory with a config.yaml") from error
    config = replace(parse_config(text, str(file)), run_dir=str(file.absolute().parent))
    validate(config)
    return config


def parse_config(text: str, where: str = "config.yaml") -> Config:
    """The Config of YAML text; `where` names the text in a refusal.

    Raises:
        ConfigError: not YAML, a key or value that the schema refuses.
    """
    try:
        data = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"{where} is not YAML: {error}") from error
    try:
        return structure(Config, data)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}", key=error.key, value=error.value) from error


def dump_config(config: Config) -> str:
    """YAML that `load_config` reads back into an equal Config."""
    return to_yaml(plain(config))


def to_yaml(document: Any) -> str:
    """YAML of plain data, keys in order; ASCII, as PyYAML does not read back every character that it writes."""
    return str(yaml.safe_dump(document, sort_keys=False, allow_unicode=False, width=120))


def digest(config: Config) -> str:
    """sha256 (hex) of what defines the run; where it lies, and how it was started, are left out."""
    parts = plain(config)
    for key in _PLACE_KEYS:
        del parts[key]
    # The default store moves with the run directory; only one that was chosen is part of the run.
    if config.run_dir and config.store_path == config.run_path.parent / "store":
        parts["store"] = None
    text = json.dumps(parts, sort_keys=True, ensure_ascii=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def validate(config: Config) -> None:
    """Check every value again, and what holds between keys.

    Raises:
        ConfigError: the first rule that is broken: full key, what came, what is allowed.
    """
    structure(Config, plain(config))
    ttl_s, beat_s = config.lease.ttl_s, config.lease.heartbeat_s
    if beat_s >= ttl_s / 2:
        raise ConfigError(
            f"lease.heartbeat_s got {beat_s:g}; allowed: below {ttl_s / 2:g}, half of lease.ttl_s={ttl_s:g}",
            key="lease.heartbeat_s",
            value=beat_s,
        )
    if config.group_size > config.admission.max_open:
        raise ConfigError(
            f"group_size got {config.group_size}; allowed: at most admission.max_open={config.admission.max_open}",
            key="group_size",
            value=config.group_size,
        )
    if (config.fleet.name == "external") != bool(config.fleet.urls):
        wanted = "at least one URL with fleet=external" if not config.fleet.urls else "none unless fleet=external"
        raise ConfigError(f"fleet.urls got {config.fleet.urls}; allowed: {wanted}", key="fleet.urls", value=[])
    for url in config.fleet.urls:
        if not url.startswith(("http://", "https://")):
            raise ConfigError(f"fleet.urls got {url!r}; allowed: http:// or https:// URLs", key="fleet.urls", value=url)
    _check_finite(plain(config), "")


def _check_finite(value: object, key: str) -> None:
    """Infinity and NaN are no numbers in JSON, and no duration that can be waited for."""
    if isinstance(value, dict):
        for name, item in value.items():
            _check_finite(item, f"{key}.{name}" if key else name)
    elif isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        raise ConfigError(f"{key} got {value}; allowed: a finite number", key=key, value=value)
