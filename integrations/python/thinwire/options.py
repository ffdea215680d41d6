"""Every setting of thinwire, in one list.

The ctypes mirror of tw_options (_library.py), the arguments and the environment (config.py) and
docs/reference/settings.md (scripts/settings.py) are made from it. Tests prove that the struct in
integrations/c/thinwire.h, config.Config, and Options are equal to it. Nothing here reads the
environment."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypedDict

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

POLICIES = ("p3", "wfbp", "fifo")
TOPOLOGIES = ("auto", "flat", "grid", "hierarchical")
TRANSPORTS = ("gloo", "ucx", "nccl", "auto")
SCOPES = ("backward", "all")

_INT_MAX = (1 << 31) - 1
_SIZE_MAX = (1 << 64) - 1

# The answers to "equal on all ranks?".
COMPARED = "yes, compared at the start"
NEEDED = "yes, else the ranks do not meet"
LEADER = "no, rank 0's counts"
TENSORS = "yes, compared with each tensor"
SHIM = "yes, compared before the first compressed call"
ALIKE = "yes, else a timeout"
FREE = "no"


@dataclass(frozen=True)
class Kind:
    """How a setting's value is read from text, which values are right, and how C gets it.

    None stands for the library's default: only to_c is ever called with it."""

    expected: str
    parse: Callable[[str], Any]
    right: Callable[[Any], bool]
    to_c: Callable[[Any], Any]


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _whole(at_least: int, at_most: int) -> Kind:
    def right(value: object) -> bool:
        if not isinstance(value, int) or isinstance(value, bool):
            return False
        return at_least <= value <= at_most

    expected = f"a whole number from {at_least} to {at_most}"
    return Kind(expected, int, right, lambda value: value or 0)


def _milliseconds(seconds: float | None) -> int:
    return 0 if seconds is None else min(math.ceil(seconds * 1000), _INT_MAX)


def _parse_bool(text: str) -> bool:
    known = {"0": False, "1": True, "false": False, "true": True}
    if text.lower() not in known:
        raise ValueError(text)
    return known[text.lower()]


def _is_text(value: object) -> bool:
    return isinstance(value, str) and "\0" not in value  # where C would end it


_TEXT = Kind(
    "text without NUL", str, _is_text, lambda value: None if value is None else value.encode()
)
_ONE_NAME = Kind(
    "the name of one network interface", str,
    lambda value: _is_text(value) and "," not in value, _TEXT.to_c,
)  # fmt: skip
_TOPOLOGY = Kind(f"one of {TOPOLOGIES}", str, lambda value: value in TOPOLOGIES, _TEXT.to_c)
_POLICY = Kind(f"one of {POLICIES}", str, lambda value: value in POLICIES, _TEXT.to_c)
_TRANSPORT = Kind(f"one of {TRANSPORTS}", str, lambda value: value in TRANSPORTS, _TEXT.to_c)
_SCOPE = Kind(f"one of {SCOPES}", str, lambda value: value in SCOPES, _TEXT.to_c)
_SECONDS = Kind(
    "a number of seconds above 0", float,
    lambda value: _is_number(value) and math.isfinite(value) and value > 0, _milliseconds,
)  # fmt: skip
_MOMENTUM = Kind(
    "a number from 0 to below 1", float, lambda value: _is_number(value) and 0 <= value < 1, float
)
_FLAG = Kind("True or False", _parse_bool, lambda value: value in (True, False), int)
_BOOL_OR_NONE = Kind(
    "True, False or None", _parse_bool, lambda value: isinstance(value, bool),
    {None: 0, True: 1, False: -1}.__getitem__,
)  # fmt: skip
_LANES = _whole(1, 64)
_CHUNK_BYTES = _whole(4096, 1 << 42)
_LOOPS = _whole(1, 16)
_BYTES = _whole(0, _SIZE_MAX)
_LOCAL_SIZE = _whole(0, _INT_MAX)
_IS_ZERO = Kind(_BYTES.expected, _BYTES.parse, _BYTES.right, lambda value: int(value == 0))


