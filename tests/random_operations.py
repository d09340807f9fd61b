"""More operations for random programs: those that common layers are made of, and those that look entries up."""

import random
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.random_programs import MAKERS, Made, RandomProgram


def _dim(x: Tensor, rng: random.Random) -> int:
    return rng.choice([d for d, n in enumerate(x.shape) if n > 1] or [0])


def _pick(rng: random.Random, operations: dict[str, Callable[..., Tensor]], label: object = "") -> Made:
    name = rng.choice(list(operations))
    return f"{name} {label}", operations[name]


def _like(self: RandomProgram, x: Tensor, rng: random.Random) -> int:
    """The number of a value of the same shape."""
    return rng.choice([i for i, y in enumerate(self.values) if i and y.shape == x.shape])


def _einsum(self: RandomProgram, x: Tensor, rng: random.Random) -> Made:
    names = "abcde"[: x.dim()]
    if len(names) < 2:
        return None
    count = rng.randint(1, len(names))
    shared = rng.sample(names, count)
    sizes = dict(zip(names, x.shape, strict=True)) | {"o": rng.choice([2, 3, 4])}
    weight = shared + ["o"] * rng.randint(0, 1)
    rng.shuffle(weight)
    kept = [n for n in dict.fromkeys([*names, *weight]) if n not in shared or rng.random() < 0.5]
    rng.shuffle(kept)
    equation = f"{names},{''.join(weight)}->{''.join(kept)}"
    w = self.make_weight(*(sizes[n] for n in weight))
    return f"einsum {equation}", lambda x: torch.einsum(equation, x, w).tanh()


def _self_einsum(self: RandomProgram, x: Tensor, rng: random.Random) -> Made:
    names = "abcde"[: x.dim()]
    if not 2 <= len(names) <= 4:
        return None
    other = "".join(n if rng.random() < 0.5 else n.upper() for n in names)
    both = list(dict.fromkeys(names + other))
    kept = [n for n in both if rng.random() < 0.6]
    rng.shuffle(kept)
    equation = f"{names},{other}->{''.join(kept)}"
    return f"einsum {equation}", lambda x, y: torch.einsum(equation, x, y).tanh(), _like(self, x, rng)


def _statistics(self: RandomProgram, x: Tensor, rng: random.Random) -> Made:
    if x.dim() < 2:
        return None
    dim = _dim(x, rng)
    dims = tuple(sorted({dim, rng.randrange(x.dim())}))
    keep = rng.random() < 0.5
    operations: dict[str, Callable[..., Tensor]] = {
        "std": lambda x: x.std(dims, keepdim=keep, correction=0),
        "var": lambda x: x.var(dims, keepdim=keep, correction=0),
        "norm": lambda x: x.norm(dim=dim, keepdim=keep),
        "vector norm": lambda x: torch.linalg.vector_norm(x, 3, dims, keep),
        "prod": lambda x: x.prod(dim, keepdim=keep),
        "median": lambda x: x.median(dim, keepdim=keep).values,
        "min": lambda x: x.min(dim, keepdim=keep).values,
        "aminmax": lambda x: torch.aminmax(x, dim=dim, keepdim=keep)[1],
        "mean": lambda x: x.mean(dims, keepdim=keep),
        "nansum": lambda x: x.nansum(dims, keepdim=keep),
        "any": lambda x: (x > 0.3).any(dim, keepdim=keep).to(x) + x.sum(dim, keepdim=keep),
        "normalize": lambda x: F.normalize(x, dim=dim),
        "softmin": lambda x: F.softmin(x, dim=dim) * 3,
        "log softmax": lambda x: x.log_softmax(dim),
        "count": lambda x: x.count_nonzero(dim).to(x) + x.sum(dim),
    }
    return _pick(rng, operations, f"{dims} {keep}")


def _scan(self: RandomProgram, x: Tensor, rng: random.Random) -> Made:
    if x.dim() < 2:
        return None
    dim = _dim(x, rng)
    operations: dict[str, Callable[..., Tensor]] = {
        "cumprod": lambda x: x.cumprod(dim),
        "cummax": lambda x: x.cummax(dim).values,
        "logcumsumexp": lambda x: x.logcumsumexp(dim),
        "triu": lambda x: x.triu(),
        "roll two": lambda x: x.roll((1, 1), (0, dim)),
        "roll all": lambda x: x.roll(1),
        "flip two": lambda x: x.flip(0, dim),
        "repeat": lambda x: x.repeat(2, *[1] * x.dim()),
        "mask": lambda x: x.masked_fill(torch.ones(x.shape[-2:], dtype=torch.bool).triu(1), 0.0),
        "where": lambda x: torch.where(x > 0, x, x.roll(1, dim)),
    }
    return _pick(rng, operations, dim)


