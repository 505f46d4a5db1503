"""Hugging Face weights in and out: the same bytes whatever the layout, each rank reading only its part.

tests/parity/test_parity_hugging_face.py shows that each weight, read whole, has its right name.
"""

import json
import shutil
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hf_directories import ALONE, CONFIGS, global_tensors, write_model
from layouts import assemble, global_pieces, make, one_step_backward, tiny
from ranks import run_ranks
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from memo.checkpoint import writer
from memo.checkpoint.hugging_face.companions import keep_companions
from memo.checkpoint.hugging_face.exporter import export_checkpoint
from memo.checkpoint.hugging_face.files import TensorFiles
from memo.checkpoint.hugging_face.importer import import_checkpoint
from memo.checkpoint.hugging_face.load import _read_masters, open_pretrained
from memo.checkpoint.hugging_face.names import is_no_weight, places
from memo.checkpoint.run_state import RunState
from memo.checkpoint.store import load_checkpoint, save_checkpoint
from memo.config import ModelConfig, RunConfig
from memo.config.model_name import choose_model
from memo.errors import CheckpointError
from memo.parallel.data import ShardedDataParallel
from memo.train.build import build_chunks, build_mesh

torch.set_num_threads(1)

Layout = tuple[int, dict[str, Any]]
ONE: Layout = (1, {})
LAYOUTS: list[tuple[str, Layout]] = [
    ("llama", (4, {"tp": 2, "pp": 2})),
    ("gpt2", (2, {"tp": 2})),
    ("gpt2", (2, {"pp": 2})),
    ("qwen2", (4, {"tp": 2})),
    ("gemma3_text", (4, {"tp": 2, "pp": 2})),
    ("olmo3", (2, {"tp": 2})),
]
FAMILIES = ["llama", "gpt2", "qwen2", "gemma3_text", "olmo3"]
"""q, k, v apart; fused and transposed; a tied embedding on two stages; norms around the MLP; norms that tp splits."""


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One directory for each family, fp32, in several shards."""
    pytest.importorskip("transformers")  # not for ranks, where it would take seconds
    root = tmp_path_factory.mktemp("published")
    for name in FAMILIES:
        write_model(name, root, max_shard="40KB")
    return root


def tensors_of(directory: Path) -> dict[str, Tensor]:
    return {name: tensor for file in directory.glob("*.safetensors") for name, tensor in load_file(file).items()}


def config_for(directory: Path, dtype: str = "fp32", **layout: Any) -> RunConfig:
    return choose_model(tiny(dtype=dtype, ddp_bucket_size=3000, **layout), directory)


def _start(
    directory: Path, dtype: str, world_size: int, layout: dict[str, Any]
) -> tuple[dict[str, Tensor], float, int]:
    """This rank's masters, its loss on the first batch, and how many numbers it read."""
    num_read = 0
    read = TensorFiles.read

    def counting(self: TensorFiles, *args: Any) -> Tensor:
        nonlocal num_read
        part = read(self, *args)
        num_read += part.numel()
        return part

    TensorFiles.read = counting  # type: ignore[method-assign]
    try:
        model, feed = make(config_for(directory, dtype, **layout), world_size)
    finally:
        TensorFiles.read = read  # type: ignore[method-assign]
    return global_pieces(model, "master"), one_step_backward(model, feed), num_read


@pytest.mark.parametrize(("name", "layout"), LAYOUTS, ids=str)
def test_every_layout_starts_from_the_same_weights(published: Path, name: str, layout: Layout) -> None:
    world_size, axes = layout
    results = run_ranks(world_size, _start, published / name, "fp32", world_size, axes)
    masters = assemble([part for part, _, _ in results])
    expected = global_tensors(published / name)
    alone, loss, num_weights = _start(published / name, "fp32", 1, {})
    for found in (masters, alone):
        assert found.keys() == expected.keys() and all(torch.equal(found[key], expected[key]) for key in expected)
    assert sum(loss for _, loss, _ in results) == pytest.approx(loss, rel=1e-5)  # fp32: weights follow masters
    # Copies are read once each: norms on every tp rank, a tied embedding on both stages.
    tied = masters["embedding.weight"].numel() if "head.weight" not in masters and axes.get("pp") else 0
    small = sum(value.numel() for key, value in masters.items() if value.ndim == 1 or key.startswith("position"))
    allowed = num_weights + tied + small * (axes.get("tp", 1) - 1)
    assert sum(read for _, _, read in results) <= allowed
    assert num_weights == sum(value.numel() for value in expected.values())


