"""Process groups: which ranks share a policy's tensors, and which hold its replicas.

Every policy names its groups explicitly (`PolicyGroups.collection`, passed to everything of Megatron that takes one), and
`PolicyGroups.active` shows the same groups to the parts of Megatron that still ask its global `parallel_state`. Outside it
those globals are empty, so code that forgets the context fails instead of using another policy's groups. One policy is active
at a time per process. A policy may live on some of the ranks only: while it is active they are the whole world, because parts
of Megatron (building an optimiser, checkpoints) talk to the world. Communicators are shared by rank list.

`initialize_model_parallel` is never called: it knows one layout per process. Called by the trainer and by the runtime's start.
"""

from __future__ import annotations

import contextlib
import datetime
import os
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection

from drmas.errors import ConfigError
from drmas.policy import host_platform

Result = TypeVar("Result")

_TOKENS = {
    "tp": "tp",
    "pp": "pp",
    "cp": "cp",
    "dp": "dp",
    "dp_cp": "dp-cp",
    "mp": "tp-pp",
    "tp_cp": "tp-cp",
    "tp_dp_cp": "tp-dp-cp",
    "ep": "ep",
    "intra_dist_opt": "tp-cp-ep-dp-pp",
}
"""Field of ProcessGroupCollection -> the dimensions that vary inside the group, in RankGenerator's spelling."""

_GROUP_GLOBALS = {
    "_TENSOR_MODEL_PARALLEL_GROUP": "tp",
    "_PIPELINE_MODEL_PARALLEL_GROUP": "pp",
    "_MODEL_PARALLEL_GROUP": "mp",
    "_EMBEDDING_GROUP": "embd",
    "_POSITION_EMBEDDING_GROUP": "pos_embd",
    "_CONTEXT_PARALLEL_GROUP": "cp",
    "_DATA_PARALLEL_GROUP": "dp",
    "_DATA_PARALLEL_GROUP_WITH_CP": "dp_cp",
    "_INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP": "intra_dp_cp",
    "_INTRA_DISTRIBUTED_OPTIMIZER_INSTANCE_GROUP": "intra_dist_opt",
    "_TENSOR_AND_CONTEXT_PARALLEL_GROUP": "tp_cp",
    "_TENSOR_AND_DATA_PARALLEL_GROUP_WITH_CP": "tp_dp_cp",
    "_EXPERT_MODEL_PARALLEL_GROUP": "ep",
    "_EXPERT_TENSOR_PARALLEL_GROUP": "expt_tp",
    "_EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP": "tp_ep",
    "_EXPERT_TENSOR_MODEL_PIPELINE_PARALLEL_GROUP": "tp_ep_pp",
    "_EXPERT_DATA_PARALLEL_GROUP": "expt_dp",
    "_INTRA_PARTIAL_EXPERT_DATA_PARALLEL_GROUP": "intra_expt_dp",
}
_RANK_GLOBALS = {
    "_EMBEDDING_GLOBAL_RANKS": "embd",
    "_POSITION_EMBEDDING_GLOBAL_RANKS": "pos_embd",
    "_PIPELINE_GLOBAL_RANKS": "pp",
    "_DATA_PARALLEL_GLOBAL_RANKS": "dp",
    "_DATA_PARALLEL_GLOBAL_RANKS_WITH_CP": "dp_cp",
    "_TENSOR_MODEL_PARALLEL_GLOBAL_RANKS": "tp",
    "_MODEL_PARALLEL_GLOBAL_RANKS": "mp",
    "_CONTEXT_PARALLEL_GLOBAL_RANKS": "cp",
    "_EXPERT_MODEL_PARALLEL_RANKS": "ep",
}
_SCRATCH = ("_GLOBAL_MEMORY_BUFFER", "_GLOBAL_SYMMETRIC_MEMORY_BUFFER")
"""Globals that belong to no group and stay."""


