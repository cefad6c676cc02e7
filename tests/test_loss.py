"""Every form of the loss against an unchunked float64 one, and the flag that is passed."""

import math

import pytest
import torch
import torch.nn.functional as F
from drafters import inputs_for, table, tiny_batch, tiny_shape
from torch.utils._python_dispatch import TorchDispatchMode

import dflash_ddp.drafter.loss as loss_module
from dflash_ddp.config import Recompute
from dflash_ddp.drafter.loss import Rows, dpace_factors, even_chunk_rows, summed_loss
from dflash_ddp.drafter.metrics import microbatch_sums, step_metrics

SHAPE = tiny_shape(block_size=6)
FORMS = list(Recompute)


def setup(num_anchors=9, **kwargs):
    blocks, inputs = inputs_for(tiny_batch(), SHAPE, num_anchors=num_anchors, **kwargs)
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(num_anchors * 5, SHAPE.hidden_size, generator=generator)
    return blocks, inputs, hidden.requires_grad_()


def block_factors(confidence, supervised, alpha):
    """D-PACE's weights of one block, by its definition: s, then P, then sums of P from k on."""
    smoothed = [
        (1 - alpha) * q + alpha if m else 1.0 for q, m in zip(confidence, supervised, strict=True)
    ]
    reached = [math.prod(smoothed[: k + 1]) * m for k, m in enumerate(supervised)]
    return [sum(reached[k:]) for k in range(len(reached))]


def float64_loss(blocks, hidden, head, alpha=None):
    """Loss and gradient of hidden, all logits at once."""
    leaf = hidden.detach().double().requires_grad_()
    labels = torch.from_numpy(blocks.labels_NB[:, 1:].copy()).reshape(-1)
    weights = torch.from_numpy(blocks.weights_NB[:, 1:].copy()).reshape(-1).double()
    losses = F.cross_entropy(leaf @ head.double().T, labels, reduction="none")
    if alpha is not None:
        confidence = (-losses.detach()).exp().view(blocks.labels_NB[:, 1:].shape).tolist()
        supervised = blocks.supervised_NB[:, 1:].tolist()
        factors = [block_factors(*pair, alpha) for pair in zip(confidence, supervised, strict=True)]
        weights = weights * torch.tensor(factors, dtype=torch.float64).reshape(-1)
    (losses * weights).sum().backward()
    return (losses * weights).sum().item(), leaf.grad


@pytest.mark.parametrize("recompute", FORMS)
@pytest.mark.parametrize("chunk_rows", [1, 7, 45, 64])
@pytest.mark.parametrize(("gamma", "alpha"), [(4.0, None), (None, 0.5), (None, 0.0)])
def test_loss_and_gradient_equal_float64(recompute, chunk_rows, gamma, alpha):
    """Chunks of 7 rows cut blocks of 5 drafts; the last answer's blocks are cut at its end."""
    blocks, inputs, hidden = setup(chunk_rows=chunk_rows, gamma=gamma)
    hidden = (hidden.detach() * 0.3).requires_grad_()  # so that factors are neither 0 nor 1
    head = table(SHAPE)
    result = summed_loss(
        hidden,
        head,
        inputs.rows,
        chunk_rows=chunk_rows,
        recompute=recompute,
        dpace_alpha=alpha,
    )
    (result.loss_sum * 0.25).backward()
    expected, grad = float64_loss(blocks, hidden, head, alpha)
    assert result.loss_sum.item() == pytest.approx(expected, rel=1e-5)
    assert (hidden.grad.double() - grad * 0.25).abs().max() < 1e-6
    assert grad.abs().max() > 0.1 or alpha == 0.0
    assert not blocks.supervised_NB[:, 1:].all(), "some slots carry no label"


