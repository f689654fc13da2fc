"""Config classes: files, overrides, errors that name field, value and rule."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from dflash_offline import UserError
from dflash_offline.cli import main
from dflash_offline.extract.config import ExtractConfig, PrepareConfig
from dflash_offline.settings import require, resolve, section, setting
from dflash_offline.settings_text import as_toml, digest
from dflash_offline.train.config import TrainConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class Inner:
    width: int = setting(4, "width, tokens")
    taps: tuple[int, ...] | None = setting(None, "taps")


@dataclass(frozen=True, kw_only=True, slots=True)
class Outer:
    name: str = setting("a", "name", flag="--name")
    rate: float | None = setting(None, "rate")
    is_on: bool = setting(True, "switch")
    free: dict[str, Any] = field(default_factory=dict, metadata={"text": "free", "flag": None})
    inner: Inner = section(Inner, "inner")

    def __post_init__(self) -> None:
        require(self.rate is None or self.rate > 0, "rate", self.rate, "more than 0")


def test_options_beat_the_file_and_overrides_beat_both(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text('[train]\nname = "file"\nrate = 1\n[train.inner]\nwidth = 5\n')
    got = resolve(
        Outer, name="train", file=file, options={"name": "option", "inner.width": None}, overrides=["rate=2.5"]
    )
    assert got == Outer(name="option", rate=2.5, inner=Inner(width=5))


@pytest.mark.parametrize("text, want", [("1,2,3", (1, 2, 3)), ("[3, 1]", (3, 1)), ("7", (7,)), ("none", None)])
def test_tuples_come_as_lists_or_commas(text: str, want: tuple[int, ...] | None) -> None:
    assert resolve(Outer, name="x", overrides=[f"inner.taps={text}"]).inner.taps == want


def test_a_number_is_text_where_text_is_wanted() -> None:
    assert resolve(Outer, name="x", overrides=["name=600"]).name == "600"


TYPED = ["2026-01-31", "2026-01-31T10:20:30Z", "10:20", "1_000", "0x10", "1e5", "+5", "007", "inf", "nan"]
TYPED += ["true", "[1]", "{a = 1}", "1 # one", "a b", "", '"', "1\nb = 2", '"a"\nb = 2', "\u00e9"]


@pytest.mark.parametrize("text", TYPED)
def test_a_text_field_gets_what_was_typed(text: str) -> None:
    assert resolve(Outer, name="x", overrides=[f"name={text}"]).name == text


@pytest.mark.parametrize("text", ['"2026-01-31"', "'2026-01-31'"])
def test_quotes_are_not_part_of_a_text(text: str) -> None:
    assert resolve(Outer, name="x", overrides=[f"name={text}"]).name == "2026-01-31"


def test_a_date_and_a_time_of_a_file_are_text(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    for written, text in (
        ("2026-01-31", "2026-01-31"),
        ("2026-01-31 10:20:30", "2026-01-31T10:20:30"),
        ("10:20:30", "10:20:30"),
    ):
        file.write_text(f"[train]\nname = {written}\nfree = {{ day = {written}, days = [{written}], most = inf }}\n")
        got = resolve(Outer, name="train", file=file)
        assert (got.name, got.free) == (text, {"day": text, "days": [text], "most": "inf"})
    file.write_text("[prepare]\ndate = 2026-01-31\n")
    assert resolve(PrepareConfig, name="prepare", file=file).date == "2026-01-31"


def test_numbers_are_read_as_toml_writes_them() -> None:
    got = resolve(Outer, name="x", overrides=["rate=1_000", "inner.width=0x10", "inner.taps=+7"])
    assert (got.rate, got.inner) == (1000.0, Inner(width=16, taps=(7,)))


def test_a_free_dict_gets_json_types_and_else_what_was_typed() -> None:
    typed = {"day": "2026-01-31", "at": "10:20", "most": "inf", "n": "0x10", "word": "high", "q": '"1"', "l": "[1]"}
    got = resolve(Outer, name="x", overrides=[f"free.{name}={text}" for name, text in typed.items()])
    assert got.free == {**typed, "n": 16, "q": "1", "l": [1]}
    assert digest(got) == digest(resolve(Outer, name="x", overrides=[f"free.{n}={t}" for n, t in typed.items()]))
    whole = resolve(Outer, name="x", overrides=["free={a = 1, day = 2026-01-31}", "free.b=2"])
    assert whole.free == {"a": 1, "day": "2026-01-31", "b": 2}


def test_free_dicts_take_parts() -> None:
    assert resolve(Outer, name="x", overrides=["free.thinking=false", "free.effort=high"]).free == {
        "thinking": False,
        "effort": "high",
    }


@pytest.mark.parametrize(
    "override, told",
    [
        ("inner.wide=3", "inner.wide"),
        ("nmae=3", "nmae"),
        ("inner=3", "section"),
        ("inner.width=1.5", "inner.width"),
        ("is_on=1", "is_on"),
        ("rate=0", "more than 0"),
        ("rate=true", "rate"),
        ("inner.taps=1,x", "inner.taps"),
        ("name", "'='"),
    ],
)
def test_bad_values_are_named(override: str, told: str) -> None:
    with pytest.raises(UserError) as caught:
        resolve(Outer, name="x", overrides=[override])
    assert told in str(caught.value)
    assert len(str(caught.value).splitlines()) == 3


def test_a_broken_or_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="does not exist"):
        resolve(Outer, name="x", file=tmp_path / "none.toml")
    (tmp_path / "bad.toml").write_text("a = = 1")
    with pytest.raises(UserError, match="not TOML"):
        resolve(Outer, name="x", file=tmp_path / "bad.toml")


@pytest.mark.parametrize("text", ["[drafter]\nnum_layers = 2", "[tran]\nsteps = 1", "steps = 1"])
def test_what_no_command_reads_is_named(text: str, tmp_path: Path) -> None:
    (tmp_path / "dflash.toml").write_text(text)
    with pytest.raises(UserError, match=r"(drafter|tran|steps).* at its top"):
        resolve(TrainConfig, name="train", file=tmp_path / "dflash.toml")


@pytest.mark.parametrize(
    "text, found",
    [("1,--2", "'--2'"), ("\u00b2", "'\u00b2'"), ("1,", "nothing"), ("", "nothing"), ("one", "'one'")]
    + [("0," + "1" * 30, "'111111111111'...")],
)
def test_what_is_no_number_is_no_tap(text: str, found: str) -> None:
    with pytest.raises(UserError) as caught:
        resolve(Outer, name="x", options={"inner.taps": text})
    assert caught.value.happened == f"inner.taps = {text!r} holds {found} in the place of a number"
    assert len(str(caught.value).splitlines()) == 3


@pytest.mark.parametrize(
    "config",
    [
        TrainConfig(),
        ExtractConfig(taps=(3, 1)),
        PrepareConfig(template={"thinking": True}),
        PrepareConfig(out='\U0001f600\x7f"\\', template={"a.b": 1, "c d": ["\u00e9", {"e": {"f g": 2}}], "h": {}}),
    ],
)
def test_what_is_saved_reads_back_equal(config: Any, tmp_path: Path) -> None:
    (tmp_path / "saved.toml").write_text(as_toml(config, "run"))
    again = resolve(type(config), name="run", file=tmp_path / "saved.toml")
    assert again == config
    assert digest(again) == digest(config)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "dflash.toml").symlink_to("/proc/self/mem")  # its first byte gives EIO
    with pytest.raises(UserError, match=r"dflash.toml' cannot be read: Input/output error \(EIO\)"):
        resolve(Outer, name="outer", file=tmp_path / "dflash.toml")


OVERSIZED = {
    "a number of 5,001 digits": f"seed = 1{'0' * 5000}",
    "the same in base 16": f"seed = 0x{'f' * 5000}",
    "arrays in arrays": f"drafter.taps = {'[' * 3000}{']' * 3000}",
    "a few less": f"drafter.taps = {'[' * 200}{']' * 200}",
    "tables in tables": f"{'.'.join('a' * 3000)} = 1",
}


@pytest.mark.parametrize("line", OVERSIZED.values(), ids=OVERSIZED)
def test_values_that_are_too_large_for_settings_are_refused_in_three_lines(tmp_path: Path, line: str) -> None:
    (tmp_path / "dflash.toml").write_text(f"[train]\n{line}\n")
    with pytest.raises(UserError, match="is not TOML as settings are: ") as caught:
        resolve(TrainConfig, name="train", file=tmp_path / "dflash.toml")
    assert len(str(caught.value).splitlines()) == 3
    assert "sys." not in str(caught.value)


@pytest.mark.parametrize("typed", [f"seed=1{'0' * 5000}", f"seed={'[' * 3000}", f"drafter.taps=0,{'1' * 5000}"])
def test_typed_values_that_are_too_large_are_refused_by_name(typed: str) -> None:
    with pytest.raises(UserError, match=typed.partition("=")[0]):
        resolve(TrainConfig, name="train", overrides=[typed])


@pytest.mark.parametrize(
    "text, told",
    [
        ('"inner.width" = 5\ninner.width = 6', "inner.width is written twice: inner.width = 5 and inner.width = 6"),
        ('inner.width = 5\n"inner.width" = 5', "inner.width is written twice: inner.width = 5 and inner.width = 5"),
        ('"free.a" = 1\nfree.a = 2', "free is written twice: free.a = 1 and free = {'a': 2}"),
        ('free = {a = 1}\n"free.b" = 2', "free is written twice: free = {'a': 1} and free.b = 2"),
    ],
)
def test_a_field_that_a_file_writes_twice_is_refused(tmp_path: Path, text: str, told: str) -> None:
    (tmp_path / "run.toml").write_text(f"[train]\n{text}\n")
    with pytest.raises(UserError) as caught:
        resolve(Outer, name="train", file=tmp_path / "run.toml")
    assert caught.value.happened == told


@pytest.mark.parametrize("number", [f"1{'0' * 400}", f"-1{'0' * 400}"], ids=["large", "small"])
def test_a_whole_number_beyond_all_floats_is_refused_by_name(tmp_path: Path, number: str) -> None:
    file = tmp_path / "run.toml"
    file.write_text(f"[train]\nrate = {number}\n")
    ways: list[dict[str, Any]] = [{"file": file}, {"overrides": [f"rate={number}"]}]
    for given in ways:
        with pytest.raises(
            UserError, match=r"rate = -?1000\d+\.\.\. \(401 digits\) is larger than any float"
        ) as caught:
            resolve(Outer, name="train", **given)
        assert len(str(caught.value).splitlines()) == 3


@pytest.mark.parametrize("text", ["nan", "inf", "-inf"])
@pytest.mark.parametrize("name", ["rate", "inner.width"])
def test_what_toml_calls_a_number_is_no_text_in_an_error(name: str, text: str) -> None:
    """A free dict holds such a number as text, and what takes its values from one is told so."""
    free = resolve(Outer, name="x", overrides=[f"free.a=[{text}]"]).free
    with pytest.raises(UserError) as caught:
        resolve(Outer, name="x", options={name: free["a"][0]})
    assert caught.value.happened == f"{name} = {text} is no finite number"


def test_a_free_dict_keeps_the_order_of_its_fields(tmp_path: Path) -> None:
    """Also where tables stand before what is none, within one another."""
    text = "[x.free]\na.b = {low = 1, high = 2}\na.c = [1]\nd = {low = 1}\ne = [2]\n"
    (tmp_path / "first.toml").write_text(text)
    config = resolve(Outer, name="x", file=tmp_path / "first.toml")
    (tmp_path / "saved.toml").write_text(as_toml(config, "x"))
    again = resolve(Outer, name="x", file=tmp_path / "saved.toml")
    assert again == config
    assert list(again.free) == ["a", "d", "e"]
    assert list(again.free["a"]) == ["b", "c"]


def test_parts_of_a_free_dict_may_have_quoted_names(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text('[train]\n"free.a" = 1\n"free.b" = 2\n')
    assert resolve(Outer, name="train", file=tmp_path / "run.toml").free == {"a": 1, "b": 2}


@pytest.mark.parametrize("text, told", [("st\udcff", "is not UTF-8"), ("st\0", "holds a zero byte")])
def test_text_that_no_file_can_hold_is_refused_by_name(text: str, told: str) -> None:
    with pytest.raises(UserError, match=f"name .* {told}"):
        resolve(Outer, name="x", options={"name": text})
    with pytest.raises(UserError, match=f"name .* {told}"):
        resolve(Outer, name="x", overrides=[f"name={text}"])


STRANGE = "st\udcff"  # as Python has the byte FF of an argument
PATHS = {
    **{f"{command} --out": [command, "--out", STRANGE] for command in ("train", "sweep", "demo")},
    **{f"{command} --store": [command, "--store", STRANGE] for command in ("extract", "train", "sweep")},
    **{f"{command} --config": [command, "--config", STRANGE] for command in ("plan", "train", "sweep")},
    **{
        f"{command} folder": [command, STRANGE]
        for command in ("verify", "inspect", "evaluate", "export", "serve-check")
    },
    **{f"{command} several": [command, "here", STRANGE] for command in ("prepare", "regenerate", "recode", "report")},
    "report --out": ["report", "here", "--html", "--out", STRANGE],
    "--set": ["train", "--set", f"store={STRANGE}"],
}


@pytest.mark.parametrize("args", PATHS.values(), ids=PATHS)
def test_a_path_that_is_not_utf8_is_refused_before_anything_is_written(
    args: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as caught:
        main(args)
    assert caught.value.code == 1
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition(":")[0] for line in lines] == ["error", "expected", "to do"]
    assert lines[0].endswith("st\\udcff' is not UTF-8")
    assert list(tmp_path.iterdir()) == []


def test_a_working_folder_that_is_not_utf8_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / STRANGE).mkdir()
    monkeypatch.chdir(tmp_path / STRANGE)
    with pytest.raises(SystemExit):
        main(["train"])
    assert "error: the working folder" in capsys.readouterr().err


@pytest.mark.parametrize("config", [ExtractConfig, PrepareConfig, TrainConfig])
@pytest.mark.parametrize("stall_s", ["0", "-1", "1e7", "inf", "nan"])
def test_a_wait_that_no_poll_can_take_is_refused(config: type, stall_s: str) -> None:
    with pytest.raises(UserError, match="stall_s"):
        resolve(config, name="any", overrides=[f"stall_s={stall_s}"])
