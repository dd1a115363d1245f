"""A small model and its data, for those frameworks that leave both to the user."""

import faults
import torch

WIDTH = 32


def net():
    """The same in every rank."""
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(WIDTH, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))


class Work(torch.autograd.Function):
    """What a real model takes its time for: most of it is the backward pass, and that is where a look at its
    stacks finds it."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        faults.work()
        return gradient


class Net(torch.nn.Module):
    """The model; its forward pass is where a fault of the main thread happens."""

    def __init__(self):
        super().__init__()
        self.layers = net()
        faults.steps_take_their_time_in_backward()

    def forward(self, x):
        if self.training:
            faults.forward()
        return Work.apply(self.layers(x))


class Samples(torch.utils.data.Dataset):
    """Random numbers, the same for the same index."""

    def __init__(self, length=100000):
        self.length = length

    def __len__(self):
        return self.length

    def make(self, index):
        return torch.full((WIDTH,), (index % 97) / 97.0), torch.full((1,), (index % 7) / 7.0)

    def __getitem__(self, index):
        faults.sample()
        return self.make(index)


class Held(Samples):
    """What is evaluated; `ranks` share it."""

    def __init__(self, ranks=1):
        super().__init__(faults.evaluation_samples(8) * ranks)

    def __getitem__(self, index):
        faults.evaluated()
        return self.make(index)
