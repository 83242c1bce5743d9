"""Targets whose law is known: Markov chains of order 1 and 2 as tiny llamas.

The residual stream holds the token, the token before it (fetched by one attention head whose
score peaks one position back) and the pair of both (products of the MLP), each one-hot, so that
the lm_head may hold any table of the next token's law.

Shape suffixes: S states (pairs of tokens), C cases (a state, a root and drafted tokens), V tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from selfdraft.heads.base import Head
from selfdraft.inference.target import TargetModel

TOKENS, DEPTH = 5, 3
WIDTH = 2 * TOKENS + TOKENS**2 + 1  # even heads want an even width
HEAD = WIDTH // 2


def random_laws(order: int, seed: int = 0, peak: float = 2.0) -> Tensor:
    """[V, V, V]: law of the next token after (the token before, the last one)."""
    dice = torch.Generator().manual_seed(seed)
    shape = (TOKENS, TOKENS, TOKENS) if order == 2 else (1, TOKENS, TOKENS)
    return (peak * torch.randn(shape, generator=dice)).softmax(-1).expand(TOKENS, -1, -1)


@torch.no_grad()
def markov_target(laws_VVV: Tensor) -> TargetModel:
    """A llama with these laws; before the first token it takes that token itself."""
    config = LlamaConfig(
        hidden_size=WIDTH,
        intermediate_size=TOKENS**2,
        num_hidden_layers=1,
        num_attention_heads=2,
        vocab_size=TOKENS,
        max_position_embeddings=64,
        rms_norm_eps=1e-12,
        eos_token_id=None,
        bos_token_id=None,
    )
    model = LlamaForCausalLM(config).requires_grad_(False)
    layer, eye, one = model.model.layers[0], torch.eye(TOKENS), WIDTH**0.5
    for parameter in model.parameters():
        parameter.fill_(1.0 if parameter.ndim == 1 else 0.0)
    model.model.embed_tokens.weight[:, :TOKENS] = eye
    # The norms see 1, 2, then 3 one-hot vectors, so they multiply by (WIDTH / count)^(1/2).
    angle = model.model.rotary_emb.inv_freq
    size = 30 * HEAD**0.25 / one
    layer.self_attn.k_proj.weight[: HEAD // 2, :TOKENS] = size
    layer.self_attn.q_proj.weight[: HEAD // 2, :TOKENS] = size * angle.cos()[:, None]
    layer.self_attn.q_proj.weight[HEAD // 2 : HEAD, :TOKENS] = -size * angle.sin()[:, None]
    layer.self_attn.v_proj.weight[:TOKENS, :TOKENS] = eye / one
    layer.self_attn.o_proj.weight[TOKENS : 2 * TOKENS, :TOKENS] = eye
    pair, two = torch.arange(TOKENS**2), one / 2**0.5
    layer.mlp.gate_proj.weight[pair, pair % TOKENS] = 1.0
    layer.mlp.up_proj.weight[pair, TOKENS + pair // TOKENS] = 1.0
    product = two * torch.nn.functional.silu(torch.tensor(two))
    layer.mlp.down_proj.weight[2 * TOKENS + pair, pair] = 1 / product
    scores = laws_VVV.log().flatten(0, 1) / (one / 3**0.5)
    model.lm_head.weight[:, 2 * TOKENS + pair] = scores.T
    return TargetModel(model)


def sample(laws_VVV: Tensor, rows: int, time: int, dice: torch.Generator) -> Tensor:
    """[rows, time] texts of the chain."""
    ids = [torch.randint(0, TOKENS, (rows,), generator=dice)]
    for _ in range(time - 1):
        law = laws_VVV[ids[-2] if len(ids) > 1 else ids[-1], ids[-1]]
        ids.append(torch.multinomial(law, 1, generator=dice)[:, 0])
    return torch.stack(ids, 1)


def stationary(laws_VVV: Tensor) -> Tensor:
    """[V, V]: how often the chain stands at (the token before, the last one)."""
    pairs = torch.full((TOKENS, TOKENS), TOKENS**-2.0)
    for _ in range(500):
        pairs = torch.einsum("ij,ijk->jk", pairs, laws_VVV)
    return pairs


def sampled_length(laws_VVV: Tensor, q: list[Tensor]) -> float:
    """Accepted tokens of a sampled chain of 3 in expectation; 3 where every q is the law itself.

    Args:
        q: laws of the three slots, [V, V, R, V], [V, V, R, A, V] and [V, V, R, A, B, V], by the
            token before, the last one, the root and the drafted tokens.
    """
    root = stationary(laws_VVV)[..., None] * laws_VVV
    one = laws_VVV[None].minimum(q[0])
    two = laws_VVV[None, None].minimum(q[1])
    three = laws_VVV[None, None, None].minimum(q[2]).sum(-1)
    return float((root * (one * (1 + (two * (1 + three)).sum(-1))).sum(-1)).sum())


def point_lengths(laws_VVV: Tensor) -> Tensor:
    """[V, V, R, A, B, C]: accepted tokens in expectation when A, B, C are proposed as points after
    a state and a root, however they were chosen."""
    one, two, three = laws_VVV[None], laws_VVV[None, None], laws_VVV[None, None, None]
    lengths = one[..., None, None] * (1 + two[..., None] * (1 + three))
    return lengths.expand([TOKENS] * 6)


def best_points(laws_VVV: Tensor, sees_root: bool) -> float:
    """The best expectation of point proposals that know the state, and the root or not."""
    root = stationary(laws_VVV)[..., None] * laws_VVV
    lengths = root[..., None, None, None] * point_lengths(laws_VVV)
    lengths = lengths if sees_root else lengths.sum(2)
    return float(lengths.flatten(-3).max(-1).values.sum())


def point_length(laws_VVV: Tensor, q: list[Tensor]) -> float:
    """The expectation of a chain of the argmax of each law, laws as for `sampled_length`."""
    i, j, r = torch.meshgrid(*[torch.arange(TOKENS)] * 3, indexing="ij")
    a = q[0][i, j, r].argmax(-1)
    b = q[1][i, j, r, a].argmax(-1)
    c = q[2][i, j, r, a, b].argmax(-1)
    root = stationary(laws_VVV)[..., None] * laws_VVV
    return float((root * point_lengths(laws_VVV)[i, j, r, a, b, c]).sum())


@torch.no_grad()
def drafted_laws(head: Head, target: TargetModel, laws_VVV: Tensor, time: int = 12) -> list[Tensor]:
    """The laws that `head` drafts from, as `expected_length` takes them: one text for each state,
    continued by every root and every draft."""
    dice, axes = torch.Generator().manual_seed(99), [TOKENS] * 5
    texts = sample(laws_VVV, TOKENS**2, time, dice)
    state = torch.arange(TOKENS**2)
    texts[:, -2:] = torch.stack([state // TOKENS, state % TOKENS], 1)
    context = texts.repeat_interleave(TOKENS**3, 0)
    case = torch.arange(TOKENS**5)
    tokens = [case // TOKENS ** (2 - k) % TOKENS for k in range(DEPTH)]
    length = torch.full_like(case, time)
    features = target.features(context, length, head.taps)
    memory = head.start(torch.cat([context, tokens[0][:, None]], 1), length, features)
    memo: dict[str, Tensor] = {}
    laws = []
    for slot in range(1, DEPTH + 1):
        path = torch.stack(tokens[:slot], -1)[:, None]
        hidden = head.step(memory, path, torch.zeros_like(path[..., 0]), memo)
        law = head.draft_logits(hidden[:, 0], path[:, 0]).softmax(-1).reshape(*axes, TOKENS)
        laws.append(law[(..., *[0] * (DEPTH - slot), slice(None))])
    return laws
