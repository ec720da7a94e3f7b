"""The protocol of copy engines, on imagined devices: streams are queues that run in any order that CUDA allows.

One run stands for one interleaving of two or three devices (``imagined_devices``): staging memory that is written too early
gives a wrong sum, and a circle of waits leaves queues that nobody can empty.

Each trial runs two graphs, one of them twice: what a graph leaves behind must not disturb the next, whichever it is. Gathered
parameters are read when they have arrived and once more some time later; of about half of them, results lie in shared memory
themselves (``memory.leases``), where others come as soon as both has been.
"""

from __future__ import annotations

import operator
import random
import types
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import pytest
import torch
import torch.fx as fx
from torch import Tensor

from overlap_pass.errors import TransportError
from overlap_pass.graph.program import (
    Category,
    Collective,
    CollectiveKind,
    Lease,
    OpKind,
    OpNode,
    Phase,
    Program,
    Role,
    Storage,
)
from overlap_pass.memory import leases
from overlap_pass.memory.places import WORDS, Place
from overlap_pass.rewrite import places as rewrite_places
from overlap_pass.rewrite.places import give_places
from overlap_pass.transport import copy_engine, ops, peers
from overlap_pass.transport.peers import Channel
from overlap_pass.transport.total import Total
from tests.cpu.imagined_devices import World, entered

LIMIT_ROWS = 6
WIDTH = 40


@pytest.fixture
def enter(monkeypatch: pytest.MonkeyPatch) -> Callable[[World], None]:
    return entered(monkeypatch)


GROUP = "group"
MEAN = Total(mean=True, dtype=torch.float32)


def program(seed: int, launches: int, ranks: int) -> fx.Graph:
    """Launches of one to three tensors in a random order, each waited for somewhere behind; placed."""
    choose = random.Random(seed)
    graph = fx.Graph()
    waiting: list[Callable[[], object]] = []
    for number in range(launches):
        tensors = [
            _tensor(graph, number, index, choose.randint(1, LIMIT_ROWS)) for index in range(choose.randint(1, 3))
        ]
        if choose.random() < 0.5:
            launch = graph.call_function(ops.GATHER_START_COALESCED, (tensors, torch.bfloat16, ranks, GROUP, []))
            launch.meta["matmuls"] = choose.randrange(8)
            waiting.append(partial(_arrive, launch, waiting))
        else:
            for tensor in tensors:
                tensor.meta["val"] = tensor.meta["val"].repeat(ranks, 1)
            how = (MEAN.spec, ranks, GROUP, True, [])
            launch = graph.call_function(ops.EXCHANGE_START_COALESCED, (tensors, *how))
            for index, tensor in enumerate(tensors):
                token = graph.call_function(operator.getitem, (launch, index))
                waiting.append(partial(graph.call_function, ops.EXCHANGE_FINISH, (token, tensor, *how)))
        while waiting and choose.random() < 0.6:
            waiting.pop(choose.randrange(len(waiting)))()
    while waiting:
        waiting.pop(0)()
    graph.output(None)
    give_places(graph, leases_of(graph, ranks, ahead=choose.randrange(2)))
    return graph


def _arrive(launch: fx.Node, waiting: list[Callable[[], object]]) -> None:
    launch.graph.call_function(_arrived, (launch,))
    waiting.append(partial(launch.graph.call_function, _read, (launch,)))


def leases_of(graph: fx.Graph, ranks: int, ahead: int) -> Mapping[str, Lease]:
    """Those of the planner, where some results of each gather are read by matmuls and the others by something else."""
    found: list[OpNode] = []
    storages: list[Storage] = []
    for node in graph.nodes:
        if node.target is ops.GATHER_START_COALESCED:
            sizes = [shard.meta["val"].nbytes * ranks for shard in node.args[0]]
            kind = Collective(
                CollectiveKind.ALL_GATHER, "g0", ranks, sum(sizes), "bfloat16", Role.PARAMETER, by_copy=True
            )
            numbers = tuple(range(len(storages), len(storages) + len(sizes)))
            storages += [Storage(number, size, node.name) for number, size in zip(numbers, sizes, strict=True)]
            found += [OpNode(shard.name, OpKind.INPUT, "input") for shard in node.args[0]]
            inputs = tuple(shard.name for shard in node.args[0])
            found.append(OpNode(node.name, OpKind.LAUNCH, "gather", inputs, numbers, collective=kind))
            node.meta["storages"] = numbers
        elif node.target in (_arrived, _read):
            launch = node.args[0]
            for number, storage in enumerate(launch.meta["storages"]):
                wait = f"{launch.name} wait {number}"
                if node.target is _arrived:
                    found.append(OpNode(wait, OpKind.WAIT, "wait", (launch.name,), (storage,), launch=launch.name))
                reads = Category.MATMUL if launch.meta["matmuls"] >> number & 1 else Category.OTHER
                found.append(OpNode(f"{node.name} {number}", OpKind.COMPUTE, "read", (wait,), category=reads))
    ordered = sorted(found, key=lambda op: op.kind is not OpKind.INPUT)
    return leases.leased(Program("graph", Phase.FORWARD, tuple(ordered), tuple(storages), {"g0": ranks}), ahead).leases


