"""Trains the example model to look things up: less than an hour on two cores, no GPU.

    python examples/tiny-mla/train.py [--out DIR] [--seed N] [--checkpoint FILE]

Two things are learned one after the other. First to *copy*: a random text stands twice in the context,
at changing distances, and the second time has to be predicted. After some hundred steps that becomes
possible at once, by attending to what followed the same bytes the first time. Then *recall*
(`benchmarks/recall.py`): facts in documents, and many questions about them, a turn each. Documents
grow in number and length; a stage ends when enough answers are right. The last one mixes all sizes
while the learning rate falls to nothing.

Every step draws its data from the seed and its own number, and the checkpoint holds the rest, so an
interrupted run goes on where it was: call it again. At the end the recall of held-out worlds is
measured with the weights as they are written (bfloat16).
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from architecture import PAD, initial_model, make_config, write
from torch import Tensor
from torch.nn import functional
from tqdm import tqdm
from transformers import AttentionInterface, DeepseekV3ForCausalLM

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks import recall  # noqa: E402 # from the repository, which is not installed

LEARNING_RATE = 2e-3
LAST_RATE = 0.02  # share of it at the end of the last stage
WARM_UP_STEPS = 100
STEP_TOKENS = 8192
TEXT_WEIGHT = 0.1  # of predicting the documents' own bytes, next to answers
TEXT_SHARE = 0.15  # of these bytes that are looked at in a step
MEMORY = 0.9  # of the running mean that decides when a stage ends
CHECKPOINT_S = 60
TWO_DOCUMENTS = 0.3


@dataclass(frozen=True, slots=True)
class Copying:
    """Random texts of ``bytes`` and their copies."""

    name: str
    bytes: int
    until: float  # share of copied bytes predicted
    least_steps: int = 0
    steps: int | None = None


@dataclass(frozen=True, slots=True)
class Recall:
    """Worlds of any of these sizes. ``steps`` None: until enough answers are right."""

    name: str
    documents: tuple[int, ...]
    facts: tuple[int, ...]
    spare_bytes: tuple[int, int]  # a document's words: from, to
    preamble_bytes: int  # at most
    until: float = 0.93  # share of answers right
    steps: int | None = None


STAGES: tuple[Copying | Recall, ...] = (
    Copying("copying", 32, 0.93),
    Copying("copying longer texts", 64, 0.95),
    Recall("one document", (1,), (2, 4), (20, 60), 20),
    Recall("two documents", (2,), (4, 6), (40, 120), 100),
    Recall("four documents", (2, 4), (4, 8), (60, 240), 300),
    Recall("eight documents", (4, 8), (4, 8, 16), (60, 300), 500, until=0.9),
    Recall("all sizes", (1, 2, 4, 8), (4, 8, 12, 16), (40, 420), 500, steps=450),
)


@dataclass(frozen=True, slots=True)
class Batch:
    """``answers`` [B, T] numbers answers in ``ids`` [B, T] from 1, 0 elsewhere; a copied text is 1."""

    ids: Tensor
    answers: Tensor


@dataclass(slots=True)
class Progress:
    """Where a run is."""

    step: int = 0
    stage: int = 0
    stage_step: int = 0
    right: float = 0.0  # running mean


# --- data ----------------------------------------------------------------------------------------


def draw(stage: Copying | Recall, chance: random.Random) -> Batch:
    """The batch of one step."""
    if isinstance(stage, Copying):
        rows = [_copied(stage.bytes, chance) for _ in range(STEP_TOKENS // (2 * stage.bytes))]
        return _batch(rows)
    documents, facts = chance.choice(stage.documents), chance.choice(stage.facts)
    shape = recall.Shape(
        documents=documents,
        facts=facts,
        document_bytes=20 + facts * recall.FACT_BYTES + chance.randint(*stage.spare_bytes),
        preamble_bytes=0 if chance.random() < 0.3 else chance.randint(1, stage.preamble_bytes),
    )
    asked = min(documents * facts, 24)
    tokens = documents * shape.document_bytes + shape.preamble_bytes + 14 * asked
    worlds = max(1, STEP_TOKENS // tokens)
    return _batch([_dialogue(shape, asked, chance) for _ in range(worlds)])


def _copied(size: int, chance: random.Random) -> tuple[list[int], list[int]]:
    """Random bytes twice, with more before and in between, so that no distance can be learned."""
    alphabet = range(65, 91) if chance.random() < 0.5 else range(32, 127)
    before, between = chance.randrange(size // 2), chance.randrange(size // 2)
    length = (2 * size - before - between) // 2
    text = chance.choices(alphabet, k=length)
    ids = [
        *chance.choices(alphabet, k=before),
        *text,
        *chance.choices(alphabet, k=between),
        *text,
    ]
    copied = [0] * len(ids)
    copied[-length + 3 :] = [1] * (length - 3)  # the first bytes say which text it is
    return ids, copied


def _dialogue(
    shape: recall.Shape, asked: int, chance: random.Random
) -> tuple[list[int], list[int]]:
    """One world, and questions about it one after the other; the answers are numbered."""
    world = recall.world(shape, chance, two_documents=TWO_DOCUMENTS)
    ids, _ = recall.context(world)
    numbers = [0] * len(ids)
    for number, question in enumerate(world.questions[:asked], 1):
        turn = [] if number == 1 else [recall.USER]
        turn += [*question.text.encode(), recall.EOS, recall.ASSISTANT]
        answer = [*question.answer.encode(), recall.EOS]
        ids += turn + answer
        numbers += [0] * len(turn) + [number] * len(answer)
    return ids, numbers


def _batch(rows: Sequence[tuple[list[int], list[int]]]) -> Batch:
    width = max(len(ids) for ids, _ in rows)
    ids = torch.tensor([row + [PAD] * (width - len(row)) for row, _ in rows])
    numbers = torch.tensor([row + [0] * (width - len(row)) for _, row in rows])
    return Batch(ids, numbers)


# --- steps ---------------------------------------------------------------------------------------


def loss_of(
    model: DeepseekV3ForCausalLM, batch: Batch, text: torch.Generator
) -> tuple[Tensor, float]:
    """Mean cross entropy in nats, and the share of answers that are right in every byte."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        hidden = model.model(input_ids=batch.ids, use_cache=False).last_hidden_state[:, :-1]
        targets, wanted = batch.ids[:, 1:], batch.answers[:, 1:] > 0
        logits = model.lm_head(hidden[wanted]).float()
        loss = functional.cross_entropy(logits, targets[wanted])
        some = torch.rand(targets.shape, generator=text) < TEXT_SHARE
        some &= ~wanted & (targets != PAD)
        if bool(some.any()):
            other = model.lm_head(hidden[some]).float()
            loss = loss + TEXT_WEIGHT * functional.cross_entropy(other, targets[some])
    wrong = torch.zeros_like(targets, dtype=torch.bool)
    wrong[wanted] = logits.argmax(-1) != targets[wanted]
    return loss, _share_right(batch.answers[:, 1:], wrong)


