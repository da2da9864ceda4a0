from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from aenv.config import SETTINGS, Config, Setting, load
from aenv.errors import InvalidInputError
from aenv.network.base import Uplink

# For every setting: three different good values, and bad ones as text. `home` has no bad text.
GOOD: dict[str, tuple[str, str, str]] = {
    "home": ("/a", "/b", "/c"),
    "cache": ("/x", "/y", "z"),
    "listen": ("127.0.0.1:1", "[::1]:2", "localhost:0"),
    "network.uplink": ("none", "netns:one", "netns:two"),
    "vmm.kind": ("qemu-tcg", "qemu-kvm", "auto"),
    "vmm.pool": ("0", "1", "64"),
    "vmm.pool_max": ("0", "1", "256"),
    "vmm.hot": ("0", "1", "64"),
    "vmm.parked": ("0", "1", "256"),
    "vmm.parked_time": ("1", "2", "86400"),
    "network.pool": ("0", "1", "256"),
    "network.max": ("1", "2", "4096"),
    "sandbox.max": ("1", "2", "10000"),
    "sandbox.max_timeout": ("1", "2", "1000000000"),
    "sandbox.fork_limit": ("1", "16", "100"),
    "agent.timeout": ("1", "2", "600"),
}
NO_NUMBERS = ("x", "1.5", "-1", "99999999999", "0x10", "1 2", "nan")
BAD: dict[str, tuple[str, ...]] = {
    "home": (),
    "cache": (),
    "listen": ("3000", ":3000", "host:", "host:x", "host:65536", "host:-1", "host:²", "a b:80", "::1:80", "[::1:80"),
    "network.uplink": ("", "netns", "netns:", "netns:a/b", "host:x", "HOST", "eth0"),
    "vmm.kind": ("", "qemu", "QEMU-TCG", "firecracker"),
} | {s.name: NO_NUMBERS for s in SETTINGS if isinstance(s.default, int)}
SECTIONED = [s for s in SETTINGS if s.name != "home"]


def written(folder: Path, text: str | bytes) -> Path:
    data = text.encode() if isinstance(text, str) else text
    (folder / "config.toml").write_bytes(data)
    return folder


def toml(setting: Setting, text: str) -> str:
    value = text if isinstance(setting.default, int) else f'"{text}"'
    return f"{setting.name} = {value}\n"


def test_every_setting_is_covered_here() -> None:
    assert set(GOOD) == set(BAD) == {s.name for s in SETTINGS}
    assert len({s.variable for s in SETTINGS}) == len(SETTINGS)


def test_without_any_source_there_are_the_defaults(tmp_path: Path) -> None:
    config = load({"home": tmp_path}, {})
    assert {s.name: config[s.name] for s in SETTINGS[1:]} == {s.name: s.default for s in SETTINGS[1:]}
    assert load({}, {}).home == Path("/var/lib/aenv")


@pytest.mark.parametrize("setting", SECTIONED, ids=lambda s: s.name)
def test_sources_in_order(tmp_path: Path, setting: Setting) -> None:
    first, second, third = (setting.parse(text) for text in GOOD[setting.name])
    home = written(tmp_path, toml(setting, GOOD[setting.name][0]))
    environ = {setting.variable: GOOD[setting.name][1]}
    assert load({"home": home}, {})[setting.name] == first
    assert load({"home": home}, environ)[setting.name] == second
    assert load({"home": home, setting.name: GOOD[setting.name][2]}, environ)[setting.name] == third
    assert load({"home": home, setting.name: None}, environ)[setting.name] == second  # None: not given
    assert load({"home": home}, {setting.variable: ""})[setting.name] == first  # empty: not given


def test_the_home_comes_from_command_line_and_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert load({}, {"AENV_HOME": "/one"}).home == Path("/one")
    assert load({"home": "/two"}, {"AENV_HOME": "/one"}).home == Path("/two")
    assert load({}, {"AENV_HOME": ""}).home == Path("/var/lib/aenv")
    monkeypatch.chdir(tmp_path)
    assert load({"home": "here"}, {}).home == tmp_path / "here"


def test_the_cache_is_relative_to_the_home(tmp_path: Path) -> None:
    assert load({"home": tmp_path}, {}).cache == tmp_path / "cache"
    assert load({"home": tmp_path, "cache": "/elsewhere"}, {}).cache == Path("/elsewhere")


