import pytest
import torch
from torch import nn

import onebasin as ob
from onebasin.matching.methods.activation_matching import _Correlations


def make(offset: float = 0.0, dtype: torch.dtype = torch.float64) -> tuple[nn.Module, ob.Symmetry, list[torch.Tensor]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 6, 3), nn.ReLU(), nn.Flatten(), nn.Linear(96, 5)).to(dtype)
    with torch.no_grad():
        model[0].bias.add_(offset)
    data = list(
        (torch.randn(64, 2, 6, 6, dtype=dtype) + torch.arange(64, dtype=dtype).view(64, 1, 1, 1) / 32).split([30, 4, 30])
    )
    return model, ob.symmetry(model, data[0]), data


def test_correlations_are_those_of_all_batches_together():
    model, symmetry, data = make()
    (group,) = symmetry.groups
    site = next(site for site in symmetry.sites[group] if site.module == "1")
    other = make(offset=0.3)[0]
    found = _Correlations(symmetry, site)
    outputs = [torch.cat([network[:2](x) for x in data]).detach() for network in (model, other)]
    for pair in zip(*(o.split([30, 4, 30]) for o in outputs), strict=True):
        found.add(*pair)
    ((name, correlation),) = found.correlations()
    units = torch.cat([o.movedim(1, 0).flatten(1) for o in outputs])
    assert name == group
    torch.testing.assert_close(correlation, torch.corrcoef(units)[:6, 6:])


@pytest.mark.parametrize("offset", [0.0, 1000.0])
def test_units_far_from_zero_are_told_apart_in_float32(offset):
    model, symmetry, data = make(offset, torch.float32)
    planted = symmetry.random(torch.Generator().manual_seed(1))
    source = make(offset, torch.float32)[0]
    source.load_state_dict(planted.apply(model))
    options = {"method": "activation-matching", "data": data, "symmetry": symmetry, "detect_copy": False, "polish": False}
    found = ob.align(source, to=model, **options)
    assert found.permutation == planted.inverse()
