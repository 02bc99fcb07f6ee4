"""What the distributed tests share. DeepSpeed comes with `pip install -e '.[deepspeed]'`; when it first starts on CPUs it
compiles an operation, some minutes."""

import pytest


@pytest.fixture(autouse=True)
def _installed(request: pytest.FixtureRequest) -> None:
    if "deepspeed" in getattr(getattr(request.node, "callspec", None), "params", {}).values():
        pytest.importorskip("deepspeed")
