"""All settings of thinwire: the fields of Config and of ModelOptions.

Everything else is derived from them: the ctypes mirror of tw_options (_library.py), the arguments
and the environment (config.py), the options of each kind of model (torch/compress.py), and, by
scripts/settings.py, the types for editors (the end of this file) and docs/reference/settings.md.
Tests check that the struct in integrations/c/thinwire.h is equal. Nothing here reads the
environment."""

# ruff: noqa: RUF009 - the defaults are dataclasses.field()

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypedDict, get_args

from thinwire.arguments import is_finite, is_number, is_text

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Policy = Literal["p3", "wfbp", "fifo"]
Topology = Literal["auto", "flat", "grid", "hierarchical"]
Transport = Literal["gloo", "ucx", "nccl", "auto"]
Scope = Literal["backward", "all"]
TOPOLOGIES: tuple[str, ...] = get_args(Topology)
SCOPES: tuple[str, ...] = get_args(Scope)

_INT_MAX = (1 << 31) - 1
_SIZE_MAX = (1 << 64) - 1

# Answers to "equal on all ranks?".
COMPARED = "yes"
NEEDED = "yes, else the ranks do not meet"
LEADER = "no, rank 0's value counts"
TENSORS = "yes, compared with each tensor"
SHIM = "yes, compared before the first compressed call"
ALIKE = "yes, else a timeout"
FREE = "no"


@dataclass(frozen=True)
class Kind:
    """How a setting's value is parsed from text, checked, and converted for C.

    None means the library's default; only to_c is called with it."""

    expected: str
    parse: Callable[[str], Any]
    right: Callable[[Any], bool]
    to_c: Callable[[Any], Any]


def _whole(at_least: int, at_most: int) -> Kind:
    def right(value: object) -> bool:
        if not isinstance(value, int) or isinstance(value, bool):
            return False
        return at_least <= value <= at_most

    expected = f"a whole number from {at_least} to {at_most}"
    return Kind(expected, int, right, lambda value: value or 0)


def milliseconds(seconds: float | None) -> int:
    """Convert seconds for C: 0 for None; otherwise at least 1 and at most the largest int."""
    return 0 if seconds is None else min(math.ceil(seconds * 1000), _INT_MAX)


def _parse_bool(text: str) -> bool:
    known = {"0": False, "1": True, "false": False, "true": True}
    if text.lower() not in known:
        raise ValueError(text)
    return known[text.lower()]


_TEXT = Kind(
    "text in UTF-8 without NUL", str, is_text,
    lambda value: None if value is None else value.encode(),
)  # fmt: skip
_SPEC = Kind("a codec such as 'int4', or a dict of them by pattern", str, is_text, _TEXT.to_c)
_ONE_NAME = Kind(
    "the name of one network interface", str,
    lambda value: is_text(value) and "," not in value, _TEXT.to_c,
)  # fmt: skip


def _one_of(words: Any) -> Kind:
    values = get_args(words)
    return Kind(f"one of {values}", str, lambda value: value in values, _TEXT.to_c)


_SECONDS = Kind(
    "a number of seconds above 0", float,
    lambda value: is_finite(value) and value > 0, milliseconds,
)  # fmt: skip
_MOMENTUM = Kind(
    "a number from 0 to below 1", float, lambda value: is_number(value) and 0 <= value < 1, float
)
_FLAG = Kind(
    "True or False", _parse_bool, lambda value: isinstance(value, int) and value in (0, 1), int
)
_BOOL_OR_NONE = Kind(
    "True, False or None", _parse_bool, lambda value: isinstance(value, bool),
    {None: 0, True: 1, False: -1}.__getitem__,
)  # fmt: skip
_BYTES = _whole(0, _SIZE_MAX)
_IS_ZERO = Kind(_BYTES.expected, _BYTES.parse, _BYTES.right, lambda value: int(value == 0))


