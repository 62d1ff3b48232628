"""What the lines on exported modules of torch need."""

import warnings

import torch


def exports():
    module = torch.nn.Linear(4, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scripted = torch.jit.script(module)
        torch.jit.save(scripted, "scripted.pt")
    batch = {0: torch.export.Dim("batch")}
    torch.export.save(torch.export.export(module, (torch.zeros(2, 4),), dynamic_shapes=(batch,)), "exported.pt2")
    return {"scripted": scripted}


BEFORE = {
    "rl-eval run --env CartPole-v1 --policy scripted.pt --trust": exports,
    "rl-eval run --env CartPole-v1 --policy exported.pt2 --trust": exports,
    'evaluate("CartPole-v1", scripted)': exports,
}
