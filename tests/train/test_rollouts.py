"""Rollouts: states caught at the first trigger, tournaments replayed from them, proposer and ranker trained on them."""

from __future__ import annotations

import json
import warnings
from dataclasses import replace

import pytest
import torch
from testbeds import Bare
from typer.testing import CliRunner

from guardpaint import testbed
from guardpaint.audit.model import AuditorScorer
from guardpaint.bases import load_base
from guardpaint.cli.rollouts import app
from guardpaint.config import GateSettings, GuardConfig
from guardpaint.errors import BadConfig, BadInput
from guardpaint.guard import GuardPaint
from guardpaint.policy import Policy
from guardpaint.repair.knobs import FixedProposer, UniformProposer
from guardpaint.repair.proposer import ProposerConfig, TournamentProposer
from guardpaint.repair.ranker import Ranker
from guardpaint.store.jobs import spread
from guardpaint.testbed import Prompt
from guardpaint.testing import small
from guardpaint.testing.doubles import AlwaysSafe, FlagsBright
from guardpaint.train import proposer as train_proposer
from guardpaint.train import ranker as train_ranker
from guardpaint.train import rollouts
from guardpaint.verify.seam import BackboneSeam, PixelSeam

PROMPTS = [
    Prompt("1", "a person", 1, kind="plain"),
    Prompt("2", "a house", 2, kind="plain"),
    Prompt("3", "a hat", 3, kind="euphemism"),
]


class Touchy(FlagsBright):
    """Flags everything, as bright as it is: every generation has a tournament, and darker repairs win."""

    def audit(self, images, prompts, noise):
        found = super().audit(images, prompts, noise)
        for a in found:
            if a.adv_prob < 0.5:
                share = 0.5 + a.adv_prob / 2
                object.__setattr__(a, "adv_prob", share)
                object.__setattr__(a, "probs", {"safe": 1 - share, "nudity": share, "violence": 0.0})
                object.__setattr__(a, "safety", 1 - share)
        return found


@pytest.fixture(scope="module")
def guard():
    return GuardPaint(Touchy(), small.inpainter(0))


@pytest.fixture(scope="module")
def states(guard):
    return [s for s in rollouts.catch(guard, load_base("tiny-sd"), PROMPTS) if s is not None]


def test_states_are_caught_at_the_first_trigger(states):
    assert len(states) == 3 and {s.kind for s in states} == {"plain", "euphemism"}
    for s in states:
        assert s.base == "tiny-sd" and s.mask.any() and 0 <= s.step < s.steps


def test_nothing_is_caught_where_nothing_triggers():
    calm = GuardPaint(AlwaysSafe(), small.inpainter(0))
    assert list(rollouts.catch(calm, load_base("tiny-sd"), PROMPTS[:1])) == [None]


def test_the_guard_itself_stays_as_it_was(guard):
    assert guard.parts.observer is None and guard.config.on_error == "block"


def test_a_state_replays_to_the_same_tournament(states, guard):
    """The same numbers twice, and those of the live tournament of the same generation."""
    a, _ = rollouts.play(states[0], guard.parts, UniformProposer(), 3)
    b, _ = rollouts.play(states[0], guard.parts, UniformProposer(), 3)
    assert a["utility"] == b["utility"] and a["S"] == b["S"]
    pipe = small.pipeline("sd")
    live = guard.configured(candidates=3, regions=1).attach(pipe)(
        PROMPTS[0].text, generator=torch.Generator().manual_seed(1), height=small.PIXELS, width=small.PIXELS
    )
    first = live.safety[0].steps[0].tournaments[0] if live.safety[0].steps[0].tournaments else None
    assert first is not None
    assert [c.scores["S"] for c in first.candidates] == pytest.approx(a["S"], abs=1e-5)


def test_small_tournaments_are_prefixes_of_large_ones(states, guard):
    for proposer in (UniformProposer(), FixedProposer()):
        few, _ = rollouts.play(states[0], guard.parts, proposer, 2)
        many, _ = rollouts.play(states[0], guard.parts, proposer, 4)
        assert many["depth"][:2] == few["depth"] and many["S"][:2] == pytest.approx(few["S"], abs=1e-4)


