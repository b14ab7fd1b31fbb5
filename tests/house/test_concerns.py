"""Each concern has a state struct of its own, whose fields no file outside its folder names.

A call embeds them all, so that they are defined below their owners (`call/call_types.h`). Others
ask by functions of the owner, or tell them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from house.sources import FOLDERS, House, code, house

DEFINED_IN = (
    "call/call_types.h",
    "call/loss_types.h",
    "call/proven.h",
    "result/result.h",
    "result/facts.h",
)
MAKERS = {"call/call.c", *DEFINED_IN}  # a call is made there, and defined

OWNER = {
    "oomkit_grads": "undo",
    "oomkit_savepoint": "undo",
    "oomkit_rng": "undo",
    "oomkit_flags": "undo",
    "oomkit_after": "undo",
    "oomkit_buffer": "undo",
    "oomkit_buffers": "undo",
    "oomkit_param_slots": "undo",
    "oomkit_owner_marks": "optim",
    "oomkit_updating": "optim",
    "oomkit_host_share": "optim",
    "oomkit_optimizer_mark": "optim",
    "oomkit_state_item": "optim",
    "oomkit_scheduled": "optim",
    "oomkit_hooked": "hook",
    "oomkit_interception": "hook",
    "oomkit_unknown": "accum",
    "oomkit_stale": "accum",
    "oomkit_beside": "accum",
    "oomkit_plain_alike": "plain",
    "oomkit_moved": "accum",
    "oomkit_switches": "undo",
    "oomkit_losses": "accum",
    "oomkit_paths": "accum",
    "oomkit_loss": "accum",
    "oomkit_loss_site": "accum",
    "oomkit_sizes_seen": "sizes",
    "oomkit_deferral": "deferred",
    "oomkit_unfit_sizes": "engine",
    "oomkit_join": "result",
    "oomkit_ranked": "ranks",
}
# Fields of another owner than their struct's, or of one in a struct that all may read.
PART = {
    ("oomkit_savepoint", "plain"): "plain",
    ("oomkit_savepoint", "owners"): "optim",
    ("oomkit_savepoint", "modes"): "call",
    ("oomkit_savepoint", "modes_known"): "call",
    ("oomkit_cut", "effects"): "accum",
    ("oomkit_cut", "offload"): "ladder",
    ("oomkit_cut", "recompute"): "ladder",
    ("oomkit_cut", "host_grads"): "ladder",
    ("oomkit_cut", "verification"): "proof",
}
# What all may read: the words in which folders speak of a call.
SHARED = set(
    "given log cut cut_room shape tries backward refused batch device plan micro measured "
    "sequence slices reason options parts st step proof".split()
)

HOUSE = house(FOLDERS)
_ACCESS = re.compile(r"(?=\b([A-Za-z_]\w*)\s*(?:\[[^\]]*\]\s*)?(?:\.|->)\s*(\w+))")


def fields(text: str, struct: str) -> dict[str, str]:
    """Of a struct that the text defines: its fields and their types."""
    body = text.partition(f"typedef struct {struct} {{")[2].partition(f"}} {struct};")[0]
    found = {}
    for statement in re.sub(r"\[[^\]]*\]", "", body).split(";"):
        first, *others = statement.split(",")
        words = re.findall(r"\w+", first)
        for name in [*words[-1:], *(re.findall(r"\w+", other)[-1] for other in others)]:
            found[name] = next((w for w in words if w not in {"const", "struct"}), "")
    return found


def _named(text: str, struct: str, pointers: bool) -> set[str]:
    """What a text declares to be such a struct, or to point to one."""
    stars = r"\**" if pointers else ""
    return set(re.findall(rf"\b{struct}\s*{stars}\s*(\w+)\s*[;,)=]", text))


def strangers(
    of: House,
    defined: str,
    owner: Mapping[str, str],
    part: Mapping[tuple[str, str], str],
    makers: set[str],
) -> list[str]:
    """Each "file struct.field" where a file names a field that belongs to another folder."""
    found = set()
    structs = {struct: fields(defined, struct) for struct in {*owner, *(s for s, _ in part)}}
    embedded = {struct: _named(defined, struct, pointers=False) for struct in structs}
    folder_text: dict[str, str] = {}
    for name, text in of.text.items():
        folder = name.partition("/")[0]
        folder_text[folder] = folder_text.get(folder, "") + text
    for folder, everything in folder_text.items():
        names = {s: embedded[s] | _named(everything, s, pointers=True) for s in structs}
        for file, text in of.text.items():
            if not file.startswith(f"{folder}/") or file in makers:
                continue
            for name, field in set(_ACCESS.findall(text)):
                for struct in structs:
                    whose = part.get((struct, field), owner.get(struct, folder))
                    if whose != folder and field in structs[struct] and name in names[struct]:
                        found.add(f"{file} {struct}.{field}")
    return sorted(found)


DEFINED = "".join(HOUSE.text[name] for name in DEFINED_IN)


def test_no_file_names_a_field_of_another_concern() -> None:
    assert strangers(HOUSE, DEFINED, OWNER, PART, MAKERS) == []


def test_the_table_is_of_what_is_there() -> None:
    assert {*OWNER.values(), *PART.values()} <= set(FOLDERS)
    assert [struct for struct in OWNER if not fields(DEFINED, struct)] == []
    assert [(s, field) for s, field in PART if field not in fields(DEFINED, s)] == []


def test_every_struct_of_a_call_is_somebodys() -> None:
    nobodys = [
        name
        for struct in ("oomkit_call", "oomkit_cut")
        for name, kind in fields(DEFINED, struct).items()
        if kind.startswith("oomkit_") and kind not in OWNER and name not in SHARED
    ]
    assert nobodys == []


# --- each of these has been seen red ---

PLANTED = """
typedef struct own {
    int here, *there; /* not(here) */
    char text[4];
} own;
typedef struct all {
    own state;
    int *apart;
} all;
"""


def _planted(**text: str) -> list[str]:
    of = House(("low", "high"))
    for name, content in text.items():
        of.add(f"{name.partition('_')[0]}/{name}.c", content)
    return strangers(
        of, code(PLANTED), {"own": "high"}, {("all", "apart"): "low"}, {"low/low_make.c"}
    )


def test_a_field_of_another_concern_is_found() -> None:
    by_path = "int f(all *c) { return c->state\n.here; }"
    by_name = "int f(own *one) { one->there = 0; }"
    inside = "typedef struct box { own it; } box; int f(box *b) { return b->it.text[0]; }"
    assert _planted(low_a=by_path) == ["low/low_a.c own.here"]
    assert _planted(low_a=by_name) == ["low/low_a.c own.there"]
    assert _planted(low_a=inside) == ["low/low_a.c own.text"]
    assert _planted(high_a="int f(all *c) { return c->apart; }") == ["high/high_a.c all.apart"]


def test_the_owner_and_the_maker_may_and_a_name_alone_is_none() -> None:
    path = "int f(all *c) { return c->state.here + other->here + here(&c->state); }"
    assert _planted(high_a=path, low_make=path) == []
    assert _planted(low_a="int f(all *c) { return other->here + here(&c->state); }") == []
    assert _planted(low_a='/* c->state.here */ char *text = "state.here";') == []


def test_fields_have_types() -> None:
    assert fields(code(PLANTED), "own") == {"here": "int", "there": "int", "text": "char"}
    assert fields(code(PLANTED), "all")["state"] == "own"