@pytest.mark.parametrize(("name", "text"), [(name, text) for name, texts in BAD.items() for text in texts])
def test_bad_values_name_setting_and_source(tmp_path: Path, name: str, text: str) -> None:
    setting = next(s for s in SETTINGS if s.name == name)
    sources: list[tuple[str, dict[str, Any], dict[str, str], str]] = [
        ("command line", {name: text}, {}, ""),
        (setting.variable, {}, {setting.variable: text}, ""),
        ("config.toml", {}, {}, f'{name} = "{text}"'),
    ]
    for source, overrides, environ, file in sources:
        if source == setting.variable and text == "":
            continue
        with pytest.raises(InvalidInputError) as caught:
            load({"home": written(tmp_path, file)} | overrides, environ)
        assert caught.value.field == name
        assert source in str(caught.value)


@pytest.mark.parametrize("value", ["true", "1.5", "[1]", "{a = 1}", "1979-05-27", '"x"', "-1", "9" * 30])
@pytest.mark.parametrize("setting", [s for s in SECTIONED if isinstance(s.default, int)], ids=lambda s: s.name)
def test_values_of_another_type_in_the_file_are_refused(tmp_path: Path, setting: Setting, value: str) -> None:
    with pytest.raises(InvalidInputError, match=re.escape(setting.name)):
        load({"home": written(tmp_path, f"{setting.name} = {value}")}, {})


@pytest.mark.parametrize("setting", [s for s in SECTIONED if not isinstance(s.default, int)], ids=lambda s: s.name)
@pytest.mark.parametrize("value", ["true", "5", "[1]", "{a = 1}"])
def test_texts_of_another_type_in_the_file_are_refused(tmp_path: Path, setting: Setting, value: str) -> None:
    with pytest.raises(InvalidInputError, match=re.escape(setting.name)):
        load({"home": written(tmp_path, f"{setting.name} = {value}")}, {})


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("lissten = 'x'", "lissten"),
        ("[vmm]\npools = 1", "vmm.pools"),
        ("vmm = 3", "vmm"),
        ("[network.uplink]\nx = 1", "network.uplink"),
        ("[a.b]\nc = 1", "a.b"),
        ("home = '/other'", "home"),
        ("[home]\nx = 1", "home.x"),
        ('"" = 1', ""),
        ("[sandbox]", None),
    ],
)
def test_unknown_keys_in_the_file_are_refused_and_named(tmp_path: Path, text: str, name: str | None) -> None:
    home = written(tmp_path, text)
    if name is None:
        load({"home": home}, {})
        return
    with pytest.raises(InvalidInputError) as caught:
        load({"home": home}, {})
    assert caught.value.field == name
    assert "config.toml" in str(caught.value)


def test_sections_and_dotted_keys_are_the_same(tmp_path: Path) -> None:
    assert load({"home": written(tmp_path, "[vmm]\npool = 7\nhot = 8")}, {})["vmm.hot"] == 8
    assert load({"home": written(tmp_path, "vmm.pool = 7")}, {})["vmm.pool"] == 7


@pytest.mark.parametrize("text", ["x", "= 1", "a = ", b"\xff\xfe", "a = 1\na = 2"])
def test_what_is_no_toml_is_refused_and_named(tmp_path: Path, text: str | bytes) -> None:
    with pytest.raises(InvalidInputError, match=r"config\.toml"):
        load({"home": written(tmp_path, text)}, {})


def test_a_file_that_cannot_be_read_is_refused_and_named(tmp_path: Path) -> None:
    (tmp_path / "config.toml").mkdir()
    with pytest.raises(InvalidInputError, match=r"config\.toml"):
        load({"home": tmp_path}, {})


def test_unknown_settings_on_the_command_line_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError) as caught:
        load({"home": tmp_path, "nothing": 1}, {})
    assert caught.value.field == "nothing"


def test_types_of_the_values(tmp_path: Path) -> None:
    config: Config = load({"home": str(tmp_path), "network.uplink": "netns:x", "vmm.pool": "3"}, {})
    assert config["network.uplink"] == Uplink.parse("netns:x")
    assert config["vmm.pool"] == 3
    assert isinstance(config.home, Path)


# The manual

ROW = re.compile(r"^\| `([a-z._]+)` \| `(AENV_[A-Z_]+)` \| (.*?) \| (.*?) \|$", re.MULTILINE)


def test_the_manual_lists_every_setting_as_it_is() -> None:
    manual = (Path(__file__).parents[2] / "docs/operation.md").read_text()
    rows = {name: rest for name, *rest in ROW.findall(manual)}
    assert rows == {s.name: [s.variable, f"`{shown(s)}`", s.help] for s in SETTINGS}, (
        "write the table of settings in docs/operation.md anew"
    )


def shown(setting: Setting) -> str:
    value = setting.default
    return (
        (f"{value.kind.value}:{value.name}" if value.name else value.kind.value)
        if isinstance(value, Uplink)
        else str(value)
    )
