"""The page of one run: whole, self-contained, safe, and honest about runs that go on, were stopped, or are broken."""

import base64
import hashlib
import json
import re

import pytest
from dflash_offline import UserError
from dflash_offline.settings import resolve
from dflash_offline.store.files import FolderLock
from dflash_offline.train.config import TrainConfig
from dflash_offline.train.report.page import run_page
from dflash_offline.train.report.run_folder import read_run, settings_of

HOSTILE = """"><img src=x onerror=alert(1)></dd></script><script>alert('&amp;')</script>"""
EVALUATION = {
    **{"mode": "decoded", "definitions": {}, "step": 10, "num_prompts": 5, "num_equal": 4, "speed_up": 2.25},
    **{"acceptance_length": 2.5, "acceptance_length_cycles": 2.25, "histogram": [1, 0, 3, 0]},
    **{"per_position": [0.5, 0.25, 0.1], "device": "cpu", "torch": "2.13.0", "threads": 1},
}


def page_of(run_dir, lab):
    html = run_page(read_run(run_dir))
    page = lab.Page(html)
    assert page.open == [], "a tag is not closed"
    assert len(set(page.ids())) == len(page.ids())
    assert {link[1:] for link in page.attributes("a", "href")} <= set(page.ids())
    return html, page


def test_a_finished_run_has_all_its_sections(make_run, lab, tmp_path):
    run_dir = make_run(tmp_path / "run", settings=("optim.lr=0.03", "loss.weights=uniform"))
    (run_dir / "evaluation.json").write_text(json.dumps(EVALUATION))
    html, page = page_of(run_dir, lab)
    assert page.ids()[:6] == ["curves", "exams", "memory", "configuration", "environment", "commands"]
    assert len(page.attributes("figure", "data-key")) == 10
    assert 'class="state finished"' in html
    assert 'class="notes"' not in html
    assert "decoded1052.5002.2504/52.25cpu" in page.text, "one row of the table of evaluations"
    for command in ("dflash evaluate", "dflash export", "vllm serve", "--speculative-config"):
        assert command in page.text


def test_the_page_loads_nothing_and_runs_its_own_script_alone(make_run, lab, tmp_path):
    html, page = page_of(make_run(tmp_path / "run"), lab)
    assert not re.search(r"https?:(?!//www\.w3\.org/2000/svg)|@import|url\(", html)
    assert page.attributes("script", "src") == page.attributes("link", "href") == page.attributes("img", "src") == []
    (script,) = re.findall(r"<script>(.*?)</script>", html, re.DOTALL)
    own = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    (policy,) = [text for text in page.attributes("meta", "content") if text.startswith("default-src")]
    assert policy == f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{own}'"


def test_an_interval_is_shown_where_it_is_known(make_run, lab, tmp_path):
    run_dir = make_run(tmp_path / "run")
    intervals = {"acceptance_length": [2.125, 2.875], "acceptance_length_cycles": None}
    (run_dir / "evaluation.json").write_text(json.dumps(EVALUATION | {"intervals": intervals}))
    _, page = page_of(run_dir, lab)
    assert "2.500 [2.125, 2.875]" in page.text
    assert "2.250 [" not in page.text


def test_texts_of_users_are_escaped(make_run, lab, tmp_path):
    lines = [lab.exam_line(0), lab.train_line(1), lab.exam_line(10, origin=HOSTILE)]
    lines.append({"kind": "exam of one origin", "step": 10, "origin": HOSTILE, "acceptance_length": 1.5})
    named = tmp_path / "<b>run & co</b>"
    run_dir = make_run(named, lines, target=HOSTILE, settings=(f"store={HOSTILE}", f"drafter.init={HOSTILE}"))
    (run_dir / "evaluation.json").write_text(json.dumps(EVALUATION | {"device": HOSTILE}))
    (run_dir / "environment.json").write_text(json.dumps({"device": HOSTILE, "versions": {HOSTILE: HOSTILE}}))
    html, page = page_of(run_dir, lab)
    assert html.count("<script") == 1
    assert "<img" not in html
    assert "<b>run" not in html
    assert "".join(page.texts).count(HOSTILE) >= 6
    assert "<b>run & co</b>" in page.text


def test_every_setting_is_there_and_the_changed_ones_are_marked(make_run, lab, tmp_path):
    settings = ("optim.lr=0.03", "loss.weights=uniform", "drafter.num_layers=3", "seed=7")
    html, page = page_of(make_run(tmp_path / "run", settings=settings), lab)
    config = resolve(TrainConfig, name="train", overrides=settings)
    for setting in settings_of(config):
        assert setting.name.rpartition(".")[2] in page.text
    marked = re.findall(r'<tr class="changed"><td[^>]*>([^<]*)</td><td>([^<]*)', html)
    assert ("seed", "7") in marked
    assert ("weights", "uniform") in marked
    assert not {"lr", "num_layers", "objective"} & {name for name, _ in marked}  # a default that follows the target


