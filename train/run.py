"""A run before it trains: its command checked against the store and against what RUN already holds.

Fills in every default and opens the store; knows no torch. What is written here is run.json and train.toml.
"""

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from .. import UserError
from ..settings_text import as_dict, as_toml, digest
from ..store.files import publish, storage_error
from ..store.frozen import CONFIG_PATH, read_document
from ..store.ranges import as_ranges
from ..store.reader import StoreReader
from .config import TOKEN_OBJECTIVES, TrainConfig
from .facts import (
    CONFIG_NAME,
    FACTS_NAME,
    HARMLESS,
    KERNELS_NAME,
    RunFacts,
    StorePart,
    read_facts,
    require_outside,
    require_own_folder,
    require_part,
    require_same_run,
    require_same_store,
)
from .kernel_options import LEAST_HEAD_DIM, require_head_dim
from .kinds import layout_of
from .memory_choice import Choice, fitted, on_off
from .order import ALL, HELD_OUT_SPLIT, TRAIN_SPLIT, RowOrder, samples_of
from .rank import require_rows
from .slot import TILE, RowShape, default_anchors
from .spec import DrafterSpec, make_spec, require_free, require_recorded
from .warm_start import WarmStart, continued_spec, read_start

ROW_TOKENS = {"cuda": 16384, "cpu": 512}  # fewest tokens of a default row, by device type
LEFT_OVERS = (".lock", CONFIG_NAME, KERNELS_NAME)  # of a start that ended before run.json was there
DTYPES = {"cuda": "bfloat16", "cpu": "float32"}
WIDER_HEADS = f"train on the CPU with --devices cpu, or a new run with --set drafter.head_dim={LEAST_HEAD_DIM} or more"


def resolve_facts(
    config: TrainConfig,
    reader: StoreReader,
    segments: str,
    device_type: str,
    old: RunFacts | None = None,
    num_ranks: int = 1,
    look: "StoreLook | None" = None,
) -> RunFacts:
    """What this command would train: every default filled in, from the store, the type of device and the ranks.

    `old` are the facts of the run to resume: any number of ranks goes on with its rows. Raises UserError for a store
    without training samples and for settings that do not fit it: a drafter that reads further back than the store was
    recorded is one of them.
    """
    spec, start = resolve_spec(config, reader, old)
    require_recorded(spec.reach, reader.manifest.window, config.store)
    require_last(config, reader.manifest.has_last)
    train, held_out = (samples_of(reader, split, segments) for split in (TRAIN_SPLIT, HELD_OUT_SPLIT))
    if len(train) == 0:
        raise UserError(
            f"the store {config.store!r} holds no committed sample to train on ({len(held_out)} are held out)",
            f"samples of the split {TRAIN_SPLIT!r}",
            "prepare more data or a smaller --held-out share, and extract again",
        )
    row_tokens = config.rows.row_tokens or default_row_tokens(longest_sample(reader, segments), device_type)
    anchors = config.rows.anchors or default_anchors(row_tokens, spec.block_size)
    require_anchors(anchors, row_tokens)
    shape = RowShape(row_tokens=row_tokens, anchors=anchors, block_size=spec.block_size)
    shuffle = config.rows.shuffle_segments
    rows_per_step = config.rows.rows_per_step or (num_ranks if old is None else old.rows_per_step)
    require_rows(rows_per_step, num_ranks)
    order = RowOrder.of(reader, train, shape, seed=config.seed, shuffle_segments=shuffle)
    rows_per_epoch = (look or StoreLook()).count_rows(order)
    return RunFacts(
        spec=spec,
        init=dataclasses.asdict(start) if start is not None else None,
        store=reader.manifest.as_json(),
        store_path=str(Path(config.store).absolute()),
        segments=segments,
        snapshot=reader.snapshot_in(segments),
        num_train=len(train),
        num_held_out=len(held_out),
        row_tokens=row_tokens,
        anchors=anchors,
        rows_per_step=rows_per_step,
        shuffle_segments=shuffle,
        rows_per_epoch=rows_per_epoch,
        steps=config.steps if config.steps is not None else num_steps(config.epochs, rows_per_epoch, rows_per_step),
        seed=config.seed,
        dtype=config.dtype if config.dtype != "auto" else DTYPES[device_type],
        eval_samples=config.eval_samples,
        noise=config.noise,
        loss={name: value for name, value in as_dict(config.loss).items() if f"loss.{name}" not in HARMLESS},
        optim=as_dict(config.optim),
        device_type=device_type,
        config_digest=digest(config),
    )


def require_anchors(anchors: int, row_tokens: int) -> None:
    """Raises UserError for more anchors than a row has tokens."""
    if anchors > row_tokens:
        raise UserError(
            f"rows.anchors = {anchors}, and a row has {row_tokens} tokens",
            "at most as many anchors as tokens, since each starts at a token of its own",
            f"set rows.anchors to {row_tokens} or less (the default is one for every eight tokens)",
        )