def _bf16_run(directory: Path) -> dict[str, Tensor]:
    """This rank's masters; its weights must be those of all ranks, rounded."""
    model, _ = make(config_for(directory, "bf16"), 2)
    expected = global_tensors(directory)
    for parameter in model.data_parallel.parameters.values():
        assert parameter.dtype == torch.bfloat16
        for piece in parameter.shard.pieces:
            assert torch.equal(piece.of_local(parameter), piece.of_global(expected[piece.name]).bfloat16()), piece.name
    return global_pieces(model, "master")


def test_masters_keep_the_precision_that_weights_in_bf16_lose(published: Path) -> None:
    masters = assemble(run_ranks(2, _bf16_run, published / "llama"))
    expected = global_tensors(published / "llama")
    assert all(torch.equal(masters[key], expected[key]) for key in expected)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("llama-biases", torch.bfloat16),
        ("gpt2-untied", torch.float16),
        ("gemma3_text", torch.float64),
        *(
            pytest.param(name, torch.bfloat16, marks=pytest.mark.full)
            for name in ("mistral", "qwen3", "starcoder2", "olmo3")
        ),
    ],
    ids=str,
)
def test_in_and_out_again_gives_the_same_bytes(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    source = write_model(name, tmp_path, dtype, max_shard="20KB")
    import_checkpoint(source, tmp_path / "checkpoint")
    exported = export_checkpoint(tmp_path / "checkpoint", tmp_path / "out", max_shard_bytes=20_000)
    before, after = tensors_of(source), tensors_of(tmp_path / "out")
    assert before.keys() == after.keys() and len(exported.files) >= 2
    for key, tensor in before.items():
        assert tensor.dtype == after[key].dtype == dtype and torch.equal(tensor, after[key]), key
    assert TensorFiles(tmp_path / "out").tensors.keys() == before.keys()  # the index agrees with the files
    read, written = (json.loads((folder / "config.json").read_text()) for folder in (source, tmp_path / "out"))
    assert read.pop("dtype") == written.pop("torch_dtype") and read == written
    for file in exported.files:
        sizes_bytes = [tensor.nbytes for tensor in load_file(tmp_path / "out" / file).values()]
        assert sum(sizes_bytes) <= 20_000 or len(sizes_bytes) == 1


@pytest.mark.parametrize("layout", [ONE, (2, {"pp": 2})], ids=str)
def test_an_imported_checkpoint_loads_into_any_layout(published: Path, layout: Layout, tmp_path: Path) -> None:
    import_checkpoint(published / "gpt2", tmp_path)
    world_size, axes = layout
    arguments = (published / "gpt2", tmp_path, world_size, axes)
    results = run_ranks(world_size, _load_imported, *arguments)
    expected = global_tensors(published / "gpt2")
    masters = assemble([part for part, _ in results])
    assert all(torch.equal(masters[key], expected[key]) for key in expected)
    assert all(moments == 0.0 for _, moments in results)


def _load_imported(source: Path, checkpoint: Path, world_size: int, axes: dict[str, Any]) -> tuple[Any, float]:
    """Masters, and the largest moment, of a model that has already made a step."""
    config = config_for(source, **axes)
    model, feed = make(replace(config, checkpoint=replace(config.checkpoint, pretrained_checkpoint=None)), world_size)
    one_step_backward(model, feed)
    model.optimizer.step(1e-2)
    states = model.optimizer.segment_states()
    assert max(float(kinds["exp_avg"].abs().max()) for _, kinds in states) > 0
    state = load_checkpoint(checkpoint, states, model.mesh)
    assert state.iteration == state.consumed_samples == state.optimizer_steps == 0
    model.optimizer.resume(state.optimizer_steps)
    largest = max(float(kinds[kind].abs().max()) for _, kinds in states for kind in ("exp_avg", "exp_avg_sq"))
    return global_pieces(model, "master"), largest


def _save_trained(directory: Path, checkpoint: Path, world_size: int, axes: dict[str, Any]) -> dict[str, Tensor]:
    config = config_for(directory, **axes)
    model, feed = make(config, world_size)
    one_step_backward(model, feed)
    model.optimizer.step(1e-2)
    save_checkpoint(checkpoint, RunState(1, 4, 7, 1, 0, 0), model.optimizer.segment_states(), model.mesh)
    if not dist.is_initialized() or dist.get_rank() == 0:
        (checkpoint / "config.toml").write_text(config.to_toml())
    return global_pieces(model, "master")


@pytest.mark.parametrize("name", ["gpt2", "qwen2"])
def test_a_run_in_a_layout_is_exported_whole(published: Path, name: str, tmp_path: Path) -> None:
    source = published / name
    masters = assemble(run_ranks(4, _save_trained, source, tmp_path / "run", 4, {"tp": 2, "pp": 2}))
    export_checkpoint(tmp_path / "run" / "iter_0000001", tmp_path / "out", max_shard_bytes=30_000)
    exported = global_tensors(tmp_path / "out")
    assert all(torch.equal(exported[key], masters[key]) for key in masters)
    narrow = export_checkpoint(tmp_path / "run", tmp_path / "narrow", dtype="bf16")
    rounded = global_tensors(tmp_path / "narrow")
    assert all(torch.equal(rounded[key], masters[key].bfloat16()) for key in masters)
    assert narrow.num_bytes == sum(tensor.nbytes for tensor in rounded.values())


def _save_unchanged(directories: list[Path], out: Path) -> None:
    for directory in directories:
        config = config_for(directory, tp=2)
        model, _ = make(config, 2)
        run = out / directory.name
        save_checkpoint(run, RunState(0, 0, 7, 0, 0, 0), model.optimizer.segment_states(), model.mesh)
        if dist.get_rank() == 0:
            (run / "config.toml").write_text(config.to_toml())
            keep_companions(config, str(run))  # the family of the file, where several families have the same function


def test_through_a_run_of_two_ranks_and_out_again_gives_the_same_bytes(tmp_path: Path) -> None:
    """Every family, tp 2: read by each rank's part, saved by a run that made no step, exported.

    Stages number layers alike in all families: LAYOUTS and test_a_run_in_a_layout_is_exported_whole have pp."""
    pytest.importorskip("transformers")
    directories = [write_model(name, tmp_path / "published", max_shard="20KB") for name in CONFIGS]
    run_ranks(2, _save_unchanged, directories, tmp_path / "runs")
    for directory in directories:
        exported = export_checkpoint(tmp_path / "runs" / directory.name, tmp_path / "out" / directory.name)
        before, after = tensors_of(directory), tensors_of(exported.path)
        assert before.keys() == after.keys(), directory.name
        for key, tensor in before.items():
            assert tensor.dtype == after[key].dtype == torch.float32 and torch.equal(tensor, after[key]), key


def test_one_tensor_is_held_while_a_checkpoint_is_written(
    published: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the model's size: what one tensor was read into is free again when the next is written."""
    write, written = writer.write_values, []

    def watched(file: Any, values: Tensor) -> str:
        assert all(storage() is None for storage in written)
        written.append(weakref.ref(values))
        return write(file, values)

    monkeypatch.setattr(writer, "write_values", watched)
    import_checkpoint(published / "gpt2", tmp_path / "checkpoint")
    assert len(written) == len(global_tensors(published / "gpt2"))
    export_checkpoint(tmp_path / "checkpoint", tmp_path / "out")
    before, after = tensors_of(published / "gpt2"), tensors_of(tmp_path / "out")
    assert all(torch.equal(before[key], after[key]) for key in before)


def _peak_of_reading(directory: Path) -> float:
    """Resident bytes that reading the masters adds at its peak, by the kernel's own mark."""
    config = config_for(directory)
    mesh, device = build_mesh(config, 0, 1), torch.device("cpu")
    _, chunks = build_chunks(config, mesh, torch.float32, device)
    sink = ShardedDataParallel(
        nn.ModuleList(chunks), mesh, dtype=torch.float32, device=device, bucket_size=40_000_000, overlap=True
    )
    for owner in sink.master_segments():
        owner.weight.detach().fill_(1.0)  # resident before, so that only reading counts
    weights = open_pretrained(directory, config)
    Path("/proc/self/clear_refs").write_text("5")  # the mark starts again from what is resident now
    before = _status_bytes("VmRSS")
    _read_masters(weights, sink)
    return _status_bytes("VmHWM") - before


def _status_bytes(key: str) -> int:
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{key}:")]
    return int(line.split()[1]) * 1024


def test_reading_takes_one_file_of_host_memory_at_a_time(tmp_path: Path) -> None:
    """A model of 68 MB in files of at most 7.9: 9.7 MB were measured on top of the masters themselves.

    Of one of 561 MB in files of at most 62.9 it was 64.2 MB: the rest does not grow.
    """
    transformers = pytest.importorskip("transformers")
    shape = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 16, "vocab_size": 97}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape, num_attention_heads=4))
    model.save_pretrained(tmp_path, max_shard_size="8MB")
    sizes_bytes = [file.stat().st_size for file in tmp_path.glob("*.safetensors")]
    assert sum(sizes_bytes) > 8 * max(sizes_bytes)
    (peak_bytes,) = run_ranks(1, _peak_of_reading, tmp_path)
    assert 0.5 * max(sizes_bytes) < peak_bytes < 1.5 * max(sizes_bytes)