def test_weights_are_not_rounded_to_bfloat16():
    """A weight of 1/3 is off by 1 in 500 there, at each slot in one direction."""
    _, inputs, hidden = setup(chunk_rows=45)
    half = hidden.detach().bfloat16().requires_grad_()
    rows = inputs.rows._replace(weights_P=(inputs.rows.weights_P > 0) / 3)
    whole = inputs.rows._replace(weights_P=(inputs.rows.weights_P > 0).float())
    grads = []
    for weighted in (rows, whole):
        head = table(SHAPE).bfloat16()
        loss = summed_loss(half, head, weighted, chunk_rows=45, recompute=Recompute.in_forward)
        grads.append(torch.autograd.grad(loss.loss_sum, half)[0].double())
    ratio = (grads[0].abs().sum() / grads[1].abs().sum()).item()
    assert ratio == pytest.approx(1 / 3, rel=3e-4)


@pytest.mark.parametrize(
    ("supervised", "expected"),
    [
        ([1, 1, 1, 1], [2.6885, 1.7385, 1.026, 0.38475]),
        ([1, 1, 0, 1], [2.09, 1.14, 0.4275, 0.4275]),
    ],
)
def test_dpace_factors_of_a_worked_example(supervised, expected):
    confidence = [0.9, 0.5, 0.8, 0.2]
    order = sorted(range(4), key=lambda slot: -supervised[slot])  # supervised slots come first
    rows = Rows(
        slots_P=torch.tensor([*order, 0, 0]),
        labels_P=torch.zeros(6, dtype=torch.int64),
        weights_P=torch.tensor([float(supervised[slot]) for slot in order] + [0.0, 0.0]),
        num_chunks=1,
        num_drafts=4,
    )
    losses = -torch.tensor([confidence[slot] for slot in order] + [0.1, 0.1]).log()
    factors = dpace_factors(losses, rows, 4, 0.5)
    assert factors[:4].tolist() == pytest.approx([expected[slot] for slot in order])
    assert block_factors(confidence, supervised, 0.5) == pytest.approx(expected)


@pytest.mark.parametrize("recompute", FORMS)
def test_no_supervised_slot_gives_zero_on_the_graph(recompute):
    _, inputs, hidden = setup(anchors=[])
    result = summed_loss(hidden, table(SHAPE), inputs.rows, chunk_rows=16, recompute=recompute)
    result.loss_sum.backward()
    assert result.loss_sum.item() == 0
    assert hidden.grad is not None
    assert (hidden.grad == 0).all()


@pytest.mark.parametrize("recompute", FORMS)
def test_only_chunks_with_supervised_slots_reach_the_head(recompute, monkeypatch):
    """Slot 0 never, and of the rest as many chunks as the supervised slots fill."""
    blocks, inputs, hidden = setup(anchors=[8, 20], chunk_rows=4)
    calls = []

    def spy(name):
        inner = getattr(loss_module, name)

        def counted(rows, *rest):
            calls.append(len(rows))
            return inner(rows, *rest)

        return counted

    functions = loss_module.ChunkFunctions(spy("chunk_loss"), spy("logits_to_grad"))
    with torch.no_grad():
        summed_loss(
            hidden,
            table(SHAPE),
            inputs.rows,
            chunk_rows=4,
            recompute=recompute,
            functions=functions,
        )
    assert len(blocks.slots_R) == 10
    assert calls == [4, 4, 4]


@pytest.mark.parametrize("recompute", FORMS)
def test_the_configured_recomputation_is_the_one_that_happens(recompute, monkeypatch):
    """Counts the chunk function's calls in forward and backward, and sees checkpoint's own flag."""
    _, inputs, hidden = setup(chunk_rows=45)
    flags, calls = [], []
    original = loss_module.checkpoint

    def spy(function, *args, use_reentrant):
        flags.append(use_reentrant)
        return original(function, *args, use_reentrant=use_reentrant)

    def counted(*args):
        calls.append(torch.is_grad_enabled())
        return loss_module.chunk_loss(*args)

    monkeypatch.setattr(loss_module, "checkpoint", spy)
    functions = loss_module.ChunkFunctions(loss=counted)
    result = summed_loss(
        hidden, table(SHAPE), inputs.rows, chunk_rows=45, recompute=recompute, functions=functions
    )
    in_forward = list(calls)
    result.loss_sum.backward()
    in_backward = calls[len(in_forward) :]
    expected = {
        Recompute.reentrant: ([True], [False], [True]),
        Recompute.non_reentrant: ([False], [True], [True]),
        Recompute.none: ([], [True], []),
        Recompute.in_forward: ([], [], []),
    }
    assert (flags, in_forward, in_backward) == expected[recompute]


