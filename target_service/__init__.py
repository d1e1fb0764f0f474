"""The target service: the model whose output counts."""
