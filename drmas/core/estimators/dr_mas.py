"""Dr. MAS: a turn against the other turns of the same agent in the task (arXiv 2602.08847, equation 5).

    A = (R - mu_k) / (sigma_k + eps), mu_k and sigma_k over the rows of agent k in the task's episodes

`dr-mas-paper` has the numbers of the method's first implementation: a lone row keeps its raw reward, and penalties are part of
what is normalised. The paper's mixed ablations take one statistic from the task: `mean=agent,std=task`, `mean=task,std=agent`;
there a row whose agent or task has nothing to compare gets 0.

Fails when an agent has few rows in a task: a router that picks one of two agents leaves each with a handful, whose mean and
deviation are noise, and a lone row teaches nothing. An agent whose calls decide between success and failure only by being made
(it speaks in failing episodes alone) is constant and learns nothing, where a pooled baseline would see it. An agent that has no
say in the outcome gets advantages of full size all the same. `dr-mas-paper` makes +-1.8 of a 0.01 penalty in an equal group.
"""

from __future__ import annotations

from typing import Any

from drmas.core.advantages import AdvantageRule
from drmas.core.estimators.base import Segmented

DR_MAS = AdvantageRule()
DR_MAS_PAPER = AdvantageRule(singleton="raw", penalty="inside")
MEAN_AGENT_STD_TASK = AdvantageRule(mean="agent", std="task")
MEAN_TASK_STD_AGENT = AdvantageRule(mean="task", std="agent")


def dr_mas(**changes: Any) -> Segmented:
    return Segmented.of(DR_MAS, changes)


def dr_mas_paper(**changes: Any) -> Segmented:
    return Segmented.of(DR_MAS_PAPER, changes)


def mean_agent_std_task(**changes: Any) -> Segmented:
    return Segmented.of(MEAN_AGENT_STD_TASK, changes)


def mean_task_std_agent(**changes: Any) -> Segmented:
    return Segmented.of(MEAN_TASK_STD_AGENT, changes)
