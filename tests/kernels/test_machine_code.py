"""What is read from listings of machine code and PTX: widths, loops, waits, unrolling, on short listings written by hand."""

import pytest

from drmas_kernels.offline.machine_code import count, profile, read_ptx, read_sass

TAIL = """
        /*0f00*/                   EXIT ;
.L_x_99:
        /*0f10*/                   BRA `(.L_x_99);
        /*0f20*/                   NOP;
        /*0f30*/                   NOP;
"""


def listing(body, kernel="toy", tail=TAIL):
    """A listing of nvdisasm: `body` has an instruction a line, labels end with a colon."""
    lines = [f'\t.section\t.text.{kernel},"ax",@progbits', f"{kernel}:", f".text.{kernel}:"]
    for number, line in enumerate(body.strip().splitlines()):
        line = line.strip()
        lines.append(line if line.endswith(":") else f"        /*{number * 16:04x}*/                   {line} ;")
    return "\n".join(lines) + tail


def counted(body):
    return profile(read_sass(listing(body), "toy")).total


@pytest.mark.parametrize(
    ("instruction", "width"),
    [
        ("LDG.E R1, desc[UR4][R2.64]", 32),
        ("@!P0 LDG.E.128 R4, desc[UR8][R30.64+0x800]", 128),
        ("@P3 LDG.E.EF.128.CONSTANT R4, desc[UR8][R30.64]", 128),
        ("LDG.E.EF.LTC128B.64 R4, desc[UR8][R30.64]", 64),
        ("LDG.E.LTC128B R4, desc[UR8][R30.64]", 32),
        ("LDG.E.U16.CONSTANT R4, desc[UR8][R30.64]", 16),
        ("LDG.E.S8 R4, desc[UR8][R30.64]", 8),
        ("LDG.E.ENL2.256 R4, R8, desc[UR8][R30.64]", 256),
        ("LDGSTS.E.BYPASS.LTC128B.128 [R3], desc[UR4][R8.64], P2", 128),
    ],
)
def test_loads_by_width(instruction, width):
    assert counted(instruction).loads == {width: 1}


def test_stores_by_width():
    found = counted(
        """
        STG.E.128 desc[UR4][R2.64], R4
        @P0 STG.E.EF.U16 desc[UR4][R2.64], R4
        STS.128 [R3], R4
        STG.E desc[UR4][R2.64], R4
        """
    )
    assert found.stores == {128: 1, 16: 1, 32: 1}
    assert found.bytes == 16 + 2 + 4


def test_kinds_of_instructions():
    found = counted(
        """
        STL [R1], R4
        @P1 LDL.LU R4, [R1]
        MUFU.EX2 R4, R4
        @!P0 MUFU.EX2.F16 R4, R4
        MUFU.RCP R4, R4
        HFMA2.MMA R0, -RZ, RZ, 0, 0
        HGMMA.64x256x16.F32.BF16 R24, gdesc[UR4], R24, gsb0
        UTMALDG.2D [UR8], [UR4], desc[UR6]
        UTMASTG.2D [UR8], [UR4]
        DFMA R2, R4, R6, R2
        F2F.F64.F32 R2, R4
        MUFU.RCP64H R3, R5
        FADD R2, R4, R6
        ATOMG.E.ADD.F32 R2, desc[UR4][R2.64], R4
        @P0 RED.E.ADD.F32 desc[UR4][R2.64], R4
        REDUX.SUM UR4, R2
        ATOMS.ADD RZ, [R2], R3
        ATOMS.OR RZ, [UR5+0x14], R3
        """
    )
    assert (found.spills, found.ex2, found.fp64, found.atomics) == (2, 2, 3, 3)
    assert found.tensor_core == {"HGMMA": 1}
    assert (found.tma_loads, found.tma_stores) == (1, 1)


def test_padding_and_the_jump_to_itself_count_for_nothing():
    assert counted("MOV R1, R2").instructions == 2


