"""kernels/sass.md agrees with this build's machine code, and scripts/sass_table.py counts right."""

import pathlib
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "scripts"))
import sass_path  # noqa: E402
import sass_table  # noqa: E402

LIBRARY = ROOT / "build/integrations/c/libthinwire_cuda.so"
ENCODE = (
    "_ZN8thinwire7kernels12_GLOBAL__N_112EncodeKernelINS0_7VariantINS_6codecs4Int8ELb0EEE"
    "LNS_5DTypeE{dtype}EEEvNS0_12EncodeLaunchE"
)
LISTING = f"""
		Function : {ENCODE.format(dtype=0)}
        /*0000*/                   LDC R1, c[0x0][0x28] ;     /* 0x00 */
        /*0010*/               @P0 BRA 0x0050 ;               /* 0x00 */
        /*0020*/                   LDG.E R2, [R2] ;           /* 0x00 */
        /*0030*/                   LDG.E R3, [R2+4] ;         /* 0x00 */
        /*0040*/                   BRA 0x0060 ;               /* 0x00 */
        /*0050*/                   LDG.E.128 R4, [R2] ;       /* 0x00 */
        /*0060*/              @!P1 BRA 0x0080 ;               /* 0x00 */
        /*0070*/                   FADD R4, R4, R5 ;          /* 0x00 */
        /*0080*/               @P2 BRA 0x0060 ;               /* 0x00 */
        /*0090*/               @P3 EXIT ;                     /* 0x00 */
        /*00a0*/                   EXIT ;                     /* 0x00 */
        /*00b0*/                   BRA 0x00b0 ;               /* 0x00 */
"""


def have_tools() -> bool:
    try:
        return bool(sass_table.tool("cuobjdump") and sass_table.tool("nvdisasm"))
    except FileNotFoundError:
        return False


@pytest.mark.skipif(
    not (LIBRARY.exists() and have_tools()), reason="needs nvcc's build, cuobjdump and nvdisasm"
)
def test_no_kernel_is_worse_than_the_table():
    table = sass_table.read_table((ROOT / "kernels/sass.md").read_text())
    assert sass_table.complaints(sass_table.rows_of(LIBRARY), table) == []


@pytest.mark.skipif(
    not (LIBRARY.exists() and have_tools()), reason="needs nvcc's build, cuobjdump and nvdisasm"
)
def test_no_kernel_spills_on_any_architecture_of_the_build():
    usage = sass_table.dump(LIBRARY, "-res-usage")
    assert "Function" in usage, "the library has machine code"
    assert sass_table.spills_of(usage) == []


def test_rows_are_kernels_of_f32():
    assert sass_table.row_name(ENCODE.format(dtype=0)) == "encode_ef Int8"
    assert sass_table.row_name(ENCODE.format(dtype=1)) == ""
    decode_add = ENCODE.replace("12Encode", "12Decode").replace("EEEv", "ELb1EEEv")
    assert sass_table.row_name(decode_add.format(dtype=0)) == "decode_add Int8"
    scan = "_ZN8thinwire7kernels12_GLOBAL__N_117EntriesScanKernelENS0_19EncodeEntriesLaunchE"
    assert sass_table.row_name(scan) == "topk scan"


def test_kernels_of_widths_are_adaptives():
    prefix = "_ZN8thinwire7kernels12_GLOBAL__N_1"
    decode_add = "18DecodeWidthsKernelILNS_5DTypeE{}ELb1EEEvNS0_12DecodeLaunchEPKNS0_10WidthsPlanE"
    assert sass_table.row_name(prefix + decode_add.format(0)) == "decode_add Adaptive"
    assert sass_table.row_name(prefix + decode_add.format(1)) == ""
    plan = prefix + "10PlanKernelENS0_10PlanLaunchEPNS0_10WidthsPlanE"
    assert sass_table.row_name(plan) == "plan Adaptive"


def test_the_path_is_that_of_an_aligned_tile():
    ((name, code),) = sass_table.instructions(LISTING).items()
    assert name == ENCODE.format(dtype=0)
    assert len(code) == 12
    # counted: LDC to the wide load, both branches fall through, the conditional exit, the exit
    assert sass_path.path_length(code) == 8


