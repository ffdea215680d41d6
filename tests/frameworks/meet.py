"""One rank of a launcher: it meets the others, and prints its rank and the sum of all ranks."""

import thinwire
import thinwire.launch
import torch
import torch.distributed as dist
from thinwire.torch import all_reduce

try:
    place = thinwire.launch.setup()
except thinwire.InvalidArgumentError as error:
    raise SystemExit(f"InvalidArgumentError: {error}") from error
dist.init_process_group("gloo")
tensor = torch.full((1000,), float(place.rank))
all_reduce(tensor, codec="int8", name="ranks")
print(f"{place}: {tensor[0].item():.2f}", flush=True)
dist.destroy_process_group()
