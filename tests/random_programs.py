"""Random programs of the operations that have rules, on small tensors with nested axes."""

import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

_MAX_ENTRIES = 1500
_BATCH = 2


class RandomProgram(nn.Module):
    """A network drawn by a seed: each operation takes results of earlier ones, and the last results are read out.

    The text of the program is in `lines`.
    """

    def __init__(self, seed: int, max_operations: int = 9, makers: Sequence[Callable[..., Any]] = ()):
        super().__init__()
        self.random = random.Random(seed)
        self.makers = makers or MAKERS
        self.weights = nn.ParameterList()
        self.layers = nn.ModuleList()
        self.steps: list[tuple[Callable[..., Tensor], tuple[int, ...]]] = []
        self.lines: list[str] = []
        torch.manual_seed(seed)
        self.values = [self.draw_input()]
        self._start()
        for _ in range(self.random.randint(2, max_operations)):
            self._add_operation()
        self._read_out()
        self.values = []

    @staticmethod
    def draw_input() -> Tensor:
        return torch.randn(_BATCH, 3, dtype=torch.float64)

    def forward(self, x: Tensor) -> list[Tensor]:
        values = [x]
        for function, numbers in self.steps:
            values.append(function(*(values[i] for i in numbers)))
        return [values[i] for i in self.outputs]

    def make_weight(self, *shape: int) -> nn.Parameter:
        self.weights.append(nn.Parameter(torch.randn(shape, dtype=torch.float64)))
        return self.weights[-1]

    def add(self, text: str, function: Callable[..., Tensor], *numbers: int) -> bool:
        """Append an operation, unless it does not take these operands, or its result is empty or too large."""
        try:
            value = function(*(self.values[i] for i in numbers))
        except (RuntimeError, IndexError, ValueError):
            return False
        if not 0 < value.numel() <= _MAX_ENTRIES or value.dim() > 5:
            return False
        self.lines.append(f"v{len(self.values)} {tuple(value.shape)} = {text} of {', '.join(f'v{i}' for i in numbers)}")
        self.steps.append((function, numbers))
        self.values.append(value.detach())
        return True

    def _start(self) -> None:
        for _ in range(self.random.randint(1, 2)):
            width = self.random.choice([4, 6, 8, 12])
            weight, bias = self.make_weight(width, 3), self.make_weight(width)
            self.add("linear", lambda x, w=weight, b=bias: F.linear(x, w, b).tanh(), 0)
        kind = self.random.random()
        if kind < 0.4:
            weight = self.make_weight(*(self.random.choice([2, 3, 4, 6]) for _ in range(self.random.randint(2, 3))))
            self.add("table", lambda x, w=weight: (x.sum(1).view(_BATCH, *[1] * w.dim()) * w).sin(), 0)
        elif kind < 0.7:
            shape = [self.random.choice([2, 3, 4]) for _ in range(self.random.randint(1, 2))]
            last = self.values[-1].shape[-1]
            weight = self.make_weight(*shape, last)
            self.add("scaled", lambda x, w=weight: x.view(_BATCH, *[1] * (w.dim() - 1), -1) * w, len(self.values) - 1)

    def _add_operation(self) -> None:
        for _ in range(20):
            first = max(self.random.randrange(1, len(self.values)) for _ in range(2))
            make = self.random.choice(self.makers)
            made = make(self, self.values[first], self.random)
            if made is not None and self.add(made[0], made[1], first, *made[2:]):
                return

    def _read_out(self) -> None:
        self.outputs = []
        used = {i for _, numbers in self.steps for i in numbers}
        unused = [i for i in range(1, len(self.values)) if i not in used]
        for number in unused[-2:] or [len(self.values) - 1]:
            value, kind = self.values[number], self.random.randrange(7)
            if kind < 3 or value.dim() == 0:
                added = self.add("sum", lambda x: x.sin().sum(), number)
            elif kind == 3 and value.shape[0] == _BATCH and value.dim() > 1:
                weight = self.make_weight(value[0].numel(), 2)
                added = self.add("all", lambda x, w=weight: x.flatten(1) @ w, number)
            else:
                dim = self.random.randrange(value.dim())
                weight = self.make_weight(2, value.shape[dim])
                added = self.add(
                    f"along {dim}",
                    lambda x, w=weight, d=dim: F.linear(x.movedim(d, -1), w).sin().reshape(-1, 2).sum(0),
                    number,
                )
            self.outputs += [len(self.values) - 1] if added else []
        self.outputs = self.outputs or [len(self.values) - 1]


