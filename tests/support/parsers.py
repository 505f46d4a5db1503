"""Every reader of files that may come from strangers, each with an undamaged file that tests damage."""

import gzip
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from chats import write_chats, write_tokenizer
from documents import read_conversations, read_documents, write_corpus
from run_logs import header, step, write_log
from safetensors.torch import save_file

from memo.artifacts.attention_table import AttentionCase, AttentionRow, AttentionTable
from memo.artifacts.layer_profile import LayerProfile, ProfileKey
from memo.artifacts.memory_plan import MemoryPlan, PlannedPhase, PlannedRequest
from memo.artifacts.memory_trace import Free, Malloc, Phase, Trace, requests
from memo.artifacts.reading import read_bytes
from memo.artifacts.run_log import RunLog
from memo.checkpoint import index as checkpoint_index
from memo.checkpoint.directory import LATEST, latest_checkpoint
from memo.checkpoint.files import RUN_STATE, checkpoint_file, damaged
from memo.checkpoint.hugging_face.files import TensorFiles
from memo.checkpoint.run_state import RunState, read_state, write_state
from memo.cli import estimate
from memo.config import RunConfig
from memo.config.check_model import check_model
from memo.config.checks import check
from memo.config.hugging_face import read_config
from memo.config.run import read_toml
from memo.data.chat_templates import load_chat_template
from memo.data.facts import CorpusFacts, load_corpus_tokenizer
from memo.data.indexed import IndexedDataset
from memo.data.tokenizer import BPETokenizer
from memo.estimate.hardware_files import read_hardware
from memo.estimate.hf_config import read_hf_config
from memo.planner.memory.minimalloc import read_csv

LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 512,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "initializer_range": 0.02,
    "layer_types": ["full_attention", "full_attention"],
    "quantization_config": None,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.138629436111989}
QWEN = {**LLAMA, "model_type": "qwen3", "rope_scaling": YARN}
QWEN |= {"sliding_window": 4096, "use_sliding_window": False, "max_position_embeddings": 32768}


@dataclass(frozen=True)
class Parser:
    """A reader.

    Attributes:
        file: name of the file that is damaged, in a folder of its own.
        write: writes an undamaged file, and further files that it needs, into this folder.
        read: reads the whole file as a command would. Raises MemoError for a file that it refuses.
    """

    file: str
    write: Callable[[Path], object]
    read: Callable[[Path], object]


def _write_text(content: str) -> Callable[[Path], object]:
    return lambda path: path.write_text(content, encoding="utf-8")


def _write_json(content: object) -> Callable[[Path], object]:
    return _write_text(json.dumps(content))


def _write_corpus(path: Path) -> None:
    write_corpus(path.with_suffix(""), map(np.arange, (5, 0, 30, 7)))


def _read_corpus(path: Path) -> None:
    corpus = IndexedDataset(path.with_suffix(""))
    for document in range(len(corpus)):
        corpus[document].sum()


def _write_weights(path: Path) -> None:
    tensors = {"a": torch.arange(6.0).reshape(2, 3), "b.weight": torch.ones(4, dtype=torch.bfloat16)}
    save_file(tensors, path.parent / "model-1.safetensors")
    if path.name == "model.safetensors":
        (path.parent / "model-1.safetensors").rename(path)
    else:
        path.write_text(json.dumps({"weight_map": dict.fromkeys(tensors, "model-1.safetensors")}))


def _read_weights(path: Path) -> None:
    files = TensorFiles(path.parent)
    for name, stored in files.tensors.items():
        files.read(name, [slice(0, size) for size in stored.shape])
    files.close()


def _read_model(path: Path) -> None:
    check_model(RunConfig(model=read_config(path.parent).model))


def _write_index(path: Path) -> None:
    places = [((0, 0), (2, 3), 0), ((2, 0), (1, 3), 24)]
    rectangles = [checkpoint_index.StoredRectangle(o, s, "tensors.bin", at, "0" * 16) for o, s, at in places]
    tensor = checkpoint_index.StoredTensor((3, 3), "float32", tuple(rectangles))
    path.write_text(checkpoint_index.to_json({"master/w": tensor}))
    (path.parent / "tensors.bin").write_bytes(bytes(36))


def _read_index(path: Path) -> None:
    file, source = checkpoint_file(path.parent, path.name), damaged(path.name)
    content = read_bytes(file, source, max_bytes=checkpoint_index.MAX_BYTES)
    checkpoint_index.check_files(path.parent, checkpoint_index.from_json(content))


def _write_state(path: Path) -> None:
    write_state(path.parent, RunState(3, 12, 7, 3, 0, 0, model={"hidden-size": 64}, data={"seq-length": 32}))


def _write_pointer(path: Path) -> None:
    (path.parent / "iter_0000012").mkdir()
    path.write_text("12\n")


def _write_facts(path: Path) -> None:
    write_tokenizer(path.parent, "chatml", marks=True)
    facts = CorpusFacts("tokenizer.json", BPETokenizer(path.parent / "tokenizer.json").vocab_size, 0, 1, 1)
    path.write_text(facts.to_json())


def _write_tokenizer(path: Path) -> None:
    write_tokenizer(path.parent, "chatml", marks=True)
    write_chats(path.parent / "chats.jsonl")


def _read_tokenizer(path: Path) -> None:
    tokenizer = BPETokenizer(path)
    tokenizer.decode(tokenizer.encode("Hello, world \u00e4\U0001f600"))
    tokenizer.encode_located(["Hi <|im_end|>"])


def _read_template(path: Path) -> None:
    template = load_chat_template(path.parent, ["<|im_end|>"])
    for conversation in read_conversations([path.parent / "chats.jsonl"]):
        template.render(conversation)
        break


