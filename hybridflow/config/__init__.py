"""The schema of every setting: typed dataclasses, set once, that Hydra fills and checks.

A default stands in this package and nowhere else; all schemas are offered here. A field without a default (``MISSING``)
has to be given by the config file or on the command line. Cross-field rules live in ``hybridflow/checks``, which runs
before anything starts.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from omegaconf import MISSING

from hybridflow.config.algorithm import (
    AlgorithmConfig,
    DynamicSamplingConfig,
    PreferenceConfig,
    ReferenceConfig,
    SafetyConfig,
    TeacherConfig,
)
from hybridflow.config.algorithm import CorrectionConfig as CorrectionConfig
from hybridflow.config.base import Settings
from hybridflow.config.data import DataConfig, EngineConfig, RewardConfig
from hybridflow.config.data import JudgeConfig as JudgeConfig
from hybridflow.config.data import RewardComponentConfig as RewardComponentConfig


@dataclass
class ModelConfig(Settings):
    """Which model is trained.

    Attributes:
        path: local Hugging Face folder (config.json, safetensors, tokenizer).
        dtype: ``float32`` or ``bfloat16``: parameters of trainer and rollout alike.
        tokenizer_path: another folder for the tokenizer; empty means ``path``.
    """

    path: str = MISSING
    dtype: str = "float32"
    tokenizer_path: str = ""


@dataclass
class LayoutConfig(Settings):
    """Parallel degrees of one role; the data-parallel degree is what they leave of the pool.

    Attributes:
        tp: tensor-parallel size.
        pp: pipeline-parallel size.
        cp: context-parallel size.
        ep: expert-parallel size: the experts of a layer are spread over this many ranks of a pipeline stage.
        etp: tensor-parallel size of an expert; 0 means ``tp``.
        vpp: virtual pipeline stages of each rank (interleaved 1F1B); 1 is the plain schedule.
    """

    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int = 0
    vpp: int = 1


@dataclass
class PoolConfig(Settings):
    """A set of devices.

    Attributes:
        devices: devices per node, such as ``[4, 4]`` for two nodes of four.
        kind: ``device`` (GPUs where there are any, else shares of cores) or ``cpu`` (processes without a device).
        cores_per_device: CPU cores of each device process; as many threads (rounded) compute in it. 0 shares the
            machine's cores evenly.
        memory_gb: memory of each device in GiB, against which the estimate is held before a run; 0 asks this machine
            where Ray is started on it.
    """

    devices: list[int] = MISSING
    kind: str = "device"
    cores_per_device: float = 0
    memory_gb: float = 0


@dataclass
class RoleConfig(Settings):
    """Where a role lives.

    Attributes:
        pool: name of its pool; roles on one pool share its devices by taking turns.
    """

    pool: str = MISSING
    layout: LayoutConfig = field(default_factory=LayoutConfig)


@dataclass
class OptimizerConfig(Settings):
    """AdamW and its schedule.

    Attributes:
        lr: largest learning rate.
        min_lr: where a decaying schedule ends.
        beta1, beta2: decay of the first and second moments.
        eps: added to the denominator.
        weight_decay: decoupled weight decay of matrices (not of biases and norms).
        clip_grad: largest global gradient norm; 0 turns clipping off.
        warmup_steps: optimizer updates of linear warm-up from 0.
        schedule: ``constant``, ``linear`` or ``cosine`` after the warm-up; the last two are at ``min_lr`` after update
            ``decay_steps``.
        decay_steps: updates over which a linear or cosine schedule decays; 0 means all updates of the run. Every
            schedule counts the updates of its own model.
        distributed: data- and context-parallel ranks share the optimizer's state instead of each holding all of it.
    """

    lr: float = 1e-6
    min_lr: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0
    clip_grad: float = 1.0
    warmup_steps: int = 0
    schedule: str = "constant"
    decay_steps: int = 0
    distributed: bool = True


@dataclass
class LossConfig(Settings):
    """The policy's loss (``hybridflow.algorithms.losses`` and ``objective``; docs/algorithms.md has the formulas).

    Attributes:
        name: ``ppo``, ``gspo``, ``gmpo``, ``cispo``, ``sapo``, ``reinforce``, ``gpg``, ``clip_cov``, ``kl_cov``,
            ``dppo_tv``, ``dppo_kl``, ``sft``, or a function of your own (``package.module:name`` or
            ``path/file.py:name``).
        old_log_probs: what the ratio is taken to: ``log_probs`` (the trainer's, before its updates),
            ``rollout_log_probs``, or ``own``: those of the update's own forward pass. With one update a step these are
            ``log_probs``, and ``actor.log_probs`` asks no device and gives no column: a whole forward pass less.
        clip_low, clip_high: the ratio is clipped to [1 - clip_low, 1 + clip_high].
        dual_clip: lower bound c of the loss for negative advantages (c > 1); 0 turns it off.
        tau_positive, tau_negative: temperatures of SAPO's gate for positive and negative advantages.
        cov_share: share of the tokens that ``clip_cov`` and ``kl_cov`` select.
        cov_low, cov_high: covariances between which ``clip_cov`` draws its tokens.
        cov_kl_coef: weight of the KL of the tokens that ``kl_cov`` selects.
        aggregation: ``token-mean``, ``seq-mean-token-sum``, ``seq-mean-token-mean``, ``seq-mean-token-sum-norm``.
        scale: what ``seq-mean-token-sum-norm`` divides each sequence's sum by, such as ``${rollout.max_tokens}``.
        entropy_coef: weight of the entropy bonus.
        kl_coef: weight of the KL to the reference in the loss; above 0 needs the role ``reference``.
        kl_kind: ``k1``, ``k2``, ``k3``, ``low_var`` (k3) or ``abs`` (Schulman, "Approximating KL Divergence"); with a
            plus (``k3+``) with the gradient of k2.
        options: further settings for a loss of your own, which finds them in ``config.options``.
    """

    name: str = "ppo"
    old_log_probs: str = "log_probs"
    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float = 0.0
    tau_positive: float = 1.0
    tau_negative: float = 1.05
    cov_share: float = 0.0002
    cov_low: float = 1.0
    cov_high: float = 5.0
    cov_kl_coef: float = 1.0
    aggregation: str = "token-mean"
    scale: float = 0.0
    entropy_coef: float = 0.0
    kl_coef: float = 0.0
    kl_kind: str = "k3"
    options: dict[str, Any] = field(default_factory=dict)


@dataclass
class ActorConfig(Settings):
    """Training of the policy.

    Attributes:
        mini_batch_size: rows (over all devices) of one optimizer update; 0 means the whole batch.
        micro_batch_size: rows of one forward on one device.
        micro_batch_tokens: token budget of one forward; above 0 it replaces ``micro_batch_size``. Rows are packed, so
            it is the sum of their tokens.
        epochs: passes over each batch.
        shuffle: order of rows inside a pass: shuffled by the run's seed, or as they came.
        balance: data-parallel ranks get rows of about the same work, for log-probabilities and for each update;
            otherwise neighbouring rows. Results are the same.
        sequence_parallel: with tensor parallelism, ranks share the tokens between their linear layers: less memory.
        recompute: what backward computes again instead of keeping it in memory: ``none``, ``selective`` (inside
            attention) or ``full`` (each layer).
    """

    mini_batch_size: int = 0
    micro_batch_size: int = 8
    micro_batch_tokens: int = 0
    epochs: int = 1
    shuffle: bool = False
    balance: bool = True
    sequence_parallel: bool = True
    recompute: str = "none"
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    loss: LossConfig = field(default_factory=LossConfig)


@dataclass
class CriticConfig(Settings):
    """Training of a critic. Mini-batches, micro-batches and passes are those of ``actor``.

    Attributes:
        path: Hugging Face folder it begins from: a language model, whose new value head begins with zeros, or a
            classifier with one label (a reward model), with its head; empty is ``model.path``.
        clip: largest change of a value per step that still lowers the loss; 0 turns clipping off.
        warmup_steps: first steps of the run in which the critic alone is trained; the actor's learning rate begins
            after them.
    """

    path: str = ""
    clip: float = 0.2
    warmup_steps: int = 0
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)


@dataclass
class SamplingConfig(Settings):
    """How tokens are drawn.

    Attributes:
        temperature: divides the logits; 0 takes the likeliest token.
        top_p: share of probability kept; 1 keeps all.
        top_k: number of tokens kept; 0 keeps all.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0


@dataclass
class RolloutConfig(EngineConfig):
    """Generation by vLLM.

    Attributes:
        n: samples per prompt.
        max_prompt_tokens: longest prompt; see ``data.long_prompts`` for longer ones.
        sync_bucket_mb: memory of each device for slices of weights on their way to other devices, in MiB.
        check_sync: which of the rollout's weights are compared with the trainer's after a sync: ``off``, ``sample``
            (a row of each matrix, another one each time, and all vectors) or ``full``.
    """

    n: int = 8
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    sync_bucket_mb: float = 256.0
    check_sync: str = "sample"


@dataclass
class MemoryConfig(Settings):
    """What leaves a device while actor and rollout take turns on it. Without effect where they have pools of their own.

    Attributes:
        offload: what is not in memory while the rollout generates: ``gradients``; ``optimizer`` (moments and float32
            copies); ``parameters`` of the actor; ``others``, the weights of all other models: reference, teacher,
            critics, reward models. Gradients are dropped, and the actor's parameters are taken back from the rollout's
            weights where these hold all of them; everything else waits in the host's memory, or in a file where the
            device is a CPU.
        keep_rollout: the rollout's weights and KV cache stay in memory while the actor trains.
        share_weights: parameters that are the same for actor and rollout, element for element, are in memory once.
            Updates then reach the rollout at once, so after an update it generates only once its weights were synced.
            Needs ``keep_rollout``, parameters that stay in memory, and ``rollout.enforce_eager``.
        folder: where files of offloaded memory go; empty is the system's folder for temporary files.
    """

    offload: list[str] = field(default_factory=lambda: ["gradients", "parameters"])
    keep_rollout: bool = False
    share_weights: bool = False
    folder: str = ""


@dataclass
class EvaluateConfig(Settings):
    """Evaluation on held-out prompts.

    Attributes:
        every: steps between evaluations; 0 means only at the end.
        at_start: evaluate before the first step.
        size: most prompts per evaluation; 0 means all.
        n: samples per prompt; above 1 pass@k is reported too.
        stop_at: end the run once the evaluated accuracy reaches this; 0 means never.
        metric: what says which evaluation is the best, as ``metrics.jsonl`` names it.
        mode: ``max`` or ``min``: which values of the metric are good.
        patience: end the run after this many evaluations in a row that are no better than the best before; 0 means
            never.
    """

    every: int = 0
    at_start: bool = True
    size: int = 0
    n: int = 1
    sampling: SamplingConfig = field(default_factory=lambda: SamplingConfig(temperature=0.0))
    stop_at: float = 0.0
    metric: str = "evaluate/accuracy"
    mode: str = "max"
    patience: int = 0


@dataclass
class CheckpointConfig(Settings):
    """Saving and resuming.

    Attributes:
        every: steps between checkpoints; 0 means only at the end.
        keep: newest checkpoints kept; 0 keeps all.
        keep_best: save after each evaluation that is the best so far (by ``evaluate.metric``), and keep that checkpoint
            besides; ``<run>/best`` points at its model.
        resume: ``never`` (refuse a run folder that already has a checkpoint), ``auto``, or a checkpoint folder.
    """

    every: int = 0
    keep: int = 2
    keep_best: bool = False
    resume: str = "never"


@dataclass
class TrackingConfig(Settings):
    """What a run shows and keeps besides ``metrics.jsonl``.

    Attributes:
        trackers: any of ``tensorboard``, ``wandb``, ``mlflow``.
        project: name of the project (wandb) or experiment (mlflow).
        rollouts_every: steps between dumps of samples to ``rollouts.jsonl``, where those of each evaluation go too; 0
            dumps none.
        mismatch_limit: largest |rollout - trainer| log-probability that passes without a warning; 0 sets 1e-3 for
            float32 and 1.0 for bfloat16, whose own rounding moves single log-probabilities by half that.
        mismatch_stop: the same, but a larger one ends the run after the step; 0 never.
    """

    trackers: list[str] = field(default_factory=lambda: ["tensorboard"])
    project: str = "hybridflow"
    rollouts_every: int = 1
    mismatch_limit: float = 0.0
    mismatch_stop: float = 0.0


@dataclass
class RayConfig(Settings):
    """The Ray cluster.

    Attributes:
        address: ``auto`` or ``host:port`` joins a running cluster; empty joins the one that the environment's
            RAY_ADDRESS names, or else starts Ray on this machine.
        object_store_gb: memory for objects in GiB, where Ray is started here.
    """

    address: str = ""
    object_store_gb: float = 0.5


@dataclass
class RunConfig(Settings):
    """What every driver has in common.

    Attributes:
        name: folder of the run inside ``runs_dir``.
        runs_dir: parent of all runs' folders.
        steps: training steps.
        seed: of data order, sampling and initialisation.
    """

    name: str = MISSING
    runs_dir: str = "runs"
    steps: int = 100
    seed: int = 0
    model: ModelConfig = field(default_factory=ModelConfig)
    pools: dict[str, PoolConfig] = field(default_factory=dict)
    roles: dict[str, RoleConfig | None] = field(default_factory=dict)
    data: DataConfig = field(default_factory=DataConfig)
    actor: ActorConfig = field(default_factory=ActorConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    evaluate: EvaluateConfig = field(default_factory=EvaluateConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
    ray: RayConfig = field(default_factory=RayConfig)

    @property
    def actor_steps(self) -> int:
        """Steps in which the actor is trained."""
        return self.steps


@dataclass
class SFTConfig(RunConfig):
    """``examples/sft.py``."""


@dataclass
class PairsConfig(RunConfig):
    """What drivers on pairs of a chosen and a rejected answer have in common."""


@dataclass
class RewardModelConfig(PairsConfig):
    """``examples/reward_model.py``; the actor is the reward model in training."""


@dataclass
class DPOConfig(PairsConfig):
    """``examples/dpo.py``."""

    preference: PreferenceConfig = field(default_factory=PreferenceConfig)
    reference: ReferenceConfig = field(default_factory=ReferenceConfig)


@dataclass
class RLConfig(RunConfig):
    """What drivers with rewards have in common."""

    makes: ClassVar[tuple[str, ...] | None] = None
    """Columns that the driver makes for estimators besides scores; None where nobody has said."""

    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    reference: ReferenceConfig = field(default_factory=ReferenceConfig)


@dataclass
class GRPOConfig(RLConfig):
    """``examples/grpo.py``."""

    makes: ClassVar[tuple[str, ...] | None] = ()


@dataclass
class PPOConfig(RLConfig):
    """``examples/ppo.py``."""

    critic: CriticConfig = field(default_factory=CriticConfig)

    @property
    def actor_steps(self) -> int:
        """Those after the critic's warm-up, in which the actor's learning rate begins."""
        return self.steps - self.critic.warmup_steps


@dataclass
class SafeRLHFConfig(PPOConfig):
    """``examples/safe_rlhf.py``.

    Attributes:
        cost: what costs are made of, as ``reward``.
        cost_critic: training of the critic of costs, as ``critic``.
    """

    cost: RewardConfig = field(default_factory=RewardConfig)
    cost_critic: CriticConfig = field(default_factory=CriticConfig)
    safety: SafetyConfig = field(default_factory=SafetyConfig)


@dataclass
class DAPOConfig(GRPOConfig):
    """``examples/dapo.py``."""

    dynamic_sampling: DynamicSamplingConfig = field(default_factory=DynamicSamplingConfig)


@dataclass
class OneStepOffConfig(GRPOConfig):
    """``examples/one_step_off.py`` and ``examples/async_grpo.py``.

    Attributes:
        max_staleness: so many steps before an answer is trained on it may begin, at most: no token of it is drawn by a
            policy that is more updates older than the one that learns from it. 0 waits for each step.
    """

    max_staleness: int = 1


@dataclass
class ReMaxConfig(RLConfig):
    """``examples/remax.py``."""

    makes: ClassVar[tuple[str, ...] | None] = ("baseline_rewards",)


@dataclass
class DistillConfig(RLConfig):
    """``examples/distill.py``."""

    makes: ClassVar[tuple[str, ...] | None] = ("teacher_log_probs",)

    teacher: TeacherConfig = field(default_factory=TeacherConfig)
