"""``make demo``: the symmetry of a small residual network, and a permutation that moves its weights but not its outputs."""

import torch
from torch import Tensor, nn

import onebasin as ob


class ResidualCNN(nn.Module):
    """Two convolutions around a shortcut, batch norms, a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 16, 3, padding=1)
        self.norm1 = nn.BatchNorm2d(16)
        self.conv1 = nn.Conv2d(16, 32, 3, padding=1)
        self.norm2 = nn.BatchNorm2d(32)
        self.conv2 = nn.Conv2d(32, 16, 3, padding=1)
        self.head = nn.Linear(16 * 16, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Images (batch, 1, 8, 8) to logits."""
        x = torch.relu(self.norm1(self.stem(x)))
        x = x + self.conv2(torch.relu(self.norm2(self.conv1(x))))
        return self.head(nn.functional.max_pool2d(x, 2).flatten(1))


def main() -> None:
    """Run the demo."""
    torch.manual_seed(0)
    model, images = ResidualCNN().double().eval(), torch.rand(64, 1, 8, 8, dtype=torch.float64)
    symmetry = ob.symmetry(model, images)
    print(symmetry)
    permutation = symmetry.random(torch.Generator().manual_seed(0))
    moved = permutation.apply(model)
    print(f"\n{permutation}")
    with torch.no_grad():
        before, after = model(images), torch.func.functional_call(model, moved, images)
    distance = sum(float((value - moved[key]).abs().sum()) for key, value in model.state_dict().items())
    print(f"the weights moved by {distance:.1f} (L1), the outputs by at most {float((before - after).abs().max()):.1e}")


if __name__ == "__main__":
    main()
