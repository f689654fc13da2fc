"""Small configs of the families that the tests prove, and those that are refused.

docs/targets.md holds a table of them, made here: `python tests/support/target_families.py`.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[2] / "docs" / "targets.md"
FIRST, LAST = "<!-- verified families -->\n", "<!-- end of verified families -->"
BASE: dict[str, Any] = {
    "vocab_size": 262,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
MIXED = ["sliding_attention"] * 3 + ["full_attention"]
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
SHARED = EXPERTS | {"shared_expert_intermediate_size": 32}
ROUTED = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_group": 1, "topk_group": 1}
LATENT = ROUTED | {  # latent attention: head_dim follows from these
    "num_key_value_heads": 4,
    "first_k_dense_replace": 1,
    "q_lora_rank": 32,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "head_dim": None,
}
INDEXED = LATENT | {"index_topk": 8, "index_head_dim": 16, "index_n_heads": 16}  # 16 heads: equal scores are rare
GATED_DELTA = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
SECTIONS = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 3, 3]}
QWEN_VISION = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 64}
VISION = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}


@dataclass(frozen=True, kw_only=True)
class Family:
    """A family as docs/targets.md names it, and what its small config adds to BASE."""

    title: str
    model_type: str
    fields: dict[str, Any] = field(default_factory=dict)
    is_tied: bool = False
    is_recurrent: bool = False
    vision: dict[str, Any] | None = None
    """Of a multimodal wrapper: `model_type` and `fields` are then those of its text part, `wrapper` its own."""
    wrapper: str = ""
    kind: str = "dense"
    theta: float = 10000.0
    head_dim: int = 16

    def text(self) -> dict[str, Any]:
        fields = BASE | self.fields | {"tie_word_embeddings": self.is_tied}
        return {key: value for key, value in fields.items() if key != "head_dim" or value is not None}


VERIFIED: dict[str, Family] = {
    "llama": Family(title="Llama 2, 3", model_type="llama"),
    "llama-tied": Family(title="Llama 3.2, SmolLM2 (tied head)", model_type="llama", is_tied=True),
    "llama4": Family(
        title="Llama 4 (text)",
        model_type="llama4_text",
        fields={"num_local_experts": 4, "intermediate_size_mlp": 96},
        kind="MoE",
        theta=500000.0,
    ),
    "qwen2": Family(title="Qwen2, Qwen2.5", model_type="qwen2"),
    "qwen3": Family(title="Qwen3", model_type="qwen3", is_tied=True),
    "qwen3-windows": Family(
        title="Qwen3 with sliding windows",
        model_type="qwen3",
        fields={"layer_types": MIXED, "sliding_window": 8, "use_sliding_window": True},
    ),
    "mistral": Family(title="Mistral", model_type="mistral", fields={"sliding_window": 8}),
    "gemma2": Family(title="Gemma 2", model_type="gemma2", fields={"sliding_window": 8}, is_tied=True),
    "gemma3": Family(
        title="Gemma 3 (text)",
        model_type="gemma3_text",
        fields={"sliding_window": 8, "layer_types": MIXED},
        is_tied=True,
        theta=1e6,
    ),
    "gemma4": Family(
        title="Gemma 4 (text)", model_type="gemma4_text", fields={"layer_types": MIXED}, is_tied=True, theta=1e6
    ),
    "glm4": Family(title="GLM-4", model_type="glm4"),
    "phi3": Family(title="Phi-3, Phi-4", model_type="phi3", fields={"sliding_window": 8}),
    "granite": Family(
        title="Granite",
        model_type="granite",
        fields={"embedding_multiplier": 12.0, "logits_scaling": 8.0, "residual_multiplier": 0.5},
    ),
    "olmo2": Family(title="OLMo 2", model_type="olmo2"),
    "olmo3": Family(
        title="OLMo 3", model_type="olmo3", fields={"sliding_window": 8, "layer_types": MIXED}, theta=500000.0
    ),
    "smollm3": Family(title="SmolLM3", model_type="smollm3", is_tied=True, theta=2e6),
    "seed-oss": Family(title="Seed-OSS", model_type="seed_oss"),
    "qwen3-moe": Family(title="Qwen3-MoE", model_type="qwen3_moe", fields=EXPERTS, kind="MoE"),
    "mixtral": Family(
        title="Mixtral",
        model_type="mixtral",
        fields={"num_local_experts": 4, "num_experts_per_tok": 2},
        kind="MoE",
        theta=1e6,
    ),
    "gpt-oss": Family(
        title="GPT-OSS",
        model_type="gpt_oss",
        fields={"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8},
        kind="MoE",
        theta=150000.0,
    ),
    "glm4-moe": Family(title="GLM-4.5, GLM-4.6", model_type="glm4_moe", fields=ROUTED, kind="MoE"),
    "glm-moe-dsa": Family(
        title="GLM-5 (sparse attention)", model_type="glm_moe_dsa", fields=INDEXED, kind="MoE", head_dim=8
    ),
    "deepseek-v3": Family(
        title="DeepSeek-V3, Kimi-K2", model_type="deepseek_v3", fields=LATENT, kind="MoE", head_dim=8
    ),
    "deepseek-v32": Family(
        title="DeepSeek-V3.2 (sparse attention)", model_type="deepseek_v32", fields=INDEXED, kind="MoE", head_dim=8
    ),
    "minimax-m2": Family(
        title="MiniMax-M2",
        model_type="minimax_m2",
        fields={"num_local_experts": 4, "num_experts_per_tok": 2},
        kind="MoE",
        theta=5e6,
    ),
    "qwen3-next": Family(
        title="Qwen3-Next", model_type="qwen3_next", fields=SHARED | GATED_DELTA, kind="hybrid MoE", is_recurrent=True
    ),
    "qwen3.5": Family(
        title="Qwen3.5 (text)", model_type="qwen3_5_text", fields=GATED_DELTA, kind="hybrid", is_recurrent=True
    ),
    "qwen3.5-moe": Family(
        title="Qwen3.5-MoE (text)",
        model_type="qwen3_5_moe_text",
        fields=SHARED | GATED_DELTA,
        kind="hybrid MoE",
        is_recurrent=True,
    ),
    "nemotron-h": Family(
        title="Nemotron-H",
        model_type="nemotron_h",
        fields={
            "layers_block_type": ["mamba", "moe", "attention", "mamba"],
            "mamba_num_heads": 4,
            "mamba_head_dim": 16,
            "ssm_state_size": 16,
            "n_groups": 2,
            "chunk_size": 16,
        }
        | ROUTED,
        kind="hybrid MoE",
        is_recurrent=True,
    ),
    "lfm2": Family(
        title="LFM2",
        model_type="lfm2",
        fields={"layer_types": ["conv", "conv", "full_attention", "conv"]},
        kind="hybrid",
        is_tied=True,
        is_recurrent=True,
        theta=1e6,
    ),
    "gemma3-wrapper": Family(
        title="Gemma 3 (multimodal)",
        model_type="gemma3_text",
        wrapper="gemma3",
        fields={"sliding_window": 8, "layer_types": MIXED},
        vision=VISION | {"model_type": "siglip_vision_model"},
        is_tied=True,
        theta=1e6,
    ),
    "mistral3-wrapper": Family(
        title="Mistral Small 3 (multimodal)",
        model_type="mistral",
        wrapper="mistral3",
        fields={"sliding_window": None},
        vision=VISION | {"model_type": "pixtral"},
    ),
    "qwen3-vl-wrapper": Family(
        title="Qwen3-VL",
        model_type="qwen3_vl_text",
        wrapper="qwen3_vl",
        fields={"rope_parameters": SECTIONS},
        vision=QWEN_VISION | {"deepstack_visual_indexes": [0]},
        theta=1e6,
    ),
    "qwen3.5-wrapper": Family(
        title="Qwen3.5 (multimodal)",
        model_type="qwen3_5_text",
        wrapper="qwen3_5",
        fields=GATED_DELTA,
        vision=QWEN_VISION,
        kind="hybrid",
        is_recurrent=True,
    ),
    "qwen3.5-moe-wrapper": Family(
        title="Qwen3.5-MoE (multimodal)",
        model_type="qwen3_5_moe_text",
        wrapper="qwen3_5_moe",
        fields=SHARED | GATED_DELTA,
        vision=QWEN_VISION,
        kind="hybrid MoE",
        is_recurrent=True,
    ),
}

REFUSED: dict[str, tuple[Family, str]] = {
    "cohere": (Family(title="Cohere", model_type="cohere", is_tied=True), "CohereLayerNorm is no RMSNorm"),
    "olmo": (Family(title="OLMo", model_type="olmo"), "OlmoLayerNorm has no weight"),
    "starcoder2": (Family(title="StarCoder2", model_type="starcoder2"), "LayerNorm is no RMSNorm"),
    "phi": (Family(title="Phi-1, Phi-2", model_type="phi"), "its decoder is a PhiModel"),
    "gpt-neox": (Family(title="GPT-NeoX", model_type="gpt_neox"), "its decoder is a GPTNeoXModel"),
    "deepseek-v4": (
        Family(title="DeepSeek-V4", model_type="deepseek_v4", fields=LATENT, head_dim=8),
        r"layer 0 of the target \(DeepseekV4DecoderLayer\) gives states",
    ),
}


def table() -> str:
    """The rows of docs/targets.md."""
    rows = [
        f"| {one.title} | `{one.wrapper or one.model_type}` | {one.kind} | "
        f"{'tied' if one.is_tied else 'own'} | {'yes' if one.is_recurrent else ''} |"
        for one in VERIFIED.values()
    ]
    return "\n".join(["| Family | `model_type` | Kind | Head | Recurrent |", "| --- | --- | --- | --- | --- |", *rows])


def with_table(page: str) -> str:
    before, _, rest = page.partition(FIRST)
    return before + FIRST + table() + "\n" + rest[rest.index(LAST) :]


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
