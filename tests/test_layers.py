"""The house rules that a compiler does not check: which files include which, where names stay."""

import os
import pathlib
import re
import subprocess

import pytest

ROOT = pathlib.Path(__file__).parent.parent
LAYERS = {
    "compress": {"compress"},
    "transport": {"transport", "compress/types.h", "compress/device.h"},
    "kernels": {"kernels", "compress"},
    "schedule": {"schedule", "kernels", "compress", "transport"},
    "integrations": {"integrations", "schedule", "kernels", "compress", "transport"},
}
# Folders of schedule/, and the headers that each may include besides its own.
PURE_FOLDERS = {
    "schedule/order": {
        *("schedule/options.h", "schedule/request.h", "schedule/hash.h"),
        *("schedule/containers.h", "transport/planes.h", "transport/membership.h"),
    },
    "schedule/collective": {
        *("schedule/options.h", "schedule/request.h", "schedule/hash.h"),
        "transport/membership.h",
    },
    "schedule/sim": {
        *("schedule/options.h", "schedule/request.h", "schedule/hash.h"),
        *("schedule/order", "schedule/collective", "schedule/store"),
        *("transport/messages/message_plane.h", "transport/messages/queues.h"),
        *("transport/planes.h", "transport/membership.h"),
    },
    "schedule/store": {"schedule/hash.h", "transport/store.h"},
}
# Folders of schedule/ with threads and locks, and the headers that each may include besides its
# own.
HOSTING_FOLDERS = {
    "schedule/engine": {"schedule/order", "schedule/collective"},
    "schedule/join": {"schedule/order/frames.h", "schedule/collective"},
    "schedule/store_host": {"schedule/store"},
}
SOURCES = [
    path
    for layer in LAYERS
    for path in sorted((ROOT / layer).rglob("*"))
    if path.suffix in {".cc", ".h", ".cu", ".cuh", ".c"}
]


def name(path: pathlib.Path) -> str:
    return str(path.relative_to(ROOT))


def test_there_is_something_to_look_at():
    assert len(SOURCES) > 40


@pytest.mark.parametrize("path", SOURCES, ids=name)
def test_includes_go_one_way_and_from_the_root(path):
    allowed = LAYERS[path.relative_to(ROOT).parts[0]]
    for include in re.findall(r'#include "([^"]+)"', path.read_text()):
        if include.startswith("absl/"):
            assert path.suffix not in {".cu", ".cuh"}, "Abseil never meets nvcc"
            continue
        assert (ROOT / include).is_file(), f"{include} is not root-relative"
        assert include in allowed or include.split("/")[0] in allowed, (
            f"{include} from {name(path)}"
        )


def without_comments(text: str) -> str:
    return re.sub(r"//[^\n]*|/\*.*?\*/", "", text, flags=re.S)


PURE = [path for path in SOURCES if str(path.parent.relative_to(ROOT)) in PURE_FOLDERS]


@pytest.mark.parametrize("path", PURE, ids=name)
def test_pure_folders_include_only_what_they_may(path):
    """Order and collective include neither each other nor the engine."""
    folder = str(path.parent.relative_to(ROOT))
    for include in re.findall(r'#include "([^"]+)"', path.read_text()):
        layer, parent = include.split("/")[0], include.rpartition("/")[0]
        if layer in {"absl", "compress"} or parent == folder:
            continue
        assert {include, parent} & PURE_FOLDERS[folder], f"{include} from {name(path)}"


HOSTING = [path for path in SOURCES if str(path.parent.relative_to(ROOT)) in HOSTING_FOLDERS]


@pytest.mark.parametrize("path", HOSTING, ids=name)
def test_hosting_folders_do_not_include_one_another(path):
    """An engine gets what join returns, as values that lie in schedule/ itself."""
    folder = str(path.parent.relative_to(ROOT))
    for include in re.findall(r'#include "(schedule/\w+/[^"]+)"', path.read_text()):
        parent = include.rpartition("/")[0]
        assert parent == folder or {include, parent} & HOSTING_FOLDERS[folder], (
            f"{include} from {name(path)}"
        )


@pytest.mark.parametrize("path", PURE, ids=name)
def test_pure_folders_know_no_threads(path):
    text = without_comments(path.read_text())
    found = re.findall(
        r"#include [<\"](?:thread|mutex|shared_mutex|condition_variable|future|atomic|semaphore"
        r"|absl/synchronization/[\w.]+)[>\"]"
        r"|\bstd::(?:thread|mutex|atomic)\b|\babsl::(?:Mutex|CondVar|Notification)\b"
        r"|\bsleep_for\b|_clock::now|\bClock::now",
        text,
    )
    assert not found, f"{found} in {name(path)}"