def test_a_kernel_without_a_loop_is_one_pass():
    found = profile(read_sass(listing("LDG.E.128 R4, desc[UR8][R30.64]\nFADD R1, R2, R3"), "toy"))
    assert (found.looped, found.passes) == (False, 1)
    assert found.work == found.total
    assert found.total.instructions == 3


LOOP = """
    MOV R1, R2
    @!P0 BRA `(.L_x_2)
    .L_x_1:
    LDG.E.128 R4, desc[UR8][R30.64]
    FADD R1, R1, R4
    @P1 BRA `(.L_x_1)
    .L_x_2:
    LDG.E.U16 R4, desc[UR8][R30.64]
    STG.E desc[UR4][R2.64], R1
"""


def test_a_loop_without_what_stands_around_it():
    found = profile(read_sass(listing(LOOP), "toy"))
    assert found.looped
    assert found.work.instructions == 3
    assert found.work.loads == {128: 1}
    assert found.work.stores == {}
    assert found.total.loads == {128: 1, 16: 1}


def test_a_condition_may_be_an_operand_of_the_jump():
    """So the loop behind it is reached."""
    body = """
        .L_x_1:
        LDG.E R4, desc[UR8][R30.64]
        BRA.U UP0, `(.L_x_1)
        .L_x_2:
        LDG.E.128 R4, desc[UR8][R30.64]
        @P1 BRA `(.L_x_2)
    """
    assert profile(read_sass(listing(body), "toy")).work.loads == {128: 1}


def test_a_jump_back_from_behind_the_end_is_no_loop():
    body = """
        LDG.E.128 R4, desc[UR8][R30.64]
        @!P0 BRA `(.L_x_8)
        .L_x_2:
        LDG.E.128 R8, desc[UR8][R30.64]
        EXIT
        .L_x_8:
        FMUL R4, R4, R4
        BRA `(.L_x_2)
    """
    found = profile(read_sass(listing(body), "toy"))
    assert not found.looped
    assert found.total.instructions == 7


def test_a_wait_behind_the_end_belongs_to_the_loop_that_waits():
    """The jump back from .L_x_8 spans the whole kernel, but is no loop over it."""
    body = """
        LDG.E R9, desc[UR8][R30.64]
        .L_x_1:
        SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [R3], R4
        @!P0 BRA `(.L_x_8)
        .L_x_2:
        HGMMA.64x128x16.F32.BF16 R24, gdesc[UR4], R24
        @P1 BRA `(.L_x_1)
        STG.E.128 desc[UR4][R2.64], R24
        EXIT
        .L_x_8:
        SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [R3], R4
        @!P0 BRA `(.L_x_8)
        BRA `(.L_x_2)
    """
    found = profile(read_sass(listing(body), "toy"))
    assert found.work.tensor_core == {"HGMMA": 1}
    assert found.work.instructions == 4 + 3
    assert found.work.bytes == 0


NEST = """
    .L_x_1:
    MOV R24, RZ
    .L_x_2:
    LDG.E.128 R4, desc[UR8][R30.64]
    HGMMA.64x128x16.F32.BF16 R24, gdesc[UR4], R24
    @P1 BRA `(.L_x_2)
    {}
    FADD R1, R1, R4
    @P2 BRA `(.L_x_1)
"""


def test_exponentials_around_products_are_the_work():
    found = profile(read_sass(listing(NEST.format("MUFU.EX2 R4, R24")), "toy"))
    assert found.work.instructions == 4
    assert found.work.ex2 == 1
    assert found.work.tensor_core == {}


def test_products_are_the_work_where_no_exponentials_are():
    found = profile(read_sass(listing(NEST.format("FMUL R4, R24, R24")), "toy"))
    assert found.work.instructions == 3
    assert found.work.tensor_core == {"HGMMA": 1}


def test_a_loop_that_reads_nothing_is_not_the_work():
    body = """
        LDG.E.128 R4, desc[UR8][R30.64]
        .L_x_1:
        FADD R1, R1, R4
        STG.E desc[UR4][R2.64], R1
        @P1 BRA `(.L_x_1)
    """
    found = profile(read_sass(listing(body), "toy"))
    assert not found.looped
    assert found.work.loads == {128: 1}


