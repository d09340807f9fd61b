import pytest
import torch
from torch import nn

from onebasin.checkpoints import probes
from onebasin.checkpoints.probes import make_probes
from onebasin.programs.isolation import Call, isolated
from onebasin.programs.reach import ReachRecorder
from onebasin.symmetries.verification import function_of
from onebasin.tensors.states import read_state
from tests.checkpoints.language_models import make_model


def cover(model, example_inputs):
    """What fraction of the rows of each table the probes look up."""
    model = model.double()
    state = read_state(model).load()
    with isolated(model, Call((), {})):
        calls = make_probes(model, example_inputs)
        with ReachRecorder(state) as recorder:
            for call in calls:
                function_of(model, call)(state)
    return {key: recorder.num_looked_up(key) / size for key, size in recorder.num_rows.items()}, calls


@pytest.mark.parametrize(
    ("kind", "tables"),
    [
        ("GPT2LMHeadModel", {"transformer.wte.weight", "transformer.wpe.weight"}),
        ("BertForMaskedLM", {f"bert.embeddings.{name}_embeddings.weight" for name in ("word", "position", "token_type")}),
        ("LlamaForCausalLM", {"model.embed_tokens.weight"}),
    ],
)
def test_all_rows_of_a_language_model_are_looked_up(kind, tables):
    rows, calls = cover(make_model(kind), {"input_ids": torch.arange(8)[None]})
    assert rows == dict.fromkeys(tables, 1.0)
    assert max(call.kwargs["input_ids"].shape[1] for call in calls) == 40


def test_positions_that_a_model_keeps_for_padding():
    rows, calls = cover(make_model("RobertaForMaskedLM"), {"input_ids": torch.arange(8)[None]})
    assert max(call.kwargs["input_ids"].shape[1] for call in calls) >= 40
    assert rows["roberta.embeddings.word_embeddings.weight"] == 1.0
    assert rows["roberta.embeddings.position_embeddings.weight"] >= 40 / 42


def test_encoder_and_decoder():
    tokens = torch.arange(8)[None]
    rows, _ = cover(make_model("T5ForConditionalGeneration"), {"input_ids": tokens, "decoder_input_ids": tokens})
    assert rows["shared.weight"] == 1.0
    assert rows["encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight"] == 31 / 32  # one is never used


def test_long_contexts_are_covered_in_windows(monkeypatch):
    monkeypatch.setattr(probes, "_MAX_LENGTH", 16)
    rows, calls = cover(make_model("GPT2LMHeadModel"), {"input_ids": torch.arange(8)[None]})
    assert rows == {"transformer.wte.weight": 1.0, "transformer.wpe.weight": 1.0}
    assert max(call.kwargs["input_ids"].shape[1] for call in calls) == 16


def test_large_models_are_run_on_few_inputs(monkeypatch):
    model = make_model("GPT2LMHeadModel")
    num_parameters = sum(p.numel() for p in model.parameters())
    monkeypatch.setattr(probes, "_MAX_OPERATIONS", 2 * num_parameters * 48)
    rows, calls = cover(model, {"input_ids": torch.arange(8)[None]})
    assert sum(call.kwargs["input_ids"].numel() for call in calls) <= 60
    assert 0.3 < rows["transformer.wte.weight"] < 1


class FixedLength(nn.Module):
    """Takes exactly three tokens, and a mask."""

    def __init__(self):
        super().__init__()
        self.table, self.out = nn.Embedding(7, 4), nn.Linear(12, 2)

    def forward(self, ids, mask):
        return self.out((self.table(ids) * mask[..., None]).flatten(1))


def test_a_length_that_cannot_change_stays():
    rows, calls = cover(FixedLength(), (torch.zeros(2, 3, dtype=torch.long), torch.ones(2, 3, dtype=torch.long)))
    assert rows == {"table.weight": 1.0}
    assert {call.args[0].shape for call in calls} == {(2, 3)}
    assert all(bool((call.args[1] == 1).all()) for call in calls)


def test_floating_inputs_are_drawn():
    calls = make_probes(nn.Linear(3, 2).double(), torch.zeros(1, 3))
    assert len(calls) == 4
    assert len({float(call.args[0][0, 0]) for call in calls}) == 4
