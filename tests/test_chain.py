"""Several optimizers as one: everything that takes an optimizer takes a chain, with the numbers of its parts."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from torch.optim import lr_scheduler

import offbeat
from tests.ranks import run_ranks


def model():
    torch.manual_seed(3)
    return torch.nn.Sequential(
        torch.nn.Linear(6, 8), torch.nn.LayerNorm(8), torch.nn.ReLU(), torch.nn.Linear(8, 8), torch.nn.Linear(8, 3)
    )


def parts(module, *, torchs=False):
    split = offbeat.split_parameters(module)
    adamw = torch.optim.AdamW if torchs else offbeat.AdamW
    return [offbeat.Muon(split.matrices, lr=0.05), adamw(split.rest, lr=0.01)]


def chain(module, **options):
    return offbeat.Chain(parts(module, **options))


def loss_of(module, step, rank=0, scale=1.0):
    generator = torch.Generator().manual_seed(100 * rank + step)
    x, y = torch.randn(5, 6, generator=generator), torch.randn(5, 3, generator=generator)
    return (module(x) - y).square().mean() * scale


def same(a, b):
    return all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))


@pytest.mark.parametrize("torchs", [False, True], ids=["ours", "with torch.optim's"])
def test_a_step_is_the_steps_of_its_parts(torchs):
    one, two = model(), model()
    optimizer, others = chain(one, torchs=torchs), parts(two, torchs=torchs)
    calls = []
    for step in range(4):

        def closure():
            calls.append(torch.is_grad_enabled())
            optimizer.zero_grad()
            loss = loss_of(one, step)
            loss.backward()
            return loss

        loss = optimizer.step(closure)
        for other in others:
            other.zero_grad()
        expected = loss_of(two, step)
        expected.backward()
        for other in others:
            other.step()
        assert torch.equal(loss, expected)
    assert calls == [True] * 4
    assert same(one, two)


def test_groups_and_state_are_live():
    module = model()
    optimizer = chain(module)
    muon, adamw = optimizer.optimizers
    groups = optimizer.param_groups
    assert groups is optimizer.param_groups
    assert [id(g) for g in groups] == [id(muon.param_groups[0]), id(adamw.param_groups[0])]
    groups[1]["lr"] = 0.5
    assert adamw.param_groups[0]["lr"] == 0.5
    adamw.add_param_group({"params": [torch.zeros(2, requires_grad=True)], "lr": 0.25})
    assert [g["lr"] for g in optimizer.param_groups] == [0.05, 0.5, 0.25]
    loss_of(module, 0).backward()
    optimizer.step()
    matrix, bias = module[3].weight, module[3].bias
    assert optimizer.state[matrix] is muon.state[matrix]
    assert set(optimizer.state[bias]) == {"step", "exp_avg", "exp_avg_sq"}
    optimizer.state[bias]["exp_avg"] = torch.ones_like(bias)
    assert torch.equal(adamw.state[bias]["exp_avg"], torch.ones_like(bias))
    assert len(optimizer.state) == len(muon.state) + len(adamw.state) == len(list(optimizer.state))
    assert optimizer.state.get(torch.zeros(1)) is None
    assert [tier.tier for tier in optimizer.tiers()] == ["matrix", "fused", "fused"]
    assert "Muon" in repr(optimizer)
    optimizer.state.clear()
    assert not muon.state
    assert not adamw.state


@pytest.mark.parametrize(
    "make",
    [
        lambda o: lr_scheduler.StepLR(o, 2, 0.5),
        lambda o: lr_scheduler.LambdaLR(o, [lambda e: 0.9**e, lambda e: 1 / (1 + e)]),
        lambda o: lr_scheduler.CosineAnnealingLR(o, 5),
        lambda o: lr_scheduler.OneCycleLR(o, [0.1, 0.01], total_steps=6, cycle_momentum=False),
        lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0),
        lambda o: lr_scheduler.SequentialLR(o, [lr_scheduler.ConstantLR(o), lr_scheduler.ExponentialLR(o, 0.9)], [2]),
    ],
    ids=["step", "lambda", "cosine", "onecycle", "plateau", "sequential"],
)
def test_schedulers_set_each_groups_rate(make):
    optimizer = chain(model())
    by_torch = torch.optim.SGD([{"params": [torch.zeros(1)], "lr": 0.05}, {"params": [torch.zeros(1)], "lr": 0.01}])
    schedulers = make(optimizer), make(by_torch)
    for _ in range(5):
        for one, scheduler in zip((optimizer, by_torch), schedulers, strict=True):
            one.step()
            scheduler.step(*([1.0] if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau) else []))
        rates = [[group["lr"] for group in one.param_groups] for one in (optimizer, by_torch)]
        assert rates[0] == pytest.approx(rates[1])
    assert optimizer.optimizers[0].param_groups[0]["lr"] == rates[0][0]


def test_hooks_run_once_around_all_and_around_each():
    module = model()
    optimizer, seen = chain(module), []
    optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    optimizer.register_step_post_hook(lambda *_: seen.append("after"))
    optimizer.optimizers[1].register_step_post_hook(lambda *_: seen.append("inner"))
    optimizer.register_state_dict_post_hook(lambda _, d: {**d, "more": 1})
    optimizer.register_load_state_dict_pre_hook(lambda _, d: {k: v for k, v in d.items() if k != "more"})
    loss_of(module, 0).backward()
    optimizer.step()
    assert seen == ["before", "inner", "after"]
    saved = optimizer.state_dict()
    assert saved["more"] == 1
    optimizer.load_state_dict(saved)


@pytest.mark.parametrize("torchs", [False, True], ids=["ours", "with torch.optim's"])
def test_save_load_go_on_is_never_saved(torchs):
    one, two = model(), model()
    a, b = chain(one, torchs=torchs), chain(two, torchs=torchs)
    b.init_state()
    for step in range(5):
        for module, optimizer in ((one, a), (two, b)):
            optimizer.zero_grad()
            loss_of(module, step).backward()
            optimizer.step()
        file = io.BytesIO()
        torch.save(b.state_dict(), file)
        file.seek(0)
        b = chain(two, torchs=torchs)
        b.load_state_dict(torch.load(file, weights_only=True))
    assert same(one, two)


def test_the_checkpoint_is_numbered_through_and_its_parts_load_into_torchs():
    module = model()
    optimizer = chain(module)
    loss_of(module, 0).backward()
    optimizer.step()
    saved = optimizer.state_dict()
    numbers = [i for group in saved["param_groups"] for i in group["params"]]
    assert numbers == list(range(len(list(module.parameters()))))
    assert set(saved["state"]) == set(numbers)
    split = offbeat.split_parameters(module)
    theirs = torch.optim.Muon(split.matrices)
    theirs.load_state_dict(
        {
            "state": {i: saved["state"][i] for i in numbers[: len(split.matrices)]},
            "param_groups": saved["param_groups"][:1],
        }
    )
    p = split.matrices[0]
    assert torch.equal(theirs.state[p]["momentum_buffer"], optimizer.state[p]["momentum_buffer"])


def test_torchs_distributed_checkpoint_tools_take_a_chain():
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

    one, two = model(), model()
    a, b = chain(one), chain(two)
    loss_of(one, 0).backward()
    a.step()
    found = copy.deepcopy(get_optimizer_state_dict(one, a))
    set_optimizer_state_dict(two, b, found)
    two.load_state_dict(one.state_dict())
    for module, optimizer in ((one, a), (two, b)):
        optimizer.zero_grad()
        loss_of(module, 1).backward()
        optimizer.step()
    assert same(one, two)


def test_a_load_that_fails_changes_nothing():
    module = model()
    optimizer = chain(module)
    loss_of(module, 0).backward()
    optimizer.step()
    before = copy.deepcopy(optimizer.state_dict())
    wrong = copy.deepcopy(before)
    wrong["param_groups"][0]["lr"] = 9.0
    last = wrong["param_groups"][1]["params"][0]
    wrong["state"][last]["exp_avg"] = torch.zeros(77)
    with pytest.raises(ValueError, match="'exp_avg' of shape"):
        optimizer.load_state_dict(wrong)
    with pytest.raises(ValueError, match=r"1, but the optimizers of the chain have 1 \+ 1"):
        optimizer.load_state_dict({"state": {}, "param_groups": before["param_groups"][:1]})
    after = optimizer.state_dict()
    assert after["param_groups"] == before["param_groups"]
    for i, entry in before["state"].items():
        assert all(torch.equal(value, after["state"][i][key]) for key, value in entry.items())


def test_a_bad_gradient_raises_before_any_optimizer_has_stepped():
    module = model()
    optimizer = chain(module)
    before = copy.deepcopy(module)
    for step in range(2):
        optimizer.zero_grad()
        loss_of(module, step).backward()
        if step:
            before = copy.deepcopy(module)
            module[3].bias.grad = module[3].bias.grad.to_sparse()
            with pytest.raises(RuntimeError, match="does not support sparse gradients"):
                optimizer.step()
        else:
            optimizer.step()
    assert same(module, before)


@pytest.mark.parametrize("overflow", [False, True])
def test_grad_scaler(overflow):
    one, two = model(), model()
    a, b = chain(one), chain(two)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for step in range(3):
        a.zero_grad()
        b.zero_grad()
        scaler.scale(loss_of(one, step)).backward()
        skipped = overflow and step == 1
        if skipped:
            one[3].bias.grad[0] = torch.inf
        scaler.unscale_(a)
        scaler.step(a)
        scaler.update()
        if not skipped:
            loss_of(two, step).backward()
            b.step()
    for p, q in zip(one.parameters(), two.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=2e-3 * 3)
    assert scaler.get_scale() == (4.0 if overflow else 8.0)


def test_explicit_gradients():
    one, two, three = model(), model(), model()
    a, fn, c = chain(one), offbeat.as_functional(chain(two)), chain(three)
    for step in range(3):
        a.zero_grad()
        loss_of(one, step).backward()
        grads = {name: p.grad for name, p in one.named_parameters()}
        a.step()
        names = {id(p): name for name, p in two.named_parameters()}
        fn.step([grads[names[id(p)]] for group in fn.param_groups for p in group["params"]])
        named = list(three.named_parameters())
        c.step_params([p for _, p in named], [grads[name] for name, _ in named])
    assert same(one, two)
    assert same(one, three)
    with pytest.raises(ValueError, match="is in none of the 2 optimizers"):
        c.step_params([torch.zeros(3)], [torch.zeros(3)])
    with pytest.raises(TypeError, match="takes nothing else"):
        offbeat.as_functional(chain(one), [torch.zeros(1)])
    with pytest.raises(TypeError, match="AdamW cannot update some"):
        chain(two, torchs=True).step_params([two[1].bias], [torch.zeros(8)])


def test_copies_and_pickles():
    module = model()
    optimizer = chain(module)
    loss_of(module, 0).backward()
    optimizer.step()
    again = pickle.loads(pickle.dumps(optimizer))
    assert [type(one) for one in again.optimizers] == [offbeat.Muon, offbeat.AdamW]
    again.step()
    twin, other = copy.deepcopy((module, optimizer))
    for m, o in ((module, optimizer), (twin, other)):
        o.zero_grad()
        loss_of(m, 1).backward()
        o.step()
    assert same(module, twin)


def test_add_param_group():
    optimizer = chain(model())
    new = torch.zeros(4, 4, requires_grad=True)
    with pytest.raises(ValueError, match=r"key 'optimizer'.*0: Muon, 1: AdamW"):
        optimizer.add_param_group({"params": [new]})
    with pytest.raises(ValueError, match="key 'optimizer'"):
        optimizer.add_param_group({"params": [new], "optimizer": 2})
    optimizer.add_param_group({"params": new, "optimizer": 0, "lr": 1.0})
    assert optimizer.param_groups[1]["lr"] == 1.0
    assert optimizer.owner(new) is optimizer.optimizers[0]
    with pytest.raises(ValueError, match="is already in optimizer 0 of the chain"):
        optimizer.add_param_group({"params": [new], "optimizer": 1})
    with pytest.raises(ValueError, match="Muon only supports 2D"):
        optimizer.add_param_group({"params": [torch.zeros(3)], "optimizer": 0})
    assert len(optimizer.param_groups) == 3


def test_bad_chains():
    p = torch.zeros(2, 2)
    with pytest.raises(ValueError, match="at least one"):
        offbeat.Chain([])
    with pytest.raises(TypeError, match="item 1 is a Tensor"):
        offbeat.Chain([offbeat.SGD([p]), p])
    with pytest.raises(ValueError, match=r"shape \(2, 2\) is in optimizer 0 and in optimizer 1"):
        offbeat.Chain([offbeat.Muon([p]), offbeat.AdamW([torch.zeros(1), p])])
    with pytest.raises(TypeError, match="LBFGS"):
        offbeat.Chain([offbeat.SGD([p]), torch.optim.LBFGS([torch.zeros(1)])])


@pytest.mark.parametrize("torchs", [False, True], ids=["ours", "with torch.optim's"])
@pytest.mark.parametrize("clip", [None, "exact", "previous"])
def test_overlapped_with_backward(torchs, clip):
    one, two = model(), model()
    a, b = chain(one, torchs=torchs), chain(two, torchs=torchs)
    handle = offbeat.overlap(a, one, **({} if clip is None else {"clip_norm": 0.5, "clip": clip}))
    for step in range(4):
        loss_of(one, step).backward()
        a.step()
        a.zero_grad()
        loss_of(two, step).backward()
        if clip == "exact":
            torch.nn.utils.clip_grad_norm_(two.parameters(), 0.5)
        b.step()
        b.zero_grad()
    handle.remove()
    for p, q in zip(one.parameters(), two.parameters(), strict=True):
        if clip != "previous":  # which clips by another norm; that it runs is enough
            torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-3)


def train_ddp(rank, world, overlapped):
    module = torch.nn.parallel.DistributedDataParallel(model())
    optimizer = chain(module)
    handle = offbeat.overlap(optimizer, module) if overlapped else None
    for step in range(4):
        loss_of(module, step, rank).backward()
        optimizer.step()
        optimizer.zero_grad()
    if handle is not None:
        handle.remove()
    return [p.detach().clone() for p in module.parameters()]


@pytest.mark.ranks
def test_overlapped_with_ddp():
    by_hand, overlapped = run_ranks(train_ddp, 2, False), run_ranks(train_ddp, 2, True)
    for p, q in zip(by_hand[0], overlapped[0], strict=True):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-3)
    for runs in (by_hand, overlapped):
        assert all(torch.equal(p, q) for p, q in zip(*runs, strict=True))


def train_local_sgd(rank, world, overlapped, state):
    module = model()
    inner = chain(module)
    if overlapped:
        offbeat.overlap(inner, module)
    optimizer = offbeat.LocalSGD(inner, module, every=2, subgroup=None, state=state)
    scheduler = lr_scheduler.StepLR(optimizer, 2, 0.5)
    for step in range(6):
        loss_of(module, step, rank).backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        if step == 2 and not overlapped:
            saved = copy.deepcopy(optimizer.state_dict())
            optimizer.load_state_dict(saved)
    optimizer.finish()
    rates = [group["lr"] for group in optimizer.param_groups]
    return [p.detach().clone() for p in module.parameters()], rates


@pytest.mark.ranks
@pytest.mark.parametrize("state", ["keep", "average", "reset"])
@pytest.mark.parametrize("overlapped", [False, True])
def test_replicas_that_average_now_and_then(overlapped, state):
    (first, rates), (second, _) = run_ranks(train_local_sgd, 2, overlapped, state)
    assert all(torch.equal(p, q) for p, q in zip(first, second, strict=True))
    assert rates == [0.05 / 8, 0.01 / 8]


# Splitting a module's parameters.


class Gpt(torch.nn.Module):
    def __init__(self, tied=False, head="lm_head"):
        super().__init__()
        self.wte = torch.nn.Embedding(11, 4)
        self.block = torch.nn.TransformerEncoderLayer(4, 2, 8)
        self.experts = torch.nn.Parameter(torch.zeros(3, 4, 8))
        self.conv = torch.nn.Conv2d(2, 2, 3)
        setattr(self, head, torch.nn.Linear(4, 11, bias=False))
        if tied:
            getattr(self, head).weight = self.wte.weight
        self.frozen = torch.nn.Parameter(torch.zeros(4, 4), requires_grad=False)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("head", ["lm_head", "last"])
def test_split_parameters(tied, head):
    module = Gpt(tied, head)
    split = offbeat.split_parameters(module)
    names = {id(p): name for name, p in module.named_parameters()}
    assert [names[id(p)] for p in split.matrices] == [
        "experts",
        "block.self_attn.in_proj_weight",
        "block.self_attn.out_proj.weight",
        "block.linear1.weight",
        "block.linear2.weight",
    ]
    assert split.reasons["wte.weight"] == "an embedding"
    assert split.reasons["conv.weight"] == "more than three dimensions"
    assert (f"{head}.weight" in split.reasons) is not tied
    assert "frozen" not in split.reasons
    assert {id(p) for p in (*split.matrices, *split.rest)} == {id(p) for p in module.parameters() if p.requires_grad}
    assert "experts" in split.report
    assert str(split) == split.report
    matrices, rest = split
    offbeat.Chain([offbeat.Muon(matrices), offbeat.AdamW(rest)]).init_state()


def test_split_parameters_as_asked():
    module = model()
    split = offbeat.split_parameters(module, heads=(), rest=["0.*"])
    assert [why for why in split.reasons.values() if why == "a head"] == []
    assert split.reasons["0.weight"] == "asked for"
    assert len(split.matrices) == 2
    assert offbeat.split_parameters(module, heads=["3.weight"]).reasons["3.weight"] == "a head"


def test_split_parameters_refuses_patterns_that_cannot_be_meant():
    module = torch.nn.Sequential(torch.nn.Embedding(9, 4), torch.nn.Linear(4, 4), torch.nn.Linear(4, 9))
    with pytest.raises(TypeError, match=r"heads must be a list of patterns, but got '2\.\*'; pass \['2\.\*'\]"):
        offbeat.split_parameters(module, heads="2.*")
    with pytest.raises(ValueError, match=r"rest: no parameter .* 'nosuch\*'; names are such as '0\.weight'"):
        offbeat.split_parameters(module, rest=["1.*", "nosuch*"])
    with pytest.raises(TypeError, match="takes a module, but got generator"):
        offbeat.split_parameters(module.parameters())


def test_muon_with_adamw_is_the_two_with_one_rate():
    """Steps and report against torch.optim's two optimizers; torch's Muon has the same scaling."""
    one = model()
    two = copy.deepcopy(one)
    optimizer = offbeat.muon_with_adamw(one, lr=0.02, weight_decay=0.05, momentum=0.8, betas=(0.8, 0.9))
    hidden = {"0.weight", "3.weight"}  # 4.weight is the last linear layer's
    named = dict(two.named_parameters())
    matrices, rest = ([p for name, p in named.items() if (name in hidden) is inside] for inside in (True, False))
    others = [
        torch.optim.Muon(matrices, lr=0.02, weight_decay=0.05, momentum=0.8, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(rest, lr=0.02, weight_decay=0.05, betas=(0.8, 0.9)),
    ]
    for step in range(3):
        loss_of(one, step).backward()
        loss_of(two, step).backward()
        for each in (optimizer, *others):
            each.step()
            each.zero_grad()
    for p, q in zip(one.parameters(), two.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)
    assert optimizer.report == offbeat.split_parameters(one).report
    assert copy.deepcopy(optimizer).report == optimizer.report


def test_muon_with_adamw_takes_the_patterns_of_the_split():
    optimizer = offbeat.muon_with_adamw(model(), heads=["0.*"], rest=["3.bias"])
    assert [p.shape for p in optimizer.param_groups[0]["params"]] == [(8, 8), (3, 8)]
    only = torch.nn.Sequential(torch.nn.Linear(4, 4, bias=False), torch.nn.Linear(4, 2, bias=False))
    assert [type(one) for one in offbeat.muon_with_adamw(only, heads=()).optimizers] == [offbeat.Muon]


@pytest.mark.parametrize("module", [torch.nn.Linear(4, 2), torch.nn.LayerNorm(3), torch.nn.Embedding(3, 4)])
def test_muon_with_adamw_refuses_a_module_without_matrices(module):
    with pytest.raises(ValueError, match=r"no hidden matrices for Muon: use offbeat\.AdamW\(module\.parameters\(\)\)"):
        offbeat.muon_with_adamw(module)


def test_matrices_step_first(monkeypatch):
    """A step on whole matrices can fail late, for lack of memory or of a rank; the others have not stepped then."""
    matrix, vector = (torch.nn.Parameter(torch.ones(shape)) for shape in ((4, 3), (3,)))
    chain = offbeat.Chain([offbeat.AdamW([vector], lr=0.1), offbeat.Muon([matrix], lr=0.1)])
    matrix.grad, vector.grad = torch.eye(4, 3), torch.ones(3)

    def fail(*args):
        raise MemoryError("no memory left")

    with monkeypatch.context() as patched:
        patched.setattr("offbeat.rules.muon.newton_schulz", fail)
        with pytest.raises(MemoryError):
            chain.step()
    assert torch.equal(vector, torch.ones(3))
    assert torch.equal(matrix, torch.ones(4, 3))
    chain.step()
    assert not torch.equal(vector, torch.ones(3))
    assert not torch.equal(matrix, torch.ones(4, 3))
