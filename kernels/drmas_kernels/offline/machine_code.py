"""Reads what the compiler made of a kernel: a listing of nvdisasm or PTX in, counts of instructions and the work loop out.

Knows nothing of Triton and of specs; `offline` calls it. Opcodes are compared without their predicate and by whole modifiers:
`@!P0 LDG.E.EF.LTC128B.64` is a load of 64 bits.

Loops are the natural loops of the control flow graph, not backward jumps: ptxas puts waits and rare paths behind the end of the
kernel, from where they jump back, and ends every kernel with a jump to itself that is never reached. A loop that only waits
(no memory access, no arithmetic) is no loop of its own, its instructions count with the loop around it. Of the loops that read
global memory or hold tensor core instructions or ex2, one is the **work loop**, by the instructions that are in it and in no
loop inside it: most ex2, then most tensor core instructions, TMA copies, bytes of global memory, instructions. So an epilogue
with exponentials around a loop of products is measured by itself, and a loop of products without exponentials too. Where there
is none, all of the kernel is one pass.

ptxas unrolls short loops. A pass is then several passes of the source: as many as the loop's bytes (without memory access: ex2,
tensor core instructions) are times those of the same loop in PTX.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

_SASS = re.compile(r"^\s*/\*[0-9a-f]+\*/\s+(?:@(!?U?P\w+)\s+)?([A-Z][\w.]*)\s*(.*?)\s*;")
_SECTION = re.compile(r"^\s*\.section\s+\.text\.([\w$.]+)")
_SASS_LABEL = re.compile(r"^(\.L\w+):")
_SASS_TARGET = re.compile(r"`\(([^)]+)\)")
_PTX = re.compile(r"^(?:@(!?[%\w]+)\s+)?([a-z][\w.:]*)\s*(.*)$", re.S)
_PTX_LABEL = re.compile(r"^\s*(\$?\w+):(?!:)")
_PTX_TYPE = re.compile(r"[bsuf](8|16|32|64|128)")

_DOUBLE = {"DADD", "DMUL", "DFMA", "DSETP", "DMNMX", "DMMA", "DSET"}
_DOUBLE_MODIFIERS = {"F64", "RCP64H", "RSQ64H"}
_ATOMIC = {"ATOM", "ATOMG", "ATOMS", "RED", "REDG", "UTMAREDG", "UREDGR"}
_NO_RETURN = {"EXIT", "RET", "BRX", "JMX", "JMP", "KILL", "ret", "exit", "trap"}
_WAITS = {"SYNCS", "BRA", "NANOSLEEP", "NOP", "BSSY", "BSYNC", "WARPSYNC", "YIELD", "mbarrier", "bra", "mov", "MOV", "UMOV"}


@dataclass(slots=True)
class Counts:
    """Instructions of a stretch of code, by kind. Widths are bits per thread."""

    instructions: int = 0
    loads: Counter[int] = field(default_factory=Counter)
    """Global loads by width, asynchronous copies to shared memory among them."""
    stores: Counter[int] = field(default_factory=Counter)
    tma_loads: int = 0
    tma_stores: int = 0
    tensor_core: Counter[str] = field(default_factory=Counter)
    """By opcode: HGMMA (sm_90), UTCHMMA (sm_100), HMMA."""
    ex2: int = 0
    spills: int = 0
    """Loads and stores of local memory."""
    fp64: int = 0
    atomics: int = 0
    """Without AND and OR on shared memory, whose order is no matter: sm_100 keeps account of its tensor memory by them."""

    @property
    def bytes(self) -> int:
        """Of global memory, per thread, without TMA."""
        return sum(width * number for kind in (self.loads, self.stores) for width, number in kind.items()) // 8

    @property
    def weight(self) -> tuple[int, ...]:
        """What makes a loop the work loop."""
        tma = self.tma_loads + self.tma_stores
        return (self.ex2, self.tensor_core.total(), tma, self.bytes, self.instructions)

    @property
    def works(self) -> bool:
        return bool(self.ex2 or self.tensor_core or self.tma_loads or self.loads)


@dataclass(slots=True)
class Instruction:
    opcode: str
    """With modifiers, without the predicate."""
    conditional: bool
    targets: tuple[str, ...]
    """Labels that it names."""
    operands: str


@dataclass(slots=True)
class Block:
    """Instructions that run one after another."""

    labels: list[str] = field(default_factory=list)
    instructions: list[Instruction] = field(default_factory=list)


@dataclass(slots=True)
class Profile:
    """What a kernel's machine code holds in all, and in its work loop."""

    total: Counts
    work: Counts
    """The work loop without the loops inside it; all of a kernel without one."""
    looped: bool
    """Whether there is a work loop."""
    passes: int
    """Passes of the source's loop that one pass of the work loop makes."""
    busiest: Counts
    """The stretch without branches that moves most bytes of global memory."""


