"""The quality reference: blending over an editable KV cache, in PyTorch, for experiments.

No vLLM here. What serves requests is `blend_engine.model_pass`; what this package finds good is
built there, and tests hold the two to each other.
"""
