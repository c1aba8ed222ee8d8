"""GPT-2 (Radford et al. 2019).

x = embed(tokens) + embed(positions)
each layer:  x += attn_output · attention(q, k, v)    of LayerNorm(x)
             x += ffn_down · gelu(ffn_up)             of LayerNorm(x)
logits = output · LayerNorm(x)                        output is token_embd when tied

All linear layers have biases.
"""

from segue.models.decoder import Decoder
from segue.models.program import Program


def build(decoder: Decoder) -> Program:
    """Raises ModelFileError when the file cannot be computed exactly as it says."""
    ops = decoder.embed(positions=True)
    for layer in range(decoder.sizes.layers):
        ops += [
            decoder.layer_norm(f"blk.{layer}.attn_norm"),
            decoder.qkv(layer, biases=True, fused=True),
            decoder.attention(layer, rope=None),
            decoder.attn_output(layer, biases=True),
            decoder.layer_norm(f"blk.{layer}.ffn_norm"),
            *decoder.activation(layer, "gelu_tanh"),
            decoder.ffn_down(layer, biases=True),
        ]
    return decoder.program([*ops, decoder.layer_norm("output_norm"), *decoder.logits()])