def init_distributed(*, timeout_seconds: float = 1800.0, meeting_seconds: float = 600.0) -> None:
    """Join torchrun's processes, or form a world of one where torchrun's variables are missing (no port is opened for that).

    `timeout_seconds` bounds how long a collective waits for a lost peer, `meeting_seconds` how long ranks wait here for one
    that never comes, which torchrun sees on its own host only. Does nothing if a world exists. ConfigError: others can't be met
    at torchrun's address, because its port is taken or they aren't there.
    """
    if dist.is_initialized():
        return
    if not host_platform.is_host():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    timeout = datetime.timedelta(seconds=timeout_seconds)
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        try:
            dist.init_process_group(host_platform.backend(), timeout=datetime.timedelta(seconds=meeting_seconds))
            dist.distributed_c10d._set_pg_timeout(timeout)
        except dist.DistError as error:
            place = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
            advice = "torchrun without --master-port picks a free port"
            if isinstance(error, dist.DistStoreError):
                advice = "not all ranks came; what the others write, on whichever host they are, says why"
            found = str(error).splitlines()[0]
            raise ConfigError(
                f"the trainer processes can't meet at {place} (MASTER_ADDR, MASTER_PORT): {found}; {advice}"
            ) from error
    else:
        dist.init_process_group(host_platform.backend(), store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)


def destroy() -> None:
    """Leave the world; every `Groups` made in it is void, and Megatron's scratch memory is given back."""
    parallel_state.destroy_global_memory_buffer()
    if dist.is_initialized():
        dist.destroy_process_group()


class Groups:
    """The communicators of this process, one per distinct list of ranks.

    Every rank must ask for the same layouts in the same order, because making a communicator is collective over the world.
    """

    def __init__(self, *, timeout_seconds: float = 1800.0) -> None:
        """`timeout_seconds` bounds every collective of the communicators made here; the world's own has its own bound."""
        self._timeout = datetime.timedelta(seconds=timeout_seconds)
        self._cache: dict[tuple[str, tuple[int, ...]], dist.ProcessGroup] = {}
        if parallel_state._GLOBAL_MEMORY_BUFFER is None:  # scratch of sequence parallelism, one per process, of no group
            parallel_state._set_global_memory_buffer()

    def get(self, ranks: Sequence[int], *, lane: str = "") -> dist.ProcessGroup | None:
        """The communicator of the global `ranks`; None on the ranks outside. Another `lane` is another communicator, for what
        isn't ordered with the collectives of the first."""
        key = (lane, tuple(ranks))
        if key not in self._cache:
            whole = not lane and key[1] == tuple(range(dist.get_world_size()))
            self._cache[key] = dist.group.WORLD if whole else dist.new_group(list(ranks), timeout=self._timeout)
        return self._cache[key] if dist.get_rank() in key[1] else None

    def layout(self, *, tp: int = 1, pp: int = 1, cp: int = 1, ranks: Sequence[int] | None = None) -> PolicyGroups | None:
        """The groups of a policy on the global `ranks` (all by default); what tp, pp and cp leave over is data-parallel.

        None on ranks outside `ranks`. ConfigError: tp * pp * cp doesn't divide the number of ranks.
        """
        ranks = list(range(dist.get_world_size())) if ranks is None else list(ranks)
        dp, rest = divmod(len(ranks), tp * pp * cp)
        if rest or not dp:
            raise ConfigError(
                f"tensor x pipeline x context parallel is {tp} x {pp} x {cp}; their product must divide the {len(ranks)} "
                f"trainer processes (policies.NAME.tensor_parallel and so on, or torchrun's --nproc-per-node)"
            )
        generator = parallel_state.RankGenerator(tp=tp, ep=1, dp=dp, pp=pp, cp=cp, order="tp-cp-ep-dp-pp")
        groups = {name: self._mine(ranks, generator.get_ranks(token)) for name, token in _TOKENS.items()}
        pipelines = generator.get_ranks("pp")
        groups["embd"] = self._mine(ranks, [parallel_state.default_embedding_ranks(line) for line in pipelines])
        groups["pos_embd"] = self._mine(ranks, [parallel_state.default_position_embedding_ranks(line) for line in pipelines])
        groups |= dict.fromkeys(("expt_tp", "tp_ep"), groups["tp"])
        groups |= dict.fromkeys(("expt_dp", "intra_dp_cp", "intra_expt_dp"), groups["dp_cp"])
        groups |= {"tp_ep_pp": groups["mp"], "inter_dist_opt": None, "hcp": None}
        return PolicyGroups(ProcessGroupCollection(**groups), ranks) if dist.get_rank() in ranks else None

    def _mine(self, ranks: Sequence[int], lists: Sequence[Sequence[int]]) -> dist.ProcessGroup | None:
        """Make the group of every list, in order, on every rank; return the one that this rank is in."""
        made = [self.get([ranks[i] for i in members]) for members in lists]
        return next((group for group in made if group is not None), None)


