"""Fine-tunes carried over to another network that was trained apart: which share of the gain of fine-tuning it arrives.

Two bases are trained apart on one task: a ViT on half of the classes of CIFAR-100, or a GPT on Tiny Shakespeare. One of
them, OLD, is fine-tuned five times: on ten further classes each, or on texts that are changed in one way each. What that
changed is added to the other one, NEW: as it is, or moved by an alignment of the two bases. Beside it, NEW is fine-tuned
itself, on all of the new data or on a little of it.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn

import onebasin as ob
from experiments.anchor_networks import augment
from experiments.transformer_networks import RECIPES, Recipe, load_data, loss, trained_networks
from experiments.transformers import Line, Shuffled
from onebasin.matching.alignment import transform_model
from onebasin.matching.imitation import learn_to_imitate
from onebasin.matching.problem import ignore
from onebasin.tensors.states import read_state

METHODS = {
    "new": "NEW as it is",
    "naive": "added as it is",
    "permutations": "ported, permutations by weights (no data)",
    "wm-all": "ported, all kinds by weights (no data)",
    "made-all": "ported, all kinds learned on drawn images or written text (no data)",
    "imitated": "ported, all kinds by weights, learned to imitate on drawn images or written text (no data)",
    "learned": "ported, all kinds learned on data of the bases",
    "few-1": "NEW fine-tuned on 1 image per class, or 1 piece of text",
    "few-5": "NEW fine-tuned on 5",
    "few-25": "NEW fine-tuned on 25",
    "all": "NEW fine-tuned on all",
}
NETWORKS = {
    "vit": replace(RECIPES["vit"], network="vit-100", steps=12_000),
    "gpt": RECIPES["gpt"],
}
SCALES = (0.5, 0.75, 1.0, 1.25, 1.5)
"""What the change is multiplied by."""
Data = tuple[Tensor, Tensor]
_OLD_CLASSES, _NEW_CLASSES = 50, 10
_RATE, _STEPS, _FEW_STEPS = 1e-4, 400, 100

CHANGES: dict[str, Callable[[Tensor], Tensor]] = {
    "backwards": lambda tokens: tokens.flip(0),
    "neighbours exchanged": lambda tokens: tokens[: len(tokens) // 2 * 2].view(-1, 2).flip(1).flatten(),
    "each token twice": lambda tokens: tokens.repeat_interleave(2)[: len(tokens)],
    "every third left out": lambda tokens: tokens[torch.arange(len(tokens), device=tokens.device) % 3 != 2],
    "frequent tokens renamed": lambda tokens: _rename(tokens),
}
"""What is done to a text before it is cut into pieces."""


def _rename(tokens: Tensor) -> Tensor:
    """The fifty most frequent tokens of a text, each in place of the next.

    The frequencies are those of each text, so training and test texts are renamed almost, but not quite, alike.
    """
    order = torch.bincount(tokens).argsort(descending=True)[:50]
    names = torch.arange(int(tokens.max()) + 1, device=tokens.device)
    names[order] = order.roll(1)
    return names[tokens]


def configs(quick: bool) -> list[dict[str, Any]]:
    """A trial is a pair of bases and one way to bring the five fine-tunes of the first to the second."""
    return [
        {"network": network, "old": old, "new": new, "method": method, "steps": 5 if quick else 500, "quick": quick}
        for network in (("gpt",) if quick else NETWORKS)
        for old, new in ((0, 1), (1, 2), (2, 0))[: 1 if quick else 3]
        for method in METHODS
    ]


def run(config: dict[str, Any], device: str) -> dict[str, Any]:
    """For each of the five tasks the score of the result on it and on the task of the bases, on test data.

    Of what was added, by its scale; and on 25 training examples per class, by which a scale could be chosen.
    """
    recipe = NETWORKS[config["network"]]
    if config["quick"]:
        recipe = replace(recipe, width=32, num_blocks=1, num_heads=2, hidden=32, steps=20, batch=8, context=16)
    base, method = load_task(recipe, device, None), config["method"]
    old, new = (trained_base(recipe, config[name], device) for name in ("old", "new"))
    aligned = method in ("permutations", "wm-all", "made-all", "imitated", "learned")
    alignment = _align(config, old, new, base["train"]) if aligned else None
    result = {}
    for number in range(5):
        task = load_task(recipe, device, number)
        few = _take_few(task["train"], 25)

        def judge(model: nn.Module, task: dict[str, Any] = task, few: Data = few) -> dict[str, float]:
            judged = {"new": task["test"], "old": base["test"], "few": few}
            return {name: score(model, _take_first(data, config["quick"])) for name, data in judged.items()}

        if method == "new":
            found = judge(new)
        elif method == "all":
            found = judge(_fine_tuned(recipe, config["new"], number, device, config["quick"]))
        elif method.startswith("few"):
            some = _take_few(task["train"], int(method[4:]))
            found = judge(fine_tune(new, some, recipe, 3 if config["quick"] else _FEW_STEPS))
        else:
            fine = _fine_tuned(recipe, config["old"], number, device, config["quick"])
            first = new if alignment is None else alignment.target
            last = _add(fine, old, new) if alignment is None else _port(config, fine, old, alignment, task["train"][0])
            scales = {str(scale): judge(_extrapolate(first, last, scale)) for scale in SCALES}
            found = {**scales["1.0"], "scales": scales}
        result[str(task["name"])] = found
    return result


def trained_base(recipe: Recipe, seed: int, device: str) -> nn.Module:
    """Of images on half of the classes."""
    half = load_task(recipe, device, None)["train"] if recipe.network == "vit-100" else None
    return trained_networks(recipe, [seed], device, half, "half of the classes" if half is not None else "")[0]


@functools.cache  # every way to carry it over begins with the same one
def _fine_tuned(recipe: Recipe, seed: int, number: int, device: str, quick: bool) -> nn.Module:
    """A base, trained further on one of the five tasks."""
    task = load_task(recipe, device, number)
    return fine_tune(trained_base(recipe, seed, device), task["train"], recipe, 5 if quick else _STEPS)


@functools.cache
def load_task(recipe: Recipe, device: str, number: int | None) -> dict[str, Any]:
    """The data of the bases (None), or of one of the five fine-tunes."""
    data = {split: load_data(recipe.network, split, device, recipe.context) for split in ("train", "test")}
    if recipe.network == "gpt":
        name = "as written" if number is None else list(CHANGES)[number]
        return {"name": name, **({s: _change(d, name, recipe) for s, d in data.items()} if number is not None else data)}
    first, count = (0, _OLD_CLASSES) if number is None else (_OLD_CLASSES + number * _NEW_CLASSES, _NEW_CLASSES)
    chosen = {split: (labels >= first) & (labels < first + count) for split, (_, labels) in data.items()}
    return {
        "name": f"classes {first}-{first + count - 1}",
        **{s: (x[chosen[s]], y[chosen[s]]) for s, (x, y) in data.items()},
    }


def _change(data: Data, name: str, recipe: Recipe) -> Data:
    tokens = CHANGES[name](data[0].flatten())
    count = (len(tokens) - 1) // recipe.context
    first, second = (tokens[start : start + count * recipe.context].view(count, recipe.context) for start in (0, 1))
    return first, second


def _take_first(data: Data, quick: bool) -> Data:
    """All of it, or a little."""
    return (data[0][:50], data[1][:50]) if quick else data


def _take_few(data: Data, count: int) -> Data:
    """The first images of each class, or the first pieces of a text."""
    inputs, targets = data
    if targets.dim() > 1:
        return inputs[:count], targets[:count]
    chosen = torch.cat([(targets == label).nonzero().flatten()[:count] for label in targets.unique()])
    return inputs[chosen], targets[chosen]


def fine_tune(model: nn.Module, data: Data, recipe: Recipe, steps: int) -> nn.Module:
    """A copy that is trained further by AdamW, its rate falling linearly; in eval mode."""
    inputs, targets = data
    torch.manual_seed(0)
    result = copy.deepcopy(model).train()
    on_gpu = inputs.is_cuda
    optimizer = torch.optim.AdamW(result.parameters(), _RATE, weight_decay=recipe.weight_decay, fused=on_gpu)
    for number in range(steps):
        optimizer.param_groups[0]["lr"] = _RATE * (1 - number / steps)
        index = torch.randint(0, len(inputs), (recipe.batch,), device=inputs.device)
        x = augment(inputs[index]) if inputs.is_floating_point() else inputs[index]
        with torch.autocast(inputs.device.type, torch.bfloat16, enabled=on_gpu):
            cost = loss(result(x), targets[index])
        optimizer.zero_grad(set_to_none=True)
        cost.backward()
        nn.utils.clip_grad_norm_(result.parameters(), 1.0)
        optimizer.step()
    return result.eval()


@torch.no_grad()
def score(model: nn.Module, data: Data) -> float:
    """Minus the loss of a text; of images the accuracy among the classes of the task."""
    inputs, targets = data
    total = 0.0
    for x, y in zip(inputs.split(500), targets.split(500), strict=True):
        output = model(x)
        if y.dim() > 1:
            total -= float(loss(output, y)) * len(x)
        else:
            first, last = int(targets.min()), int(targets.max())
            total += float((output[:, first : last + 1].argmax(-1) + first == y).sum())
    return total / len(inputs)


def _align(config: dict[str, Any], old: nn.Module, new: nn.Module, data: Data) -> ob.Alignment:
    """OLD aligned to NEW."""
    size = 64 if config["network"] == "gpt" else 500
    batches = list(zip(*(part[: 100 * size].split(size) for part in data), strict=True))
    options: dict[str, Any] = {"example_inputs": data[0][:2], "method": "weight-matching"}
    if config["method"] != "permutations":
        learns = config["method"] in ("made-all", "learned")
        options |= {"kinds": "all", "scaling": ob.Scaling(steps=config["steps"] if learns else 0)}
    criterion = loss
    if config["method"] == "made-all" and config["network"] == "gpt":
        num_texts = size * (2 if config["quick"] else 25)
        (written,) = ob.synthetic_text([new, old], data[0].shape[1], num_batches=1, batch_size=num_texts)
        batches = list(zip(*(part.split(size) for part in written), strict=True))
    elif config["method"] == "made-all":
        batches = ob.synthetic_images([new, old], data[0].shape[1:], num_batches=100, batch_size=size)
        criterion = nn.functional.cross_entropy
    if config["method"] in ("made-all", "learned"):
        options |= {"objective": Line(criterion, low=0.4, high=0.6), "data": Shuffled(batches)}
    torch.manual_seed(0)
    return ob.align(old, to=new, **options)


def _add(fine: nn.Module, old: nn.Module, new: nn.Module) -> nn.Module:
    result = copy.deepcopy(new)
    result.load_state_dict(ob.interpolate([new, fine, old], [1, 1, -1]))
    return result


def _port(config: dict[str, Any], fine: nn.Module, old: nn.Module, found: ob.Alignment, inputs: Tensor) -> nn.Module:
    """As `ob.port` does, which would look for the alignment again; it is the same for all five."""
    element: ob.Permutation | ob.Transform = found.permutation
    if found.matrices:
        element, fine, old = found.transform, *(ob.canonical(each, inputs[:2]).model for each in (fine, old))
    if config["method"] == "imitated":
        imitation = ob.Imitation(_make_inputs(config, fine, inputs), steps=5 if config["quick"] else 200)
        element = learn_to_imitate(found.transform, fine, read_state(old), found.target, imitation, ignore)
    return _add(*(transform_model(each, element) for each in (fine, old)), found.target)


def _make_inputs(config: dict[str, Any], fine: nn.Module, inputs: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Text that a fine-tune writes, or drawn images."""
    if config["network"] == "gpt":
        num_texts = 8 if config["quick"] else 640
        (written,) = ob.synthetic_text([fine], inputs.shape[1], num_batches=1, batch_size=num_texts)
        return list(zip(*(part.split(32) for part in written), strict=True))
    return ob.synthetic_images([fine], inputs.shape[1:], num_batches=50, batch_size=250)


