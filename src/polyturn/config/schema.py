"""What a recipe may hold. Each fact stands in one place; `None` means that `resolve` derives it and says so in the saved file.

Field docstrings are the reference documentation of the recipe.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from polyturn.config.checkpoint_section import CheckpointSection
from polyturn.config.section import Section
from polyturn.config.section import filled as filled


class RunSection(Section):
    """Length, seed and place of a run."""

    name: str = "run"
    """Folder name under `output_dir`; a second run of the same name gets `-2`, never the first one's folder."""
    seed: int = Field(default=0, ge=0)
    """Everything random in a run follows from it."""
    steps: int | None = Field(default=None, gt=0)
    """Training steps. Give this or `epochs`; the other is derived."""
    epochs: float | None = Field(default=None, gt=0)
    """Passes over the training tasks."""
    output_dir: str = "runs"
    """Where run folders go."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Level of the log; `LOGLEVEL` in the environment wins."""


class LoraSection(Section):
    """Low-rank adapters, trained in place of the model's own weights; without this section all weights are trained."""

    rank: int = Field(default=16, gt=0)
    """Columns of the two narrow matrices beside each weight."""
    alpha: float = Field(default=32.0, gt=0, allow_inf_nan=False)
    """What they add is multiplied by alpha / rank."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """0, since the policy that is trained must be the one that sampled; anything else is refused."""
    targets: tuple[str, ...] | None = Field(default=None, strict=False, min_length=1)
    """Linear layers that get adapters, by their names within a decoder layer, such as `[q_proj, v_proj]`; null: all of them."""


class ModelSection(Section):
    """The policy."""

    path: str
    """`builtin:tiny`, `builtin:smollm2`, a folder that transformers loads, or a hub id."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the trained weights."""
    attention: Literal["auto", "varlen", "sdpa", "eager", "flash_attention_2"] = "auto"
    """How the trainer attends; `varlen`: PyTorch's, for packed rows; `auto`: that for 16-bit weights on GPUs, else `sdpa`."""
    chat_template: str | None = None
    """A Jinja file that replaces the model's own chat template."""
    lora: LoraSection | None = None
    """Train adapters and leave the model's weights alone."""
    quantize: Literal["8bit", "4bit"] | None = None
    """Hold the linear layers of the decoder in fewer bits; only with `lora`, which leaves them as they are."""


class RewardEntry(Section):
    """A reward of the recipe's own, beside those of the environment."""

    path: str
    """A built-in reward, or `package.module:function` of `(trajectory, task)`."""
    name: str | None = Field(default=None, min_length=1, pattern=r"^[^/]+$")
    """Name of its component; its own name when left out."""
    weight: float = Field(default=1.0, allow_inf_nan=False)
    """Weight of its components, unless `environment.reward_weights` names them."""
    per: Literal["trajectory", "turn"] = "trajectory"
    """`trajectory`: called at the end, an outcome component; `turn`: called after each turn, added to its reward."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Arguments, checked against its signature."""
    success_at: float | None = Field(default=None, allow_inf_nan=False)
    """From this value on the trajectory counts as a success, as far as this reward is concerned."""
    deadline_s: float | None = Field(default=None, gt=0)
    """A reward that takes longer is at fault; it is within `rollout.tool_deadline_s` in any case."""

    @property
    def component(self) -> str:
        """`name`, or the last word of `path`."""
        return self.name or self.path.replace(":", ".").rpartition(".")[2]


class MixEntry(Section):
    """A further environment whose tasks are mixed into the training."""

    environment: str
    """A name of `polyturn env list`, or `package.module:Class`."""
    name: str | None = Field(default=None, min_length=1)
    """Name of this part in ids and metrics; the environment's when left out."""
    weight: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    """Its share of the tasks, relative to the other parts and to `data.weight`."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the environment, checked against its constructor."""
    rewards: tuple[RewardEntry, ...] = Field(default=(), strict=False)
    """Rewards of this part, as `environment.rewards`."""
    path: str | None = None
    """File of training rows, for an environment that reads one."""
    eval_path: str | None = None
    """File of evaluation rows."""
    transform: str | None = None
    """As `data.transform`, for this part."""