def _read(results: list[Tensor]) -> None:
    """Stands for what reads the results of a launch when they have been waited for."""


def _arrived(results: list[Tensor]) -> list[Tensor]:
    """Stands for ``wait_tensor`` on all results of a launch."""
    return results


def _tensor(graph: fx.Graph, number: int, index: int, rows: int) -> fx.Node:
    node = graph.placeholder(f"tensor_{number}_{index}")
    node.meta["val"] = torch.empty(rows, WIDTH, dtype=torch.bfloat16)
    return node


def data(node: fx.Node, rank: int, run: int) -> Tensor:
    """What a rank sends in one run of a graph."""
    _, number, index = node.name.split("_")
    generator = torch.Generator().manual_seed(10000 * run + 100 * int(number) + 10 * int(index) + rank)
    return torch.randn(node.meta["val"].shape, generator=generator).bfloat16()


Results = dict[tuple[int, int, str], Tensor]
"""(run, rank, name of what was sent) → the tensor that will hold what came of it."""


def issue(world: World, graph: fx.Graph, run: int) -> Results:
    """What each rank's host does for one run of a graph."""
    found: Results = {}
    for device in world.devices:
        world.here, rank, compute = device, device.rank, device.compute
        values: dict[fx.Node, Any] = {}
        for node in graph.nodes:
            if node.op == "placeholder":
                values[node] = data(node, rank, run)
            elif node.target is ops.GATHER_START_COALESCED:
                shards = [values[shard].float() for shard in node.args[0]]
                values[node] = copy_engine.start_gather(shards, torch.bfloat16, GROUP, Place.of(*node.args[-1]))
            elif node.target is ops.EXCHANGE_START_COALESCED:
                gradients = [values[gradient] for gradient in node.args[0]]
                values[node] = copy_engine.start_exchange(gradients, MEAN, GROUP, Place.of(*node.args[-1]))
            elif node.target is _arrived:
                for shard, result in zip(node.args[0].args[0], values[node.args[0]], strict=True):
                    result.arrival.wait()
                    found[run, rank, shard.name] = kept = torch.empty_like(result)
                    compute.add(partial(_copy, kept, result))
            elif node.target is _read:
                for shard, result in zip(node.args[0].args[0], values[node.args[0]], strict=True):
                    found[run, rank, f"{shard.name} later"] = kept = torch.empty_like(result)
                    compute.add(partial(_copy, kept, result))
            elif node.target is ops.EXCHANGE_FINISH:
                gradient = values[node.args[1]]
                name = node.args[1].name
                found[run, rank, name] = copy_engine.finish_exchange(gradient, MEAN, GROUP, Place.of(*node.args[-1]))
                # From here on a caching allocator may give the gradient's memory to somebody else.
                compute.add(partial(gradient.fill_, float("nan")))
    return found


def _copy(kept: Tensor, result: Tensor) -> None:
    kept.copy_(result)


def wrong(world: World, graph: fx.Graph, found: Results) -> list[str]:
    """Results that are not what the ranks' data say."""
    ranks = len(world.devices)
    gathered = {t for node in graph.nodes if node.target is ops.GATHER_START_COALESCED for t in node.args[0]}
    nodes = {node.name: node for node in graph.nodes if node.op == "placeholder"}
    complaints = []
    for (run, rank, what), result in found.items():
        name = what.removesuffix(" later")
        sent = [data(nodes[name], peer, run) for peer in range(ranks)]
        if nodes[name] in gathered:
            expected = torch.cat(sent)
        else:
            mine = [tensor.chunk(ranks)[rank].float() for tensor in sent]
            expected = sum(mine[1:], mine[0]) * (1.0 / ranks)
        if not torch.equal(result, expected):
            complaints.append(f"run {run}, rank {rank}: {what}")
    return complaints