@dataclass(frozen=True)
class Option:
    """One field of tw_options, or a setting that the C library does not have.

    field, c_type: as thinwire.h has them. setting: of config.Config; kind says how its value is
    treated. argument: config.resolve and compress() take the setting under its name. variables: of
    the environment; the first that is set counts. default and equal (on all ranks) are words for
    the reader."""

    meaning: str
    field: str | None = None
    c_type: str | None = None
    setting: str | None = None
    kind: Kind | None = None
    argument: bool = False
    variables: tuple[str, ...] = ()
    default: str = ""
    equal: str = FREE


def _of_call(field: str, c_type: str, meaning: str, default: str, equal: str) -> Option:
    """A field that each communicator gets from its maker, and no setting."""
    return Option(meaning, field, c_type, default=default, equal=equal)


# In the order of tw_options' fields; the settings without a field follow.
OPTIONS: tuple[Option, ...] = (
    _of_call("struct_size", "size_t", "size of the caller's struct; tw_options_init sets it",
             "sizeof(tw_options)", FREE),
    _of_call("rank", "int", "number of this rank, from 0", "0", "no, each has its own"),
    _of_call("size", "int", "number of ranks", "1", COMPARED),
    _of_call("store", "tw_store", "functions of the store where the ranks meet", "none", NEEDED),
    Option("name under which ranks that are threads of this process meet",
           "local_group", "const char*", "local_group", _TEXT, default="none", equal=NEEDED),
    _of_call("store_path", "const char*", "shared folder where the ranks meet", "none", NEEDED),
    _of_call("group", "const char*", "prefix of the keys, so that groups can share a store",
             "none", NEEDED),
    Option("where all tensors lie: `cpu`, `cuda` or `cuda:1`; Python takes the tensors' device",
           "device", "const char*", "device", _TEXT, default="cpu"),
    Option("path of libthinwire_cuda.so", "cuda_library", "const char*", "cuda_library", _TEXT,
           variables=("THINWIRE_CUDA_LIB",), default="beside libthinwire.so"),
    Option("codec of the gradients; in C several, separated by `;`, which segments choose from",
           "codec", "const char*", "codec", _TEXT, True, ("THINWIRE_CODEC",), "int4", COMPARED),
    Option("momentum of SGD, which the library then owns and compresses; 0: none",
           "momentum", "float", "momentum", _MOMENTUM, True, (), "0", COMPARED),
    Option("results are Nesterov steps of that momentum",
           "nesterov", "int", "nesterov", _FLAG, True, (), "off", COMPARED),
    Option("order of chunks: `wfbp` (as they are ready), `fifo` (as they were submitted) or `p3` "
           "(input layers first, the default of plain modules)",
           "policy", "const char*", "policy", _POLICY, True, (), "wfbp", COMPARED),
    Option("whether a step's order is predicted from the step before; in C 1: always, -1: never",
           "planned", "int", "planned", _BOOL_OR_NONE, True, (), "above 1 ms of latency", LEADER),
    Option("network interface to listen on", "interface_name", "const char*",
           "interface", _ONE_NAME, True, ("THINWIRE_IFACE", "GLOO_SOCKET_IFNAME"),
           "the one that leads to rendezvous_host"),
    Option("host whose interface is listened on when no interface is named", "rendezvous_host",
           "const char*", "rendezvous_host", _TEXT, False, ("MASTER_ADDR",), "loopback"),
    Option("chunks in flight, 64 at most", "lanes", "int", "lanes", _LANES, True,
           ("THINWIRE_LANES",), "4", COMPARED),
    Option("bytes of fp32 in a chunk, at least 4096; unless set, 1048576 under policy p3, else "
           "33554432 over NCCL, and more in worlds of more than 8 ranks, so that messages stay "
           "large", "chunk_bytes", "size_t",
           "chunk_bytes", _CHUNK_BYTES, True, ("THINWIRE_CHUNK_BYTES",), "4194304", COMPARED),
    Option("tensors whose size times (ranks - 1) is at most this many bytes are sent uncompressed",
           "min_bytes", "size_t", "min_bytes", _BYTES, True, (), "65536", COMPARED),
    Option("small tensors are compressed as well; in Python `min_bytes=0` says so",
           "no_raw", "int", "min_bytes", _IS_ZERO, False, (), "off", COMPARED),
    Option("seconds until connecting or an allreduce fails; in C milliseconds; Python takes "
           "those of torch's process group",
           "timeout_ms", "int", "timeout_s", _SECONDS, True, ("THINWIRE_TIMEOUT_S",), "30"),
    Option("file for a Chrome trace; each rank adds its number to the name",
           "trace_path", "const char*", "trace", _TEXT, True, ("THINWIRE_TRACE",), "none"),
    Option("file for the engine's last events, written with its first failure; each rank adds its "
           "number to the name",
           "flight_path", "const char*", "flight", _TEXT, True, ("THINWIRE_FLIGHT",), "none"),
    Option("ranks compare the shapes of tensors as well, and not only their element counts",
           setting="strict", kind=_FLAG, argument=True, variables=("THINWIRE_STRICT",),
           default="off", equal=TENSORS),
    Option("file of mode 0600 with the group's secret of 16 to 4096 bytes, the same on every rank; "
           "without it, who can read the store can take part",
           "key_file", "const char*", "key_file", _TEXT, False, ("THINWIRE_KEY_FILE",),
           "a random token in the store", NEEDED),
    Option("a CRC32C goes with all that tensors send, and is checked before anything is decoded",
           "checksum", "size_t", "checksum", _FLAG, True, ("THINWIRE_CHECKSUM",), "off", COMPARED),
    Option("the way of dense allreduces: from each rank to all others (`flat`), along the rows and "
           "columns of a grid of ranks, whose rows are the nodes if there are several (`grid`), "
           "uncompressed inside nodes and compressed between them (`hierarchical`), or `auto`: the "
           "last where the links inside are measured to be so much faster that it pays, and over "
           "NCCL wherever there are nodes, where GPUs that reach one another through host memory "
           "only take the grid; else a grid from 64 ranks on, else flat",
           "topology", "const char*", "topology", _TOPOLOGY, True, ("THINWIRE_TOPOLOGY",), "auto",
           COMPARED),
    Option("what a step changes can be taken back, so that `recover()` loses nothing; it takes 4 "
           "bytes a parameter, 8 with momentum",
           "recoverable", "size_t", "recoverable", _FLAG, True, ("THINWIRE_RECOVERABLE",), "off"),
    _of_call("check_replicas", "size_t", "reserved: thinwire.torch.check_replicas() compares "
             "parameters", "0", FREE),
    Option("what the data runs on: `gloo` (TCP), `ucx` (UCX over the shared memory of the host "
           "that all ranks are on), `nccl` (between ranks that have GPUs of their own), or `auto` "
           "(`nccl` where all ranks can, else `ucx`, else `gloo`)",
           "transport", "const char*", "transport", _TRANSPORT, True, ("THINWIRE_TRANSPORT",),
           "gloo", COMPARED),
    Option("path of libucp.so.0; Python looks into the wheel libucx-cu13 first",
           "ucx_library", "const char*", "ucx_library", _TEXT, False, ("THINWIRE_UCX_LIB",),
           "where the dynamic linker looks"),
    Option("path of libnccl.so.2; never a second copy is loaded",
           "nccl_library", "const char*", "nccl_library", _TEXT, False, ("THINWIRE_NCCL_LIB",),
           "the copy that is loaded, such as torch's; else the wheel's beside the package; else "
           "where the dynamic linker looks"),
    Option("ranks of a node, which are neighbours; 0: those on one running kernel and in one "
           "network namespace",
           "local_size", "size_t", "local_size", _LOCAL_SIZE, True, ("THINWIRE_LOCAL_SIZE",), "0",
           COMPARED),
    Option("TCP's congestion control of the connections: the kernel's name of one that the process "
           "may choose (`reno`, `cubic`), or `system`: the kernel's default",
           "congestion", "const char*", "congestion", _TEXT, False, ("THINWIRE_CONGESTION",),
           "system"),
    Option("threads that move a rank's bytes over TCP, each with connections of its own to all "
           "ranks; one moves a gigabyte or two a second", "loops", "size_t", "loops", _LOOPS,
           False, ("THINWIRE_LOOPS",), "1", COMPARED),
    Option("what a process group of the backend `thinwire` compresses: `backward` (gradients, "
           "while `backward()` runs) or `all` (every sum and mean of floats)",
           setting="scope", kind=_SCOPE, variables=("THINWIRE_SCOPE",), default="backward",
           equal=ALIKE),
    Option("NCCL shim: the codec of an unchanged program's allreduces over NCCL; the opt-in",
           variables=("THINWIRE_NCCL_CODEC",), default="none: all passes", equal=SHIM),
    Option("NCCL shim: smaller allreduces pass", variables=("THINWIRE_NCCL_MIN_BYTES",),
           default="1048576", equal=SHIM),
    Option("NCCL shim: only communicators of so many ranks opt in; 0: any",
           variables=("THINWIRE_NCCL_RANKS",), default="0", equal=ALIKE),
    Option("NCCL shim: bound of the residuals that a communicator keeps; 0: no error feedback",
           variables=("THINWIRE_NCCL_FEEDBACK_BYTES",), default="4294967296"),
    Option("NCCL shim: 1: counts allreduces, and prints at exit what compression would gain",
           variables=("THINWIRE_NCCL_OBSERVE",), default="none"),
    Option("level of the `thinwire` logger: debug, info, warning or error",
           variables=("THINWIRE_LOG",), default="the root logger's"),
    Option("how many ranks serve a `thinwire.kvstore`: the last ones of the world",
           variables=("THINWIRE_SERVERS",), default="none: `dist_*` stores need it", equal=NEEDED),
    Option("path of libthinwire.so", variables=("THINWIRE_LIBRARY",),
           default="in the package, else the checkout's build"),
)  # fmt: skip

