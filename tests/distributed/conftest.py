"""What the distributed tests share. `make test-distributed` installs DeepSpeed, whose first start on CPUs takes
minutes, as it compiles an operation."""

import pytest


@pytest.fixture(autouse=True)
def _installed(request: pytest.FixtureRequest) -> None:
    if "deepspeed" in getattr(getattr(request.node, "callspec", None), "params", {}).values():
        pytest.importorskip("deepspeed")
