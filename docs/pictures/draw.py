"""Draws the pictures of the documentation: `python docs/pictures/draw.py` writes them beside it.

Text outside of filled boxes is grey, so that a page may be light or dark.
"""

from __future__ import annotations

from pathlib import Path

HERE = Path(__file__).resolve().parent
BLUE, GREEN, AMBER, RED, VIOLET = "#3b6ea5", "#3d8b60", "#b07d1e", "#c0392b", "#7d4a94"
GREY, PALE = "#858b96", "#8c93a0"


def text(x: float, y: float, words: str, colour: str = GREY, **more: str) -> str:
    given = {"text-anchor": "middle", "font-size": "13"}
    given |= {name.replace("_", "-"): value for name, value in more.items()}
    attributes = "".join(f' {name}="{value}"' for name, value in given.items())
    return f'<text x="{x:g}" y="{y:g}" fill="{colour}"{attributes}>{words}</text>'


def box(x: float, y: float, width: float, height: float, colour: str, words: str = "") -> str:
    drawn = (
        f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="4" fill="{colour}"/>'
    )
    lines = words.split("\n") if words else []
    for at, line in enumerate(lines):
        middle = y + height / 2 + 4.5 + (at - (len(lines) - 1) / 2) * 16
        drawn += text(x + width / 2, middle, line, "#ffffff")
    return drawn


def line(x: float, y: float, to_x: float, to_y: float, colour: str = GREY, more: str = "") -> str:
    return (
        f'<line x1="{x:g}" y1="{y:g}" x2="{to_x:g}" y2="{to_y:g}" stroke="{colour}" '
        f'stroke-width="1.5" {more}/>'
    )


def arrow(x: float, y: float, to_x: float, to_y: float) -> str:
    return line(x, y, to_x, to_y, GREY, 'marker-end="url(#head)"')


def page(width: int, height: int, title: str, parts: list[str]) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}" role="img" aria-label="{title}" '
        'font-family="system-ui, sans-serif">\n'
        f"<title>{title}</title>\n"
        '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" '
        f'markerHeight="7" orient="auto"><path d="M0 0 L8 4 L0 8 z" fill="{GREY}"/></marker>'
        "</defs>\n" + "\n".join(parts) + "\n</svg>\n"
    )


def memory(left: float, points: list[tuple[float, float]], colour: str) -> str:
    """A filled curve of memory over time; y grows downwards from the budget at 60."""
    path = " ".join(f"L{left + x:g} {y:g}" for x, y in points)
    first, last = points[0][0], points[-1][0]
    return (
        f'<path d="M{left + first:g} 200 {path} L{left + last:g} 200 z" fill="{colour}" '
        f'fill-opacity="0.55" stroke="{colour}" stroke-width="2"/>'
    )


def attempt() -> str:
    """Memory in an attempt that fails, and in its replay."""
    parts = [
        line(50, 60, 740, 60, RED, 'stroke-dasharray="6 4"'),
        text(745, 64, "budget", RED, text_anchor="start"),
        line(50, 200, 740, 200),
        text(30, 130, "memory", transform="rotate(-90 30 130)"),
        memory(60, [(0, 175), (20, 170), (170, 62)], RED),
        text(232, 48, "out of memory", RED, font_weight="bold"),
        text(145, 222, "1  attempt: 64 rows"),
        text(305, 110, "everything that the"),
        text(305, 127, "attempt allocated"),
        text(305, 144, "is free again"),
        memory(236, [(0, 175), (138, 175)], GREY),
        text(305, 222, "2  roll-back"),
        memory(380, [(0, 175), (15, 172), (90, 100), (165, 160), (165, 160)], BLUE),
        memory(545, [(0, 160), (15, 157), (90, 85), (150, 160), (165, 155), (190, 155)], GREEN),
        text(462, 222, "3  replay: rows 1 to 32"),
        text(635, 222, "rows 33 to 64, update"),
    ]
    return page(800, 240, "Memory over time: an attempt, the roll-back, the replay", parts)


