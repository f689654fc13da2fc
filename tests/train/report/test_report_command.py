"""`dflash report` as it is typed: where files go, what is refused, and the same charts as pictures."""

import struct
from pathlib import Path

import pytest
from click.testing import CliRunner
from dflash_offline import UserError
from dflash_offline.cli import dflash
from dflash_offline.train.report.report import report


def typed(*words):
    return CliRunner().invoke(dflash, ["report", *map(str, words)], catch_exceptions=False)


def test_the_page_lies_in_the_run(make_run, tmp_path):
    run_dir = make_run(tmp_path / "run")
    done = typed(run_dir, "--html")
    assert done.output == f"page       {run_dir / 'report.html'}\n"
    assert (run_dir / "report.html").read_text().startswith("<!doctype html>")
    assert typed(run_dir, "--html").exit_code == 0, "an earlier page is replaced"


def test_several_runs_have_a_page_here(make_run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("a", "b"):
        make_run(tmp_path / name)
    assert typed("a", "b", "--html").output == "page       report.html\n"
    assert "2 runs" in (tmp_path / "report.html").read_text()


@pytest.mark.parametrize("names", [("loss", "acceptance_length"), pytest.param(None, marks=pytest.mark.slow)])
def test_pictures_are_the_charts_of_the_page(make_run, lab, tmp_path, names):
    """With all numbers of a run, and with two of them: a picture takes half a second."""
    lines = [
        {k: v for k, v in line.items() if names is None or k in ("kind", "step", *names)} for line in lab.usual_lines()
    ]
    run_dir, out = make_run(tmp_path / "run", lines), tmp_path / "made" / "page.html"
    out.parent.mkdir()
    written = report([run_dir], out, has_page=True, has_pictures=True)
    assert written.page == out
    keys = {path.stem for path in written.pictures}
    assert all(f'data-key="{key}"' in out.read_text() for key in keys)
    assert len(keys) == out.read_text().count("<figure") == (10 if names is None else 2)
    for path in written.pictures:
        assert path.parent == tmp_path / "made" / "page"
        head = path.read_bytes()[:24]
        assert head[:8] == b"\x89PNG\r\n\x1a\n"
        assert struct.unpack(">II", head[16:24])[0] == 900


@pytest.mark.slow  # a picture takes half a second
def test_the_pictures_of_a_sweep(make_sweep, tmp_path):
    make_sweep(tmp_path / "sweep")
    names = {path.name for path in report([tmp_path / "sweep"], None, has_page=False, has_pictures=True).pictures}
    assert {"loss-of-all.png", "effect-optim.name.png", "effect-optim.lr.png"} <= names
    assert not (tmp_path / "sweep" / "report.html").exists()


def test_what_a_run_lacks_is_told_beside_the_page(make_run, lab, tmp_path):
    run_dir = make_run(tmp_path / "run", lab.usual_lines(5), is_finished=False)
    assert "note       step 5 of 10" in typed(run_dir, "--html").output


def test_a_report_of_nothing_is_refused(make_run, tmp_path):
    with pytest.raises(UserError, match="neither a page nor pictures") as caught:
        typed(make_run(tmp_path / "my run"))
    assert f"`dflash inspect '{tmp_path / 'my run'}'`" in caught.value.advice
    with pytest.raises(UserError, match="no run at"):
        typed(tmp_path / "none", "--html")


def test_a_file_of_the_user_is_never_replaced(make_run, tmp_path):
    run_dir, own = make_run(tmp_path / "run"), tmp_path / "notes.html"
    own.write_text("mine")
    with pytest.raises(UserError, match="is no page"):
        typed(run_dir, "--html", "--out", own)
    assert own.read_text() == "mine"
    with pytest.raises(UserError, match="is a folder"):
        typed(run_dir, "--html", "--out", tmp_path)
    with pytest.raises(UserError, match="nowhere"):
        typed(run_dir, "--html", "--out", tmp_path / "nowhere" / "page.html")


@pytest.mark.parametrize("kind", ["run", "file"])
def test_pictures_go_into_no_folder_of_something_else(make_run, tmp_path, kind):
    run_dir, place = make_run(tmp_path / "run"), tmp_path / "other"
    make_run(place) if kind == "run" else place.write_text("mine")
    before = sorted(path.name for path in tmp_path.rglob("*"))
    with pytest.raises(UserError, match="the pictures would go into .*other'") as caught:
        report([run_dir], tmp_path / "other.html", has_page=True, has_pictures=True)
    assert len(str(caught.value).splitlines()) == 3
    assert sorted(path.name for path in tmp_path.rglob("*")) == before


def test_a_sweep_among_runs_is_refused(make_run, make_sweep, tmp_path):
    make_sweep(tmp_path / "sweep")
    with pytest.raises(UserError, match="is a sweep"):
        report([make_run(tmp_path / "run"), tmp_path / "sweep"], Path("x.html"), has_page=True, has_pictures=False)
