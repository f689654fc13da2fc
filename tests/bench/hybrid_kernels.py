"""Do the kernels for Gated DeltaNet record the states that plain torch records, and how fast is each.

Makes a random target of Qwen3.5 type, real widths and few layers, and records it through `HfTarget.record` with
the torch path of transformers, with flash-linear-attention, and with flash-linear-attention and causal-conv1d:
    python tests/bench/hybrid_kernels.py --dir DIR [--device cuda:0]
Errors are against the torch path in float32 (TF32 off there; Triton may use it), one number a sample; the torch path
in bfloat16 is the yardstick. Taps and the last layer are recorded, so that the share of full attention is the real one.
"""

import argparse
import importlib
import importlib.util
import json
import math
import statistics
import subprocess
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from dflash_offline.extract.targets.hf import HfTarget, load_target
from dflash_offline.extract.targets.make_tiny import make_tokenizer

# Modelling files of transformers choose their functions when they are imported: a variant is a process, and
# nothing above may import one. Each variant: the packages it uses, and the functions it leaves to torch.
CONV = {"causal_conv1d_fn", "causal_conv1d_update"}
RULE = {"chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule"}
PACKAGES = {"torch": (), "fla": ("fla",), "fla+conv1d": ("fla", "causal_conv1d")}
LEFT_TO_TORCH = {"torch": CONV | RULE, "fla": CONV, "fla+conv1d": set()}
ENTRY = {"fla": "fla.ops.gated_delta_rule", "causal_conv1d": "causal_conv1d"}
DISTRIBUTION = {"fla": "flash-linear-attention", "causal_conv1d": "causal-conv1d"}
LENGTHS = (130, 257, 401, 640, 911, 1297, 1700, 2048)
VARIANT_LIMIT_S = 600


