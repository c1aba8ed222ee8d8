"""Phi 3, 3.5 and 4 (Abdin et al. 2024): Llama with q, k and v in one tensor, gate and up in another, RoPE over halves
of a part of each head, and LongRoPE where the file has its factors (`Decoder.long_rope` says which of them)."""

from segue.models.decoder import Decoder
from segue.models.program import Program


def build(decoder: Decoder) -> Program:
    """Raises ModelFileError when the file cannot be computed exactly as it says."""
    rope = decoder.long_rope()
    ops = decoder.embed()
    for layer, window in enumerate(decoder.windows(period=0)):
        ops += [
            decoder.rms_norm(f"blk.{layer}.attn_norm"),
            decoder.qkv(layer, fused=True),
            decoder.attention(layer, rope, window=window),
            decoder.attn_output(layer),
            decoder.rms_norm(f"blk.{layer}.ffn_norm"),
            *decoder.glu(layer, fused=True),
            decoder.ffn_down(layer),
        ]
    return decoder.program([*ops, decoder.rms_norm("output_norm"), *decoder.logits()])
