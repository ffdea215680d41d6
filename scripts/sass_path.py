"""The path of a full, aligned tile through a kernel's machine code. The walk decides every branch
by the code that it skips and the code at its target. It goes through every loop once, except the
longest one, for which the caller gives the number of rounds."""

from __future__ import annotations

import re

LONGEST_PATH = 20000
Code = list[tuple[int, str]]  # address and text of each instruction


def jumps(code: Code, begin: int, end: int) -> bool:
    """True if the path takes the conditional branch at index `begin` to index `end`."""
    if end <= begin:
        return False  # loops over jobs and remainders run once
    skipped = straight(code[begin + 1 : end])
    ahead: list[str] = []
    for _, text in code[end : end + 6]:
        ahead.append(text)
        if re.search(r"BSYNC|\bBRA\b", text):
            break
    predicate = code[begin][1].split()[0] + " "
    before = [text for _, text in code[max(begin - 8, 0) : begin] if text.startswith(predicate)]
    aligned = any(re.search(r"(LDG|STG)\.E\.(128|64)", text) for text in ahead + before)
    to_nearest = any("F2I.NTZ" in text for text in ahead[:5])
    arithmetic = not any(re.search(r"(LD|ST)[GS]|BAR\.", text) for text in skipped)
    repairs_nans = arithmetic and any("0x400000" in text for text in skipped)
    slow_division = len(skipped) < 10 and any("CALL.REL" in text for text in skipped[:8])
    large_blocks = has_loop_of_maxima(code[begin + 1 : end])
    all_skipped = [text for _, text in code[begin + 1 : end]]
    not_needed = adds_products(all_skipped) or pads(all_skipped)
    not_needed |= finds_nans(code[begin - 2 : begin]) and repeats_sums(code[begin + 1 : end])
    return aligned or to_nearest or repairs_nans or slow_division or large_blocks or not_needed


def adds_products(texts: list[str]) -> bool:
    """True if the code only adds products of loaded values: the engine's momentum."""
    loads = any("LDG" in text for text in texts) and any("FMUL" in text for text in texts)
    return loads and not any(re.search(r"F2I|I2F|MUFU|STG|STS|BAR\.", text) for text in texts)


def pads(texts: list[str]) -> bool:
    """True if the code only stores zeros behind the scales, as for the last tile."""
    stores = [text for text in texts if re.search(r"STG|STS", text)]
    return bool(stores) and all(re.search(r"STG\.E\.U16 .*, RZ$", text) for text in stores)


def finds_nans(code: Code) -> bool:
    return any(re.search(r"FSETP\.(NUM|NAN)", text) for _, text in code)


def repeats_sums(code: Code) -> bool:
    """True for a loop that repairs NaNs and stores nothing: it repeats a reduction's sums."""
    texts = [text for _, text in code]
    repairs = any("0x400000" in text for text in texts)
    return repairs and has_loop(code) and not any(re.search(r"STG|STS|BAR\.", t) for t in texts)


def has_loop(code: Code) -> bool:
    for address, text in code:
        target = re.search(r"\bBRA\b.* 0x([0-9a-f]+)$", text)
        if target and code[0][0] <= int(target[1], 16) < address:
            return True
    return False


def straight(code: Code) -> list[str]:
    """The instructions up to the first unconditional jump."""
    texts = []
    for _, text in code:
        texts.append(text)
        if re.match(r"BRA 0x|EXIT", text):
            break
    return texts


def has_loop_of_maxima(code: Code) -> bool:
    """True for a loop over the parts of a block larger than the default of 256 elements."""
    for address, text in code:
        target = re.search(r"\bBRA\b.* 0x([0-9a-f]+)$", text)
        head = int(target[1], 16) if target else address
        body = [text for place, text in code if head <= place < address]
        if head >= code[0][0] and any("VIMNMX" in text for text in body):
            return True
    return False


def path_length(code: Code, rounds: int = 1) -> int:
    index = {address: i for i, (address, _) in enumerate(code)}
    at = count = longest = 0
    before: dict[int, int] = {}  # length of the path before an instruction, by index
    while at < len(code) and count < LONGEST_PATH:
        before[at] = count
        predicate, body = re.match(r"(@!?U?P\w+\s+)?(.*)", code[at][1]).groups()
        count += 1
        if body.startswith("EXIT") and not predicate:
            break
        target = re.match(r"BRA\b.* 0x([0-9a-f]+)$", body)
        if target:
            end = index[int(target[1], 16)]
            if end == at:  # the endless loop after the kernel's end
                break
            if end < at and end in before:
                longest = max(longest, count - before[end])
            conditional = predicate or re.match(r"BRA\S*\s+!?U?P\d", body)
            at = end if not conditional or jumps(code, at, end) else at + 1
        else:
            at += 1
    return count + (rounds - 1) * longest