class PolicyGroups:
    """One policy's groups as this rank sees them. `ranks` are its global ranks, `whole` the communicator over all of them.

    Example: layout = Groups().layout(tp=2); layout.tp.size() == 2
    """

    def __init__(self, collection: ProcessGroupCollection, ranks: Sequence[int]) -> None:
        self.collection, self.ranks = collection, tuple(ranks)
        self.tp: dist.ProcessGroup = collection.tp
        self.pp: dist.ProcessGroup = collection.pp
        self.cp: dist.ProcessGroup = collection.cp
        self.dp: dist.ProcessGroup = collection.dp
        self.dp_cp: dist.ProcessGroup = collection.dp_cp
        self.whole: dist.ProcessGroup = collection.intra_dist_opt

    @property
    def is_first_stage(self) -> bool:
        return self.pp.rank() == 0

    @property
    def is_last_stage(self) -> bool:
        return self.pp.rank() == self.pp.size() - 1

    def sizes(self) -> dict[str, int]:
        """The layout in numbers, by the names of the dimensions."""
        return {name: getattr(self, name).size() for name in ("tp", "pp", "cp", "dp")}

    def on_leader(self, action: Callable[[], Result]) -> Result:
        """Run `action` on the policy's first rank and give its result, or raise its error, on every rank of the policy.

        For files and decisions that exist once: without it, an error on that rank leaves the others waiting for their timeout.
        """
        outcome: list[object] = [None, None]
        if self.whole.rank() == 0:
            try:
                outcome[0] = action()
            except Exception as error:  # raised below, on every rank
                outcome[1] = error
        if self.whole.size() > 1:
            dist.broadcast_object_list(outcome, group=self.whole, group_src=0)
        if isinstance(outcome[1], Exception):
            raise outcome[1]
        return outcome[0]

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Let `parallel_state` answer for this policy; everything else in it is empty meanwhile, and comes back after."""
        names = vars(parallel_state)
        saved = {name: names[name] for name in names if name.startswith("_") and name.isupper() and name not in _SCRATCH}
        with _as_world(self.whole):
            shown = {name: {} if isinstance(value, dict) else None for name, value in saved.items()}
            shown |= {name: getattr(self.collection, field) for name, field in _GROUP_GLOBALS.items()}
            for name, field in _RANK_GLOBALS.items():
                group = getattr(self.collection, field)
                shown[name] = None if group is None else dist.get_process_group_ranks(group)
            names.update(shown)
            try:
                yield
            finally:
                names.update(saved)


@contextlib.contextmanager
def _as_world(group: dist.ProcessGroup) -> Iterator[None]:
    """Let `group` be torch.distributed's world, its ranks numbered from 0.

    Private state of torch, for the whole process: no other thread may use torch.distributed meanwhile.
    """
    world = dist.distributed_c10d._world
    if world.default_pg is group:
        yield
        return
    number = {rank: i for i, rank in enumerate(dist.get_process_group_ranks(group))}
    default, tables = world.default_pg, dict(world.pg_group_ranks)
    for each, table in tables.items():  # each: {rank in the world: rank in the group}
        if set(table) <= set(number):
            world.pg_group_ranks[each] = {number[rank]: i for rank, i in table.items()}
    world.default_pg = group
    try:
        yield
    finally:
        world.default_pg = default
        world.pg_group_ranks.update(tables)
