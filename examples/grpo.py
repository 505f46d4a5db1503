"""Your own loss over log-probs: GRPO (Shao et al., 2024) on completions that another program sampled and scored.

    python examples/grpo.py --model Qwen3-0.6B --completions scored.jsonl --seq-len 4K --gbs 8
    torchrun --nproc-per-node 8 examples/grpo.py --model Llama-3.1-8B --completions scored.jsonl --cp 8 --seq-len 64K

Each line of the file is {"prompt": "2 + 2 =", "completion": " 4", "advantage": 0.7}. The advantage of a completion is
its reward minus the mean of its group, divided by the standard deviation of the group.
"""

import argparse
import json

import torch
from torch import Tensor

import memo
from memo.data import load_tokenizer, pack_completions
from memo.train.log_probs import completion_numbers


def grpo_loss(
    log_probs: Tensor,
    old: Tensor,
    reference: Tensor,
    advantages: Tensor,
    numbers: Tensor,
    epsilon: float = 0.2,
    beta: float = 0.04,
) -> Tensor:
    """The mean over completions of the mean over their tokens of (beta x KL to the reference - clipped gain).

    log_probs (the policy now), old (the policy when it sampled), reference, numbers: [samples, s]; advantages:
    [completions].
    """
    counts = numbers >= 0
    now, then, fixed, number = (each[counts] for each in (log_probs, old, reference, numbers))
    ratio, advantage = (now - then).exp(), advantages[number]
    gain = torch.minimum(ratio * advantage, ratio.clamp(1 - epsilon, 1 + epsilon) * advantage)
    kl = (fixed - now).exp() - (fixed - now) - 1
    return ((beta * kl - gain) / torch.bincount(number)[number]).sum() / len(advantages)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a Hugging Face directory")
    parser.add_argument("--completions", required=True, help="the file of JSON lines")
    parser.add_argument("--seq-len", default="4K")
    parser.add_argument("--gbs", type=int, default=8, help="sequences of packed completions in one step")
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--cp", type=int, default=1)
    parser.add_argument("--steps", type=int, default=2, help="steps on each global batch of completions")
    given = parser.parse_args()
    tokenizer = load_tokenizer(given.model)
    with open(given.completions) as file:
        records = [json.loads(line) for line in file]
    documents = []
    for record in records:
        prompt, completion = (tokenizer.encode(record[key]).tolist() for key in ("prompt", "completion"))
        completion.append(tokenizer.eod)
        documents.append((prompt + completion, [0] * len(prompt) + [1] * len(completion)))
    layout = {"seq_len": given.seq_len, "gbs": given.gbs, "tp": given.tp, "cp": given.cp}
    with memo.Trainer(given.model, lora_rank=16, lr=1e-5, mock_data=True, **layout) as trainer:
        samples = pack_completions(documents, trainer.config.data.seq_length, tokenizer.eod)
        advantages = torch.tensor([record["advantage"] for record in records], dtype=torch.float64)
        numbers = completion_numbers(samples)
        reference = trainer.log_probs(samples, reference=True)
        for first in range(0, len(samples), given.gbs):
            own = slice(first, first + given.gbs)
            batch, begin = samples[own], int(numbers[own][numbers[own] >= 0].min())
            of_batch, old = completion_numbers(batch), trainer.log_probs(batch)
            scored = advantages[begin : begin + int(of_batch.max()) + 1]
            for _ in range(given.steps):
                record = trainer.step_on(
                    batch,
                    lambda now, old=old, fixed=reference[own], scored=scored, of=of_batch: grpo_loss(
                        now, old, fixed, scored, of
                    ),
                )
                trainer.print(f"step {record.iteration}: loss {record.lm_loss:.6f}, grad norm {record.grad_norm:.4g}")


if __name__ == "__main__":
    main()
