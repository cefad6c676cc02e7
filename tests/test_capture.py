"""Context features of packed batches against plain transformers forwards of each document alone."""

import logging
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from targets import HIDDEN, KINDS, NUM_LAYERS, TABLE_ROWS, build_target
from transformers import AutoModelForCausalLM, PreTrainedModel

from dflash_ddp.batch import PackedBatch
from dflash_ddp.target.capture import (
    GROUP_COST_TOKENS,
    Target,
    check_features,
    padded_length,
    plan_rows,
)
from dflash_ddp.target.compiled import compile_layers
from dflash_ddp.target.model import CAUSAL_ROWS, load_target, transformers_forward

LENGTHS = (40, 7, 93, 20, 1, 64)
LAYERS = (1, 4, 2)  # not sorted: features follow the listed order


def make_batch(lengths: tuple[int, ...] = LENGTHS, *, seed: int = 0) -> PackedBatch:
    generator = np.random.default_rng(seed)
    return PackedBatch(
        index=seed,
        input_ids=generator.integers(0, 256, sum(lengths)).astype(np.int32),
        positions=np.concatenate([np.arange(n) for n in lengths]).astype(np.int32),
        loss_mask=np.ones(sum(lengths), dtype=bool),
        document_lengths=np.array(lengths, dtype=np.int32),
        document_ids=np.arange(len(lengths)),
    )


def load(folder: Path, layers: tuple[int, ...] = LAYERS) -> PreTrainedModel:
    return load_target(str(folder), None, capture_layers=layers, dtype=torch.float32, device="cpu")


def capture(target: Target, batch: PackedBatch) -> torch.Tensor:
    out_SC = torch.full((batch.num_tokens + 3, target.feature_width), 7.0)
    target.features(batch, out_SC)
    assert bool((out_SC[batch.num_tokens :] == 7.0).all())
    return out_SC


def plain_features(
    folder: Path, batch: PackedBatch, layers: tuple[int, ...] = LAYERS
) -> torch.Tensor:
    """`hidden_states[id + 1]` of the whole model, document by document; the last by a hook."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    raw = []
    model.model.layers[-1].register_forward_hook(lambda _m, _a, output: raw.append(output))
    rows = []
    for ids in np.split(batch.input_ids, np.cumsum(batch.document_lengths)[:-1]):
        ids_1L = torch.from_numpy(ids.astype(np.int64))[None]
        with torch.no_grad():
            hidden = list(model(ids_1L, output_hidden_states=True).hidden_states)
        assert len(hidden) == NUM_LAYERS + 1
        assert torch.equal(hidden[-1], model.model.norm(raw[-1]))
        hidden[-1] = raw[-1]
        rows.append(torch.cat([hidden[layer + 1][0] for layer in layers], dim=-1))
    return torch.cat(rows)


def relative_error(features: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest over tokens and layers of |difference| / |expected|."""
    difference = (features - expected).unflatten(-1, (-1, HIDDEN)).norm(dim=-1)
    return float((difference / expected.unflatten(-1, (-1, HIDDEN)).norm(dim=-1)).max())


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Threads of so small products wait for each other longer than they work."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {kind: build_target(kind, tmp_path_factory.mktemp(kind)) for kind in KINDS}


@pytest.fixture(scope="module")
def hybrid(folders: dict[str, Path]) -> Target:
    return Target(load(folders["qwen3_5"]), LAYERS, max_row_tokens=256)


@pytest.mark.parametrize("layers", [LAYERS, (NUM_LAYERS - 1, 0)])
@pytest.mark.parametrize("kind", KINDS)
def test_packed_features_equal_each_document_alone(
    kind: str, layers: tuple[int, ...], folders: dict[str, Path]
) -> None:
    batch = make_batch()
    target = Target(load(folders[kind], layers), layers, max_row_tokens=256)
    features_SC = capture(target, batch)
    expected = plain_features(folders[kind], batch, layers)
    assert relative_error(features_SC[: batch.num_tokens], expected) < 1e-5
    assert check_features(target, batch, features_SC) < 1e-5


def test_features_of_a_document_do_not_depend_on_its_neighbours(hybrid: Target) -> None:
    batch = make_batch((50, 60, 33))
    changed = make_batch((50, 60, 33))
    changed.input_ids[:50] = 1
    difference = capture(hybrid, batch) - capture(hybrid, changed)
    assert float(difference[50:].abs().max()) == 0.0
    assert float(difference[:50].abs().max()) > 1.0


def test_features_take_the_dtype_of_the_buffer(hybrid: Target) -> None:
    batch = make_batch()
    out_SC = torch.zeros(batch.num_tokens, hybrid.feature_width, dtype=torch.bfloat16)
    hybrid.features(batch, out_SC)
    assert torch.equal(out_SC, capture(hybrid, batch)[: batch.num_tokens].bfloat16())
    assert check_features(hybrid, batch, out_SC) < 0.01


def test_one_document_and_none(hybrid: Target) -> None:
    batch = make_batch((5,))
    assert check_features(hybrid, batch, capture(hybrid, batch)) < 1e-5
    capture(hybrid, PackedBatch(0, *[np.zeros(0, dtype=np.int32)] * 5))


