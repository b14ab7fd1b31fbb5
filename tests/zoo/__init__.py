"""Small models that the suites share, and the zoo: one model of each kind, and its faults."""

from .base import (
    BATCH,
    GPT,
    KINDS,
    MLP,
    SEED,
    ConvNet,
    World,
    difference,
    loss_step,
    make_world,
    note_gradients,
    same,
    whole_step,
)

__all__ = [
    "BATCH",
    "GPT",
    "KINDS",
    "MLP",
    "SEED",
    "ConvNet",
    "World",
    "difference",
    "loss_step",
    "make_world",
    "note_gradients",
    "same",
    "whole_step",
]