def test_the_settings_of_a_config_are_its_fields():
    config = resolve(TrainConfig, name="train", overrides=["optim.lr=0.03", "sinks=tensorboard"])
    found = {setting.name: setting for setting in settings_of(config)}
    assert found["optim.lr"].value == 0.03
    assert (found["sinks"].is_changed, found["optim.lr"].is_changed, found["optim.name"].is_changed) == (
        True,
        False,
        False,
    )
    assert found["rows.anchors"].text.startswith("anchors of a row")


def test_a_run_that_goes_on_says_so(make_run, lab, tmp_path):
    run_dir = make_run(tmp_path / "run", lab.usual_lines(5), is_finished=False)
    with FolderLock(run_dir):
        html, page = page_of(run_dir, lab)
    assert "step 5 of 10: the run is still going" in page.text
    assert 'class="state going"' in html
    assert "step 5 of 10: the run was stopped or failed" in page_of(run_dir, lab)[1].text


def test_a_run_at_stop_at_says_so(make_run, lab, tmp_path):
    run_dir = make_run(tmp_path / "run", lab.usual_lines(5), is_finished=False, settings=("stop_at=5",))
    assert "where stop_at ended it" in page_of(run_dir, lab)[1].text


@pytest.mark.parametrize(
    "lines, told",
    [
        ([], "There is nothing to draw yet"),
        ([{"kind": "train", "step": 1, "loss": 2.0}], "no exam yet"),
        ([{"kind": "exam", "step": 0, "acceptance_length": None}], "nothing to measure"),
    ],
)
def test_a_run_with_little_in_it_gives_a_page_that_says_so(make_run, lab, tmp_path, lines, told):
    run_dir = make_run(tmp_path / "run", lines, is_finished=False)
    assert told in page_of(run_dir, lab)[1].text


@pytest.mark.parametrize("name", ["metrics.jsonl", "train.toml", "evaluation.json", "report.json", "environment.json"])
@pytest.mark.parametrize("content", [b"", b'{"a": ', b"\xff\x00", b"[1]", b'{"mode": "decoded", "definitions": {}}'])
def test_a_broken_file_is_a_note_and_no_end(make_run, lab, tmp_path, name, content):
    run_dir = make_run(tmp_path / "run")
    (run_dir / name).write_bytes(content)
    _, page = page_of(run_dir, lab)
    if name in ("metrics.jsonl", "evaluation.json") and content == b'{"a": ':
        assert name in page.text


def test_without_a_run_nothing_is_shown(tmp_path):
    with pytest.raises(UserError, match="no run at"):
        read_run(tmp_path)


def test_the_plan_of_memory_stands_beside_what_was_measured(make_run, lab, tmp_path):
    run_dir = make_run(tmp_path / "run")
    parts = [{"name": "weights", "size_bytes": 10**8, "grows_with": "drafter, dtype"}]
    plan = {"card_bytes": 8 * 10**8, "peak_bytes": 4 * 10**8, "largest": "backward", "parts": parts}
    (run_dir / "environment.json").write_text(json.dumps({"device": "card", "memory_plan": plan}))
    html, page = page_of(run_dir, lab)
    assert "The measured peak is -25.0 % off the predicted one." in page.text
    widths = [float(width) for width in re.findall(r"width:([\d.]+)%", html)]
    assert widths == [25.0, 100.0, 75.0], "the card has no bar"


@pytest.mark.slow  # reads 200,000 lines
def test_the_page_of_a_long_run_is_small(make_run, lab, tmp_path):
    lines = [lab.train_line(step) for step in range(1, 200_001)]
    lines += [lab.exam_line(step) for step in range(1, 200_001, 1000)]
    lines[123_456]["loss"] = 77.0
    html, _ = page_of(make_run(tmp_path / "run", lines, steps=200_000), lab)
    assert len(html) < 3_000_000
    assert ",77," in html


def test_the_page_of_a_run_of_some_length_is_small(make_run, lab, tmp_path):
    lines = [lab.train_line(step) for step in range(1, 5_001)]
    lines[1234]["loss"] = 77.0
    html, _ = page_of(make_run(tmp_path / "run", lines, steps=5_000), lab)
    assert len(html) < 600_000
    assert ",77," in html
