"""Plans in files: what was saved is what runs, and a file that is not for this graph, version, rank or world is refused."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

import overlap_pass
from overlap_pass import saved_plans
from overlap_pass.cost.hardware import load_hardware
from overlap_pass.errors import PlanError
from overlap_pass.graph.program import Program
from overlap_pass.memory.budget import Budget
from overlap_pass.planning import Plan, make_plan, replay
from overlap_pass.registry import parse
from overlap_pass.saved_plans import SavedPlans, pinned
from overlap_pass.schedule.launches import Launches
from overlap_pass.schedule.pinned import Pinned
from overlap_pass.schedule.verify import violations
from tests.pure.programs import fsdp_programs
from tests.pure.test_agreement import layers
from tests.pure.test_in_flight import two_branches
from tests.pure.test_strategies_promises import large

H100 = load_hardware("h100")
UNLIMITED = Budget.parse("unlimited")
MIB = 2**20


def planned(program: Program, strategy: str = "backward_pre{depth=2}", rules: Launches | None = None) -> Plan:
    return make_plan(program, H100, parse(strategy), UNLIMITED, launches=rules)


def there_and_back(program: Program, plan: Plan) -> Pinned:
    return Pinned.from_json(json.loads(json.dumps(pinned(program, plan).to_json())))


@pytest.mark.parametrize("strategy", ["latest_start", "greedy", "backward_post", "as_written", "fill_gaps"])
@pytest.mark.parametrize("rules", [Launches(8 * MIB), Launches("off", "priced"), Launches(most_in_flight=1)], ids=str)
@given(program=fsdp_programs())
@settings(max_examples=5, phases=[Phase.explicit, Phase.generate])
def test_a_saved_plan_is_the_plan(strategy: str, rules: Launches, program: Program) -> None:
    program = large(program)
    plan = planned(program, strategy, rules)
    again = replay(program, H100, UNLIMITED, there_and_back(program, plan))
    assert (again.schedule.order, again.coalesced) == (plan.schedule.order, plan.coalesced)
    assert (again.launch_lines, again.after.step_us) == (plan.launch_lines, plan.after.step_us)


def test_an_order_with_activation_collectives_let_loose_is_run_as_it_was_saved() -> None:
    program = two_branches()
    plan = planned(program, "fill_gaps", Launches("off", "free"))
    assert violations(program, plan.schedule.order) != ()
    assert replay(program, H100, UNLIMITED, there_and_back(program, plan)).schedule.order == plan.schedule.order


def test_the_plan_of_another_graph_is_refused() -> None:
    program, other = layers(10**12), layers(10**12, count=5)
    saved = SavedPlans(0, 2, (pinned(program, planned(program)),))
    with pytest.raises(PlanError, match=rf"program {other.digest[:12]} .* not among program {program.digest[:12]}"):
        saved.of(other)
    with pytest.raises(PlanError, match="it is of another graph"):
        replay(other, H100, UNLIMITED, saved.plans[0])


def test_one_number_of_the_graph_makes_it_another() -> None:
    program = layers(10**12)
    op = program.ops[-2]
    larger = replace(program, ops=(*program.ops[:-2], replace(op, read_bytes=op.read_bytes + 1), program.ops[-1]))
    with pytest.raises(PlanError, match="of other graphs"):
        SavedPlans(0, 2, (pinned(program, planned(program)),)).of(larger)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    program = layers(10**12)
    SavedPlans(1, 4, (pinned(program, planned(program)),)).save(tmp_path / "plans")
    SavedPlans(0, 4).save(tmp_path / "plans")
    return tmp_path / "plans"


def test_a_folder_holds_one_file_a_rank_and_nothing_else(folder: Path) -> None:
    assert sorted(path.name for path in folder.iterdir()) == ["rank-0-of-4.json", "rank-1-of-4.json"]
    program = layers(10**12)
    assert SavedPlans.load(folder, 1, 4).plans == (pinned(program, planned(program)),)


def test_the_plan_of_another_world_size_is_refused(folder: Path) -> None:
    with pytest.raises(PlanError, match=r"no plan in .*rank-1-of-2.json.*other numbers of ranks: rank-0-of-4.json"):
        SavedPlans.load(folder, 1, 2)
    (folder / "rank-1-of-4.json").rename(folder / "rank-1-of-2.json")
    with pytest.raises(PlanError, match=r"it is for rank 1 of 4, this is rank 1 of 2"):
        SavedPlans.load(folder, 1, 2)


def test_a_folder_without_plans_says_what_writes_them(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="write it by save_plan"):
        SavedPlans.load(tmp_path, 0, 2)


def test_the_plan_of_another_version_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saved_plans, "__version__", "99.0")
    with pytest.raises(PlanError, match=rf"overlap-pass {overlap_pass.__version__} wrote it .* this is 99.0"):
        SavedPlans.load(folder, 1, 4)


def test_plans_of_other_graphs_stay_where_one_is_saved_again() -> None:
    programs = [layers(10**12, count=count) for count in (2, 3)]
    saved = SavedPlans(0, 2, tuple(pinned(program, planned(program)) for program in programs))
    new = pinned(programs[0], planned(programs[0], "as_written"))
    assert saved.with_plans([new]).plans == (saved.plans[1], new)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"format": 1}', "__import__('os').abort()", "[" * 100_000])
def test_what_is_no_plan_is_one_error_that_names_the_file(folder: Path, text: str) -> None:
    path = folder / "rank-1-of-4.json"
    path.write_text(text)
    with pytest.raises(PlanError, match=r"rank-1-of-4\.json.*save it again"):
        SavedPlans.load(folder, 1, 4)


def places(data: Any, here: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place in a JSON value, as a path."""
    members = list(data.items()) if isinstance(data, dict) else list(enumerate(data)) if isinstance(data, list) else []
    return [here, *(place for key, value in members for place in places(value, (*here, key)))]