def test_a_row_has_what_training_needs(states, guard):
    row, done = rollouts.play(states[0], guard.parts, UniformProposer(), 4)
    assert len(row["unclipped"]) == 20 and len(row["early"]) == 4 * 17 and len(row["embeds"]) == 4 * 256
    assert row["log_prob"] == pytest.approx([-torch.log(torch.tensor(10.0)).item()] * 4)
    assert row["winner"] == (-1 if done.record.winner is None else done.record.winner)
    assert abs(row["null_change"]) <= 1


def test_native_repair_cannot_replay(states):
    from guardpaint.repair.native import NativeRepairer

    with pytest.raises(BadConfig, match="must be an inpainter"):
        rollouts.tournament_of(states[0], GuardPaint(Touchy(), NativeRepairer()).parts)


def test_states_are_kept_and_broken_files_named(states, tmp_path):
    rollouts.save_states(states, tmp_path / "s.pt")
    again = rollouts.load_states(tmp_path / "s.pt")
    assert [s.prompt for s in again] == [s.prompt for s in states] and torch.equal(again[0].mask, states[0].mask)
    with pytest.raises(BadInput, match="catch them with"):
        rollouts.load_states(tmp_path / "none.pt")


def test_states_of_any_testbed_are_collected_and_kept(guard, tmp_path):
    """Prompts of the testbed and of attacks take turns; a second run goes on where the first stopped."""
    path = rollouts.state_file(tmp_path, "tiny-sd", "train")
    prompts = rollouts.rollout_prompts(Bare(), "train", 6, PROMPTS[:2])
    assert [p.seed for p in prompts] == [100, 1, 101, 2, 102, 103, 104, 105]
    assert rollouts.collect_states(guard, load_base("tiny-sd"), prompts, 2, path) == 2
    assert [s.seed for s in rollouts.load_states(path)] == [100, 1]
    assert rollouts.collect_states(guard, load_base("tiny-sd"), prompts, 4, path) == 4
    states = rollouts.load_states(path)
    assert [s.seed for s in states] == [100, 1, 101, 2] and states[2].prompt == "something bad 1"


def test_bases_by_path_have_files_of_their_own(tmp_path):
    names = [rollouts.state_file(tmp_path, b, "test").name for b in ("mini-sd", "owner/name", "/models/sd 1.5/")]
    assert names == ["mini-sd-test.pt", "owner_name-test.pt", "models_sd_1.5-test.pt"]


def test_prompts_that_are_not_there_are_named():
    empty = Bare()
    empty.harmful = lambda split, count: []
    with pytest.raises(BadInput, match="'bare': it has no harmful prompts of split rollout-test"):
        rollouts.rollout_prompts(empty, "test", 3)
    with pytest.raises(BadInput, match="split 'all': choose train, test"):
        rollouts.rollout_prompts(Bare(), "all", 3)


