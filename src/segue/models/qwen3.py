"""Qwen 3 (Yang et al. 2025): Llama with each head of q and k normalised, and RoPE over halves of a head;
and its models with experts ("qwen3moe")."""

from segue.models.decoder import Decoder
from segue.models.program import Program


def build(decoder: Decoder) -> Program:
    """Raises ModelFileError when the file cannot be computed exactly as it says."""
    rope = decoder.rope(interleaved=False)
    ops = decoder.embed()
    for layer in range(decoder.sizes.layers):
        ops += [
            decoder.rms_norm(f"blk.{layer}.attn_norm"),
            decoder.qkv(layer),
            *decoder.norm_heads(layer),
            decoder.attention(layer, rope),
            decoder.attn_output(layer),
            decoder.rms_norm(f"blk.{layer}.ffn_norm"),
            *decoder.network(layer),
        ]
    return decoder.program([*ops, decoder.rms_norm("output_norm"), *decoder.logits()])
