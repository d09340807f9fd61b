import torch

from onebasin.continual.samples import Feed, Samples, as_input


def make_samples(count: int) -> Samples:
    numbers = torch.arange(count)
    return Samples(numbers.float().unsqueeze(1), numbers % 3, torch.zeros(count, dtype=torch.int64))


def test_a_pass_sees_every_example_once():
    feed = Feed(make_samples(12), batch_size=4, num_steps=6, generator=torch.Generator().manual_seed(0))
    batches = [feed.draw() for _ in range(6)]
    for half in (batches[:3], batches[3:]):
        seen = torch.cat([batch.inputs for batch in half]).flatten()
        assert sorted(seen.tolist()) == list(range(12))
    assert [b.inputs.flatten().tolist() for b in batches[:3]] != [b.inputs.flatten().tolist() for b in batches[3:]]
    assert all(torch.equal(batch.targets, batch.inputs.flatten().long() % 3) for batch in batches)


def test_batches_may_hold_the_end_of_a_pass_and_the_start_of_the_next():
    feed = Feed(make_samples(5), batch_size=3, num_steps=5, generator=torch.Generator().manual_seed(0))
    seen = torch.cat([feed.draw().inputs for _ in range(5)]).flatten()
    assert seen.long().bincount().tolist() == [3] * 5


def test_batches_may_be_larger_than_the_samples():
    feed = Feed(make_samples(2), batch_size=5, num_steps=2, generator=torch.Generator().manual_seed(0))
    assert len(feed.draw()) == 5


def test_bytes_are_read_as_numbers_from_zero_to_one():
    images = torch.tensor([0, 255], dtype=torch.uint8)
    assert as_input(images).tolist() == [0, 1]
    assert images.tolist() == [0, 255]
    numbers = torch.tensor([0.0, 255.0])
    assert as_input(numbers) is numbers
