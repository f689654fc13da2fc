"""The facts of a run, `run.json`: what fixes its result, and when two commands mean the same run.

Two commands mean the same run when everything that decides its weights is equal; `HARMLESS` lists what is
not part of that. Knows plain facts and one file; no torch.
"""

import dataclasses
import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import Any, NoReturn

from .. import UserError, __version__
from ..store.files import storage_error
from ..store.manifest import Manifest, differences
from ..store.ranges import ALL, spans
from .config import CHUNK_BLOCKS
from .kinds import describe
from .slot import RowShape
from .spec import DrafterSpec
from .value_rules import is_text, is_whole, list_of, or_none, require_unicode, wrong_field, wrong_key

FORMAT = 2
FACTS_NAME, CONFIG_NAME, CHECKPOINTS_NAME, KERNELS_NAME = "run.json", "train.toml", "checkpoints", "kernels"
TEMPORARY_NAME = re.compile(r".+\.tmp\.[^.]+\.\d+")
SHOWN_DIFFERENCES = 3
HARMLESS = (
    "store",  # the path; the store's identity counts
    "out",
    "devices",  # the run keeps its number format, its row size and the rows of its steps
    "partial",  # the run keeps its snapshot of segments
    "stop_at",
    "eval_every",
    "checkpoint_every",
    "keep",
    "cpu_threads",
    "loader_slots",
    "loader_threads",
    "uncached",
    "sinks",
    "stall_s",
    "cuda_graph",  # the same kernels in the same order
    # Memory; the last bits of a sum may change. A run keeps the values that it was started with until others are given.
    "loss.chunk_blocks",
    "checkpointing",
)
OF_STORE = {"plan_sha256": is_text}
OF_TARGET = {
    **{"name": is_text, "weights_sha256": is_text, "eos_ids": or_none(list_of(is_whole))},
    **dict.fromkeys(("bos_id", "pad_id"), or_none(is_whole)),
}
"""What is read of a run's store and target without opening either."""


@dataclass(frozen=True, slots=True)
class StorePart:
    """What all runs of a sweep read of their store; both as in RunFacts."""

    segments: str
    snapshot: str


@dataclass(frozen=True, kw_only=True, slots=True)
class RunFacts:
    """The content of run.json. `identity` is what a resume must find unchanged."""

    spec: DrafterSpec
    init: dict[str, str] | None  # the WarmStart of the first weights; None: random ones
    store: dict[str, Any]  # the store's manifest
    store_path: str  # where the store was when the run was last started
    segments: str  # 'all', or the committed segments that the run reads, like 0-3,7
    snapshot: str  # sha256 over what their commits say; an exact redo of a segment keeps it
    num_train: int  # samples
    num_held_out: int  # samples of the store; an exam takes the first `eval_samples`
    row_tokens: int
    anchors: int
    rows_per_step: int
    shuffle_segments: int
    rows_per_epoch: int  # rows of epoch 0; later ones may differ by a few
    steps: int
    seed: int
    dtype: str
    eval_samples: int
    loss: dict[str, Any]
    optim: dict[str, Any]
    device_type: str  # of the first start; decides defaults, also after a move
    config_digest: str
    chunk_blocks: int = CHUNK_BLOCKS  # as given or chosen; these are the values of runs that do not say
    is_checkpointed: bool = False
    noise: float = 0.0  # half the width of the noise on the taps of training rows

    @property
    def target(self) -> dict[str, Any]:
        """TargetFacts of the store's target, as a dict."""
        return self.store["target"]

    @property
    def codec_name(self) -> str:
        """How the store's states are encoded."""
        return self.store["codec"]

    @property
    def shape(self) -> RowShape:
        return RowShape(row_tokens=self.row_tokens, anchors=self.anchors, block_size=self.spec.block_size)

    def identity(self) -> dict[str, Any]:
        """Flat names and values that decide the run's weights, the store's own facts left out."""
        own = ("row_tokens", "anchors", "rows_per_step", "shuffle_segments")
        flat: dict[str, Any] = {"drafter.init": self.init and self.init["path"]}
        flat |= {f"rows.{name}": getattr(self, name) for name in own}
        flat |= {
            name: getattr(self, name) for name in ("segments", "snapshot", "num_train", "num_held_out", "steps", "seed")
        }
        flat |= {"dtype": self.dtype, "eval_samples": self.eval_samples, "noise": self.noise}
        flat |= {f"drafter.{name}": value for name, value in self.spec.as_dict().items()}
        flat["drafter.attention"] = describe(self.spec.attention)
        flat |= {f"loss.{name}": value for name, value in self.loss.items()}
        return flat | {f"optim.{name}": value for name, value in self.optim.items()}

    def as_json(self) -> bytes:
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        values |= {"format": FORMAT, "package_version": __version__, "spec": self.spec.as_dict()}
        return (json.dumps(values, indent=1) + "\n").encode()


