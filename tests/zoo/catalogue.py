"""All models. Importing it fills MODELS."""

from . import compiled, dense, sequence, special
from .model import MODELS

FAMILIES = (dense, sequence, special, compiled)

__all__ = ["FAMILIES", "MODELS"]
