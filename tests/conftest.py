"""Loads `shared.py` where tests run: the first process of pytest-xdist runs none and need not import torch."""

import gc
import signal

import pytest


def pytest_configure(config: pytest.Config) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores Ctrl-C, tests send it
    if hasattr(config, "workerinput") or not config.getoption("numprocesses", None):
        gc.disable()  # while modules are imported and tests collected, a tenth of that time; see `shared`
        config.pluginmanager.import_plugin("shared")