def read_facts(run_dir: Path) -> RunFacts:
    """The facts in RUN/run.json. Raises UserError where there is no run, or one of another format."""
    path = run_dir / FACTS_NAME
    if not path.is_file():
        raise UserError(
            f"no run at {str(run_dir)!r}", f"a folder with {FACTS_NAME}", "give the --out of `dflash train`"
        )
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        require_unicode(values)
        found = values.pop("format")
        values.pop("package_version")
        fields = dataclasses.fields(RunFacts)
        missing = {field.name for field in fields if field.default is dataclasses.MISSING} - set(values)
        if found == FORMAT and missing:
            raise KeyError(f"it has no {', '.join(sorted(missing))}")
        if found == FORMAT:
            facts = RunFacts(**{**values, "spec": DrafterSpec.from_dict(values["spec"])})
            for record in (facts, facts.spec, *facts.spec.attention):
                if name := wrong_field(record):
                    raise TypeError(f"{name} is {getattr(record, name)!r}")
            for place, rules in ((facts.store, OF_STORE), (facts.target, OF_TARGET)):
                if name := wrong_key(place, rules):
                    raise TypeError(f"{name} is {place.get(name)!r}")
            require_segments(facts)
            if facts.init is not None and not {"path", "sha256"} <= set(facts.init):
                raise KeyError(f"init is {facts.init}")
            return facts
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        happened = f"{str(path)!r} is broken: {error}".replace("\n", " ")
        raise UserError(happened, "the facts of a run", "train into a new folder") from error
    raise UserError(
        f"{str(path)!r} has format {found}", f"format {FORMAT}", "use the version of this package that wrote it"
    )


def require_segments(facts: RunFacts) -> None:
    """Raises ValueError for segments that no run of this store can have."""
    ranges = [] if facts.segments == ALL else spans(facts.segments)
    if ranges and ranges[-1][1] >= facts.store["num_segments"]:
        raise ValueError(f"segments are {facts.segments}, of a store of {facts.store['num_segments']}")


def require_same_store(run_dir: Path, old: RunFacts, manifest: Manifest) -> None:
    """Raises UserError, naming what differs, unless the store is the one the run was started on."""
    found = differences(Manifest(**old.store), manifest)
    if found:
        refuse(run_dir, [(f"store.{name}", before, now) for name, before, now in found], "the same store")


def require_same_run(run_dir: Path, old: RunFacts, new: RunFacts) -> None:
    """Raises UserError, naming what differs, unless both have one identity."""
    before, now = old.identity(), new.identity()
    found = [(name, before.get(name), now.get(name)) for name in now if before.get(name) != now.get(name)]
    if found:
        refuse(run_dir, found, "the settings that the run was started with")


def refuse(run_dir: Path, found: list[tuple[str, Any, Any]], expected: str) -> NoReturn:
    shown = "; ".join(f"{name} was {before!r} and is now {now!r}" for name, before, now in found[:SHOWN_DIFFERENCES])
    more = f" and {len(found) - SHOWN_DIFFERENCES} more" if len(found) > SHOWN_DIFFERENCES else ""
    again = f"--config {quote(str(run_dir / CONFIG_NAME))} --out {quote(str(run_dir))}"
    raise UserError(
        f"{str(run_dir)!r} was trained with other facts: {shown}{more}",
        expected,
        f"go back to them (`{again}` repeats the run), or train into another --out",
    )


def require_part(facts: RunFacts, part: StorePart | None) -> None:
    """Raises UserError where a run of a sweep, which gives the `part`, would read other states than its other runs."""
    if part is None or (facts.segments, facts.snapshot) == (part.segments, part.snapshot):
        return
    raise UserError(
        f"the segments {facts.segments} of the store {facts.store_path!r} have the snapshot {facts.snapshot[:16]}, and "
        f"the sweep began with {part.segments}, {part.snapshot[:16]}",
        "the same states for all runs of a sweep, which are compared with each other",
        "bring the store back as it was, or begin a sweep in another --out",
    )


def require_outside(folder: Path, store: Path) -> None:
    """Raises UserError for the folder of a new run or sweep that lies inside of the store's."""
    if Path(os.path.realpath(folder)).is_relative_to(os.path.realpath(store)):
        raise UserError(
            f"{str(folder)!r} lies inside of the store {str(store)!r}",
            "a folder outside of it: a store holds its own files alone",
            "name another with --out",
        )


def require_own_folder(folder: Path, kind: str, marker: str, left_overs: Sequence[str]) -> None:
    """Raises UserError unless a new run or sweep (`kind`) may go there: nothing, or our own left-overs alone.

    `left_overs` are what a start leaves that ended before the file `marker` was there.
    """
    expected, advice = f"a new or empty folder, or the folder of a {kind}", "name another with --out"
    try:
        names = sorted(path.name for path in folder.iterdir()) if folder.exists() else []
    except NotADirectoryError as error:
        raise UserError(f"{str(folder)!r} is not a folder", expected, advice) from error
    except OSError as error:
        raise storage_error(error, folder) from error
    strange = [name for name in names if name not in left_overs and not TEMPORARY_NAME.fullmatch(name)]
    if strange:
        raise UserError(f"{str(folder)!r} holds {strange[0]!r} but no {marker}", expected, advice)
