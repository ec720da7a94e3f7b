"""Definitions of causes, each on a trace drawn in the test: who is late, who waits, what the CPU was at."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from overlap_pass.traces.analyse import analyse
from overlap_pass.traces.capture import read_trace
from overlap_pass.traces.causes import ExposedCause, IdleCause
from overlap_pass.traces.collectives import Match, Transport
from overlap_pass.traces.figures import Analysis, StepFigures
from overlap_pass.traces.ranks import RankCollective, find_waits
from tests.pure.drawn_traces import GEMM, NCCL, Trace


def of(folder: Path, trace: Trace) -> StepFigures:
    return analyse([read_trace(trace.write(folder / "trace.json"))]).devices[0].step


def exposed_us(step: StepFigures) -> dict[str, float]:
    return {cause.value: time / 1000 for cause, time in step.exposed.items() if time}


def idle_us(step: StepFigures) -> dict[str, float]:
    return {cause.value: time / 1000 for cause, time in step.idle.items() if time}


# -- exposed ----------------------------------------------------------------------------------------------------------


def test_exposed_time_is_late_before_the_next_kernels_launch_and_blocked_behind_it(tmp_path: Path) -> None:
    """
    ::

        CPU                       │30
        stream 20   ▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒ 0–50
        stream 7                          ███ 50–60
    """
    step = of(tmp_path, Trace().kernel(NCCL, 0, 0, 50).kernel(GEMM, 30, 50, 60))
    assert exposed_us(step) == {"late": 30, "blocked": 20}
    assert step.reorderable_ns == 20_000


def test_a_kernel_launched_before_the_collective_makes_all_of_it_blocked(tmp_path: Path) -> None:
    step = of(tmp_path, Trace().kernel(NCCL, 1, 10, 50).kernel(GEMM, 2, 50, 60))
    assert exposed_us(step) == {"blocked": 40}


def test_a_kernel_launched_after_the_collective_makes_all_of_it_late(tmp_path: Path) -> None:
    step = of(tmp_path, Trace().kernel(NCCL, 1, 10, 50).kernel(GEMM, 55, 60, 70))
    assert exposed_us(step) == {"late": 40}
    assert step.reorderable_ns == 0


def test_without_a_next_kernel_or_its_launch_the_cause_is_not_known(tmp_path: Path) -> None:
    step = of(tmp_path, Trace().kernel(NCCL, 1, 10, 50).kernel(GEMM, None, 50, 60).kernel(NCCL, 51, 70, 90))
    assert exposed_us(step) == {"unknown": 60}


def test_a_collective_on_the_stream_that_computes_cannot_be_reordered(tmp_path: Path) -> None:
    step = of(tmp_path, Trace().kernel(NCCL, 0, 10, 50, stream=7).kernel(GEMM, 1, 50, 60))
    assert exposed_us(step) == {"blocked": 40}
    assert step.reorderable_ns == 0
    assert [row.shares_lane for row in step.collectives] == [True]


def test_kernels_of_a_cuda_graph_share_its_launch(tmp_path: Path) -> None:
    graph = {"correlation": 77, "call": "cudaGraphLaunch"}
    trace = (
        Trace()
        .kernel(GEMM, 5, 10, 20, **graph)
        .kernel(NCCL, None, 20, 40, correlation=77)
        .kernel(GEMM, None, 40, 50, correlation=77)
    )
    device = analyse([read_trace(trace.write(tmp_path / "trace.json"))]).devices[0]
    assert exposed_us(device.step) == {"blocked": 20}
    assert (device.coverage.graphs, device.coverage.unlinked) == (3, 0)


def test_streams_of_a_graph_with_branches_are_only_numbers(tmp_path: Path) -> None:
    """The branch of the collective has the number of compute that ran before it; another branch runs beside it."""
    graph = {"correlation": 77, "call": "cudaGraphLaunch"}

    def step(second_stream: int) -> StepFigures:
        trace = (
            Trace()
            .kernel(GEMM, 5, 10, 20, **graph)
            .kernel(NCCL, None, 20, 40, stream=7, correlation=77)
            .kernel(GEMM, None, 25, 30, stream=second_stream, correlation=77)
            .kernel(GEMM, None, 40, 50, stream=7, correlation=77)
        )
        return of(tmp_path, trace)

    branching, straight = step(8), step(7)
    assert [row.shares_lane for row in branching.collectives] == [False]
    assert branching.reorderable_ns == 15_000
    assert [row.shares_lane for row in straight.collectives] == [True]
    assert straight.reorderable_ns == 0


# -- idle -------------------------------------------------------------------------------------------------------------


def gap(*cpu: tuple[str, float, float], launch: float = 100, start: float = 104) -> Trace:
    """Idle from 10 to ``start`` µs; the kernel behind it is launched at ``launch``."""
    trace = Trace().kernel(GEMM, 0, 0, 10).kernel(GEMM, launch, start, start + 10)
    for name, begin, end in cpu:
        if name.startswith("cuda"):
            trace.call(name, begin, end)
        else:
            trace.cpu(name, begin, end)
    return trace


@pytest.mark.parametrize(
    ("trace", "causes"),
    [
        (gap(), {"untraced": 90, "latency": 4}),
        (gap(start=140), {"untraced": 90, "queued": 40}),
        (gap(("aten::mm", 20, 100)), {"dispatch": 80, "untraced": 10, "latency": 4}),
        (gap(("cudaStreamSynchronize", 10, 60), ("aten::item", 5, 100)), {"sync": 50, "dispatch": 40, "latency": 4}),
        (gap(("cudaMalloc", 30, 50)), {"allocator": 20, "untraced": 70, "latency": 4}),
        (gap(("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", 10, 90), ("aten::stack", 20, 30)), {"loader": 80, "untraced": 10, "latency": 4}),
        # A call that waits inside the DataLoader is the call's.
        (gap(("enumerate(DataLoader)#x.__next__", 10, 90), ("cudaMemcpy", 40, 60)), {"loader": 60, "sync": 20, "untraced": 10, "latency": 4}),
    ],
)  # fmt: skip
def test_an_empty_queue_is_the_launching_threads_and_a_full_one_is_not(
    tmp_path: Path, trace: Trace, causes: dict[str, float]
) -> None:
    step = of(tmp_path, trace)
    assert idle_us(step) == causes
    assert step.stats.idle_ns == sum(step.idle.values())


def test_a_range_around_everything_is_no_op(tmp_path: Path) -> None:
    assert idle_us(of(tmp_path, gap().cpu("## forward ##", 0, 200, cat="user_annotation"))) == {
        "untraced": 90,
        "latency": 4,
    }


def test_what_another_thread_does_is_no_cause(tmp_path: Path) -> None:
    trace = gap()
    trace.cpu("aten::mm", 10, 100)
    trace.rows[-1]["tid"] = 902
    assert idle_us(of(tmp_path, trace)) == {"untraced": 90, "latency": 4}


def test_a_synchronising_call_is_named_with_its_op_and_the_users_line(tmp_path: Path) -> None:
    trace = gap(("cudaStreamSynchronize", 20, 60), ("aten::_local_scalar_dense", 15, 65))
    trace.cpu("train.py(42): step", 0, 90, cat="python_function")
    trace.cpu("torch/_tensor.py(10): item", 12, 70, cat="python_function")
    (sync,) = of(tmp_path, trace).syncs
    assert (sync.call, sync.op, sync.code, sync.count, sync.idle_ns) == (
        "cudaStreamSynchronize", "aten::_local_scalar_dense", "step (train.py:42)", 1, 40_000,
    )  # fmt: skip


# -- collectives ------------------------------------------------------------------------------------------------------


def test_the_module_of_a_collective_is_that_of_the_fsdp_hook_that_launched_it(tmp_path: Path) -> None:
    trace = Trace().kernel(NCCL, 5, 10, 20).kernel(GEMM, 6, 20, 30).kernel(NCCL, 45, 50, 60)
    trace.cpu("FSDP::pre_forward (layers.3)", 0, 9, cat="user_annotation").cpu(
        "FSDP::all_gather (layers.4)", 3, 8, cat="user_annotation"
    )
    trace.cpu("FSDP::all_gather", 40, 48, cat="user_annotation")
    assert [row.stats.unit for row in of(tmp_path, trace).collectives] == ["layers.4", "(root)"]


def test_copies_into_and_out_of_buffers_are_compute_and_counted_as_helpers(tmp_path: Path) -> None:
    trace = Trace().kernel("split_with_sizes_copy", 5, 10, 20).kernel(GEMM, 30, 35, 45)
    trace.cpu("FSDP::all_gather_copy_out (layers.4)", 3, 8, cat="user_annotation")
    step = of(tmp_path, trace)
    assert (step.stats.compute_ns, step.helper_ns) == (20_000, 10_000)


@pytest.mark.parametrize(
    ("kernel", "transport"),
    [
        (NCCL, Transport.RING),
        ("ncclDevKernel_AllReduce_Sum_f32_TREE_LL(x)", Transport.TREE),
        ("ncclDevKernel_AllReduce_Sum_f32_NVLS_SIMPLE(x)", Transport.SWITCH),
        ("ncclSymkDevKernel_AllGather_STMC(x)", Transport.SYMMETRIC),
        ("ncclDevKernel_SendRecv(x)", Transport.PEER),
        ("ncclDevKernel_Generic_1(x)", Transport.KERNEL),
    ],
)
def test_what_moves_the_bytes_is_read_off_the_kernel(tmp_path: Path, kernel: str, transport: Transport) -> None:
    step = of(tmp_path, Trace().kernel(kernel, 1, 10, 20).kernel(GEMM, 2, 20, 30))
    assert [row.transport for row in step.collectives] == [transport]


def test_a_copy_that_a_collective_issues_is_moved_by_the_copy_engine(tmp_path: Path) -> None:
    trace = Trace().kernel("Memcpy PtoP (Device -> Device)", 5, 10, 20, stream=20).kernel(GEMM, 30, 35, 45)
    step = of(tmp_path, trace.cpu("c10d::_allgather_base_", 3, 8))
    assert [(row.transport, row.stats.collective) for row in step.collectives] == [
        (Transport.COPY_ENGINE, "all_gather")
    ]


# -- merged files -----------------------------------------------------------------------------------------------------


def test_ranks_merged_into_one_file_keep_their_own_launches_though_correlations_repeat(tmp_path: Path) -> None:
    """Two processes use the numbers 1 and 2; one's kernels are launched late, the other's early."""
    first = Trace().kernel(NCCL, 0, 10, 50, device=0).kernel(GEMM, 2, 50, 60, device=0)
    second = Trace().kernel(NCCL, 0, 10, 50, device=1).kernel(GEMM, 49, 50, 60, device=1)
    # Numbers of their own, by which each device finds its process.
    first.kernel(GEMM, 70, 75, 80, device=0, correlation=500)
    second.kernel(GEMM, 70, 75, 80, device=1, correlation=600)
    for row in second.rows:
        if row["cat"] == "cuda_runtime":
            row["pid"] = 950
    merged = Trace()
    merged.rows = first.rows + second.rows
    analysis = analyse([read_trace(merged.write(tmp_path / "trace.json"))])
    assert [exposed_us(device.step) for device in analysis.devices] == [{"blocked": 40}, {"late": 39, "blocked": 1}]
    assert analysis.devices[0].coverage.repeated == 2


# -- ranks ------------------------------------------------------------------------------------------------------------


def ranks(folder: Path, *traces: Trace, **document: Any) -> Analysis:
    paths = [
        trace.write(folder / f"rank{r}.json", distributedInfo={"rank": r, "world_size": len(traces)}, **document)
        for r, trace in enumerate(traces)
    ]
    return analyse([read_trace(path) for path in paths])


def test_a_rank_that_starts_early_waits_and_the_rest_is_transfer(tmp_path: Path) -> None:
    early = Trace().kernel(GEMM, 0, 0, 10).kernel(NCCL, 1, 10, 60).kernel(GEMM, 2, 60, 70)
    late = Trace().kernel(GEMM, 0, 0, 40).kernel(NCCL, 1, 40, 60).kernel(GEMM, 2, 60, 70)
    analysis = ranks(tmp_path, early, late)
    assert [(d.step.wait_ns, d.step.exposed_wait_ns, d.step.exposed_transfer_ns) for d in analysis.devices] == [
        (30_000, 30_000, 20_000),
        (0, 0, 20_000),
    ]
    assert analysis.late_ns == (0, 30_000)
    # What waits for a rank, no order of collectives can save.
    assert [device.step.reorderable_ns for device in analysis.devices] == [20_000, 20_000]


def test_times_of_different_bases_are_compared_on_one_clock(tmp_path: Path) -> None:
    first = (
        Trace()
        .kernel(NCCL, 0, 10, 60)
        .kernel(GEMM, 2, 60, 70)
        .write(tmp_path / "rank0.json", baseTimeNanoseconds=1_000_000)
    )
    second = Trace().kernel(NCCL, 900, 1030, 1060).kernel(GEMM, 901, 1060, 1070).write(tmp_path / "rank1.json")
    analysis = analyse([read_trace(first), read_trace(second)])
    assert [device.step.wait_ns for device in analysis.devices] == [20_000, 0]
    assert analysis.offsets_ns == (0, 0)


def test_clocks_of_different_hosts_are_laid_together_by_the_ends(tmp_path: Path) -> None:
    first = Trace().kernel(NCCL, 0, 10, 60).kernel(GEMM, 2, 60, 70)
    second = Trace().kernel(NCCL, 90_000, 90_030, 90_060).kernel(GEMM, 90_001, 90_060, 90_070)
    analysis = ranks(tmp_path, first, second)
    assert analysis.offsets_ns == (0, -90_000_000)
    assert [device.step.wait_ns for device in analysis.devices] == [20_000, 0]


def test_one_trace_does_not_tell_waiting_from_transfer(tmp_path: Path) -> None:
    step = of(tmp_path, Trace().kernel(NCCL, 0, 10, 60).kernel(GEMM, 2, 60, 70))
    assert (step.wait_ns, step.exposed_wait_ns, step.collectives[0].wait_ns) == (None, None, None)


def seen(group: str, start: int, sequence: int | None = None) -> RankCollective:
    return RankCollective(None, Match(group, "all_gather", sequence), start, start + 100)


def test_numbers_match_what_order_would_not() -> None:
    """Rank 1's trace begins one collective later."""
    waits = find_waits([[seen("g", 0, 1), seen("g", 1000, 2)], [seen("g", 1030, 2)]])
    assert waits.waits_ns == ((None, 30), (0,))
    assert waits.unmatched == 1


