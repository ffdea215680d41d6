"""The settings are defined in one place. The C struct, its mirror, arguments, environment, types
and docs agree with it."""

import ctypes
import dataclasses
import inspect
import os
import re
import runpy
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from ctypes import POINTER, c_char_p, c_double, c_float, c_int, c_size_t, c_uint64, c_void_p
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

import pytest
import thinwire
from thinwire import _library, config, options
from thinwire.comm import Communicator
from thinwire.options import COMPARED, FIELDS, OPTIONS, Options, Settings

ROOT = Path(__file__).resolve().parents[3]
HEADER = ROOT / "integrations" / "c" / "thinwire.h"
LAST_OF_THE_FIRST_RELEASE = "trace_path"


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch):
    for option in OPTIONS:
        for name in option.variables:
            if name not in {"THINWIRE_LIBRARY"}:
                monkeypatch.delenv(name, raising=False)


class Sample(NamedTuple):
    """A value of a setting, the same as text, another value, and the first as the C field(s)."""

    value: Any
    text: str
    other: Any
    in_c: dict[str, Any]


# Settings for which the samples of their kind do not fit.
SAMPLES = {
    "scope": Sample("all", "all", "backward", {}),
    "device": Sample("cuda:1", "cuda:1", "cuda:2", {"device": b"cuda:1"}),
    "codec": Sample("int8", "int8", "bf16", {"codec": b"int8"}),
    "momentum": Sample(0.5, "0.5", 0.25, {"momentum": 0.5}),
    "policy": Sample("fifo", "fifo", "p3", {"policy": b"fifo"}),
    "planned": Sample(False, "0", True, {"planned": -1}),
    "interface": Sample("eth7", "eth7", "lo", {"interface_name": b"eth7"}),
    "lanes": Sample(3, "3", 5, {"lanes": 3}),
    "chunk_bytes": Sample(65536, "65536", 8192, {"chunk_bytes": 65536}),
    "min_bytes": Sample(0, "0", 77, {"min_bytes": 0, "no_raw": 1}),
    "timeout_s": Sample(2.5, "2.5", 7.0, {"timeout_ms": 2500}),
    "trace": Sample("a.json", "a.json", "b.json", {"trace_path": b"a.json"}),
    "flight": Sample("a.txt", "a.txt", "b.txt", {"flight_path": b"a.txt"}),
    "topology": Sample("grid", "grid", "flat", {"topology": b"grid"}),
    "local_size": Sample(2, "2", 4, {"local_size": 2}),
    "congestion": Sample("reno", "reno", "system", {"congestion": b"reno"}),
    "loops": Sample(2, "2", 4, {"loops": 2}),
    "transport": Sample("auto", "auto", "ucx", {"transport": b"auto"}),
    "ucx_library": Sample("libucp.so.0", "libucp.so.0", "b.so", {"ucx_library": b"libucp.so.0"}),
    "nccl_library": Sample(
        "libnccl.so.2", "libnccl.so.2", "b.so", {"nccl_library": b"libnccl.so.2"}
    ),
}


def settings() -> list[str]:
    return list(dict.fromkeys(option.setting for option in OPTIONS if option.setting))


def sample_of(option: options.Option) -> Sample | None:
    """Return a sample for a kind whose settings all accept it, so new settings are tested too."""
    if option.kind is options._FLAG:
        return Sample(True, "1", False, {option.field: 1} if option.field else {})
    if option.kind is options._TEXT:
        return Sample("a", "a", "b", {option.field: b"a"})
    return None


for _option in OPTIONS:
    _sample = sample_of(_option)
    if _option.setting is not None and _sample is not None:
        SAMPLES.setdefault(_option.setting, _sample)


# The C struct.

C_TYPES = {
    c_size_t: "size_t",
    c_uint64: "uint64_t",
    c_int: "int",
    c_float: "float",
    c_double: "double",
    c_char_p: "const char*",
    c_void_p: "void*",
    _library.Store: "tw_store",
    _library.SET_FUNCTION: "int (*)(void*, const char*, const void*, size_t)",
    _library.GET_FUNCTION: "int (*)(void*, const char*, void*, size_t, size_t*, int)",
    POINTER(_library.Options): "const tw_options*",
    POINTER(_library.Layer): "const tw_layer*",
    POINTER(_library.Segment): "const tw_segment*",
}
ENUMS = {"dtype": "tw_dtype", "op": "tw_op", "collective": "tw_collective"}  # as wide as an int
MIRRORS = {
    "tw_store": _library.Store,
    "tw_options": _library.Options,
    "tw_segment": _library.Segment,
    "tw_bucket_info": _library.BucketInfo,
    "tw_stats": _library.Stats,
    "tw_layer": _library.Layer,
    "tw_simulation": _library.Simulation,
}


