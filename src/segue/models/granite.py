"""Granite 3 (IBM 2024): Llama whose embeddings, attention scores, branches and logits have factors of their own."""

from segue.models.decoder import Decoder
from segue.models.program import Program


def build(decoder: Decoder) -> Program:
    """Raises ModelFileError when the file cannot be computed exactly as it says."""
    decoder.checked.only(decoder.key("rope.scaling.finetuned"), (True,))  # False: a model without RoPE
    rope = decoder.rope(interleaved=True)
    residual = decoder.factor("residual_scale")
    scale = decoder.cap("attention.scale")
    ops = decoder.embed(scale=decoder.factor("embedding_scale"))
    for layer in range(decoder.sizes.layers):
        ops += [
            decoder.rms_norm(f"blk.{layer}.attn_norm"),
            decoder.qkv(layer, biases=True),
            decoder.attention(layer, rope, scale=scale),
            decoder.attn_output(layer, biases=True, scale=residual),
            decoder.rms_norm(f"blk.{layer}.ffn_norm"),
            *decoder.glu(layer),
            decoder.ffn_down(layer, scale=residual),
        ]
    logits = decoder.logits(scale=1 / decoder.factor("logit_scale"))
    return decoder.program([*ops, decoder.rms_norm("output_norm"), *logits])