@pytest.mark.parametrize("kind", ["qwen3_untied", "llama", "qwen3_5"])
def test_compiled_layers_give_the_same_features(kind: str, folders: dict[str, Path]) -> None:
    torch.compiler.reset()
    batch = make_batch((40, 93, 30, 31))
    expected = capture(Target(load(folders[kind]), LAYERS, max_row_tokens=128), batch)
    graphs = []

    def backend(graph: torch.fx.GraphModule, _inputs: list[torch.Tensor]) -> object:
        graphs.append(graph)
        return graph.forward

    model = load(folders[kind])
    compile_layers(model, backend=backend)
    target = Target(model, LAYERS, max_row_tokens=128)
    features_SC = capture(target, batch)
    # The written-out convolution adds its taps in another order than the library.
    bound = 1e-4 if kind == "qwen3_5" else 1e-5
    assert relative_error(features_SC[: batch.num_tokens], expected[: batch.num_tokens]) < bound
    assert check_features(target, batch, features_SC) < bound
    num_graphs = len(graphs)
    assert num_graphs <= (6 if kind == "qwen3_5" else 2)
    capture(target, make_batch((40, 20, 70, 70, 16, 120), seed=1))
    assert len(graphs) == num_graphs, "a new row shape was compiled again"


def test_the_opaque_delta_rule_survives_aot_autograd(folders: dict[str, Path]) -> None:
    torch.compiler.reset()
    batch = make_batch((40, 40))
    model = load(folders["qwen3_5"], (0,))
    expected = capture(Target(model, (0,)), batch)
    compile_layers(model, backend="aot_eager")
    assert relative_error(capture(Target(model, (0,)), batch)[:80], expected[:80]) < 1e-5


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ("zeros", r"layer 4, batch 0: all 150 tokens have the same"),
        ("equal rows", "layer 1, batch 0: all 150 tokens have the same"),
        ("nan", "layer 2, batch 0: 2 of 150 tokens hold NaN"),
        ("inf", "layer 2, batch 0: 2 of 150 tokens hold NaN"),
        ("-inf", "layer 2, batch 0: 2 of 150 tokens hold NaN"),
        ("layer too low", r"layer 1, batch 0: document 1 differs .* by [01]\."),
        ("swapped layers", "layer 1, batch 0: document 1 differs"),
        ("swapped rows", "a layer or row is out of place"),
        ("leaked packing", "Documents leak into each other"),
    ],
)
def test_the_check_refuses_wrong_features(
    how: str, text: str, hybrid: Target, folders: dict[str, Path]
) -> None:
    batch = make_batch((50, 40, 60))
    features_SC = capture(hybrid, batch)[: batch.num_tokens]
    if how == "zeros":
        features_SC[:, hybrid.columns(1)] = 0.0
    elif how == "equal rows":
        features_SC[:] = features_SC[0].clone()
    elif how in ("nan", "inf", "-inf"):
        features_SC[3:5, -1] = float(how)
    elif how == "layer too low":
        features_SC = plain_features(folders["qwen3_5"], batch, (0, 3, 1))
    elif how.startswith("swapped"):
        by, dim = (HIDDEN, 1) if how == "swapped layers" else (1, 0)
        features_SC = features_SC.roll(by, dims=dim)
    else:
        # All documents in one row, positions starting again: a hybrid cannot keep them apart.
        with torch.no_grad(), transformers_forward(hybrid.model):
            packed = hybrid.model(
                input_ids=torch.from_numpy(batch.input_ids.astype(np.int64))[None],
                position_ids=torch.from_numpy(batch.positions.astype(np.int64))[None],
                use_cache=False,
                output_hidden_states=True,
            )
        leaked = torch.cat([packed.hidden_states[layer + 1][0] for layer in LAYERS], dim=-1)
        assert relative_error(leaked[:50], features_SC[:50]) < 1e-5
        features_SC = leaked
    with pytest.raises(ValueError, match=text):
        check_features(hybrid, batch, features_SC)


def test_plain_forward_is_transformers_own_and_leaves_no_trace(folders: dict[str, Path]) -> None:
    model = load(folders["qwen3_untied"])
    compile_layers(model, backend="eager")
    compiled = [layer.forward for layer in model.layers]
    with transformers_forward(model):
        assert model.config._attn_implementation == "sdpa"
        assert not any("forward" in layer.__dict__ for layer in model.layers)
    assert model.config._attn_implementation == CAUSAL_ROWS
    assert [layer.forward for layer in model.layers] == compiled


