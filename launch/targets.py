"""Finds the classes that `_target_` names, also a user's own outside this installation, before anything starts."""

from __future__ import annotations

import importlib
import importlib.machinery
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from conf.errors import ConfigError
from conf.schema import Config


def locate(config: Config, search: Sequence[Path]) -> Config:
    """Import the task's and the agent's class, and note in `import_path` where a user's own packages were found.

    Args:
        config: a resolved configuration.
        search: directories to look in for packages that are not installed, first hit wins.

    Raises:
        ConfigError: the key, the class that came, and where it was looked for.
    """
    found = list(config.import_path)
    for key, target in (("task._target_", config.task._target_), ("agent._target_", config.agent._target_)):
        module, _, name = target.rpartition(".")
        if not module or not name:
            raise ConfigError(f"{key} got {target!r}; allowed: package.module.Class", key=key, value=target)
        place = _place_of(module.partition(".")[0], [Path(path) for path in found], search, key, target)
        if place is not None and str(place) not in found:
            found.append(str(place))
        extend_path(found)
        _check_class(module, name, key, target)
    return replace(config, import_path=found)


def extend_path(import_path: Sequence[str]) -> None:
    """Put a user's directories at the end of sys.path, so that none of them can shadow an installed package."""
    for path in import_path:
        if path not in sys.path:
            sys.path.append(path)


def _place_of(package: str, known: Sequence[Path], search: Sequence[Path], key: str, target: str) -> Path | None:
    """The directory to add for this top-level package; None where the interpreter finds it without."""
    if package in sys.modules or importlib.machinery.PathFinder.find_spec(package) is not None:
        # An earlier launch in this process may have added a directory of the user's to sys.path already.
        places = [place for place in (*known, *search) if _holds(place, package) and str(place) in sys.path]
        return places[0] if places else None
    for place in (*known, *search):
        if _holds(place, package):
            return place
    looked = ", ".join(dict.fromkeys(str(place) for place in (*known, *search)))
    raise ConfigError(
        f"{key} got {target!r}, but there is no package {package}, neither installed nor in {looked or 'import_path'}; "
        "install it, or add its parent directory: import_path=[DIR]",
        key=key,
        value=target,
    )


def _holds(place: Path, package: str) -> bool:
    return (place / package).is_dir() or (place / f"{package}.py").is_file()


def _check_class(module: str, name: str, key: str, target: str) -> None:
    try:
        loaded = importlib.import_module(module)
    except Exception as error:  # a user's module runs any code when it is imported: whatever it raises is a wrong key
        raise ConfigError(
            f"{key} got {target!r}, but importing {module} failed: {type(error).__name__}: {error}",
            key=key,
            value=target,
        ) from error
    if not callable(getattr(loaded, name, None)):
        public = [
            word for word, value in vars(loaded).items() if isinstance(value, type) and value.__module__ == module
        ]
        raise ConfigError(
            f"{key} got {target!r}, but {module} has no class {name}; it has {', '.join(public) or 'none'}",
            key=key,
            value=target,
        )