@given(data=st.data(), value=st.sampled_from((None, 7, -1, True, "", "../../etc", [], {}, ["ag0_0"], [["ag0_0"]])))
@settings(max_examples=60)
def test_no_damage_ends_in_anything_but_one_error_or_a_legal_order(data: st.DataObject, value: object) -> None:
    program = layers(10**12, count=2)
    content = copy.deepcopy(pinned(program, planned(program, "greedy", Launches(64 * MIB))).to_json())
    *way, last = data.draw(st.sampled_from(places(content)[1:]))
    member = content
    for key in way:
        member = member[key]
    if data.draw(st.booleans()) and isinstance(member, list):
        del member[last]
    else:
        member[last] = value
    try:
        plan = replay(program, H100, UNLIMITED, Pinned.from_json(content))
    except PlanError:
        return
    assert violations(plan.program, plan.schedule.order) == ()


def test_an_order_changed_by_hand_is_refused() -> None:
    program = layers(10**12)
    saved = pinned(program, planned(program, "as_written"))
    names = list(saved.schedule.order)
    first, second = (names.index(name) for name in ("ag0_0", "w0_0"))
    names[first], names[second] = names[second], names[first]
    with pytest.raises(PlanError, match="is illegal: w0_0 reads ag0_0 before it exists"):
        replay(program, H100, UNLIMITED, replace(saved, schedule=replace(saved.schedule, order=tuple(names))))


def test_a_legal_order_that_launches_otherwise_than_its_hash_says_is_refused() -> None:
    """It would hang with ranks that run what was saved."""
    program = layers(10**12)
    saved, other = (pinned(program, planned(program, strategy)) for strategy in ("as_written", "backward_pre{depth=2}"))
    with pytest.raises(PlanError, match="was changed: its launches are not those of its hash"):
        replay(program, H100, UNLIMITED, replace(other, launches=saved.launches))


def test_launches_that_must_stay_apart_are_not_joined_by_a_file() -> None:
    program = two_branches()
    saved = there_and_back(program, planned(program, "as_written"))
    joined = Pinned.from_json({**saved.to_json(), "joined": [["send_0", "send_1"]]})
    with pytest.raises(PlanError, match="send_0 cannot be joined"):
        replay(program, H100, UNLIMITED, joined)


def test_a_plan_above_the_budget_is_refused_with_both_numbers() -> None:
    program = layers(10**12)
    saved = pinned(program, planned(program, "greedy"))
    with pytest.raises(PlanError, match=r"holds .*MiB, more than memory_budget allows \(.*MiB\)"):
        replay(program, H100, Budget.parse("+0B"), saved)