def test_names_without_the_prefix_of_the_head_and_buffers(published: Path, tmp_path: Path) -> None:
    """As OpenAI's own gpt2 is published."""
    shutil.copytree(published / "gpt2", tmp_path / "gpt2")
    for file in (tmp_path / "gpt2").glob("model*"):
        file.unlink()
    bare = {key.removeprefix("transformer."): tensor for key, tensor in tensors_of(published / "gpt2").items()}
    save_file({**bare, "h.0.attn.bias": torch.ones(1, 1, 64, 64)}, tmp_path / "gpt2" / "model.safetensors")
    masters, _, _ = _start(tmp_path / "gpt2", "fp32", 1, {})
    expected = global_tensors(published / "gpt2")
    assert all(torch.equal(masters[key], expected[key]) for key in expected)


def _one_rank_cannot_read(directory: Path) -> str:
    if dist.get_rank() == 1:

        def broken(*_: Any) -> Tensor:
            raise CheckpointError("rank 1 cannot read")

        TensorFiles.read = broken  # type: ignore[method-assign]
    with pytest.raises(CheckpointError) as caught:
        make(config_for(directory), 2)
    return str(caught.value)


def test_a_rank_that_cannot_read_ends_all(published: Path) -> None:
    assert run_ranks(2, _one_rank_cannot_read, published / "llama") == ["rank 1 cannot read"] * 2


