# SPDX-License-Identifier: Apache-2.0
"""The two architectures in plain torch, written for training on a processor.

Parameter names are those of the Hugging Face checkpoint, but for the experts, which are stacked; `exported`
unstacks them. Every expert is computed for every token and unchosen ones are weighted with zero: with eight small
experts three large products are faster than 48 small ones, and the result is the same sum.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 (torch's own name for it)
from torch import Tensor, nn

from qualify.accuracy.architectures import Architecture


@dataclass(frozen=True)
class Batch:
    """Packed examples: `tokens`, `positions` and `segments` are [rows, length], `answers` marks what is learned."""

    tokens: Tensor
    positions: Tensor
    segments: Tensor
    answers: Tensor

    def mask(self) -> Tensor:
        """[rows, 1, length, length]: true where a token may look: earlier, or itself, in its own example."""
        same = self.segments[:, :, None] == self.segments[:, None, :]
        length = self.tokens.shape[1]
        causal = torch.ones(length, length, dtype=torch.bool, device=self.tokens.device).tril()
        return (same & causal)[:, None]


class Norm(nn.Module):
    """Root mean square norm with a learned gain."""

    def __init__(self, size: int, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self._size, self._epsilon = size, epsilon

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), (self._size,), self.weight, self._epsilon)


def linear(rows: int, columns: int, gain: float, rng: torch.Generator) -> nn.Linear:
    """A projection without bias, drawn with a standard deviation of `gain` / sqrt(columns)."""
    layer = nn.Linear(columns, rows, bias=False)
    with torch.no_grad():
        layer.weight.normal_(0.0, gain / math.sqrt(columns), generator=rng)
    return layer


@dataclass(frozen=True)
class Angles:
    """Cosines and sines of the rotary embedding, [rows, 1, length, size / 2]."""

    cos: Tensor
    sin: Tensor

    @classmethod
    def of(cls, positions: Tensor, size: int, theta: float) -> Angles:
        """For a head of `size` at `positions`."""
        steps = torch.arange(0, size, 2, device=positions.device, dtype=torch.float32)
        turns = positions[:, None, :, None].float() * theta ** (-steps / size)
        return cls(turns.cos(), turns.sin())

    def rotate(self, x: Tensor, *, interleaved: bool) -> Tensor:
        """`x` [rows, heads, length, size] turned; DeepSeek pairs neighbours, Qwen the two halves."""
        if interleaved:
            first, second = x[..., 0::2], x[..., 1::2]
        else:
            first, second = x.chunk(2, dim=-1)
        turned = (first * self.cos - second * self.sin, second * self.cos + first * self.sin)
        # the order within a head does not matter to a product of two heads that were both turned
        return torch.cat(turned, dim=-1)


class LatentAttention(nn.Module):
    """DeepSeek's MLA, uncompressed."""

    def __init__(self, config: Mapping[str, Any], rng: torch.Generator, out_gain: float) -> None:
        super().__init__()
        hidden, self.heads = config["hidden_size"], config["num_attention_heads"]
        self.nope, self.rope, self.value = (
            config["qk_nope_head_dim"],
            config["qk_rope_head_dim"],
            config["v_head_dim"],
        )
        self.rank, self.theta = config["kv_lora_rank"], config["rope_theta"]
        self.q_proj = linear(self.heads * (self.nope + self.rope), hidden, 1.0, rng)
        self.kv_a_proj_with_mqa = linear(self.rank + self.rope, hidden, 1.0, rng)
        self.kv_a_layernorm = Norm(self.rank, config["rms_norm_eps"])
        self.kv_b_proj = linear(self.heads * (self.nope + self.value), self.rank, 1.0, rng)
        self.o_proj = linear(hidden, self.heads * self.value, out_gain, rng)

    def forward(self, x: Tensor, batch: Batch, mask: Tensor) -> Tensor:
        rows, length, _ = x.shape
        angles = Angles.of(batch.positions, self.rope, self.theta)
        q = self.q_proj(x).view(rows, length, self.heads, self.nope + self.rope).transpose(1, 2)
        latent, key_rope = self.kv_a_proj_with_mqa(x).split([self.rank, self.rope], dim=-1)
        both = self.kv_b_proj(self.kv_a_layernorm(latent)).view(
            rows, length, self.heads, self.nope + self.value
        )
        key, value = both.transpose(1, 2).split([self.nope, self.value], dim=-1)
        q_plain, q_rope = q.split([self.nope, self.rope], dim=-1)
        q_rope = angles.rotate(q_rope, interleaved=True)
        key_rope = angles.rotate(key_rope[:, None], interleaved=True).expand(-1, self.heads, -1, -1)
        q = torch.cat((q_plain, q_rope.to(q_plain.dtype)), dim=-1)
        key = torch.cat((key, key_rope.to(key.dtype)), dim=-1)
        out = attend(q, key, value, mask)
        answer: Tensor = self.o_proj(out.transpose(1, 2).reshape(rows, length, -1))
        return answer


