"""The plan of the house: folders are layers, uses point down, nothing grows too large."""

from __future__ import annotations

import re
from collections import Counter
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from house.sources import CSRC, FOLDERS, PLAIN, ROOT, House, functions, house

MOST_FILES, LONGEST_FILE, LONGEST_FUNCTION = 20, 900, 60
MOST_FIELDS = 32  # of oomkit_call; may only fall
RULE = re.compile(r"^const oomkit_rule (\w+) =", re.MULTILINE)
SHARED = {"py/state.h", "call/call.h", "call/call_types.h"}  # many files need these


HOUSE = house((*PLAIN, *FOLDERS))
FILES = sorted(HOUSE.text)


def test_every_folder_is_in_the_plan() -> None:
    assert {path.name for path in CSRC.iterdir()} == {*PLAIN, *FOLDERS, "torch"}


def test_the_plan_is_in_the_docs() -> None:
    design = (ROOT / "docs" / "explanation" / "design.md").read_text(encoding="utf-8")
    plan = design.partition("The folders of `oomkit._C`, from below.")[2].partition("The way of")[0]
    assert tuple(re.findall(r"^\| `(\w+)` \|", plan, re.MULTILINE)) == FOLDERS


@pytest.mark.parametrize("folder", [*PLAIN, *FOLDERS, "torch"])
def test_a_folder_can_be_taken_in(folder: str) -> None:
    files = [path.name for path in (CSRC / folder).iterdir()]
    assert len(files) <= MOST_FILES
    readme = (CSRC / folder / "README.md").read_text(encoding="utf-8").splitlines()
    assert 3 <= len(readme) <= 15
    if folder in FOLDERS[1:]:
        below = FOLDERS[FOLDERS.index(folder) - 1]
        assert (
            f"May use the folders up to `{below}` of the plan in `docs/explanation/design.md`."
            in readme
        )


def test_no_file_name_is_used_twice() -> None:
    names = Counter(name.partition("/")[2] for name in FILES)
    assert [name for name, count in names.items() if count > 1] == []


def test_uses_point_down() -> None:
    assert HOUSE.upward() == []


def test_includes_point_down() -> None:
    for name in FILES:
        above = [o for o in HOUSE.includes[name] if HOUSE.rank(o) > HOUSE.rank(name)]
        assert above == [], name


def test_functions_that_the_linker_puts_in_a_row_are_there() -> None:
    """Written by benchmarks/instructions.py --order; one with another name would stand apart."""
    script = (CSRC / "module" / "healthy.ld").read_text(encoding="utf-8")
    named = set(re.findall(r"\(\.text\.(\w+)", script))
    assert len(named) > 100
    assert named - {name for found in HOUSE.defined.values() for name in found} == set()


def test_every_function_is_used() -> None:
    """By the C. What ends an object that lives as long as the process, by its test at least."""
    others = [*(CSRC / "torch").iterdir(), *(ROOT / "tests").glob("*/*.c")]
    text = [*HOUSE.text.values(), *(path.read_text(encoding="utf-8") for path in others)]
    used = {name for part in text for name in re.findall(r"[^\n\w](oomkit_\w+)", part)}
    defined = {name for found in HOUSE.defined.values() for name in found}
    assert {name for name in defined if name.startswith("oomkit_")} - used == set()


def test_headers_include_in_no_circle() -> None:
    TopologicalSorter(HOUSE.cycles()).prepare()


def test_a_header_declares_what_its_folder_defines() -> None:
    home = HOUSE.home()
    for name in FILES:
        folder = name.partition("/")[0]
        others = {
            function: home[function]
            for function in (HOUSE.declared[name] if name.endswith(".h") else ())
            if function in home and home[function].partition("/")[0] != folder
        }
        assert others == {}, name


def rules_named(text: str) -> set[str]:
    return set(re.findall(r"\boomkit_\w+_rule\b", text)) - {"oomkit_proof_rule"}


def test_the_wiring_alone_names_the_rules() -> None:
    defined = {rule: name for name in FILES for rule in RULE.findall(HOUSE.text[name])}
    assert rules_named(HOUSE.text["module/wiring.c"]) == set(defined)
    for name in FILES:
        named = rules_named(HOUSE.text[name])
        if name.endswith(".c") and name != "module/wiring.c":
            assert {rule for rule in named if defined[rule] != name} == set(), name


def rules_used(of: House) -> list[str]:
    """Functions of a rule's file that the engine or an interceptor names.

    Those of `undo` stand beside what they mark: the engine takes and puts back resources.
    """
    rules = {name for name, text in of.text.items() if RULE.search(text)}
    return [
        f"{user} {function}"
        for user, function, home in of.uses()
        if user.partition("/")[0] in {"engine", "hook"}
        and home in rules
        and home.partition("/")[0] != "undo"
    ]


