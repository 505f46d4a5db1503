"""The folder of somebody who begins with memo: texts, chats, corpora, models, a run, and things that are none."""

import gzip
import json
import shutil
from pathlib import Path

from run_logs import step, write_log

from memo.artifacts.memory_trace import Free, Malloc, Phase, Trace
from memo.cli.main import main

LLAMA = (
    '{"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 256,'
    ' "num_key_value_heads": 2, "intermediate_size": 128, "rms_norm_eps": 1e-5, "max_position_embeddings": 1024}'
)
PARAGRAPHS = ["The quick brown fox jumps over the lazy dog. " * 8] * 8


def fill(folder: Path) -> None:
    for name in ("empty", "texts", "Llama/checkpoint-7", "adapter", "gguf", "DeepSeek", "runs", "a", "done/hf"):
        (folder / name).mkdir(parents=True)
    (folder / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in PARAGRAPHS))
    (folder / "chats.jsonl").write_text(
        '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}\n'
    )
    (folder / "numbers.jsonl").write_text('{"text": 5}\n')
    (folder / "both.jsonl").write_text('{"messages": [{"role": "user"}], "conversations": [{"from": "human"}]}\n')
    (folder / "list.json.gz").write_bytes(gzip.compress(json.dumps([{"body": text} for text in PARAGRAPHS]).encode()))
    (folder / "chat.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    (folder / "texts" / "a.txt").write_text("some text")
    (folder / "my texts.txt").write_text("some text")
    (folder / "table.parquet").write_bytes(b"PAR1")
    (folder / "run.toml").write_text('seq_length = "128"\ntrain_iters = 2\n')
    (folder / "Llama" / "checkpoint-7" / "config.json").write_text(LLAMA)
    (folder / "gguf" / "model.gguf").write_bytes(b"GGUF")
    (folder / "adapter" / "adapter_config.json").write_text("{}")
    (folder / "DeepSeek" / "config.json").write_text('{"model_type": "deepseek_v4", "n_routed_experts": 256}')
    (folder / "runs" / "latest_checkpointed_iteration.txt").write_text("2")
    write_log(folder / "a" / "log.jsonl", [step(1)])
    phase = Phase("layer_forward", 0, 0, (Malloc(1, 9), Free(1)))
    Trace("cpu", "recorded", (phase,), {"seq_length": 64}).save(folder / "trace.json")
    (folder / "blocks.csv").write_text("id,lower,upper,size\na,0,2,30\nb,1,4,20\n")
    (folder / "pairs.jsonl").write_text('{"prompt": "a", "chosen": "b", "rejected": "c"}\n')
    data = folder / "data"
    assert main(["data", "build", str(folder / "texts.jsonl"), str(data / "mine")]) == 0
    assert main(["data", "pairs", str(folder / "pairs.jsonl"), str(data / "pairs"), "--tokenizer", "byte"]) == 0
    shutil.copy(data / "mine.bin", data / "half.bin")
