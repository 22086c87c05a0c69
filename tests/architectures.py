"""The five architectures of the published families, tiny."""

from __future__ import annotations

import functools

from transformers import ApertusConfig, GPTNeoXConfig, LlamaConfig, Olmo2Config, SmolLM3Config

VOCABULARY, CONTEXT, LAYERS = 97, 24, 2
SIZE = dict(
    vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=LAYERS, num_attention_heads=4,
    max_position_embeddings=CONTEXT, pad_token_id=0, bos_token_id=1, eos_token_id=2,
)  # fmt: skip
GROUPED = dict(num_key_value_heads=2, **SIZE)
ATTENTION = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"]
GATED = [*ATTENTION, "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]
NEOX = ["attention.query_key_value", "attention.dense", "mlp.dense_h_to_4h", "mlp.dense_4h_to_h"]
FAMILIES = {  # configuration, name of the list of blocks, linear layers of each block
    "gpt_neox": (functools.partial(GPTNeoXConfig, **SIZE), "gpt_neox.layers", NEOX),
    "llama": (functools.partial(LlamaConfig, **GROUPED), "model.layers", GATED),
    "olmo2": (functools.partial(Olmo2Config, **GROUPED), "model.layers", GATED),
    # one layer without rotary embeddings and with a sliding window
    "smollm3": (
        functools.partial(
            SmolLM3Config, **GROUPED, no_rope_layers=[1, 0], use_sliding_window=True, sliding_window=6,
            layer_types=["full_attention", "sliding_attention"],
        ),
        "model.layers",
        GATED,
    ),
    "apertus": (
        functools.partial(
            ApertusConfig, **GROUPED, rope_parameters={"rope_type": "default", "rope_theta": 10000.0}
        ),
        "model.layers",
        [*ATTENTION, "mlp.up_proj", "mlp.down_proj"],
    ),
}  # fmt: skip
