"""Packages of farspan's optional extras."""

import importlib
from typing import Any


def optional_import(module: str, extra: str) -> Any:
    """Import a module that is installed with one of farspan's extras.

    Raises:
        ValueError: it is not installed.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise ValueError(f"this needs the package {error.name}: pip install 'farspan[{extra}]'") from error