def _profile(path: Path) -> None:
    sizes = {name: 64 for name, kind in ProfileKey.__annotations__.items() if kind is int}
    flags = {name: False for name, kind in ProfileKey.__annotations__.items() if kind is bool}
    names = {name: "x" for name, kind in ProfileKey.__annotations__.items() if kind is str}
    key = ProfileKey(**{**sizes, **flags, **names})  # type: ignore[arg-type]
    measured = (1.0, 2.0, {"qkv": 0.1}, 1e10, 1e10, 0.0, 1e10)
    LayerProfile(key, "2026-01-31T12:00:00+01:00", {"input": 64}, *measured).save(path)  # type: ignore[arg-type]


def _table(path: Path) -> None:
    case = AttentionCase(128, "bf16", True, False, 4096)
    row = AttentionRow(case, 4, 4, 1, "2026-01-31T12:00:00+01:00", {"flash": 0.1}, {"te": "not installed"})
    AttentionTable("a GPU", "2.13.0", "0.1.0", (row,)).save(path)


def _plan(path: Path) -> None:
    planned = PlannedPhase("layer_forward", 0, 1, (PlannedRequest(100, 0, 2), PlannedRequest(50, 128, 3)))
    MemoryPlan("cpu", "paper", 64, 10, 192, 128, "feasible", (planned,)).save(path)


def _trace(path: Path) -> None:
    forward = Phase("layer_forward", 0, 1, (Malloc(7, 100), Malloc(3, 50), Free(7)))
    Trace("cpu", "recorded", (forward, Phase("loss", -1, 1, (Free(3),))), {"seq_length": 64}).save(path)


def _run_config(path: Path) -> None:
    check(RunConfig().override(_without_model(read_toml(path))), 1)


def _without_model(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name != "model"}


def _cases(path: Path) -> None:
    estimate.main(["--cases", str(path), "--out", str(path.parent / "out.csv")])


def _texts(path: Path) -> list[str]:
    return read_documents([path], "text")


def _write_table(path: Path) -> None:
    import pyarrow.ipc
    import pyarrow.parquet

    table = pyarrow.table({"text": ["one", "two", "three"], "n": [1, 2, 3]})
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(table, path)
        return
    with pyarrow.ipc.new_stream(str(path), table.schema) as writer:
        writer.write_table(table)


CASES = "method,model,seq_len,tp,cp,pp,mbs,gpus,hardware,alpha\nmemo,gpt-7b,4096,2,1,1,1,2,a800-80,0.5\n"
HARDWARE = 'like = "h100-80"\ngpus_per_node = 4\npeak_tflops.bf16 = 989.4\n[efficiency]\nmatmul = 0.6\n'
TEXTS = '{"text": "one"}\n{"text": "two"}\n'
RUN = RunConfig().override({"mock_data": True}).to_toml()

PARSERS = {
    "corpus index": Parser("c.idx", _write_corpus, _read_corpus),
    "corpus tokens": Parser("c.bin", _write_corpus, _read_corpus),
    "corpus facts": Parser("c.json", _write_facts, lambda path: load_corpus_tokenizer(path.with_suffix(""))),
    "documents": Parser("c.jsonl", _write_text(TEXTS), _texts),
    "documents in a list": Parser("c.json", _write_json([{"text": "one"}, {"text": "two", "n": [1, 2.5]}]), _texts),
    "documents in CSV": Parser("c.csv", _write_text('id,text\n1,"one, two"\n2,three\n'), _texts),
    "packed documents": Parser("c.jsonl.gz", lambda path: path.write_bytes(gzip.compress(TEXTS.encode())), _texts),
    "documents in Parquet": Parser("c.parquet", _write_table, _texts),
    "documents in Arrow": Parser("c.arrow", _write_table, _texts),
    "conversations": Parser("chats.jsonl", write_chats, lambda path: [*read_conversations([path])]),
    "tokenizer": Parser("tokenizer.json", _write_tokenizer, _read_tokenizer),
    "chat template": Parser("tokenizer_config.json", _write_tokenizer, _read_template),
    "safetensors": Parser("model.safetensors", _write_weights, _read_weights),
    "safetensors index": Parser("model.safetensors.index.json", _write_weights, _read_weights),
    "config.json": Parser("config.json", _write_json(LLAMA), _read_model),
    "config.json of Qwen": Parser("config.json", _write_json(QWEN), _read_model),
    "config.json, estimated": Parser("config.json", _write_json(LLAMA), lambda path: read_hf_config(path).parameters),
    "memory trace": Parser("trace.json", _trace, lambda path: requests(Trace.load(path))),
    "memory plan": Parser("plan.json", _plan, MemoryPlan.load),
    "layer profile": Parser("profile.json", _profile, LayerProfile.load),
    "attention table": Parser("table.json", _table, AttentionTable.load),
    "run log": Parser("log.jsonl", lambda path: write_log(path, [step(1), step(2)], header()), RunLog.load),
    "run header": Parser(
        "log.run.json",
        lambda path: write_log(path.with_name("log.jsonl"), [step(1)], header()),
        lambda path: RunLog.load(path.with_name("log.jsonl")),
    ),
    "cases in CSV": Parser("cases.csv", _write_text(CASES), _cases),
    "blocks in CSV": Parser("blocks.csv", _write_text("id,lower,upper,size\na,0,3,8\nb,2,9,16\n"), read_csv),
    "run.toml": Parser("run.toml", _write_text(RUN), _run_config),
    "hardware file": Parser("hardware.toml", _write_text(HARDWARE), read_hardware),
    "checkpoint index": Parser("index.json", _write_index, _read_index),
    "run state": Parser(RUN_STATE, _write_state, lambda path: read_state(path.parent)),
    "checkpoint pointer": Parser(LATEST, _write_pointer, lambda path: latest_checkpoint(path.parent)),
}
