"""Batch-norm statistics, estimated anew on data."""

import pytest
import torch
from torch import nn

from onebasin.landscape.batch_norm import reset_batch_norm
from tests.landscape.plain_networks import batches, cnn, mlp, snapshot, unchanged


def test_batch_norm_gets_the_statistics_of_one_full_batch():
    model, x = cnn(0, norm=True), torch.randn(30, 1, 6, 6, dtype=torch.float64)
    before = snapshot(model)
    state = reset_batch_norm(model, [(x, None)])
    hidden = model[0](x).detach().transpose(0, 1).flatten(1)
    torch.testing.assert_close(state["1.running_mean"], hidden.mean(1))
    torch.testing.assert_close(state["1.running_var"], hidden.var(1))
    assert unchanged(model, before)
    assert all(torch.equal(v, model.state_dict()[k]) for k, v in state.items() if "running" not in k and "num" not in k)


def test_batch_norm_averages_batches_and_reads_an_iterator():
    model, data = cnn(0, norm=True), batches(1, 6, 6)
    state = reset_batch_norm(model, iter(data))
    variances = torch.stack([model[0](x).detach().transpose(0, 1).flatten(1).var(1) for x in data])
    torch.testing.assert_close(state["1.running_var"], variances.mean(0))


def test_dropout_adds_no_noise_to_batch_norm():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Dropout(0.5), nn.BatchNorm1d(4))
    x = torch.randn(30, 4)
    torch.testing.assert_close(reset_batch_norm(model, [x])["1.running_mean"], x.mean(0))


def test_a_model_without_batch_norm_comes_back():
    model = mlp(0)
    state = reset_batch_norm(model, [])
    assert all(torch.equal(state[key], value) for key, value in model.state_dict().items())
    assert state["0.weight"].data_ptr() != model[0].weight.data_ptr()


def test_batch_norm_in_bfloat16(plain_kernels):
    model = cnn(0, norm=True).bfloat16()
    x = torch.randn(64, 1, 6, 6).bfloat16()
    state = reset_batch_norm(model, [x])
    assert state["1.running_var"].dtype == torch.bfloat16
    expected = model[0](x).detach().float().transpose(0, 1).flatten(1).var(1)
    torch.testing.assert_close(state["1.running_var"].float(), expected, rtol=0.02, atol=0)


def test_empty_data_is_refused():
    with pytest.raises(ValueError, match="no batches"):
        reset_batch_norm(cnn(0, norm=True), [])
