"""`dflash inspect` of a run and of a sweep: the page as text, from the same facts."""

import json
import shutil
import subprocess
import sys

import pytest
from dflash_offline.cli import main
from dflash_offline.settings_text import as_toml
from dflash_offline.store.files import FolderLock
from dflash_offline.train.report import compare_words, words
from dflash_offline.train.report.page import comparison_page, run_page
from dflash_offline.train.report.run_folder import read_run
from dflash_offline.train.report.sweep_folder import read_comparison
from dflash_offline.train.summary import describe_run, describe_sweep
from dflash_offline.train.sweep.config import SweepConfig
from dflash_offline.train.sweep.effects import main_effects

DECODED = {"mode": "decoded", "definitions": {}, "step": 10, "num_prompts": 5, "num_equal": 5, "speed_up": 2.25}
DECODED |= {"acceptance_length": 2.5, "intervals": {"acceptance_length": [2.125, 2.875]}, "histogram": [1, 0, 3, 0]}


def test_the_text_says_what_the_page_says(make_run, lab, tmp_path):
    run_dir = make_run(tmp_path / "run", settings=("seed=7",))
    (run_dir / "evaluation.json").write_text(json.dumps(DECODED))
    text, page, run = describe_run(run_dir), lab.Page(run_page(read_run(run_dir))).text, read_run(run_dir)
    said = [value for number in words.key_numbers(run) for value in (number.value, number.meaning)]
    said += [*words.overview(run).values(), *words.environment(run).values(), *words.commands(run)]
    said += [cell for row in (*words.evaluation_rows(run), *words.slot_rows(run)) for cell in row]
    for value in said:
        assert value in text, value
        assert value in page, value
    assert "2.500 [2.125, 2.875]" in text
    section = next(part for part in text.split("\n\n") if part.startswith("settings that differ"))
    assert ["seed", "7", "0"] in [line.split() for line in section.splitlines()]


def test_at_most_a_dozen_exams_are_listed_the_last_one_among_them(make_run, lab, tmp_path):
    lines = [lab.exam_line(step, 1 + step / 100) for step in range(100)]
    text = describe_run(make_run(tmp_path / "run", lines, steps=99))
    section = next(part for part in text.split("\n\n") if part.startswith("exams"))
    assert 8 <= len(section.splitlines()) - 2 <= 12
    assert section.splitlines()[-1].split() == ["99", "-", "1.990"]


def test_a_broken_run_is_described_with_notes(make_run, lab, tmp_path):
    run_dir = make_run(tmp_path / "run", lab.usual_lines(5), is_finished=False)
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write('{"kind"')
    text = describe_run(run_dir)
    assert "note         step 5 of 10: the run was stopped" in text
    assert "half-written" in text


@pytest.mark.parametrize("stop_at, past", [(5, " --set stop_at=none"), (6, ""), (None, "")])
def test_the_next_command_goes_past_the_step_where_the_run_was_ended(make_run, lab, tmp_path, stop_at, past):
    settings = () if stop_at is None else (f"stop_at={stop_at}",)
    run_dir = make_run(tmp_path / "run", lab.usual_lines(5), is_finished=False, settings=settings)
    assert words.commands(read_run(run_dir))[0] == f"dflash train --config {run_dir / 'train.toml'}{past}"


def test_the_next_command_of_a_copied_run_names_the_copy(make_run, lab, tmp_path):
    """The toml names the folder that was trained; a way there through a link is no other folder."""
    run_dir = make_run(tmp_path / "run", lab.usual_lines(5), is_finished=False, settings=("stop_at=5",))
    copied, linked = tmp_path / "a copy", tmp_path / "linked"
    shutil.copytree(run_dir, copied)
    linked.symlink_to(run_dir)
    again = f"dflash train --config '{copied}/train.toml' --out '{copied}' --set stop_at=none"
    assert words.commands(read_run(copied))[0] == again
    assert again in describe_run(copied)
    assert again in lab.Page(run_page(read_run(copied))).text
    assert "--out" not in words.commands(read_run(linked))[0]