Made = tuple[Any, ...] | None  # a text, a function, the numbers of further operands


def _dim(x: Tensor, rng: random.Random) -> int | None:
    wide = [d for d, n in enumerate(x.shape) if n > 1]
    return rng.choice(wide) if wide else None


def _factorise(n: int, rng: random.Random) -> list[int]:
    factors = []
    while n > 1:
        divisors = [d for d in range(2, n + 1) if n % d == 0]
        factors.append(rng.choice(divisors))
        n //= factors[-1]
    return factors


def _linear(self: RandomProgram, x: Tensor, rng: random.Random) -> Made:
    if not x.dim():
        return None
    weight = self.make_weight(rng.choice([2, 4, 6, x.shape[-1]]), x.shape[-1])
    return "linear", lambda x, w=weight: F.linear(x, w).tanh()


def _parameter(self: RandomProgram, x: Tensor, rng: random.Random) -> Made:
    start = rng.randrange(x.dim() + 1)
    weight = self.make_weight(*(n if rng.random() < 0.8 else 1 for n in x.shape[start:]))
    times = rng.random() < 0.5
    return "parameter", lambda x, w=weight, t=times: x * w if t else x + w


def _only_parameter(self: RandomProgram, x: Tensor, rng: random.Random) -> Made:
    weight = self.make_weight(*x.shape)
    return "new parameter", lambda x, w=weight: w.sin()


def _elementwise(self: RandomProgram, x: Tensor, rng: random.Random) -> Made:
    name = rng.choice(["tanh", "sin", "square", "abs"])
    return name, lambda x, n=name: getattr(x, n)()


def _same_shape(self: RandomProgram, x: Tensor, rng: random.Random) -> Made:
    def fits(y: Tensor) -> bool:
        return all(a == b or 1 in (a, b) for a, b in zip(reversed(x.shape), reversed(y.shape), strict=False))

    others = [i for i in range(1, len(self.values)) if fits(self.values[i])]
    times = rng.random() < 0.5
    return "times" if times else "plus", lambda x, y, t=times: x * y if t else x + y, rng.choice(others)


def _reshape(self: RandomProgram, x: Tensor, rng: random.Random) -> Made:
    shape = _factorise(x.numel(), rng)
    while len(shape) > 4:
        i = rng.randrange(len(shape) - 1)
        shape[i : i + 2] = [shape[i] * shape[i + 1]]
    return f"reshape {shape}", lambda x, s=tuple(shape): x.reshape(s)


def _unflatten(self: RandomProgram, x: Tensor, rng: random.Random) -> Made:
    dim = _dim(x, rng)
    if dim is None:
        return None
    sizes = _factorise(x.shape[dim], rng)
    return f"unflatten {dim} {sizes}", lambda x, d=dim, s=tuple(sizes): x.unflatten(d, s)


def _flatten(self: RandomProgram, x: Tensor, rng: random.Random) -> Made:
    if x.dim() < 2:
        return None
    dim = rng.randrange(x.dim() - 1)
    return f"flatten {dim}", lambda x, d=dim: x.flatten(d, d + 1)


def _permute(self: RandomProgram, x: Tensor, rng: random.Random) -> Made:
    order = list(range(x.dim()))
    rng.shuffle(order)
    return f"permute {order}", lambda x, o=tuple(order): x.permute(o)