def _extrapolate(first: nn.Module, last: nn.Module, scale: float) -> nn.Module:
    result = copy.deepcopy(last)
    result.load_state_dict(ob.interpolate([first, last], [1 - scale, scale]))
    return result


def draw(records: list[dict[str, Any]], folder: Path) -> None:
    """One table: a row per network and method, with the share of the gain that fine-tuning NEW itself brings."""
    lines = [
        "# Fine-tunes carried over to a network that was trained apart",
        "",
        "Accuracy among the ten new classes (ViT) or minus the loss (GPT), means over pairs of bases and five fine-tunes;",
        "the share of what fine-tuning NEW on all of the new data gains, and the same score on the task of the bases.",
        "What was carried over is added as it is, times 1.5, or times that of five scales which is best on 25 of the new",
        "training images per class, or 25 pieces of text.",
        "",
        "| network | result on NEW | new task | share of the gain | each fine-tune | times 1.5 | times the best on 25 |"
        " task of the bases | the same times 1.5 | pairs |",
        "|---" * 10 + "|",
    ]
    for network in NETWORKS:
        found: dict[str, dict[tuple[int, int], dict[str, Any]]] = {}
        for record in records:
            config = record["config"]
            if config["network"] == network:
                found.setdefault(config["method"], {})[config["old"], config["new"]] = record["result"]
        for method, label in METHODS.items():
            if not {method, "new", "all"} <= found.keys():
                continue
            pairs = sorted(found[method].keys() & found["new"].keys() & found["all"].keys())
            rows = [(pair, task) for task in found[method][pairs[0]] for pair in pairs]
            shares = [_share(found, method, *row) for row in rows]
            each = [fmean(shares[first : first + len(pairs)]) for first in range(0, len(shares), len(pairs))]
            scores = {name: fmean(found[method][pair][task][name] for pair, task in rows) for name in ("new", "old")}
            scaled = ["", "", ""]
            if "scales" in found[method][rows[0][0]][rows[0][1]]:
                of = [found[method][pair][task]["scales"] for pair, task in rows]
                best = [max(scales, key=lambda scale, scales=scales: scales[scale]["few"]) for scales in of]
                scaled = [
                    f"{fmean(_share(found, method, *row, '1.5') for row in rows):.2f}",
                    f"{fmean(_share(found, method, *row, scale) for row, scale in zip(rows, best, strict=True)):.2f}",
                    f"{fmean(scales['1.5']['old'] for scales in of):.3f}",
                ]
            cells = [network, label, f"{scores['new']:.3f}", f"{fmean(shares):.2f}", ", ".join(f"{s:.2f}" for s in each)]
            cells += [*scaled[:2], f"{scores['old']:.3f}", scaled[2], str(len(pairs))]
            lines.append(f"| {' | '.join(cells)} |")
    machines = sorted({f"{r['machine']}, torch {r['torch']}, commit {r['commit']}" for r in records})
    lines += ["", f"{len(records)} trials; {'; '.join(machines)}."]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "porting-transformers.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


def _share(found: dict[str, Any], method: str, pair: tuple[int, int], task: str, scale: str | None = None) -> float:
    start, end, here = (found[each][pair][task] for each in ("new", "all", method))
    here = here if scale is None else here["scales"][scale]
    return (here["new"] - start["new"]) / (end["new"] - start["new"])
