"""Batch, optimizer, schedule and seed."""

from dataclasses import dataclass
from typing import Annotated, Literal

from memo.artifacts.fields import Count, NonNegativeFloat, PositiveFloat, Rule
from memo.config.flag import COUNT, TOKENS, Flag, NonNegativeInt, PositiveInt, ReadWith

Dtype = Literal["bf16", "fp32", "fp64"]
MomentDtype = Literal["fp32", "bf16"]
Preference = Literal["dpo", "ipo"]
LrDecayStyle = Literal["constant", "linear", "cosine", "WSD"]
_Beta = Annotated[float, Rule("of 0 or more and below 1", lambda value: 0 <= value < 1)]


@dataclass(frozen=True)
class TrainingConfig:
    """AdamW under Megatron's schedule."""

    micro_batch_size: Annotated[PositiveInt, Flag(aliases=("mbs",))] = 1
    """Sequences in one forward and backward pass of one model copy."""
    global_batch_size: Annotated[PositiveInt | None, COUNT, Flag(aliases=("gbs",))] = None
    """Sequences in one optimizer step over all ranks; default: micro-batch-size x dp, with --preference twice that if
    it is odd."""
    train_iters: Annotated[PositiveInt, COUNT] = 100
    """Optimizer steps of the run."""
    num_epochs: PositiveFloat | None = None
    """Passes over data-path, in the place of train-iters; the last step has a whole global batch too."""
    params_dtype: Annotated[Dtype | None, Flag(aliases=("dtype",))] = None
    """Dtype of weights and activations; default: bf16 on CUDA, fp32 on CPU. Gradients are accumulated in fp32 or
    wider."""
    lr: PositiveFloat | None = None
    """Peak learning rate. Default: 3e-4 for new weights, 1e-5 for given weights, 1e-4 for adapters; with --preference
    5e-7, and 5e-6 for adapters."""
    min_lr: NonNegativeFloat = 0.0
    """Learning rate at the end of the decay."""
    lr_decay_style: LrDecayStyle = "cosine"
    """WSD: warm-up, stable, then a linear decay over the last lr-wsd-decay-iters."""
    lr_warmup_iters: Annotated[NonNegativeInt | None, COUNT] = None
    """Steps of linear warm-up from zero. Default: a hundredth of lr-decay-iters for new weights, a tenth for given
    weights and adapters."""
    lr_decay_iters: Annotated[PositiveInt | None, COUNT] = None
    """Step at which min-lr is reached; default: train-iters."""
    lr_wsd_decay_iters: Annotated[PositiveInt | None, COUNT, ReadWith("lr_decay_style", ("WSD",))] = None
    """WSD: length of the final decay; default: a tenth of lr-decay-iters."""
    weight_decay: NonNegativeFloat = 0.1
    """Decoupled decay of matrices; norms and biases are exempt."""
    adam_beta1: _Beta = 0.9
    """Decay of the first moment."""
    adam_beta2: _Beta = 0.95
    """Decay of the second moment."""
    exp_avg_dtype: MomentDtype = "fp32"
    """Dtype of the first moments between steps. bf16 takes 2 bytes a parameter less, and updates are still computed in
    fp32. fp32: as wide as the masters."""
    exp_avg_sq_dtype: MomentDtype = "fp32"
    """Dtype of the second moments between steps, as --exp-avg-dtype."""
    adam_eps: PositiveFloat = 1e-8
    """Added to the root of the second moment."""
    clip_grad: NonNegativeFloat = 1.0
    """Bound on the global gradient norm; 0 turns clipping off."""
    seed: Count = 1234
    """Seed of initial weights and sample order, which are the same for every layout."""
    moe_aux_loss_coeff: Annotated[NonNegativeFloat, ReadWith("num_experts", use="--num-experts 8")] = 0.0
    """Coefficient of the loss that balances the load of experts over the global batch, as Megatron-LM's
    --moe-router-load-balancing-type global_aux_loss; Megatron-LM recommends to begin with 1e-2."""
    moe_z_loss_coeff: Annotated[NonNegativeFloat, ReadWith("num_experts", use="--num-experts 8")] = 0.0
    """Coefficient of the loss that keeps the router's scores small; Megatron-LM recommends to begin with 1e-3."""
    moe_router_bias_update_rate: Annotated[NonNegativeFloat, ReadWith("moe_router_enable_expert_bias")] = 0.0
    """Amount by which each step raises the bias of an expert with fewer tokens than the mean of its layer, and lowers
    the bias of an expert with more. Megatron-LM's default is 1e-3."""
    preference: Preference | None = None
    """Loss on pairs of a chosen and a rejected answer (`memo data pairs`), as in TRL. The reference is the model
    without LoRA's adapters, or reference-log-probs. Default: the loss of the next token in texts."""
    preference_beta: Annotated[PositiveFloat, ReadWith("preference", use="--preference dpo")] = 0.1
    """How strongly --preference holds the model to the reference."""
    loss_chunk_size: Annotated[PositiveInt, TOKENS] = 1024
    """Tokens whose logits exist at the same time on one rank."""
    max_consecutive_skips: NonNegativeInt = 10
    """Skipped steps in a row that end the run, with an error and without a checkpoint; a step is skipped if its
    gradient norm is not finite. 0: never."""
    check_replicas_interval: Annotated[NonNegativeInt, COUNT] = 0
    """Steps between two comparisons, bit for bit, of the copies of the weights on dp x cp and tp ranks; 0: never."""
    eval_interval: Annotated[NonNegativeInt, COUNT] = 0
    """Steps between two evaluations; 0: never."""
    eval_iters: Annotated[PositiveInt, COUNT] = 10
    """Global batches in one evaluation."""
    eval_positions: Annotated[bool, ReadWith("eval_interval", use="--eval-interval 100")] = False
    """Report the loss of each evaluation by position as well: by position in the document with --packing, else in the
    sample."""
    max_step_minutes: PositiveFloat = 60.0
    """Refuse to start when one step is estimated to take longer."""
    admission: bool = True
    """Refuse to start a run that is estimated not to fit in memory or to take too long. Estimates are rough:
    --no-admission warns and starts all the same."""
