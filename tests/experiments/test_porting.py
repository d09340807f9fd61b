"""Tasks and the table of carried fine-tunes; training needs data that is not here."""

import torch
from torch import nn

from experiments.porting import CHANGES, METHODS, draw, fine_tune, score
from experiments.transformer_networks import Recipe


def test_changes_of_texts():
    tokens = torch.tensor([5, 6, 7, 5, 5, 6, 9])
    changed = {name: change(tokens).tolist() for name, change in CHANGES.items()}
    assert changed == {
        "backwards": [9, 6, 5, 5, 7, 6, 5],
        "neighbours exchanged": [6, 5, 5, 7, 6, 5],
        "each token twice": [5, 5, 6, 6, 7, 7, 5],
        "every third left out": [5, 6, 5, 5, 9],
        "frequent tokens renamed": changed["frequent tokens renamed"],
    }
    renamed = changed["frequent tokens renamed"]
    assert [renamed.index(token) for token in renamed] == [tokens.tolist().index(token) for token in tokens.tolist()]
    assert renamed != tokens.tolist()


def test_only_the_classes_of_a_task_count():
    model = nn.Linear(3, 6, bias=False)
    with torch.no_grad():
        model.weight.zero_()
        model.weight[0] = 100.0  # a class of another task
        model.weight[4:] = torch.tensor([[1.0, 0.0, 0.0], [0.0, 1.0, 0.0]])
    x = torch.tensor([[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 1.0, 0.0]])
    assert score(model, (x, torch.tensor([4, 5, 4]))) == 2 / 3


def test_fine_tuning_leaves_the_model_alone():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 5))
    before = model[1].weight.clone()
    tokens = torch.randint(5, (16, 4))
    tuned = fine_tune(model, (tokens, tokens), Recipe("gpt", batch=8), steps=3)
    assert torch.equal(model[1].weight, before)
    assert not torch.equal(tuned[1].weight, before)


def test_the_share_of_the_gain(tmp_path, capsys):
    scores = {"new": 0.1, "naive": 0.1, "wm-all": 0.4, "all": 0.7}
    records = [
        {
            "config": {"network": "vit", "old": 0, "new": 1, "method": method},
            "result": {"classes 50-59": {"new": value, "old": 0.5}},
            **{"machine": "a machine", "torch": "2", "commit": "c"},
        }
        for method, value in scores.items()
    ]
    draw(records, tmp_path)
    page = capsys.readouterr().out
    assert f"| vit | {METHODS['wm-all']} | 0.400 | 0.50 | 0.50 |  |  | 0.500 |  | 1 |" in page
    assert (tmp_path / "porting-transformers.md").is_file()