def test_table_of_names_covers_every_family() -> None:
    transformers = pytest.importorskip("transformers")
    assert {getattr(transformers, class_name).model_type for class_name, _ in CONFIGS.values()} == {*ALONE, "mistral4"}


def test_a_vector_that_is_no_weight_or_bias_of_a_module_has_its_name() -> None:
    """The sinks of gpt-oss."""
    shapes = {"layers.3.attention.sinks": (4,), "layers.3.attention.q.weight": (64, 64)}
    names = places(ModelConfig(), "llama", shapes)
    assert names["layers.3.attention.sinks"].name == "model.layers.3.self_attn.sinks"
    assert names["layers.3.attention.q.weight"].name == "model.layers.3.self_attn.q_proj.weight"


@pytest.mark.parametrize(
    ("name", "model_type", "is_left_out"),
    [
        ("model.layers.4.mlp.gate.weight", "glm4_moe", True),
        ("model.layers.3.mlp.gate.weight", "glm4_moe", False),
        ("model.layers.4.mlp.gate_proj.weight", "llama", False),
        ("mtp.layers.0.mlp.gate_proj.weight", "qwen3_next", True),
    ],
)
def test_layers_that_predict_further_tokens_are_left_out(name: str, model_type: str, is_left_out: bool) -> None:
    """Of a model of four layers; what else there is too much of is refused."""
    assert is_no_weight(name, model_type, 4) == is_left_out
