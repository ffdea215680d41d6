"""Fixtures that several files use."""

import importlib.util

import pytest


@pytest.fixture(params=["store", "lighthouse"])
def address(request):
    """The address of a store where members meet, while the test runs."""
    import torch.distributed as dist

    if request.param == "store":
        server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        yield f"127.0.0.1:{server.port}"
        return
    if importlib.util.find_spec("torchft") is None:
        pytest.skip("torchft is not installed")
    from torchft.coordination import LighthouseServer

    server = LighthouseServer(
        "127.0.0.1:0", min_replicas=2, join_timeout_ms=20_000, quorum_tick_ms=20,
        heartbeat_timeout_ms=1500,
    )  # fmt: skip
    yield f"http://127.0.0.1:{server.address().rpartition(':')[2]}"
    server.shutdown()
