"""``overlap_pass.verify`` around the measuring: what it applies, what it refuses, what it says of the environment."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import overlap_pass
from overlap_pass.errors import EnvironmentRefused, OptionError
from overlap_pass.planning import make_plan
from overlap_pass.profiling import verify as verifying
from overlap_pass.profiling.environment import concerns
from overlap_pass.profiling.measure import Measurement
from overlap_pass.profiling.plans import announce, recorded_plans
from overlap_pass.profiling.variants import Variant, scheduled
from overlap_pass.report.verification import Measured, SystemKind


class _Applied:
    """A variant that notes what it was applied to."""

    def __init__(self, name: str, kind: SystemKind) -> None:
        self.models: list[nn.Module] = []
        self.variant = Variant(name, self._prepare, kind)

    def _prepare(self, model: nn.Module) -> nn.Module:
        self.models.append(model)
        return model


@pytest.fixture
def systems(monkeypatch):
    """A baseline and a schedule; how long their steps take is for the test to say."""
    baseline = _Applied("as-written", SystemKind.BASELINE)
    ours = _Applied("overlap", SystemKind.SCHEDULED)
    monkeypatch.setattr(verifying, "check_environment", lambda rehearsal: torch.device("cpu"))
    monkeypatch.setattr(verifying, "setting", lambda effort, options: ())
    monkeypatch.setattr(verifying, "scheduled", lambda options: ours.variant)

    def verify(baseline_us: float, ours_us: float, **arguments: Any):
        def measure(make_step: Any, variants: Any, *_: Any, **__: Any) -> Measurement:
            taken = [((us,),) * 6 for us in (baseline_us, ours_us)]
            found = zip(variants, taken, strict=True)
            return Measurement(tuple(Measured(one.name, one.kind, blocks, 1, 1) for one, blocks in found), (), ())

        monkeypatch.setattr(verifying, "measure", measure)
        return overlap_pass.verify(lambda: None, against=[baseline.variant], **arguments)

    return verify, baseline, ours


def test_the_schedule_is_applied_to_the_model_where_it_is_faster(systems) -> None:
    verify, baseline, ours = systems
    model = nn.Linear(2, 2)
    assert verify(100.0, 90.0, apply="if_faster", model=model).kept == "overlap"
    assert (baseline.models, ours.models) == ([], [model])


def test_the_baseline_is_applied_where_the_schedule_is_not_faster(systems) -> None:
    verify, baseline, ours = systems
    model = nn.Linear(2, 2)
    assert verify(100.0, 110.0, apply="if_faster", model=model).kept == "as-written"
    assert (baseline.models, ours.models) == ([model], [])


def test_nothing_is_applied_unless_asked(systems) -> None:
    verify, baseline, ours = systems
    assert verify(100.0, 90.0).keep
    assert baseline.models == ours.models == []


def test_a_report_of_a_rehearsal_says_first_that_its_times_mean_nothing(systems) -> None:
    verify, *_ = systems
    assert "rehearsal on CPUs" in verify(100.0, 90.0, effort=verifying.Effort(rehearsal=True)).warnings[0]


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_without_a_gpu_only_a_rehearsal_goes_on_to_look_for_ranks() -> None:
    with pytest.raises(EnvironmentRefused, match="--rehearse"):
        verifying.check_environment()
    with pytest.raises(EnvironmentRefused, match="process group"):
        verifying.check_environment(rehearsal=True)


@pytest.mark.parametrize(
    "arguments", [{"apply": "always", "model": nn.Linear(1, 1)}, {"apply": "if_faster"}, {"model": 1}]
)
def test_a_model_and_what_to_do_with_it_belong_together(systems, arguments) -> None:
    verify, *_ = systems
    with pytest.raises(OptionError, match="write apply='if_faster' together with model="):
        verify(1.0, 1.0, **arguments)


def test_preparing_a_model_compiles_it_in_place() -> None:
    """Code that holds the model already runs the chosen order: nothing is wrapped."""
    from tests.cpu.models import sharded_llama
    from tests.cpu.ranks import fake_ranks

    with fake_ranks(2):
        model = sharded_llama()
        assert scheduled({}).prepare(model) is model
        assert model._compiled_call_impl is not None
        assert overlap_pass.is_traceable(model)


@pytest.mark.parametrize(
    ("variable", "value", "words"),
    [
        ("CUDA_DEVICE_MAX_CONNECTIONS", "1", "share one hardware queue"),
        ("CUDA_LAUNCH_BLOCKING", "1", "nothing overlaps"),
        ("TORCH_NCCL_AVOID_RECORD_STREAMS", "0", "given back late"),
        ("NCCL_P2P_DISABLE", "1", "through host memory"),
    ],
)
def test_settings_that_speak_against_overlap_are_named_with_their_effect(variable, value, words) -> None:
    (found,) = concerns({variable: value})
    assert found.startswith(f"{variable}={value}: ")
    assert words in found
    assert concerns({variable: "other"}) == ()


def test_plans_are_heard_of_only_while_somebody_listens() -> None:
    from overlap_pass.cost.hardware import load_hardware
    from overlap_pass.memory.budget import Budget
    from overlap_pass.registry import parse
    from tests.pure.programs import Builder

    build = Builder()
    weight = build.wait("weight", build.all_gather("gather", build.input("shard", 64, held=True), 128))
    program = build.output(build.compute("mm", weight, size_bytes=8, flops=10))
    plan = make_plan(program, load_hardware("h200"), parse("as_written"), Budget.parse("unlimited"))
    with recorded_plans() as heard:
        announce(plan)
    announce(plan)
    assert heard == [plan]