def test_the_next_command_of_a_moved_sweep_names_its_new_place(make_sweep, lab, tmp_path):
    old, moved = tmp_path / "sweep", tmp_path / "moved"
    make_sweep(old)
    (old / "sweep.toml").write_text(as_toml(SweepConfig(out=str(old)), "sweep"))
    assert read_comparison(old).commands[0] == f"dflash sweep --config {old}/sweep.toml"
    old.rename(moved)
    again = f"dflash sweep --config {moved}/sweep.toml --out {moved}"
    assert read_comparison(moved).commands[0] == again
    assert again in describe_sweep(moved)
    assert again in lab.Page(comparison_page(read_comparison(moved))).text


def test_every_run_of_an_effect_has_its_dot_also_one_that_leaves_the_field_to_all(make_sweep, tmp_path):
    sweep = make_sweep(tmp_path / "sweep")
    for run in sweep.runs:
        if run.overrides["optim.name"] == "muon":
            del run.overrides["optim.name"]  # the default
    sweep.effects = main_effects(sweep)
    sweep.write()
    assert len(read_comparison(tmp_path / "sweep").dots["optim.name"]) == 4


def test_the_text_of_a_sweep_says_what_its_page_says(make_sweep, lab, tmp_path):
    folder = tmp_path / "sweep"
    sweep = make_sweep(folder)
    comparison = read_comparison(folder)
    text, page = describe_sweep(folder), lab.Page(comparison_page(comparison)).text
    found, _ = compare_words.ranking_columns(comparison)
    said = [cell.text for cells in found.values() for cell in cells]
    said += [cell for row in compare_words.effect_rows(comparison) for cell in row]
    said += [*comparison.facts.values(), *comparison.notes, *comparison.commands, *compare_words.faults(comparison)]
    for value in [*found, *said, compare_words.effects_note(comparison)]:
        assert value in text, value
        assert value in page, value
    sections = dict(part.split("\n", 1) for part in text.split("\n\n"))
    ranks = [line.split()[:4] for line in sections["ranking"].splitlines()[1:7]]
    assert [rank[2] for rank in ranks] == [str(number) for number in (*sweep.ranking, 5, 6)]
    assert sections["not at their end"] == "  run 5: its loss is not finite"
    assert "each field alone" in sections["which setting mattered"]
    assert "1 waiting, 4 finished, 1 failed" in text
    best = f"{folder}/runs/0003"
    assert [line.strip() for line in sections["next"].splitlines()[:3]] == [
        f"dflash sweep --config {folder}/sweep.toml",
        f"dflash evaluate {best}",
        f"dflash export {best} --checkpoint latest",
    ]


def test_a_sweep_that_goes_on_is_not_to_be_started_again(make_sweep, tmp_path):
    make_sweep(tmp_path / "sweep")
    with FolderLock(tmp_path / "sweep"):
        text = describe_sweep(tmp_path / "sweep")
    assert "2 of 6 runs are not finished; the ranking is as of now: the sweep is still going" in text
    assert "dflash sweep --config" not in text


def test_the_command_describes_a_sweep(make_sweep, tmp_path, capsys):
    make_sweep(tmp_path / "sweep")
    main(["inspect", str(tmp_path / "sweep")])
    assert capsys.readouterr().out == f"{describe_sweep(tmp_path / 'sweep')}\n"
    with pytest.raises(SystemExit):
        main(["inspect", str(tmp_path / "sweep"), "--png", str(tmp_path / "a.png")])
    assert "with the sweep" in capsys.readouterr().err


def test_the_text_needs_neither_torch_nor_matplotlib(make_run, make_sweep, tmp_path):
    run_dir = make_run(tmp_path / "run")
    make_sweep(tmp_path / "sweep")
    code = (
        "import sys\nfrom pathlib import Path\nfrom dflash_offline.train.summary import describe_run, describe_sweep\n"
        "from dflash_offline.train.report.report import report\n"
        f"describe_run(Path({str(run_dir)!r}))\n"
        f"describe_sweep(Path({str(tmp_path / 'sweep')!r}))\n"
        f"report([Path({str(run_dir)!r})], None, has_page=True, has_pictures=False)\n"
        "assert not {'torch', 'matplotlib', 'transformers'} & set(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