def _concatenate(self: RandomProgram, x: Tensor, rng: random.Random) -> Made:
    if not x.dim():
        return None
    dim = rng.randrange(x.dim())
    others = [
        i
        for i, y in enumerate(self.values)
        if i
        and y.dim() == x.dim()
        and all(d == dim or a == b for d, (a, b) in enumerate(zip(x.shape, y.shape, strict=True)))
    ]
    kind = rng.randrange(3)
    if kind == 0:
        return f"cat {dim} with zeros", lambda x, d=dim: torch.cat([x, torch.zeros_like(x)], d)
    return f"cat {dim}", lambda x, y, d=dim: torch.cat([x, y], d), rng.choice(others)


def _stack(self: RandomProgram, x: Tensor, rng: random.Random) -> Made:
    dim, others = rng.randrange(x.dim() + 1), [i for i, y in enumerate(self.values) if i and y.shape == x.shape]
    kind = rng.randrange(3)
    if kind == 0:
        return f"stack {dim} with zeros", lambda x, d=dim: torch.stack([x, torch.zeros_like(x)], d)
    return f"stack {dim}", lambda x, y, d=dim: torch.stack([x, y], d), rng.choice(others)


def _chunk(self: RandomProgram, x: Tensor, rng: random.Random) -> Made:
    dim = _dim(x, rng)
    if dim is None:
        return None
    mark = rng.randrange(1, x.shape[dim])
    kind = rng.randrange(5)
    if kind == 0:
        return f"swap {dim} {mark}", lambda x, d=dim, m=mark: torch.cat(x.tensor_split([m], d)[::-1], d)
    if kind == 1:
        return f"narrow {dim} {mark}", lambda x, d=dim, m=mark: x.narrow(d, 0, m)
    if kind == 2:
        return f"select {dim} {mark}", lambda x, d=dim, m=mark: x.select(d, m)
    if kind == 3 and x.shape[dim] % 2 == 0:
        return f"halves {dim}", lambda x, d=dim: torch.add(*x.chunk(2, d)) * 2 + x.chunk(2, d)[0]
    return f"step {dim}", lambda x, d=dim: x.movedim(d, 0)[::2].movedim(0, d)


def _glu(self: RandomProgram, x: Tensor, rng: random.Random) -> Made:
    dims = [d for d, n in enumerate(x.shape) if n % 2 == 0]
    if not dims:
        return None
    dim = rng.choice(dims)
    return f"glu {dim}", lambda x, d=dim: F.glu(x, d)


def _softmax(self: RandomProgram, x: Tensor, rng: random.Random) -> Made:
    dim = _dim(x, rng)
    return None if dim is None else (f"softmax {dim}", lambda x, d=dim: x.softmax(d) * 3)


def _layer_norm(self: RandomProgram, x: Tensor, rng: random.Random) -> Made:
    if x.dim() < 2 or x.shape[-1] < 2:
        return None
    count = rng.randint(1, x.dim() - 1)
    shape = x.shape[-count:]
    weight = self.make_weight(*shape) if rng.random() < 0.5 else None
    return f"layer norm {count}", lambda x, s=shape, w=weight: F.layer_norm(x, s, w, eps=0.1)


def _channel_norm(self: RandomProgram, x: Tensor, rng: random.Random) -> Made:
    if x.dim() < 3 or x.shape[1] < 2:
        return None
    groups = rng.choice([g for g in range(1, x.shape[1] + 1) if x.shape[1] % g == 0])
    weight = self.make_weight(x.shape[1]) if rng.random() < 0.5 else None
    if rng.random() < 0.3:
        return "instance norm", lambda x, w=weight: F.instance_norm(x.flatten(2), weight=w, eps=0.1).view(x.shape)
    return f"group norm {groups}", lambda x, g=groups, w=weight: F.group_norm(x, g, w, eps=0.1)


def _reduce(self: RandomProgram, x: Tensor, rng: random.Random) -> Made:
    dim = _dim(x, rng)
    if dim is None:
        return None
    name, keep = rng.choice(["sum", "mean", "amax", "logsumexp"]), rng.random() < 0.5
    return f"{name} {dim} {keep}", lambda x, n=name, d=dim, k=keep: getattr(x, n)(d, keepdim=k)