def test_the_id_that_newer_traces_write_matches_before_anything_else(tmp_path: Path) -> None:
    """Rank 0's trace holds one collective more, so that order would match the wrong two."""
    first = Trace().kernel(NCCL, 0, 10, 20, **{"Collective name": "_allgather_base", "Comms Id": 2**63, "Seq": 1})
    first.kernel(NCCL, 21, 30, 60, **{"Collective name": "_allgather_base", "Comms Id": 2**63 + 9, "Seq": 2}).kernel(
        GEMM, 22, 60, 70
    )
    second = Trace().kernel(NCCL, 21, 40, 60, **{"Collective name": "_allgather_base", "Comms Id": 2**63 + 9, "Seq": 2})
    analysis = ranks(tmp_path, first, second.kernel(GEMM, 22, 60, 70))
    assert [[row.wait_ns for row in device.step.collectives] for device in analysis.devices] == [[None, 10_000], [0]]


def test_without_numbers_unequal_counts_match_nothing() -> None:
    waits = find_waits([[seen("g", 0), seen("g", 1000)], [seen("g", 1030)]])
    assert waits.waits_ns == ((None, None), (None,))


def test_groups_are_apart() -> None:
    waits = find_waits([[seen("tp 0", 0)], [seen("tp 0", 40)], [seen("tp 1", 7)], [seen("tp 1", 9)]])
    assert waits.waits_ns == ((40,), (0,), (2,), (0,))


# -- sums -------------------------------------------------------------------------------------------------------------


@given(
    st.lists(
        st.tuples(
            st.sampled_from([GEMM, NCCL, "Memcpy HtoD"]), st.integers(0, 400), st.integers(0, 60), st.integers(1, 50)
        ),
        min_size=1,
        max_size=25,
    )
)
def test_causes_add_up_to_what_they_explain_and_parts_to_the_step(
    tmp_path_factory: pytest.TempPathFactory, events: list[tuple[str, int, int, int]]
) -> None:
    trace = Trace()
    for name, launch, delay, length in events:
        trace.kernel(name, launch, launch + delay, launch + delay + length)
    step = of(tmp_path_factory.mktemp("sums"), trace)
    stats = step.stats
    assert sum(step.exposed[cause] for cause in ExposedCause) == stats.exposed_ns
    assert sum(step.idle[cause] for cause in IdleCause) == stats.idle_ns
    assert stats.compute_ns + stats.exposed_ns + stats.exposed_copy_ns + stats.idle_ns == stats.step_ns
    assert step.reorderable_ns <= step.exposed[ExposedCause.BLOCKED]
    assert sum(sync.idle_ns for sync in step.syncs) == step.idle[IdleCause.SYNC]
