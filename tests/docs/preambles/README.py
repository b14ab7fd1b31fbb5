from accelerate import Accelerator

from docs.preambles.guides_transformers import *  # isort: skip
from docs.preambles.guides_lightning import *  # isort: skip
from docs.preambles.guides_search import *  # isort: skip
from docs.preambles.guides_transformers import dataset as texts  # isort: skip
from docs.preambles.guides_transformers import model as bert  # isort: skip

accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)


def objective(trial):
    for x, y in batches(trial.suggest_int("batch_size", 4, 8)):
        step(x, y)
    return 0.5