def bodies_of_classes(text: str) -> list[tuple[str, str]]:
    """Return each class's name and its body without the bodies of classes inside it."""
    found = []
    for head in re.finditer(r"\b(?:class|struct) ([\w:]+)[^;{}()]*\{", text):
        depth, body = 1, ""
        for character in text[head.end() :]:
            depth += {"{": 1, "}": -1}.get(character, 0)
            if depth == 0:
                break
            body += character if depth == 1 else ""
        found.append((head[1], body))
    return found


LOCK = r"\b(?:absl::Mutex|std::(?:recursive_|shared_|timed_)?mutex)\s+\w+"


def locks_of(text: str) -> dict[str, int]:
    bodies = bodies_of_classes(without_comments(text))
    return {cls: len(re.findall(LOCK, body)) for cls, body in bodies}


def test_locks_are_counted_by_class():
    text = """
      class Outer { // absl::Mutex no_;
        struct Inner { absl::Mutex mu_; };
        void Run() { const absl::MutexLock lock(&mu_); }
        mutable absl::Mutex mu_; absl::Mutex other_ ABSL_ACQUIRED_AFTER(mu_);
      };"""
    assert locks_of(text) == {"Outer": 2, "Inner": 1}


@pytest.mark.parametrize("path", SOURCES, ids=name)
def test_a_class_has_at_most_one_lock(path):
    many = {cls: count for cls, count in locks_of(path.read_text()).items() if count > 1}
    assert not many, f"{many} in {name(path)}"


def test_most_locks_are_seen():
    found = sum(sum(locks_of(path.read_text()).values()) for path in SOURCES)
    written = sum(
        len(re.findall(LOCK + r"[^(]", without_comments(path.read_text()))) for path in SOURCES
    )
    assert found >= 15 and found >= written - 2, (found, written)


DEFINITIONS = re.compile(
    r'"(?:\\.|[^"\\])*"|^[ \t]*#(?:\\\n|[^\n])*'
    r"|\bnamespace\s*(?P<space>[\w:]*)\s*\{"
    r"|\b(?:class|struct|enum(?: class)?)\s+(?:\w+\([^()]*\)\s*)?(?P<type>[\w:]+)"
    r"(?=\s*(?:final\s*)?[:{])"
    r"|(?P<brace>[{}])",
    re.M,
)


def types_of(text: str) -> list[str]:
    """Return the types that a file defines at namespace scope, except with internal linkage."""
    found, scopes = [], []
    for token in DEFINITIONS.finditer(without_comments(text)):
        if token["space"] is not None:
            scopes.append(token["space"])
        elif token["type"] and all(scopes):
            found.append("::".join([*scopes, token["type"]]))
        elif token["brace"] == "{":
            scopes.append("")
        elif token["brace"] == "}":
            scopes.pop()
    return found


def test_types_are_found_with_their_namespaces():
    text = """
      namespace a::b { class C final : public D { struct Inner {}; }; struct Declared;
      namespace { struct Hidden {}; }  // struct No {};
      enum class E : int { kOne }; void F() { struct Local {}; } }"""
    assert types_of(text) == ["a::b::C", "a::b::E"]


def test_a_type_is_defined_once():
    """If two types share a name, the linker uses either one's functions for both."""
    defined: dict[str, set[str]] = {}
    for path in SOURCES:
        for each in types_of(path.read_text()):
            defined.setdefault(each, set()).add(name(path))
    assert len(defined) > 300
    assert not {each: files for each, files in defined.items() if len(files) > 1}


def read_by_nvcc() -> set[pathlib.Path]:
    """Return files that a .cu includes, directly or not. They may need std: nvcc never sees
    Abseil."""
    seen: set[pathlib.Path] = set()
    left = [path for path in SOURCES if path.suffix in {".cu", ".cuh"}]
    while left:
        path = left.pop()
        if path in seen:
            continue
        seen.add(path)
        for include in re.findall(r'#include "([^"]+)"', path.read_text()):
            if (ROOT / include).is_file():
                left.append(ROOT / include)
    return seen


# It waits by the steady clock for the holder of an absl::Mutex, and guards nothing itself.
STEADY = ROOT / "transport/steady_cond_var.h"


@pytest.mark.parametrize("path", sorted(set(SOURCES) - read_by_nvcc() - {STEADY}), ids=name)
def test_locks_are_abseils(path):
    """Clang's analysis knows what an absl::Mutex guards, and the sanitizers know its waits."""
    text = without_comments(path.read_text())
    found = re.findall(
        r"\bstd::(?:\w*mutex|lock_guard|unique_lock|scoped_lock|condition_variable\w*)\b", text
    )
    assert not found, f"{found} in {name(path)}"


