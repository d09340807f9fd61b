import torch

from onebasin import continual
from tests.continual.clusters import TRAINING, make_mlp, make_task


def test_joint_training_is_training_on_all_tasks_at_once():
    tasks = [make_task(seed) for seed in range(2)]
    everything = continual.Task(torch.cat([t.inputs for t in tasks]), torch.cat([t.targets for t in tasks]))
    joint, plain = continual.Joint(make_mlp(), **TRAINING), continual.Finetune(make_mlp(), **TRAINING)
    joint.gather(tasks[0])
    joint.fit(tasks[1])
    plain.fit(everything)
    for a, b in zip(joint.model.parameters(), plain.model.parameters(), strict=True):
        assert torch.equal(a, b)