class TestLoading:
    """What `load_target` returns, and what it refuses."""

    def test_the_model_is_cut_and_frozen(
        self, folders: dict[str, Path], caplog: pytest.LogCaptureFixture
    ) -> None:
        with caplog.at_level(logging.INFO):
            model = load(folders["qwen3_5"])
        assert len(model.layers) == model.config.num_hidden_layers == max(LAYERS) + 1
        assert not model.training
        assert not any(p.requires_grad for p in model.parameters())
        assert not any(name == "norm.weight" for name, _ in model.named_parameters())
        assert not hasattr(model, "lm_head")
        messages = [r.getMessage() for r in caplog.records if r.name.startswith("dflash")]
        assert len(messages) == 2
        assert "install flash-linear-attention" in messages[0]
        assert "install causal-conv1d" in messages[0]
        assert not [r for r in caplog.records if r.levelno >= logging.WARNING]

    def test_the_head_and_the_layers_above_are_not_needed(self, tmp_path: Path) -> None:
        folder = build_target("qwen3_untied", tmp_path)
        kept = {
            name: tensor
            for name, tensor in load_file(folder / "model.safetensors").items()
            if name != "lm_head.weight" and ".layers.5." not in name
        }
        save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
        load(folder)
        with pytest.raises(ValueError, match=r"lack 11 tensors, which would be random: layers\.5"):
            load(folder, (5,))

    def test_quantised_checkpoints(self, tmp_path: Path) -> None:
        folder = build_target("llama", tmp_path)
        file = folder / "config.json"
        quantised = '{"quantization_config": {"quant_method": "fp8"},'
        file.write_text(file.read_text().replace("{", quantised, 1))
        with pytest.raises(ValueError, match="is quantised: give the bf16 checkpoint"):
            load(folder)

    def test_other_attention_is_passed_on(self, folders: dict[str, Path]) -> None:
        model = load_target(
            str(folders["qwen3_untied"]),
            None,
            capture_layers=LAYERS,
            dtype=torch.float32,
            device="cpu",
            attention="eager",
        )
        batch = make_batch()
        target = Target(model, LAYERS)
        assert model.config._attn_implementation == "eager"
        assert check_features(target, batch, capture(target, batch)) < 1e-5

    def test_windowed_layers_keep_the_masks_of_transformers(self, tmp_path: Path) -> None:
        folder = build_target("qwen3_untied", tmp_path)
        text = (folder / "config.json").read_text()
        text = text.replace('"use_sliding_window": false', '"use_sliding_window": true')
        text = text.replace('"sliding_window": null', '"sliding_window": 8')
        (folder / "config.json").write_text(
            text.replace('"full_attention"', '"sliding_attention"', 3)
        )
        model = load(folder)
        assert model.config._attn_implementation == "sdpa"
        batch = make_batch()
        features_SC = capture(Target(model, LAYERS), batch)
        expected = plain_features(folder, batch)
        assert relative_error(features_SC[: batch.num_tokens], expected) < 1e-5


def test_bad_batches_and_buffers_are_refused(hybrid: Target, folders: dict[str, Path]) -> None:
    batch = make_batch((4, 5))
    width = hybrid.feature_width
    for shape in ((8, width), (9, width + 1), (9 * width,)):
        with pytest.raises(ValueError, match=rf"batch 0 need \[>=9, {width}\]"):
            hybrid.features(batch, torch.zeros(shape))
    batch.input_ids[3] = TABLE_ROWS
    with pytest.raises(ValueError, match="target's table has 300 rows"):
        hybrid.features(batch, torch.zeros(9, width))


def test_padded_lengths_form_a_short_ladder() -> None:
    rungs = sorted({padded_length(n) for n in range(1, 8193)})
    assert rungs[:3] == [16, 32, 48]
    assert len(rungs) == 32 + 4 * 16
    for n in range(1, 8193):
        padded = padded_length(n)
        assert n <= padded < n + 16 or (n > 512 and padded - n < n / 16)
        assert padded == padded_length(padded)


@pytest.mark.parametrize("seed", range(30))
def test_row_plans(seed: int) -> None:
    generator = np.random.default_rng(seed)
    num_documents = int(generator.integers(0, 60))
    lengths = np.exp(generator.uniform(0, 6, num_documents)).astype(int).tolist()
    bound = int(generator.integers(1, 3000))
    groups = plan_rows(lengths, max_row_tokens=bound)
    planned = [d for group in groups for d in group.documents]
    assert sorted(planned) == list(range(num_documents))
    for group in groups:
        longest = max(lengths[d] for d in group.documents)
        assert group.length == padded_length(longest)
        assert len(group.documents) == 1 or len(group.documents) * group.length <= bound
    assert groups == plan_rows(lengths, max_row_tokens=bound)

    # No worse than one forward a document, nor than equal cuts of the sorted documents.
    def cost(plan: list[list[int]]) -> int:
        rows = [len(p) * padded_length(max(lengths[d] for d in p)) for p in plan]
        return sum(rows) + GROUP_COST_TOKENS * len(plan)

    order = sorted(range(num_documents), key=lambda d: -lengths[d])
    ours = cost([list(group.documents) for group in groups])
    for size in range(1, num_documents + 1):
        plan = [order[i : i + size] for i in range(0, num_documents, size)]
        if size == 1 or all(len(p) * padded_length(lengths[p[0]]) <= bound for p in plan):
            assert ours <= cost(plan)


def test_plans_refuse_empty_documents() -> None:
    with pytest.raises(ValueError, match="every document needs a token"):
        plan_rows([3, 0], max_row_tokens=8)
