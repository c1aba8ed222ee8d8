"""The Llama family (Touvron et al. 2023): what GGUF calls "llama", with SmolLM2, TinyLlama and Mistral among them.

x = embed(tokens)
each layer:  x += attn_output · attention(rope(q, k), v)    of RMSNorm(x)
             x += ffn_down · (silu(gate) · up)              of RMSNorm(x)
logits = output · RMSNorm(x)                                output is token_embd when tied

Mistral (Jiang et al. 2023) attends to a window in all layers, where the file says so. Mixtral (Jiang et al. 2024) has
experts in place of one network.
"""

from segue.models.decoder import Decoder
from segue.models.program import Program


def build(decoder: Decoder) -> Program:
    """Raises ModelFileError when the file cannot be computed exactly as it says."""
    rope = decoder.rope(interleaved=True)
    ops = decoder.embed()
    for layer, window in enumerate(decoder.windows(period=0)):
        ops += [
            decoder.rms_norm(f"blk.{layer}.attn_norm"),
            decoder.qkv(layer, biases=True),
            decoder.attention(layer, rope, window=window),
            decoder.attn_output(layer, biases=True),
            decoder.rms_norm(f"blk.{layer}.ffn_norm"),
            *decoder.network(layer),
        ]
    return decoder.program([*ops, decoder.rms_norm("output_norm"), *decoder.logits()])