@pytest.mark.parametrize("path", SOURCES, ids=name)
def test_foreign_names_stay_in_files_named_after_them(path):
    text = re.sub(r"//[^\n]*|/\*.*?\*/|\"[^\"\n]*\"", "", path.read_text(), flags=re.S)
    for word, pattern in {
        "gloo": r"\bgloo::|<gloo/",
        "nccl": r"\bnccl[A-Z]\w+|<nccl",
        "zmq": r"\bzmq_(?!library\b)[a-z]\w+|<zmq",  # zmq_library is an option of ours
        "cuda": r"\bcuda[A-Z]\w+|<cuda",
        "torch": r"\btorch::|<torch/",
    }.items():
        if word not in path.name:
            assert not re.search(pattern, text), f"{word} in {name(path)}"


@pytest.mark.parametrize("path", SOURCES, ids=name)
def test_no_conditional_compilation_inside_functions(path):
    lines = path.read_text().splitlines()
    for number, line in enumerate(lines, 1):
        # Code inside a function is indented, or follows an indented line.
        inside = number > 1 and lines[number - 2].startswith("  ")
        if re.match(r"#\s*(if|ifdef|ifndef|elif)\b", line) and inside:
            # Highway's targets are preprocessor values, and its rounding differs between targets.
            assert "HWY_TARGET" in line, f"{name(path)}:{number}: {line}"


# The folder whose comments may still begin with one of these words.
FRAGMENTS_ALLOWED_IN = ROOT / "transport" / "nccl"


def fragments_in(text: str) -> list[str]:
    """Return the comments that begin with What, Of, Who or Whether: most lack a subject."""
    found, was_comment = [], False
    for line in text.splitlines():
        comment = re.search(r"//\s*(.*)", line)
        is_whole = line.lstrip().startswith("//")
        if comment and not (is_whole and was_comment):
            found += [comment[1]] if re.match(r"(?:What|Of|Who|Whether)\b", comment[1]) else []
        was_comment = is_whole
    return found


def test_fragments_are_found():
    assert fragments_in("// What it is.\nint a;  // Of b.\n// A sentence.\n// What not.") == [
        "What it is.",
        "Of b.",
    ]


@pytest.mark.parametrize(
    "path",
    [path for path in SOURCES if path.parent != FRAGMENTS_ALLOWED_IN],
    ids=name,
)
def test_comments_begin_with_a_subject(path):
    found = fragments_in(path.read_text())
    assert not found, f"{found} in {name(path)}; begin with what the comment is about and a verb"


PYTHON = sorted((ROOT / "integrations").rglob("*.py"))


@pytest.mark.parametrize("path", PYTHON, ids=name)
def test_docstrings_begin_with_a_subject_or_a_verb(path):
    found = re.findall(r'^\s*(?:"""|# )((?:What|Of|Who|Whether)\b[^\n]*)', path.read_text(), re.M)
    assert not found, f"{found} in {name(path)}; begin with a subject or a verb"


# Traits answer all questions about a codec, so no other file needs to know which codec it is.
@pytest.mark.parametrize(
    "path",
    [path for path in SOURCES if path.relative_to(ROOT).parts[0] not in {"compress", "kernels"}],
    ids=name,
)
def test_nobody_outside_compress_and_kernels_asks_which_codec_it_is(path):
    text = without_comments(path.read_text())
    found = re.findall(r"\bCodecId\b|\bCodecKind\b|\bcodecs::\w+|\btraits\(\)\.(?:id|kind)\b", text)
    assert not found, f"{found} in {name(path)}"


CODEC_NAMES = r"(?:fp32|bf16|int8|int4|onebit|topk|adaptive|ternary)"


@pytest.mark.parametrize("path", PYTHON, ids=name)
def test_python_parses_no_spec(path):
    """Python asks codec_info(). It never compares the beginning or a part of a codec's spec."""
    found = re.findall(
        rf"""startswith\(\(?["']{CODEC_NAMES}"""
        rf"""|["']{CODEC_NAMES}["'] (?:not )?in [\w.]*(?:spec|codec)"""
        r"""|(?:spec|codec)\w*["'\]]*\.(?:split|partition)\(["']:["']\)""",
        path.read_text(),
    )
    assert not found, f"{found} in {name(path)}"


def test_the_library_exports_only_its_interface():
    library = pathlib.Path(
        os.environ.get("THINWIRE_LIBRARY", ROOT / "build/integrations/c/libthinwire.so")
    )
    if not library.is_file():
        pytest.skip(f"{library} is not built")
    listing = subprocess.run(
        ["nm", "-D", "--defined-only", library], check=True, capture_output=True, text=True
    )
    symbols = {line.split()[-1].split("@")[0] for line in listing.stdout.splitlines()}
    assert symbols and all(symbol.startswith("tw_") for symbol in symbols), symbols