def _share_right(answers: Tensor, wrong: Tensor) -> float:
    """An answer with one wrong byte is wrong; copied texts are numbered 1 and counted by bytes."""
    most = int(answers.max())
    if most <= 1:
        return 1.0 - float(wrong[answers > 0].float().mean())
    names = answers + torch.arange(len(answers))[:, None] * (most + 1)
    asked = names[answers > 0].unique()
    missed = names[wrong & (answers > 0)].unique()
    return 1.0 - len(missed) / len(asked)


def learning_rate(progress: Progress, stage: Copying | Recall) -> float:
    """Rises once, and falls in a stage whose length is known."""
    rate = LEARNING_RATE * min(1.0, (progress.step + 1) / WARM_UP_STEPS)
    if stage.steps is not None:
        done = progress.stage_step / stage.steps
        rate *= LAST_RATE + (1 - LAST_RATE) * 0.5 * (1 + math.cos(math.pi * done))
    return rate


def finished(progress: Progress, stage: Copying | Recall) -> bool:
    """Whether the next stage begins."""
    if stage.steps is not None:
        return progress.stage_step >= stage.steps
    return progress.right >= stage.until


class Trainer:
    """Model, optimizer and where they are."""

    def __init__(self, seed: int, checkpoint: Path) -> None:
        self.seed, self.checkpoint = seed, checkpoint
        self.model = initial_model(_config(), seed)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.01
        )
        self.progress = Progress()

    def resume(self) -> None:
        """Go on from the checkpoint, if there is one of this seed."""
        if not self.checkpoint.is_file():
            return
        saved = torch.load(self.checkpoint, weights_only=True)
        if saved["seed"] != self.seed:
            raise SystemExit(f"{self.checkpoint} was made with --seed {saved['seed']}; remove it")
        self.model.load_state_dict(saved["model"])
        self.optimizer.load_state_dict(saved["optimizer"])
        self.progress = Progress(**saved["progress"])

    def save(self) -> None:
        """Write the checkpoint, whole or not at all."""
        self.checkpoint.parent.mkdir(parents=True, exist_ok=True)
        unfinished = self.checkpoint.with_suffix(".unfinished")
        torch.save(
            {
                "seed": self.seed,
                "model": self.model.state_dict(),
                "optimizer": self.optimizer.state_dict(),
                "progress": asdict(self.progress),
            },
            unfinished,
        )
        unfinished.replace(self.checkpoint)

    def step(self, stage: Copying | Recall) -> float:
        """One step; returns the loss in nats."""
        chance = random.Random(f"{self.seed} {self.progress.step}")
        text = torch.Generator().manual_seed(chance.getrandbits(32))
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.progress, stage)
        loss, right = loss_of(self.model, draw(stage, chance), text)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.progress.step += 1
        self.progress.stage_step += 1
        self.progress.right = MEMORY * self.progress.right + (1 - MEMORY) * right
        return loss.item()

    def run(self) -> None:
        """All stages."""
        saved_s = time.monotonic()
        for stage in STAGES[self.progress.stage :]:
            title = f"{self.progress.stage + 1}/{len(STAGES)} {stage.name}"
            with tqdm(total=stage.steps, initial=self.progress.stage_step, desc=title) as bar:
                while not finished(self.progress, stage):
                    loss = self.step(stage)
                    bar.update()
                    bar.set_postfix(loss=f"{loss:.3f}", right=f"{self.progress.right:.3f}")
                    if time.monotonic() - saved_s > CHECKPOINT_S:
                        self.save()
                        saved_s = time.monotonic()
            self.progress.stage += 1
            self.progress.stage_step, self.progress.right = 0, 0.0
            self.save()


