"""Hydra's composition and sweeps, turned into typed configurations: nothing below this module knows Hydra.

Hydra's public `initialize` takes one place only. Choices in users' own directories need the search path itself, so this
goes the way of Hydra's own main function (which is why the dependency is held below 1.4). Keys and choices are
looked up in the schema before Hydra sees them, values are converted by it after: Hydra's refusals name no full key.
"""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra import version
from hydra._internal.hydra import Hydra
from hydra._internal.utils import create_config_search_path
from hydra.core.config_loader import ConfigLoader
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import OmegaConf, open_dict
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from conf.choices import GROUPS
from conf.convert import plain, structure, unknown_key
from conf.errors import ConfigError
from conf.explain import find, keys
from conf.load import YamlError
from conf.schema import Config


@dataclass(frozen=True)
class Composed:
    """A composed configuration and the choice that was made in each group."""

    config: Config
    choices: dict[str, str | None]


def compose(overrides: Sequence[str], config_dirs: Sequence[Path] = ()) -> Composed:
    """Compose one configuration.

    Args:
        overrides: Hydra overrides: `group=choice` and `key=value`, without sweeps.
        config_dirs: directories with more choices; they add to ours and replace none.

    Raises:
        ConfigError: one line with the full key, what came and what is allowed.
    """
    parsed = _parse(overrides)
    with _hydra(config_dirs, _search_path(parsed)) as hydra:
        checked = [_checked(override, hydra.config_loader) for override in parsed]
        return _compose(hydra, [*_own_classes(parsed), *(text for text in checked if text is not None)])


def expand(overrides: Sequence[str]) -> list[list[str]]:
    """Every point of a sweep: the cartesian product of `key=a,b`, `choice(...)` and `range(...)`, in the order given.

    Raises:
        ConfigError: an override that cannot be read, or a sweep that has no finite list of points.
    """
    axes = []
    for override in _parse(overrides):
        if not override.is_sweep_override():
            axes.append([override.input_line or ""])
        elif override.is_discrete_sweep() and (override.is_choice_sweep() or override.is_range_sweep()):
            name = override.get_key_element()
            axes.append([f"{name}={value}" for value in override.sweep_string_iterator()])
        else:
            raise ConfigError(f"{override.input_line} has no list of points; allowed: key=a,b or choice() or range()")
    return [list(point) for point in itertools.product(*axes)]


def swept_keys(overrides: Sequence[str]) -> list[str]:
    """The keys and groups that a sweep varies, in the order given."""
    return [override.key_or_group for override in _parse(overrides) if override.is_sweep_override()]


def group_choices(config_dirs: Sequence[Path] = ()) -> dict[str, list[str]]:
    """Group -> the choices that there are, ours and those of `config_dirs`."""
    with _hydra(config_dirs) as hydra:
        return {group: _options(hydra.config_loader, group) for group in GROUPS}


@contextmanager
def _hydra(config_dirs: Sequence[Path], further: Sequence[str] = ()) -> Iterator[Hydra]:
    for directory in config_dirs:
        if not directory.is_dir():
            raise ConfigError(
                f"--config-dir {directory} is not a directory; give one that holds task/, experiment/ ..."
            )
    ConfigStore.instance().store(name="schema", node=plain(Config()), provider="conf.schema")
    search_path = create_config_search_path("pkg://conf")
    for place in (*(f"file://{directory.absolute()}" for directory in config_dirs), *further):
        # After our own choices and before the schema, which Hydra wants to be last.
        search_path.prepend("command-line", place, anchor="schema")
    GlobalHydra.instance().clear()
    version.setbase("1.3")
    try:
        yield Hydra.create_main_hydra2(task_name="rollmill", config_search_path=search_path)
    finally:
        GlobalHydra.instance().clear()


def _compose(hydra: Hydra, overrides: Sequence[str]) -> Composed:
    try:
        composed = hydra.compose_config(
            config_name="config",
            overrides=list(overrides),
            run_mode=RunMode.RUN,
            from_shell=True,
            with_log_configuration=False,
        )
        choices = {group: composed.hydra.runtime.choices.get(group) for group in GROUPS}
        with open_dict(composed):
            del composed["hydra"]
        data = OmegaConf.to_container(composed, resolve=True, throw_on_missing=True)
    except MissingMandatoryValue as error:
        raise ConfigError(f"{error.full_key} is missing; give it a value: {error.full_key}=...") from error
    except OmegaConfBaseException as error:
        raise ConfigError(
            f"{error.full_key or 'the configuration'}: {_first_line(error)}", key=error.full_key
        ) from error
    except (HydraException, YamlError, ValueError, OSError) as error:
        raise ConfigError(f"composition failed: {_first_line(error)}") from error
    return Composed(structure(Config, data), choices)