def test_reconvergence_ends_a_branch():
    """BSYNC goes on behind the label of its BSSY, so the rare path behind the end is part of the loop."""
    body = """
        .L_x_1:
        LDG.E R4, desc[UR8][R30.64]
        BSSY B0, `(.L_x_3)
        @P0 BRA `(.L_x_8)
        .L_x_3:
        @P1 BRA `(.L_x_1)
        EXIT
        .L_x_8:
        FMUL R1, R1, R4
        BSYNC B0
    """
    assert profile(read_sass(listing(body), "toy")).work.instructions == 6


def test_other_functions_count_in_all_but_not_in_loops():
    called = listing("LDG.E R4, desc[UR8][R30.64]\nRET.REL.NODEC R20 `(toy)", "helper", tail="")
    found = profile(read_sass(called + "\n" + listing(LOOP), "toy"))
    assert found.total.loads == {128: 1, 16: 1, 32: 1}
    assert found.work.instructions == 3


def test_the_kernel_must_be_in_the_listing():
    with pytest.raises(ValueError, match=r"no section \.text\.other in the listing; it has toy"):
        read_sass(listing(LOOP), "other")


PTX = """
.visible .entry toy(.param .u64 .ptr .global .align 1 toy_param_0)
{
	.reg .b32 %r<9>;
	mov.u32 	%r1, 0;                     // a comment; with a semicolon
	@%p1 bra 	$L__BB0_3;
$L__BB0_2:                              // %.lr.ph
	.loc	1 32 13                         // toy.py:32:13
	// begin inline asm
	mov.u32 %r4, 0x0;
	@%p5 ld.global.v4.b32 { %r4, %r5, %r6, %r7 }, [ %rd9 + 0 ];
	// end inline asm
	{
		.reg .pred complete;
		waitLoop:
		mbarrier.try_wait.parity.shared.b64 complete, [%r5], %r6;
		@!complete bra.uni waitLoop;
	}
	cp.async.cg.shared.global [ %r4 + 0 ], [ %rd1 + 0 ], 0x10, %r3;
	ex2.approx.ftz.f32 %r8, %r4;
	@%p2 bra 	$L__BB0_2;
$L__BB0_3:
	{
		.reg .pred complete;
		waitLoop:
		mbarrier.try_wait.parity.shared.b64 complete, [%r5], %r6;
		@!complete bra.uni waitLoop;
	}
	st.global.b32 [ %rd3 + 0 ], %r8;
	ret;
}
"""


def test_the_loop_of_ptx():
    blocks = read_ptx(PTX)
    found = profile(blocks)
    assert found.work.loads == {128: 2}
    assert found.work.ex2 == 1
    assert found.total.stores == {32: 1}
    assert count(block_of(blocks, "$L__BB0_3")).loads == {}


def block_of(blocks, label):
    return next(block.instructions for block in blocks if label in block.labels)


def test_unrolling_is_the_ratio_of_the_loops_bytes():
    """Four times the 32 bytes of the loop in PTX, and a rest loop of one pass, which is the smaller one."""
    load, body = "LDG.E.128 R4, desc[UR8][R30.64]\n", "FADD R1, R1, R4\n"
    sass = listing(f".L_x_1:\n{load * 8}{body * 4}@P1 BRA `(.L_x_1)\n.L_x_2:\n{load * 2}{body}@P1 BRA `(.L_x_2)")
    found = profile(read_sass(sass, "toy"), read_ptx(PTX.replace("ex2.approx.ftz.f32 %r8, %r4;", "")))
    assert found.passes == 4
    assert found.work.instructions == 13


def test_unrolling_without_memory_is_the_ratio_of_exponentials():
    sass = listing(".L_x_1:\n" + "MUFU.EX2 R4, R4\n" * 6 + "@P1 BRA `(.L_x_1)")
    ptx = PTX.replace("ld.global.v4.b32", "ld.shared.v4.b32").replace("cp.async.cg.shared.global", "prefetch.global.L2")
    assert profile(read_sass(sass, "toy"), read_ptx(ptx)).passes == 6
