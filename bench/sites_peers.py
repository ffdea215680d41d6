"""A round of hivemind's averaging and of Flower's FedAvg, for bench/sites.py, which runs this
module as every member, with the Python of an environment that has hivemind or Flower.

    python -m bench.sites_peers hivemind|flwr --megaparameters 5 --rounds 5

hivemind: a DecentralizedAverager over a DHT, whose group has room for exactly all members, so that
it waits for no others; a round is step(), which finds the group and averages. Flower: start_server
with member 0 and start_client on each, FedAvg; a round lasts from the server's choice of clients to
its new parameters, and a client's fit() takes no time. Both send one tensor per layer."""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch.distributed as dist

from bench import harness, lab
from bench.sites import model_of, row_of, sent_bytes, timed_round

_SERVER_PORT = 29600


# hivemind.


@contextlib.contextmanager
def averagers(parameters: int) -> Iterator[Callable[[], None]]:
    """Yield a round, with values as fp16. RuntimeError if hivemind does not average, as with its 8
    bits, where step() returns a result anyway."""
    import hivemind

    me, world, address = dist.get_rank(), dist.get_world_size(), os.environ["MASTER_ADDR"]
    if address.startswith(lab.SUBNET):
        address = f"{lab.SUBNET}.{me + 1}"
    listen = [f"/ip4/{address}/tcp/0"]
    told: list[Any] = [None]
    if me == 0:
        dht = hivemind.DHT(host_maddrs=listen, start=True)
        told = [[str(each) for each in dht.get_visible_maddrs()]]
    dist.broadcast_object_list(told, 0)
    if me != 0:
        dht = hivemind.DHT(host_maddrs=listen, initial_peers=told[0], start=True)
    values = [p.detach() + me for p in model_of(parameters).parameters()]
    averager = hivemind.DecentralizedAverager(
        [each.clone() for each in values], dht, start=True, prefix="bench",
        target_group_size=world, compression=hivemind.compression.Float16Compression(),
    )  # fmt: skip

    def exchange() -> None:
        if averager.step(timeout=120, allow_retries=True) is None:
            raise RuntimeError("hivemind found no group")

    exchange()  # connects
    with averager.get_tensors() as averaged:
        # Member r has r more than member 0 in each element.
        off = max(
            float((found - mine + me - (world - 1) / 2).abs().max())
            for found, mine in zip(averaged, values, strict=True)
        )
    if off > 0.1:
        raise RuntimeError("hivemind averaged nothing")
    yield exchange
    averager.shutdown()
    dht.shutdown()


def hivemind_rows(parameters: int, rounds: int) -> list[dict]:
    with averagers(parameters) as exchange:
        return [row_of("hivemind fp16", [timed_round(exchange) for _ in range(rounds)], None)]


# Flower.


def serve(parameters: int, rounds: int, members: int, interface: str, told: Any) -> None:
    """Run Flower's server, in a separate process. It sends times and the interface's bytes to
    `told`."""
    from flwr.common import ndarrays_to_parameters
    from flwr.server import ServerConfig, start_server
    from flwr.server.strategy import FedAvg

    os.environ["GLOO_SOCKET_IFNAME"] = interface
    took = []

    class Timed(FedAvg):
        def configure_fit(self, *arguments: Any, **named: Any) -> Any:
            self.begun, self.before = time.monotonic(), sent_bytes()
            return super().configure_fit(*arguments, **named)

        def aggregate_fit(self, *arguments: Any, **named: Any) -> Any:
            found = super().aggregate_fit(*arguments, **named)
            took.append((time.monotonic() - self.begun, sent_bytes() - self.before))
            return found

    values = [p.detach().numpy() for p in model_of(parameters).parameters()]
    strategy = Timed(
        fraction_fit=1.0, fraction_evaluate=0.0, min_fit_clients=members,
        min_available_clients=members, initial_parameters=ndarrays_to_parameters(values),
    )  # fmt: skip
    start_server(
        server_address=f"0.0.0.0:{_SERVER_PORT}", config=ServerConfig(num_rounds=rounds + 1),
        strategy=strategy,
    )  # fmt: skip
    told.put(took[1:])


def flwr_rows(parameters: int, rounds: int) -> list[dict]:
    from flwr.client import NumPyClient, start_client

    class Client(NumPyClient):
        def fit(self, values: list, config: dict) -> tuple:
            return values, 1, {}

    context = multiprocessing.get_context("spawn")
    told: Any = context.SimpleQueue()
    where, server = (os.environ["MASTER_ADDR"], _SERVER_PORT), None
    if dist.get_rank() == 0:
        interface = os.environ["GLOO_SOCKET_IFNAME"]
        given = (parameters, rounds, dist.get_world_size(), interface, told)
        server = context.Process(target=serve, args=given)
        server.start()
        while True:  # a client does not wait for its server
            with contextlib.suppress(OSError), socket.create_connection(where, 1.0):
                break
            time.sleep(0.1)
    dist.barrier()
    start_client(
        server_address=f"{where[0]}:{where[1]}",
        client=Client().to_client(), insecure=True, max_wait_time=60,
    )  # fmt: skip
    if server is None:
        return []
    took = told.get()
    server.join()
    others = dist.get_world_size() - 1
    numel = sum(p.numel() for p in model_of(parameters).parameters())
    # Member 0 has the server, which sends the model to each of the others.
    return [row_of("flwr FedAvg fp32", took, 4 * numel * others)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("peer", choices=("hivemind", "flwr"))
    parser.add_argument("--megaparameters", type=float, default=5.0)
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    rows = hivemind_rows if given.peer == "hivemind" else flwr_rows
    return harness.be_rank(lambda: rows(int(given.megaparameters * 1e6), given.rounds))


if __name__ == "__main__":
    sys.exit(main())
