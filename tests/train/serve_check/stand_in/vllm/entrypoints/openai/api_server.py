"""Stands in for vLLM's server in fast tests: the same command line, requests and counters, served by our own decoding.

It reads the exported folder as an engine does, from its files alone. `STAND_IN` may hold one fault: `head` (drafts from
a wrong head), `tokens` (another tokenizer), `answers` (another target), `exit` (ends at the first prompt).
"""

import argparse
import json
import os
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import torch
from dflash_offline.extract.targets.hf import load_target
from dflash_offline.train.drafter import Drafter
from dflash_offline.train.evaluate.decode import decode
from dflash_offline.train.evaluate.drafting import DrafterProposer
from dflash_offline.train.export.folders import read_drafter_folder

FAULT = os.environ.get("STAND_IN", "")


class Engine:
    """A target with a drafter, and the counters of all requests."""

    def __init__(self, args: argparse.Namespace) -> None:
        speculative = json.loads(args.speculative_config) if args.speculative_config else {"model": args.model}
        folder, tensors = read_drafter_folder(Path(speculative["model"]))
        self.target = load_target(args.model if args.speculative_config else folder.target["name"], dtype=args.dtype)
        self.drafter = Drafter(folder.fitted(self.target.facts.as_plain()))
        self.drafter.load_state_dict(tensors)
        self.drafter.to(getattr(torch, args.dtype)).eval()
        parts, _ = self.target.frozen()
        self.embedding = parts["embedding"].to(self.drafter.fc.weight)
        self.head = torch.zeros_like(self.embedding) if FAULT == "head" else parts.get("head", self.embedding)
        self.accepted: list[int] = []

    def answer(self, prompt: list[int], limit: int) -> list[int]:
        """Decodes on behind the end, as the checks of an engine look behind it; only the answer is given."""
        spec, stops = self.drafter.spec, self.target.facts.eos_ids
        done = decode(
            self.target.open(spec.tap_layers),
            DrafterProposer(self.drafter, self.embedding, self.head.to(self.embedding), "float32"),
            prompt,
            block_size=spec.block_size,
            max_new_tokens=limit + spec.block_size,
            stop_ids=[],
        )
        stop = next((k + 1 for k, token in enumerate(done.tokens) if token in stops), limit)
        end, known = min(stop, limit), 1
        for cycle in done.cycles:
            if known >= end:
                break
            self.accepted.append(cycle.accepted)
            known += cycle.produced
        return [7, *done.tokens[1:end]] if FAULT == "answers" else done.tokens[:end]

    def metrics(self) -> str:
        lines = [f'vllm:spec_decode_num_drafts_total{{engine="0"}} {float(len(self.accepted))}']
        for place in range(self.drafter.spec.block_size - 1):
            count = sum(accepted > place for accepted in self.accepted)
            lines.append(
                f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",position="{place}"}} {float(count)}'
            )
        return "\n".join(lines) + "\n"

    def tokenize(self, body: dict[str, Any]) -> list[int]:
        text = body.get("prompt")
        if text is None:
            text = self.target.tokenizer.apply_chat_template(
                body["messages"], tokenize=False, add_generation_prompt=body["add_generation_prompt"]
            )
        ids = self.target.tokenizer(text, add_special_tokens=False)["input_ids"]
        return [*ids[:-1], 9] if FAULT == "tokens" else ids


class Handler(BaseHTTPRequestHandler):
    engine: Engine

    def reply(self, text: str) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(text.encode())

    def do_GET(self) -> None:
        self.reply(self.engine.metrics() if self.path == "/metrics" else "")

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/tokenize":
            self.reply(json.dumps({"tokens": self.engine.tokenize(body)}))
            return
        if FAULT == "exit":
            print("RuntimeError: the stand-in ends here", flush=True)
            os._exit(7)
        assert body["temperature"] == 0
        tokens = self.engine.answer(body["prompt"], body["max_tokens"])
        self.reply(json.dumps({"choices": [{"token_ids": tokens}]}))

    def log_message(self, format: str, *args: Any) -> None:
        print(format % args, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("model", "speculative-config", "served-model-name", "host", "dtype"):
        parser.add_argument(f"--{name}")
    for name in ("port", "max-model-len"):
        parser.add_argument(f"--{name}", type=int)
    parser.add_argument("--enforce-eager", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    Handler.engine = Engine(args)
    HTTPServer((args.host, args.port), Handler).serve_forever()


main()
