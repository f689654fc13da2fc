"""The settings of `train`, `evaluate` and `export`. Light: imports nothing heavy."""

from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any

from .. import UserError
from ..settings import require, require_wait, section, setting
from .kinds import CAUSAL_CHOICES, named_layers
from .rank import named_devices

MOST_STEPS, MOST_ROW_TOKENS = 10**12, 2**22
WIDTHS = {"window": 10**9, "intermediate_size": 2**24, "num_heads": 4096, "num_kv_heads": 4096, "head_dim": 4096}
"""Upper bounds: far beyond what anyone trains, and within what the numbers of numpy, torch and the system hold."""
MOST, MOST_CLIP = 1e6, 1e30  # of a rate; products of a few of them are numbers in float32
LEAST_GAMMA = 1e-3  # slots; all weights but the first are 0 there, and none is NaN
LEAST_FLOOR = 1e-6


@dataclass(frozen=True, kw_only=True, slots=True)
class DrafterConfig:
    """Shape of the drafter; what is None follows `init` where it is given, else the default or the target."""

    num_layers: int | None = setting(None, "drafter layers, count; default: 5", flag="--layers")
    block_size: int | None = setting(None, "tokens of a block, the anchor counted; default: 16", flag="--block-size")
    mask_token_id: int | None = setting(
        None,
        "id of the masked slots; default: the tokenizer's mask token, else the first unused embedding row",
        flag="--mask-token",
    )
    init: str | None = setting(
        None,
        "folder of a drafter to start from, in z-lab's format or that of speculators; what is not set follows it; "
        "default: random weights",
        flag="--warm-start",
        is_shown=False,
    )
    taps: tuple[int, ...] | None = setting(None, "subset of the store's taps to train on; default: all")
    window: int | None = setting(None, "window of the sliding layers, tokens; default: none, full context")
    layer_types: tuple[str, ...] | None = setting(
        None,
        "sliding_attention or full_attention for each layer, or short like 4xsliding,1xfull; "
        "default: all sliding with a window, else all full",
    )
    causal: str | None = setting(
        None, "layers whose slots see only earlier slots of their block: no, sliding, all; default: no"
    )
    intermediate_size: int | None = setting(None, "MLP width; default: the target's")
    num_heads: int | None = setting(None, "query heads; default: the target's")
    num_kv_heads: int | None = setting(None, "key/value heads; default: the target's")
    head_dim: int | None = setting(None, "head width; default: the target's")

    def __post_init__(self) -> None:
        block, layers = self.block_size, self.num_layers
        require(layers is None or 1 <= layers <= 1024, "drafter.num_layers", layers, "1 to 1,024 layers")
        require(block is None or 2 <= block <= 128, "drafter.block_size", block, "2 to 128 tokens")
        for name, most in WIDTHS.items():
            value = getattr(self, name)
            require(value is None or 1 <= value <= most, f"drafter.{name}", value, f"1 to {most:,}")
        require(self.causal in (None, *CAUSAL_CHOICES), "drafter.causal", self.causal, ", ".join(CAUSAL_CHOICES))
        named_layers(self.layer_types or ())  # raises for a name that is none


@dataclass(frozen=True, kw_only=True, slots=True)
class RowsConfig:
    """The one shape of every forward."""

    row_tokens: int | None = setting(
        None, "tokens of a row (T), a multiple of 128; default: 16384 on CUDA, the longest sample or 512 on CPU"
    )
    anchors: int | None = setting(None, "anchors of a row (A); default: one for every eight tokens of the row")
    rows_per_step: int | None = setting(
        None, "rows of one optimizer update, over all ranks; default: one for each rank that starts the run"
    )
    shuffle_segments: int = setting(32, "segments whose samples are mixed while packing, count")

    def __post_init__(self) -> None:
        t, most, anchors, rows = self.row_tokens, MOST_ROW_TOKENS, self.anchors, self.rows_per_step
        is_whole = t is None or (128 <= t <= most and t % 128 == 0)
        require(is_whole, "rows.row_tokens", t, f"a multiple of 128, at most {most:,}")
        require(anchors is None or 1 <= anchors <= most, "rows.anchors", anchors, f"1 to {most:,} anchors")
        require(rows is None or 1 <= rows <= 10**6, "rows.rows_per_step", rows, "1 to a million rows")
        mixed = self.shuffle_segments
        require(1 <= mixed <= 10**6, "rows.shuffle_segments", mixed, "1 to a million segments")


