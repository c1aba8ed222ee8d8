"""Gemma 2 (Riviere et al. 2024).

x = √hidden · embed(tokens)
each layer:  x += RMSNorm(attn_output · attention(rope(q, k), v))   of RMSNorm(x)
             x += RMSNorm(ffn_down · (gelu(gate) · up))             of RMSNorm(x)
logits = softcap(output · RMSNorm(x))

Every other layer attends to a window, the first one among them, and scores are soft-capped. The file's norm weights
have the 1 of Gemma's definition (1 + w) added already.
"""

import math

from segue.models.decoder import Decoder
from segue.models.program import Program

_LAYERS_OF_27B = 46
_FIRST_FILES_WINDOW = 4096


def build(decoder: Decoder) -> Program:
    """Raises ModelFileError when the file cannot be computed exactly as it says."""
    sizes = decoder.sizes
    rope = decoder.rope(interleaved=False)
    softcap = decoder.cap("attn_logit_softcapping")
    # The largest model scales by what would be the size of its heads if they filled the stream.
    scale = math.sqrt(sizes.heads / sizes.hidden) if sizes.layers == _LAYERS_OF_27B else None
    ops = decoder.embed(scale=math.sqrt(sizes.hidden))
    for layer, window in enumerate(decoder.windows(period=2, default=_FIRST_FILES_WINDOW)):
        ops += [
            decoder.rms_norm(f"blk.{layer}.attn_norm"),
            decoder.qkv(layer),
            decoder.attention(layer, rope, scale=scale, softcap=softcap, window=window),
            *decoder.normed_branch(decoder.attn_output(layer), f"blk.{layer}.post_attention_norm"),
            decoder.rms_norm(f"blk.{layer}.ffn_norm"),
            *decoder.glu(layer, "gelu_tanh"),
            *decoder.normed_branch(decoder.ffn_down(layer), f"blk.{layer}.post_ffw_norm"),
        ]
    final_softcap = decoder.cap("final_logit_softcapping")
    return decoder.program([*ops, decoder.rms_norm("output_norm"), *decoder.logits(softcap=final_softcap)])
