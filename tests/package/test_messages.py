"""Errors and warnings: each names an entry of docs/reference/errors.md, which has its text."""

from __future__ import annotations

import re
import subprocess

import pytest
from helpers.own_process import run_module

from oomkit import _C
from oomkit._reports.explain import entries
from package.messages import PAGE, block, messages

MESSAGES = messages()


def test_every_kind_has_an_entry_and_every_entry_a_message() -> None:
    assert sorted(entries()) == sorted(MESSAGES)


@pytest.mark.parametrize("kind", MESSAGES)
def test_an_entry_has_the_texts_a_cause_and_a_fix(kind: str) -> None:
    entry = entries()[kind] + "\n"

    assert entry.startswith(block(MESSAGES[kind])), "run python tests/package/messages.py"
    assert re.findall(r"^\*\*(\w+)\.\*\* ", entry, re.M) == ["Cause", "Fix"]


def test_code_of_the_page_compiles() -> None:
    for code in re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.M | re.S):
        compile(code, PAGE.name, "exec")


def test_entries_are_in_alphabetical_order() -> None:
    for part in re.split(r"^## .*\n", PAGE.read_text(), flags=re.M):
        kinds = re.findall(r"^### (\S+)$", part, re.M)
        assert kinds == sorted(kinds)


def explain(*kind: str) -> subprocess.CompletedProcess[str]:
    return run_module("oomkit", "explain", *kind)


def test_a_message_ends_with_the_command_that_shows_its_entry() -> None:
    assert _C.see("weight") == " (help: python -m oomkit explain weight)"
    shown = explain("weight")
    assert shown.returncode == 0 and entries()["weight"] in shown.stdout


def test_kinds_are_listed_and_another_one_is_named() -> None:
    assert explain().stdout.split() == list(entries())
    wrong = explain("weights")
    assert wrong.returncode == 1
    assert (
        wrong.stderr
        == "oomkit: there is no kind 'weights' of error or warning; did you mean weight?\n"
    )
