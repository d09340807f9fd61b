import pytest
import torch

from onebasin.continual import Stream, Task, hold_out, rotate, rotated, rotated_digits, split, split_digits


def test_a_quarter_turn_is_clockwise_and_exact():
    images = torch.rand(3, 2, 8, 8)
    torch.testing.assert_close(rotate(images, 90), torch.rot90(images, -1, (2, 3)), atol=1e-5, rtol=0)
    torch.testing.assert_close(rotate(images, 180), images.flip(2, 3), atol=1e-5, rtol=0)
    assert rotate(images, 0) is images


def test_bytes_stay_bytes():
    images = torch.randint(0, 256, (4, 1, 7, 7), dtype=torch.uint8)
    turned = rotate(images, 90)
    assert turned.dtype == torch.uint8
    assert torch.equal(turned, torch.rot90(images, -1, (2, 3)))


def test_corners_turn_black():
    assert float(rotate(torch.ones(1, 1, 8, 8), 45)[0, 0, 0, 0]) == 0


def test_rotated_tasks():
    stream = rotated_digits(5)
    assert len(stream) == 5
    assert [task.name for task in stream.test] == [f"{angle} degrees" for angle in ("0.0", "45.0", "90.0", "135.0", "180.0")]
    first, last = stream.train[0], stream.train[-1]
    torch.testing.assert_close(last.inputs, first.inputs.flip(2, 3), atol=1e-5, rtol=0)
    assert torch.equal(first.targets, last.targets)
    assert all(task.classes is None for task in stream.train)
    assert len(stream.first(2)) == 2
    assert torch.equal(stream.first(2).train[1].inputs, stream.train[1].inputs)


@pytest.mark.parametrize("heads", [True, False])
def test_split_tasks(heads):
    stream = split_digits(5, heads)
    seen = [sorted(task.targets.unique().tolist()) for task in stream.train]
    assert seen == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9]]
    assert sum(map(len, stream.train)) == 1442
    assert sum(map(len, stream.test)) == 355
    assert [task.classes for task in stream.train] == ([tuple(classes) for classes in seen] if heads else [None] * 5)


def test_classes_are_shuffled_by_a_seed():
    images = torch.zeros(100, 1), torch.arange(100) % 10
    parts = [split(images, images, 5, seed=seed).train for seed in (0, 0, 1)]
    classes = [[task.classes for task in tasks] for tasks in parts]
    assert classes[0] == classes[1] != classes[2]
    assert sorted(c for part in classes[2] for c in part or ()) == list(range(10))


def test_held_out_images_are_not_learned_from():
    images = torch.arange(50.0), torch.arange(50)
    kept, held = hold_out(images, 0.2)
    assert (len(kept[0]), len(held[0])) == (40, 10)
    assert sorted([*kept[1].tolist(), *held[1].tolist()]) == list(range(50))
    assert torch.equal(kept[0].long(), kept[1])
    assert torch.equal(hold_out(images, 0.2)[1][1], held[1])


def test_refusals():
    task = Task(torch.zeros(2, 1), torch.zeros(2))
    with pytest.raises(ValueError, match="as many targets"):
        Task(torch.zeros(2, 1), torch.zeros(3))
    with pytest.raises(ValueError, match="at least one"):
        Task(torch.zeros(0, 1), torch.zeros(0))
    with pytest.raises(ValueError, match="a test for each task"):
        Stream([task], [])
    with pytest.raises(ValueError, match="at least two"):
        rotated((torch.zeros(1, 1, 4, 4), torch.zeros(1)), (torch.zeros(1, 1, 4, 4), torch.zeros(1)), 1)
    with pytest.raises(ValueError, match="cannot be split evenly"):
        split((torch.zeros(3, 1), torch.arange(3)), (torch.zeros(3, 1), torch.arange(3)), 2)
