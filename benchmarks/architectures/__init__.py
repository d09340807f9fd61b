"""The real architectures of the coverage table: how to make each, what to feed it, and groups counted by hand.

Nothing is downloaded: weights are random, as the constructors make them. Inputs are small where the architecture allows.
"""

from benchmarks.architectures.architecture import Architecture, Example, NotMade
from benchmarks.architectures.diffusers_models import diffusers_architectures
from benchmarks.architectures.geometric_models import geometric_architectures
from benchmarks.architectures.peft_models import peft_architectures
from benchmarks.architectures.small_models import small_architectures
from benchmarks.architectures.timm_models import timm_architectures
from benchmarks.architectures.torchvision_models import torchvision_architectures, torchvision_task_architectures
from benchmarks.architectures.transformers_models import transformers_architectures

LIBRARIES = (
    small_architectures,
    geometric_architectures,
    peft_architectures,
    diffusers_architectures,
    torchvision_architectures,
    torchvision_task_architectures,
    timm_architectures,
    transformers_architectures,
)

__all__ = [
    "LIBRARIES",
    "Architecture",
    "Example",
    "NotMade",
    "torchvision_architectures",
]
