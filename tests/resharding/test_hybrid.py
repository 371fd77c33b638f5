"""The phases of a device process, with parts of known sizes in a memory that only counts."""

import pickle

import pytest

from hybridflow.errors import ModelError, PhaseError
from hybridflow.resharding.hybrid import GENERATION, TRAINING, Part, Phases, Slot

SIZES = {
    "kv_cache": (Slot.KV_CACHE, 64),
    "gradients": (Slot.GRADIENTS, 16),
    "parameters": (Slot.PARAMETERS, 8),
    "optimizer": (Slot.OPTIMIZER, 32),
    "weights": (Slot.ROLLOUT_WEIGHTS, 4),
    "reference": (Slot.OTHERS, 2),
}
TRAINED = {"gradients", "parameters", "optimizer", "reference"}


class Process:
    """Parts that come and go, one second each; a part named in ``fail`` raises once half of it is there."""

    def __init__(self, names=tuple(SIZES)):
        self.bytes = dict.fromkeys(names, 0)
        self.seconds, self.moves, self.held_at_moves, self.fail = 0.0, [], [], {}
        self.phases = Phases(lambda: sum(self.bytes.values()) << 30, lambda: None, lambda: self.seconds)
        for name in names:
            slot, size = SIZES[name]
            self.bytes[name] = size
            self.phases.add(Part(name, slot, lambda n=name: self.move(n, 0), lambda n=name, s=size: self.move(n, s)))

    @property
    def held(self):
        return {name for name, size in self.bytes.items() if size}

    def move(self, name, size):
        self.moves.append(f"{'+' if size else '-'}{name}")
        self.seconds += 1
        if self.fail.get(name):
            self.bytes[name] = SIZES[name][1] // 2
            raise self.fail[name].pop()
        self.bytes[name] = size
        self.held_at_moves.append(self.held)


@pytest.fixture
def process():
    process = Process()
    process.phases.enter(TRAINING)
    process.moves.clear()
    process.held_at_moves.clear()
    return process


def test_a_new_process_trains_and_lets_go_of_what_generation_needs():
    process = Process()
    process.phases.enter(TRAINING)
    assert process.moves == ["-kv_cache", "-weights"] and process.held == TRAINED


def test_the_order_of_a_change_is_that_of_the_slots_and_backwards(process):
    process.phases.enter(GENERATION)
    assert process.moves == ["-gradients", "-optimizer", "-reference", "+weights", "-parameters", "+kv_cache"]
    assert process.held == {"weights", "kv_cache"} and process.phases.phase == GENERATION
    process.moves.clear()
    process.phases.enter(TRAINING)
    assert process.moves == ["-kv_cache", "+parameters", "-weights", "+reference", "+optimizer", "+gradients"]
    assert process.held == TRAINED and process.phases.phase == TRAINING


def test_both_weights_never_meet_optimizer_or_cache(process):
    for phase in (GENERATION, TRAINING, GENERATION):
        process.phases.enter(phase)
    for held in process.held_at_moves:
        assert not {"weights", "parameters"} <= held or not held & {"optimizer", "gradients", "kv_cache"}


def test_staying_in_a_phase_moves_nothing(process):
    process.phases.enter(TRAINING)
    assert process.moves == [] and process.phases.drain()["phase/training/seconds"] == 2  # of the first entry


def test_a_part_that_is_not_registered_stays():
    process = Process(("weights", "kv_cache"))
    process.bytes["optimizer"] = 32
    process.phases.enter(GENERATION)
    assert process.moves == [] and process.phases.phase == GENERATION
    with pytest.raises(ValueError, match="part 'weights' exists already"):
        process.phases.add(Part("weights", Slot.ROLLOUT_WEIGHTS, lambda: None, lambda: None))


def test_memory_is_given_back_only_where_parts_come_and_go():
    trimmed, restored = [], []
    phases = Phases(trim=lambda: trimmed.append(1))
    phases.add(Part("weights", Slot.ROLLOUT_WEIGHTS, None, lambda: restored.append(1)))
    for phase in (TRAINING, GENERATION, TRAINING, GENERATION):
        phases.enter(phase)
    assert (len(restored), trimmed) == (2, [])
    phases.add(Part("gradients", Slot.GRADIENTS, lambda: None, lambda: None))
    phases.enter(GENERATION)
    assert len(trimmed) == 2  # before the change, and once the gradients are gone


def test_changes_are_timed_and_weighed_until_they_are_told(process):
    process.phases.drain()
    process.phases.enter(GENERATION)
    process.phases.enter(TRAINING)
    process.phases.enter(GENERATION)
    found = process.phases.drain()
    assert found["phase/generation/seconds"] == 12 and found["phase/training/seconds"] == 6
    assert (found["phase/generation/before_gb"], found["phase/generation/after_gb"]) == (58, 68)
    assert (found["phase/training/before_gb"], found["phase/training/after_gb"]) == (68, 58)
    assert found["phase/generation/optimizer/gb"] == -32 and found["phase/generation/kv_cache/gb"] == 64
    assert found["phase/generation/kv_cache/seconds"] == 2 and found["phase/training/kv_cache/gb"] == -64
    assert process.phases.drain() == {}


def test_a_part_that_cannot_be_restored_leaves_a_named_state_from_which_the_next_call_goes_on(process):
    process.fail = {"kv_cache": [MemoryError("out of memory")]}
    with pytest.raises(PhaseError) as caught:
        process.phases.enter(GENERATION)
    assert str(caught.value) == (
        "stopped while entering generation, restoring kv_cache: MemoryError: out of memory. The next call goes on from "
        "there. If it is memory that is missing, start again with a smaller rollout.kv_cache_gb, smaller micro-batches "
        "or more in memory.offload."
    )
    assert str(process.phases) == "stopped while entering generation, restoring kv_cache"
    assert process.phases.phase == "" and pickle.loads(pickle.dumps(caught.value)).state == caught.value.state
    process.moves.clear()
    process.phases.enter(GENERATION)
    assert process.moves == ["+kv_cache"] and str(process.phases) == "generation"


def test_the_other_phase_can_be_entered_after_a_failure_and_takes_back_what_was_half_done(process):
    process.fail = {"weights": [ModelError("nobody holds model.norm.weight[0:4]")]}
    with pytest.raises(ModelError, match="nobody holds"):  # our own errors say what to do
        process.phases.enter(GENERATION)
    assert process.bytes["weights"] == 2 and "stopped while entering generation" in str(process.phases)
    process.moves.clear()
    process.phases.enter(TRAINING)
    assert process.moves == ["-weights", "+reference", "+optimizer", "+gradients"] and process.held == TRAINED


def test_failing_twice_at_one_place_says_so(process):
    process.fail = {"optimizer": [OSError("disk full"), OSError("disk full")]}
    for fix in ("The next call goes on from there.", "It stopped there the last time too: start again from the last"):
        with pytest.raises(PhaseError, match="entering generation, releasing optimizer: OSError: disk full.*" + fix):
            process.phases.enter(GENERATION)