@dataclass(frozen=True)
class Option:
    """One field of tw_options, or a setting that the C library does not have.

    field, c_type: as in thinwire.h. setting: the field of Config; kind: how its value is treated.
    argument: whether config.resolve and compress() take it as an argument. variables: environment
    variables; the first that is set is used. default and equal (on all ranks): text for the
    reference page."""

    meaning: str
    field: str | None = None
    c_type: str | None = None
    setting: str | None = None
    kind: Kind | None = None
    argument: bool = False
    variables: tuple[str, ...] = ()
    default: str = ""
    equal: str = FREE


def _setting(
    value: Any,
    kind: Kind,
    c_type: str | None,
    meaning: str,
    *variables: str,
    field: str = "",
    argument: bool = True,
    default: str = "",
    equal: str = FREE,
) -> Any:
    """Return a field of Config. value: its default; None: the library's default. c_type: of its
    field in tw_options, if there is one; `field`: that field's name, if it differs. default: the
    text for the default, if it is not the value. The other arguments are as in Option."""
    option = Option(
        meaning, field, c_type, None, kind, argument, variables, default or str(value), equal
    )
    return dataclasses.field(default=value, metadata={"option": option})


# fmt: off
@dataclass(frozen=True)
class Config:
    """The settings of a process group, in the order of tw_options' fields.

    None: the library's default."""

    local_group: str | None = _setting(None, _TEXT, "const char*",
        "name under which ranks that are threads of this process meet",
        argument=False, default="none", equal=NEEDED)
    device: str = _setting("cpu", _TEXT, "const char*",
        "device of all tensors: `cpu`, `cuda` or `cuda:1`; Python uses the tensors' own device",
        argument=False)
    cuda_library: str | None = _setting(None, _TEXT, "const char*",
        "path of libthinwire_cuda.so", "THINWIRE_CUDA_LIB",
        argument=False, default="beside libthinwire.so")
    codec: str = _setting("int4", _SPEC, "const char*",
        "codec of the gradients; in C a list separated by `;`, from which each segment chooses",
        "THINWIRE_CODEC", equal=COMPARED)
    momentum: float = _setting(0.0, _MOMENTUM, "float",
        "momentum of SGD, which the library then owns and compresses; 0: none",
        default="0", equal=COMPARED)
    nesterov: bool = _setting(False, _FLAG, "int",
        "results are Nesterov steps with that momentum",
        default="off", equal=COMPARED)
    policy: Policy = _setting("wfbp", _one_of(Policy), "const char*",
        "order of chunks: `wfbp` (as they become ready), `fifo` (as they were submitted) or `p3` "
        "(input layers first, the default for plain modules)",
        equal=COMPARED)
    planned: bool | None = _setting(None, _BOOL_OR_NONE, "int",
        "whether a step's order is predicted from the previous step; in C 1: always, -1: never",
        default="above 1 ms of latency", equal=LEADER)
    interface: str | None = _setting(None, _ONE_NAME, "const char*",
        "network interface to listen on", "THINWIRE_IFACE", "GLOO_SOCKET_IFNAME",
        field="interface_name", default="the one that leads to rendezvous_host")
    rendezvous_host: str | None = _setting(None, _TEXT, "const char*",
        "if no interface is named, ranks listen on the one that leads to this host", "MASTER_ADDR",
        argument=False, default="loopback")
    lanes: int | None = _setting(None, _whole(1, 64), "int",
        "chunks in flight at the same time, at most 64", "THINWIRE_LANES",
        default="4", equal=COMPARED)
    chunk_bytes: int | None = _setting(None, _whole(4096, 1 << 42), "size_t",
        "bytes of fp32 in a chunk, at least 4096; if not set, 1048576 under policy p3, else "
        "33554432 over NCCL, and more in worlds of more than 8 ranks, so that messages stay large",
        "THINWIRE_CHUNK_BYTES", default="4194304", equal=COMPARED)
    min_bytes: int | None = _setting(None, _BYTES, "size_t",
        "tensors whose size times (ranks - 1) is at most this many bytes are sent uncompressed",
        default="65536", equal=COMPARED)
    timeout_s: float | None = _setting(None, _SECONDS, "int",
        "seconds until connecting or an allreduce fails; in C milliseconds; Python's default is "
        "the timeout of torch's process group, if there is one", "THINWIRE_TIMEOUT_S",
        field="timeout_ms", default="30")
    trace: str | None = _setting(None, _TEXT, "const char*",
        "file for a Chrome trace; each rank adds its number to the name", "THINWIRE_TRACE",
        field="trace_path", default="none")
    flight: str | None = _setting(None, _TEXT, "const char*",
        "file for the engine's last events, written with its first failure; each rank adds its "
        "number to the name", "THINWIRE_FLIGHT",
        field="flight_path", default="none")
    strict: bool = _setting(False, _FLAG, None,
        "ranks compare the shapes of tensors too, and not only their element counts",
        "THINWIRE_STRICT", default="off", equal=TENSORS)
    key_file: str | None = _setting(None, _TEXT, "const char*",
        "file of mode 0600 with the group's secret of 16 to 4096 bytes, the same on every rank; "
        "without it, everyone who can read the store can take part", "THINWIRE_KEY_FILE",
        argument=False, default="a random token in the store", equal=NEEDED)
    checksum: bool = _setting(False, _FLAG, "size_t",
        "every block of a tensor is sent with a CRC32C, which is checked before it is decoded",
        "THINWIRE_CHECKSUM", default="off", equal=COMPARED)
    topology: Topology | None = _setting(None, _one_of(Topology), "const char*",
        "how dense allreduces are exchanged: `flat` (each rank with all others), `grid` (along the "
        "rows and columns of a grid of ranks, whose rows are the nodes if there are several), "
        "`hierarchical` (uncompressed inside nodes and compressed between them), or `auto`. With "
        "several nodes of several ranks `auto` is hierarchical if the links inside are measured "
        "to be so much faster that it pays; over NCCL it does not measure, and is hierarchical, "
        "or a grid if GPUs reach one another only through host memory. Otherwise `auto` is a "
        "grid from 64 ranks on, and flat below",
        "THINWIRE_TOPOLOGY", default="auto", equal=COMPARED)
    recoverable: bool = _setting(False, _FLAG, "size_t",
        "keeps a copy with which `recover()` undoes a failed step, so that nothing is lost; it "
        "takes 4 bytes per parameter, 8 with momentum", "THINWIRE_RECOVERABLE", default="off")
    transport: Transport = _setting("gloo", _one_of(Transport), "const char*",
        "how the data is sent: `gloo` (TCP), `ucx` (UCX over shared memory, if all ranks are on "
        "one host), `nccl` (between ranks that have GPUs of their own), or `auto` (`nccl` if all "
        "ranks can use it, else `ucx`, else `gloo`)",
        "THINWIRE_TRANSPORT", equal=COMPARED)
    ucx_library: str | None = _setting(None, _TEXT, "const char*",
        "path of libucp.so.0; Python first looks into the wheel libucx-cu13", "THINWIRE_UCX_LIB",
        argument=False, default="where the dynamic linker looks")
    nccl_library: str | None = _setting(None, _TEXT, "const char*",
        "path of libnccl.so.2; a second copy is never loaded", "THINWIRE_NCCL_LIB",
        argument=False,
        default="an already loaded copy, such as torch's; else the wheel's beside the package; "
        "else where the dynamic linker looks")
    local_size: int | None = _setting(None, _whole(0, _INT_MAX), "size_t",
        "number of ranks per node, which are neighbours; 0: the ranks on one running kernel and "
        "in one network namespace are a node", "THINWIRE_LOCAL_SIZE", default="0", equal=COMPARED)
    congestion: str | None = _setting(None, _TEXT, "const char*",
        "TCP's congestion control for the connections: one that the process may choose, by the "
        "kernel's name (`reno`, `cubic`), or `system`: the kernel's default", "THINWIRE_CONGESTION",
        argument=False, default="system")
    loops: int | None = _setting(None, _whole(1, 16), "size_t",
        "threads that move a rank's bytes over TCP, each with its own connections to all ranks; "
        "one moves a gigabyte or two per second", "THINWIRE_LOOPS",
        argument=False, default="1", equal=COMPARED)
    scope: Scope = _setting("backward", _one_of(Scope), None,
        "what a process group of the backend `thinwire` compresses: `backward` (gradients, while "
        "`backward()` runs) or `all` (every sum and mean of floats)", "THINWIRE_SCOPE",
        argument=False, equal=ALIKE)
    gather: str | None = _setting(None, _TEXT, None,
        "codec with which a process group of the backend `thinwire` gathers the changes of "
        "FSDP2's parameters, like `compress(gather=)`: `int4`, `adaptive`, `int8` or `bf16`",
        "THINWIRE_GATHER", argument=False, default="none: exact gathers", equal=ALIKE)
