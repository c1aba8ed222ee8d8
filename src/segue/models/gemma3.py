"""Gemma 3, text (Kamath et al. 2025).

x = √hidden · embed(tokens)
each layer:  x += RMSNorm(attn_output · attention(rope(RMSNorm(q), RMSNorm(k)), v))   of RMSNorm(x)
             x += RMSNorm(ffn_down · (gelu(gate) · up))                               of RMSNorm(x)
logits = output · RMSNorm(x)

Five layers of six attend to a window and have a RoPE base of their own. The file's norm weights have the 1 of Gemma's
definition (1 + w) added already.
"""

import math

from segue.models.decoder import Decoder
from segue.models.program import Program

_LAYERS_OF_27B = 62


def build(decoder: Decoder) -> Program:
    """Raises ModelFileError when the file cannot be computed exactly as it says."""
    sizes = decoder.sizes
    full = decoder.rope(interleaved=False)
    local = decoder.rope(interleaved=False, theta=decoder.factor("rope.freq_base_swa", 10_000.0), factors=())
    # The largest model scales by what would be the size of its heads if they filled the stream.
    scale = math.sqrt(sizes.heads / sizes.hidden) if sizes.layers == _LAYERS_OF_27B else None
    ops = decoder.embed(scale=math.sqrt(sizes.hidden))
    for layer, window in enumerate(decoder.windows(period=6)):
        rope = full if window is None else local
        ops += [
            decoder.rms_norm(f"blk.{layer}.attn_norm"),
            decoder.qkv(layer),
            *decoder.norm_heads(layer),
            decoder.attention(layer, rope, scale=scale, window=window),
            *decoder.normed_branch(decoder.attn_output(layer), f"blk.{layer}.post_attention_norm"),
            decoder.rms_norm(f"blk.{layer}.ffn_norm"),
            *decoder.glu(layer, "gelu_tanh"),
            *decoder.normed_branch(decoder.ffn_down(layer), f"blk.{layer}.post_ffw_norm"),
        ]
    softcap = decoder.cap("final_logit_softcapping")
    return decoder.program([*ops, decoder.rms_norm("output_norm"), *decoder.logits(softcap=softcap)])
