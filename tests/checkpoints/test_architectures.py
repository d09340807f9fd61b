import pytest
import torch

from onebasin.checkpoints.architectures import read_inputs


def test_input_shapes():
    (single,) = read_inputs(["1,3,4"])
    assert single.shape == (1, 3, 4)
    both = read_inputs(["2x3", "2:long"])
    assert [value.dtype for value in both] == [torch.float32, torch.int64]
    assert read_inputs(["ids=1,8:long"])["ids"].shape == (1, 8)
    for bad in ("", "a", "1,,2", "0,3", "1,3:colour", "-1,3", "1,3;4"):
        with pytest.raises(ValueError, match="cannot read the input shape"):
            read_inputs([bad])
    with pytest.raises(ValueError, match="name all of the inputs or none"):
        read_inputs(["x=1,2", "3"])