def trial(enter: Callable[[World], None], ranks: int, seed: int, launches: int = 8) -> tuple[bool, list[str]]:
    """Whether one interleaving of two graphs, one of them twice, came to its end, and which results were wrong."""
    world = World(ranks)
    enter(world)
    first, second = program(seed, launches, ranks), program(seed + 1000, launches, ranks)
    runs = [(graph, issue(world, graph, run)) for run, graph in enumerate((first, first, second))]
    if not world.run(seed):
        return False, []
    return True, [complaint for graph, found in runs for complaint in wrong(world, graph, found)]


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("seed", range(25))
def test_every_interleaving_ends_with_the_right_numbers(enter: Any, ranks: int, seed: int) -> None:
    assert trial(enter, ranks, seed) == (True, [])


def test_all_words_are_put_back(enter: Any) -> None:
    world = World(3)
    enter(world)
    issue(world, program(0, 20, 3), 0)
    assert world.run(0)
    for direction in ("gather", "reduce"):
        assert not any(world.memory(direction, 2 * WORDS * 4 * 3, rank).tensor.any() for rank in range(3))


def failures(enter: Callable[[World], None]) -> int:
    return sum(trial(enter, 3, seed) != (True, []) for seed in range(25))


@pytest.mark.parametrize("missing", ["await_ready", "await_gone", "take", "tell_gone", "tell_ready"])
def test_no_word_is_said_or_heard_for_nothing(enter: Any, missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Channel, missing, lambda self, *args: None)
    assert failures(enter) > 0


@pytest.mark.parametrize("forgotten", ["every launch", "the first launch", "all but the first"])
def test_places_of_gradients_are_not_taken_before_they_are_free(
    enter: Any, forgotten: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    take = Channel.take

    def hasty(self: Channel, word: int, awaited: Any = ()) -> None:
        first = len(awaited) == WORDS
        forgets = {"every launch": True, "the first launch": first, "all but the first": not first}[forgotten]
        take(self, word, () if forgets else awaited)

    monkeypatch.setattr(Channel, "take", hasty)
    assert failures(enter) > 0


def test_places_of_gathers_are_not_taken_before_they_are_free(enter: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def hasty(shards: Any, dtype: torch.dtype, group: str, place: Place) -> Any:
        return start_gather(
            shards, dtype, group, Place(place.capacity_bytes, place.offset, place.word, (), place.final)
        )

    start_gather = copy_engine.start_gather
    monkeypatch.setattr(copy_engine, "start_gather", hasty)
    assert failures(enter) > 0


def test_some_gathers_lie_in_shared_memory_and_take_the_place_of_others(enter: Any) -> None:
    """Else the trials would say nothing of them."""
    enter(World(2))
    graphs = [program(seed, 8, 2) for seed in range(25)]
    places = [Place.of(*node.args[-1]) for graph in graphs for node in _gathers(graph)]
    displaced = [node.meta[rewrite_places.DISPLACED] for graph in graphs for node in _gathers(graph)]
    assert sum(place.final > 0 for place in places) > len(places) / 2
    assert sum(map(bool, displaced)) > len(places) / 10


def _gathers(graph: fx.Graph) -> list[fx.Node]:
    return [
        node
        for node in graph.nodes
        if node.target is ops.GATHER_START_COALESCED and rewrite_places.DISPLACED in node.meta
    ]


def test_a_place_is_not_taken_before_the_last_reader(enter: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Were a launch let in one launch too early, something would be read that is no more."""
    leave = leases._leave
    monkeypatch.setattr(leases, "_leave", lambda *args: [max(number - 1, 0) for number in leave(*args)])
    assert failures(enter) > 0


def test_a_gradient_whose_sum_stands_behind_the_launch_that_needs_its_place_is_an_error_and_no_deadlock(
    enter: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rewrite_places, "_sum_in_time", lambda launches, found: None)
    with pytest.raises(TransportError, match="still to be summed"):
        failures(enter)


def test_a_group_that_takes_another_ones_name_gets_channels_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    groups = [object()]
    monkeypatch.setattr(peers, "_channels", {})
    monkeypatch.setattr(peers, "_resolve_process_group", lambda name: groups[-1])
    monkeypatch.setattr(peers, "Channel", lambda name, device: types.SimpleNamespace(group=groups[-1]))
    here = torch.device("cpu")
    first = peers.channel("0", "gather", here)
    assert peers.channel("0", "gather", here) is first
    groups.append(object())
    assert peers.channel("0", "gather", here) is not first
