"""ONE table of settings: name, type, default, help. It feeds the TOML file, the environment, `--help` and the docs.

Order of precedence: command line, environment (`AENV_` + name in capitals, dots as underscores), `HOME/config.toml`,
default.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aenv.errors import InvalidInputError
from aenv.network.base import Uplink


@dataclass(frozen=True, slots=True)
class Setting:
    """One row. `parse` turns text or a TOML value into the final value and raises ValueError."""

    name: str
    parse: Callable[[Any], Any]
    default: Any
    help: str

    @property
    def variable(self) -> str:
        return "AENV_" + self.name.replace(".", "_").upper()


_ADDRESS = re.compile(r"(?:\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+):([0-9]{1,5})")


def _whole(low: int, high: int) -> Callable[[Any], int]:
    def parse(value: Any) -> int:
        number = int(value) if isinstance(value, str) else value
        if not isinstance(number, int) or isinstance(number, bool) or not low <= number <= high:
            raise ValueError(f"expected a whole number from {low} to {high}, got {value!r}")
        return number

    return parse


def _address(value: Any) -> str:
    match = _ADDRESS.fullmatch(str(value))
    if match is None or int(match[1]) > 65535:
        raise ValueError(f"expected HOST:PORT, got {value!r}")
    return str(value)


def _uplink(value: Any) -> Uplink:
    return Uplink.parse(str(value))


def _choice(*names: str) -> Callable[[Any], str]:
    def parse(value: Any) -> str:
        if value not in names:
            raise ValueError(f"expected one of {', '.join(names)}, got {value!r}")
        return str(value)

    return parse


SETTINGS: tuple[Setting, ...] = (
    Setting("home", Path, Path("/var/lib/aenv"), "directory of templates, sandboxes, keys and the data base"),
    Setting("cache", Path, Path("cache"), "downloaded and derived files, may serve several homes; relative to home"),
    Setting("listen", _address, "127.0.0.1:3000", "address of HTTP API and sandbox proxy; port 0 takes a free one"),
    Setting("network.uplink", _uplink, Uplink.parse("host"), "way out of a sandbox: host, none, or netns:NAME"),
    Setting("vmm.kind", _choice("auto", "qemu-kvm", "qemu-tcg"), "auto", "VM monitor; auto takes the best there is"),
    Setting("vmm.pool", _whole(0, 64), 2, "VMM processes kept ready per hot snapshot"),
    Setting("vmm.pool_max", _whole(0, 256), 16, "what demand (forks, resumes) may raise that to for a while"),
    Setting("vmm.parked", _whole(0, 256), 8, "machines of paused sandboxes kept for a resume that comes soon"),
    Setting("vmm.parked_time", _whole(1, 86400), 60, "how long one is kept, in seconds"),
    Setting("vmm.hot", _whole(0, 64), 2, "how many snapshots have a pool at a time (the last used ones)"),
    Setting("network.pool", _whole(0, 256), 4, "network slots kept ready"),
    Setting("network.max", _whole(1, 4096), 1024, "network slots that may exist at a time"),
    Setting("sandbox.max", _whole(1, 10000), 200, "sandboxes that may run at a time"),
    Setting("sandbox.max_timeout", _whole(1, 10**9), 86400, "longest time-out a client may ask for, in seconds"),
    Setting("sandbox.fork_limit", _whole(1, 100), 16, "children that one fork may start"),
    Setting("agent.timeout", _whole(1, 600), 60, "how long a guest may take to answer after start, in seconds"),
)  # fmt: skip


class Config:
    """Settings by name: `config["network.uplink"]`."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = dict(values)

    def __getitem__(self, name: str) -> Any:
        return self._values[name]

    @property
    def home(self) -> Path:
        home: Path = self._values["home"]
        return home

    @property
    def cache(self) -> Path:
        cache: Path = self._values["cache"]
        return self.home / cache


def load(overrides: Mapping[str, Any] | None = None, environ: Mapping[str, str] | None = None) -> Config:
    """Read all sources. `overrides` are command-line values (None = not given); an empty variable is not given either.

    Raises InvalidInputError naming the setting and where it came from.
    """
    environ = os.environ if environ is None else environ
    given = {k: v for k, v in (overrides or {}).items() if v is not None}
    table = {s.name: s for s in SETTINGS}
    for name in given:
        if name not in table:
            raise InvalidInputError(name, "no such setting")

    def pick(setting: Setting, file: Mapping[str, Any]) -> Any:
        for source, value in (
            ("command line", given.get(setting.name)),
            (setting.variable, environ.get(setting.variable) or None),
            ("config.toml", file.get(setting.name)),
        ):
            if value is not None:
                try:
                    return setting.parse(value)
                except (ValueError, TypeError) as error:
                    raise InvalidInputError(setting.name, f"{error} (from {source})") from error
        return setting.default

    home = Path(pick(table["home"], {})).absolute()
    file = _read_file(home / "config.toml")
    for name in file:
        if name not in table or name == "home":
            raise InvalidInputError(name, f"no such setting in {home / 'config.toml'}")
    return Config({s.name: pick(s, file) for s in SETTINGS} | {"home": home})


def _read_file(path: Path) -> dict[str, Any]:
    try:
        tree = tomllib.loads(path.read_text())
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise InvalidInputError(str(path), f"cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidInputError(str(path), f"not valid TOML: {error}") from error
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            flat.update({f"{key}.{k}": v for k, v in value.items()})
        else:
            flat[key] = value
    return flat
