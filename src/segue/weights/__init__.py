"""Model files: from bytes to named tensors and metadata. Knows nothing about what a model computes."""