def _config():  # transformers' own
    config = make_config()
    config._attn_implementation = "equal_widths"
    return config


def _equal_widths(
    module: torch.nn.Module,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: object,
    scaling: float,
    **_: object,
) -> tuple[Tensor, None]:
    """Causal attention with values padded to the width of keys: PyTorch is fast only with these."""
    width = v.shape[-1]
    v = functional.pad(v, (0, q.shape[-1] - width))
    out = functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling)
    return out[..., :width].transpose(1, 2).contiguous(), None


# --- what it can do ------------------------------------------------------------------------------

EXAMS = (
    recall.Shape(documents=4, facts=8, document_bytes=192, preamble_bytes=0),
    recall.Shape(documents=8, facts=16, document_bytes=256, preamble_bytes=0),
)


@torch.no_grad()
def recalled(model: DeepseekV3ForCausalLM, shape: recall.Shape, questions: int) -> float:
    """Share of questions answered right, one question a prompt, preambles of 0 to 500 bytes."""
    right = 0
    for prompt, answer in _exam(shape, questions):
        ids = torch.tensor([[*prompt.tokens, *answer]])
        logits = model(input_ids=ids, use_cache=False).logits[0, -len(answer) - 1 : -1]
        right += logits.argmax(-1).tolist() == answer
    return right / questions


def _exam(shape: recall.Shape, questions: int) -> Iterator[tuple[recall.Prompt, list[int]]]:
    for number in range(questions):
        chance = random.Random(f"exam {number}")
        shape = recall.Shape(**(asdict(shape) | {"preamble_bytes": chance.randint(0, 500)}))
        world = recall.world(shape, chance)
        yield recall.prompt(world, world.questions[0]), list(world.questions[0].answer.encode())


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the example model.")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent, help="default: here")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--checkpoint", type=Path, default=ROOT / ".train/tiny-mla.pt")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    AttentionInterface.register("equal_widths", _equal_widths)
    trainer = Trainer(options.seed, options.checkpoint)
    trainer.resume()
    trainer.run()
    write(trainer.model, options.out)
    found = {
        f"{exam.documents} documents x {exam.facts} facts": recalled(trainer.model, exam, 400)
        for exam in EXAMS
    }
    print(
        json.dumps(
            {"seed": options.seed, "steps": trainer.progress.step, "recall": found}, indent=1
        )
    )


if __name__ == "__main__":
    main()