ReadWith = tuple[str, str, tuple[str, ...]]
"""A setting, the one that chooses what reads it, and with which values of that one it is read."""


def require_read(config: Any, section_name: str, read_with: Iterable[ReadWith]) -> None:
    """Raises UserError for a setting that nothing reads; its default, which every run's train.toml holds, passes."""
    defaults = {field.name: field.default for field in fields(config)}
    for name, chooser, readers in read_with:
        value, chosen = getattr(config, name), getattr(config, chooser)
        if chosen not in readers and value != defaults[name]:
            path, by = f"{section_name}.{name}", f"{section_name}.{chooser}"
            raise UserError(
                f"{path} = {value!r} does nothing with {by} = {chosen!r}",
                f"settings that are read there; {path} is read with {by} = {' or '.join(map(repr, readers))}",
                f"drop {path}, or --set {by}={readers[0]}",
            )


OBJECTIVE_NAMES = ("ce", "kl", "tv", "lk", "lk_hybrid", "tv_tokens")
TOKEN_OBJECTIVES = ("ce", "tv_tokens")  # need the text alone
WEIGHT_NAMES = ("decay", "uniform", "dpace", "first_error")
CHUNK_BLOCKS = 64  # where nothing else is given or chosen
LOSS_READ_WITH: tuple[ReadWith, ...] = (
    ("hybrid_eta", "objective", ("lk_hybrid",)),
    ("gamma", "weights", ("decay",)),
    ("dpace_alpha", "weights", ("dpace",)),
)
OPTIM_READ_WITH: tuple[ReadWith, ...] = (
    ("adamw_lr", "name", ("muon",)),
    ("momentum", "name", ("muon",)),
    ("decay_share", "schedule", ("wsd",)),
    ("final_share", "schedule", ("wsd", "cosine")),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class LossConfig:
    """What the block's slots are held to, and how much each counts."""

    objective: str = setting(
        "ce",
        "ce (cross-entropy) and tv_tokens hold a slot to the text's token; kl, tv, lk and lk_hybrid to the target's "
        "own distribution, from a store made with --last",
    )
    hybrid_eta: float = setting(3.0, "how fast lk_hybrid goes from kl to tv as acceptance grows")
    weights: str = setting("decay", "weights of the slots: decay, uniform, dpace, first_error")
    gamma: float | None = setting(
        None, "decay length in slots; default: 7, 5, 4 for blocks of 16, 10, 8, else half a block"
    )
    dpace_alpha: float = setting(0.5, "floor of the D-PACE factors, 0 to 1")
    chunk_blocks: int | None = setting(
        None, "blocks whose logits exist at once, count; default: on CUDA what fits and pays, on CPU 64"
    )

    @property
    def needs_last(self) -> bool:
        """True where the objective reads the target's last hidden states."""
        return self.objective not in TOKEN_OBJECTIVES

    def __post_init__(self) -> None:
        require(
            self.objective in OBJECTIVE_NAMES,
            "loss.objective",
            self.objective,
            "ce, kl, tv, lk, lk_hybrid or tv_tokens (against tokens kl and lk are ce)",
        )
        require(0 <= self.hybrid_eta <= MOST, "loss.hybrid_eta", self.hybrid_eta, "0 to a million")
        require(self.weights in WEIGHT_NAMES, "loss.weights", self.weights, "decay, uniform, dpace or first_error")
        gamma, floor = self.gamma, self.dpace_alpha
        is_length = gamma is None or LEAST_GAMMA <= gamma <= MOST
        require(is_length, "loss.gamma", gamma, f"{LEAST_GAMMA} to a million slots")
        require(LEAST_FLOOR <= floor <= 1, "loss.dpace_alpha", floor, "a millionth to 1")
        chunk = self.chunk_blocks
        require(chunk is None or chunk >= 1, "loss.chunk_blocks", chunk, "at least 1 block")
        require_read(self, "loss", LOSS_READ_WITH)


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimConfig:
    """Optimizer on fp32 masters, and its schedule."""

    name: str = setting("muon", "muon (matrices; AdamW for the rest) or adamw", flag="--optimizer")
    lr: float | None = setting(None, "peak learning rate; default: 0.02 for muon, 6e-4 for adamw", flag="--lr")
    adamw_lr: float = setting(2e-3, "peak learning rate of the AdamW part beside muon")
    momentum: float = setting(0.95, "momentum of muon")
    beta1: float = setting(0.9, "first beta of AdamW")
    beta2: float = setting(0.95, "second beta of AdamW")
    weight_decay: float = setting(0.0, "decoupled weight decay of the matrices")
    clip: float = setting(1.0, "largest gradient norm; 0 turns clipping off")
    schedule: str = setting("wsd", "learning-rate schedule: wsd, cosine, constant")
    warmup_share: float = setting(0.04, "share of the steps that warm up linearly")
    decay_share: float = setting(0.6, "share of the steps in which wsd falls linearly")
    final_share: float = setting(0.02, "last learning rate as a share of the peak")

    def __post_init__(self) -> None:
        require(self.name in ("muon", "adamw"), "optim.name", self.name, "muon or adamw")
        require(self.lr is None or 0 < self.lr <= MOST, "optim.lr", self.lr, "more than 0, at most a million")
        require(0 < self.adamw_lr <= MOST, "optim.adamw_lr", self.adamw_lr, "more than 0, at most a million")
        require(
            self.schedule in ("wsd", "cosine", "constant"), "optim.schedule", self.schedule, "wsd, cosine or constant"
        )
        require(0 <= self.clip <= MOST_CLIP, "optim.clip", self.clip, f"0 to {MOST_CLIP:g}")
        require(0 <= self.weight_decay <= MOST, "optim.weight_decay", self.weight_decay, "0 to a million")
        for name in ("momentum", "beta1", "beta2"):
            value = getattr(self, name)
            require(0 <= value < 1, f"optim.{name}", value, "from 0 to below 1")
        for name in ("warmup_share", "decay_share", "final_share"):
            value = getattr(self, name)
            require(0 <= value <= 1, f"optim.{name}", value, "a share from 0 to 1")
        require_read(self, "optim", OPTIM_READ_WITH)


SINK_NAMES = ("tensorboard", "wandb", "trackio")


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainConfig:
    """From a store to a drafter."""

    store: str = setting("./store", "folder of the store", flag="--store")
    out: str = setting("./runs/drafter", "folder of the run (RUN)", flag="--out")
    devices: str = setting(
        "auto",
        "like 6,7, 0-3, cuda:0 or cpu, one trainer for each; auto: of eight GPUs those behind the first six, of fewer "
        "all, no more than rows.rows_per_step",
        flag="--devices",
    )
    epochs: float = setting(6.0, "passes over the store", flag="--epochs", idle_beside="steps")
    steps: int | None = setting(None, "optimizer updates, in place of --epochs", flag="--steps")
    stop_at: int | None = setting(
        None, "step to stop at for now, after an exam and a checkpoint; the schedule stays that of all steps"
    )
    seed: int = setting(0, "seed of the weights, the row order and the anchors", flag="--seed")
    partial: bool = setting(False, "train on what a running extraction has committed so far", flag="--partial")
    noise: float = setting(
        0.0, "uniform noise on the taps of training rows, from -noise to noise, in the states' own units; 0: none"
    )
    dtype: str = setting(
        "auto", "number format of the forward: auto (bfloat16 on CUDA, float32 on CPU), float32, bfloat16"
    )
    cuda_graph: str = setting(
        "auto", "run a row as one CUDA graph: auto (on CUDA), on, off (launch by launch; less memory beside exams)"
    )
    checkpointing: str = setting(
        "auto", "run layers a second time in the backward, for memory: auto (on CUDA where nothing else fits), on, off"
    )
    eval_every: int | None = setting(None, "steps between exams on the held-out split; default: a tenth of the run")
    eval_samples: int = setting(256, "most held-out samples in an exam, count")
    checkpoint_every: int | None = setting(None, "steps between checkpoints; default: a tenth of the run")
    keep: int = setting(2, "newest checkpoints kept beside the best, count")
    cpu_threads: int | None = setting(
        None, "torch threads of the trainer on a CPU; default: one below hidden size 512, else all cores"
    )
    loader_slots: int = setting(3, "rows the loader may be ahead, count")
    loader_threads: int | None = setting(
        None, "threads that read the store inside the loader, 1 to 4; default: half of a trainer's share of the cores"
    )
    sinks: tuple[str, ...] = setting(
        (), "where the numbers of metrics.jsonl go as well: any of tensorboard, wandb, trackio; each needs its package"
    )
    uncached: bool = setting(False, "leave nothing in the page cache, for a store that is larger than memory")
    stall_s: float = setting(600.0, "longest wait for the loader or a step (the first compiles on CUDA), seconds")
    drafter: DrafterConfig = section(DrafterConfig, "shape of the drafter")
    rows: RowsConfig = section(RowsConfig, "the shape of every row")
    loss: LossConfig = section(LossConfig, "loss")
    optim: OptimConfig = section(OptimConfig, "optimizer and schedule")

    def __post_init__(self) -> None:
        named_devices("cpu" if self.devices == "auto" else self.devices)  # raises for text that names none
        require(0 < self.epochs <= 1e6, "epochs", self.epochs, "more than 0, at most a million")
        steps, threads, reading = self.steps, self.cpu_threads, self.loader_threads
        require(steps is None or 0 <= steps <= MOST_STEPS, "steps", steps, f"0 to {MOST_STEPS:,} updates")
        require(self.stop_at is None or self.stop_at >= 0, "stop_at", self.stop_at, "0 or more updates")
        require(-(2**63) <= self.seed < 2**63, "seed", self.seed, "a signed 64-bit number")
        for name in ("eval_every", "checkpoint_every"):
            value = getattr(self, name)
            require(value is None or value >= 1, name, value, "at least 1 step")
        require(threads is None or 1 <= threads <= 1024, "cpu_threads", threads, "1 to 1,024 threads")
        require(self.eval_samples >= 1, "eval_samples", self.eval_samples, "at least 1 sample")
        require(self.keep >= 1, "keep", self.keep, "at least 1 checkpoint")
        require(reading is None or 1 <= reading <= 4, "loader_threads", reading, "1 to 4 threads")
        require(2 <= self.loader_slots <= 255, "loader_slots", self.loader_slots, "2 to 255 slots")
        require_wait("stall_s", self.stall_s)
        require(self.dtype in ("auto", "float32", "bfloat16"), "dtype", self.dtype, "auto, float32 or bfloat16")
        require(0 <= self.noise <= MOST, "noise", self.noise, "0 to a million")
        require(len(set(self.sinks)) == len(self.sinks), "sinks", self.sinks, "each sink once")
        for sink in self.sinks:
            require(sink in SINK_NAMES, "sinks", sink, " or ".join(SINK_NAMES))
        for name in ("cuda_graph", "checkpointing"):
            value = getattr(self, name)
            require(value in ("auto", "on", "off"), name, value, "auto, on or off")
