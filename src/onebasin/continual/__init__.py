"""Continual learning: strategies that learn one task after the other, streams of tasks, and measures."""

from onebasin.continual.learning import interleave, learn_stream, run_stream
from onebasin.continual.metrics import AccuracyMatrix, accuracy
from onebasin.continual.strategies.agem import AGEM
from onebasin.continual.strategies.base import Strategy
from onebasin.continual.strategies.clewi import CLeWI
from onebasin.continual.strategies.derpp import DERPlusPlus
from onebasin.continual.strategies.ewc import EWC
from onebasin.continual.strategies.finetune import Finetune
from onebasin.continual.strategies.joint import Joint
from onebasin.continual.strategies.lwf import LwF
from onebasin.continual.strategies.mcsgd import MCSGD
from onebasin.continual.strategies.rebasin import RebasinStrategy
from onebasin.continual.strategies.replay import Replay
from onebasin.continual.strategies.stable_sgd import StableSGD
from onebasin.continual.streams import (
    Stream,
    Task,
    hold_out,
    rotate,
    rotated,
    rotated_digits,
    rotated_mnist,
    split,
    split_cifar100,
    split_digits,
)
from onebasin.continual.training import Training, adam, sgd

__all__ = [
    "AGEM",
    "EWC",
    "MCSGD",
    "AccuracyMatrix",
    "CLeWI",
    "DERPlusPlus",
    "Finetune",
    "Joint",
    "LwF",
    "RebasinStrategy",
    "Replay",
    "StableSGD",
    "Strategy",
    "Stream",
    "Task",
    "Training",
    "accuracy",
    "adam",
    "hold_out",
    "interleave",
    "learn_stream",
    "rotate",
    "rotated",
    "rotated_digits",
    "rotated_mnist",
    "run_stream",
    "sgd",
    "split",
    "split_cifar100",
    "split_digits",
]