class DataSection(Section):
    """Where tasks come from; an environment that makes its own tasks needs none of this."""

    path: str | None = None
    """File of training rows: JSONL, JSON array, CSV or Parquet, `.gz` too; or `hf:owner/name[:config][@split]` on the hub."""
    eval_path: str | None = None
    """Held-out rows, likewise; of a hub data set the split `test` where none is named."""
    transform: str | None = None
    """`package.module:function`, called with each row before anything else; it returns a row, or None to drop it."""
    shuffle: bool = True
    """Shuffle the rows of each epoch, from the run's seed."""
    curriculum: Literal["none", "easy_first"] = "none"
    """`easy_first`: the first epoch goes from the least `difficulty` to the greatest; every row must have one."""
    weight: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    """Share of the recipe's own environment in a mix, relative to the weights of `mix`."""
    mix: tuple[MixEntry, ...] = Field(default=(), strict=False)
    """Further environments, mixed with the recipe's own by weight."""
    cache_dir: str | None = None
    """Folder for tokenised rows, keyed by file, transform and tokenizer; null for none."""
    num_workers: int = Field(default=1, gt=0)
    """Processes that tokenise the rows of a long file."""


class EnvironmentSection(Section):
    """The environment that plays the tasks."""

    id: str
    """A name of `polyturn env list`, or `package.module:Class`."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the environment, checked against its constructor."""
    rewards: tuple[RewardEntry, ...] = Field(default=(), strict=False)
    """Further rewards, beside what the environment scores itself."""
    reward_weights: dict[str, float] = Field(default_factory=dict)
    """Weight of each outcome component; components not named weigh 1."""
    num_processes: int = Field(default=0, ge=0)
    """Processes that play the trajectories; 0: the driver does."""
    start_deadline_s: float = Field(default=1800.0, gt=0)
    """Time to start what the environment needs, such as an index that is built on first use."""


class SandboxSection(Section):
    """Where code of the model runs; started only when the environment or a reward runs code. See docs/sandbox.md."""

    kind: Literal["local", "http"] = "local"
    """`local`: processes of this machine; `http`: the runner at `url`."""
    url: str | None = None
    """Of a runner that speaks the protocol of docs/sandbox.md."""
    token_env: str | None = None
    """Name of the variable that holds the runner's token."""
    isolation: Literal["auto", "namespaces", "filters"] = "auto"
    """How the local one keeps programs apart."""
    unsafe: bool = False
    """Run programs even where this machine can't keep them apart."""
    concurrency: int | None = Field(default=None, gt=0)
    """Programs that run at once; one a core, or 32 at a runner."""
    import_paths: tuple[str, ...] = Field(default=(), strict=False)
    """Folders that programs may import from, besides the standard library; local only."""
    wall_s: float = Field(default=10.0, gt=0)
    """Wall clock of a program, all of its tests together."""
    cpu_s: float = Field(default=10.0, gt=0)
    """Processor time of each of its processes."""
    memory_mib: int = Field(default=512, ge=16)
    """Memory on top of the interpreter's."""
    num_processes: int = Field(default=16, gt=0)
    """Processes and threads at one time."""
    output_kib: int = Field(default=1024, gt=0)
    """What it may write to its streams."""
    file_mib: int = Field(default=16, gt=0)
    """Size of its folder."""


class RolloutSection(Section):
    """How trajectories are made."""

    group_size: int = Field(default=8, gt=0)
    """Siblings of a task."""
    groups_per_step: int = Field(default=16, gt=0)
    """Tasks of a step."""
    max_turns: int = Field(default=8, gt=0)
    """Turns of a trajectory; reaching it is a limit on the model, scored."""
    max_turn_tokens: int = Field(default=256, gt=0)
    """Sampled tokens of one turn; a longer reply is cut, and the environment told."""
    max_trajectory_tokens: int = Field(default=4096, gt=0)
    """Tokens of a trajectory, everything included; reaching it ends the trajectory, scored."""
    temperature: float = Field(default=1.0, gt=0)
    """Sampling temperature; the trainer scores at the same one."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Nucleus sampling; below 1 it makes importance ratios wrong and is refused, see `allow_truncated_sampling`."""
    top_k: int = Field(default=0, ge=0)
    """Top-k sampling, 0 for all tokens; as `top_p`."""
    min_p: float = Field(default=0.0, ge=0, lt=1)
    """Least probability relative to the likeliest token; as `top_p`."""
    allow_truncated_sampling: bool = False
    """Sample with `top_p`, `top_k` or `min_p` although the trainer's probabilities know nothing of it."""
    concurrency: int = Field(default=512, gt=0)
    """Trajectories under way at once."""
    tool_deadline_s: float = Field(default=30.0, gt=0)
    """An environment that takes longer for one step is at fault."""
    turn_deadline_s: float = Field(default=120.0, gt=0)
    """An engine that takes longer for one turn is at fault."""
    trajectory_deadline_s: float = Field(default=600.0, gt=0)
    """A trajectory that takes longer is at fault. An environment that then goes on though cancelled is left to itself."""
    mask_truncated: bool = False
    """Keep trajectories that hit a limit out of the training batch (they still count in their group's baseline)."""
    max_dropped_share: float = Field(default=0.1, ge=0, le=1)
    """Largest share of trajectories that may be lost, over `dropped_window_steps`, before the run stops."""
    dropped_window_steps: int = Field(default=20, gt=0)
    """Steps over which the dropped share is taken."""


