"""Write a GGUF model as a Hugging Face folder (bfloat16), for peers that read nothing else.

.envs/golden/bin/python scripts/gguf_to_hf.py MODEL.gguf FOLDER
"""

import argparse
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("folder", type=Path)
    args = parser.parse_args()
    where = {"pretrained_model_name_or_path": str(args.model.parent), "gguf_file": args.model.name}
    model = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.bfloat16)
    tensors = {name: tensor.clone().contiguous() for name, tensor in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        tensors.pop("lm_head.weight", None)
    args.folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, args.folder / "model.safetensors", metadata={"format": "pt"})
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(args.folder)
    AutoTokenizer.from_pretrained(**where).save_pretrained(args.folder)


if __name__ == "__main__":
    main()
