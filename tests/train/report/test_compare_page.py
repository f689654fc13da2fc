"""Several runs on a page: ranking, differences, main effects, overlaid curves, and the sections of each."""

import dataclasses
import re
from typing import Any

import pytest
from dflash_offline import UserError
from dflash_offline.train.plots import save_charts
from dflash_offline.train.report import compare_words
from dflash_offline.train.report.compare_series import effect_charts, overlay_charts
from dflash_offline.train.report.page import comparison_page
from dflash_offline.train.report.sweep_folder import read_comparison, read_runs
from dflash_offline.train.summary import describe_sweep
from dflash_offline.train.sweep.effects import main_effects, ranked
from dflash_offline.train.sweep.plots import plot_effects
from dflash_offline.train.sweep.report import SweepReport


def parsed(comparison, lab):
    html = comparison_page(comparison)
    page = lab.Page(html)
    assert page.open == []
    assert len(set(page.ids())) == len(page.ids())
    assert {link[1:] for link in page.attributes("a", "href")} <= set(page.ids())
    return html, page


def rows_of(html):
    """The cells of the first table, row by row."""
    rows = html.split("<tbody>")[1].split("</tbody>")[0].split("</tr>")[:-1]
    return [[re.sub(r"<[^>]*>", "", cell).strip() for cell in row.split("</td>")[:-1]] for row in rows]


def test_a_sweep_is_ranked_as_it_says(make_sweep, lab, tmp_path):
    sweep = make_sweep(tmp_path / "sweep")
    html, page = parsed(read_comparison(tmp_path / "sweep"), lab)
    heads = [head.strip() for head in re.findall(r"<th[^>]*>([^<]*)</th>", html.split("</thead>")[0])]
    assert heads[:6] == ["#", "run", "state", "optim.name", "optim.lr", "acceptance length"]
    rows = rows_of(html)
    assert (
        [row[1] for row in rows]
        == [f"run {n}" for n in (*sweep.ranking, 5, 6)]
        == ["run 3", "run 1", "run 4", "run 2", "run 5", "run 6"]
    )
    assert rows[0][:6] == ["1", "run 3", "finished", "muon", "0.02", "3.020 [2.520, 3.520]"]
    assert rows[-1][:6] == ["", "run 6", "waiting", "adamw", "0.04", ""]
    assert "draft ms" in heads
    assert "decoded" not in heads
    assert page.attributes("details", "id") == [f"run-{n}" for n in (3, 1, 4, 2, 5, 6)]
    assert "2 of 6 runs are not finished" in page.text


def test_texts_of_a_sweep_are_escaped(make_sweep, lab, tmp_path):
    folder = tmp_path / "<script>alert(1)</script>".replace("/", "-")
    make_sweep(folder, error="<script>alert(2)</script>")
    html, page = parsed(read_comparison(folder), lab)
    assert html.count("<script") == 1
    assert "run 5: <script>alert(2)</script>" in page.text


def test_effects_are_those_of_the_sweep(make_sweep, tmp_path):
    sweep = make_sweep(tmp_path / "sweep")
    charts: Any = effect_charts(read_comparison(tmp_path / "sweep"))
    assert [chart.key for chart in charts] == ["effect-optim.name", "effect-optim.lr"]
    assert list(charts[0].categories) == ["muon", "adamw"]
    assert list(charts[0].means) == [value["mean"] for value in sweep.effects[0]["values"]]
    lengths = {run.number: run.results["acceptance_length"] for run in sweep.runs if run.results}
    assert sorted((place, length) for place, length, _ in charts[0].dots) == sorted(
        (0 if run.overrides["optim.name"] == "muon" else 1, lengths[run.number]) for run in sweep.runs if run.results
    )


def random_sweep(make_sweep, folder):
    """Nine finished runs of nine learning rates, one of them with the default, and five numbers of layers."""
    sweep = make_sweep(folder)
    rates = [0.001 * number for number in range(1, 9)] + [None]
    run, sweep.runs = sweep.runs[0], []
    for number, rate in enumerate(rates, start=1):
        layers = {"drafter.num_layers": max(1, number - 4)}
        overrides = layers if rate is None else layers | {"optim.lr": rate}
        results = run.results | {"acceptance_length": 1.0 + number / 8}
        sweep.runs.append(dataclasses.replace(run, number=number, overrides=overrides, results=results))
    sweep.fields = ["optim.lr", "drafter.num_layers", "seed"]
    for number, own in enumerate(sweep.runs):
        own.overrides["seed"] = f"a{number}"  # each alone with its own
    sweep.ranking, sweep.effects = ranked(sweep.runs), main_effects(sweep)
    sweep.write()
    return sweep


