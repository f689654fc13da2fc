"""Makes the tiny targets: a byte-level tokenizer and a dense or hybrid model of 1.1 or 1.6 M parameters.

Run `python -m dflash_offline.extract.targets.make_tiny --out DIR`, with `--kind hybrid` for the
one with Gated DeltaNet. It trains on the corpus of `tasks.py` (answers only), scores held-out
prompts, and writes an ordinary transformers folder with bf16 weights. The committed folders
`tiny-qwen3` and `tiny-qwen3.5` are what this script wrote; their READMEs hold the figures. The
seed fixes data, weights and order; the last digits of the weights still depend on the machine's
float order.
"""

import argparse
import json
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from .kernels import hide_gpu_kernels
from .tasks import Task, distinct_tasks, tasks

SPECIALS = ["<|pad|>", "<|user|>", "<|assistant|>", "<|end|>", "<|mask|>"]
CHAT_TEMPLATE = """\
{%- for message in messages -%}
{%- if message['role'] not in ['user', 'assistant'] -%}
{{- raise_exception('the tiny target knows the roles user and assistant only') -}}
{%- endif -%}
{{- '<|' + message['role'] + '|>' + (message['content'] or '') + '<|end|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}
"""
PAD, END = SPECIALS.index("<|pad|>"), SPECIALS.index("<|end|>")
VOCABULARY = 512
MAX_LENGTH = 1024
SAMPLES_PER_STEP = 24
POOL = 32 * SAMPLES_PER_STEP


def make_tokenizer(seed: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE of 512 ids, digits one by one, learnt from 4,000 training tasks."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=SPECIALS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    source = tasks(seed, held_out=False)
    core.train_from_iterator((f"{t.prompt}\n{t.answer}" for t, _ in zip(source, range(4000))), trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="<|pad|>",
        eos_token="<|end|>",
        mask_token="<|mask|>",
        additional_special_tokens=["<|user|>", "<|assistant|>"],
        model_max_length=MAX_LENGTH,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 320,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": MAX_LENGTH,
    "tie_word_embeddings": True,
    "pad_token_id": PAD,
    "eos_token_id": END,
    "bos_token_id": None,
}


def make_dense() -> Any:
    """An untrained Qwen3 network; six layers, so that five taps fit below the last one."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    rope = {"rope_type": "default", "rope_theta": 10000.0}
    return Qwen3ForCausalLM(Qwen3Config(**SHAPE, num_hidden_layers=6, rope_parameters=rope))


def make_hybrid() -> Any:
    """An untrained Qwen3.5 network; eight layers, every fourth of full attention as in the family."""
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

    rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5, "mrope_section": [4, 2, 2]}
    config = Qwen3_5TextConfig(
        **SHAPE,
        num_hidden_layers=8,
        linear_num_value_heads=4,
        linear_num_key_heads=2,
        linear_key_head_dim=32,
        linear_value_head_dim=32,
        rope_parameters=rope,
    )
    return Qwen3_5ForCausalLM(config)


KINDS: dict[str, Callable[[], Any]] = {"dense": make_dense, "hybrid": make_hybrid}


def encode(tokenizer: PreTrainedTokenizerFast, task: Task) -> tuple[list[int], int]:
    """Token ids of prompt and answer, and the length of the prompt part."""
    prompt = [{"role": "user", "content": task.prompt}]
    chat = [*prompt, {"role": "assistant", "content": task.answer}]
    start: Any = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=False)
    whole: Any = tokenizer.apply_chat_template(chat, return_dict=False)
    return whole, len(start)


def batches(tokenizer: PreTrainedTokenizerFast, seed: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Endless (ids, labels) of similar lengths, right-padded; labels are -100 outside answers."""
    source, order = tasks(seed, held_out=False), random.Random(seed)
    while True:
        pool = sorted((encode(tokenizer, next(source)) for _ in range(POOL)), key=lambda s: len(s[0]))
        groups = [pool[i : i + SAMPLES_PER_STEP] for i in range(0, POOL, SAMPLES_PER_STEP)]
        order.shuffle(groups)
        for group in groups:
            width = max(len(ids) for ids, _ in group)
            ids = torch.full((len(group), width), PAD)  # [samples, width]
            labels = torch.full_like(ids, -100)  # [samples, width]
            for row, (tokens, start) in enumerate(group):
                ids[row, : len(tokens)] = torch.tensor(tokens)
                labels[row, start : len(tokens)] = torch.tensor(tokens[start:])
            yield ids, labels


def optimizers(model: Any) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of the layers, AdamW for the embedding and the norms."""
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n]
    rest = [p for n, p in model.named_parameters() if p.ndim != 2 or "embed" in n]
    return [
        torch.optim.Muon(matrices, lr=0.02, momentum=0.95, weight_decay=0.0),
        torch.optim.AdamW(rest, lr=3e-3, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def train(model: Any, tokenizer: PreTrainedTokenizerFast, steps: int, seed: int) -> None:
    """Trains in place: warm-up 20 steps, flat to 40 %, linear to zero."""
    opts, source, started = optimizers(model), batches(tokenizer, seed), time.process_time()
    base = [opt.param_groups[0]["lr"] for opt in opts]
    for step in range(steps):
        scale = min(1.0, (step + 1) / 20, (steps - step) / (0.6 * steps))
        for opt, lr in zip(opts, base):
            opt.param_groups[0]["lr"] = lr * scale
        ids, labels = (part.to(model.device) for part in next(source))
        logits = model(ids, use_cache=False).logits[:, :-1]
        loss = F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten())
        loss.backward()
        for opt in opts:
            opt.step()
            opt.zero_grad()
        if step % 100 == 0 or step == steps - 1:
            cpu = time.process_time() - started
            print(f"step {step} of {steps}  loss {loss.item():.4f}  {cpu:.0f} CPU-s", flush=True)


@torch.no_grad()
def exact_answers(model: Any, tokenizer: PreTrainedTokenizerFast, exam: list[Task]) -> dict[str, list[bool]]:
    """Whether each greedy answer is the right one, by kind of task.

    Greedy decoding writes the right answer exactly where each of its tokens is the likeliest one
    after the right text before it, so one forward decides.
    """
    result: dict[str, list[bool]] = {}
    for task in exam:
        ids, start = encode(tokenizer, task)
        chosen = model(torch.tensor([ids], device=model.device), use_cache=False).logits[0].argmax(-1).tolist()
        result.setdefault(task.kind, []).append(chosen[start - 1 : -1] == ids[start:])
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--kind", choices=sorted(KINDS), default="dense")
    parser.add_argument("--steps", type=int, default=4200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--exam", type=int, default=256, help="held-out prompts to score")
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    torch.set_num_threads(1)
    hide_gpu_kernels(args.device)
    tokenizer = make_tokenizer(args.seed)
    torch.manual_seed(args.seed)
    model = KINDS[args.kind]().to(args.device)
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters", flush=True)
    train(model, tokenizer, args.steps, args.seed)
    rounded: Any = model.bfloat16()
    rounded.save_pretrained(args.out)
    tokenizer.save_pretrained(args.out)
    scores = exact_answers(rounded.float().eval(), tokenizer, distinct_tasks(args.exam, args.seed, held_out=True))
    report = {kind: f"{sum(hits)}/{len(hits)}" for kind, hits in sorted(scores.items())}
    total = [hit for hits in scores.values() for hit in hits]
    print(json.dumps(report), f"exact: {sum(total)}/{len(total)}")


if __name__ == "__main__":
    main()
