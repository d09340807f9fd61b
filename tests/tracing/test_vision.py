"""Real architectures of torchvision, without weights: right, and every hidden width free."""

import pytest
import torch

import onebasin as ob

models = pytest.importorskip("torchvision.models")

# The groups are counted from the architecture: one for each hidden width that no shortcut ties to another.
NETWORKS = {
    "resnet18": 1 + 3 + 8,  # stem with stage 1, stages 2-4, inside of 8 blocks
    "resnet50": 1 + 4 + 16 * 2,
    "vgg11": 8 + 2,
    "vgg13": 10 + 2,
    "vgg16": 13 + 2,
    "vgg19": 16 + 2,
    "vgg11_bn": 8 + 2,
    "vgg13_bn": 10 + 2,
    "vgg16_bn": 13 + 2,
    "vgg19_bn": 16 + 2,
    "densenet121": 1 + 58 * 2 + 3,  # stem, two a dense layer, transitions
    "mobilenet_v2": 1 + 16 + 7 + 1,  # stem (first block's depthwise too), expansions, residual widths, last
    "efficientnet_b0": 40,
    "convnext_tiny": 4 + 18,  # stages, inside of 18 blocks
}


# An attention has heads, query-key units and value units; a grouped convolution groups, and channels inside and out.
NESTED = {
    "vit_b_16": 1 + 12 * 4,  # stream; an attention and the inside of the MLP in each block
    "swin_t": 4 + 12 * 4,  # four streams
    "resnext50_32x4d": 5 + 16 * 3,  # stem, stages; a grouped convolution in each block
    "regnet_y_400mf": 5 + 16 * 4,  # the inside of squeeze and excitation, too
}


@pytest.mark.parametrize("name", NESTED)
def test_structure_inside_is_found(name):
    size = {"image_size": 32} if name.startswith("vit") else {}
    model = getattr(models, name)(weights=None, **size)
    symmetry = ob.symmetry(model, torch.rand(1, 3, 32, 32))
    assert symmetry.num_free == symmetry.num_hidden
    assert len(symmetry.groups) == NESTED[name]
    assert any(group.parents for group in symmetry.groups.values())


@pytest.mark.parametrize("size", [32, 64])
def test_bases_do_not_depend_on_the_batch(size):
    torch.manual_seed(0)
    model = models.SwinTransformer([4, 4], 16, [2, 2], [2, 4], [7, 7], num_classes=5).eval()
    for batch in (1, 2):
        bases = ob.symmetry(model, torch.randn(batch, 3, size, size), kinds="all").bases.values()
        # Queries with keys, and values with outputs, in each of four blocks; two streams.
        assert sorted(basis.kind for basis in bases) == ["centred"] * 2 + ["linear"] * 8


@pytest.fixture(params=NETWORKS)
def name(request):
    return request.param


def test_every_hidden_width_is_free(name):
    model = getattr(models, name)(weights=None)
    symmetry = ob.symmetry(model, torch.rand(1, 3, 32, 32))
    assert symmetry.num_free == symmetry.num_hidden
    assert len(symmetry.groups) == NETWORKS[name]
    assert not symmetry.unreached
    assert not any(group.parents for group in symmetry.groups.values())
    first = next(iter(symmetry.groups))
    assert first in str(symmetry)
