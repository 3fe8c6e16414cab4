"""The training loop: data-parallel processes of one thread each, checkpoints, progress.

Matrices are trained by Muon, embeddings and norms by AdamW. A step is a function of the seed and
the weights before it, and a checkpoint holds everything else, so a run that was stopped ends in the
weights of one that was not."""

import json
import os
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional
from transformers import (
    DeepseekV2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kvgraft_lab.testbed import vocabulary
from research.redknot import by_head
from research.testbed import curriculum, mimetic
from research.testbed.batches import TrainingBatch, make_batch
from research.vortex import latent_model

# elsewhere it is many times slower
IN_BFLOAT16 = torch.backends.cpu.get_cpu_capability().startswith("AVX512")
PRECISION = torch.bfloat16 if IN_BFLOAT16 else torch.float32  # of products
RESOLVED_BY = 5  # layers, after which the lens reads what a token means
RESOLVED_WEIGHT = 0.5
END_WEIGHT = 0.1  # of the token that ends an answer
NUM_TOKENS = 3072  # of a batch, per process
SAVE_EVERY, LOG_EVERY = 100, 25
OTHER_RATE = 0.4  # of embeddings and norms, as a share of the matrices'


@dataclass(frozen=True)
class Job:
    """One training run; `directory` holds its checkpoint and log. `until`: stop after this step
    (None: the last). `by_head`: train the bundled model on with local heads; `latent`: with latent
    attention."""

    directory: Path
    seed: int = 0
    num_processes: int = 2
    until: int | None = None
    by_head: bool = False
    latent: bool = False

    @property
    def config(self) -> PreTrainedConfig:
        """Of the model."""
        return latent_model.make_config() if self.latent else make_config()

    @property
    def stages(self) -> tuple[curriculum.Stage, ...]:
        """What it reads."""
        if self.latent:
            return curriculum.LATENT
        return curriculum.BY_HEAD if self.by_head else curriculum.STAGES

    @property
    def num_steps(self) -> int:
        """Of the whole run."""
        return curriculum.num_steps(self.stages)

    @property
    def last_step(self) -> int:
        """Where it stops."""
        return min(self.until or self.num_steps, self.num_steps)

    @property
    def identity(self) -> dict[str, int]:
        """What all parts of one run share."""
        variants = {"by_head": 1} if self.by_head else {"latent": 1} if self.latent else {}
        return {"seed": self.seed, "processes": self.num_processes} | variants

    def checkpoint(self) -> int:
        """The step of its checkpoint, 0 without one.

        Raises:
            ValueError: the directory holds another run.
        """
        found = self.directory / "step.json"
        if not found.exists():
            return 0
        stored = json.loads(found.read_text())
        step = int(stored.pop("step"))
        if stored != self.identity:
            raise ValueError(
                f"{self.directory} holds a run of {stored}, not of {self.identity}: choose another "
                "directory"
            )
        return step


def make_config() -> LlamaConfig:
    """The model: a standard Llama of 4.9 million parameters."""
    return LlamaConfig(
        vocab_size=len(vocabulary.VOCABULARY),
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=4608,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )


def train(
    job: Job, rank: int = 0, on_step: Callable[[int, dict[str, float]], None] | None = None
) -> None:
    """Train from the last checkpoint, or from the start, to the end of the curriculum; one call in
    each process.

    Args:
        on_step: called after each step with its number and, now and then, what the log says of it.
    """
    torch.set_num_threads(1)
    if job.num_processes > 1:
        os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
        dist.init_process_group("gloo", rank=rank, world_size=job.num_processes)
    trainer = _Trainer(job, rank)
    while trainer.step < job.last_step:
        said = trainer.advance()
        if on_step:
            on_step(trainer.step, said)
    trainer.save()
    if job.num_processes > 1:
        dist.destroy_process_group()


class _Trainer:
    def __init__(self, job: Job, rank: int) -> None:
        self.job, self.rank, self.step = job, rank, 0
        self.attention = _Attention()
        ALL_ATTENTION_FUNCTIONS.register("kvgraft_training", self.attention)
        self.model = _starting_model(job)
        self.model.set_attn_implementation("kvgraft_training")
        self.lens: list[Tensor] = []
        layers = self.model.model.layers
        layers[RESOLVED_BY - 1].register_forward_hook(lambda *call: self.lens.append(call[2]))
        self.parameters = list(self.model.parameters())
        self.matrices = [weight for weight in layers.parameters() if weight.dim() == 2]
        kept = {id(weight) for weight in self.matrices}
        self.others = [weight for weight in self.parameters if id(weight) not in kept]
        self.mine = self.matrices[rank :: job.num_processes]  # the costly update is shared out
        self.muon = torch.optim.Muon(
            self.mine, lr=1.0, weight_decay=0.05, adjust_lr_fn="match_rms_adamw"
        )
        self.adam = torch.optim.AdamW(self.others, lr=1.0, betas=(0.9, 0.98), weight_decay=0.0)
        self.right: Counter[str] = Counter()
        self.asked: Counter[str] = Counter()
        self.losses: list[float] = []
        self.lens_losses: list[float] = []
        self._resume()

    def advance(self) -> dict[str, float]:
        """One step; what there is to say of the last ones, if it is time to."""
        stage, rate = _schedule(self.step, self.job.stages)
        self.attention.windowed = self.job.by_head and self.step % by_head.DENSE_EVERY > 0
        batch = make_batch(stage, NUM_TOKENS, (self.job.seed, self.step, self.rank))
        self.lens.clear()
        with torch.autocast("cpu", PRECISION, enabled=IN_BFLOAT16):
            states = self.model.model(
                input_ids=batch.token_ids, position_ids=batch.positions, use_cache=False
            ).last_hidden_state
            logits = self.model.lm_head(states.flatten(0, 1)[batch.answers]).float()  # [answers, V]
            loss = _answer_loss(logits, batch)
            if batch.resolved.numel():
                resolved = self.model.model.norm(self.lens[0].flatten(0, 1)[batch.resolved])
                lens = functional.cross_entropy(
                    self.model.lm_head(resolved).float(), batch.resolved_labels
                )
                self.lens_losses.append(lens.item())
                loss = loss + RESOLVED_WEIGHT * lens
        loss.backward()
        self._count(logits, batch, loss.item())
        self._update(rate)
        self.step += 1
        if self.step % SAVE_EVERY == 0:
            self.save()
        return self._say(stage, rate) if self.step % LOG_EVERY == 0 else {}

    def _update(self, rate: float) -> None:
        self._sum([weight.grad for weight in self.parameters if weight.grad is not None])
        for weight in self.parameters:
            weight.grad.div_(self.job.num_processes)
        torch.nn.utils.clip_grad_norm_(self.others, 1.0)
        for optimizer, lr in ((self.muon, rate), (self.adam, OTHER_RATE * rate)):
            for group in optimizer.param_groups:
                group["lr"] = lr
            optimizer.step()
        mine = {id(weight) for weight in self.mine}
        with torch.no_grad():
            for weight in self.matrices:
                if id(weight) not in mine:
                    weight.zero_()
            self._sum(self.matrices)
        self.model.zero_grad()

    def _sum(self, tensors: list[Tensor]) -> None:
        """Sum over the processes, in place."""
        if self.job.num_processes == 1:
            return
        with torch.no_grad():
            flat = torch.cat([tensor.flatten() for tensor in tensors])
            dist.all_reduce(flat)
            for tensor, part in zip(
                tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True
            ):
                tensor.copy_(part.view_as(tensor))

    def _count(self, logits: Tensor, batch: TrainingBatch, loss: float) -> None:
        self.losses.append(loss)
        for token, allowed, task in zip(
            logits.argmax(-1).tolist(), batch.allowed, batch.answer_tasks, strict=True
        ):
            self.asked[task] += 1
            self.right[task] += token in allowed

    def _say(self, stage: curriculum.Stage, rate: float) -> dict[str, float]:
        said = {"step": self.step, "length": stage.length, "rate": rate}
        said |= {"loss": mean(self.losses), "lens": mean(self.lens_losses)}
        said |= {
            task or "end": self.right[task] / count for task, count in sorted(self.asked.items())
        }
        self.right.clear()
        self.asked.clear()
        self.losses.clear()
        self.lens_losses.clear()
        if self.rank == 0:
            with (self.job.directory / "log.jsonl").open("a") as log:
                log.write(json.dumps({key: round(value, 6) for key, value in said.items()}) + "\n")
        return said

    def save(self) -> None:
        """Write the checkpoint; a run that is stopped meanwhile still finds the one before."""
        if self.job.num_processes > 1:
            dist.barrier()
        _save(
            _optimizer_state(self.muon, self.mine),
            self.job.directory / f"muon-{self.rank}-{self.step}.safetensors",
        )
        if self.rank == 0:
            weights = {
                f"model.{name}": weight.data for name, weight in self.model.named_parameters()
            }
            others = _optimizer_state(self.adam, self.others)
            _save(weights | others, self.job.directory / f"model-{self.step}.safetensors")
        if self.job.num_processes > 1:
            dist.barrier()
        if self.rank == 0:
            (self.job.directory / "step.json").write_text(
                json.dumps({"step": self.step, **self.job.identity})
            )
            for old in self.job.directory.glob("*.safetensors"):
                if int(old.stem.rsplit("-", 1)[1]) < self.step:
                    old.unlink()

    def _resume(self) -> None:
        self.step = self.job.checkpoint()
        if not self.step:
            return
        state = load_file(self.job.directory / f"model-{self.step}.safetensors")
        with torch.no_grad():
            for name, weight in self.model.named_parameters():
                weight.copy_(state[f"model.{name}"])
        _restore(self.adam, self.others, state)
        _restore(
            self.muon,
            self.mine,
            load_file(self.job.directory / f"muon-{self.rank}-{self.step}.safetensors"),
        )


def _starting_model(job: Job) -> PreTrainedModel:
    if job.latent:
        latent = DeepseekV2ForCausalLM(job.config)
        latent_model.initialise(latent)
        return latent
    model = LlamaForCausalLM(job.config)
    if job.by_head:
        by_head.initialise(model)
    else:
        mimetic.initialise(model, job.seed)
    return model


def _schedule(step: int, stages: tuple[curriculum.Stage, ...]) -> tuple[curriculum.Stage, float]:
    """Stage and learning rate of a step."""
    rates = [*(stage.rate for stage in stages[1:]), curriculum.LAST_RATE]
    left = step
    for stage, following in zip(stages, rates, strict=True):
        if left < stage.steps:
            rate = stage.rate + (following - stage.rate) * left / stage.steps
            return stage, rate * min(1.0, (step + 1) / curriculum.WARM_UP_STEPS)
        left -= stage.steps
    raise ValueError(f"step must be below {step - left}, got {step}")


def _answer_loss(logits: Tensor, batch: TrainingBatch) -> Tensor:
    weights = torch.tensor([1.0 if task else END_WEIGHT for task in batch.answer_tasks])
    losses = functional.cross_entropy(logits, batch.answer_labels, reduction="none")
    return (losses * weights).sum() / weights.sum()


class _Attention:
    """Causal attention by batched products: at these sizes faster, forward and backward, than the
    fused kernel. `windowed`: local heads of the model by head see what they keep."""

    def __init__(self) -> None:
        self.windowed = False
        self.masks: dict[tuple[int, ...], Tensor] = {}

    def __call__(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: object,
        scaling: float, **_: object,
    ) -> tuple[Tensor, None]:  # fmt: skip
        batch, heads, length = query.shape[:3]
        kv_heads = key.shape[1]
        group = heads // kv_heads
        mask = self._mask(module.layer_idx, length, group, batch)
        rows = (query * scaling).reshape(batch * kv_heads, group * length, -1).to(PRECISION)
        key, value = (x.reshape(batch * kv_heads, length, -1).to(PRECISION) for x in (key, value))
        weights = torch.baddbmm(mask, rows, key.transpose(1, 2)).softmax(-1, dtype=PRECISION)
        return torch.bmm(weights, value).view(batch, heads, length, -1).transpose(1, 2), None

    def _mask(self, layer: int, *shape: int) -> Tensor:
        """By layer and (length, group, batch); all layers but the first are alike, and only one
        length is kept."""
        key = (*shape, min(layer, 1)) if self.windowed else shape[:2]
        if key not in self.masks:
            self.masks = {known: mask for known, mask in self.masks.items() if known[0] == shape[0]}
            mask = by_head.mask(layer, *shape) if self.windowed else _causal_mask(*shape[:2])
            self.masks[key] = mask.to(PRECISION)
        return self.masks[key]


def _causal_mask(length: int, group: int) -> Tensor:
    return torch.full((length, length), float("-inf")).triu_(1).repeat(group, 1)


def _optimizer_state(optimizer: torch.optim.Optimizer, weights: list[Tensor]) -> dict[str, Tensor]:
    return {
        f"optimizer.{number}.{name}": value
        for number, weight in enumerate(weights)
        for name, value in optimizer.state[weight].items()
    }


def _restore(
    optimizer: torch.optim.Optimizer, weights: list[Tensor], state: dict[str, Tensor]
) -> None:
    for key, value in state.items():
        if key.startswith("optimizer."):
            _, number, name = key.split(".")
            optimizer.state[weights[int(number)]][name] = value


def _save(tensors: dict[str, Tensor], path: Path) -> None:
    save_file({name: tensor.detach().contiguous() for name, tensor in tensors.items()}, path)