class Largest(TorchDispatchMode):
    """Remembers the most rows of logits: of a result as wide as the head is long, but the head."""

    def __init__(self, head):
        super().__init__()
        self.vocabulary, self.head, self.rows = len(head), head.untyped_storage().data_ptr(), 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if not isinstance(tensor, torch.Tensor) or tensor.shape[-1:] != (self.vocabulary,):
                continue
            if tensor.untyped_storage().data_ptr() != self.head:
                self.rows = max(self.rows, tensor.numel() // self.vocabulary)
        return result


@pytest.mark.parametrize("recompute", FORMS)
@pytest.mark.parametrize("chunk_rows", [4, 45])
def test_logits_exist_for_a_chunk_at_a_time(recompute, chunk_rows):
    """In forward and in backward; the one chunk of 45 rows proves that more would be seen."""
    _, inputs, hidden = setup(chunk_rows=chunk_rows)
    head = table(SHAPE)[:41]  # a vocabulary that is no other size here
    rows = inputs.rows._replace(labels_P=inputs.rows.labels_P % 41)
    with Largest(head) as seen:
        loss = summed_loss(hidden, head, rows, chunk_rows=chunk_rows, recompute=recompute)
        loss.loss_sum.backward()
    assert seen.rows == chunk_rows


def test_metrics_are_ratios_of_global_sums():
    """Two microbatches with unequal counts: sums first, then ratios; perfect drafts reach B."""
    blocks, inputs, _ = setup(anchors=[8, 20, 54], chunk_rows=16)
    head = table(SHAPE)
    right = torch.from_numpy(blocks.labels_NB[:, 1:].copy()).reshape(-1)
    hidden = head[right] * 10  # the label's own row scores highest
    results = []
    for source in (hidden, -hidden):
        loss = summed_loss(source, head, inputs.rows, chunk_rows=16, recompute=Recompute.none)
        sums = microbatch_sums(loss, inputs, weight_sum=blocks.weight_sum, num_tokens=58)
        results.append(sums)
    perfect, wrong = (step_metrics(sums.tolist()) for sums in results)
    assert perfect.accuracy == 1
    assert perfect.accept_length == 6, "all B - 1 drafts and the target's own token"
    assert wrong.accept_length == 1
    both = step_metrics((results[0] + results[1]).tolist())
    assert both.accuracy == 0.5
    assert both.num_tokens == 116
    assert both.loss == pytest.approx((perfect.loss + wrong.loss) / 2)
    empty = step_metrics([0.0] * len(results[0]))
    assert empty.loss is None
    assert empty.accept_length is None


def test_a_label_is_right_when_argmax_says_so_ties_included():
    """A head whose rows come twice: every highest logit is shared by two tokens."""
    generator = torch.Generator().manual_seed(0)
    half = torch.randn(20, 8, generator=generator)
    head = torch.cat([half, half])
    hidden = torch.randn(400, 8, generator=generator)
    labels = torch.randint(0, 40, (400,), generator=generator)
    best = (hidden @ head.T).argmax(-1)
    labels[:200] = (best[:200] + 20 * (torch.arange(200) % 2)) % 40  # the first and the second
    _, correct, _ = loss_module.chunk_loss_and_grad(hidden, head, labels)
    assert correct.tolist() == (labels == best).tolist()
    assert 100 <= correct.sum() < 200


@pytest.mark.parametrize(("num_slots", "most"), [(30_720, 4096), (448, 448), (5, 4096), (97, 16)])
def test_chunks_are_even(num_slots, most):
    rows = even_chunk_rows(num_slots, most)
    num_chunks = -(-num_slots // rows)
    assert rows <= most
    assert num_chunks == -(-num_slots // most)
    assert num_chunks * rows - num_slots < max(16 * num_chunks, most - num_slots % most)
