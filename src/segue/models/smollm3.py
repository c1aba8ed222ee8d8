"""SmolLM 3 (Bakouch et al. 2025): Llama with every fourth layer without position embeddings (Yang et al. 2025)."""

from segue.models.decoder import Decoder
from segue.models.program import Program

_UNROTATED_EVERY = 4  # no key of the file says it


def build(decoder: Decoder) -> Program:
    """Raises ModelFileError when the file cannot be computed exactly as it says."""
    rope = decoder.rope(interleaved=True)
    ops = decoder.embed()
    for layer in range(decoder.sizes.layers):
        ops += [
            decoder.rms_norm(f"blk.{layer}.attn_norm"),
            decoder.qkv(layer, biases=True),
            decoder.attention(layer, rope if (layer + 1) % _UNROTATED_EVERY else None),
            decoder.attn_output(layer, biases=True),
            decoder.rms_norm(f"blk.{layer}.ffn_norm"),
            *decoder.glu(layer),
            decoder.ffn_down(layer),
        ]
    return decoder.program([*ops, decoder.rms_norm("output_norm"), *decoder.logits()])