def compiles(statements: list[str], tmp_path: Path) -> subprocess.CompletedProcess[str]:
    compiler = os.environ.get("CC") or shutil.which("cc")
    if compiler is None:
        pytest.skip("there is no C compiler")
    source = tmp_path / "layout.c"
    source.write_text("\n".join(['#include "integrations/c/thinwire.h"', *statements, ""]))
    command = [compiler, "-std=c11", "-fsyntax-only", f"-I{ROOT}", str(source)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def layout(struct: str, name: str, c_type: str, offset: int) -> list[str]:
    field = f"(({struct}*)0)->{name}"
    same = f"__builtin_types_compatible_p(__typeof__({field}), {c_type})"
    return [
        f'_Static_assert(offsetof({struct}, {name}) == {offset}, "{struct}.{name} is elsewhere");',
        f'_Static_assert({same}, "{struct}.{name} is no {c_type}");',
    ]


def declared_fields(struct: str) -> list[str]:
    """Return the names between the braces, in order."""
    text = re.sub(r"/\*.*?\*/", "", HEADER.read_text(), flags=re.S)
    body = re.search(r"typedef struct \{([^{}]*)\} " + struct + ";", text)[1]
    names = []
    for declaration in filter(str.strip, body.split(";")):
        function = re.search(r"\(\*(\w+)\)", declaration)
        names += [function[1]] if function else re.findall(r"(\w+)\s*(?:,|$)", declaration.strip())
    return names


@pytest.mark.parametrize("struct", MIRRORS)
def test_a_mirror_is_the_struct_of_the_header(struct, tmp_path):
    mirror = MIRRORS[struct]
    names = [name for name, *_ in mirror._fields_]
    assert declared_fields(struct) == names
    size = ctypes.sizeof(mirror)
    statements = [f'_Static_assert(sizeof({struct}) == {size}, "{struct} has another size");']
    for name, kind in mirror._fields_:
        statements += layout(
            struct, name, ENUMS.get(name, C_TYPES[kind]), getattr(mirror, name).offset
        )
    done = compiles(statements, tmp_path)
    assert done.returncode == 0, done.stderr


def test_the_list_has_the_types_of_the_header(tmp_path):
    statements = []
    for option in FIELDS:
        offset = getattr(_library.Options, option.field).offset
        statements += layout("tw_options", option.field, option.c_type, offset)
    done = compiles(statements, tmp_path)
    assert done.returncode == 0, done.stderr
    wrong = compiles(layout("tw_options", "lanes", "size_t", 0), tmp_path)
    assert "lanes is elsewhere" in wrong.stderr and "lanes is no size_t" in wrong.stderr


def test_a_new_field_fills_eight_bytes():
    """Otherwise padding at the end of an older struct would be read as a field of the next one."""
    names = [option.field for option in FIELDS]
    added = names[names.index(LAST_OF_THE_FIRST_RELEASE) + 1 :]
    assert added
    for name in added:
        assert getattr(_library.Options, name).size == 8, name


# Config, and what C gets of it.


def test_defaults():
    assert sorted(SAMPLES) == sorted(settings())
    plain = _library.options_of(config.Config())
    for option in FIELDS:
        default = getattr(config.Config(), option.setting) if option.setting else None
        if isinstance(default, str):  # the only defaults that Python passes to C
            assert getattr(plain, option.field) == default.encode() == option.default.encode()
        elif option.setting:
            assert not getattr(plain, option.field), option.field


@pytest.mark.parametrize("setting", SAMPLES)
def test_a_setting_comes_to_its_field(setting):
    sample, plain = SAMPLES[setting], _library.options_of(config.Config())
    given = _library.options_of(config.Config(**{setting: sample.value}))
    assert given.struct_size == ctypes.sizeof(_library.Options)
    for option in FIELDS:
        if option.c_type == "tw_store":
            continue
        expected = sample.in_c.get(option.field, getattr(plain, option.field))
        assert getattr(given, option.field) == expected, option.field


def test_a_long_timeout_is_the_longest_that_there_is():
    assert _library.options_of(config.Config(timeout_s=1e9)).timeout_ms == (1 << 31) - 1
    assert _library.options_of(config.Config(timeout_s=1e-9)).timeout_ms == 1


# Arguments and environment.


@pytest.mark.parametrize("option", [o for o in OPTIONS if o.setting], ids=lambda o: o.field)
def test_argument_then_environment_then_default(monkeypatch, option):
    sample, name = SAMPLES[option.setting], option.setting
    assert getattr(config.resolve(), name) == getattr(config.Config(), name)
    for variable in reversed(option.variables):  # the first takes precedence
        monkeypatch.setenv(variable, sample.text)
        assert getattr(config.resolve(), name) == sample.value
        monkeypatch.setenv(variable, str(sample.other))
        assert getattr(config.resolve(), name) == sample.other
        monkeypatch.setenv(variable, "")
    for variable in option.variables:
        monkeypatch.setenv(variable, sample.text)
    if name in options.ARGUMENTS:
        assert getattr(config.resolve(**{name: sample.other}), name) == sample.other
        assert config.resolve(**{name: None}) == config.resolve()
    else:
        with pytest.raises(TypeError, match=name):
            config.resolve(**{name: sample.other})


def test_an_unknown_argument_names_the_nearest():
    with pytest.raises(TypeError, match=r"'lane' .* lanes\?"):
        config.resolve(lane=3)


@pytest.mark.parametrize("setting", [
    {"lanes": 2.5}, {"lanes": True}, {"lanes": 1 << 31}, {"min_bytes": 1 << 64}, {"trace": 3},
    {"momentum": 1}, {"momentum": "0.5"}, {"nesterov": "yes"}, {"codec": ["int4"]},
])  # fmt: skip
def test_a_value_that_c_could_not_hold_is_refused(setting):
    with pytest.raises(thinwire.InvalidArgumentError, match=next(iter(setting))):
        config.resolve(**setting)


OF_LIBRARIES = {"kSharingSetting"}  # NCCL's own, which NCCL reads itself


def test_only_config_reads_the_environment():
    reads = re.compile(r"(environ(\.get\(|\[)|getenv\()[\"']?(THINWIRE_|GLOO_SOCKET|MASTER_ADDR)")
    package = ROOT / "integrations" / "python" / "thinwire"
    readers = {
        path.name
        for path in package.rglob("*.py")
        if reads.search(re.sub(r"environ\[[^\]]*\] = ", "", path.read_text()))
    }
    assert readers <= {"config.py"}
    for folder in ("compress", "kernels", "transport", "schedule", "integrations/c"):
        for path in (ROOT / folder).rglob("*.cc"):
            read = re.findall(r"getenv\(([^)]*)\)", path.read_text())
            assert set(read) <= OF_LIBRARIES, path


def test_the_shims_variables_are_known():
    """Otherwise Python would warn of a variable that a user sets for the shim."""
    text = (ROOT / "integrations" / "nccl_shim" / "nccl_shim_settings.cc").read_text()
    read = set(re.findall(r'"(THINWIRE_\w+)"', text))
    assert len(read) > 5 and read <= set(config.VARIABLES)
    header = (ROOT / "integrations" / "nccl_shim" / "nccl_shim_settings.h").read_text()
    defaults = {v: option.default for option in OPTIONS for v in option.variables}
    for field in ("feedback_bytes", "ranks"):
        [default] = re.findall(rf"{field} = (\d+);", header)
        assert defaults[f"THINWIRE_NCCL_{field.upper()}"] == default


def arguments_of(function: Any) -> tuple[set[str], bool]:
    """Return the names of the arguments, and whether the function passes others on."""
    parameters = inspect.signature(function).parameters.values()
    passes_on = any(p.kind is p.VAR_KEYWORD for p in parameters)
    return {p.name for p in parameters if p.kind is not p.VAR_KEYWORD}, passes_on


# Arguments that adapters take besides the settings.
THEIR_OWN = {
    "State": {
        "process_group", "clip_value", "clip_norm", "names", "structure", "warm_up_steps",
        "warm_up_codec",
    },
    "compress": {"model", "optimizer", "process_group"},
    "all_reduce": {"tensor", "op", "name", "group", "async_op"},
}  # fmt: skip


@pytest.mark.parametrize("adapter", THEIR_OWN)
def test_adapters_take_the_settings_under_the_same_names(adapter):
    torch_part = pytest.importorskip("thinwire.torch")
    names, passes_on = arguments_of(getattr(torch_part, adapter))
    taken = names - THEIR_OWN[adapter]
    assert taken <= set(options.ARGUMENTS), "an argument that the list does not know"
    if adapter == "all_reduce":  # for one codec; the rest is read from the environment
        assert taken == {"codec", "strict"}
    elif not passes_on:
        missing = set(options.ARGUMENTS) - taken
        assert missing <= {"flight"}, "a setting that can't be given"


# The types that editors and type checkers see.


def types_of(hint: Any) -> set[type]:
    """Return the types of a value; for a Literal those of its values, for None NoneType."""
    if get_origin(hint) is Literal:
        return {type(value) for value in get_args(hint)}
    parts = get_args(hint)
    return set().union(*map(types_of, parts)) if parts else {hint}


def test_settings_have_types_that_fit_their_values():
    hints, fields = get_type_hints(Settings), get_type_hints(config.Config)
    assert set(hints) == set(options.ARGUMENTS) - {"codec"}  # a separate argument
    for name, sample in SAMPLES.items():
        assert type(sample.value) in types_of(fields[name]), name
        if name in hints:
            assert types_of(hints[name]) == types_of(fields[name]) | {type(None)}, name


def test_options_have_the_names_and_types_of_what_compress_hands_on():
    torch_part = pytest.importorskip("thinwire.torch")
    from thinwire.torch.fsdp import compress_shards
    from thinwire.torch.optimizer.module_compression import ModuleCompression, OptimizedCompression
    from torch.distributed import ProcessGroup

    names = {"ProcessGroup": ProcessGroup}
    own = get_type_hints(Options, localns=names)
    for name in get_type_hints(Settings):
        del own[name]
    assert list(own) == list(options.MODELS)
    modules = (ModuleCompression.__init__, OptimizedCompression.__init__)
    takers = (compress_shards, torch_part.State.__init__, *modules)
    for name, hint in own.items():
        found = [f for f in takers if name in inspect.signature(f).parameters]
        assert found, name
        for function in found:
            parameter = inspect.signature(function).parameters[name]
            taken = eval(parameter.annotation, function.__globals__ | names)
            assert types_of(hint) - {type(None)} <= types_of(taken), name
            assert parameter.kind is parameter.KEYWORD_ONLY, name


# All ranks.


def pair(settings: list[config.Config], name: str) -> list[thinwire.Error | None]:
    """Return the outcomes of two ranks in this process."""

    def be(rank: int) -> thinwire.Error | None:
        own = dataclasses.replace(settings[rank], local_group=name)
        if own.timeout_s is None:
            own = dataclasses.replace(own, timeout_s=20)
        try:
            Communicator(rank, 2, None, "options", own).close()
        except thinwire.Error as error:
            return error
        return None

    with ThreadPoolExecutor(2) as threads:
        return list(threads.map(be, range(2)))


DIFFER = [o for o in FIELDS if o.setting and o.setting not in {"local_group", "device"}]


@pytest.mark.parametrize("option", DIFFER, ids=lambda o: o.field)
def test_the_list_says_what_must_be_equal_and_the_default(option, tmp_path):
    value = SAMPLES[option.setting].value
    if option.field in {"trace_path", "flight_path"}:
        value = str(tmp_path / value)
    if option.field == "min_bytes":
        value = 77
    given = [config.Config(), config.Config(**{option.setting: value})]
    outcomes = pair(given, option.field)
    if option.equal != COMPARED:
        assert outcomes == [None, None]
        return
    default = {"off": "0"}.get(option.default, option.default)
    said = f"{option.field}={default}"
    if option.field == "no_raw":
        said = "min_bytes=0"
    for error in outcomes:
        assert isinstance(error, thinwire.MismatchError)
        assert said in str(error), str(error)


class NobodyCame:
    """A store in which no other rank ever writes."""

    waited_s = 0.0

    def set(self, key: str, value: bytes) -> None:
        pass

    def get(self, key: str, timeout_s: float) -> bytes:
        self.waited_s = timeout_s
        raise TimeoutError(key)


def test_the_default_deadline():
    store = NobodyCame()
    with pytest.raises(thinwire.TimeoutError):
        Communicator(1, 2, store, "deadline", config.Config())
    default = next(option.default for option in OPTIONS if option.setting == "timeout_s")
    assert float(default) / 2 < store.waited_s <= float(default)


# The files that scripts/settings.py writes.


def test_the_types_and_the_page_are_made_of_the_settings():
    script = runpy.run_path(str(ROOT / "scripts" / "settings.py"))
    assert script["PAGE"].read_text() == script["page"](), "run scripts/settings.py"
    assert script["SOURCE"].read_text() == script["source"](), "run scripts/settings.py"