class EngineSection(Section):
    """What generates."""

    kind: Literal["hf", "hf_server", "vllm", "vllm_server"] = "hf"
    """`hf`: transformers, `vllm`: vLLM, both in the driver's process; with `_server`: the same in processes of their own."""
    num_servers: int = Field(default=1, gt=0)
    """Servers that the run starts, each with a copy of the weights."""
    urls: tuple[str, ...] = Field(default=(), strict=False)
    """`vllm_server`: servers that others started, such as `http://10.0.0.5:8000`; empty: the run starts its own."""
    host: str = "127.0.0.1"
    """Address that servers listen on."""
    port: int | None = Field(default=None, gt=0, lt=65536)
    """Port of the first server, the next ones follow; null takes free ones."""
    devices: tuple[int, ...] | None = Field(default=None, strict=False)
    """GPUs of the servers, as numbers within `CUDA_VISIBLE_DEVICES`; null: the last ones."""
    tensor_parallel_size: int = Field(default=1, gt=0)
    """`vllm_server`: GPUs that share one server's weights."""
    device: str | None = None
    """`vllm`: its GPU, such as `cuda:1`; null: the trainer's."""
    gpu_memory_utilization: float | None = Field(default=None, gt=0, lt=1)
    """Share of a GPU's memory that vLLM plans with; 0.9 on a GPU of its own, 0.3 beside the trainer."""
    max_model_len: int | None = Field(default=None, gt=0)
    """Longest prompt and completion together that vLLM makes room for; null: a whole trajectory."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Type of vLLM's weights; `auto`: that of the policy."""
    sleep: Literal["auto", "on", "off"] = "auto"
    """`vllm` on the trainer's GPU: give its memory back while training; `auto`: where it does not fit otherwise."""
    extra_args: dict[str, Any] = Field(default_factory=dict)
    """Further arguments of vLLM, by the names of its engine arguments, such as `enforce_eager: true`."""
    start_deadline_s: float = Field(default=300.0, gt=0)
    """Time until an engine answers."""
    max_batch_size: int = Field(default=256, gt=0)
    """Requests that share one forward pass."""
    deterministic: bool = False
    """Form batches by turn and sibling instead of by arrival, so that two runs are equal to the bit."""


class LossOptions(Section):
    """The four axes of a policy loss, and its KL term. What is None comes from the preset of `algorithm.loss`."""

    ratio_level: Literal["token", "turn", "sequence"] | None = None
    """What one importance ratio covers."""
    clip_rule: Literal["two_sided", "cispo", "sapo"] | None = None
    """How a ratio far from 1 is held."""
    clip_low: float | None = Field(default=None, ge=0)
    """Ratios below 1 - clip_low give no gradient to a negative advantage."""
    clip_high: float | None = Field(default=None, ge=0)
    """Ratios above 1 + clip_high give no gradient to a positive advantage; with `cispo` the cap of the weight itself."""
    delta: float | None = Field(default=None, gt=0)
    """Cap of the ratio for negative advantages (two-sided clipping only)."""
    sapo_temperature_positive: float | None = Field(default=None, gt=0)
    """SAPO's gate temperature for positive advantages."""
    sapo_temperature_negative: float | None = Field(default=None, gt=0)
    """SAPO's gate temperature for negative advantages."""
    aggregation: Literal["fixed", "token", "sequence"] | None = None
    """`fixed`: planned trajectories x `fixed_length`; `token`: tokens of the batch; `sequence`: mean over trajectories."""
    fixed_length: int | None = Field(default=None, gt=0)
    """Divisor of the `fixed` aggregation per trajectory; derived from the token budget."""
    sampler_correction: Literal["none", "tis", "mis", "icepop"] | None = None
    """Weight between trainer and engine probabilities; derived from engine and lag."""
    sampler_level: Literal["token", "turn", "sequence"] | None = None
    """What one sampler weight covers."""
    sampler_low: float | None = Field(default=None, ge=0)
    """Lower bound of the sampler weight (`mis`, `icepop`)."""
    sampler_high: float | None = Field(default=None, gt=0)
    """Upper bound of the sampler weight."""
    beta: float = Field(default=0.0, ge=0)
    """Weight of the KL to the frozen reference."""
    kl_times_ratio: bool = True
    """Multiply the KL estimate by the ratio; without it its gradient is not the KL's."""


