"""OLMo 2 (OLMo team 2024): Llama whose norms are behind each branch and not before it, with all heads of q normalised
together, and those of k."""

from segue.models.decoder import Decoder
from segue.models.program import Program


def build(decoder: Decoder) -> Program:
    """Raises ModelFileError when the file cannot be computed exactly as it says."""
    rope = decoder.rope(interleaved=False)
    ops = decoder.embed()
    for layer in range(decoder.sizes.layers):
        ops += [
            decoder.qkv(layer, "x"),
            *decoder.norm_all_heads(layer),
            decoder.attention(layer, rope),
            *decoder.normed_branch(decoder.attn_output(layer), f"blk.{layer}.post_attention_norm"),
            *decoder.glu(layer, x="x"),
            *decoder.normed_branch(decoder.ffn_down(layer), f"blk.{layer}.post_ffw_norm"),
        ]
    return decoder.program([*ops, decoder.rms_norm("output_norm"), *decoder.logits()])