class PlainAttention(nn.Module):
    """Qwen3's grouped attention with normed queries and keys."""

    def __init__(self, config: Mapping[str, Any], rng: torch.Generator, out_gain: float) -> None:
        super().__init__()
        hidden, self.size, self.theta = config["hidden_size"], config["head_dim"], config["rope_theta"]
        self.heads, self.kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        self.q_proj = linear(self.heads * self.size, hidden, 1.0, rng)
        self.k_proj = linear(self.kv_heads * self.size, hidden, 1.0, rng)
        self.v_proj = linear(self.kv_heads * self.size, hidden, 1.0, rng)
        self.o_proj = linear(hidden, self.heads * self.size, out_gain, rng)
        self.q_norm = Norm(self.size, config["rms_norm_eps"])
        self.k_norm = Norm(self.size, config["rms_norm_eps"])

    def forward(self, x: Tensor, batch: Batch, mask: Tensor) -> Tensor:
        rows, length, _ = x.shape
        angles = Angles.of(batch.positions, self.size, self.theta)
        q = self.q_norm(self.q_proj(x).view(rows, length, self.heads, self.size)).transpose(1, 2)
        key = self.k_norm(self.k_proj(x).view(rows, length, self.kv_heads, self.size)).transpose(1, 2)
        value = self.v_proj(x).view(rows, length, self.kv_heads, self.size).transpose(1, 2)
        q, key = (angles.rotate(each, interleaved=False).to(value.dtype) for each in (q, key))
        key, value = (each.repeat_interleave(self.heads // self.kv_heads, dim=1) for each in (key, value))
        out = attend(q, key, value, mask)
        answer: Tensor = self.o_proj(out.transpose(1, 2).reshape(rows, length, -1))
        return answer


def attend(q: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    """Softmax attention, [rows, heads, length, size]."""
    scores = (q @ key.transpose(-1, -2)).float() * q.shape[-1] ** -0.5
    weights = scores.masked_fill(~mask, -1e9).softmax(-1)
    mixed: Tensor = weights.to(value.dtype) @ value
    return mixed


class Mlp(nn.Module):
    """A gated feed-forward network."""

    def __init__(self, hidden: int, inner: int, rng: torch.Generator, out_gain: float) -> None:
        super().__init__()
        self.gate_proj = linear(inner, hidden, 1.0, rng)
        self.up_proj = linear(inner, hidden, 1.0, rng)
        self.down_proj = linear(hidden, inner, out_gain, rng)

    def forward(self, x: Tensor) -> Tensor:
        answer: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return answer


class Gate(nn.Module):
    """The router: scores, chosen experts, weights; counts what it chose since `counts` was last cleared."""

    counts: Tensor

    def __init__(self, architecture: Architecture, rng: torch.Generator) -> None:
        super().__init__()
        config = self.config = architecture.config
        self.experts = architecture.experts
        self.sigmoid = config.get("scoring_func") == "sigmoid"
        self.weight = nn.Parameter(
            torch.randn(self.experts, config["hidden_size"], generator=rng) / math.sqrt(config["hidden_size"])
        )
        if self.sigmoid:
            bias = torch.randn(self.experts, generator=rng) * 0.15
            self.e_score_correction_bias = nn.Parameter(bias, requires_grad=False)
        self.register_buffer("counts", torch.zeros(self.experts), persistent=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Weights [tokens, experts], zero where not chosen; and the balance loss."""
        logits = x.float() @ self.weight.float().t()
        scores = logits.sigmoid() if self.sigmoid else logits.softmax(-1)
        chosen = torch.zeros_like(scores).scatter_(1, self._choose(scores.detach()), 1.0)
        weights = scores * chosen
        weights = (
            weights / (weights.sum(-1, keepdim=True) + 1e-20) * self.config.get("routed_scaling_factor", 1.0)
        )
        share = scores / scores.sum(-1, keepdim=True)
        load = chosen.mean(0) / self.config["num_experts_per_tok"]
        self.counts += chosen.detach().sum(0)
        return weights, (load * share.mean(0)).sum() * self.experts

    def _choose(self, scores: Tensor) -> Tensor:
        if not self.sigmoid:
            return scores.topk(self.config["num_experts_per_tok"], dim=-1).indices
        scores = scores + self.e_score_correction_bias
        grouped = scores.view(len(scores), self.config["n_group"], -1)
        best = grouped.topk(2, dim=-1).values.sum(-1).topk(self.config["topk_group"], dim=-1).indices
        kept = torch.zeros_like(grouped[..., 0]).scatter_(1, best, 1.0).bool()
        allowed = kept[..., None].expand_as(grouped).reshape(scores.shape)
        return scores.masked_fill(~allowed, -1e9).topk(self.config["num_experts_per_tok"], dim=-1).indices

    @torch.no_grad()
    def balance(self, rate: float) -> None:
        """Move the correction bias towards even use, as DeepSeek-V3 was trained; clears the counts."""
        if self.sigmoid:
            self.e_score_correction_bias.add_((self.counts.mean() - self.counts).sign(), alpha=rate)
        self.counts.zero_()


class Experts(nn.Module):
    """A mixture-of-experts layer: router, stacked experts, shared expert."""

    def __init__(self, architecture: Architecture, rng: torch.Generator, out_gain: float) -> None:
        super().__init__()
        config = architecture.config
        hidden, inner = config["hidden_size"], config["moe_intermediate_size"]
        self.gate = Gate(architecture, rng)
        self.inner = inner
        self.stacked_gate = linear(architecture.experts * inner, hidden, 1.0, rng)
        self.stacked_up = linear(architecture.experts * inner, hidden, 1.0, rng)
        # `down` is [hidden, experts * inner]: the sum over the experts is the product's own
        down = torch.randn(hidden, architecture.experts * inner, generator=rng) * out_gain / math.sqrt(inner)
        self.stacked_down = nn.Parameter(down)
        shared = config.get("n_shared_experts", 0)
        self.shared_experts = Mlp(hidden, inner * shared, rng, out_gain) if shared else None

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        flat = x.reshape(-1, x.shape[-1])
        weights, loss = self.gate(flat)
        inner = F.silu(self.stacked_gate(flat)) * self.stacked_up(flat)
        weighted = inner.view(len(flat), -1, self.inner) * weights.to(inner.dtype)[..., None]
        out = F.linear(weighted.view(len(flat), -1), self.stacked_down)
        if self.shared_experts is not None:
            out = out + self.shared_experts(flat)
        return out.view_as(x), loss


class Layer(nn.Module):
    """Attention and a feed-forward part, each behind a norm and added."""

    def __init__(self, architecture: Architecture, index: int, rng: torch.Generator) -> None:
        super().__init__()
        config = architecture.config
        hidden, epsilon = config["hidden_size"], config["rms_norm_eps"]
        out_gain = 1 / math.sqrt(2 * config["num_hidden_layers"])
        attention = LatentAttention if architecture.mla else PlainAttention
        self.input_layernorm = Norm(hidden, epsilon)
        self.self_attn = attention(config, rng, out_gain)
        self.post_attention_layernorm = Norm(hidden, epsilon)
        self.sparse = index in architecture.moe_layers
        self.mlp: nn.Module = (
            Experts(architecture, rng, out_gain)
            if self.sparse
            else Mlp(hidden, config["intermediate_size"], rng, out_gain)
        )

    def forward(self, x: Tensor, batch: Batch, mask: Tensor) -> tuple[Tensor, Tensor]:
        x = x + self.self_attn(self.input_layernorm(x), batch, mask)
        out = self.mlp(self.post_attention_layernorm(x))
        if self.sparse:
            return x + out[0], out[1]
        return x + out, x.new_zeros(())


class Network(nn.Module):
    """The whole model: logits [rows, length, vocabulary] and the mean balance loss."""

    def __init__(self, architecture: Architecture, seed: int) -> None:
        super().__init__()
        rng = torch.Generator().manual_seed(seed)
        config = architecture.config
        hidden, vocabulary = config["hidden_size"], config["vocab_size"]
        self.architecture = architecture
        self.embed_tokens = nn.Parameter(torch.randn(vocabulary, hidden, generator=rng) * 0.5)
        self.layers = nn.ModuleList(
            Layer(architecture, index, rng) for index in range(config["num_hidden_layers"])
        )
        self.norm = Norm(hidden, config["rms_norm_eps"])
        self.lm_head = linear(vocabulary, hidden, 1.0, rng)

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        x, mask = F.embedding(batch.tokens, self.embed_tokens), batch.mask()
        losses = []
        for layer in self.layers:
            x, loss = layer(x, batch, mask)
            losses.append(loss)
        return self.lm_head(self.norm(x)), torch.stack(losses).sum() / len(self.architecture.moe_layers)

    def gates(self) -> list[Gate]:
        """The routers, in the order of their layers."""
        return [module for module in self.modules() if isinstance(module, Gate)]

    def exported(self) -> dict[str, Tensor]:
        """The tensors of the checkpoint by their Hugging Face names: bfloat16, the correction bias float32."""
        tensors: dict[str, Tensor] = {}
        for name, held in self.state_dict().items():
            tensor = held.detach().cpu()
            full = name if name.startswith("lm_head") else f"model.{name}"
            full = "model.embed_tokens.weight" if name == "embed_tokens" else full
            if "stacked_" in full:
                tensors.update(self._unstacked(full, tensor))
            elif full.endswith("e_score_correction_bias"):
                tensors[full] = tensor.float().contiguous()
            else:
                tensors[full] = tensor.to(torch.bfloat16).contiguous()
        return tensors

    def _unstacked(self, name: str, tensor: Tensor) -> dict[str, Tensor]:
        prefix, _, kind = name.removesuffix(".weight").rpartition(".")
        part = kind.removeprefix("stacked_")
        pieces = tensor.chunk(self.architecture.experts, dim=1 if part == "down" else 0)
        return {
            f"{prefix}.experts.{index}.{part}_proj.weight": piece.to(torch.bfloat16).contiguous()
            for index, piece in enumerate(pieces)
        }

    @torch.no_grad()
    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Take the weights of a checkpoint that `exported` made; KeyError when it lacks one."""
        for name, mine in self.state_dict().items():
            full = name if name.startswith("lm_head") else f"model.{name}"
            if name == "embed_tokens":
                mine.copy_(tensors["model.embed_tokens.weight"])
            elif "stacked_" in full:
                prefix, _, kind = full.removesuffix(".weight").rpartition(".")
                part = kind.removeprefix("stacked_")
                names = (f"{prefix}.experts.{e}.{part}_proj.weight" for e in range(self.architecture.experts))
                mine.copy_(torch.cat([tensors[each] for each in names], dim=1 if part == "down" else 0))
            else:
                mine.copy_(tensors[full])