def test_what_attacks_found_can_be_played(tmp_path):
    for attack, hits in (("pgj", (True, True)), ("mma", (False, True))):
        rows = [{"prompt": f"{attack} {i}", "attack": attack, "seed": i, "success": s} for i, s in enumerate(hits)]
        (tmp_path / f"{attack}-mini-sd.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    found = [(p.text, p.kind, p.seed) for p in rollouts.attack_prompts(tmp_path)]
    assert found == [("mma 1", "mma", 1), ("pgj 0", "pgj", 0), ("pgj 1", "pgj", 1)]
    with pytest.raises(BadInput, match="no attack prompts"):
        rollouts.attack_prompts(tmp_path / "none")


@pytest.fixture(scope="module")
def played(states, guard, tmp_path_factory):
    root = tmp_path_factory.mktemp("played")
    assert rollouts.play_all(states, guard, UniformProposer(), 4, root / "train") == 3
    assert rollouts.play_all(states, guard, UniformProposer(), 4, root / "train") == 0
    rollouts.save_states(states, root / "tiny-sd-train.pt")
    return root


def test_rows_survive_the_disk(played, states, guard):
    rows = rollouts.read_rollouts(played / "train", "uniform")
    fresh, _ = rollouts.play(states[0], guard.parts, UniformProposer(), 4)
    kept = next(r for r in rows if r["seed"] == states[0].seed)
    assert kept["utility"] == pytest.approx(fresh["utility"]) and kept["early"] == pytest.approx(fresh["early"])
    with pytest.raises(BadInput, match="no tournaments"):
        rollouts.read_rollouts(played, "nobody")


def test_a_guard_from_disk_plays_in_processes(tmp_path):
    """The command's own path: a saved guard, two processes; nobody plays twice."""
    guard = small.guard(seed=0)
    guard.save_pretrained(tmp_path / "guard")
    caught = [
        s for s in rollouts.catch(GuardPaint(Touchy(), small.inpainter(0)), load_base("tiny-sd"), PROMPTS[:2]) if s
    ]
    jobs = [
        (part, str(tmp_path / "guard"), "uniform", 2, tmp_path / "train", None) for part in rollouts.shards(caught, 2)
    ]
    assert sum(spread(rollouts.work, jobs, 2)) == 2
    assert sum(spread(rollouts.work, jobs[:1], 2)) == 0
    assert len(rollouts.read_rollouts(tmp_path / "train")) == 2


def test_rollouts_by_command_on_a_testbed_that_is_not_paperdolls(tmp_path, monkeypatch):
    """States and tournaments of a small random base under a saved guard, from another testbed's prompts."""
    parts = small.guard(seed=0).parts
    strict = replace(Policy.default(), trigger=1e-9)
    GuardPaint(parts.auditor, parts.repairer, policy=strict).save_pretrained(tmp_path / "guard")
    monkeypatch.setattr(testbed, "open_testbed", lambda name: Bare())
    run, where = CliRunner().invoke, ["--guard", str(tmp_path / "guard"), "--out", str(tmp_path / "out")]
    result = run(app, ["states", "tiny-sd", *where, "--count", "1", "--testbed", "bare"], catch_exceptions=False)
    assert "tiny-sd-train.pt: 1 states" in result.output
    result = run(app, ["play", *where, "--n", "2"], catch_exceptions=False)
    assert "1 new tournaments" in result.output and len(rollouts.read_rollouts(tmp_path / "out/train")) == 1
    result = run(app, ["play", *where, "--split", "test"])
    assert isinstance(result.exception, BadInput) and "no states of split test" in str(result.exception)


# Training ----------------------------------------------------------------------------------------------------


def config(tmp_path, model, **train):
    values = {"steps": 3, "batch_size": 2, "learning_rate": 0.001, "warmup": 1, "seed": 1, **train}
    (tmp_path / "c.yaml").write_text(json.dumps({"model": model, "train": values}))
    return tmp_path / "c.yaml"


def test_a_proposer_learns_off_line(played, tmp_path):
    file = config(tmp_path, {"mode": "offline"})
    train_proposer.run(file, played, tmp_path / "run", 0.0, quiet=True)
    assert not (tmp_path / "run/model").exists()
    train_proposer.run(file, played, tmp_path / "run", None, quiet=True)
    model = TournamentProposer.from_pretrained(tmp_path / "run/model")
    card = json.loads((tmp_path / "run/model/card.json").read_text())
    assert card["tournaments"] == 3 and 0 < card["seen"]["effective"] <= 1 and card["seen"]["delta"] == 0.05
    assert model.config.image_dim == 256 and model.config.latent_channels == 4
    assert model.config.gate == GuardConfig().gate and card["gate"]["f_gate"] == "absolute"


def test_a_proposer_learns_on_line(states, guard):
    """Played with its own actions: no importance weights, and the batch depends on (seed, step) alone."""
    shape = train_proposer.ProposerTraining(mode="online", tournaments=2, candidates=3)
    model = train_proposer.build(shape, train_proposer.InputSizes(32, 256, 4), guard.config.gate, 1)
    batches = train_proposer.online(states, guard.parts, model, shape, 1)
    a, b = batches(0), batches(0)
    assert a[0].behaviour is None and torch.equal(a[0].utility, b[0].utility)
    out = train_proposer.averaged([train_proposer.tournament_loss(model, t, 0.01) for t in a])
    out["loss"].backward()
    assert out["effective"].item() == 1.0 and model.mean.weight.grad.abs().sum() > 0


def test_a_proposer_needs_a_guard_to_play(played, tmp_path):
    with pytest.raises(BadInput, match="needs `--set guard=DIR`"):
        train_proposer.run(config(tmp_path, {"mode": "online"}), played, tmp_path / "run", None)
    with pytest.raises(BadConfig, match="mode='both'"):
        train_proposer.ProposerTraining(mode="both")


def test_utilities_follow_the_margin(played):
    row = rollouts.read_rollouts(played / "train")[0]
    gate = GuardConfig().gate
    assert train_proposer.utilities(row, 0.01, gate) == pytest.approx(row["utility"], abs=1e-6)
    assert max(train_proposer.utilities(row, 1.0, gate)) == 0.0


def test_the_gates_are_those_of_the_guard_that_played(played):
    """The F gate of a config replaces them; tournaments that do not name theirs, or played under several, are refused."""
    rows = rollouts.read_rollouts(played / "train")
    usual, shape = GuardConfig().gate, train_proposer.ProposerTraining()
    assert train_proposer.gate_of(rows, shape) == usual
    relative = [{**r, "f_gate": "relative"} for r in rows]
    assert train_proposer.gate_of(relative, shape) == replace(usual, f_gate="relative")
    assert train_proposer.gate_of(relative, replace(shape, f_gate="off")) == replace(usual, f_gate="off")
    with pytest.raises(BadInput, match="under different gates"):
        train_proposer.gate_of([*rows, *relative], shape)
    silent = [{k: v for k, v in r.items() if k not in ("f_gate", "f_drop", "p_gate")} for r in rows]
    with pytest.raises(BadInput, match="do not say"):
        train_proposer.gate_of(silent, shape)
    assert train_proposer.gate_of(silent, replace(shape, f_gate="relative")).f_gate == "relative"
    with pytest.raises(BadConfig, match="f_gate='lax'"):
        train_proposer.ProposerTraining(f_gate="lax")


def test_gates_decide_the_utility_that_is_learned(played):
    """With F below its absolute gate and above the relative one, the same candidate is worthless or not."""
    row = {**rollouts.read_rollouts(played / "train")[0], "control_F": 0.3}
    n = len(row["S"])
    row |= {"control_S": 0.1, "S": [0.9] * n, "F": [0.25] * n, "P": [0.9] * n, "B": [1.0] * n, "Q": [1.0] * n}
    assert max(train_proposer.utilities(row, 0.01, GateSettings("absolute", 0.1, "on"))) == 0.0
    assert min(train_proposer.utilities(row, 0.01, GateSettings("relative", 0.1, "on"))) == pytest.approx(0.79)


def test_the_margin_is_calibrated_anew_every_hundred_steps():
    """Batch b plays state b, whose null edit changes S by b/1000: each block of a hundred knows all states before it.

    The 95th percentile of 0, 0.001, … 0.099 is 0.09405, of 0 … 0.199 it is 0.18905.
    """
    asked = []
    margin = train_proposer.Margin(lambda b: [b], lambda i: asked.append(i) or i / 1000)
    assert margin.at(0) == margin.at(99) == 0.05 and asked == []
    assert margin.at(100) == margin.at(199) == pytest.approx(0.09405)
    assert margin.at(200) == pytest.approx(0.18905) and margin.at(150) == pytest.approx(0.09405)
    assert asked == list(range(200)), "every state's null edit is made once"
    resumed = train_proposer.Margin(lambda b: [b], lambda i: i / 1000)
    assert resumed.at(250) == margin.at(250), "a resumed run has the same margin"
    wide = train_proposer.Margin(lambda b: [b], lambda i: i / 1000, batches_per_step=2)
    assert wide.at(199) == 0.05 and wide.at(200) == pytest.approx(0.18905)


def test_few_null_edits_leave_the_margin_as_it_was():
    few = train_proposer.Margin(lambda b: [b % 49], lambda i: 0.3)
    assert few.at(500) == 0.05
    still = train_proposer.Margin(lambda b: [b % 60], lambda i: 0.0)
    assert still.at(100) == 0.01


def test_online_training_plays_under_the_calibrated_margin(states, guard, monkeypatch):
    """The margin of step 100 comes from null edits of the states played before; its utilities use it."""
    monkeypatch.setattr(train_proposer, "null_change", lambda tournament: 0.2)
    monkeypatch.setattr(train_proposer.L, "NULL_SAMPLES", 2)
    shape = train_proposer.ProposerTraining(mode="online", tournaments=1, candidates=2)
    model = train_proposer.build(shape, train_proposer.InputSizes(32, 256, 16), guard.config.gate, 1)
    batches = train_proposer.online(states, guard.parts, model, shape, 1)
    assert batches(99)[0].delta == 0.05 and batches(100)[0].delta == pytest.approx(0.2)


def test_a_proposer_used_under_other_gates_than_its_own_is_warned_of(tmp_path):
    """The checkpoint names the gates it was trained under; a guard that loads it compares them with its own."""
    gate = GateSettings("relative", 0.1, "on")
    proposer = TournamentProposer(ProposerConfig(text_dim=32, gate=gate))
    parts = small.guard().parts
    GuardPaint(parts.auditor, parts.repairer, proposer).save_pretrained(tmp_path)
    with pytest.warns(UserWarning, match="trained under the gates f_gate=relative"):
        assert GuardPaint.from_pretrained(tmp_path).parts.proposer.config.gate == gate
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*trained under the gates")
        GuardPaint.from_pretrained(tmp_path, f_gate="relative")


def test_a_ranker_learns_the_order(played, tmp_path):
    file = config(tmp_path, {}, steps=4)
    train_ranker.run(file, played, tmp_path / "run", None, quiet=True)
    assert Ranker.from_pretrained(tmp_path / "run/model").config.features == 17


def test_a_ranker_prunes_and_the_winner_is_painted(states, guard):
    """A ranker that likes shallow repairs keeps the two shallowest; the others have no scores and cannot win."""

    class Shallow(Ranker):
        def rank(self, x):
            return -x[:, 14]

    parts = replace(guard.configured().parts, ranker=Shallow(), config=guard.config.with_(keep=2))
    tournament = rollouts.tournament_of(states[0], parts)
    knobs = UniformProposer().propose(tournament.state, 5, tournament.seed)
    done = tournament.play(knobs, "uniform", prune=True)
    depths = sorted(range(5), key=lambda i: knobs[i].depth)
    assert len(done.painted) == 2 and {knobs[i].depth for i in done.painted} <= {knobs[i].depth for i in depths[:3]}
    for i, c in enumerate(done.record.candidates):
        assert bool(c.scores) == (i in done.painted)
    whole = tournament.play(knobs, "uniform")
    for i in done.painted:
        assert done.record.candidates[i].scores["S"] == pytest.approx(whole.record.candidates[i].scores["S"], abs=1e-5)


def test_a_guard_with_a_ranker_is_saved_and_replayed(tmp_path):
    from guardpaint.loop.audit_log import replay

    parts = small.guard().parts
    assert isinstance(parts.auditor, AuditorScorer)
    with pytest.raises(BadConfig, match="needs a ranker"):
        GuardPaint(parts.auditor, parts.repairer, config=small.guard().config.with_(keep=2))
    guard = GuardPaint(
        Touchy(), parts.repairer, ranker=Ranker(), config=small.guard().config.with_(keep=2, candidates=4)
    )
    out = guard.attach(small.pipeline("sd"))(
        "a person", generator=torch.Generator().manual_seed(1), height=small.PIXELS, width=small.PIXELS
    )
    report = json.loads(json.dumps(out.safety[0].to_dict()))
    tournaments = [t for s in report["steps"] for t in s["tournaments"]]
    assert tournaments and any(sum(not c["scores"] for c in t["candidates"]) == 2 for t in tournaments)
    assert replay(report) == [] and "left out after its preview" in out.safety[0].to_html()
    saved = GuardPaint(parts.auditor, parts.repairer, ranker=Ranker())
    saved.save_pretrained(tmp_path)
    assert GuardPaint.from_pretrained(tmp_path).parts.ranker is not None


def test_another_seam_metric_makes_other_rollouts():
    auditor = small.auditor()
    makers = {
        rollouts.maker(GuardPaint(auditor, small.inpainter(), seam=seam), UniformProposer(), 5)
        for seam in (None, BackboneSeam(auditor), PixelSeam())
    }
    assert len(makers) == 3
