"""What the compiler keeps for backward: the graphs of a layer with flex attention, cut as on a GPU, at any size."""

import dataclasses

import pytest
import torch
import torch._functorch.config as functorch
import torch.nn.attention.flex_attention as flex
from drafters import inputs_for, table, tiny_batch, tiny_drafter, tiny_shape
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition

from dflash_ddp.drafter.model import FULL, SLIDING, rotary_tables
from dflash_ddp.drafter.step import recompute_cheap_results


def kept_bytes(monkeypatch, *, hidden: int, head_dim: int, num_blocks: int, context: int) -> int:
    """What the layers of a drafter keep between forward and backward."""
    shape = tiny_shape(kinds=(SLIDING, FULL), window=32, hidden_size=hidden)
    shape = dataclasses.replace(shape, head_dim=head_dim, intermediate_size=128)
    half = context // 2
    options = {"num_anchors": num_blocks, "context_length": context, "flex": True}
    _, inputs = inputs_for(tiny_batch((half - 3, half - 5), prompt=3), shape, **options)
    model, kept = tiny_drafter(shape), []

    def partition(joint, joint_inputs, **more):
        forward, backward = min_cut_rematerialization_partition(joint, joint_inputs, **more)
        (end,) = (node for node in forward.graph.nodes if node.op == "output")
        made = [node.meta["val"] for node in end.args[0][1:] if node.op != "placeholder"]
        kept.extend(value.nbytes for value in made if isinstance(value, torch.Tensor))
        return forward, backward

    def as_it_is(graph, _inputs):
        return make_boxed_func(graph.forward)

    backend = aot_autograd(fw_compiler=as_it_is, bw_compiler=as_it_is, partition_fn=partition)
    monkeypatch.setattr(flex, "_validate_device", lambda *_: None)  # no backward on CPUs: not run
    torch.compiler.reset()
    contexts = model.project_context(
        torch.zeros(context, shape.num_capture_layers * hidden, dtype=torch.bfloat16)
    )
    rotary = rotary_tables(inputs.positions_T, head_dim, shape.rope_theta)
    x_XH = table(shape)[inputs.token_ids_X].bfloat16()
    for i, layer in enumerate(model.layers):
        compiled = torch.compile(layer, backend=backend, fullgraph=True, dynamic=False)
        mask = inputs.masks[shape.layer_types[i]]
        ends = {"first": i == 0, "last": i == len(model.layers) - 1}
        x_XH = compiled(x_XH, contexts[i], rotary, mask, num_blocks=num_blocks, **ends)
    assert len(x_XH) == num_blocks * (shape.block_size - 1)
    assert kept
    return sum(kept)


@pytest.mark.parametrize(
    ("hidden", "head_dim", "num_blocks"), [(64, 16, 8), (64, 32, 8), (128, 16, 64)]
)
def test_less_is_kept_at_any_size(monkeypatch, hidden, head_dim, num_blocks):
    """At the first two, PyTorch's activation_memory_budget below 1 fails at flex attention."""
    size = {"hidden": hidden, "head_dim": head_dim, "num_blocks": num_blocks, "context": 256}
    everything = kept_bytes(monkeypatch, **size)
    before = functorch.save_config()
    try:
        recompute_cheap_results()
        assert kept_bytes(monkeypatch, **size) < 0.95 * everything
    finally:
        functorch.load_config(before)
        torch.compiler.reset()
