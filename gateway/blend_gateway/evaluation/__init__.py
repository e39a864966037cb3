"""How good blended answers are: tasks, prompts, metrics. Neither torch nor transformers nor vLLM.

The model itself is `blend_engine`'s; here are arrays of numbers and text.
"""
