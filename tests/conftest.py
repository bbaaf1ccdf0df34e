"""Marks the tests that start ranks, so that they run apart from those that start servers."""

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if hasattr(getattr(item, "module", None), "run_on_ranks"):
            item.add_marker(pytest.mark.forks)