# fmt: on


def _of_call(field: str, c_type: str, meaning: str, default: str, equal: str) -> Option:
    """Return an option for a field that is not a setting, but set for each communicator."""
    return Option(meaning, field, c_type, default=default, equal=equal)


# The fields of tw_options that belong to no setting, by the setting that they follow.
_BEHIND: dict[str, tuple[Option, ...]] = {
    "": (
        _of_call("struct_size", "size_t", "size of the caller's struct; tw_options_init sets it",
                 "sizeof(tw_options)", FREE),
        _of_call("rank", "int", "number of this rank, from 0", "0", "no, each has its own"),
        _of_call("size", "int", "number of ranks", "1", COMPARED),
        _of_call("store", "tw_store", "functions of the store where the ranks meet", "none",
                 NEEDED),
    ),
    "local_group": (
        _of_call("store_path", "const char*", "shared folder where the ranks meet", "none",
                 NEEDED),
        _of_call("group", "const char*", "prefix of the keys, so that groups can share a store",
                 "none", NEEDED),
    ),
    "min_bytes": (
        Option("small tensors are compressed too; in Python pass `min_bytes=0`",
               "no_raw", "int", "min_bytes", _IS_ZERO, default="off", equal=COMPARED),
    ),
    "recoverable": (
        _of_call("check_replicas", "size_t", "reserved: thinwire.torch.check_replicas() compares "
                 "parameters", "0", FREE),
    ),
}  # fmt: skip