def read_sass(listing: str, kernel: str) -> list[Block]:
    """The blocks of a listing of `nvdisasm --print-code`, those of `kernel` first. ValueError: it isn't in the listing."""
    sections: dict[str, list[Block]] = {}
    current: list[Block] = []
    for line in listing.splitlines():
        if section := _SECTION.match(line):
            current = sections.setdefault(section[1], [Block()])
        elif label := _SASS_LABEL.match(line):
            if current:
                _add_label(current, label[1])
        elif current and (found := _SASS.match(line)):
            predicate, opcode, operands = found.groups()
            targets = tuple(_SASS_TARGET.findall(operands))
            conditional = predicate not in (None, "PT") or (bool(targets) and not operands.startswith("`"))
            _add(current, Instruction(opcode, conditional, targets, operands))
    if kernel not in sections:
        raise ValueError(f"no section .text.{kernel} in the listing; it has {', '.join(sections) or 'none'}")
    first = sections.pop(kernel)
    return first + [block for blocks in sections.values() for block in blocks]


def read_ptx(text: str) -> list[Block]:
    """The blocks of all functions in PTX, in their order."""
    blocks = [Block()]
    body = re.sub(r"//[^\n]*|/\*.*?\*/|^\s*\.loc\s[^\n]*", "", text, flags=re.S | re.M)
    for statement in re.split(r"[;{}]\s*\n|;", body):
        statement = statement.strip(" \t\n{}")
        while label := _PTX_LABEL.match(statement):
            _add_label(blocks, label[1])
            statement = statement[label.end() :].strip(" \t\n{}")
        if found := _PTX.match(statement):
            predicate, opcode, operands = found.groups()
            branch = opcode.split(".")[0] == "bra"
            _add(blocks, Instruction(opcode, predicate is not None, (operands.strip(),) if branch else (), operands))
    return blocks


def count(instructions: Iterable[Instruction]) -> Counts:
    """NOP is not counted: it fills up the end of a kernel."""
    counts = Counts()
    for instruction in instructions:
        base, *modifiers = instruction.opcode.split(".")
        if base == "NOP":
            continue
        counts.instructions += 1
        if base.islower():
            _count_ptx(counts, base, modifiers, instruction.operands)
        else:
            _count_sass(counts, base, modifiers)
    return counts


def profile(sass: list[Block], ptx: list[Block] | None = None) -> Profile:
    """`ptx` says how often ptxas unrolled; without it a pass of the loop is one."""
    reached, loops = _loops(sass)
    blocks = [block for number, block in enumerate(sass) if number in reached or _returns(block)]
    total = count(_flat(blocks))
    work = _work(sass, loops)
    source = _work(ptx, _loops(ptx)[1]) if work and ptx else None
    busiest = max((count(block.instructions) for block in sass), key=lambda counts: counts.bytes)
    return Profile(total, work or total, work is not None, _ratio(work, source) if work and source else 1, busiest)


def _flat(blocks: Iterable[Block]) -> Iterator[Instruction]:
    return (instruction for block in blocks for instruction in block.instructions)


def _returns(block: Block) -> bool:
    """Whether it is code of a subroutine, which only calls reach, and not the jump to itself at the end."""
    jump = block.instructions[-1] if block.instructions else None
    return bool(block.instructions) and not (jump.opcode == "BRA" and set(jump.targets) & set(block.labels))


def _add_label(blocks: list[Block], label: str) -> None:
    if blocks[-1].instructions:
        blocks.append(Block())
    blocks[-1].labels.append(label)


def _add(blocks: list[Block], instruction: Instruction) -> None:
    blocks[-1].instructions.append(instruction)
    base = instruction.opcode.split(".")[0]
    if base in _NO_RETURN or base in ("BRA", "bra", "BSYNC"):
        blocks.append(Block())


def _count_sass(counts: Counts, base: str, modifiers: list[str]) -> None:
    if base in ("LDG", "LDGSTS", "LD"):
        counts.loads[_width(modifiers)] += 1
    elif base in ("STG", "ST"):
        counts.stores[_width(modifiers)] += 1
    elif base.startswith("UTMALDG"):
        counts.tma_loads += 1
    elif base.startswith("UTMASTG"):
        counts.tma_stores += 1
    elif base in ("LDL", "STL"):
        counts.spills += 1
    elif base.endswith("MMA"):
        counts.tensor_core[base] += 1
    elif base == "MUFU" and modifiers[:1] == ["EX2"]:
        counts.ex2 += 1
    counts.fp64 += base in _DOUBLE or bool(_DOUBLE_MODIFIERS & set(modifiers))
    counts.atomics += base in _ATOMIC and not (base == "ATOMS" and {"AND", "OR"} & set(modifiers))


def _width(modifiers: list[str]) -> int:
    for modifier in reversed(modifiers):
        if modifier in ("64", "128", "256"):
            return int(modifier)
        if modifier in ("U8", "S8", "U16", "S16"):
            return int(modifier[1:])
    return 32