def make_target(args: argparse.Namespace) -> None:
    """Writes a transformers folder with bf16 weights; every variant loads the same ones in each dtype."""
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

    third = math.ceil(args.head_dim / 8 / 3)
    rope = {
        "rope_type": "default",
        "rope_theta": 10_000_000.0,
        "partial_rotary_factor": 0.25,
        "mrope_section": [third, third, args.head_dim // 8 - 2 * third],
    }
    config = Qwen3_5TextConfig(
        vocab_size=args.vocabulary,
        hidden_size=args.hidden,
        intermediate_size=args.intermediate,
        num_hidden_layers=args.layers,
        num_attention_heads=args.heads,
        num_key_value_heads=args.kv_heads,
        head_dim=args.head_dim,
        linear_num_key_heads=args.linear_key_heads,
        linear_num_value_heads=args.linear_value_heads,
        linear_key_head_dim=args.linear_head_dim,
        linear_value_head_dim=args.linear_head_dim,
        linear_conv_kernel_dim=4,
        rope_parameters=rope,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    with torch.device(args.device):
        torch.set_default_dtype(torch.bfloat16)
        model: Any = Qwen3_5ForCausalLM(config)
        torch.set_default_dtype(torch.float32)
    remember(model)
    model.save_pretrained(args.dir / "target")
    make_tokenizer(0).save_pretrained(args.dir / "target")
    count = sum(parameter.numel() for parameter in model.parameters())
    (args.dir / "parameters.json").write_text(json.dumps(count))
    print(f"target of {count / 1e6:,.1f} M parameters, layers: {', '.join(config.layer_types or ())}", flush=True)


@torch.no_grad()
def remember(model: Any) -> None:
    """Draws the time steps from 0.001..0.1, as fla/layers/gated_deltanet.py does.

    With the ones of transformers nearly all heads forget within a few tokens, and an error in
    the state that one chunk hands to the next would not show.
    """
    for name, bias in model.named_parameters():
        if name.endswith("dt_bias"):
            dt = torch.exp(torch.rand(bias.shape) * math.log(100) + math.log(0.001))  # [value heads]
            bias.copy_(dt + torch.log(-torch.expm1(-dt)))  # softplus(bias) = dt


def use_only(variant: str) -> None:
    """Hides what the variant does not use and imports what it does, so that a broken package says why."""
    assert "transformers.models.qwen3_5.modeling_qwen3_5" not in sys.modules, "too late to choose"
    for package, entry in ENTRY.items():
        if package in PACKAGES[variant]:
            importlib.import_module(entry)
        else:
            sys.modules[package] = None  # type: ignore[assignment]


def record_samples(args: argparse.Namespace, target: HfTarget) -> list[torch.Tensor]:
    """The states of each sample [Lt + 1, S, H], recorded one by one; the last layer's are the last."""
    draw = np.random.default_rng(1)
    states = []
    for length in args.lengths:
        ids = torch.from_numpy(draw.integers(6, 500, (1, length)))  # [1, S]
        taps, last = target.record(ids, torch.tensor([length]), tuple(range(args.layers - 1)), last=True)
        assert last is not None
        states.append(torch.cat([taps, last[None]])[:, 0, :length].cpu())
    return states


def measure_rate(args: argparse.Namespace, target: HfTarget) -> float:
    """Positions a second: the median of the timed repetitions."""
    count = max(1, args.token_budget // args.batch_length)
    ids = torch.from_numpy(np.random.default_rng(2).integers(6, 500, (count, args.batch_length)))  # [N, S]
    lengths = torch.full((count,), args.batch_length)
    walls = []
    for repetition in range(2 + args.repetitions):
        wait_for(args.device)
        started = time.perf_counter()
        target.record(ids, lengths, tuple(range(args.layers - 1)), last=True)
        wait_for(args.device)
        if repetition >= 2:  # the first two warm up
            walls.append(time.perf_counter() - started)
    shown = ", ".join(f"{1e3 * wall:.1f}" for wall in walls)
    print(f"{args.variant}: {count} samples of {args.batch_length} positions in {shown} ms", flush=True)
    return ids.numel() / statistics.median(walls)


def wait_for(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize(device)


def run_variant(args: argparse.Namespace) -> None:
    """Records the samples in each dtype, checks what really ran, and measures the rate in --dtype."""
    use_only(args.variant)
    if args.device != "cpu":
        torch.cuda.set_device(args.device)
    torch.backends.cudnn.allow_tf32 = False  # the convolution of the float32 reference
    torch.backends.cuda.matmul.allow_tf32 = False
    for dtype in dtypes_of(args):
        started = time.perf_counter()
        target = load_target(str(args.dir / "target"), device=args.device, dtype=dtype)
        loaded_s = time.perf_counter() - started
        states = record_samples(args, target)
        recorded_s = time.perf_counter() - started - loaded_s
        print(f"{args.variant}, {dtype}: loaded in {loaded_s:.1f} s, recorded in {recorded_s:.1f} s", flush=True)
        left = {kernel.function for kernel in target.kernels if not kernel.is_fast}
        if not target.kernels or left != LEFT_TO_TORCH[args.variant]:
            sys.exit(
                f"{args.variant}: transformers left {sorted(left)} to torch, "
                f"expected {sorted(LEFT_TO_TORCH[args.variant])}; nothing of this variant counts"
            )
        torch.save(states, states_path(args, args.variant, dtype))
        if dtype == args.dtype:
            rate_path(args, args.variant).write_text(json.dumps(measure_rate(args, target)))
        del target, states
    left = LEFT_TO_TORCH[args.variant]
    print(f"{args.variant}: left to torch: {', '.join(sorted(left)) or 'nothing'}", flush=True)


def dtypes_of(args: argparse.Namespace) -> list[str]:
    return list(dict.fromkeys((args.dtype, "float32")))


def states_path(args: argparse.Namespace, variant: str, dtype: str) -> Path:
    return args.dir / f"states {variant} {dtype}.pt"


def rate_path(args: argparse.Namespace, variant: str) -> Path:
    return args.dir / f"rate {variant}.json"


def start(args: argparse.Namespace, step: str) -> bool:
    """Runs one step of this script in a process of its own; False when it failed."""
    started = time.perf_counter()
    command = [sys.executable, __file__, *sys.argv[1:], "--variant", step]
    code = subprocess.run(command, timeout=VARIANT_LIMIT_S).returncode
    print(
        f"{step}: {time.perf_counter() - started:.0f} s in all{'' if code == 0 else f', FAILED ({code})'}", flush=True
    )
    return code == 0


def why_not(args: argparse.Namespace, variant: str) -> str | None:
    """Why this machine cannot run a variant, None when it can."""
    missing = [name for name in PACKAGES[variant] if importlib.util.find_spec(name) is None]
    if missing:
        return " and ".join(f"{DISTRIBUTION[name]} is not installed" for name in missing)
    if PACKAGES[variant] and args.device == "cpu":
        return "its kernels need a GPU"
    return None


def relative_errors(states: list[torch.Tensor], reference: list[torch.Tensor]) -> list[float]:
    """||states - reference|| / ||reference||, one number a sample, over all layers and positions."""
    return [float((a.double() - b.double()).norm() / b.double().norm()) for a, b in zip(states, reference, strict=True)]


def compare(args: argparse.Namespace) -> list[dict[str, Any]]:
    """The rows of errors of all states that were recorded; prints them sample by sample."""
    reference = torch.load(states_path(args, "torch", "float32"))
    errors = {}
    for variant in PACKAGES:
        for dtype in dtypes_of(args):
            path = states_path(args, variant, dtype)
            if path.exists() and (variant, dtype) != ("torch", "float32"):
                errors[f"{variant} {dtype}"] = relative_errors(torch.load(path), reference)
    print("relative L2 error against torch float32, by sample")
    print(f"{'positions':>9}", *(f"{name:>20}" for name in errors))
    for index, length in enumerate(args.lengths):
        print(f"{length:9}", *(f"{found[index]:20.2e}" for found in errors.values()))
    rows = []
    for name, found in errors.items():
        assert all(math.isfinite(error) for error in found), f"{name}: states that are not finite"
        for which, value in (("worst", max(found)), ("median", statistics.median(found))):
            rows.append({"name": f"error {name} {which} sample", "value": float(f"{value:.3g}"), "unit": "relative L2"})
    return rows


def compare_rates(args: argparse.Namespace) -> list[dict[str, Any]]:
    paths = {variant: rate_path(args, variant) for variant in PACKAGES}
    rates = {variant: json.loads(path.read_text()) for variant, path in paths.items() if path.exists()}
    rows: list[dict[str, Any]] = [
        {"name": f"rate {variant}", "value": round(rate), "unit": "positions/s"} for variant, rate in rates.items()
    ]
    for fast, slow in (("fla", "torch"), ("fla+conv1d", "fla")):
        if fast in rates and slow in rates:
            share = round(rates[fast] / rates[slow], 3)
            rows.append({"name": f"rate {fast} over {slow}", "value": share, "unit": "ratio"})
    return rows


def installed_version(distribution: str) -> str:
    try:
        return f"{distribution} {version(distribution)}"
    except PackageNotFoundError:
        return f"no distribution {distribution}"


def run_all(args: argparse.Namespace) -> int:
    """Starts each step, prints the table and the JSON line; 1 when a step failed, even in part."""
    args.dir.mkdir(parents=True, exist_ok=True)
    for old in (*args.dir.glob("states *.pt"), *args.dir.glob("rate *.json")):
        old.unlink()
    print(", ".join(map(installed_version, ("torch", "transformers", *DISTRIBUTION.values()))), flush=True)
    if not start(args, "weights"):
        return 1
    is_whole = True
    for variant in PACKAGES:
        reason = why_not(args, variant)
        if reason:
            print(f"{variant}: left out, {reason}", flush=True)
        elif not start(args, variant):
            is_whole = False
            if variant == "torch":
                return 1
    count = json.loads((args.dir / "parameters.json").read_text())
    rows: list[dict[str, Any]] = [{"name": "parameters", "value": round(count / 1e6, 1), "unit": "million"}]
    rows += compare(args) + compare_rates(args)
    for row in rows:
        print(f"{row['name']:44} {row['value']:>12} {row['unit']}")
    print(json.dumps({"bench": "hybrid_kernels", "rows": rows}))
    return 0 if is_whole else 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, required=True)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--dtype", default="bfloat16", help="dtype of the rates, compared beside float32")
    widths = {"hidden": 5120, "intermediate": 17408, "layers": 4, "vocabulary": 4096, "heads": 24, "kv-heads": 4}
    widths |= {"head-dim": 256, "linear-key-heads": 16, "linear-value-heads": 48, "linear-head-dim": 128}
    for name, default in widths.items():  # the defaults are the widths of Qwen3.5-27B
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS, help="of the samples to compare")
    parser.add_argument("--token-budget", type=int, default=8192, help="positions a timed batch")
    parser.add_argument("--batch-length", type=int, default=1024, help="of each sample of a timed batch")
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--variant", choices=("weights", *PACKAGES), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.variant is None:
        sys.exit(run_all(args))
    make_target(args) if args.variant == "weights" else run_variant(args)


if __name__ == "__main__":
    main()