# Environment variables that are not settings of a process group.
_VARIABLES = (
    Option("NCCL shim: codec for an unchanged program's allreduces over NCCL; enables the shim",
           variables=("THINWIRE_NCCL_CODEC",), default="none: nothing is compressed", equal=SHIM),
    Option("NCCL shim: smaller reductions are not compressed",
           variables=("THINWIRE_NCCL_MIN_BYTES",), default="1048576", equal=SHIM),
    Option("NCCL shim: only communicators with this number of ranks compress; 0: all of them",
           variables=("THINWIRE_NCCL_RANKS",), default="0", equal=ALIKE),
    Option("NCCL shim: most bytes of residuals that a communicator keeps; 0: no error feedback",
           variables=("THINWIRE_NCCL_FEEDBACK_BYTES",), default="0"),
    Option("NCCL shim: 1: reduce-scatters are compressed too",
           variables=("THINWIRE_NCCL_REDUCE_SCATTER",), default="none", equal=SHIM),
    Option("NCCL shim: 1: counts allreduces, and prints at exit what compression would save",
           variables=("THINWIRE_NCCL_OBSERVE",), default="none"),
    Option("level of the `thinwire` logger: debug, info, warning or error",
           variables=("THINWIRE_LOG",), default="the root logger's"),
    Option("number of ranks that are servers of a `thinwire.kvstore`: the last ones of the world",
           variables=("THINWIRE_SERVERS",), default="none: `dist_*` stores need it", equal=NEEDED),
    Option("where servers of a `thinwire.kvstore` keep the journals that restore them: "
           "`FOLDER[,bytes=N][,durable=fsync]`", variables=("THINWIRE_KV_JOURNAL",),
           default="none: a lost server ends the store"),
    Option("path of the libzmq.so.5 that a `thinwire.kvstore` uses",
           variables=("THINWIRE_ZMQ_LIB",),
           default="where the dynamic linker looks, then the wheel pyzmq beside the package"),
    Option("path of libthinwire.so", variables=("THINWIRE_LIBRARY",),
           default="in the package, else the checkout's build"),
)  # fmt: skip