def _count_ptx(counts: Counts, base: str, modifiers: list[str], operands: str) -> None:
    """Only what `_ratio` compares."""
    if base == "cp" and "bulk" in modifiers:
        counts.tma_loads += 1
    elif base == "cp" and "async" in modifiers and "global" in modifiers:
        size = re.search(r",\s*(?:0x)?([0-9a-f]+)", operands)
        counts.loads[8 * int(size[1], 16 if "0x" in size[0] else 10)] += 1
    elif base in ("ld", "st") and "global" in modifiers:
        width = next((int(found[1]) for word in reversed(modifiers) if (found := _PTX_TYPE.fullmatch(word))), 32)
        vector = next((int(word[1:]) for word in modifiers if re.fullmatch(r"v\d", word)), 1)
        (counts.loads if base == "ld" else counts.stores)[width * vector] += 1
    elif base == "ex2":
        counts.ex2 += 1
    elif (base == "wgmma" and "mma_async" in modifiers) or base == "mma":
        counts.tensor_core[base] += 1


def _ratio(machine: Counts, source: Counts) -> int:
    pairs = ((machine.bytes, source.bytes), (machine.ex2, source.ex2))
    for ours, theirs in (*pairs, (machine.tensor_core.total(), source.tensor_core.total())):
        if ours and theirs:
            return max(1, round(ours / theirs))
    return 1


def _work(blocks: list[Block], loops: list[frozenset[int]]) -> Counts | None:
    found = []
    for body in loops:
        inner = [other for other in loops if other < body]
        own = body.difference(*inner)
        found.append(count(_flat(blocks[number] for number in sorted(own))))
    return max((counts for counts in found if counts.works), key=lambda counts: counts.weight, default=None)


def _loops(blocks: list[Block]) -> tuple[set[int], list[frozenset[int]]]:
    """(blocks that the first one reaches, the natural loops that do more than wait), both as numbers of blocks."""
    following = _edges(blocks)
    order: list[int] = []
    seen = {0}
    stack = [(0, iter(following[0]))]
    while stack:
        number, rest = stack[-1]
        for other in rest:
            if other not in seen:
                seen.add(other)
                stack.append((other, iter(following[other])))
                break
        else:
            order.append(number)
            stack.pop()
    order.reverse()
    before: dict[int, list[int]] = {number: [] for number in order}
    for number in order:
        for other in following[number]:
            before[other].append(number)
    dominators = _dominators(order, before)
    bodies: dict[int, set[int]] = {}
    for number in order:
        for header in following[number]:
            if dominators[number] >> header & 1:
                _grow(bodies.setdefault(header, {header}), number, before)
    return seen, [frozenset(body) for body in bodies.values() if not _waits(blocks, body)]


def _dominators(order: list[int], before: dict[int, list[int]]) -> dict[int, int]:
    """For each block the blocks that every way to it passes, as bits."""
    everything = sum(1 << number for number in order)
    found = dict.fromkeys(order, everything)
    found[order[0]] = 1 << order[0]
    changed = True
    while changed:
        changed = False
        for number in order[1:]:
            common = everything
            for other in before[number]:
                common &= found[other]
            common |= 1 << number
            if common != found[number]:
                found[number], changed = common, True
    return found


def _grow(body: set[int], number: int, before: dict[int, list[int]]) -> None:
    """Add to a loop what reaches `number` without passing its header, which it holds already."""
    stack = [number]
    while stack:
        number = stack.pop()
        if number not in body:
            body.add(number)
            stack.extend(before[number])


def _waits(blocks: list[Block], body: set[int]) -> bool:
    return all(instruction.opcode.split(".")[0] in _WAITS for instruction in _flat(blocks[number] for number in body))


def _edges(blocks: list[Block]) -> list[list[int]]:
    """The blocks that can follow each block. Labels of inline assembly occur more than once in PTX: the nearest counts."""
    places: dict[str, list[int]] = {}
    barriers: dict[str, list[str]] = {}
    for number, block in enumerate(blocks):
        for label in block.labels:
            places.setdefault(label, []).append(number)
        for instruction in block.instructions:
            if instruction.opcode.startswith("BSSY"):
                barriers.setdefault(instruction.operands.split(",")[0], []).extend(instruction.targets)
    edges = []
    for number, block in enumerate(blocks):
        last = block.instructions[-1] if block.instructions else None
        base = last.opcode.split(".")[0] if last else ""
        jumps = base in ("BRA", "bra", "BSYNC")
        targets = barriers.get(last.operands.split(",")[0], []) if base == "BSYNC" else last.targets if jumps else ()
        found = [min(places[label], key=lambda place: abs(place - number)) for label in targets if label in places]
        stops = base in _NO_RETURN or (jumps and bool(found))
        if (not stops or last.conditional) and number + 1 < len(blocks):
            found.append(number + 1)
        edges.append(list(dict.fromkeys(found)))
    return edges