class AlgorithmSection(Section):
    """Credit and loss, chosen apart."""

    advantage: str = "turn_rtg"
    """Estimator: a built-in name, or `package.module:Class`."""
    advantage_options: dict[str, Any] = Field(default_factory=dict)
    """Options of the estimator, checked against its fields."""
    loss: str = "dapo"
    """Preset that sets the axes of `loss_options`."""
    loss_options: LossOptions = Field(default_factory=LossOptions)
    """Axes that differ from the preset."""


class TrainerSection(Section):
    """Optimizer and how a batch is cut."""

    optimizer: Literal["adamw", "adamw_8bit", "sgd"] = "adamw"
    """Optimizer; `adamw_8bit` keeps its two averages in 8 bits."""
    master_weights: Literal["auto", "float32", "stochastic", "none"] = "auto"
    """What keeps small updates of bfloat16 weights: `float32` copies, or `stochastic` rounding; see docs/memory.md."""
    offload_optimizer: bool = False
    """Keep float32 weights, gradients and the optimizer's state in CPU memory, and step there."""
    reference_device: Literal["same", "cpu"] = "same"
    """Where the weights of the KL reference wait; `cpu`: on the GPU only while they score."""
    learning_rate: float | None = Field(default=None, gt=0)
    """Peak learning rate; derived from the model."""
    betas: tuple[float, float] = Field(default=(0.9, 0.95), strict=False)
    """AdamW betas."""
    adam_epsilon: float = Field(default=1e-8, gt=0)
    """AdamW epsilon."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Decoupled weight decay."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Learning rate after the warm-up."""
    warmup_steps: int | None = Field(default=None, ge=0)
    """Optimizer steps of linear warm-up; 10, or the run's length when that is shorter."""
    min_learning_rate_ratio: float = Field(default=0.0, ge=0, le=1)
    """Where linear and cosine end, as a share of the peak."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    """Gradient clip."""
    num_iterations: int = Field(default=1, gt=0)
    """Passes over a batch."""
    optimizer_steps_per_batch: int = Field(default=1, gt=0)
    """Optimizer steps a pass is cut into, by whole groups."""
    row_tokens: int | None = Field(default=None, gt=0)
    """Token budget of a packed row, which is one micro-batch; 1024 on a CPU, 8192 on a GPU, or a whole trajectory if longer."""
    share_prefixes: Literal["auto", "on", "off"] = "auto"
    """Compute the common beginning of a group's samples once a row; `auto`: where it pays by an estimate."""
    num_ranks: int = Field(default=1, gt=0)
    """Processes that train one policy together, each on its share of the rows."""
    parallel: Literal["auto", "single", "ddp", "zero1", "fsdp2", "deepspeed"] = "auto"
    """What the ranks hold: whole copies (`ddp`), the same but for a part of the optimizer's state each (`zero1`), or shards of
    weights, gradients and optimizer state (`fsdp2`: PyTorch's, `deepspeed`: ZeRO-3 of DeepSpeed, a package of its own).
    `auto`: `single` for one rank, `fsdp2` where whole copies don't fit the GPUs by the plan and shards do, else `ddp`."""
    shard_ranks: int | None = Field(default=None, gt=1)
    """With `fsdp2`: ranks that one copy of the weights is cut over; null: all. Fewer, as those of a node: several copies."""
    context_ranks: int = Field(default=1, gt=0)
    """Ranks that the tokens of each row are cut over, for rows too long for one GPU; it divides `num_ranks`."""
    tensor_ranks: int = Field(default=1, gt=0)
    """With `fsdp2` or `ddp`: ranks that heads and feed-forward width of each layer are cut over; it divides `num_ranks`.
    With `ddp` nothing else is cut: the trainer and servers with as many parts can hold one copy (`single_copy`)."""
    sync_every_row: bool = False
    """With `fsdp2`: sum gradients after each row, not once an optimizer step; holds no whole gradients, and sends more."""
    devices: tuple[int, ...] | None = Field(default=None, strict=False)
    """GPUs of the ranks, as numbers within `CUDA_VISIBLE_DEVICES`; null: the first ones."""
    collective_deadline_s: float = Field(default=120.0, gt=0)
    """A rank that the others wait for longer than this ends the run."""
    device: str = "auto"
    """`auto`, `cpu`, `cuda` or `cuda:N`."""
    step_deadline_s: float = Field(default=3600.0, gt=0)
    """A training step, or the export at the end, that takes longer ends the run."""
    threads: int | None = Field(default=None, gt=0)
    """CPU threads of torch; None leaves them alone."""
    activations: Literal["keep", "selective", "full"] = "keep"
    """What the backward pass computes again instead of keeping: nothing, all but products and attention, or whole layers."""
    compile: Literal["auto", "on", "off"] = "auto"
    """Compile the decoder's layers; `auto`: on a GPU."""
    memory: Literal["off", "auto"] = "off"
    """`auto`: on a GPU, `activations`, `row_tokens` and `offload_optimizer` are chosen so that it fits; what is given stays."""
    float32_head: bool = False
    """Compute the logits in float32 from weights that are not."""


