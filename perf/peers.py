"""What the peers do, written for measuring: a ProgressivePrompts-like loop, and PEFT's prompt tuning.

Each is given the same texts, the same T5 weights and as many prompt rows as our lane has.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

PADDED = 512
"""Positions that ProgressivePrompts pads every input to."""
TARGET_LENGTH, LONG_TARGET_LENGTH = 2, 5
"""Tokens of an answer, the start token included: its settings for AG News and for MNLI, say."""


class ProgressiveLoop:
    """One run the way of ProgressivePrompts: float32, eager, dropout on, padded to 512, validation by generation."""

    def __init__(self, model: Any, rows: int, trained: int, rate: float = 0.3):
        self.model = copy.deepcopy(model).float()
        self.model.requires_grad_(False)
        table = self.model.get_input_embeddings().weight
        drawn = torch.randint(len(table), (rows,), generator=torch.Generator().manual_seed(0))
        vectors = table[drawn.to(table.device)].detach().clone()
        self.prompt, self.old = vectors[:trained].requires_grad_(), vectors[trained:]
        self.optimiser = torch.optim.AdamW([self.prompt], lr=rate, weight_decay=1e-5)

    def _inputs(self, texts: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
        device, rows = self.prompt.device, len(self.prompt) + len(self.old)
        ids = torch.zeros(len(texts), PADDED, dtype=torch.long)
        mask = torch.zeros(len(texts), PADDED, dtype=torch.long)
        for i, text in enumerate(texts):
            ids[i, : len(text)] = torch.tensor(text)
            mask[i, : len(text)] = 1
        words = self.model.get_input_embeddings()(ids.to(device))
        front = torch.cat([self.prompt, self.old]).expand(len(texts), -1, -1)
        embeds = torch.cat([front, words], dim=1)[:, :PADDED]
        ones = torch.ones(len(texts), rows, dtype=torch.long)
        return embeds, torch.cat([ones, mask], dim=1)[:, :PADDED].to(device)

    def step(self, texts: Sequence[Sequence[int]], targets: Sequence[Sequence[int]]) -> None:
        """One optimiser step."""
        self.model.train()
        embeds, mask = self._inputs(texts)
        labels = torch.full((len(texts), TARGET_LENGTH), -100)
        for i, target in enumerate(targets):
            labels[i, : min(len(target), TARGET_LENGTH)] = torch.tensor(target)[:TARGET_LENGTH]
        encoded = self.model.get_encoder()(inputs_embeds=embeds, attention_mask=mask)
        loss = self.model(
            encoder_outputs=encoded, attention_mask=mask, labels=labels.to(embeds.device)
        ).loss
        loss.backward()
        self.optimiser.step()
        self.optimiser.zero_grad()

    def validate(self, texts: Sequence[Sequence[int]], length: int = TARGET_LENGTH) -> Tensor:
        """Answers generated up to that length, the start token included."""
        self.model.eval()
        with torch.no_grad():
            embeds, mask = self._inputs(texts)
            encoded = self.model.get_encoder()(inputs_embeds=embeds, attention_mask=mask)
            found: Tensor = self.model.generate(
                encoder_outputs=encoded, attention_mask=mask, max_length=length
            )
        return found


class PeftLoop:
    """PEFT's prompt tuning in a plain loop, padded to the longest of the batch."""

    def __init__(self, model: Any, rows: int, dtype: torch.dtype, is_causal: bool = False):
        from peft import PromptTuningConfig, PromptTuningInit, get_peft_model

        config = PromptTuningConfig(
            task_type="CAUSAL_LM" if is_causal else "SEQ_2_SEQ_LM",
            num_virtual_tokens=rows,
            prompt_tuning_init=PromptTuningInit.RANDOM,
            num_transformer_submodules=1,
        )
        self.model = get_peft_model(copy.deepcopy(model).to(dtype), config)
        for module in self.model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = (
                    0.0  # as in ours, and also under the Trainer, which switches to training mode
                )
        self.model.eval()
        self.is_causal = is_causal
        trained = [p for p in self.model.parameters() if p.requires_grad]
        device = trained[0].device
        self.optimiser = torch.optim.AdamW(trained, lr=0.3, fused=device.type == "cuda")

    def inputs(
        self, texts: Sequence[Sequence[int]], targets: Sequence[Sequence[int]]
    ) -> dict[str, Tensor]:
        """A batch as the model takes it."""
        whole = [
            [*t, *y] if self.is_causal else list(t) for t, y in zip(texts, targets, strict=True)
        ]
        longest = max(map(len, whole))
        ids = torch.tensor([[*t, *[0] * (longest - len(t))] for t in whole])
        mask = torch.tensor([[1] * len(t) + [0] * (longest - len(t)) for t in whole])
        if self.is_causal:
            labels = [
                [-100] * len(t) + list(y) + [-100] * (longest - len(t) - len(y))
                for t, y in zip(texts, targets, strict=True)
            ]
        else:
            width = max(map(len, targets))
            labels = [[*y, *[-100] * (width - len(y))] for y in targets]
        found = {"input_ids": ids, "attention_mask": mask, "labels": torch.tensor(labels)}
        device = next(self.model.parameters()).device
        return {name: tensor.to(device) for name, tensor in found.items()}

    def step(self, texts: Sequence[Sequence[int]], targets: Sequence[Sequence[int]]) -> None:
        """One optimiser step."""
        self.model(**self.inputs(texts, targets)).loss.backward()
        self.optimiser.step()
        self.optimiser.zero_grad()


def trainer_step_seconds(
    loop: PeftLoop,
    texts: Sequence[Sequence[int]],
    targets: Sequence[Sequence[int]],
    batch: int,
    steps: int,
    folder: str,
) -> float:
    """Seconds of one step of the same model under the Hugging Face Trainer, the first two left out."""
    import time

    from transformers import Trainer, TrainerCallback, TrainingArguments

    rows = [{"ids": t, "target": y} for t, y in zip(texts, targets, strict=True)]
    device = next(loop.model.parameters()).device

    class Clock(TrainerCallback):
        times: list[float] = []  # noqa: RUF012

        def on_step_end(self, args, state, control, **options):
            if device.type == "cuda":
                torch.cuda.synchronize()
            self.times.append(time.perf_counter())

    clock = Clock()
    clock.times = []
    arguments = TrainingArguments(
        output_dir=folder, max_steps=steps + 2, per_device_train_batch_size=batch, learning_rate=0.3,
        report_to=[], save_strategy="no", logging_strategy="no", disable_tqdm=True,
        remove_unused_columns=False, use_cpu=device.type == "cpu", dataloader_pin_memory=False,
    )  # fmt: skip

    def collate(found: list[dict[str, Any]]) -> dict[str, Tensor]:
        made = loop.inputs([r["ids"] for r in found], [r["target"] for r in found])
        return {name: tensor.cpu() for name, tensor in made.items()}

    Trainer(
        model=loop.model,
        args=arguments,
        train_dataset=rows,
        data_collator=collate,
        callbacks=[clock],
    ).train()
    return (clock.times[-1] - clock.times[1]) / (len(clock.times) - 2)