def test_groups_of_numbers_are_named_by_what_they_cover_on_page_and_pictures(make_sweep, lab, tmp_path):
    sweep = random_sweep(make_sweep, tmp_path / "sweep")
    comparison = read_comparison(tmp_path / "sweep")
    charts: dict[str, Any] = {chart.key: chart for chart in effect_charts(comparison)}
    chart = charts["effect-optim.lr"]
    assert chart.categories == ["0.001 to 0.002", "0.003 to 0.005", "0.006 to 0.008", "not set"]
    assert [place for place, _, _ in chart.dots] == [0, 0, 1, 1, 1, 2, 2, 2, 3]
    assert [length for _, length, _ in chart.dots] == [run.results["acceptance_length"] for run in sweep.runs]
    html, page = parsed(comparison, lab)
    assert all(f">{label}</text>" in html for label in chart.categories)
    unsaid = "seed: no share of the variance, as each run is alone with its value"
    assert charts["effect-seed"].y_label.endswith(unsaid.removeprefix("seed: "))
    assert unsaid in page.text
    assert unsaid in describe_sweep(tmp_path / "sweep")
    assert unsaid in "\n".join(SweepReport(sweep).effects())
    shown = {row[0]: row[1] for row in compare_words.effect_rows(comparison) if row[0]}
    assert shown["seed"] == "-"
    assert shown["optim.lr"].endswith(" %")
    for path in (plot_effects(sweep), *save_charts(list(charts.values()), tmp_path / "pictures")):
        assert path is not None
        assert path.read_bytes().startswith(b"\x89PNG")


def test_decoded_lengths_stand_beside_the_number_of_their_prompts(make_sweep, lab, tmp_path):
    sweep = make_sweep(tmp_path / "sweep")
    for number, count in ((3, 50), (1, 200)):
        numbers = {"acceptance_length": 2.5, "acceptance_length_cycles": 2.4, "intervals": {}, "speed_up": 1.5}
        sweep.run(number).decoded = numbers | {"num_prompts": count, "num_equal": count}
    sweep.write()
    columns, numbers = compare_words.ranking_columns(read_comparison(tmp_path / "sweep"))
    names = list(columns)
    assert names[names.index("decoded") :][:4] == ["decoded", "decoded, over cycles", "decoded, prompts", "speed-up"]
    assert [cell.text for cell in columns["decoded, prompts"]] == ["50", "200", "", "", "", ""]
    assert "decoded, prompts" in numbers
    assert "decoded, prompts" in describe_sweep(tmp_path / "sweep")


def test_curves_of_all_runs_lie_over_one_another(make_sweep, tmp_path):
    make_sweep(tmp_path / "sweep")
    charts: dict[str, Any] = {chart.key: chart for chart in overlay_charts(read_comparison(tmp_path / "sweep").entries)}
    assert set(charts) == {"loss-of-all", "acceptance-of-all", "survival-of-all", "throughput-of-all"}
    lines = charts["acceptance-of-all"].lines
    assert [line.name.split(",")[0] for line in lines] == ["run 3", "run 1", "run 4", "run 2"]
    assert lines[0].points[-1] == (10, 3.02)


def test_a_broken_sweep_is_named(make_sweep, tmp_path):
    make_sweep(tmp_path / "sweep")
    (tmp_path / "sweep" / "sweep.json").write_text("{}")
    with pytest.raises(UserError, match="sweep.json"):
        read_comparison(tmp_path / "sweep")


def test_a_run_of_a_sweep_that_cannot_be_read_is_named(make_sweep, lab, tmp_path):
    make_sweep(tmp_path / "sweep")
    (tmp_path / "sweep" / "runs" / "0003" / "run.json").write_text("{")
    _, page = parsed(read_comparison(tmp_path / "sweep"), lab)
    assert "run.json' is broken" in page.text


def test_runs_are_compared_by_what_differs(make_run, lab, tmp_path):
    low = make_run(tmp_path / "a", [*lab.usual_lines(9), lab.exam_line(10, 1.25)], settings=("optim.lr=0.01", "seed=1"))
    high = make_run(tmp_path / "b", [*lab.usual_lines(9), lab.exam_line(10, 3.5)], settings=("optim.lr=0.02", "seed=1"))
    none = make_run(tmp_path / "c", [], settings=("optim.lr=0.04", "seed=1"), is_finished=False)
    comparison = read_runs([low, high, none])
    assert comparison.fields == ["optim.lr"]
    html, _ = parsed(comparison, lab)
    rows = rows_of(html)
    assert [row[:5] for row in rows] == [
        ["1", "b", "finished", "0.02", "3.500"],
        ["2", "a", "finished", "0.01", "1.250"],
        ["", "c", "stopped", "0.04", ""],
    ]


def test_runs_of_one_name_are_told_apart_and_equal_settings_are_said(make_run, lab, tmp_path):
    folders = [make_run(tmp_path / name / "run") for name in ("a", "b")]
    comparison = read_runs(folders)
    assert {entry.label for entry in comparison.entries} == set(map(str, folders))
    assert comparison.fields == []
    assert "settings equal in all runs" in parsed(comparison, lab)[1].text.replace("settingsequal", "settings equal")