def rollback() -> str:
    """What goes back, and where it is taken from."""
    rows = [
        ("gradients", "new ones dropped, old ones as they were", BLUE),
        ("buffers, random streams", "from the marks taken at entry", BLUE),
        ("counters, lists, metrics", "from the places that the code stores to", BLUE),
        ("optimizer, scheduler, scaler", "not stepped yet, or undone", GREEN),
        ("the error and its frames", "dropped, so that nothing holds tensors", VIOLET),
        ("the allocator's cache", "emptied, once nothing is held", VIOLET),
    ]
    parts = []
    for at, (what, how, colour) in enumerate(rows):
        y = 14 + at * 42
        parts += [
            box(20, y, 230, 32, colour, what),
            arrow(258, y + 16, 330, y + 16),
            text(342, y + 21, how, text_anchor="start"),
        ]
    return page(800, 270, "What is rolled back after an out-of-memory error", parts)


def replay() -> str:
    """A batch in two micro-batches: one update."""
    parts = [
        box(20, 40, 90, 140, BLUE, "batch\n64 rows"),
        arrow(114, 75, 166, 75),
        arrow(114, 145, 166, 145),
        box(170, 45, 110, 60, BLUE, "rows 1 to 32"),
        box(170, 115, 110, 60, BLUE, "rows 33 to 64"),
        arrow(284, 75, 326, 75),
        arrow(284, 145, 326, 145),
        box(330, 45, 150, 60, GREEN, "forward, backward\nloss x 32/64"),
        box(330, 115, 150, 60, GREEN, "forward, backward\nloss x 32/64"),
        arrow(484, 75, 536, 100),
        arrow(484, 145, 536, 120),
        box(540, 80, 110, 60, AMBER, "sum of\ngradients"),
        arrow(654, 110, 686, 110),
        box(690, 80, 95, 60, VIOLET, "one update"),
        text(405, 30, "optimizer.step() is held back"),
        text(405, 200, "optimizer.step() runs"),
    ]
    return page(800, 215, "The replay: two micro-batches, one update", parts)


P, G = (("parameters", 84, BLUE), ("gradients", 84, GREEN))
STATE, ALL, SOME, FEW = (
    ("optimizer state", 116, AMBER),
    ("activations", 150, RED),
    ("activations", 90, RED),
    ("", 30, RED),
)
SAVED = ("saved", 62, RED)
# Rung, what is done, what is on the device, what is in host memory.
RUNGS = (
    ("whole batch", "", (P, G, STATE, ALL), ()),
    ("0  micro-batches", "fewer rows at a time", (P, G, STATE, SOME), ()),
    ("1  update", "optimizer.step() part by part", (P, G, STATE, FEW), ()),
    ("2  state", "optimizer state in host memory", (P, G, FEW), (STATE,)),
    ("3  activations", "what autograd saves, too", (P, G, FEW), (STATE, SAVED)),
    ("4  recompute", "layers run again in the backward", (P, G, FEW), (STATE,)),
    ("5  gradients", "they accumulate in host memory", (P, FEW), (STATE, G)),
)


def ladder() -> str:
    """What is on the device, and what is in host memory, on each rung."""
    parts = []
    for at, (name, what, device, host) in enumerate(RUNGS):
        y = 12 + at * 52
        parts.append(text(10, y + 16, name, text_anchor="start", font_weight="bold"))
        parts.append(text(10, y + 33, what, text_anchor="start", font_size="11.5"))
        for x, held in ((205.0, device), (660.0, host)):
            for words, width, colour in held:
                parts.append(box(x, y, width, 36, colour, words))
                x += width + 3
    parts += [
        line(652, 6, 652, 370, GREY, 'stroke-dasharray="4 4"'),
        text(425, 390, "device"),
        text(750, 390, "host memory"),
    ]
    return page(870, 402, "The ladder: what is on the device on each rung", parts)


PICTURES = {"attempt": attempt, "rollback": rollback, "replay": replay, "ladder": ladder}

if __name__ == "__main__":
    for name, draw in PICTURES.items():
        (HERE / f"{name}.svg").write_text(draw(), encoding="utf-8")