def _products(self: RandomProgram, x: Tensor, rng: random.Random) -> Made:
    if x.dim() < 2:
        return None
    dim, other = _dim(x, rng), _like(self, x, rng)
    operations: dict[str, Callable[..., Tensor]] = {
        "cdist": lambda x, y: torch.cdist(x, y),
        "cosine": lambda x, y: F.cosine_similarity(x, y, dim=dim),
        "cosines": lambda x, y: F.cosine_similarity(x.unsqueeze(1), y.unsqueeze(2), dim=-1),
        "distance": lambda x, y: F.pairwise_distance(x, y),
        "inner": lambda x, y: torch.inner(x, y).tanh(),
        "tensordot": lambda x, y: torch.tensordot(x, y, dims=([dim], [dim])).tanh(),
        "kron": lambda x, y: torch.kron(x[0], y[0]),
        "outer": lambda x, y: torch.outer(x.flatten(), y.flatten()),
        "bmm": lambda x, y: torch.bmm(x.flatten(0, -3), y.flatten(0, -3).mT) if x.dim() > 2 else x.mm(y.mT),
        "lerp": lambda x, y: torch.lerp(x, y, 0.3),
        "addcmul": lambda x, y: torch.addcmul(x, x, y),
        "hstack": lambda x, y: torch.hstack([x, y]),
        "column stack": lambda x, y: torch.column_stack([x, y]),
        "dstack": lambda x, y: torch.dstack([x, y]),
        "maximum": lambda x, y: torch.maximum(x, y),
        "addmm": lambda x, y: torch.addmm(x[..., :1].flatten(0, -2), x.flatten(0, -2), y.flatten(0, -2).mT).tanh(),
        "attention mask": lambda x, y: F.scaled_dot_product_attention(x, y, x, attn_mask=x @ y.mT),
        "causal": lambda x, y: F.scaled_dot_product_attention(x, x, y, is_causal=True),
    }
    return *_pick(rng, operations, dim), other  # type: ignore[misc]


def _with_weights(self: RandomProgram, x: Tensor, rng: random.Random) -> Made:
    if x.dim() < 2 or x.shape[-1] < 2:
        return None
    n, m = x.shape[-1], rng.choice([2, 4, 6])
    kind = rng.randrange(9)
    if kind == 0:
        w = self.make_weight(m, n, n)
        return "bilinear", lambda x: F.bilinear(x, x, w).tanh()
    if kind == 1:
        w = self.make_weight(x.shape[1])
        return "prelu", lambda x: F.prelu(x, w)
    if kind == 2:
        w, g = self.make_weight(m, n), self.make_weight(m, 1)
        return "weight norm", lambda x: F.linear(x, g * w / w.norm(dim=1, keepdim=True)).tanh()
    if kind == 3:
        w = self.make_weight(n)
        return "rms norm", lambda x: F.rms_norm(x, (n,), w, eps=0.1)
    if kind == 4:
        w, b = self.make_weight(x.shape[1]), self.make_weight(x.shape[1])
        return "batch norm", lambda x: F.batch_norm(x, None, None, w, b, training=True, eps=0.1)
    if kind == 5:
        w = self.make_weight(n, n)
        return "symmetric", lambda x: (x @ (w + w.mT)).tanh()
    if kind == 6:
        w = self.make_weight(m, n)
        return "tied", lambda x: ((x @ w.mT).tanh() @ w).tanh()
    if kind == 7:
        w = self.make_weight(3, m, n)
        return "packed", lambda x: torch.stack([F.linear(x, part) for part in w.unbind()], 1).tanh()
    w = self.make_weight(2 * m, n)
    return "swiglu", lambda x: F.silu(F.linear(x, w[:m])) * F.linear(x, w[m:])


def _lookup(self: RandomProgram, x: Tensor, rng: random.Random) -> Made:
    if x.dim() < 2 or x.shape[-1] < 2:
        return None
    n, k = x.shape[-1], rng.randint(1, 2)
    kind = rng.randrange(8)
    if kind == 0:
        table = self.make_weight(n, 3)
        return "argmax embedding", lambda x: F.embedding(x.argmax(-1), table)
    if kind == 1:
        table = self.make_weight(5, n)
        return "codebook", lambda x: x + table[torch.cdist(x.flatten(0, -2), table).argmin(-1)].view(x.shape)
    if kind == 2:
        experts = self.make_weight(n, 3, n)

        def mix(x: Tensor) -> Tensor:
            weights, chosen = x.softmax(-1).topk(k, -1)
            flat = x.flatten(0, -2)
            picked = experts[chosen.flatten(0, -2)]
            return (torch.einsum("tkoi,ti->tko", picked, flat).tanh() * weights.flatten(0, -2)[..., None]).sum(1)

        return f"experts {k}", mix
    if kind == 3:
        return f"topk scatter {k}", lambda x: torch.zeros_like(x).scatter(-1, x.topk(k, -1).indices, 1.0) * x
    if kind == 4:
        other = _like(self, x, rng)
        return "gather by argmax", lambda x, y: y.gather(-1, x.argmax(-1, keepdim=True)), other
    if kind == 5:
        return "one hot", lambda x: F.one_hot(x.argmax(-1), n).to(x) + x
    if kind == 6:
        other = _like(self, x, rng)
        return "sorted by other", lambda x, y: y.gather(-1, x.argsort(-1)), other
    return "rank", lambda x: x.argsort(-1).argsort(-1).to(x)