class WeightSyncSection(Section):
    """How the engine gets the trainer's weights."""

    mode: Literal["auto", "in_process", "single_copy", "nccl", "lora", "restart"] = "auto"
    """`in_process`: copied inside the driver; `single_copy`: the trainer's weights are views of the engine's, also
    of a server's on its device; `nccl`: sent to servers over a process group (gloo on CPUs); `lora`: adapters as files;
    `restart`: servers start anew from saved weights."""
    every_steps: int = Field(default=1, gt=0)
    """Push every N steps; above 1 the engine lags openly, and old log-probabilities account for it."""
    verify_every: int = Field(default=25, gt=0)
    """Compare checksums at the first push and every N pushes."""
    deadline_s: float = Field(default=60.0, gt=0)
    """A push that takes longer ends the run."""
    max_mismatch: float | None = Field(default=0.3, gt=0)
    """Mean difference of engine and trainer log-probabilities of fresh samples that ends the run; null for no limit."""


class EvaluationSection(Section):
    """Held-out episodes."""

    every_steps: int | None = Field(default=None, gt=0)
    """Evaluate every N steps, beside the start and the end; None for those two only."""
    episodes: int = Field(default=128, ge=0)
    """Held-out tasks; 0 switches evaluation off."""
    samples_per_task: int = Field(default=1, gt=0)
    """Attempts per task, for pass@k."""
    modes: tuple[Literal["sampled", "greedy"], ...] = Field(default=("sampled",), strict=False, min_length=1)
    """`sampled` at the rollout temperature, `greedy`, or both."""


class LoggingSection(Section):
    """What the run folder gets besides metrics."""

    trajectories_every: int = Field(default=1, ge=0)
    """Save the trajectories of every N-th step; 0 for none."""


class LaunchSection(Section):
    """How the processes of a run are started, watched and ended."""

    env: dict[str, str] = Field(default_factory=dict)
    """Environment variables of every role, on top of those that Polyturn sets."""
    stop_grace_s: float = Field(default=20.0, gt=0)
    """Time that a role has to end by itself once the run ends; then it is killed."""
    silence_s: float = Field(default=60.0, gt=0)
    """A role that writes no heartbeat for this long hangs, and ends the run."""


class Recipe(Section):
    """A whole recipe."""

    run: RunSection = Field(default_factory=RunSection)
    model: ModelSection
    data: DataSection = Field(default_factory=DataSection)
    environment: EnvironmentSection
    sandbox: SandboxSection = Field(default_factory=SandboxSection)
    rollout: RolloutSection = Field(default_factory=RolloutSection)
    engine: EngineSection = Field(default_factory=EngineSection)
    algorithm: AlgorithmSection = Field(default_factory=AlgorithmSection)
    trainer: TrainerSection = Field(default_factory=TrainerSection)
    weight_sync: WeightSyncSection = Field(default_factory=WeightSyncSection)
    checkpoint: CheckpointSection = Field(default_factory=CheckpointSection)
    evaluation: EvaluationSection = Field(default_factory=EvaluationSection)
    logging: LoggingSection = Field(default_factory=LoggingSection)
    launch: LaunchSection = Field(default_factory=LaunchSection)


def with_values(recipe: Recipe, section: str, **values: Any) -> Recipe:
    """`recipe` with some values of one section replaced."""
    return recipe.model_copy(update={section: getattr(recipe, section).model_copy(update=values)})
