"""Tiny networks with attention inside. Part of the table in `networks`.

Attention here has 3 heads, 4 query-key units and 2 value units a head on a residual stream of width 8, unless it says so.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.cases import Case, Fn, image, sequence, tokens, weight


def two_sequences() -> tuple[Tensor, Tensor]:
    return torch.randn(2, 5, 4), torch.randn(2, 7, 3)


# ---------------------------------------------------------------------------------------------------------- attention


def split_heads(x: Tensor, num_heads: int) -> Tensor:
    return x.unflatten(-1, (num_heads, -1)).transpose(1, 2)


def merge_heads(x: Tensor) -> Tensor:
    return x.transpose(1, 2).flatten(2)


def attend(m, x: Tensor, y: Tensor | None = None, mix=None, causal: bool = False) -> Tensor:
    """Attention from x to y on the stream of x; `mix` changes queries, keys and values before they meet."""
    y = x if y is None else y
    q, k, v = split_heads(m.q(x), m.heads), split_heads(m.k(y), m.kv_heads), split_heads(m.v(y), m.kv_heads)
    if mix is not None:
        q, k, v = mix(m, q, k, v)
    return x + m.o(merge_heads(F.scaled_dot_product_attention(q, k, v, is_causal=causal)))


def attention_block(heads: int = 3, kv_heads: int = 3, width: int = 8, source: int = 8, **members: Any) -> dict[str, Any]:
    return {
        "heads": heads,
        "kv_heads": kv_heads,
        "q": nn.Linear(width, 4 * heads),
        "k": nn.Linear(source, 4 * kv_heads),
        "v": nn.Linear(source, 2 * kv_heads),
        "o": nn.Linear(2 * heads, width),
        **members,
    }


def attention_net(forward, **members: Any) -> nn.Module:
    return Fn(forward, embed=nn.Linear(4, 8), head=nn.Linear(8, 2), **{**attention_block(), **members})


def mixed(mix=None, causal: bool = False):
    return lambda m, x: m.head(attend(m, m.embed(x), mix=mix, causal=causal))


def expand_heads(m, q, k, v):
    """Key-value heads repeated as Hugging Face does it."""

    def repeat(t):
        batch, heads, length, units = t.shape
        return t[:, :, None].expand(batch, heads, m.heads // heads, length, units).reshape(batch, m.heads, length, units)

    return q, repeat(k), repeat(v)


def interleave_heads(m, q, k, v):
    return q, k.repeat_interleave(m.heads // m.kv_heads, 1), v.repeat_interleave(m.heads // m.kv_heads, 1)


def rotate(x: Tensor) -> Tensor:
    """Rotary positions, by halves."""
    angle = torch.arange(x.shape[2], dtype=x.dtype)[:, None] * torch.tensor([1.0, 0.1, 1.0, 0.1], dtype=x.dtype)
    first, second = x.chunk(2, -1)
    return x * angle.cos() + torch.cat([-second, first], -1) * angle.sin()


def numbered_heads(m, q, k, v):
    """Query heads that are told apart before they meet the repeated key-value heads."""
    return expand_heads(m, q * torch.arange(1, 7, dtype=q.dtype)[:, None, None], k, v)


def partly_rotary(m, q, k, v):
    """As partial rotary positions do when the part is everything: what goes by is empty."""
    q, k = (torch.cat([rotate(t[..., :4]), t[..., 4:]], -1) for t in (q, k))
    return expand_heads(m, q, k, v)


def fused_groups(m, x):
    x = m.embed(x)
    q, k, v = split_heads(m.q(x), 6), split_heads(m.k(x), 2), split_heads(m.v(x), 2)
    return m.head(x + m.o(merge_heads(F.scaled_dot_product_attention(q, k, v, enable_gqa=True))))


def slopes(m, x):
    """ALiBi: every head has its own slope, so heads are told apart, but not the units of any."""
    x = m.embed(x)
    q, k, v = (split_heads(p(x), 3) for p in (m.q, m.k, m.v))
    distance = (torch.arange(5)[:, None] - torch.arange(5)).abs()
    bias = -distance * torch.tensor([0.5, 0.25, 0.125], dtype=x.dtype)[:, None, None]
    return m.head(x + m.o(merge_heads((q @ k.mT + bias).softmax(-1) @ v)))


def talking_heads(m, x):
    x = m.embed(x)
    q, k, v = split_heads(m.q(x), 3), split_heads(m.k(x), 3), split_heads(m.v(x), 5)
    scores = torch.einsum("bhls,hg->bgls", q @ k.mT, m.talk).softmax(-1)
    return m.head(x + m.o(merge_heads(scores @ v)))


def latents(m, x):
    """Learned queries, averaged in the end: they can be exchanged too."""
    y = attend(m, m.latents.expand(2, 6, 8), m.embed(x))
    return m.head(y.mean(1))


def packed_attention(qkv: nn.Linear, out: nn.Linear, x: Tensor) -> Tensor:
    batch, length, width = x.shape
    q, k, v = qkv(x).reshape(batch, length, 3, 3, 2).permute(2, 0, 3, 1, 4).unbind(0)
    return out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(batch, length, width))


def biased_in_parts(m, x):
    """As BEiT: the bias of the queries and of the values, none for the keys; cut before it is split into heads."""
    x = m.embed(x)
    bias = torch.cat([m.q_bias, torch.zeros(6, dtype=x.dtype), m.v_bias])
    q, k, v = F.linear(x, m.qkv, bias).reshape(2, 5, 3, 3, 2).permute(2, 0, 3, 1, 4).unbind(0)
    return m.head(x + m.out(merge_heads(F.scaled_dot_product_attention(q, k, v))))


def vit(m, x):
    x = m.patches(x).flatten(2).transpose(1, 2)
    x = torch.cat([m.cls.expand(x.shape[0], -1, -1), x], 1) + m.positions
    for block in m.blocks:
        x = x + packed_attention(block["qkv"], block["out"], block["norm1"](x))
        x = x + block["down"](F.gelu(block["up"](block["norm2"](x))))
    return m.head(m.norm(x)[:, 0])


class GPT(nn.Module):
    """As GPT-2: packed projections stored transposed, learned positions, the head tied to the embedding."""

    def __init__(self):
        super().__init__()
        self.embed, self.positions = nn.Embedding(10, 6), nn.Embedding(3, 6)
        self.norm1, self.norm2, self.norm = nn.LayerNorm(6), nn.LayerNorm(6), nn.LayerNorm(6)
        self.attn, self.attn_bias = weight(6, 18), weight(18)
        self.proj, self.proj_bias = weight(6, 6), weight(6)
        self.up, self.down = nn.Linear(6, 10), nn.Linear(10, 6)
        self.head = nn.Linear(6, 10, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        batch, length = ids.shape
        x = self.embed(ids) + self.positions(torch.arange(length))
        packed = torch.addmm(self.attn_bias, self.norm1(x).view(-1, 6), self.attn).view(batch, length, 18)
        q, k, v = (t.view(batch, length, 3, 2).transpose(1, 2) for t in packed.split(6, dim=2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(-1, 6)
        x = x + torch.addmm(self.proj_bias, y, self.proj).view(batch, length, 6)
        x = x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))
        return self.head(self.norm(x))


def rms(x: Tensor, scale: Tensor) -> Tensor:
    return scale * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


def llama(m, ids):
    x = m.embed(ids)

    def rotary(m, q, k, v):
        return expand_heads(m, rotate(q), rotate(k), v)

    x = attend(m, rms(x, m.norm1), mix=rotary, causal=True)
    h = rms(x, m.norm2)
    return m.head(x + m.down(F.silu(m.gate(h)) * m.up(h)))


def swin(m, x):
    """Windows of 2 x 2 patches, cyclically shifted, with a table of relative positions for each head."""
    x = m.patches(x).permute(0, 2, 3, 1)  # 2, 4, 4, 6
    y = torch.roll(m.norm(x), (-1, -1), (1, 2)).view(2, 2, 2, 2, 2, 6).permute(0, 1, 3, 2, 4, 5).reshape(-1, 4, 6)
    q, k, v = m.qkv(y).reshape(8, 4, 3, 3, 2).permute(2, 0, 3, 1, 4)
    place = torch.arange(4)
    relative = (place[:, None] // 2 - place // 2 + 1) * 3 + place[:, None] % 2 - place % 2 + 1
    bias = m.table[relative.view(-1)].view(4, 4, 3).permute(2, 0, 1)
    y = ((q @ k.transpose(-2, -1)) + bias.unsqueeze(0)).softmax(-1) @ v
    y = m.out(y.transpose(1, 2).reshape(8, 4, 6)).view(2, 2, 2, 2, 2, 6).permute(0, 1, 3, 2, 4, 5).reshape(2, 4, 4, 6)
    x = x + torch.roll(y, (1, 1), (1, 2))
    merged = torch.cat([x[:, 0::2, 0::2], x[:, 1::2, 0::2], x[:, 0::2, 1::2], x[:, 1::2, 1::2]], -1)
    return m.head(m.merge(merged).mean((1, 2)))


ATTENTION: dict[str, Case] = {
    "fused attention": Case(lambda: attention_net(mixed()), sequence(), ["2[3]", "3", "4[3]", "8"]),
    "causal attention": Case(lambda: attention_net(mixed(causal=True)), sequence(), ["2[3]", "3", "4[3]", "8"]),
    "cross-attention": Case(
        lambda: Fn(
            lambda m, x, y: m.head(attend(m, m.embed(x), m.other(y))),
            embed=nn.Linear(4, 8),
            other=nn.Linear(3, 7),
            head=nn.Linear(8, 2),
            **attention_block(source=7),
        ),
        two_sequences,
        ["2[3]", "3", "4[3]", "7", "8"],
    ),
    "learned queries": Case(
        lambda: attention_net(latents, latents=weight(1, 6, 8)), sequence(), ["2[3]", "3", "4[3]", "6", "8", "8"]
    ),
    # 2 key-value heads with 3 query heads each: units of keys and values belong to the key-value head
    "grouped queries by expand": Case(
        lambda: attention_net(mixed(expand_heads), **attention_block(6, 2)), sequence(), ["2", "2[2]", "3[2]", "4[2]", "8"]
    ),
    "grouped queries by repeat": Case(
        lambda: attention_net(mixed(interleave_heads), **attention_block(6, 2)),
        sequence(),
        ["2", "2[2]", "3[2]", "4[2]", "8"],
    ),
    "grouped queries, fused": Case(
        lambda: attention_net(fused_groups, **attention_block(6, 2)), sequence(), ["2", "2[2]", "3[2]", "4[2]", "8"]
    ),
    "grouped queries told apart": Case(
        lambda: attention_net(mixed(numbered_heads), **attention_block(6, 2)), sequence(), ["2[2*]", "4[2*]", "8"]
    ),
    "rotary positions and nothing else": Case(
        lambda: attention_net(mixed(partly_rotary), **attention_block(6, 2)), sequence(), ["2", "2[2]", "3[2]", "8"]
    ),
    "one key-value head": Case(
        lambda: attention_net(mixed(expand_heads), **attention_block(6, 1)), sequence(), ["2", "4", "6", "8"]
    ),
    "rotary positions": Case(
        lambda: attention_net(mixed(lambda m, q, k, v: (rotate(q), rotate(k), v))), sequence(), ["2[3]", "3", "8"]
    ),
    # the norm's weight is one for all heads, so its units are too
    "norms of queries and keys": Case(
        lambda: attention_net(
            mixed(lambda m, q, k, v: (m.q_norm(q), m.k_norm(k), v)), q_norm=nn.LayerNorm(4), k_norm=nn.RMSNorm(4)
        ),
        sequence(),
        ["2[3]", "3", "4", "8"],
    ),
    "slopes of heads": Case(lambda: attention_net(slopes), sequence(), ["2[3*]", "4[3*]", "8"]),
    "talking heads": Case(
        lambda: attention_net(talking_heads, talk=weight(3, 5), v=nn.Linear(8, 10), o=nn.Linear(10, 8)),
        sequence(),
        ["2[5]", "3", "4[3]", "5", "8"],
    ),
    # modules of PyTorch: packed projections, fast path off
    "multi-head attention": Case(
        lambda: Fn(
            lambda m, x: m.head(m.attn(h := m.embed(x), h, h)[0]),
            embed=nn.Linear(4, 6),
            attn=nn.MultiheadAttention(6, 3, batch_first=True),
            head=nn.Linear(6, 2),
        ),
        sequence(),
        ["2[3]", "2[3]", "3", "6", "6"],
    ),
    "multi-head cross-attention": Case(
        lambda: Fn(
            lambda m, x, y: m.head(m.attn(m.embed(x), h := m.other(y), h, need_weights=False)[0]),
            embed=nn.Linear(4, 6),
            other=nn.Linear(3, 5),
            attn=nn.MultiheadAttention(6, 3, batch_first=True, kdim=5, vdim=5, add_bias_kv=True),
            head=nn.Linear(6, 2),
        ),
        two_sequences,
        ["2[3]", "2[3]", "3", "5", "6", "6"],
    ),
    "attention weights returned": Case(
        lambda: Fn(
            lambda m, x: m.attn(h := m.embed(x), h, h, average_attn_weights=False)[1],
            embed=nn.Linear(4, 6),
            attn=nn.MultiheadAttention(6, 3, batch_first=True, bias=False),
        ),
        sequence(),
        ["2[3*]", "6"],  # the values and what is made of them are computed, and dropped
    ),
    "encoder layer": Case(
        lambda: nn.Sequential(
            nn.Linear(4, 6), nn.TransformerEncoderLayer(6, 3, 10, dropout=0.1, batch_first=True), nn.Linear(6, 2)
        ),
        sequence(),
        ["10", "2[3]", "2[3]", "3", "6"],
    ),
    "encoder, norm first": Case(
        lambda: Fn(
            lambda m, x: m.head(m.encoder(m.embed(x), nn.Transformer.generate_square_subsequent_mask(5), is_causal=True)),
            embed=nn.Linear(4, 6),
            encoder=nn.TransformerEncoder(
                nn.TransformerEncoderLayer(6, 3, 10, norm_first=True, batch_first=True), 2, enable_nested_tensor=False
            ),
            head=nn.Linear(6, 2),
        ),
        sequence(),
        ["10", "10", "2[3]", "2[3]", "2[3]", "2[3]", "3", "3", "6"],
    ),
    "decoder layer": Case(
        lambda: Fn(
            lambda m, x, y: m.head(m.decoder(m.embed(x), m.other(y))),
            embed=nn.Linear(4, 6),
            other=nn.Linear(3, 6),
            decoder=nn.TransformerDecoderLayer(6, 3, 10, batch_first=True),
            head=nn.Linear(6, 2),
        ),
        two_sequences,
        ["10", "2[3]", "2[3]", "2[3]", "2[3]", "3", "3", "6", "6"],  # one packed weight reads the stream and the memory
    ),
    "packed bias in parts": Case(
        lambda: Fn(
            biased_in_parts,
            embed=nn.Linear(4, 7),
            qkv=weight(18, 7),
            q_bias=weight(6),
            v_bias=weight(6),
            out=nn.Linear(6, 7),
            head=nn.Linear(7, 2),
        ),
        sequence(),
        ["2[3]", "2[3]", "3", "7"],
    ),
    # whole architectures
    "vision transformer": Case(
        lambda: Fn(
            vit,
            patches=nn.Conv2d(3, 6, 4, 4),
            cls=weight(1, 1, 6),
            positions=weight(1, 5, 6),
            blocks=nn.ModuleList(
                nn.ModuleDict(
                    {
                        "norm1": nn.LayerNorm(6),
                        "qkv": nn.Linear(6, 18),
                        "out": nn.Linear(6, 6),
                        "norm2": nn.LayerNorm(6),
                        "up": nn.Linear(6, 10),
                        "down": nn.Linear(10, 6),
                    }
                )
                for _ in range(2)
            ),
            norm=nn.LayerNorm(6),
            head=nn.Linear(6, 2),
        ),
        image(),
        ["10", "10", "2[3]", "2[3]", "2[3]", "2[3]", "3", "3", "6"],
    ),
    "gpt": Case(GPT, tokens(), ["10", "2[3]", "2[3]", "3", "6"]),
    "llama": Case(
        lambda: Fn(
            llama,
            embed=nn.Embedding(10, 8),
            norm1=weight(8),
            norm2=weight(8),
            gate=nn.Linear(8, 10, bias=False),
            up=nn.Linear(8, 10, bias=False),
            down=nn.Linear(10, 8, bias=False),
            head=nn.Linear(8, 10, bias=False),
            **attention_block(6, 2),
        ),
        tokens(),
        ["10", "2", "2[2]", "3[2]", "8"],
    ),
    "shifted windows": Case(
        lambda: Fn(
            swin,
            patches=nn.Conv2d(3, 6, 2, 2),
            norm=nn.LayerNorm(6),
            qkv=nn.Linear(6, 18),
            table=weight(9, 3),
            out=nn.Linear(6, 6),
            merge=nn.Linear(24, 7),
            head=nn.Linear(7, 2),
        ),
        image(),
        ["2[3]", "2[3]", "3", "6", "7"],
    ),
}