@pytest.mark.parametrize(
    ("skipped", "taken"),
    [
        (["LDG.E.128 R4, [R2]", "FMUL R4, R4, R8", "FADD R4, R4, R5"], True),  # momentum
        (["LDG.E.128 R4, [R2]", "FADD R4, R4, R5"], False),  # a residual
        (["LEA R2, P0, R3, R4, 0x1", "STG.E.U16 [R2], RZ"], True),  # padding
        (["STG.E.U16 [R2], RZ", "STG.E [R4], R5"], False),
        (["FMUL R4, R5, R6", "LOP3.LUT R4, R4, 0x400000, RZ, 0xfc"], True),  # replaces a NaN
        (["LOP3.LUT R4, R4, 0x400000, RZ, 0xfc", "STG.E [R2], R4"], False),
        (["LOP3.LUT R4, R4, 0x400000, RZ", "BRA 0x80", "LDG.E R4, [R2]"], True),
    ],
)
def test_the_path_leaves_out_what_plain_values_do_not_need(skipped, taken):
    texts = ["@P0 BRA 0x80", *skipped, "EXIT"]
    code = [(16 * i, text) for i, text in enumerate(texts)]
    assert sass_path.jumps(code, 0, len(code) - 1) == taken


def test_the_path_leaves_out_sums_that_are_made_anew():
    loop = ["LDG.E.128 R4, [R2]", "LOP3.LUT R4, R4, 0x400000, RZ, 0xfc", "@P1 BRA 0x20"]
    found = ["ISETP.NE.AND P0, PT, R1, RZ, PT", "FSETP.NUM.AND P0, PT, R4, R4, P0"]
    for test, jumped in [(found, True), (found[:1] * 2, False)]:
        code = [(16 * i, text) for i, text in enumerate([*test, "@P0 BRA 0x60", *loop, "EXIT"])]
        code = [(at, text.replace("0x20", "0x30")) for at, text in code]
        assert sass_path.jumps(code, 2, 6) == jumped


def test_wide_loads_may_come_before_the_branch():
    texts = ["@!P1 LDG.E.128 R4, [R2]", "@!P1 BRA 0x30", "LDG.E R4, [R2]", "EXIT"]
    code = [(16 * i, text) for i, text in enumerate(texts)]
    assert sass_path.jumps(code, 1, 3)
    assert not sass_path.jumps([(0, "@P1 LDG.E.128 R4, [R2]"), *code[1:]], 1, 3)


def test_the_longest_loop_runs_as_often_as_is_said():
    texts = ["MOV R1, R2", "FADD R4, R4, R5", "@P0 BRA 0x10", "FMUL R4, R4, R5", "FADD R4, R4, R5",
             "@P1 BRA 0x30", "EXIT"]  # fmt: skip
    code = [(16 * i, text) for i, text in enumerate(texts)]
    assert sass_path.path_length(code) == 7
    assert sass_path.path_length(code, rounds=8) == 7 + 7 * 3


REDUCE = (
    "_ZN8thinwire7kernels12_GLOBAL__N_112ReduceKernelINS0_7VariantINS_6codecs4Int4ELb{transform}EEE"
    "{down}LNS_5DTypeE0EEEvNS0_12ReduceLaunchE"
)


@pytest.mark.parametrize(
    ("transform", "down", "name"),
    [
        (0, "S6_", "reduce Int4"),
        (1, "S6_", "reduce Int4:hadamard=1"),
        (0, "NS3_INS4_4Fp32ELb0EEE", "reduce Int4 to Fp32"),
    ],
)
def test_a_reduction_is_named_by_its_codecs(transform, down, name):
    assert sass_table.row_name(REDUCE.format(transform=transform, down=down)) == name
    assert sass_table.Row(name, 100, 1000, 60).issue() > 0


def row(**changes) -> sass_table.Row:
    before = {"name": "encode_ef Int8", "path": 100, "size": 1000, "registers": 60}
    return sass_table.Row(**(before | changes))


@pytest.mark.parametrize(
    ("after", "words"),
    [
        (row(path=111), "path of 111"),
        (row(size=1101), "size of 1101"),
        (row(name="encode_ef New"), "not in the table"),
    ],
)
def test_what_has_got_worse_is_said(after, words):
    table = sass_table.read_table(row().text())
    assert words in sass_table.complaints([after], table)[0]


def test_a_tenth_is_no_growth():
    table = sass_table.read_table(row().text())
    assert sass_table.complaints([row(path=110, size=1100, registers=64)], table) == []
    assert "is no more" in sass_table.complaints([], table)[0]


def usage(architecture: str, **stacks: int) -> str:
    """Return cuobjdump's text about kernels by dtype."""
    functions = [
        f" Function {ENCODE.format(dtype=dtype[1:])}:\n  REG:64 STACK:{stack} SHARED:0"
        for dtype, stack in stacks.items()
    ]
    head = f"\nFatbin elf code:\n================\narch = {architecture}\ncode version = [1,8]"
    return "\n".join([head, "Resource usage:", " Common:", "  GLOBAL:0", *functions, ""])


def test_spills_are_those_of_every_dtype_and_architecture():
    spills = sass_table.spills_of(usage("sm_100", t0=0, t1=8, t2=4) + usage("sm_90", t0=0))
    assert spills == [
        "encode_ef Int8 spills 8 bytes on sm_100",
        "encode_ef Int8 spills 4 bytes on sm_100",
    ]
