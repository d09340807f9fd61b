import base64

import pytest
import torch

from onebasin.reporting.figures import matrix_png


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
