"""Compiled models: `make prove` alone runs them. Each is compiled once and used again."""

from __future__ import annotations

from .dense import classify, conv_bn, images, mlp, rows, to
from .model import add
from .sequence import Decoder, next_token, tokens

ONCE = {
    "threads=2": "another number of threads compiles again",
    "gradients=off": "another dtype compiles again",
    "scaled": "what is compiled is the same as without",
}


add("compiled MLP", mlp, rows, classify, without=ONCE, compiled="inductor")
add(
    "compiled conv + BatchNorm",
    conv_bn,
    images,
    classify,
    moves=True,
    without=ONCE,
    compiled="inductor",
)
add(
    "compiled attention",
    to(Decoder, True),
    tokens,
    next_token,
    without=ONCE,
    compiled="aot_eager",
)
COLD = "each run compiles: a few have to do"
add(
    "compiled in the struck call",
    mlp,
    rows,
    classify,
    without={
        **ONCE,
        "call=1": "it is compiled in the first",
        "k=3": COLD,
        "gradients=copy": COLD,
        "backward": COLD,
        "scaled-returned": COLD,
    },
    compiled="aot_eager",
    places=1,
)