def require_last(config: TrainConfig, has_last: bool) -> None:
    """Raises UserError where the objective reads last states and the store holds none."""
    if config.loss.needs_last and not has_last:
        raise UserError(
            f"loss.objective = {config.loss.objective!r}, and the store {config.store!r} holds no last hidden states",
            f"a store made with `dflash extract --last`, or an objective on tokens: {', '.join(TOKEN_OBJECTIVES)}",
            "extract again with --last, or --set loss.objective=ce",
        )


def resolve_spec(
    config: TrainConfig, reader: StoreReader, old: RunFacts | None
) -> tuple[DrafterSpec, WarmStart | None]:
    """The drafter, and where its first weights come from. A resume takes both from `old` and reads no folder."""
    drafter, target, tap_layers = config.drafter, reader.manifest.target, reader.manifest.tap_layers
    if drafter.init is None:
        return make_spec(drafter, target, tap_layers), None
    path = str(Path(drafter.init).absolute())
    if old is not None and old.init is not None and old.init["path"] == path:
        start, spec = WarmStart(**old.init), old.spec
    else:
        start, spec = read_start(drafter.init, target)
    return continued_spec(drafter, spec, target, tap_layers), start


def committed_segments(reader: StoreReader) -> str:
    """The segments that a run which begins now reads."""
    has_all = len(reader.commits) == reader.manifest.num_segments  # not with --partial, nor within a budget
    return ALL if has_all else as_ranges(np.unique(reader.samples.segment))


def longest_sample(reader: StoreReader, segments: str) -> int:
    """Tokens that the longest sample of the run takes in a row: the recorded ones and the last label."""
    numbers = np.concatenate([samples_of(reader, split, segments) for split in (TRAIN_SPLIT, HELD_OUT_SPLIT)])
    return int(reader.samples.n[numbers].max()) + 1