def _options() -> Iterator[Option]:
    yield from _BEHIND[""]
    for field in dataclasses.fields(Config):
        option: Option = field.metadata["option"]
        in_c = None if option.c_type is None else option.field or field.name
        yield dataclasses.replace(option, setting=field.name, field=in_c)
        yield from _BEHIND.get(field.name, ())
    yield from _VARIABLES


OPTIONS: tuple[Option, ...] = tuple(_options())
# The fields of tw_options, in their order.
FIELDS = tuple(option for option in OPTIONS if option.field is not None)
# The settings that config.resolve() takes as arguments.
ARGUMENTS = tuple(option.setting for option in OPTIONS if option.argument)

# Kinds of models.
DDP, SHARDS = "a model under DDP", "a model under FSDP2"
STEPPED = "a plain module with optimizer="


def _of(models: tuple[str, ...], meaning: str) -> Any:
    return dataclasses.field(default=None, metadata={"models": models, "meaning": meaning})


@dataclass(frozen=True)
class ModelOptions:
    """Options that compress() takes in addition to the settings, for some kinds of models only.
    None: the default."""

    clip_value: float | None = _of(
        (DDP,), "clips each rank's gradients to [-clip_value, clip_value] before the exchange"
    )
    clip_norm: float | None = _of(
        (DDP,), "limits the norm of each parameter's gradient to clip_norm / sqrt(ranks)"
    )
    warm_up_steps: int | None = _of(
        (DDP, SHARDS, STEPPED),
        "under DDP and FSDP2: number of first steps whose gradients are sent with warm_up_codec "
        "before the codec takes over, and after which onebit with Adam freezes its variance; with "
        "delay: number of first steps that wait for their means",
    )
    warm_up_codec: Literal["fp32", "bf16", "int8"] | None = _of(
        (DDP, SHARDS), "codec of the warm_up_steps; default fp32, which onebit with Adam needs"
    )
    delay: Literal[0, 1] | None = _of(
        (STEPPED,), "1: means arrive one step late (arXiv 2005.06728); default 0"
    )
    find_unused_parameters: bool | None = _of(
        (STEPPED,), "a parameter that no rank has used keeps grad None"
    )
    replicas: ProcessGroup | None = _of(
        (SHARDS,), "process group of the ranks that have the same shard, in hybrid sharding"
    )
    inner: bool | None = _of(
        (SHARDS,), "with replicas: False leaves the reduce-scatter over the shards exact"
    )
    gather: str | None = _of(
        (SHARDS,),
        "codec, such as int4, for the changes of gathered parameters; default: exact gathers",
    )
    reference: Literal["auto", "fp32", "bf16", False] | None = _of(
        (SHARDS,),
        "dtype of the reference of compressed gathers, or False: none; default auto: fp32 if it "
        "fits into 1/8 of free memory",
    )
    feedback: Literal["auto"] | bool | None = _of(
        (SHARDS,), "whether residuals are kept; default auto: if they fit into 1/8 of free memory"
    )


# The kinds of models that take each option.
MODELS: dict[str, tuple[str, ...]] = {
    field.name: field.metadata["models"] for field in dataclasses.fields(ModelOptions)
}

# scripts/settings.py writes the rest: type checkers cannot make a TypedDict of a dataclass.


class Settings(TypedDict, total=False):
    """The settings that State, GradientExchange and Communicator take by keyword.

    None means the THINWIRE_* variable of the setting, else its default: docs/reference/settings.md
    lists them. All ranks use the same values, but for interface, trace and flight."""

    momentum: float | None
    nesterov: bool | None
    policy: Policy | None
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
    topology: Topology | None
    recoverable: bool | None
    transport: Transport | None
    local_size: int | None


class Options(Settings, total=False):
    """The settings that compress() takes by keyword: some are of one kind of model only."""

    clip_value: float | None
    clip_norm: float | None
    warm_up_steps: int | None
    warm_up_codec: Literal["fp32", "bf16", "int8"] | None
    delay: Literal[0, 1] | None
    find_unused_parameters: bool | None
    replicas: ProcessGroup | None
    inner: bool | None
    gather: str | None
    reference: Literal["auto", "fp32", "bf16", False] | None
    feedback: Literal["auto"] | bool | None
