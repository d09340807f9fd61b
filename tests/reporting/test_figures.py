import base64

import pytest
import torch

from onebasin.reporting.figures import heat_png, matrix_png


def decode(address: str, tmp_path):
    image = pytest.importorskip("matplotlib.image")
    file = tmp_path / "matrix.png"
    file.write_bytes(base64.b64decode(address.partition(",")[2]))
    return image.imread(file)  # a reader that is not ours: (height, width, 4)


@pytest.mark.parametrize("size", [1, 2, 10, 64])
def test_a_small_matrix_is_drawn_entry_by_entry(size, tmp_path):
    index = torch.randperm(size, generator=torch.Generator().manual_seed(size))
    picture = decode(matrix_png(index), tmp_path)
    assert picture[..., :3].max() == 0
    assert torch.equal(torch.tensor(picture[..., 3]), torch.eye(size)[index])


@pytest.mark.parametrize("size", [65, 300, 2048])
def test_no_unit_of_a_large_matrix_is_lost(size, tmp_path):
    index = torch.randperm(size, generator=torch.Generator().manual_seed(size))
    opacity = torch.tensor(decode(matrix_png(index), tmp_path)[..., 3])
    assert opacity.shape == (64, 64)
    assert bool((opacity.amax(0) > 0.4).all() and (opacity.amax(1) > 0.4).all())
    assert bool((opacity > 0)[torch.arange(size) * 64 // size, index * 64 // size].all())
    assert torch.equal(torch.tensor(decode(matrix_png(torch.arange(size)), tmp_path)[..., 3]), torch.eye(64))
    assert len(matrix_png(index)) < 2000


def test_a_matrix_has_a_colour_for_each_sign(tmp_path):
    matrix = torch.tensor([[1.0, -1.0, 0.0], [0.25, -0.25, 0.0], [0.0, 0.0, 1.0]])
    picture = torch.tensor(decode(heat_png(matrix), tmp_path))
    assert torch.equal(picture[..., 3] > 0, matrix != 0)
    blue, orange = picture[0, 0, :3], picture[0, 1, :3]
    assert not torch.equal(blue, orange)
    assert torch.equal(picture[1, 0, :3], blue)
    assert torch.equal(picture[1, 1, :3], orange)
    assert picture[0, 0, 3] == 1
    assert 0.4 < float(picture[1, 0, 3]) < 0.7  # the root of a quarter, in sevenths


@pytest.mark.parametrize("size", [65, 300])
def test_the_largest_entry_of_a_block_is_seen(size, tmp_path):
    matrix = torch.zeros(size, size)
    matrix[size - 1, 0] = -3
    opacity = torch.tensor(decode(heat_png(matrix), tmp_path)[..., 3])
    assert opacity.shape == (64, 64)
    assert opacity[63, 0] == 1
    assert int((opacity > 0).sum()) == 1
    assert not bool(torch.tensor(decode(heat_png(torch.zeros(3, 3)), tmp_path)[..., 3]).any())