def default_row_tokens(longest: int, device_type: str) -> int:
    """The smallest multiple of 128 from the device's own minimum that holds the longest sample, tokens."""
    return -(-max(ROW_TOKENS[device_type], longest) // TILE) * TILE


def num_steps(epochs: float, rows_per_epoch: int, rows_per_step: int) -> int:
    """Updates that `epochs` passes take; the last one is filled up from the pass after."""
    return math.ceil(epochs * rows_per_epoch / rows_per_step)


class StoreLook:
    """What the check of a run asks of the store; one that answers for many runs may remember it."""

    def open(self, store: Path, partial: bool) -> StoreReader:
        return StoreReader(store, partial=partial)

    def count_rows(self, order: RowOrder) -> int:
        """Rows of the first pass."""
        return len(order.rows(0))

    def count_holding(self, reader: StoreReader, token: int) -> int:
        """Samples whose text holds the token."""
        return sum(bool((reader.tokens(i)[0] == token).any()) for i in range(len(reader)))


@dataclass(frozen=True, slots=True)
class Run:
    """A run whose command was checked: what it trains, on which store, into which folder."""

    config: TrainConfig
    facts: RunFacts
    reader: StoreReader
    is_new: bool
    num_holding_mask: int = 0  # samples whose text holds the mask token; counted for a new run
    choice: Choice | None = None  # of what takes memory, and how much; on CUDA

    @property
    def run_dir(self) -> Path:
        return Path(self.config.out)

    @property
    def taps(self) -> tuple[int, ...]:
        """The run's taps as indices into the store's tap list."""
        return tuple(self.reader.manifest.tap_layers.index(layer) for layer in self.facts.spec.tap_layers)

    def mask_note(self) -> str:
        """Which mask token the run has, and how many samples hold it as text."""
        note = f"mask token {self.facts.spec.mask_token_id}"
        return note if not self.num_holding_mask else f"{note}; {self.num_holding_mask:,} samples hold it as text"

    def samples(self, split: str) -> np.ndarray:
        """Reader numbers of the run's samples of a split."""
        return samples_of(self.reader, split, self.facts.segments)


def check_run(
    config: TrainConfig,
    device_type: Callable[[], str],
    card_bytes: int | None = None,
    num_ranks: int = 1,
    look: StoreLook | None = None,
    part: StorePart | None = None,
) -> Run:
    """Opens the store and compares the command with the run that RUN already holds; writes nothing.

    `device_type` is where it would train now, which decides the defaults of a new run; `card_bytes` is the memory of
    its smallest card, None on a CPU; `look` opens the store, of which a run of a sweep reads the `part` that it is
    given. Raises UserError for a missing, unfinished or unfit store, for a run of other facts, naming them with both
    values, and for one that the card has no kernels or no room for.
    """
    run_dir, look = Path(config.out), look or StoreLook()
    old = read_facts(run_dir) if (run_dir / FACTS_NAME).exists() else None
    if old is None:
        require_own_folder(run_dir, "run", FACTS_NAME, LEFT_OVERS)
        require_outside(run_dir, Path(config.store))
        reader = look.open(Path(config.store), config.partial if part is None else part.segments != ALL)
        segments = committed_segments(reader) if part is None else part.segments
        facts = resolve_facts(config, reader, segments, device_type(), num_ranks=num_ranks, look=look)
        require_part(facts, part)
        require_head_dim(facts.spec.head_dim, facts.device_type, WIDER_HEADS)
        facts, choice = fit(config, facts, reader, None, card_bytes)
        num_holding = count_mask_token(reader, facts, look)
        require_free(facts.spec.mask_token_id, facts.target, num_holding, len(reader))
        return Run(config, facts, reader, is_new=True, num_holding_mask=num_holding, choice=choice)
    reader = look.open(Path(config.store), old.segments != ALL)
    require_same_store(run_dir, old, reader.manifest)
    facts = resolve_facts(config, reader, old.segments, old.device_type, old, num_ranks, look)
    require_same_run(run_dir, old, facts)
    require_part(facts, part)
    require_head_dim(facts.spec.head_dim, device_type(), WIDER_HEADS)
    facts, choice = fit(config, facts, reader, old, card_bytes)
    return Run(config, facts, reader, is_new=False, choice=choice)


def fit(
    config: TrainConfig, facts: RunFacts, reader: StoreReader, old: RunFacts | None, card_bytes: int | None
) -> tuple[RunFacts, Choice | None]:
    """The facts with what takes memory settled, and the choice; see `fitted`."""
    return fitted(
        config,
        facts,
        old,
        card_bytes=card_bytes,
        head_is_tied=card_bytes is not None and read_document(Path(config.store) / CONFIG_PATH)["is_tied"],
        least_row_tokens=default_row_tokens(longest_sample(reader, facts.segments), "cpu"),
    )


def make_folder(run_dir: Path) -> None:
    """The folder of the run. Raises UserError where it cannot be made."""
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise storage_error(error, run_dir) from error


def count_mask_token(reader: StoreReader, facts: RunFacts, look: StoreLook) -> int:
    """Samples that hold the mask token; none are looked at where it lies beyond the tokenizer."""
    token = facts.spec.mask_token_id
    if token >= facts.target["tokenizer_size"]:
        return 0
    return look.count_holding(reader, token)


def require_unchanged(run: Run) -> None:
    """Under the lock of RUN: another process may have started another run there since `check_run` looked."""
    if run.is_new and (run.run_dir / FACTS_NAME).exists():
        old = read_facts(run.run_dir)
        require_same_store(run.run_dir, old, run.reader.manifest)
        require_same_run(run.run_dir, old, run.facts)


def write_run(run: Run) -> None:
    """Publishes train.toml, then run.json, with which the folder is a run; under the lock of RUN."""
    publish(run.run_dir / CONFIG_NAME, as_toml(resolved_config(run.config, run.facts), "train").encode())
    publish(run.run_dir / FACTS_NAME, run.facts.as_json())


def resolved_config(config: TrainConfig, facts: RunFacts) -> TrainConfig:
    """The config with every default filled in, so that it trains the same run from any folder."""
    spec, layout = facts.spec, layout_of(facts.spec.attention)
    assert layout is not None, "a config's layers have a layout"
    drafter = dataclasses.replace(
        config.drafter,
        num_layers=spec.num_layers,
        block_size=spec.block_size,
        init=facts.init and facts.init["path"],
        window=layout.window,
        layer_types=layout.layer_types,
        causal=layout.causal,
        mask_token_id=spec.mask_token_id,
        taps=spec.tap_layers,
        intermediate_size=spec.intermediate_size,
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
    )
    rows = dataclasses.replace(
        config.rows, row_tokens=facts.row_tokens, anchors=facts.anchors, rows_per_step=facts.rows_per_step
    )
    loss = dataclasses.replace(config.loss, chunk_blocks=facts.chunk_blocks)
    return dataclasses.replace(
        config,
        store=str(Path(config.store).absolute()),
        out=str(Path(config.out).absolute()),
        steps=facts.steps,
        dtype=facts.dtype,
        eval_every=interval(config.eval_every, facts.steps),
        checkpoint_every=interval(config.checkpoint_every, facts.steps),
        drafter=drafter,
        rows=rows,
        loss=loss,
        checkpointing=on_off(facts.is_checkpointed),
    )


def interval(every: int | None, steps: int) -> int:
    """Steps between two exams or checkpoints: as given, else a tenth of the run."""
    return every if every is not None else max(1, math.ceil(steps / 10))