def _gram(self: RandomProgram, x: Tensor, rng: random.Random) -> Made:
    if x.dim() < 2:
        return None
    if rng.random() < 0.5:
        return "x xT", lambda x: (x @ x.mT) / x.shape[-1]
    return "xT x", lambda x: (x.mT @ x) / x.shape[-2]


def _matmul(self: RandomProgram, x: Tensor, rng: random.Random) -> Made:
    if x.dim() < 2:
        return None
    others = [i for i, y in enumerate(self.values) if i and y.dim() >= 2 and y.shape[-2] == x.shape[-1]]
    others = [i for i in others if self.values[i].dim() == 2 or self.values[i].shape[:-2] == x.shape[:-2]]
    return ("matmul", lambda x, y: (x @ y).tanh(), rng.choice(others)) if others else None


def _experts(self: RandomProgram, x: Tensor, rng: random.Random) -> Made:
    if x.dim() < 3:
        return None
    weight = self.make_weight(x.shape[1], x.shape[-1], rng.choice([2, 4, x.shape[-1]]))
    return "experts", lambda x, w=weight: torch.einsum("be...i,eio->be...o", x, w).tanh()


def _attention(self: RandomProgram, x: Tensor, rng: random.Random) -> Made:
    if x.dim() < 3:
        return None
    others = [i for i, y in enumerate(self.values) if y.shape == x.shape]
    return (
        "attention",
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v) * 3,
        rng.choice(others),
        rng.choice(others),
    )