def _parse(overrides: Sequence[str]) -> list[Override]:
    parser = OverridesParser.create()
    parsed = []
    for text in overrides:
        if "=" not in text and not text.startswith("~"):
            raise ConfigError(f"{text!r} is neither key=value nor a verb; see rollmill --help")
        try:
            parsed.extend(parser.parse_overrides([text]))
        except HydraException as error:
            key = text.partition("=")[0]
            reason = _first_line(error)
            raise ConfigError(
                f"{key} got {text.partition('=')[2]!r}, which cannot be read ({reason}); quote it", key=key
            ) from error
    return parsed


def _search_path(overrides: Sequence[Override]) -> list[str]:
    """The places of `hydra.searchpath=[...]`, taken out so that their choices are known before composition."""
    places: list[Any] = []
    for override in overrides:
        if override.key_or_group == "hydra.searchpath":
            value = override.value()
            places += value if isinstance(value, list) else [value]
    for place in places:
        if not isinstance(place, str) or not place.startswith(("file://", "pkg://")):
            raise ConfigError(f"hydra.searchpath got {place!r}; allowed: a list of file://DIR and pkg://PACKAGE")
    return places


def _own_classes(overrides: Sequence[Override]) -> list[str]:
    """A class that is named without a choice is the user's own: it must not get the options of the default choice."""
    named = {override.key_or_group for override in overrides}
    return [f"{group}=own" for group in ("task", "agent") if f"{group}._target_" in named and group not in named]


def _checked(override: Override, loader: ConfigLoader) -> str | None:
    """The override as Hydra should get it, once its key or choice is known to exist; None: nothing to say to it."""
    name, text = override.key_or_group, override.input_line or ""
    if override.is_sweep_override():
        raise ConfigError(f"{text} is a sweep; add -m to run every point, or quote a value that holds commas", key=name)
    if name == "hydra.searchpath":
        return None
    if name.partition(".")[0] == "hydra" or name.startswith("hydra/"):
        raise ConfigError(f"{name} is not a key here; of Hydra's own keys only hydra.searchpath is used", key=name)
    if name in GROUPS:
        return _checked_choice(override, loader)
    known = find(name)
    if known is None:
        raise _no_such_key(name)
    if known.section:
        inner = ", ".join(key.name for key in keys(name) if not key.section)
        raise ConfigError(f"{name} holds keys and takes no value itself; set one of {inner}", key=name)
    if override.is_delete():
        if not known.open:
            raise ConfigError(f"{name} cannot be removed; allowed: {known.allowed}", key=name)
        return text
    # Below an open mapping every name is the user's own; `++` sets it whether or not a choice lists it already.
    bare = text.lstrip("+")
    return f"++{bare}" if known.name != name or text.startswith("+") else bare


def _checked_choice(override: Override, loader: ConfigLoader) -> str | None:
    name, value = override.key_or_group, override.value()
    if name == "experiment" and value is None:
        return None
    options = _options(loader, name)
    if override.is_delete() or override.is_add() or (value is not None and not isinstance(value, (str, int))):
        raise ConfigError(
            f"{override.input_line} cannot be used; allowed: {name}= one of {', '.join(options)}", key=name
        )
    if str(value) in options:
        return f"{name}={value}"
    near = difflib.get_close_matches(str(value), options, n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    shown = "null" if value is None else value
    raise ConfigError(f"{name} got {shown}; allowed: {', '.join(options)}{hint}", key=name, value=value)


def _no_such_key(name: str) -> ConfigError:
    names = [key.name for key in keys() if not key.section]
    same_end = [known for known in names if known.rpartition(".")[2] == name.rpartition(".")[2]]
    if same_end:
        return ConfigError(f"{name} is not a key: did you mean {' or '.join(same_end[:3])}?", key=name)
    known = [*GROUPS, *names]
    if difflib.get_close_matches(name, known, n=1):
        return unknown_key(name, known)
    return ConfigError(f"{name} is not a key; rollmill --help lists them all", key=name)


def _options(loader: ConfigLoader, group: str) -> list[str]:
    return sorted(loader.get_group_options(group, results_filter=ObjectType.CONFIG))


def _first_line(error: Any) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
