"""What the kernels replace, written as the first implementations had it: the slow side of comparisons, never used by drmas.

Beside the tests, which hold that both sides of a comparison do the same work, `python bench/advantage_loops.py` measures.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence
from itertools import product

import torch
from torch import Tensor

from drmas_kernels.segment_advantage import segment_advantage

SHAPES = ((1024, 2, 4), (64, 1, 128))
"""Tasks, agents, and rows of each agent in each task: 8,192 rows in groups of 4 and of 128."""


def per_row_loops(score: Tensor, task: Sequence[str], agent: Sequence[str], eps: float = 1e-6) -> Tensor:
    """The per-agent advantage as the first implementation of Dr. MAS computes it, from scores that hold their penalties.

    A key string for every row, dicts of lists of 0-d tensors, mean and sample std of each group's stacked list, then one row at
    a time. A group of one row keeps its score.
    """
    keys = [f"{t}_{a}" for t, a in zip(task, agent, strict=True)]
    members, means, stds = defaultdict(list), {}, {}
    for i in range(len(score)):
        members[keys[i]].append(score[i])
    for key, values in members.items():
        if len(values) == 1:
            means[key], stds[key] = torch.tensor(0.0), torch.tensor(1.0)
        else:
            stacked = torch.stack(values)
            means[key], stds[key] = stacked.mean(), stacked.std()
    advantage = torch.empty_like(score)
    for i in range(len(score)):
        advantage[i] = (score[i] - means[keys[i]]) / (stds[keys[i]] + eps)
    return advantage


class Rows:
    """Rows of every (task, agent), shuffled: rewards 0 and 1, penalties 0 and 0.1; by name and by number."""

    def __init__(self, tasks: int, agents: int, rows: int) -> None:
        pairs = list(product(range(tasks), range(agents), range(rows)))
        generator = torch.Generator().manual_seed(0)
        order = torch.randperm(len(pairs), generator=generator).tolist()
        self.task = [f"task-{pairs[i][0]}" for i in order]
        self.agent = [f"agent-{pairs[i][1]}" for i in order]
        self.segment = torch.tensor([pairs[i][0] * agents + pairs[i][1] for i in order])
        self.reward = torch.randint(2, (len(pairs),), generator=generator).float()
        self.penalty = 0.1 * torch.randint(2, (len(pairs),), generator=generator)

    def baseline(self) -> Tensor:
        return per_row_loops(self.reward - self.penalty, self.task, self.agent)

    def ours(self) -> Tensor:
        """The rule `dr-mas-paper`. The two segmentations are two tensors, as they come from `drmas.core`."""
        return segment_advantage(
            self.reward,
            self.penalty,
            mean_segment=self.segment,
            std_segment=self.segment.clone(),
            episode=torch.arange(len(self.reward)),
            included=torch.ones(len(self.reward), dtype=torch.bool),
            singleton="raw",
            penalty_inside=True,
        ).advantage


def main() -> None:
    """Best of several times of each, in turn; ours more often, because it is short."""
    torch.set_num_threads(1)
    for shape in SHAPES:
        rows = Rows(*shape)
        best = {"per-row loops": float("inf"), "ours": float("inf")}
        for _ in range(10):
            for name, step in [("per-row loops", rows.baseline)] + [("ours", rows.ours)] * 5:
                start = time.perf_counter()
                step()
                best[name] = min(best[name], time.perf_counter() - start)
        loops, ours = best["per-row loops"], best["ours"]
        sizes = f"{shape[0]:>5} tasks x {shape[1]} agents x {shape[2]:>3} rows"
        print(f"{sizes}   loops {1e3 * loops:7.2f} ms   ours {1e3 * ours:6.2f} ms   {loops / ours:6.1f}x")


if __name__ == "__main__":
    main()