# The fields of tw_options, in their order.
FIELDS = tuple(option for option in OPTIONS if option.field is not None)
# The settings that config.resolve takes as arguments.
ARGUMENTS = tuple(option.setting for option in OPTIONS if option.argument)


class Settings(TypedDict, total=False):
    """The settings that State, GradientExchange and Communicator take by keyword.

    None means the THINWIRE_* variable of the setting, else its default: docs/reference/settings.md
    lists them. All ranks use the same values, but for interface, trace and flight."""

    momentum: float | None
    nesterov: bool | None
    policy: Literal["p3", "wfbp", "fifo"] | None
    planned: bool | None
    interface: str | None
    lanes: int | None
    chunk_bytes: int | None
    min_bytes: int | None
    timeout_s: float | None
    trace: str | None
    flight: str | None
    strict: bool | None
    checksum: bool | None
    topology: Literal["auto", "flat", "grid", "hierarchical"] | None
    recoverable: bool | None
    transport: Literal["gloo", "ucx", "nccl", "auto"] | None
    local_size: int | None


class Options(Settings, total=False):
    """The settings that compress() takes by keyword: some are of one kind of model only."""

    clip_value: float | None  # DDP: clips each rank's gradients to [-clip_value, clip_value]
    clip_norm: float | None  # DDP: limits each parameter's norm to clip_norm / sqrt(ranks)
    warm_up_steps: int | None  # with Adam: fp32 steps until its variance is frozen; with delay
    delay: Literal[0, 1] | None  # with optimizer=: means come one step late (arXiv 2005.06728)
    find_unused_parameters: bool | None  # with optimizer=: one that no rank used keeps grad None
    replicas: ProcessGroup | None  # FSDP2: ranks that have the same shard, in hybrid sharding
    inner: bool | None  # FSDP2 with replicas; False: the reduce-scatter over the shards is exact
    gather: str | None  # FSDP2: what changed in parameters is gathered with this codec ("int4")
    # FSDP2: what the gathers' differences refer to; auto: within 1/8 of free memory
    reference: Literal["auto", "fp32", "bf16", False] | None
    feedback: Literal["auto"] | bool | None  # FSDP2: residuals; auto: within 1/8 of free memory
