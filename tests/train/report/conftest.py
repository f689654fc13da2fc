"""Run folders written by hand: facts, a config, and lines of metrics.jsonl, without a training."""

import dataclasses
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from dflash_offline.settings import resolve
from dflash_offline.settings_text import as_dict, as_toml
from dflash_offline.train.config import TrainConfig
from dflash_offline.train.drafter import DrafterSpec
from dflash_offline.train.facts import RunFacts
from dflash_offline.train.sweep.effects import main_effects, ranked
from dflash_offline.train.sweep.record import RunRecord, Sweep

BLOCK = 4
VOID = {"meta", "input", "br", "path", "circle", "rect", "link", "img", "wbr"}


def train_line(step: int, **numbers: Any) -> dict[str, Any]:
    slots = {f"accuracy_slot_{k}": 0.9 - k / 10 for k in range(1, BLOCK)}
    slots |= {f"survival_slot_{k}": 0.8 - k / 10 for k in range(1, BLOCK)}
    known = {"loss": 5.0 / step, "lr": 0.01, "grad_norm": 1.0, "acceptance_length_teacher_forced": 2.0}
    known |= {"rate_tok_s": 1000.0, "num_tokens": 100, "step_s": 0.1, "wait_s": 0.02, "memory_peak_bytes": 3 * 10**8}
    return {"kind": "train", "step": step, **known, **slots, **numbers}


def exam_line(step: int, length: float | None = 1.5, **numbers: Any) -> dict[str, Any]:
    slots = {f"held_out_accuracy_slot_{k}": 0.7 - k / 10 for k in range(1, BLOCK)}
    slots |= {f"held_out_survival_slot_{k}": 0.6 - k / 10 for k in range(1, BLOCK)}
    counts = {f"num_cycles_gaining_{k}": k for k in range(1, BLOCK + 1)}
    known = {"origin": "target greedy", "acceptance_length": length, "acceptance_length_cycles": length}
    known |= {"num_prompts": 5, "held_out_acceptance_length_teacher_forced": 1.9}
    return {"kind": "exam", "step": step, **known, **counts, **slots, **numbers}


def usual_lines(steps: int = 10) -> list[dict[str, Any]]:
    lines = [exam_line(0, 1.0)]
    for step in range(1, steps + 1):
        lines.append(train_line(step))
        if step % 5 == 0:
            lines.append(exam_line(step, 1 + step / 10))
    return lines


def facts_of(steps: int, target: str, spec: DrafterSpec, config: TrainConfig) -> RunFacts:
    manifest = {"target": {"name": target, "weights_sha256": "ab" * 32, "num_layers": 6}, "plan_sha256": "cd" * 32}
    return RunFacts(
        spec=spec,
        init=None,
        store=manifest | {"codec": "raw", "tap_layers": [0, 2, 3]},
        store_path="/data/store",
        segments="all",
        snapshot="00",
        num_train=30,
        num_held_out=5,
        row_tokens=128,
        anchors=16,
        rows_per_step=1,
        shuffle_segments=32,
        rows_per_epoch=10,
        steps=steps,
        seed=0,
        dtype="float32",
        eval_samples=256,
        loss=as_dict(config.loss),
        optim=as_dict(config.optim),
        device_type="cpu",
        config_digest="00",
    )


@pytest.fixture
def make_run(tiny_spec: Callable[..., DrafterSpec]) -> Callable[..., Path]:
    """Writes a run of `steps` steps; it is finished where all were done, unless `is_finished` says otherwise."""

    def make(
        run_dir: Path,
        lines: Iterable[Mapping[str, Any]] | None = None,
        *,
        steps: int = 10,
        is_finished: bool = True,
        settings: Sequence[str] = (),
        target: str = "tiny",
    ) -> Path:
        run_dir.mkdir(parents=True)
        config = resolve(TrainConfig, name="train", overrides=[f"out={run_dir}", f"steps={steps}", *settings])
        facts = facts_of(steps, target, tiny_spec(block_size=BLOCK), config)
        (run_dir / "run.json").write_bytes(facts.as_json())
        (run_dir / "train.toml").write_text(as_toml(config, "train"))
        written = "".join(f"{json.dumps(line)}\n" for line in (usual_lines(steps) if lines is None else lines))
        (run_dir / "metrics.jsonl").write_text(written)
        if is_finished:
            (run_dir / "report.json").write_text(json.dumps({"steps": steps, "best_step": steps}))
            (run_dir / "checkpoints" / f"step-{steps:08d}").mkdir(parents=True)
        return run_dir

    return make


@pytest.fixture
def make_sweep(make_run: Callable[..., Path]) -> Callable[..., Sweep]:
    """A sweep of four finished runs, one that failed and one that waits."""

    def make(folder: Path, error: str = "its loss is not finite") -> Sweep:
        runs = []
        for number, (name, lr) in enumerate([(n, lr) for lr in (0.01, 0.02, 0.04) for n in ("muon", "adamw")], start=1):
            record = RunRecord(number=number, overrides={"optim.name": name, "optim.lr": lr}, steps=10)
            if number <= 4:
                length = 2.0 + (name == "muon") + lr
                make_run(folder / record.folder, [*usual_lines(9), train_line(10), exam_line(10, length)])
                record.state, record.step = "finished", 10
                record.results = {
                    **{"step": 10, "acceptance_length": length, "acceptance_length_cycles": length - 0.1},
                    **{"intervals": {"acceptance_length": [length - 0.5, length + 0.5]}, "loss": 0.5, "draft_s": 0.002},
                    **{"num_parameters": 1000, "train_s": 1.0},
                }
            runs.append(record)
        runs[4].state, runs[4].error = "failed", error
        sweep = Sweep(
            folder=folder,
            store="/data/store",
            manifest={"plan_sha256": "cd" * 32},
            strategy="grid",
            count=None,
            seed=None,
            fields=["optim.name", "optim.lr"],
            base={"steps": 10},
            halving=None,
            devices=["cpu"],
            runs=runs,
        )
        sweep = dataclasses.replace(sweep, ranking=ranked(runs), effects=main_effects(sweep))
        sweep.write()
        return sweep

    return make


class Page(HTMLParser):
    """What a page holds: tags with their attributes, ids and text; `open` is empty where all tags are closed."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.texts: list[str] = []
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, f"</{tag}> closes another tag"

    def handle_data(self, data: str) -> None:
        self.texts.append(data)

    @property
    def text(self) -> str:
        return " ".join("".join(self.texts).split())

    def attributes(self, tag: str, name: str) -> list[str]:
        return [value for found, attrs in self.tags if found == tag and (value := attrs.get(name)) is not None]

    def ids(self) -> list[str]:
        return [value for _, attrs in self.tags if (value := attrs.get("id")) is not None]


@pytest.fixture(scope="session")
def lab() -> SimpleNamespace:
    """The functions above: test modules cannot import each other."""
    return SimpleNamespace(train_line=train_line, exam_line=exam_line, usual_lines=usual_lines, Page=Page)