def _scatter(self: RandomProgram, x: Tensor, rng: random.Random) -> Made:
    if x.dim() < 2:
        return None
    dim = _dim(x, rng)
    n = x.shape[dim]
    numbers = [rng.randrange(n) for _ in range(n)]

    def index() -> Tensor:
        return torch.tensor(numbers)

    def wide(x: Tensor) -> Tensor:
        return index().view([-1 if d == dim else 1 for d in range(x.dim())]).expand(x.shape)

    operations: dict[str, Callable[..., Tensor]] = {
        "index add": lambda x: torch.zeros_like(x).index_add(dim, index(), x),
        "index copy": lambda x: x.index_copy(dim, index()[:1], x.narrow(dim, 0, 1)),
        "scatter add": lambda x: torch.zeros_like(x).scatter_add(dim, wide(x), x),
        "scatter reduce": lambda x: x.scatter_reduce(dim, wide(x), x, "amax"),
        "index put": lambda x: (
            x.index_put((index()[:2],), x[:1], accumulate=True) if dim == 0 else x + x[index() % len(x)].sum(0)
        ),
        "index two": lambda x: x[index() % x.shape[0], index() % x.shape[1]],
        "index middle": lambda x: x[..., index() % x.shape[-1]],
        "take": lambda x: x.take(index()),
        "select scatter": lambda x: x.select_scatter(x.select(dim, 0) * 2, dim, n - 1),
        "masked select": lambda x: x[:, torch.arange(x.shape[1]) % 2 == 0],
    }
    return _pick(rng, operations, f"{dim} {numbers}")


def _diagonals(self: RandomProgram, x: Tensor, rng: random.Random) -> Made:
    if x.dim() < 2:
        return None
    dims = rng.sample(range(x.dim()), 2)
    operations: dict[str, Callable[..., Tensor]] = {
        "diagonal": lambda x: x.diagonal(0, *dims),
        "off diagonal": lambda x: x.diagonal(1, *dims),
        "diag embed": lambda x: x.diag_embed(),
        "swap": lambda x: x.swapaxes(*dims),
        "move": lambda x: x.movedim(*dims),
        "trace": lambda x: torch.einsum("...ii->...i", x @ x.mT),
    }
    return _pick(rng, operations, dims)


