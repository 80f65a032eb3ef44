"""The price of a response that comes close to its length limit or is cut there (DAPO's soft overlong punishment).

Without it a response that was cut is only wrong, which says nothing of its length, and one that ended just before the limit is
as good as a short one. Called where a response becomes a turn (`drmas.agents.calls`); the settings are an agent's
`length_buffer` and `length_penalty`.
"""

from __future__ import annotations


def length_penalty(tokens: int, *, max_tokens: int, buffer: int, penalty: float, cut: bool = False) -> float:
    """What is taken off the reward of a response of `tokens` tokens; 0 to `penalty` (arXiv 2503.14476, equation 13).

        tokens <= max_tokens - buffer    0
        within the buffer                penalty (tokens - (max_tokens - buffer)) / buffer
        cut at the limit                 penalty

    Without a buffer nothing is taken off, not even of a response that was cut.

    Example: length_penalty(14, max_tokens=16, buffer=8, penalty=0.5) == 0.375
    """
    if buffer == 0:
        return 0.0
    filled = 1.0 if cut else (tokens - (max_tokens - buffer)) / buffer
    return penalty * min(max(filled, 0.0), 1.0)
