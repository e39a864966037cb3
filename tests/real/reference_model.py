"""The blend pass in plain PyTorch for Llama-like models: the definition that the fast path is held
to.

One token at a position p attends to keys 0..p, computed or cached, and to no others. Written from
the model's weights alone; shares no code with the engine.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor


@dataclass
class ReferenceModel:
    """SmolLM2's weights and shapes."""

    weights: dict[str, Tensor]
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    eps: float
    theta: float

    @classmethod
    def load(cls, folder: Path) -> "ReferenceModel":
        """From a Hugging Face folder."""
        config = json.loads((folder / "config.json").read_text())
        rope = config.get("rope_parameters") or config
        return cls(
            weights={k: v.float() for k, v in load_file(folder / "model.safetensors").items()},
            num_layers=config["num_hidden_layers"],
            num_heads=config["num_attention_heads"],
            num_kv_heads=config["num_key_value_heads"],
            head_dim=config["hidden_size"] // config["num_attention_heads"],
            eps=config["rms_norm_eps"],
            theta=rope["rope_theta"],
        )

    def run(
        self, token_ids: Tensor, positions: Tensor, keys: Tensor, values: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Recompute `positions` of a prompt, in place of what `keys` and `values` hold there.

        Args:
            token_ids: Ids of the whole range.
            positions: Sorted positions to compute.
            keys: ``[L, T, H, D]``, rotated to their places; NaN where nothing is known yet.
            values: ``[L, T, H, D]``.

        Returns:
            The keys and values after the pass.
        """
        keys, values = keys.clone(), values.clone()
        hidden = self.weights["model.embed_tokens.weight"][token_ids[positions]]
        for layer in range(self.num_layers):
            hidden = hidden + self._attention(layer, hidden, positions, keys, values)
            hidden = hidden + self._mlp(layer, hidden)
        return keys, values

    def rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        """RoPE, half-split pairs, from the definition."""
        half = self.head_dim // 2
        frequency = self.theta ** (-torch.arange(half, dtype=torch.float64) / half)
        angle = (positions.double()[:, None] * frequency)[:, None, :]
        cos, sin = angle.cos().float(), angle.sin().float()
        first, second = x[..., :half], x[..., half:]
        return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)

    def _attention(
        self, layer: int, hidden: Tensor, positions: Tensor, keys: Tensor, values: Tensor
    ) -> Tensor:
        x = self._norm(hidden, f"model.layers.{layer}.input_layernorm.weight")
        q = self._heads(layer, "q", x, self.num_heads)
        k = self._heads(layer, "k", x, self.num_kv_heads)
        keys[layer, positions] = self.rotate(k, positions)
        values[layer, positions] = self._heads(layer, "v", x, self.num_kv_heads)
        q = self.rotate(q, positions)
        group = self.num_heads // self.num_kv_heads
        out = torch.empty_like(q)
        for row, position in enumerate(positions.tolist()):
            seen_k = keys[layer, : position + 1].repeat_interleave(group, dim=1)
            seen_v = values[layer, : position + 1].repeat_interleave(group, dim=1)
            scores = torch.einsum("hd,thd->ht", q[row], seen_k) / self.head_dim**0.5
            out[row] = torch.einsum("ht,thd->hd", scores.softmax(dim=-1), seen_v)
        weight = self.weights[f"model.layers.{layer}.self_attn.o_proj.weight"]
        return out.flatten(1) @ weight.T

    def _heads(self, layer: int, name: str, x: Tensor, num_heads: int) -> Tensor:
        weight = self.weights[f"model.layers.{layer}.self_attn.{name}_proj.weight"]
        return (x @ weight.T).view(len(x), num_heads, self.head_dim)

    def _mlp(self, layer: int, hidden: Tensor) -> Tensor:
        prefix = f"model.layers.{layer}"
        x = self._norm(hidden, f"{prefix}.post_attention_layernorm.weight")
        gate = x @ self.weights[f"{prefix}.mlp.gate_proj.weight"].T
        up = x @ self.weights[f"{prefix}.mlp.up_proj.weight"].T
        down = self.weights[f"{prefix}.mlp.down_proj.weight"]
        return (torch.nn.functional.silu(gate) * up) @ down.T

    def _norm(self, x: Tensor, name: str) -> Tensor:
        scale = torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + self.eps)
        return x * scale * self.weights[name]