def test_the_engine_and_the_interceptors_name_no_rule() -> None:
    assert rules_used(HOUSE) == []


def test_no_header_is_everywhere() -> None:
    count = Counter(other for name in FILES for other in set(HOUSE.includes[name]))
    half = len([name for name in FILES if name.endswith(".c")]) / 2
    assert [name for name, n in count.items() if n > half and name not in SHARED] == []


def test_sizes() -> None:
    for name in FILES:
        lines = len((CSRC / name).read_text(encoding="utf-8").splitlines())
        assert lines <= LONGEST_FILE, name
        long = [f.name for f in HOUSE.defined[name].values() if f.lines > LONGEST_FUNCTION]
        assert long == [], name


def test_a_file_begins_with_what_it_is_for() -> None:
    for path in CSRC.glob("*/*.[ch]*"):
        assert path.read_text(encoding="utf-8").startswith(("/* ", "// ")), path.name


def test_the_tests_stand_in_folders() -> None:
    tests = ROOT / "tests"
    assert [path.name for path in tests.iterdir() if path.is_file()] == ["conftest.py"]
    assert crowded(tests) == []


def crowded(top: Path) -> list[str]:
    """Folders with too many files, at any depth; what is built there does not count."""
    many = Counter(
        path.parent
        for path in top.rglob("*")
        if path.is_file() and path.suffix not in {".so", ".pyc"}
    )
    return sorted(str(path.relative_to(top)) for path, n in many.items() if n > MOST_FILES)


@pytest.mark.parametrize("folder", ["", "a/b"])
def test_a_crowded_folder_is_found(folder: str, tmp_path: Path) -> None:
    (tmp_path / folder).mkdir(parents=True, exist_ok=True)
    for number in range(MOST_FILES):
        (tmp_path / folder / f"{number}.h").touch()
    (tmp_path / folder / "built.so").touch()
    assert crowded(tmp_path) == []
    (tmp_path / folder / "more.toml").touch()
    assert crowded(tmp_path) == [folder or "."]


def test_the_package_shows_its_public_modules() -> None:
    inner = {path.stem for path in (ROOT / "oomkit").glob("_*.py")}
    assert inner == {"__init__", "__main__"}


def fields(text: str, struct: str) -> int:
    body = text[text.index(f"typedef struct {struct} {{") :]
    return body[: body.index(f"}} {struct};")].count(";")


def test_a_call_is_not_everything() -> None:
    assert fields(HOUSE.text["call/call_types.h"], "oomkit_call") <= MOST_FIELDS


# --- each of these has been seen red ---


def _planted(**text: str) -> House:
    found = House(("low", "high"))
    for name, content in text.items():
        folder, _, rest = name.partition("_")
        found.add(f"{folder}/{rest}.c", content)
    return found


def test_a_use_that_points_up_is_found() -> None:
    low = '/* high_one() */\nint\nlow_one(void)\n{\n    return high_one("high_two()");\n}\n'
    high = "int\nhigh_one(const char *x)\n{\n    return low_one();\n}\nint\nhigh_two(void)\n{\n}\n"
    found = _planted(low_a=low, high_b=high)
    assert found.upward() == ["low/a.c high_one"]
    assert ("high/b.c", "low_one", "low/a.c") in found.uses()


def test_what_is_static_belongs_to_its_file() -> None:
    helper = "static int\nhelper(void)\n{\n    return 1;\n}\n"
    assert _planted(low_a="int\nx(void)\n{\n    return helper();\n}\n", high_b=helper).uses() == []


def test_a_rule_that_is_named_is_found() -> None:
    rule = "int\nrule_acts(void)\n{\n}\nconst oomkit_rule some_rule = {0};\n"
    user = "int\nfirst(void)\n{\n    return rule_acts();\n}\n"
    found = House(("undo", "accum", "engine"))
    for name, text in (("accum/a.c", rule), ("engine/b.c", user), ("accum/c.c", user)):
        found.add(name, text)
    assert rules_used(found) == ["engine/b.c rule_acts"]


def test_a_long_function_is_found() -> None:
    found, declared = functions(
        "int\nf(int x,\n  int y)\n{\n" + "    x++;\n" * 70 + "}\nint\ng(void);\n"
    )
    assert found["f"].lines == 74 and declared == {"g"}


def test_fields_are_counted() -> None:
    assert fields("typedef struct a {\n    int x, y;\n    void (*f)(void);\n} a;\n", "a") == 2