def _images(self: RandomProgram, x: Tensor, rng: random.Random) -> Made:
    if x.dim() != 4:
        return None
    channels = x.shape[1]
    groups = rng.choice([g for g in range(1, channels + 1) if channels % g == 0])
    made = rng.choice([groups, 2 * groups])
    w, t = self.make_weight(made, channels // groups, 3, 1), self.make_weight(channels, made // groups, 2, 2)
    operations: dict[str, Callable[..., Tensor]] = {
        "conv2d": lambda x: F.conv2d(x, w, padding=(1, 0), groups=groups).tanh(),
        "conv transpose": lambda x: F.conv_transpose2d(x, t, stride=2, groups=groups).tanh(),
        "max pool": lambda x: F.max_pool2d(x, 2, ceil_mode=True),
        "adaptive pool": lambda x: F.adaptive_avg_pool2d(x, 1),
        "nearest": lambda x: F.interpolate(x, scale_factor=2),
        "bilinear up": lambda x: F.interpolate(x, size=(3, 3), mode="bilinear"),
        "pixel shuffle": lambda x: F.pixel_shuffle(x, 2) if channels % 4 == 0 else x.tanh(),
        "pixel unshuffle": lambda x: F.pixel_unshuffle(x, 2) if x.shape[2] % 2 == x.shape[3] % 2 == 0 else x.tanh(),
        "channel shuffle": lambda x: F.channel_shuffle(x, groups),
        "unfold": lambda x: F.unfold(x, (1, 2)) if x.shape[3] > 1 else x.tanh(),
        "fold": lambda x: F.fold(F.unfold(x, (1, 1)), x.shape[2:], (1, 1)),
        "grid sample": lambda x: F.grid_sample(x, torch.zeros(len(x), 2, 2, 2).to(x) + 0.1, align_corners=False),
        "sampled by itself": lambda x: (
            F.grid_sample(x, x.flatten(1)[:, :8].reshape(len(x), -1, 1, 2), align_corners=False)
            if x[0].numel() >= 8
            else x.tanh()
        ),
        "pad": lambda x: F.pad(x, (1, 0, 0, 1), mode="replicate"),
        "local norm": lambda x: F.local_response_norm(x, 2),
    }
    return _pick(rng, operations, f"{channels} -> {made}, {groups} groups")


def _spectral(self: RandomProgram, x: Tensor, rng: random.Random) -> Made:
    if x.dim() < 2:
        return None
    dim = _dim(x, rng)
    operations: dict[str, Callable[..., Tensor]] = {
        "fft": lambda x: torch.fft.fft(x, dim=dim).real,
        "rfft": lambda x: torch.fft.rfft(x, dim=dim).abs(),
        "filtered": lambda x: torch.fft.irfft(torch.fft.rfft(x, dim=dim) * 0.5j, n=x.shape[dim], dim=dim) + x,
        "fft2": lambda x: torch.fft.fft2(x).imag,
        "shift": lambda x: torch.fft.fftshift(x, dim=dim),
        "view as complex": lambda x: (
            torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous()).angle() if x.shape[-1] % 2 == 0 else x.tanh()
        ),
        "polar": lambda x: torch.view_as_real(torch.polar(x.abs(), x)).flatten(-2),
        "rotary": lambda x: torch.cat([-x[..., x.shape[-1] // 2 :], x[..., : x.shape[-1] // 2]], -1) * 0.5 + x,
    }
    return _pick(rng, operations, dim)


class _Recurrent(nn.Module):
    def __init__(self, program: RandomProgram, kind: str, n: int, m: int):
        super().__init__()
        self.layer = getattr(nn, kind)(n, m, batch_first=True).double()
        program.layers.append(self.layer)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)[0]


def _recurrent(self: RandomProgram, x: Tensor, rng: random.Random) -> Made:
    if x.dim() != 3:
        return None
    kind = rng.choice(["RNN", "LSTM", "GRU"])
    return kind, _Recurrent(self, kind, x.shape[-1], rng.choice([2, 4, x.shape[-1]]))


def _packed(self: RandomProgram, x: Tensor, rng: random.Random) -> Made:
    """Parts of one weight, cut along its first or last axis, that are applied to two values of one shape."""
    if x.dim() < 2 or x.shape[-1] < 2:
        return None
    n, m, other = x.shape[-1], rng.choice([2, 3, 4]), _like(self, x, rng)
    kind = rng.randrange(7)
    if kind == 0:
        w = self.make_weight(2 * m, n)
        return "rows for two", lambda x, y: F.linear(x, w[:m]).tanh() * F.linear(y, w[m:]), other
    if kind == 1:
        w, cut = self.make_weight(3 * m, n), rng.choice([m, 2 * m, m + 1])
        return f"rows cut at {cut}", lambda x, y: torch.cat([F.linear(x, w[:cut]), F.linear(y, w[cut:])], -1).tanh(), other
    if kind == 2:
        w = self.make_weight(2, m, n)
        return "stacked", lambda x, y: F.linear(x, w[0]).tanh() + F.linear(y, w[1]), other
    if kind == 3:
        w = self.make_weight(m, 2 * n)
        return "columns for two", lambda x, y: (F.linear(x, w[:, :n]) + F.linear(y, w[:, n:])).tanh(), other
    if kind == 4:
        w = self.make_weight(3, n)
        return "rows as biases", lambda x, y: (x + w[0]).tanh() * (y + w[2]), other
    if kind == 5:
        w = self.make_weight(2 * m, n)
        return "there and back", lambda x, y: F.linear(x, w[:m]).tanh() @ w[m:] + y, other
    w = self.make_weight(n, 2, m)
    return "stacked inside", lambda x, y: (x @ w[:, 0]).tanh() * (y @ w.select(1, 1)), other


def _shortcut(self: RandomProgram, x: Tensor, rng: random.Random) -> Made:
    """The sum of a value and what another random operation makes of it, if the shapes fit."""
    made = rng.choice(_NEW)(self, x, rng)
    if made is None or len(made) > 2:
        return None
    return f"plus {made[0]}", lambda x, f=made[1]: x + (y if (y := f(x)).shape == x.shape else 0)


_NEW = [
    _einsum, _self_einsum, _statistics, _scan, _products, _with_weights, _lookup, _scatter, _diagonals, _images, _images,
    _spectral, _recurrent,
]  # fmt: skip

MORE_MAKERS = [*MAKERS, *_NEW, *_NEW, _shortcut, _shortcut]

PACKED_MAKERS = [*MAKERS, *[_packed] * 12]
