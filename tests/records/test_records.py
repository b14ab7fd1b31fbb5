"""Records of a run, tested from C: each program here is built with one source and run."""

import pytest
from helpers.core_programs import check, names_of, sanitize

__all__ = ["sanitize"]  # a fixture


@pytest.mark.parametrize("name", names_of("records"))
def test_records(name, tmp_path, sanitize):
    check(name, tmp_path, sanitize)