def _reorder(self: RandomProgram, x: Tensor, rng: random.Random) -> Made:
    dim = _dim(x, rng)
    if dim is None:
        return None
    n = x.shape[dim]
    operations: dict[str, Callable[[Tensor], Tensor]] = {
        "roll": lambda x: x.roll(1, dim),
        "flip": lambda x: x.flip(dim),
        "cumsum": lambda x: x.cumsum(dim),
        "sort": lambda x: x.sort(dim).values,
        "topk": lambda x: x.topk(max(1, n // 2), dim).values,
        "kthvalue": lambda x: x.kthvalue(1, dim).values,
        "tril": lambda x: x.tril() if x.dim() > 1 else x,
        "index": lambda x: x.index_select(dim, (torch.arange(n) * 2 + 1) % n),
        "shorter index": lambda x: x.movedim(dim, 0)[torch.tensor([n - 1, 0])].movedim(0, dim),
        "argsort": lambda x: x.gather(dim, x.argsort(dim)),
        "argmax": lambda x: x.gather(dim, x.argmax(dim, keepdim=True)),
        "choose": lambda x: x.gather(dim, (x > 0).long()),
        "max": lambda x: x.max(dim).values,
        "where": lambda x: x.max(dim, keepdim=True).indices * x,
        "shift": lambda x: F.pad(x.movedim(dim, -1), (1, -1)).movedim(-1, dim),
        "pad": lambda x: F.pad(x.movedim(dim, -1), (1, 1)).movedim(-1, dim),
        "reflect": lambda x: F.pad(x.movedim(dim, -1).reshape(1, -1, n), (1, 0), "reflect").sum(1),
        "unfold": lambda x: x.unfold(dim, 2, 1),
        "positions": lambda x: (x.movedim(dim, -1) * torch.arange(n).to(x)).movedim(-1, dim),
        "scatter": lambda x: torch.slice_scatter(x, torch.zeros_like(x.narrow(dim, 0, 1)), dim, 0, 1),
        "pooled": lambda x: F.avg_pool1d(x.movedim(dim, -1).reshape(1, -1, n), 2, 1).sum(1),
    }
    name = rng.choice(list(operations))
    return f"{name} {dim}", operations[name]


def _reordered_sum(self: RandomProgram, x: Tensor, rng: random.Random) -> Made:
    made = _reorder(self, x, rng)
    if made is None or made[1](x).shape != x.shape:
        return None
    return f"plus {made[0]}", lambda x, f=made[1]: x + f(x)


def _repeat(self: RandomProgram, x: Tensor, rng: random.Random) -> Made:
    if not x.dim():
        return None
    dim, times = rng.randrange(x.dim()), rng.choice([2, 3])
    tiles = [times if d == dim else 1 for d in range(x.dim())]
    kind = rng.randrange(4)
    if kind == 0:
        return f"interleave {dim} {times}", lambda x, d=dim, t=times: x.repeat_interleave(t, d)
    if kind == 1:
        return f"tile {dim} {times}", lambda x, t=tuple(tiles): x.tile(t)
    if kind == 2:
        return f"both {dim} {times}", lambda x, d=dim, n=times, t=tuple(tiles): x.repeat_interleave(n, d) * x.tile(t)
    return f"expand {dim} {times}", lambda x, d=dim, t=times: x.unsqueeze(d).expand(*x.shape[:d], t, *x.shape[d:])


def _convolution(self: RandomProgram, x: Tensor, rng: random.Random) -> Made:
    if x.dim() != 3:
        return None
    channels, length = x.shape[1:]
    groups = rng.choice([g for g in range(1, channels + 1) if channels % g == 0])
    kernel = rng.choice([1, 1, 3])
    if length + 2 < kernel:
        return None
    made = rng.choice([channels, groups, 2 * groups])
    weight = self.make_weight(made, channels // groups, kernel)
    return (
        f"conv {channels} -> {made}, {groups} groups, kernel {kernel}",
        lambda x, w=weight, k=kernel, g=groups: F.conv1d(x, w, padding=k // 2, groups=g).tanh(),
    )


def _residual_convolution(self: RandomProgram, x: Tensor, rng: random.Random) -> Made:
    if x.dim() != 3:
        return None
    weight = self.make_weight(x.shape[1], x.shape[1], 1)
    return "residual conv", lambda x, w=weight: x + F.conv1d(x, w).tanh()


def _residual_linear(self: RandomProgram, x: Tensor, rng: random.Random) -> Made:
    if not x.dim():
        return None
    weight = self.make_weight(x.shape[-1], x.shape[-1])
    return "residual linear", lambda x, w=weight: x + F.linear(x, w).tanh()


MAKERS = [
    _linear, _parameter, _parameter, _only_parameter, _elementwise, _same_shape, _same_shape, _same_shape, _reshape,
    _unflatten, _unflatten, _flatten, _flatten, _permute, _permute, _concatenate, _concatenate, _stack, _chunk, _chunk, _glu,
    _softmax, _layer_norm, _channel_norm, _reduce, _gram, _matmul, _experts, _attention, _reorder, _reordered_sum,
    _reordered_sum, _repeat, _repeat, _convolution, _convolution, _residual_convolution, _residual_linear,
]  # fmt: skip


def measure(model: RandomProgram, symmetry: Any, num_trials: int = 3) -> float:
    """The largest change of the outputs under random permutations, at random weights and inputs, relative to their scale.

    A program that amplifies rounding errors, as one that sorts equal numbers does, is not judged there.
    """
    worst = 0.0
    for trial in range(num_trials):
        generator = torch.Generator().manual_seed(trial)
        state = {
            key: torch.randn(value.shape, generator=generator, dtype=torch.float64)
            for key, value in model.state_dict().items()
        }
        x = torch.randn(_BATCH, 3, generator=generator, dtype=torch.float64)
        expected = _run(model, state, x)
        found = _run(model, symmetry.random(generator).apply(state), x)
        error = _difference(expected, found)
        if error > 1e-9:
            noise = [1 + 1e-14 * torch.randn(value.shape, generator=generator).double() for value in state.values()]
            jittered = {key: value * n for (key, value), n in zip(state.items(), noise, strict=True)}
            if _difference(expected, _run(model, jittered, x)) < 1e-10:
                worst = max(worst, error)
    return worst


def _run(model: nn.Module, state: dict[str, Tensor], x: Tensor) -> list[Tensor]:
    model.load_state_dict(state)
    with torch.no_grad():
        return model(x)


def _difference(expected: list[Tensor], found: list[Tensor]) -> float:
    return max(float((a - b).abs().max()) / max(1e-2, float(a.abs().max())) for a, b in zip(expected, found, strict=True))
