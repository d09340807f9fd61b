"""What `onebasin.merge` did to each model: for the report, the card and the files of the command ``merge``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import onebasin as ob
from onebasin.checkpoints import CheckpointSet
from onebasin.cli import outputs
from onebasin.cli.run_record import RunRecord
from onebasin.landscape.calibration import Repair, RepairForm
from onebasin.matching.problem import Entry
from onebasin.reporting.model_card import Ingredient, ModelCard
from onebasin.tensors.distances import LayerDistance, find_layer_distances
from onebasin.tensors.states import State


@dataclass(frozen=True)
class Alignments:
    """What `onebasin.merge` did to each model, filled in while it runs.

    Attributes:
        names: of the models.
        elements: what was done to each model.
        results: the alignments in their order, each with the name of its model.
        repairs: what the repair of the merge did, once it is made; None if it was left as it is.
        remarks: further notes.
    """

    names: list[str]
    elements: list[ob.Permutation | ob.Transform] = field(default_factory=list)
    results: list[tuple[str, ob.Alignment[Any]]] = field(default_factory=list)
    repairs: list[Repair | None] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)

    def note_repair(self, form: RepairForm | None, is_auto: bool) -> RepairForm | None:
        """The form in which the merge was repaired, with a remark on what the default did."""
        done = form if self.repairs[0] is not None else None
        if is_auto and form is not None:
            bases = [each for each in self.elements if isinstance(each, ob.Transform) and each.symmetry.bases]
            kept = "there is nothing to correct, or its loss would not fall"
            kept = "a change of basis mixes units, so that there are none to correct" if bases else kept
            what = "corrected on the data" if done else f"left as they are: {kept}"
            self.remarks.append(f"The statistics of the merge were {what}.")
        return done

    def keep(self, elements: Sequence[Any]) -> None:
        """Take what was done to each model."""
        self.elements.extend(elements)

    def are_of(self, models: CheckpointSet) -> bool:
        """Whether they belong to the models themselves, and not to networks that were made of them."""
        return all(each.symmetry.layouts.keys() == models.symmetry.layouts.keys() for each in self.elements)

    @property
    def permutations(self) -> list[ob.Permutation]:
        """How the units of each model were permuted, without scales and changes of basis."""
        return [each.permutation if isinstance(each, ob.Transform) else each for each in self.elements]

    def add(self, number: int, result: ob.Alignment[Any]) -> None:
        """Take the next alignment, which moved the model of this number."""
        self.results.append((self.names[number], result))

    @property
    def notes(self) -> list[str]:
        """Each note once, with the names of the models that it is about."""
        models: dict[str, dict[str, None]] = {}
        for name, result in self.results:
            for note in result.notes:
                about = [self.names[number] for number in result.noted_models.get(note, ())] or [name]
                models.setdefault(note, {}).update(dict.fromkeys(about))
        return [*(f"{', '.join(names)}: {note}" for note, names in models.items()), *self.remarks]

    @property
    def methods(self) -> str:
        """The methods of all alignments, each once."""
        return ", ".join(dict.fromkeys(result.method for _, result in self.results))

    @property
    def history(self) -> list[Entry]:
        """The histories of all alignments, one after the other."""
        return [entry for _, result in self.results for entry in result.history]

    def list_facts(self, shares: Sequence[float], measured: Mapping[str, float]) -> dict[str, Any]:
        """For people: weights, methods, the metrics of the merge, and what was done to each model."""
        return {
            "weights": ", ".join(f"{name} {share:.4g}" for name, share in zip(self.names, shares, strict=True)),
            "method": self.methods,
            **{f"{name} of the merge": f"{value:.4g}" for name, value in measured.items()},
            **{name: outputs.describe_element(element) for name, element in self.moved.items()},
        }

    @property
    def elements_from_first(self) -> list[Any]:
        """What was done to each model; permutations are composed so that the first model stays where it was."""
        if isinstance(self.elements[0], ob.Transform):
            return self.elements
        back = self.permutations[0].inverse()
        return [back @ own for own in self.permutations]

    def list_aligned(self, models: CheckpointSet) -> Sequence[State]:
        """All models, aligned; the first is as it was, or in canonical form."""
        if not isinstance(self.elements[0], ob.Transform):
            return self.move_to_first(models)
        results = [result for _, result in self.results[: len(self.names) - 1]]  # later ones are from there to means
        first, others = results[0], zip(results, self.elements[1:], strict=True)
        start = first.target if first.target_transform is not None else self.elements[0].apply(first.target)
        aligned = [start, *(_move_on(result, element) for result, element in others)]
        return [outputs.cast_like(like, model) for like, model in zip(models.checkpoints, aligned, strict=True)]

    def move_to_first(self, models: CheckpointSet) -> list[State]:
        """The permuted models, all moved together so that the first, which may have moved too, is where it was."""
        back = self.permutations[0].inverse()
        return [(back @ own).apply(file) for own, file in zip(self.permutations, models.checkpoints, strict=True)]

    def find_distances(self, models: CheckpointSet) -> dict[str, dict[str, LayerDistance]]:
        """For each model but the first its distance from that one, layer by layer, as they were and as they are aligned."""
        first, *others = models.checkpoints
        start, *aligned = self.list_aligned(models)
        pairs = zip(self.names[1:], others, aligned, strict=True)
        return {name: find_layer_distances(first, model, moved, start) for name, model, moved in pairs}

    def name_lines(self, states: Sequence[State], ending: str = "") -> dict[str, State]:
        """All states but the first, by the name of the line from the first to them."""
        return {f"{self.names[0]} to {name}{ending}": each for name, each in zip(self.names[1:], states[1:], strict=True)}

    def describe(
        self, record: RunRecord, paths: Sequence[Path], shares: Sequence[float], out: Path, recipe: Path | None
    ) -> ModelCard:
        """The card of the merge."""
        moved = self.moved
        made = [
            Ingredient(str(path), f"weight {share:.4g}" + (", aligned" if name in moved else ""), record.hashes[str(path)])
            for path, name, share in zip(paths, self.names, shares, strict=True)
        ]
        summary = f"A merge of {len(paths)} models, whose hidden units were aligned by onebasin. Configuration, tokenizer "
        summary += f"and texts are those of {self.names[0]}; the licences of the others hold as well."
        text = recipe.read_text(encoding="utf-8", errors="replace") if recipe is not None else ""
        facts = {"method": self.methods, **record.facts}
        return ModelCard(out.name, summary, made, record.command, facts, text, tags=("onebasin", "merge"))

    @property
    def moved(self) -> dict[str, ob.Permutation | ob.Transform]:
        """What was done to the models that did not stay as they were, by their names."""
        return {name: each for name, each in zip(self.names, self.elements, strict=True) if not each.is_identity}

    @property
    def moved_permutations(self) -> dict[str, ob.Permutation]:
        """The permutations that move units, by the names of their models."""
        return {name: p for name, p in zip(self.names, self.permutations, strict=True) if not p.is_identity}

    @property
    def moved_transforms(self) -> dict[str, ob.Transform]:
        """Those of `moved` that are transforms."""
        return {name: each for name, each in self.moved.items() if isinstance(each, ob.Transform)}


def _move_on(result: ob.Alignment[Any], element: Any) -> Any:
    """The model of an alignment, moved further if what was done to it in the end is more than that."""
    if element is result.transform:
        return result.model
    return (element @ result.transform.inverse()).apply(result.model)
